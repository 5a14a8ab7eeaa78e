"""What must last, and who waits for it.

The one rule: an entry is everything that one commit says, as plain data. Applying an entry twice,
or the entries of a journal in any order, gives the same state: acks are sets; next sequences,
cursors and marks only grow. Nobody who waits is inside it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from mqks.broker.policy import Policy
from mqks.broker.ranges import Range
from mqks.limits import BATCH_COPIES_MAX, BATCH_QUEUES_MAX

if TYPE_CHECKING:
    from mqks.broker.connection import Connection
    from mqks.broker.consumer import Consumer
    from mqks.broker.lane import Lane


class Run(NamedTuple):
    """Messages with consecutive sequence numbers from `first` on."""

    first: int
    lines: list[bytes]


class Mark(NamedTuple):
    """What is known of a message beside its body. Times are microseconds since 1970, 0 for none."""

    version: int = 0
    """Grows with each change: of two marks of one message the higher one counts."""
    retry: int = 0
    """How often it came back."""
    rejects: int = 0
    losses: int = 0
    """How often its consumer rejected it, and was lost while holding it."""
    redelivered: bool = False
    """Delivered since it was marked: if it is alive after a crash, a consumer held it."""
    is_dated: bool = False
    """It is due when the wall clock says so, however that is set; otherwise after a delay."""
    keeps_place: bool = False
    """When due, it goes to its old place instead of the tail."""
    due_us: int = 0
    """It is scheduled until then."""
    expires_us: int = 0
    """Its own ttl ends then."""
    joined_us: int = 0
    """When it joined the queue, if that is not the time of its number."""
    id_crc: int = 0
    """Checksum of its id, while it is scheduled."""

    def changed(self, **changes: Any) -> "Mark":
        """The next version."""
        return self._replace(version=self.version + 1, **changes)

    def delivered(self) -> "Mark":
        """It is with a consumer."""
        version, retry, rejects, losses = self[:4]
        return Mark(version + 1, retry, rejects, losses, True, *self[5:])

    def returned(self) -> "Mark":
        """It came back once more."""
        return _RETURNED if self is NO_MARK else self._back()

    def rejected(self) -> "Mark":
        """It was rejected once more."""
        return _REJECTED if self is NO_MARK else self._back(rejected=1)

    def lost(self) -> "Mark":
        """Its consumer was lost once more."""
        return _LOST if self is NO_MARK else self._back(lost=1)

    def _back(self, rejected: int = 0, lost: int = 0) -> "Mark":
        version, retry, rejects, losses = self[:4]
        return Mark(version + 1, retry + 1, rejects + rejected, losses + lost, False, *self[5:])

    def due(self, now_us: int) -> "Mark":
        """It is not scheduled any more. If it has never been in its queue, its ttl begins now."""
        is_new = self.expires_us and not self.version
        early_us = max(0, self.due_us - now_us) if is_new else 0
        return self._replace(
            due_us=0,
            is_dated=False,
            keeps_place=False,
            id_crc=0,
            expires_us=self.expires_us - early_us,
        )


NO_MARK = Mark()
_RETURNED = NO_MARK._back()
_REJECTED = NO_MARK._back(rejected=1)
_LOST = NO_MARK._back(lost=1)
"""What most messages have that came back, made once."""


class LaneChange(NamedTuple):
    """What happened to the messages of one lane.

    `next_seq`: the number the next message will get. `cursor`: everything below it has been
    delivered once. `acks`: ranges of settled numbers. `moved`: settled, too, because their messages
    stand among the `runs` of the same entry again, under new numbers: only together are both true.
    """

    lane_id: int
    next_seq: int
    cursor: int
    runs: list[Run]
    acks: list[Range]
    moved: list[Range]
    marks: dict[int, Mark]


class QueueState(NamedTuple):
    """A queue that was made or whose policy changed."""

    name: bytes
    policy: Policy


class ErrorRecord(NamedTuple):
    """Details of one error reply, as log and database keep them; never a payload.

    The user and the client's name are known to the running server only.
    """

    id: str
    time_us: int
    connection: str
    request_id: bytes
    action: bytes
    reason: str
    user: str | None = None
    client: str | None = None


@dataclass(slots=True)
class Entry:
    """Everything that one commit says."""

    time_us: int = 0
    """When its messages came, in microseconds since 1970."""
    changes: list[LaneChange] = field(default_factory=list)
    queues: dict[int, QueueState | None] = field(default_factory=dict)
    """Queue id → its state now, None when it was deleted."""
    bindings: dict[tuple[bytes, bytes], bool] = field(default_factory=dict)
    """Queue name and event → whether bound now."""
    errors: list[ErrorRecord] = field(default_factory=list)
    once: list[bytes] = field(default_factory=list)
    """Message ids that may not be published again, oldest first."""
    records: int = 0
    """Messages, acks and marks in it, about."""

    @property
    def has_metadata(self) -> bool:
        return bool(self.queues or self.bindings or self.errors or self.once)

    @property
    def writes(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.changes) or self.has_metadata

    @property
    def must_last(self) -> bool:
        """Whether there is more than the details of errors, which no confirm promises."""
        return bool(self.changes or self.queues or self.bindings or self.once)


@dataclass(slots=True)
class Waiters:
    """Who waits for a commit."""

    confirms: list[tuple["Connection", list[bytes]]] = field(default_factory=list)
    confirmed: int = 0
    """How many of the confirms are those of messages."""
    counts: list[tuple["Connection", bytes, int]] = field(default_factory=list)
    """Confirms that tell a number: apart, so that all the others are joined in one go."""
    held: list["Consumer"] = field(default_factory=list)
    """Consumers that get nothing before their confirm."""

    def __bool__(self) -> bool:
        return bool(self.confirms or self.counts or self.held)

    def put_before(self, later: "Waiters") -> None:
        """Those of `later` wait behind these."""
        self.confirms += later.confirms
        self.confirmed += later.confirmed
        self.counts += later.counts
        self.held += later.held


@dataclass(slots=True)
class Batch:
    """One commit: what it says, who waits for it, and where it was taken from."""

    entry: Entry = field(default_factory=Entry)
    waiters: Waiters = field(default_factory=Waiters)
    taken: list[tuple["Lane", int]] = field(default_factory=list)
    """For each change its lane, and below which number that was durable before."""
    is_rest: bool = False
    """Pieces of it have been written before."""
    moves: bool = False
    """Messages move from one lane to another in it: it is written in one piece."""

    @property
    def must_last(self) -> bool:
        return self.is_rest or self.entry.must_last


class Pending:
    """Everything that is not written yet. `now_us` is the wall clock, in microseconds."""

    __slots__ = (
        *("_begun", "_errors_kept_max", "_is_rest", "_left", "_now_us"),
        *("dirty", "entry", "moves", "records", "waiters"),
    )

    def __init__(self, errors_kept_max: int, now_us: Callable[[], int]) -> None:
        self._errors_kept_max = errors_kept_max
        self._now_us = now_us
        self.entry = Entry()
        """Its `changes` are with the lanes that are `dirty`, until they are taken."""
        self.waiters = Waiters()
        self.records = 0
        """Messages, acks and marks that wait for the writer; publishers are slowed down by it."""
        self.moves = False
        """Messages have moved from one lane to another."""
        self.dirty: list[Lane] = []
        self._is_rest = False
        """Pieces of it have been written."""
        self._begun: Batch | None = None
        """What is written after the lanes that are left."""
        self._left: list[Lane] = []

    @property
    def has_metadata(self) -> bool:
        """Whether queues, bindings or errors are among what is to be written."""
        return self.entry.has_metadata or self._begun is not None

    @property
    def changes(self) -> int:
        """How many changes of queues and bindings there are."""
        return len(self.entry.bindings) + len(self.entry.queues)

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return bool(self.dirty) or self.has_metadata

    def __bool__(self) -> bool:
        """Whether there is something to write or to confirm."""
        return bool(self.waiters) or self.has_changes

    def add_error(self, record: ErrorRecord) -> None:
        if len(self.entry.errors) < self._errors_kept_max:
            self.entry.errors.append(record)

    def take(self, *, whole: bool = False) -> Batch:
        """Take everything; the next batch begins. What is pending in very many queues is taken in
        pieces, unless it is wanted `whole`."""
        if whole or self.moves:
            # A move is in no piece alone: one of its lanes may be among those that are left.
            self._begin_anew()
        begun = self._begun
        if begun is None:
            begun = Batch(self.entry, self.waiters, is_rest=self._is_rest, moves=self.moves)
            self._is_rest = self.moves = False
            begun.entry.records, self.records = self.records, 0
            self.entry, self.waiters = Entry(), Waiters()
            self._left, self.dirty = self.dirty, []
            self._left.reverse()
        batch = begun
        count = len(self._left) if whole or begun.moves else self._piece()
        if count < len(self._left):
            # The queues themselves first, and last those who wait, and ids, which without their
            # messages would keep these out for good.
            of = begun.entry
            batch = Batch(Entry(queues=of.queues, bindings=of.bindings, errors=of.errors))
            of.queues, of.bindings, of.errors = {}, {}, []
            begun.is_rest = True
        self._begun = None if batch is begun else begun
        entry = batch.entry
        for _ in range(count):
            lane = self._left.pop()
            if lane.deleted:
                continue
            boundary = lane.boundary
            change = lane.take_change()
            if change is not None:
                entry.changes.append(change)
                batch.taken.append((lane, boundary))
        entry.time_us = self._now_us()
        return batch

    def _piece(self) -> int:
        """How many of the lanes that are left one commit takes."""
        copies = 0
        for number, lane in enumerate(reversed(self._left)):
            copies += len(lane.unwritten)
            if number >= BATCH_QUEUES_MAX or (number and copies > BATCH_COPIES_MAX):
                return number
        return len(self._left)

    def _begin_anew(self) -> None:
        """What is left of a batch is pending again."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self.dirty[:0] = self._left
            self._left = []
            self.put_back(begun)

    def put_back(self, batch: Batch) -> None:
        """This batch could not be written: all of it is pending again, before what came since. So
        is what is left of the batch of which it is a piece, with those who wait for the whole."""
        self._begin_anew()
        batch.waiters.put_before(self.waiters)
        self.waiters = batch.waiters
        self._is_rest = self._is_rest or batch.is_rest
        entry, later = batch.entry, self.entry
        for change, (lane, boundary) in zip(entry.changes, batch.taken, strict=True):
            if not lane.deleted:
                lane.put_back(change, boundary)
        self.moves = self.moves or batch.moves
        entry.changes = []
        entry.queues.update(later.queues)
        entry.bindings.update(later.bindings)
        entry.once += later.once
        entry.errors += later.errors
        del entry.errors[self._errors_kept_max :]
        self.records += entry.records
        self.entry = entry

    def take_settled(self) -> Batch:
        """Take what makes room on a full disk: acks of what is durable, queues, bindings, errors,
        and everybody who waits. Messages stay pending, and with them the ids that were published
        once: an id that lasts without its message would keep the message out for good."""
        batch = self.take(whole=True)
        entry = batch.entry
        rest = Batch(Entry(once=entry.once, records=len(entry.once)), moves=batch.moves)
        changes, entry.changes, entry.once = entry.changes, [], []
        for change, (lane, boundary) in zip(changes, batch.taken, strict=True):
            settled, later = split(change, boundary)
            entry.changes.append(settled)
            if later is not None:
                rest.entry.changes.append(later)
                rest.entry.records += sum(len(run.lines) for run in later.runs) + len(later.marks)
                rest.taken.append((lane, boundary))
        entry.records = max(0, entry.records - rest.entry.records)
        self.put_back(rest)
        return batch


def split(change: LaneChange, boundary: int) -> tuple[LaneChange, LaneChange | None]:
    """What a change says of numbers below `boundary`, and the rest: new messages, what is true only
    together with them, and what is said of them, if there is any."""
    lane_id, next_seq, cursor, runs, acks, moved, marks = change
    settled = LaneChange(
        lane_id,
        boundary,
        min(boundary, cursor),
        [],
        acks,
        [],
        {number: mark for number, mark in marks.items() if number < boundary},
    )
    later = {number: mark for number, mark in marks.items() if number >= boundary}
    if not (runs or moved or later or next_seq > boundary):
        return settled, None
    return settled, LaneChange(lane_id, next_seq, cursor, runs, [], moved, later)
