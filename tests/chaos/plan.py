"""What happens in each life of a server, from the seed: its settings, who plays, how it ends.

The one rule: nothing here knows what happened before, so that a life follows from seed and number.
"""

from __future__ import annotations

import random

KIB, MIB = 1024, 1024 * 1024


class LifePlan:
    def __init__(self, seed: int, number: int) -> None:
        self.seed, self.number = seed, number
        rng = random.Random(f"{seed} {number}")
        self.full = rng.random() < 0.08
        """The database has hardly any room."""
        self.limited = not self.full and rng.random() < 0.1
        """Queues may have few messages."""
        self.backlog = rng.choice([200, 1000, 3000])
        """Publishers rest while a queue has more messages."""
        self.flags: dict[str, str | int | float] = {
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
        if self.limited:
            self.flags["queue_messages_max"] = rng.choice([50, 300])
        self.events = rng.choice([300, 2000, 4000, 8000, 16_000])
        """After about so many replies and deliveries it ends."""
        self.kill = rng.random() < 0.8
        """By SIGKILL, else by SIGTERM."""
        self.breaks = rng.random() < 0.4
        """Clients reset their connections now and then; without, more is certain."""
        self.big = rng.random() < 0.15
        """Some messages have a megabyte."""
        self.workers = rng.choice([0, 1, 1, 2])
        self.takers = rng.choice([0, 1, 2])
        self.publishers = rng.choice([1, 2, 3])
        self.readers = rng.choice([0, 1, 2])
        self.shared = rng.random() < 0.5
        """Some workers use the same consumer id."""
        self.room = rng.choice([64 * KIB, 512 * KIB])
        """Bytes that the database may grow, where it is full."""
        self.scenes = {"ward"} if rng.random() < 0.6 and not self.full else set[str]()
        """Those that are played."""
        self.hurried = rng.random() < 0.3
        """The server's turns are short."""
        for name in ("forge", "renting", "desk"):
            if rng.random() < 0.7 and not self.errors:
                self.scenes.add(name)

    @property
    def errors(self) -> bool:
        """Requests that are right may be refused."""
        return self.full or self.limited
