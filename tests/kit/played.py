"""A broker without sockets, files or clock: the server's part is played in memory, step by step.

Its subclasses say who the clients are, and when it writes, reads and tells them. The one rule: the
broker is the real one; the journal is `tests.fuzz.disk.Disk`, which knows what commits tell and
nothing else.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.clients.outbox import Outbox
from mqks.broker.spine.log.full_disk import take_settled
from mqks.broker.spine.log.pending import Batch, ErrorRecord, Run
from mqks.broker.spine.queue.paging import page_in
from mqks.broker.spine.queue.shared import Fetch, Place
from mqks.errors import DiskFull
from mqks.server.cron import next_tick
from mqks.settings import Settings
from tests.fuzz.disk import Disk, DiskFacts

ALL = 1 << 30


class Played:
    """`calls_a_turn`: how often a turn may look at the time before it is over, 0 for as often as
    it likes."""

    def __init__(self, settings: Settings, disk: Disk | None = None, calls_a_turn: int = 0) -> None:
        self.settings = settings
        self.calls_a_turn = calls_a_turn
        self.disk = disk or Disk()
        self.now_us = 1_000_000_000
        self._error_ids = count(1)
        self.crash()

    @property
    def wall_us(self) -> int:
        return self.now_us

    def crash(self) -> None:
        """What was not written is gone, and so are the clients."""
        self.broker = Broker(
            self.settings,
            clock=lambda: self.now_us / 1e6,
            now_us=lambda: self.wall_us,
            new_error_id=lambda: (f"{next(self._error_ids):024x}", 0),
            on_error=self.refused,
            facts=DiskFacts(self.disk),
            next_tick=next_tick,
        )
        self.intake = Intake(self.broker)
        if self.calls_a_turn:
            ticks = count()
            self.broker.turns.clock = lambda: float(next(ticks))
            self.broker.turns.chunk_s = float(self.calls_a_turn)
        self.in_flight: list[Batch] = []
        """One at the most."""
        self.pages: list[tuple[Place, int | None, list[Run]]] = []
        self.fetched: list[tuple[Fetch, dict[int, bytes]]] = []
        self.disk.recover(self.broker)

    def refused(self, record: ErrorRecord) -> bool:
        return True

    def timed(self, call: Callable[..., object], *args: Any) -> None:
        """A call of the broker that may take its time."""
        call(*args)

    # -- clients

    def hear(self) -> list[Outbox]:
        """All take what they were told; who was told something."""
        touched, self.broker.flow.touched = self.broker.flow.touched, []
        for connection in touched:
            connection.touched = False
            data = b"".join(connection.outbox)
            connection.outbox.clear()
            connection.outbox_bytes = 0
            self.got(connection, data)
        return touched

    def got(self, connection: Outbox, data: bytes) -> None:
        """It was told this."""

    # -- writing

    def write(self, batch: Batch) -> None:
        self.disk.write(batch.entry)
        self.timed(self.broker.answers.committed, batch)

    def take(self) -> None:
        """Begin to write what is pending."""
        if not self.in_flight and not self.broker.unwritable and self.broker.pending:
            self.in_flight.append(self.broker.pending.take())

    def land(self) -> None:
        """What is under way has been written."""
        if self.in_flight:
            self.write(self.in_flight.pop())

    def fail(self) -> None:
        """What is under way could not be written, and is tried again."""
        if self.in_flight:
            self.timed(self.broker.pending.put_back, self.in_flight.pop())

    def commit(self) -> None:
        """All of it; on a full disk what is settled."""
        self.land()
        pending = self.broker.pending
        if not self.broker.unwritable:
            while pending:
                self.write(pending.take())
        elif pending.waiters:
            self.write(take_settled(pending))
            pending.put_back(pending.take(whole=True))

    def fill(self) -> None:
        """The disk is full."""
        broker, full = self.broker, DiskFull("the disk is full")
        if broker.unwritable:
            return
        batches = [broker.pending.take(whole=True), *self.in_flight]
        self.in_flight = []
        broker.unwritable = str(full)
        for batch in batches:
            self.timed(partial(broker.answers.failed, for_room=True), batch, full)
            broker.pending.put_back(batch)

    def make_room(self) -> None:
        if self.broker.unwritable:
            self.write(self.broker.pending.take(whole=True))
            self.broker.unwritable = ""

    # -- reading

    def fetch(self) -> None:
        """Messages that are wanted from disk are read; the answers are on their way."""
        shared = self.broker.shared
        fetches, shared.wanted.fetches = shared.wanted.fetches, []
        for fetch in fetches:
            there = fetch.queue.id in self.disk.queues
            lines = self.disk.fetch(fetch.queue.id, fetch.numbers) if there else {}
            self.fetched.append((fetch, lines))

    def read(self) -> None:
        """The same with pages besides."""
        self.fetch()
        shared = self.broker.shared
        wanted, shared.wanted.pages = shared.wanted.pages, []
        for queue in wanted:
            first = queue.order.page_first
            is_there = first is not None and queue.id in self.disk.queues
            self.pages.append((queue, first, self.disk.page(queue.id, first) if is_there else []))

    def answer(self, most: int = 1) -> None:
        """So many answers of each kind come, the oldest first."""
        pages, self.pages = self.pages[:most], self.pages[most:]
        for queue, first, runs in pages:
            self.timed(page_in, queue, first, runs)
        fetched, self.fetched = self.fetched[:most], self.fetched[most:]
        for fetch, lines in fetched:
            if not fetch.queue.deleted:
                self.broker.turns.begin()
                self.timed(fetch.then, lines)
