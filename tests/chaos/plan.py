"""What happens in each life of a server, from the seed: its settings, who plays, how it ends.

The one rule: nothing here knows what happened before, so that a life follows from seed and number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

KIB, MIB = 1024, 1024 * 1024


@dataclass(frozen=True, slots=True)
class LifePlan:
    seed: int
    number: int
    flags: dict[str, str | int | float]
    events: int
    """After about so many replies and deliveries it ends."""
    kill: bool
    """By SIGKILL, else by SIGTERM."""
    breaks: bool
    """Clients reset their connections now and then; without, more is certain."""
    full: bool
    """The database has hardly any room."""
    limited: bool
    """Queues may have few messages."""
    big: bool
    """Some messages have a megabyte."""
    backlog: int
    """Publishers rest while a queue has more messages."""
    workers: int
    takers: int
    publishers: int
    readers: int
    shared: bool
    """Some workers use the same consumer id."""
    room: int
    """Bytes that the database may grow, where it is full."""
    ward: bool
    """Queues with policies are played with."""
    forge: bool
    """Orders in order by key are worked on in transactions."""
    renting: bool
    """Messages are leased."""
    desk: bool
    """Unique messages, jobs and batches are played with."""
    hurried: bool
    """The server's turns are short."""

    @property
    def errors(self) -> bool:
        """Requests that are right may be refused."""
        return self.full or self.limited


def plan(seed: int, number: int) -> LifePlan:
    rng = random.Random(f"{seed} {number}")
    full = rng.random() < 0.08
    limited = not full and rng.random() < 0.1
    backlog = rng.choice([200, 1000, 3000])
    flags: dict[str, str | int | float] = {
        "synchronous": rng.choice(["full", "normal", "off"]),
        "ballast_bytes": rng.choice([0, 0, 64 * KIB, 16 * MIB] if rng.random() < 0.1 else [0]),
        "disk_free_bytes_min": 0,
        "drain_timeout_s": 1,
        "wal_checkpoint_pages": rng.choice([1, 10, 250, 250, 4000]),
        "memory_bytes": rng.choice([0, 4 * KIB, 200 * KIB, 512 * MIB, 512 * MIB]),
        "batch_records_max": rng.choice([1, 50, 16_384, 16_384]),
        "batch_bytes_max": rng.choice([1, 64 * KIB, 4 * MIB, 4 * MIB]),
        "unacked_bytes_max": rng.choice([MIB, 256 * MIB, 256 * MIB, 256 * MIB]),
        "prefetch_max": rng.choice([1, 7, 100, 100_000, 100_000]),
        "delivery_pause_bytes": rng.choice([1, 4 * KIB, MIB, MIB]),
        "output_buffer_bytes_max": rng.choice([MIB, 16 * MIB]),
        "line_bytes_max": MIB,
        "uvloop": rng.choice(["true", "true", "false"]),
        "errors_kept_max": rng.choice([0, 10, 1000]),
    }
    if limited:
        flags["queue_messages_max"] = rng.choice([50, 300])
    return LifePlan(
        seed,
        number,
        flags,
        events=rng.choice([300, 2000, 4000, 8000, 16_000]),
        kill=rng.random() < 0.8,
        breaks=rng.random() < 0.4,
        full=full,
        limited=limited,
        big=rng.random() < 0.15,
        backlog=backlog,
        workers=rng.choice([0, 1, 1, 2]),
        takers=rng.choice([0, 1, 2]),
        publishers=rng.choice([1, 2, 3]),
        readers=rng.choice([0, 1, 2]),
        shared=rng.random() < 0.5,
        room=rng.choice([64 * KIB, 512 * KIB]),
        ward=rng.random() < 0.6 and not full,
        hurried=rng.random() < 0.3,
        forge=rng.random() < 0.7 and not full and not limited,
        renting=rng.random() < 0.7 and not full and not limited,
        desk=rng.random() < 0.7 and not full and not limited,
    )
