"""Batches: when all messages of a batch are acked or dead, another one is published.

    open_batch night publish report.make night          a row
    publish --batch=night row.import 1                   living: 1, total: 1
    close_batch night
    ack …                                                living: 0: report.make, and no row any more

The one rule: the message that follows and the end of the row are in one commit, with the last ack
or behind it. Of a row only what has come and what has died is stored, as absolute numbers; a start
counts the living by their marks, so a batch of which none is left ends then.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple
from urllib.parse import quote_from_bytes

from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.publishing import Publishing
from mqks.broker.spine.routing.singles import Single, single
from mqks.errors import BadRequest, LimitExceeded, SchemaTooNew
from mqks.limits import BATCH_BYTES, BATCH_ENDS_MAX, GROUPS_QUEUES
from mqks.protocol.requests import ACTIONS, Batching, Publish, shown
from mqks.settings import Settings


class BatchRow(NamedTuple):
    """What is stored of a batch. Times are microseconds since 1970."""

    number: int
    """In the marks of its messages; never used again while one of them is alive."""
    opened_us: int = 0
    expires_us: int = 0
    then: str = ""
    """Flags, event and data of what is published when all are done; empty: nothing is."""
    on_dead: str = ""
    """That of what is published instead if one of them has died; empty: `then` is."""
    total: int = 0
    """Messages that were published with it, one for each queue."""
    dead: int = 0
    closed: bool = False

    def wanted(self, line: str) -> Publish:
        found: Publish = ACTIONS[b"publish"].parse(line.encode("utf-8", "surrogateescape"), 0)
        return found

    @property
    def publishes(self) -> list[Publish]:
        """What may follow it."""
        return [self.wanted(line) for line in (self.then, self.on_dead) if line]

    @classmethod
    def parse(cls, name: bytes, stored: str) -> "BatchRow":
        """Raises SchemaTooNew."""
        try:
            return cls(**json.loads(stored))
        except TypeError:
            raise SchemaTooNew(f"the batch {shown(name)} is of a newer mqks: use that") from None

    def told(self, name: bytes, living: int, running: int) -> dict[str, Any]:
        """As `batch` tells it."""
        events = [
            self.wanted(line).event.decode("utf-8", "surrogateescape") if line else None
            for line in (self.then, self.on_dead)
        ]
        return {
            "name": name.decode("utf-8", "surrogateescape"),
            "total": self.total,
            "waiting": living - running,
            "running": running,
            "done": self.total - living - self.dead,
            "dead": self.dead,
            "closed": self.closed,
            "then": events[0],
            "on_dead": events[1],
            "opened_us": self.opened_us,
            "expires_us": self.expires_us,
        }

    def listed(self, name: bytes, living: int, running: int) -> dict[str, Any]:
        """As `batches` tells it."""
        what = {"publish": self.then or None, "publish_on_dead": self.on_dead or None}
        return self.told(name, living, running) | what


class LiveBatch:
    """A batch that has not ended, and how many of its messages are alive."""

    __slots__ = ("is_ending", "living", "name", "row")

    def __init__(self, name: bytes, row: BatchRow) -> None:
        self.name, self.row = name, row
        self.living = 0
        self.is_ending = False
        """What follows is on its way to its queues."""

    @property
    def size(self) -> int:
        return BATCH_BYTES + len(self.name) + len(self.row.then) + len(self.row.on_dead)


class Batches:
    def __init__(
        self, settings: Settings, shared: Shared, bindings: Bindings, publishing: Publishing
    ) -> None:
        self.rows: dict[bytes, LiveBatch] = {}
        self.bytes = 0
        """Approximate length of all rows."""
        self.expired = self.ended = 0
        """Since the start."""
        self._settings = settings
        self._by_number: dict[int, LiveBatch] = {}
        self._next = 1
        self._changed: dict[LiveBatch, None] = {}
        """Their rows are not in the pending entry yet."""
        self._ending: dict[LiveBatch, None] = {}
        """Those that may have ended."""
        self._is_ending_rest = False
        self._expiries: list[tuple[int, int]] = []
        """A heap of times and numbers, also of batches that have ended."""
        self._alarm = Alarm(shared.schedule, self._expire, dated=True, what="batches that expire")
        self._schedule, self._pending = shared.schedule, shared.pending
        self._turns, self._notices = shared.turns, shared.owner.notices
        self._bindings, self._publishing = bindings, publishing
        shared.pending.members = self

    # -- start

    def restore(self, rows: Mapping[bytes, str]) -> None:
        """Before the queues, which tell of their members. Raises SchemaTooNew."""
        for name, row in rows.items():
            self._add(LiveBatch(name, BatchRow.parse(name, row)))

    def start(self) -> None:
        """After recovery."""
        for batch in self.rows.values():
            self._look(batch)
        self._end_later()

    # -- requests

    def name_of(self, number: int) -> bytes:
        """That of the batch with this number; empty if there is none."""
        batch = self._by_number.get(number)
        return b"" if batch is None else batch.name

    def found(self, name: bytes) -> LiveBatch | None:
        """The batch of this name; none while it ends."""
        batch = self.rows.get(name)
        return None if batch is None or batch.is_ending else batch

    def open(self, wanted: Batching) -> None:
        """Open a batch, or set what follows one that is open."""
        batch, line = self.rows.get(wanted.name), wanted.line.decode("utf-8", "surrogateescape")
        if batch is not None and (batch.row.closed or wanted.restored is not None):
            what = "is closed" if batch.row.closed else "exists: --restored is for a new one"
            raise BadRequest(f"open_batch: the batch {shown(wanted.name)} {what}")
        if batch is None:
            most = self._settings.batches_max
            if len(self.rows) >= most:
                reason = f"the limit of {most} batches is reached (batches_max)"
                raise LimitExceeded("batches_max", reason)
            now_us = self._schedule.wall_us()
            for_us = wanted.for_us or round(self._settings.batch_expiry_s * 1e6)
            batch = LiveBatch(wanted.name, BatchRow(self._next, now_us, now_us + for_us))
            done, dead = wanted.restored or (0, 0)
            batch.row = batch.row._replace(total=done + dead, dead=dead)
        row, old = batch.row, batch.size if batch.name in self.rows else 0
        if wanted.publish is not None:
            row = row._replace(on_dead=line) if wanted.on_dead else row._replace(then=line)
        more = LiveBatch(batch.name, row).size - old
        most = self._settings.batches_bytes_max
        if self.bytes + more > most:
            reason = f"batches use {self.bytes} of {most} bytes; {more} more are too many"
            raise LimitExceeded("batches_bytes_max", f"{reason} (batches_bytes_max)")
        if batch.name not in self.rows:
            batch.row = row
            self._add(batch)
            self._change(batch)
        elif row != batch.row:
            batch.row, self.bytes = row, self.bytes + more
            self._change(batch)

    def close(self, name: bytes, *, discard: bool) -> int:
        """Let a batch end when all of its messages are done, or forget it; return how many there
        were."""
        batch = self.found(name)
        if batch is None:
            return 0
        if discard:
            self._remove(batch)
        elif not batch.row.closed:
            batch.row = batch.row._replace(closed=True)
            self._change(batch)
            self._look(batch)
        return 1

    @contextmanager
    def undone_if_refused(self, names: Iterable[bytes]) -> Iterator[None]:
        """Batches of these names are opened and closed here, and are as before if that raises."""
        were = {name: (self.rows.get(name), self._row(name)) for name in names}
        try:
            yield
        except BaseException:
            for name, (batch, row) in were.items():
                now = self.rows.get(name)
                if now is batch and self._row(name) == row:
                    continue
                if now is not None:
                    self._remove(now)
                if batch is not None and row is not None:
                    batch.row = row
                    self._add(batch)
                    self._change(batch)
                    if not row.closed:
                        self._ending.pop(batch, None)
            raise

    def _row(self, name: bytes) -> BatchRow | None:
        batch = self.rows.get(name)
        return None if batch is None else batch.row

    def _add(self, batch: LiveBatch) -> None:
        row = batch.row
        self.rows[batch.name] = self._by_number[row.number] = batch
        self.bytes += batch.size
        self._next = max(self._next, row.number + 1)
        heappush(self._expiries, (row.expires_us, row.number))
        self._set_alarm()

    def _change(self, batch: LiveBatch) -> None:
        """Write its row with the next commit, together with what is counted."""
        self._changed[batch] = None
        self._pending.ending = self
        self._pending.entry.batches[batch.name] = ""  # Filled in by `end`.
        self._pending.in_one_piece = True

    def _remove(self, batch: LiveBatch) -> None:
        del self.rows[batch.name], self._by_number[batch.row.number]
        self.bytes -= batch.size
        self._changed.pop(batch, None)
        self._pending.entry.batches[batch.name] = None
        self._pending.in_one_piece = True
        if len(self._expiries) > 2 * len(self.rows) + 64:
            rows = [batch.row for batch in self.rows.values()]
            self._expiries = [(row.expires_us, row.number) for row in rows]
            heapify(self._expiries)
        self._set_alarm()

    # -- what lanes tell

    def number(self, name: bytes) -> int:
        """That of a batch to which messages may be added; 0: there is none."""
        batch = self.found(name)
        return 0 if batch is None else batch.row.number

    def count(self, batch: int, living: int, *, new: int = 0, dead: int = 0) -> None:
        # One that has expired is known to its messages only, until the last of them is gone.
        self._next = max(self._next, batch + 1)
        if (known := self._by_number.get(batch)) is None:
            return
        known.living += living
        if new or dead:
            row = known.row
            known.row = row._replace(total=row.total + new, dead=row.dead + dead)
            self._change(known)
        self._look(known)

    def _look(self, batch: LiveBatch) -> None:
        if batch.row.closed and not (batch.living or batch.is_ending):
            self._ending[batch] = None
            self._pending.ending = self

    # -- the end

    def end(self) -> None:
        """A commit is about to take all that is pending: what follows those that have ended joins
        it, and the rows of those that have changed."""
        for _ in range(BATCH_ENDS_MAX):
            if not self._ending:
                break
            self._end_one()
        self._end_later()
        if not self._ending:
            self._pending.ending = None
        batches = self._pending.entry.batches
        for batch in self._changed:
            batches[batch.name] = json.dumps(
                {
                    field: value
                    for field, value in batch.row._asdict().items()
                    if value != BatchRow._field_defaults.get(field)
                }
            )
        self._changed = {}

    def _end_later(self) -> None:
        """Those that are too many for one commit end in the next turns."""
        if self._ending and not self._is_ending_rest:
            self._is_ending_rest = True
            self._turns.add(self._end_rest())

    def _end_rest(self) -> Work[None]:
        while self._ending:
            self._end_one()
            yield GOES_ON
        self._is_ending_rest = False
        if not self._changed:
            self._pending.ending = None

    def _end_one(self) -> None:
        batch = next(iter(self._ending))
        del self._ending[batch]
        row = batch.row
        if batch.living or batch.is_ending or self.rows.get(batch.name) is not batch:
            return  # Messages have moved, or have been added by the last of them.
        line = (row.dead and row.on_dead) or row.then
        wanted = row.wanted(line) if line else None
        queues = self._route(wanted)
        if queues is None:
            batch.is_ending = True
            self._turns.add(self._end_in_turns(batch, wanted))
            return
        self._ended(batch)
        if wanted is not None:
            self._publishing.publisher = None
            self._publishing.put(queues, self._message(batch, wanted).new)

    def _route(self, wanted: Publish | None) -> Queues | None:
        """The queues of what follows; None: they must be looked up, or are very many."""
        if wanted is None:
            return {}
        if wanted.to is not None:
            queue = self._bindings.queues.get(wanted.to)
            return {} if queue is None else {queue: None}
        queues = self._bindings.routes.route(wanted.event)
        return None if queues is None or len(queues) >= GROUPS_QUEUES else queues

    def _message(self, batch: LiveBatch, wanted: Publish) -> Single:
        """It tells of its batch."""
        row, name = batch.row, quote_from_bytes(batch.name, safe="").encode()
        told = b"batch=%b&batch-total=%d&batch-dead=%d" % (name, row.total, row.dead)
        wanted = wanted._replace(meta=b"&".join(filter(None, (wanted.meta, told))))
        return single(self._publishing, b"%b:end" % batch.name, wanted)

    def _ended(self, batch: LiveBatch) -> None:
        self.ended += 1
        self._remove(batch)

    def _end_in_turns(self, batch: LiveBatch, wanted: Publish | None) -> Work[None]:
        assert wanted is not None
        queues = yield from self._bindings.routes.find(wanted.event)
        # What is in many queues takes several turns; the row is with the first of them.
        self._ended(batch)
        self._publishing.publisher = None
        yield from self._publishing.put_in_turns(queues, self._message(batch, wanted).new)

    # -- the clock

    def _set_alarm(self) -> None:
        while self._expiries and self._expiries[0][1] not in self._by_number:
            heappop(self._expiries)
        self._alarm.set(self._expiries[0][0] if self._expiries else None)

    def _expire(self) -> bool:
        """Forget one that is due; its messages stay."""
        due_us, number = self._expiries[0]
        if due_us > self._schedule.wall_us():
            self._set_alarm()
            return False
        batch = self._by_number[number]
        if batch.is_ending:
            heappop(self._expiries)
        else:
            self.expired += 1
            self._remove(batch)
            self._notices.batch_expired(batch.name)
        self._set_alarm()
        return True

    # -- what is told

    def told(self, batch: LiveBatch, running: int) -> dict[str, Any]:
        return batch.row.told(batch.name, batch.living, running)
