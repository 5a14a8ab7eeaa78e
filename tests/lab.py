"""Queues with policies, driven step by step: clocks that are set, commits, pages and fetches that
come late or not at all, a full disk, crashes.

The broker is the real one; the journal is `tests.fuzz.disk.Disk`, which knows what commits tell and
nothing else. The one rule: whatever the order of steps, each durable message is in exactly one
place.
"""

from collections import Counter
from itertools import count

from mqks.broker.broker import Broker
from mqks.broker.clients.connection import Connection
from mqks.broker.log.pending import Batch, Run
from mqks.broker.queue.queue import Queue
from mqks.broker.requests.intake import Intake
from mqks.broker.shared import Fetch
from mqks.errors import DiskFull
from mqks.settings import Settings
from tests.fuzz.disk import Disk, DiskFacts
from tests.fuzz.invariants import check, check_counts, check_disk, memory_bytes, require

WALL_US = 1_790_000_000_000_000
_ENDLESS = 20_000


class Lab:
    """`memory_bytes` 0: what is written is on disk only. `calls_a_turn`: how often a turn may look
    at the time before it is over, 0 for as often as it likes."""

    def __init__(self, memory_bytes: int = 0, calls_a_turn: int = 0) -> None:
        self.settings = Settings(memory_bytes=memory_bytes)
        self.calls_a_turn = calls_a_turn
        self.disk = Disk()
        self.now_us = 1_000_000_000
        self.wall_ahead_us = WALL_US
        self._errors = count()
        self.replies: list[bytes] = []
        self.crash()

    @property
    def wall_us(self) -> int:
        return self.now_us + self.wall_ahead_us

    def crash(self) -> None:
        """What was not written is gone."""
        self.broker = Broker(
            self.settings,
            clock=lambda: self.now_us / 1e6,
            now_us=lambda: self.wall_us,
            new_error_id=lambda: (f"{next(self._errors):024x}", 0),
            on_error=lambda record: True,
        )
        if self.calls_a_turn:
            ticks = count()
            self.broker.turns.clock = lambda: float(next(ticks))
            self.broker.turns.chunk_s = float(self.calls_a_turn)
        self.broker.shared.facts = DiskFacts(self.disk)
        self.intake = Intake(self.broker)
        self.connections: dict[str, Connection] = {}
        self.in_flight: list[Batch] = []
        self.pages: list[tuple[Queue, int | None, list[Run]]] = []
        self.fetched: list[tuple[Fetch, dict[int, bytes]]] = []
        self.replies = []
        self.disk.recover(self.broker)
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

    def hear(self) -> None:
        for connection in self.broker.shared.touched:
            connection.touched = False
            self.replies += b"".join(connection.outbox).splitlines()
            connection.outbox.clear()
            connection.outbox_bytes = 0
        self.broker.shared.touched = []

    # -- what the server does

    def work(self) -> None:
        self.broker.go_on()
        for connection in [*self.connections.values()]:
            if connection.overrun and not connection.works:
                self.intake.receive(connection, b"")
        self.hear()

    def take(self) -> None:
        if not self.in_flight and not self.broker.unwritable and self.broker.pending:
            self.in_flight.append(self.broker.pending.take())

    def write(self) -> None:
        if self.in_flight:
            batch = self.in_flight.pop()
            self.disk.write(batch.entry)
            self.broker.committed(batch)
            self.hear()

    def fail(self) -> None:
        if self.in_flight:
            self.broker.pending.put_back(self.in_flight.pop())

    def commit(self) -> None:
        self.write()
        if self.broker.unwritable:
            self.commit_settled()
            return
        while self.broker.pending:
            self.take()
            self.write()

    def commit_settled(self) -> None:
        if self.broker.unwritable and self.broker.pending.waiters:
            batch = self.broker.pending.take_settled()
            self.disk.write(batch.entry)
            self.broker.committed(batch)
            self.broker.pending.put_back(self.broker.pending.take(whole=True))
            self.hear()

    def fill(self) -> None:
        """The disk is full."""
        broker, full = self.broker, DiskFull("the disk is full")
        if broker.unwritable:
            return
        batches = [broker.pending.take(whole=True), *self.in_flight]
        self.in_flight = []
        broker.unwritable = str(full)
        for batch in batches:
            broker.failed(batch, full)
            broker.pending.put_back(batch)
        self.hear()

    def make_room(self) -> None:
        if self.broker.unwritable:
            batch = self.broker.pending.take(whole=True)
            self.disk.write(batch.entry)
            self.broker.committed(batch)
            self.broker.unwritable = ""
            self.hear()

    def read(self) -> None:
        """What is wanted from disk is read; the answers are on their way."""
        shared = self.broker.shared
        fetches, shared.fetches = shared.fetches, []
        for fetch in fetches:
            there = fetch.queue.id in self.disk.queues
            lines = self.disk.fetch(fetch.queue.id, fetch.numbers) if there else {}
            self.fetched.append((fetch, lines))
        wanted, shared.page_requests = shared.page_requests, []
        for queue in wanted:
            first = queue.lane.page_first
            is_there = first is not None and queue.id in self.disk.queues
            self.pages.append((queue, first, self.disk.page(queue.id, first) if is_there else []))

    def answer(self) -> None:
        """The oldest answer of each kind comes."""
        if self.pages:
            queue, first, runs = self.pages.pop(0)
            queue.page_in(first, runs)
        if self.fetched:
            fetch, lines = self.fetched.pop(0)
            if not fetch.queue.deleted:
                self.broker.turns.begin()
                fetch.then(lines)
        self.hear()

    def tick(self, seconds: float) -> None:
        self.now_us += round(seconds * 1e6)
        self.broker.expire()
        self.hear()

    @property
    def is_at_rest(self) -> bool:
        broker = self.broker
        due_s = broker.schedule.next_s()
        return not (
            broker.has_work
            or broker.shared.fetches
            or broker.shared.page_requests
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
            self.broker.expire()
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
