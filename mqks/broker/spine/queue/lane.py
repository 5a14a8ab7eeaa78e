"""The numbered messages of a queue: which are ready, and what the journal must learn about them.

The one rule: below `cursor` every message has been delivered once, or has left. From the cursor on
none was delivered but those that have a mark from then. What is not ready there is with a consumer,
if its mark says so, scheduled, dying, or settled. What is published with a delay has a number
aside, from SCHEDULED_SEQ on, until it joins.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.ranges import (
    Range,
    among,
    below,
    compress,
    has_number,
    subtract,
    union,
    within,
)
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.log.pending import LaneChange, Pending, Run
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.queue.blocks import Blocks
from mqks.broker.spine.queue.seams import Expiring, Keys
from mqks.limits import SCARCE_BYTES, SCHEDULED_SEQ, SEQ_MAX, STEP_BODIES
from mqks.protocol import replies

Delivery = tuple[int, bytes]
"""Sequence number and message."""


class LaneOwner(Protocol):
    """The `Queue` of a lane. What it can do is told there."""

    @property
    def is_served(self) -> bool: ...
    def become_sparse(self) -> None: ...
    def none_expires(self) -> None: ...
    def see_attributes(self, lines: list[bytes]) -> None: ...


class LaneWatcher(Protocol):
    """The `Order` of its messages, if that is not the one of their numbers. What it is told of is
    described there."""

    def joined(self, first: int, lines: list[bytes]) -> None: ...
    def returned(self, number: int, line: bytes) -> None: ...
    def left(self, numbers: Sequence[int]) -> None: ...
    def from_last(self) -> Iterator[Sequence[int]] | None: ...


class Lane:
    """`memory` counts ready messages in memory, `pending` gets the changes to be written."""

    __slots__ = (
        *("acked", "acked_ranges", "aside", "aside_end", "blocks", "taken_end", "cursor"),
        *("cursor_moved", "deleted", "dirty", "expiry", "has_attributes", "id", "marked", "marks"),
        *("members", "memory", "moved", "next_aside", "next_seq", "on_written", "owner", "paging"),
        *(
            "pending",
            "returned",
            "unique",
            "unwritten",
            "unwritten_first",
            "unwritten_runs",
            "watcher",
        ),
    )

    def __init__(self, lane_id: int, owner: LaneOwner, memory: Budget, pending: Pending) -> None:
        self.id = lane_id
        self.owner = owner
        self.memory = memory
        self.pending = pending
        self.deleted = False
        self.next_seq = 1
        self.next_aside = SCHEDULED_SEQ
        """The number of the next message with a delay."""
        self.cursor = 1
        self.blocks = Blocks(memory)
        """Ready messages."""
        self.returned = 0
        """How many of them are below the cursor."""
        self.paging = False
        """A page was requested and has not arrived yet."""
        self.watcher: LaneWatcher | None = None
        self.expiry: Expiring | None = None
        """When messages expire, if any do."""
        self.unique: Keys | None = None
        """Keys that messages hold, if any do."""
        self.has_attributes = False
        """Some of its messages may have attributes after their text, see `replies.ATTRIBUTES`."""
        self.marks: dict[int, Mark] = {}
        """Marks of living messages that have one."""
        self.members: dict[int, int] = {}
        """How many of its messages are alive, by the number of their batch."""

        # What the next batch takes, in `take_change`.
        self.dirty = False
        """There is something."""
        self.on_written: Callable[[int], None] | None = None
        """Called after each commit: numbers below this one are on disk."""
        self.taken_end = 1
        """Numbers below this one were taken by an earlier batch,"""
        self.aside_end = SCHEDULED_SEQ
        """and of messages with a delay those below this one."""
        self.aside: list[bytes] = []
        """The last messages with a delay, not written yet."""
        self.unwritten: list[bytes] = []
        self.unwritten_first = 1
        """The number of the first of them."""
        self.unwritten_runs: list[Run] = []
        """Those before them, if numbers are left out in between."""
        self.acked: list[int] = []
        self.acked_ranges: list[Range] = []
        self.moved: list[Range] = []
        """Numbers whose messages were appended elsewhere under new numbers, not written yet."""
        self.marked: dict[int, Mark] = {}
        self.cursor_moved = False

    # -- contents

    @property
    def ready_bytes(self) -> int:
        """Approximate length of their lines: messages taken out on disk count with the mean."""
        return self.blocks.size + self.blocks.disk_bytes

    @property
    def fresh(self) -> int:
        """Number of ready messages from the cursor on."""
        return self.blocks.count - self.returned

    @property
    def has_holes(self) -> bool:
        """Whether messages from the cursor on are not ready."""
        return self.next_seq - self.cursor > self.fresh

    def is_hole(self, number: int) -> bool:
        """Whether this message, from the cursor on, is neither ready nor with a consumer."""
        return (
            self.cursor <= number < self.next_seq
            and number not in self.blocks
            and not self.marks.get(number, NO_MARK).redelivered
        )

    # -- adding messages

    def see(self, lines: Iterable[bytes]) -> None:
        """Messages that may have attributes join, or are delivered at once."""
        if attributed := [line for line in lines if replies.ATTRIBUTES in line]:
            self.has_attributes = True
            self.owner.see_attributes(attributed)

    def append(self, first: int, lines: list[bytes]) -> None:
        """Append messages with numbers from `first` up to `next_seq`; they must be written."""
        self.blocks.append(first, lines)
        if self.watcher is not None:
            self.watcher.joined(first, lines)
        self.remember(first, lines)

    def append_aside(self, lines: list[bytes], marks: list[Mark]) -> int:
        """Number messages that are not ready and must be written; return the first number."""
        first = self.next_aside
        self.next_aside = first + len(lines)
        self.aside += lines
        self.pending.records += len(lines)
        self.pending.is_urgent = True
        self.tell_marks(dict(enumerate(marks, first)))
        return first

    def join_batches(self, marks: Mapping[int, Mark], *, new: bool = False) -> None:
        """These messages join, with these marks, as members of batches; `new`: for the first
        time."""
        self.marks.update(marks)
        for batch, count in Counter(mark.batch for mark in marks.values()).items():
            self.count(batch, count, new=count if new else 0)

    def count(self, batch: int, count: int, *, new: int = 0, dead: bool = False) -> None:
        """So many more messages of a batch are alive here; those that left may be `dead`."""
        if left := self.members.get(batch, 0) + count:
            self.members[batch] = left
        else:
            del self.members[batch]
        if (members := self.pending.members) is not None:
            members.count(batch, count, new=new, dead=-count if dead else 0)

    def append_all(self, lines: list[bytes], marks: Sequence[Mark] = ()) -> None:
        """Number and append messages that may have attributes, and marks."""
        first = self.next_seq
        self.see(lines)
        self.next_seq = first + len(lines)
        if self.expiry is not None:
            self.expiry.joined(first)
        for number, mark in enumerate(marks, first):
            if mark != NO_MARK:
                self.tell_marks({number: mark})
                self.restore_mark(number, mark)
        if self.unique is not None:
            self.unique.joined(first, lines)
        self.append(first, lines)

    def unwritten_numbers(self, first: int) -> Iterator[range]:
        """Numbers from `first` on of messages that are not written yet."""
        runs = [Run(self.unwritten_first, self.unwritten), *reversed(self.unwritten_runs)]
        for start, lines in runs:
            numbers = range(max(first, start), start + len(lines))
            if not numbers or start >= SCHEDULED_SEQ:
                break
            yield numbers

    def give_back(self, number: int, line: bytes, mark: Mark) -> None:
        """Return a message to its old place."""
        self.mark(number, mark)
        self.keep_returned(number, line)

    def keep_returned(self, number: int, line: bytes) -> None:
        self.returned += number < self.cursor
        self.blocks.add(number, line)
        if self.watcher is not None:
            self.watcher.returned(number, line)
        if self.unique is not None:
            self.unique.returned(number, line)

    # -- delivering messages

    def front(self, most: int) -> tuple[int, list[bytes]]:
        """Take the first messages, which are in memory and have consecutive numbers: at most
        `most`, or as many as one delivery takes. Return the first number and the bodies. Those not
        delivered must be returned by `put_front`."""
        first = self.blocks.first
        assert first is not None
        if not self.returned:
            return self.blocks.take(most, SEQ_MAX)
        # Not across the cursor: those below it are counted in `returned`.
        _, lines = self.blocks.take(most, self.cursor)
        self.returned -= len(lines)
        return first, lines

    def put_front(self, first: int, lines: list[bytes]) -> None:
        self.blocks.put_front(first, lines)
        if first < self.cursor:
            self.returned += len(lines)

    def delivered(self, end: int) -> None:
        """Messages with numbers below `end` have been delivered."""
        self.cursor = max(self.cursor, end)

    def pick(
        self, numbers: Sequence[int], bytes_max: int = SEQ_MAX
    ) -> tuple[list[int], list[bytes], int]:
        """Take out messages out of order, see `Blocks.pop_some`. Those not delivered must be
        returned by `keep_returned`; then the caller calls `picked`."""
        taken = self.blocks.pop_some(numbers, bytes_max)
        self.returned -= bisect_left(taken[0], self.cursor)
        return taken

    def picked(self, numbers: Sequence[int], held: Iterable[int]) -> None:
        """These were delivered, to consumers that must ack those that are `held`."""
        self._advance()
        cursor = self.cursor
        if numbers and numbers[-1] >= cursor:
            self.owner.become_sparse()
            # From the cursor on a start takes each message for one that was never delivered, if no
            # mark says otherwise.
            old = self.marks
            new = [n for n in held if n >= cursor and not old.get(n, NO_MARK).version]
            if self.expiry is None and not self.members:
                marks = dict.fromkeys(new, NO_MARK.delivered())
            else:
                marks = {number: self.mark_of(number).delivered() for number in new}
            self.marks.update(marks)
            self.tell_marks(marks)

    # -- taking messages out of order

    def is_ready(self, number: int) -> bool:
        return number in self.blocks

    def body(self, number: int) -> bytes | None:
        """Body of a ready message; None if it is only on disk."""
        return self.blocks.get(number)

    def take_out(self, number: int) -> None:
        """Take out a ready message; the caller settles or moves it."""
        self.blocks.pop(number)
        if number < self.cursor:
            self.returned -= 1
        elif number == self.cursor:
            self._advance()
        else:
            self.owner.become_sparse()

    def _advance(self) -> None:
        """Set the cursor to the first ready message from it on."""
        cursor = self.blocks.from_number(self.cursor) or self.next_seq
        if cursor > self.cursor:
            self.cursor = cursor
            self.tell_cursor()

    def settle(self, numbers: Sequence[int], *, dead: bool = False) -> None:
        """Settle these messages: the journal may delete them. `dead`: nobody has acked them."""
        if dead and self.members:
            # With the rows of their batches, which count them: a full disk takes neither.
            self.pending.records += len(numbers)
            self.leave_together([*numbers], dead=True)
            return
        self._leave(numbers, dead=dead)
        # What is trimmed, or delivered without manual ack, mostly comes as a range, which is kept.
        if isinstance(numbers, range) and numbers.step == 1:
            self.acked_ranges.append((numbers.start, len(numbers)))
        else:
            self.acked.extend(numbers)
        self.pending.records += len(numbers)
        self._touch()

    def _leave(self, numbers: Sequence[int], *, dead: bool) -> None:
        """Forget what is known of these messages, which leave the queue."""
        if self.watcher is not None:
            self.watcher.left(numbers)
        if self.unique is not None:
            self.unique.left(numbers)
        self.forget_marks(numbers, dead=dead)
        if self.expiry is not None:
            self.expiry.discard(numbers)
            if not self.expiry:
                self.owner.none_expires()

    def forget_marks(self, numbers: Sequence[int], *, dead: bool = False) -> None:
        """These messages leave their batches; `dead`: nobody has acked them."""
        if self.marks:
            gone = [self.marks.pop(each, NO_MARK) for each in among(numbers, self.marks)]
            if self.members:
                for batch, count in Counter(mark.batch for mark in gone if mark.batch).items():
                    self.count(batch, -count, dead=dead)

    def leave_together(self, numbers: list[int], *, dead: bool = False) -> None:
        """Record that these messages leave together with what else is in the same commit, as the
        appends of a move. Their marks are gone then. `dead`: they leave their batches."""
        self._leave(numbers, dead=dead)
        self.moved += compress(numbers)
        self._touch()

    def mark_of(self, number: int) -> Mark:
        """The mark of a living message, with times of the wall clock as it goes now."""
        mark, expiry = self.marks.get(number), self.expiry
        if expiry is None:
            return mark or NO_MARK
        if mark is None:
            return Mark(expires_us=expiry.own_us(number))
        if set_us := expiry.set_us(number, mark.expires_us, mark.joined_us):
            mark = mark.shifted(set_us)
        return mark

    def trim_some(self, end: int, count_max: int = SEQ_MAX, *, dead: bool = False) -> Sequence[int]:
        """Drop the oldest ready messages with numbers below `end`, as many as one step takes;
        return their numbers. `dead`: nobody has read them."""
        oldest = self.blocks.first
        if oldest is None or oldest >= end:
            return ()
        if oldest < self.cursor:  # In one step either those that were delivered before, or others.
            end = min(end, self.cursor)
        # Each one may have a mark, an expiry or a key to remove.
        if self.marks or self.expiry or self.unique is not None:
            count_max = min(count_max, STEP_BODIES)
        gone = self.blocks.pop_first(end, count_max)
        if oldest < self.cursor:
            self.returned -= len(gone)
        else:
            self._advance()
        self.settle(gone, dead=dead)
        return gone

    # -- changes for the journal

    def tell_cursor(self) -> None:
        """Write the cursor with the next commit, even without other changes."""
        self.cursor_moved = True
        self._touch()

    def _touch(self) -> None:
        if not self.dirty:
            self.dirty = True
            self.pending.dirty.append(self)

    def remember(self, first: int, lines: list[bytes]) -> None:
        """Write these messages with the next commit."""
        if self.unwritten and self.unwritten_first + len(self.unwritten) != first:
            self.unwritten_runs.append(Run(self.unwritten_first, self.unwritten))
            self.unwritten = []
        if self.unwritten:
            self.unwritten.extend(lines)
        else:
            self.unwritten_first = first
            self.unwritten = lines.copy()
        self.pending.records += len(lines)
        self.pending.is_urgent = True
        self._touch()

    def mark(self, number: int, mark: Mark) -> None:
        """Set the mark of a living message, to be written."""
        self.marks[number] = mark
        self.tell_marks({number: mark})

    def tell_marks(self, marks: Mapping[int, Mark]) -> None:
        """Write marks with the next commit. Those that are only needed after a restart are not in
        `marks`."""
        self.marked.update(marks)
        self.pending.records += len(marks)
        self._touch()

    # Most messages of a busy queue are published and acked between two commits. They must not reach
    # the disk, nor may their acks: the index would look for a message that no segment has. So what
    # is new, from `taken_end` on, is cut by all that has left (`gone`), and of acks and moves only
    # those below `taken_end` remain, whose messages are in the journal. `next_seq` and `cursor`
    # cover the numbers left out: a restart sees numbers that nobody has, which is no gap.
    #
    # Marks need no such end: one is for a living message, old or new, and is dropped with it. Acks
    # one by one are looked up as a set, and ranges by bisection: a set of a range of a million
    # would be made on the event loop. A batch that only published, the most frequent one, comes
    # past all this with some tests for emptiness, and its list of lines is handed on uncopied.

    def take_change(self) -> LaneChange | None:
        """Take the pending changes, without messages published and settled within the batch."""
        runs, taken_end, marks = self.unwritten_runs, self.taken_end, self.marked
        settled, ranges = {*self.acked} if marks else (), [*self.acked_ranges, *self.moved]
        acks = compress(self.acked) if self.acked else []
        if self.acked_ranges:
            acks = union([*self.acked_ranges, *acks])
        moved = union(self.moved) if self.moved else []
        if self.unwritten:
            runs.append(Run(self.unwritten_first, self.unwritten))
        if self.aside:
            runs.append(Run(self.next_aside - len(self.aside), self.aside))
        gone = union([*acks, *moved]) if moved else acks
        if gone and gone[-1][0] + gone[-1][1] > taken_end:
            runs = [
                Run(start, run.lines[start - run.first : start - run.first + count])
                for run in runs
                for start, count in subtract(run.first, run.first + len(run.lines), gone)
            ]
            acks, moved = (
                [*below(left, taken_end), *within(left, SCHEDULED_SEQ, self.aside_end)]
                for left in (acks, moved)
            )
        if ranges and marks:
            marks = {number: mark for number, mark in marks.items() if not has_number(gone, number)}
        elif settled:
            marks = {number: marks[number] for number in marks.keys() - settled}
        cursor_moved = self.cursor_moved
        self.dirty = self.cursor_moved = False
        self.acked, self.acked_ranges, self.moved = [], [], []
        self.unwritten, self.unwritten_runs, self.marked, self.aside = [], [], {}, []
        self.taken_end, self.aside_end = self.next_seq, self.next_aside
        if not (runs or acks or moved or marks or cursor_moved):
            return None
        return LaneChange(self.id, self.next_seq, self.cursor, runs, acks, moved, marks)

    def put_back(self, change: LaneChange, taken_end: int) -> None:
        """A change could not be written: make it pending again, with its former `taken_end`."""
        # By that the next take cuts these messages by what was acked meanwhile. Runs come first, as
        # their numbers are lower; a mark only counts if there is no later one.
        self.taken_end = min(self.taken_end, taken_end)
        aside = (run.first for run in change.runs if run.first >= SCHEDULED_SEQ)
        self.aside_end = min(self.aside_end, *aside, SEQ_MAX)
        self.unwritten_runs[:0] = change.runs
        self.acked_ranges.extend(change.acks)
        self.moved.extend(change.moved)
        self.marked = change.marks | self.marked
        self.tell_cursor()

    # -- recovery and paging

    def restore_mark(self, number: int, mark: Mark) -> None:
        """A mark with only a TTL is stored in `expiry`."""
        if mark.version or mark.joined_us or mark.batch:
            self.marks[number] = mark
        if mark.batch:
            self.count(mark.batch, 1)
        if self.expiry is not None:
            self.expiry.add(number, mark.expires_us, mark.joined_us)

    def spill(self, committed: int) -> Work[None]:
        """Remove bodies from memory that are on disk: numbers below `committed` have been synced.

        A lane that is being consumed keeps its next page in memory.
        """
        keep_bytes = SCARCE_BYTES if self.owner.is_served else 0
        # What is delivered last is read again last.
        by_order = None if self.watcher is None else self.watcher.from_last()
        if by_order is None:
            while self.blocks.spill(committed, keep_bytes):
                yield GOES_ON
            return
        for numbers in by_order:
            if self.blocks.memory_bytes <= keep_bytes or self.deleted:
                break
            self.blocks.forget(number for number in numbers if number < committed)
            yield GOES_ON
