"""The changes that must be written, and those who wait for them.

The one rule: an entry has all changes of one commit, as plain data. Applying an entry twice, or the
entries of a journal in any order, gives the same state: acks are sets; next sequences, cursors and
marks only grow. Those who wait are kept separately.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final, NamedTuple, Protocol

from mqks.audit import AuditRecord
from mqks.broker.spine.base.ranges import Range
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import Policy
from mqks.errors import BadRequest
from mqks.limits import AUDIT_TOLD_MAX, BATCH_COPIES_MAX, BATCH_QUEUES_MAX

SMALL_RECORDS_MAX: Final = 256
"""Larger batches go to the writer's task, so that the next batch forms meanwhile."""


class Run(NamedTuple):
    """Messages with consecutive sequence numbers from `first` on."""

    first: int
    lines: list[bytes]


class LaneChange(NamedTuple):
    """Changes of the messages of one lane.

    `next_seq`: the number of the next message. `cursor`: everything below it has been delivered
    once. `acks`: ranges of settled numbers. `moved`: settled, too, because their messages are in
    the `runs` of the same entry under new numbers: both must be written together.
    """

    lane_id: int
    next_seq: int
    cursor: int
    runs: list[Run]
    acks: list[Range]
    moved: list[Range]
    marks: dict[int, Mark]


class Changed(Protocol):
    """A `Lane`, which collects its changes until they are taken. What it can do is told there."""

    deleted: bool
    on_written: Callable[[int], None] | None
    taken_end: int
    unwritten: list[bytes]
    aside: list[bytes]

    def take_change(self) -> LaneChange | None: ...
    def put_back(self, change: LaneChange, taken_end: int) -> None: ...
    def spill(self, committed: int) -> Work[None]: ...


class Members(Protocol):
    """The batches, as lanes see them: each knows how many of its messages are alive."""

    def number(self, name: bytes) -> int:
        """That of the batch of this name, to which messages may be added; 0: there is none."""

    def count(self, batch: int, living: int, *, new: int = 0, dead: int = 0) -> None:
        """So many more of its messages are alive; so many are new, or have died."""

    def end(self) -> None:
        """A commit is about to take all that is pending: add what follows from the batches that
        have ended, and what has changed."""


class Replier(Protocol):
    """An `Outbox` that has asked for confirms."""

    unconfirmed: int
    closed: bool

    @property
    def party(self) -> Hashable: ...
    def write(self, data: bytes) -> None: ...
    def fail(self, request_id: bytes, action: bytes, failure: BadRequest) -> None: ...


class QueueState(NamedTuple):
    """A queue that was created or whose policy changed."""

    name: bytes
    policy: Policy


ResultRow = tuple[str, bytes]
"""What is stored of a message whose end somebody waits for: JSON, and the data of its result."""


