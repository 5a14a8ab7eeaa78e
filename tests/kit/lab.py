"""Queues with policies, driven step by step: clocks that are set, commits, pages and fetches that
come late or not at all, a full disk, crashes.

The one rule: whatever the order of steps, each durable message is in exactly one place.
"""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Outbox
from mqks.settings import Settings
from tests.fuzz.invariants import check, check_counts, check_disk, memory_bytes, require
from tests.kit.played import Played

WALL_US = 1_790_000_000_000_000
_ENDLESS = 20_000


class Lab(Played):
    """`memory_bytes` 0: what is written is on disk only."""

    def __init__(self, memory_bytes: int = 0, calls_a_turn: int = 0, **settings: Any) -> None:
        self.wall_ahead_us = WALL_US
        super().__init__(Settings(memory_bytes=memory_bytes, **settings), calls_a_turn=calls_a_turn)

    @property
    def wall_us(self) -> int:
        return self.now_us + self.wall_ahead_us

    def crash(self) -> None:
        self.connections: dict[str, Connection] = {}
        self.replies: list[bytes] = []
        super().crash()
        self.broker.policies.reload([])

    # -- clients

    def send(self, who: str, *lines: bytes) -> None:
        """Unless the server would not read from this one now."""
        connection = self.connections.get(who)
        if connection is None:
            connection = self.connections[who] = self.broker.connect(who, local=True)
        if not connection.overrun:
            self.intake.receive(connection, b"".join(line + b"\n" for line in lines))
            self.hear()

    def end(self, who: str) -> None:
        connection = self.connections.get(who)
        if connection is not None and not connection.overrun:
            del self.connections[who]
            self.broker.disconnect(connection)
            self.hear()

    def do(self, who: str, *lines: bytes) -> None:
        """Send, and let all that follows of it be done."""
        self.send(who, *lines)
        self.rest()

    def wait(self, seconds: float) -> None:
        self.tick(seconds)
        self.rest()

    def ends(self) -> list[bytes]:
        """The first two words of the replies since the last look."""
        told = [b" ".join(line.split(b" ")[:2]) for line in self.replies]
        self.replies.clear()
        return told

    def delivered(self, to: bytes = b"") -> list[bytes]:
        """Ids of the messages that came since the last look, or that this consumer got."""
        start = to + b" ok " if to else b""
        came = [line for line in self.replies if b" event=" in line and line.startswith(start)]
        self.replies.clear()
        return [line.split(b" ")[2] for line in came]

    def stats(self, what: str = "") -> Any:
        self.do("watcher", f"x stats {what}".strip().encode())
        return json.loads(self.replies.pop().removeprefix(b"x ok "))

    def timed(self, call: Callable[..., object], *args: Any) -> None:
        call(*args)
        self.hear()

    def got(self, connection: Outbox, data: bytes) -> None:
        self.replies += data.splitlines()

    # -- what the server does

    def work(self) -> None:
        self.broker.go_on()
        for connection in [*self.connections.values()]:
            if connection.overrun and not connection.works:
                self.intake.receive(connection, b"")
        self.hear()

    def tick(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)
        self.broker.schedule.run_due(self.broker.turns)
        self.hear()

    @property
    def is_at_rest(self) -> bool:
        broker = self.broker
        due_s = broker.schedule.next_s()
        return not (
            broker.has_work
            or broker.shared.wanted.fetches
            or broker.shared.wanted.pages
            or self.pages
            or self.fetched
            or self.in_flight
            or (broker.pending if not broker.unwritable else broker.pending.waiters)
            or any(each.overrun for each in self.connections.values())
            or (due_s is not None and due_s <= self.now_us / 1e6)
        )

    def rest(self) -> None:
        """Everything that can be done now is done."""
        for _ in range(_ENDLESS):
            if self.is_at_rest:
                return
            self.broker.schedule.run_due(self.broker.turns)
            self.work()
            self.read()
            self.answer()
            self.commit()
        raise AssertionError("it never comes to rest")

    # -- what must hold

    def check(self) -> None:
        queues = self.broker.queues.values()
        for queue in queues:
            check_counts(queue)
        used = sum(map(memory_bytes, queues))
        require(self.broker.shared.memory.used == used, f"{used} bytes are used")
        if self.is_at_rest and not self.broker.unwritable:
            check(self.broker)
        working = self.broker.turns or any(each.works for each in self.connections.values())
        if not (self.broker.pending or self.in_flight or working):
            check_disk(self.broker, self.disk, [fetch for fetch, _ in self.fetched])

    def messages(self) -> Counter[bytes]:
        """Ids of all that is on disk."""
        return Counter(
            line[: line.index(b" ")]
            for queue in self.disk.queues.values()
            for line in queue.lines.values()
        )

    def lines(self, name: bytes) -> list[bytes]:
        return [
            line for _, line in sorted(self.disk.queues[self.broker.queues[name].id].lines.items())
        ]