class ErrorRecord(NamedTuple):
    """Details of one error reply, for log and database; never a payload.

    Only the running server knows the user and the client's name.
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
    """All changes of one commit."""

    time_us: int = 0
    """When its messages arrived, in microseconds since 1970."""
    changes: list[LaneChange] = field(default_factory=list)
    queues: dict[int, QueueState | None] = field(default_factory=dict)
    """Queue id → its new state, None if it was deleted."""
    bindings: dict[tuple[bytes, bytes], bool] = field(default_factory=dict)
    """Queue name and event → whether it is bound now."""
    errors: list[ErrorRecord] = field(default_factory=list)
    audit: list[AuditRecord] = field(default_factory=list)
    once: list[bytes] = field(default_factory=list)
    """Message ids that may not be published again, oldest first."""
    schedules: dict[bytes, str | None] = field(default_factory=dict)
    """Name of a schedule → its new row, None if it was removed."""
    results: dict[bytes, ResultRow | None] = field(default_factory=dict)
    """Id of a message → its new row, None if it is forgotten."""
    batches: dict[bytes, str | None] = field(default_factory=dict)
    """Name of a batch → its new row, None if it has ended."""
    records: int = 0
    """Approximate number of messages, acks and marks in it."""

    @property
    def has_more(self) -> bool:
        """Whether there is more than messages, acks, marks and ids."""
        return self.has_named or bool(self.queues or self.bindings or self.errors or self.audit)

    @property
    def has_metadata(self) -> bool:
        return bool(self.once) or self.has_more

    @property
    def writes(self) -> bool:
        """Whether there is anything to write."""
        return bool(self.changes) or self.has_metadata

    @property
    def must_last(self) -> bool:
        """Whether there is more than errors and the audit, which no confirm covers."""
        return bool(self.changes or self.once) or self.must_stand

    @property
    def must_stand(self) -> bool:
        """Whether there are rows that a start relies on."""
        return self.has_named or bool(self.queues or self.bindings)

    @property
    def has_named(self) -> bool:
        """Whether there are rows of schedules, results or batches."""
        return bool(self.schedules or self.results or self.batches)

    def extend(self, later: "Entry", errors_max: int) -> None:
        """Add what came `later`; of two states of a queue, binding or schedule its one counts."""
        self.queues.update(later.queues)
        self.bindings.update(later.bindings)
        self.once += later.once
        self.schedules.update(later.schedules)
        self.results.update(later.results)
        self.batches.update(later.batches)
        self.errors += later.errors
        del self.errors[errors_max:]
        self.audit += later.audit
        del self.audit[AUDIT_TOLD_MAX:]


@dataclass(slots=True)
class Waiters:
    """Those who wait for a commit."""

    confirms: list[tuple[Replier, list[bytes], list[bytes]]] = field(default_factory=list)
    """Ids of requests that place messages, which a full disk refuses, and of others."""
    confirmed: int = 0
    """Number of confirms of messages among them."""
    counts: list[tuple[Replier, bytes, bytes]] = field(default_factory=list)
    """Confirms with a number or text: separate, so that all others are joined in one step."""
    held: list[tuple[Replier, Callable[[bool], None], bool]] = field(default_factory=list)
    """Called when the commit is done, with whether it was written: consumers get no messages before
    their confirm. The last says whether it needs room."""

    for_pieces: bool = False
    """Also for earlier pieces of the batch, which are written."""

    def __bool__(self) -> bool:
        return bool(self.confirms or self.counts or self.held)

    def parted(self) -> "tuple[Waiters, Waiters]":
        """Those who need room, and the others."""
        room, others = Waiters(counts=self.counts), Waiters()
        for replier, placing, ids in self.confirms:
            room.confirms.append((replier, placing, []))
            if ids:
                others.confirms.append((replier, [], ids))
        for each in self.held:
            (room if each[2] else others).held.append(each)
        return room, others

    def extend(self, later: "Waiters") -> None:
        """Append those of `later`."""
        self.for_pieces = self.for_pieces or later.for_pieces
        self.confirms += later.confirms
        self.confirmed += later.confirmed
        self.counts += later.counts
        self.held += later.held


@dataclass(slots=True)
class Batch:
    """One commit: its changes, those who wait for it, and the lanes of the changes."""

    entry: Entry = field(default_factory=Entry)
    waiters: Waiters = field(default_factory=Waiters)
    lanes: list[Changed] = field(default_factory=list)
    """Those whose changes are not taken yet."""
    taken: list[tuple[Changed, int]] = field(default_factory=list)
    """For each change its lane, and the number below which the lane was taken before."""
    in_one_piece: bool = False
    """It has what must not be written in part, see `Pending`."""

    @property
    def must_last(self) -> bool:
        return self.waiters.for_pieces or self.entry.must_last

    @property
    def has_messages(self) -> bool:
        """Whether some of it needs more space than it frees."""
        entry = self.entry
        return (
            bool(entry.once)
            or entry.has_named
            or any(
                change.runs or change.moved or (self.in_one_piece and change.marks)
                for change in entry.changes
            )
        )

    def cut_piece(self) -> "Batch | None":
        """Cut off the first piece, as large as one commit may be; None if it is all of it."""
        lanes, entry = self.lanes, self.entry
        count = _lanes_of_piece(lanes)
        if count == len(lanes):
            return None
        # Queues first, as messages need theirs. Waiters last, as they wait for all of it. And ids
        # last: an id without its message would block the message permanently.
        first = Entry(
            queues=entry.queues, bindings=entry.bindings, errors=entry.errors, audit=entry.audit
        )
        piece = Batch(first)
        entry.queues, entry.bindings, entry.errors, entry.audit = {}, {}, [], []
        piece.lanes = lanes[:count]
        del lanes[:count]
        self.waiters.for_pieces = True
        return piece

    def take_changes(self) -> None:
        """Take the changes of its lanes into the entry."""
        for lane in self.lanes:
            if lane.deleted:
                continue
            taken_end = lane.taken_end
            change = lane.take_change()
            if change is not None:
                self.entry.changes.append(change)
                self.taken.append((lane, taken_end))
        self.lanes = []


def _lanes_of_piece(lanes: list[Changed]) -> int:
    """How many of these lanes, from the first on, are written in one commit."""
    copies = 0
    for number, lane in enumerate(lanes):
        copies += len(lane.unwritten) + len(lane.aside)
        if number >= BATCH_QUEUES_MAX or (number and copies > BATCH_COPIES_MAX):
            return number
    return len(lanes)


class Need(Enum):
    """What must be done with all that is pending."""

    NOTHING = auto()
    """Nothing is pending."""
    CONFIRM = auto()
    """Somebody waits, and nothing must be written for it."""
    WRITE_LATER = auto()
    """Only a few acks and marks, for which nobody waits."""
    WRITE = auto()
    """Few messages, acks, marks and ids: a commit of it is short."""
    WRITE_MUCH = auto()


class Pending:
    """Everything that is not written yet. `now_us` is the wall clock, in microseconds.

    ```
                   take                        committed
      gathering ──────────▶ taken, a `Batch` ─────────────▶ its waiters are answered
       ▲  ▲  │                   │   ▲
       │  │  │ take, too large   │   │ take: piece by piece,
       │  │  ▼                   │   │ the last one with all waiters
       │  │ `_rest` ─────────────┼───┘
       │  │  │ `in_one_piece`    │
       │  └──┘ gathers later     │ could not be written, as on a full disk:
       └─────────────────────────┘ `put_back`, and `_rest` with it
    ```

    | state | changes are in | waiters, ids, other metadata are in |
    | --- | --- | --- |
    | gathering | the `dirty` lanes | `waiters`, `entry` |
    | taken | `Batch.entry.changes` | `Batch.waiters`, `Batch.entry` |
    | in pieces | of the piece: taken; of the others: the lanes `_rest.lanes` | `_rest` |
    | put back | gathering again, before what gathered meanwhile | the same |
    | on a full disk | what frees space: taken; the others: put back | taken; ids put back |
    """

    def __init__(
        self, errors_kept_max: int, audit_kept_max: int, now_us: Callable[[], int]
    ) -> None:
        self._errors_kept_max = errors_kept_max
        self._audit_kept_max = audit_kept_max
        self._now_us = now_us
        self.entry = Entry()
        """Its `changes` are in the `dirty` lanes until they are taken."""
        self.waiters = Waiters()
        self.records = 0
        """Number of messages, acks and marks that wait for the writer; it limits publishers."""
        self.is_urgent = False
        """It has messages, or was to be written before, and does not wait for others."""
        self.in_one_piece = False
        """A move from one lane to another, a tick, a transaction or what a batch counts must not be
        written in part."""
        self.members: Members | None = None
        self.ending: Members | None = None
        """`members`, while their `end` has something to add."""
        self.dirty: list[Changed] = []
        self.unwritable = ""
        """Why nothing can be written durably; publishes are refused while this is not empty."""
        self._rest: Batch | None = None
        """A batch that is being taken in pieces, without those taken."""

    @property
    def changes(self) -> int:
        """Number of changes of queues and bindings."""
        return len(self.entry.bindings) + len(self.entry.queues)

    @property
    def has_changes(self) -> bool:
        """Whether there is something to write."""
        return bool(self.dirty) or self._rest is not None or self.entry.has_metadata

    @property
    def need(self) -> Need:
        """The one question of the writer."""
        if self.ending is not None:  # A row goes with what follows.
            return Need.WRITE_MUCH
        if not self.has_changes:
            return Need.CONFIRM if self.waiters else Need.NOTHING
        is_long = max(self.records, len(self.dirty)) > SMALL_RECORDS_MAX
        if is_long or self._rest is not None or self.entry.has_more:
            return Need.WRITE_MUCH
        return Need.WRITE if self.is_urgent or self.waiters else Need.WRITE_LATER

    def __bool__(self) -> bool:
        """Whether there is something to write or to confirm."""
        return self.has_changes or bool(self.waiters)

    def add_error(self, record: ErrorRecord) -> None:
        if len(self.entry.errors) < self._errors_kept_max:
            self.entry.errors.append(record)

    def add_audit(self, record: AuditRecord) -> None:
        if len(self.entry.audit) < min(self._audit_kept_max, AUDIT_TOLD_MAX):
            self.entry.audit.append(record)

    # Lanes collect their changes themselves, so that a message that is published and acked between
    # two commits never reaches the journal; `take` asks each dirty lane for what is left of them.
    # From then on everything that comes gathers for the next batch, while this one is written.
    #
    # One commit must not hold the event loop, nor memory, for as long as 100,000 queues would take.
    # So a large batch is cut by lanes: lanes do not know each other, and a crash between two pieces
    # leaves a state that could have been, as nobody was told anything yet. That is wrong for the
    # two lanes of a move, a tick or a transaction: the message would be in both, or in neither.
    # These have set `in_one_piece`, and when they have joined while pieces of an earlier batch are
    # left, their lanes may be among those left: then the rest gathers again, and all is one batch.

    def take(self, *, whole: bool = False) -> Batch:
        """Take everything; the next batch begins. A batch of very many queues or messages is taken
        in pieces, unless `whole`."""
        if self.ending is not None:
            self.ending.end()
        if whole or self.in_one_piece:
            self._gather_rest()
        batch, self._rest = self._rest or self._gathered(), None
        if not (whole or batch.in_one_piece):
            piece = batch.cut_piece()
            if piece is not None:
                batch, self._rest = piece, batch
        batch.take_changes()
        batch.entry.time_us = self._now_us()
        return batch

    def _gathered(self) -> Batch:
        """A batch of all that has gathered; the next one begins."""
        batch = Batch(self.entry, self.waiters, self.dirty, in_one_piece=self.in_one_piece)
        batch.entry.records, self.records = self.records, 0
        self.entry, self.waiters, self.dirty = Entry(), Waiters(), []
        self.in_one_piece = self.is_urgent = False
        return batch

    def _gather_rest(self) -> None:
        """Make the rest of a batch pending again."""
        if self._rest is not None:
            rest, self._rest = self._rest, None
            self.put_back(rest)

    # A commit that fails has changed nothing, so its batch becomes part of the next one, as if it
    # had not been taken. It came first, and what gathered meanwhile may contradict it: a queue was
    # deleted, a message acked, a mark replaced. So the two are joined in their order, and the later
    # one wins: `Entry.extend` for metadata, `Lane.put_back` for messages. Those who wait stay in
    # order too, as the confirms of one client come in the order of its requests.
    #
    # The rest of the batch lies between the two in time, so it is put back first. It has the
    # waiters of the piece as well: what they wait for must never be written without the piece.

    def put_back(self, batch: Batch) -> None:
        """This batch could not be written: make all of it pending again, before later changes; and
        also the rest of the batch of which it is a piece, with those who wait for all of it."""
        self._gather_rest()
        self.dirty[:0] = batch.lanes
        for change, (lane, taken_end) in zip(batch.entry.changes, batch.taken, strict=True):
            if not lane.deleted:
                lane.put_back(change, taken_end)
        batch.entry.changes = []
        batch.entry.extend(self.entry, self._errors_kept_max)
        batch.waiters.extend(self.waiters)
        self.entry, self.waiters = batch.entry, batch.waiters
        self.records += batch.entry.records
        self.in_one_piece = self.in_one_piece or batch.in_one_piece
        self.is_urgent = True
