"""The numbered messages of a queue: where they are, and what the journal must learn about them.

The one rule: numbers from `cursor` up to `next_seq` have never been delivered and are all ready,
except `holes`. They are in three stretches without gaps: `head` in memory, then `paged` of them
only on disk, then `tail` in memory. Messages that were delivered and returned are below the cursor:
in `redo`, or, only on disk, in `redo_paged`.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, filterfalse, islice
from typing import Final, Protocol

from mqks.broker.base.budget import Budget
from mqks.broker.base.ranges import (
    Numbers,
    Range,
    below,
    compress,
    has_number,
    numbers,
    subtract,
    union,
)
from mqks.broker.base.turns import GOES_ON, Work, emptied
from mqks.broker.log.pending import NO_MARK, LaneChange, Mark, Pending, Run
from mqks.broker.message.bodies import NO_BODY, Returned, Stretch
from mqks.broker.message.expiry import Expiry
from mqks.errors import MqksError
from mqks.limits import (
    DELIVERY_BYTES,
    READ_AHEAD_BYTES,
    SCARCE_BYTES,
    SEQ_MAX,
    STEP_BODIES,
    STEP_MESSAGES,
)
from mqks.protocol import replies
from mqks.protocol.requests import shown

MESSAGE_OVERHEAD_BYTES: Final = 64
"""Memory of a bytes object and its entry in a list, besides its length (measured: 33 + 8, rounded
up by the allocator)."""

Delivery = tuple[int, bytes]
"""Sequence number and message."""


class Owner(Protocol):
    """The owner of a lane: a queue."""

    name: bytes

    @property
    def is_consumed(self) -> bool:
        """Whether the queue has consumers."""

    @property
    def is_served(self) -> bool:
        """Whether a consumer can take messages now."""

    def committed(self, end: int) -> None:
        """Numbers below `end` are on disk."""

    def become_sparse(self) -> None:
        """Numbers of its ready messages may be missing from now on."""


def size_of(lines: Sequence[bytes]) -> int:
    """Approximate memory of messages."""
    return sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * len(lines)


class Lane:
    """`memory` counts ready messages in memory, `pending` gets the changes to be written."""

    __slots__ = (
        *("acked", "acked_ranges", "boundary", "cursor", "cursor_moved", "deleted"),
        *("dirty", "expiry", "holes", "paged_bytes", "redo_paged_bytes"),
        *(
            "has_attributes",
            "head",
            "head_bytes",
            "id",
            "marked",
            "marks",
            "memory",
            "moved",
            "next_seq",
        ),
        *("owner", "paged", "paging", "pending", "redo", "redo_bytes", "redo_paged"),
        *("tail", "tail_bytes", "unwritten", "unwritten_first", "unwritten_runs"),
    )

    def __init__(self, lane_id: int, owner: Owner, memory: Budget, pending: Pending) -> None:
        self.id = lane_id
        self.owner = owner
        self.memory = memory
        self.pending = pending
        self.deleted = False
        self.next_seq = 1
        self.cursor = 1
        self.head = Stretch()
        self.head_bytes = 0
        self.paged = self.paged_bytes = 0
        """Number of paged messages, and the approximate length of their lines."""
        self.paging = False
        """A page was requested and has not arrived yet."""
        self.tail = Stretch()
        self.tail_bytes = 0
        self.redo = Returned()
        self.redo_bytes = 0
        self.redo_paged = Returned()
        """Those that are only on disk."""
        self.redo_paged_bytes = 0
        self.holes = Numbers()
        """Numbers in the stretches that are not ready: they are scheduled, or were taken out of
        order. Each is skipped at its turn."""
        self.expiry: Expiry | None = None
        """When messages expire, if any do."""
        self.has_attributes = False
        """Some of its messages may have attributes after their text, see `replies.ATTRIBUTES`."""
        self.marks: dict[int, Mark] = {}
        """Marks of living messages that have one."""

        self.dirty = False
        self.boundary = 1
        """Numbers below this one were taken by an earlier batch."""
        self.unwritten: list[bytes] = []
        self.unwritten_first = 1
        self.unwritten_runs: list[Run] = []
        self.acked: list[int] = []
        self.acked_ranges: list[Range] = []
        self.moved: list[Range] = []
        """Numbers whose messages were appended elsewhere under new numbers, not written yet."""
        self.marked: dict[int, Mark] = {}
        self.cursor_moved = False

    @property
    def has_unwritten_moves(self) -> bool:
        """Whether messages may have come here from another place that the journal still has."""
        return self.next_seq > self.boundary and bool(self.moved or self.pending.moves)

    # -- contents

    @property
    def ready(self) -> int:
        """Number of ready messages."""
        returned = len(self.redo) + len(self.redo_paged)
        return self.next_seq - self.cursor + returned - len(self.holes)

    @property
    def ready_bytes(self) -> int:
        """Approximate length of their lines: messages taken out on disk count with the mean."""
        if not self.ready:
            return 0
        in_memory = len(self.head) + len(self.tail) + len(self.redo)
        on_disk = self.paged_bytes + self.redo_paged_bytes
        return self.memory_bytes - MESSAGE_OVERHEAD_BYTES * in_memory + on_disk

    @property
    def memory_bytes(self) -> int:
        """Approximate memory of ready messages."""
        return self.head_bytes + self.tail_bytes + self.redo_bytes

    @property
    def oldest(self) -> int | None:
        """Number of the oldest ready message."""
        if self.redo_is_next:
            return self.redo.first
        if self.redo_paged:
            return self.redo_paged.first
        return self.cursor if self.next_seq > self.cursor else None

    @property
    def redo_is_next(self) -> bool:
        """Whether the oldest returned message is in memory."""
        redo, paged = self.redo, self.redo_paged
        return bool(redo) and (not paged or redo.first < paged.first)

    @property
    def is_next_in_memory(self) -> bool:
        """Whether the next message can be delivered without reading the disk."""
        return self.redo_is_next or bool(self.head and not self.redo_paged)

    # -- adding messages

    def append(self, first: int, lines: list[bytes]) -> None:
        """Append messages with numbers from `first` up to `next_seq`; they must be written."""
        self._extend(lines)
        self.remember(first, lines)

    def _extend(self, lines: list[bytes]) -> None:
        size = size_of(lines)
        self.memory.used += size
        if self.paged:
            self.tail.extend(lines)
            self.tail_bytes += size
        else:
            self.head.extend(lines)
            self.head_bytes += size

    def append_aside(self, lines: list[bytes], marks: list[Mark]) -> int:
        """Number messages that are not ready, leaving holes; return the number of the first. They
        must be written."""
        first = self.next_seq
        self.next_seq = first + len(lines)
        if self.cursor == first:
            self.cursor = self.next_seq
            self.tell_cursor()
        else:
            self._extend([NO_BODY] * len(lines))
            for number in range(first, self.next_seq):
                self.holes.add(number)
            self.owner.become_sparse()
        self.remember(first, lines)
        self.tell_marks(dict(enumerate(marks, first)))
        return first

    def append_all(self, lines: list[bytes]) -> None:
        """Append messages that have attributes and no mark."""
        first, self.has_attributes = self.next_seq, True
        self.next_seq = first + len(lines)
        if self.expiry is not None:
            self.expiry.joined(first)
        self.append(first, lines)

    def append_marked(self, line: bytes, mark: Mark) -> None:
        """Append a message with its mark."""
        self.has_attributes = self.has_attributes or replies.ATTRIBUTES in line
        number = self.next_seq
        self.next_seq = number + 1
        if self.expiry is not None:
            self.expiry.joined(number)
        if mark != NO_MARK:
            self.tell_mark(number, mark)
            self._restore_mark(number, mark)
        self.append(number, [line])

    def unwritten_numbers(self, first: int) -> Iterator[range]:
        """Numbers from `first` on of messages that are not written yet."""
        runs = [Run(self.unwritten_first, self.unwritten), *reversed(self.unwritten_runs)]
        for start, lines in runs:
            numbers = range(max(first, start), start + len(lines))
            if not numbers:
                break
            yield numbers

    def give_back(self, number: int, line: bytes, mark: Mark) -> None:
        """Return a message to its old place."""
        self.mark(number, mark)
        self.keep_returned(number, line)

    def keep_returned(self, number: int, line: bytes) -> None:
        self.redo.add(number, line)
        self._count_redo(len(line) + MESSAGE_OVERHEAD_BYTES)

    def _count_redo(self, size: int) -> None:
        self.redo_bytes += size
        self.memory.used += size

    # -- delivering messages

    def front(self, most: int) -> list[bytes]:
        """Take the first messages of the head, at most `most`, or as many as one delivery takes.
        Those not delivered must be returned by `put_front`. The first one is not a hole."""
        count = max(1, min(most, DELIVERY_BYTES * len(self.head) // self.head_bytes))
        if self.holes.blocks:
            count = 1 + self._before_hole(self.cursor + 1, count - 1)
        return self._pop_head(count)

    def _before_hole(self, first: int, count: int) -> int:
        """How many of `count` numbers from `first` on precede a hole."""
        numbers = range(first, first + count)
        return next(filter(self.holes.__contains__, numbers), numbers.stop) - first

    def _pop_head(self, count: int) -> list[bytes]:
        lines = self.head.take(count)
        size = size_of(lines) if self.head else self.head_bytes
        self.head_bytes -= size
        self.memory.used -= size
        return lines

    def put_front(self, lines: list[bytes]) -> None:
        size = size_of(lines)
        self.head.put_back(lines)
        self.head_bytes += size
        self.memory.used += size

    def pop_redo(self) -> Delivery:
        """Take the oldest returned message that is in memory."""
        number, line = self.redo.pop_first()
        self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
        return number, line

    def _pop_redo_paged(self) -> int:
        self.redo_paged_bytes -= self.redo_paged_bytes // len(self.redo_paged)
        number, _ = self.redo_paged.pop_first()
        return number

    # -- taking messages out of order

    def is_waiting(self, number: int) -> bool:
        if number >= self.cursor:
            return number < self.next_seq and number not in self.holes
        return number in self.redo or number in self.redo_paged

    def waiting(self, first: int, end: int) -> tuple[list[int], int]:
        """Numbers of ready messages from `first` on and below `end`, in order, as many as one step
        looks at; and the first number that was not looked at."""
        if first < self.cursor:
            some = self.redo.after(first, STEP_MESSAGES)
            if self.redo_paged:
                some = sorted(some + self.redo_paged.after(first, STEP_MESSAGES))[:STEP_MESSAGES]
            if some:
                stop = some[-1] + 1 if len(some) == STEP_MESSAGES else self.cursor
                return some[: bisect_left(some, end)], min(stop, end)
            first = min(self.cursor, end)
        numbers = range(first, min(end, first + STEP_MESSAGES))
        is_hole = self.holes.__contains__
        found = [*filterfalse(is_hole, numbers)] if self.holes.blocks else [*numbers]
        return found, numbers.stop

    def body(self, number: int) -> bytes | None:
        """Body of a ready message; None if it is only on disk."""
        place = number - self.cursor
        if place < 0:
            return self.redo.get(number)
        if place < len(self.head):
            return self.head[place]
        place -= len(self.head) + self.paged
        return None if place < 0 else self.tail[place]

    def oldest_waiting(self, end: int, count: int) -> Iterator[int]:
        """Numbers below `end` of the oldest ready messages, at most `count`. The caller takes each
        one out before it asks for the next."""
        room = STEP_MESSAGES
        while count and room and (oldest := self.oldest) is not None and oldest < end:
            if oldest not in self.holes:
                yield oldest
                count -= 1
            elif self.skip():
                room -= 1

    def take_out(self, number: int) -> None:
        """Take out a ready message; the caller settles or moves it."""
        if number >= self.cursor:
            self.holes.add(number)
            self._blank(number - self.cursor)
            if number != self.cursor:
                self.owner.become_sparse()
            self.skip()
        elif (line := self.redo.pop(number)) is not None:
            self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
        else:
            self.redo_paged_bytes -= self.redo_paged_bytes // len(self.redo_paged)
            self.redo_paged.pop(number)

    def _blank(self, place: int) -> None:
        """Remove a body from memory, leaving a hole."""
        if place < len(self.head):
            size = self.head.blank(place)
            self.head_bytes -= size
        elif place < len(self.head) + self.paged:
            self.paged_bytes -= self.paged_bytes // self.paged
            return
        else:
            size = self.tail.blank(place - len(self.head) - self.paged)
            self.tail_bytes -= size
        self.memory.used -= size

    def skip(self) -> bool:
        """Skip holes that are next, as many as one step takes; return whether there were any."""
        holes, count = self.holes, 0
        if not holes.blocks:
            return False
        while self.cursor + count in holes and count < STEP_MESSAGES:
            holes.discard(self.cursor + count)
            count += 1
        if count:
            self._pass(count)
        return count > 0

    def _pass(self, count: int) -> None:
        """Remove the first `count` numbers from the stretches."""
        self.cursor += count
        self.tell_cursor()
        count -= self._forget_head(count)
        on_disk = min(count, self.paged)
        self._take_paged(on_disk)
        self._forget_head(count - on_disk)

    def _forget_head(self, count: int) -> int:
        """Remove at most `count` bodies from the start of the head; return how many."""
        return len(self._pop_head(count)) if self.head else 0

    def _take_paged(self, count: int) -> None:
        """Remove `count` messages from the paged ones."""
        self.paged -= count
        if self.paged:
            self.paged_bytes -= self.paged_bytes * count // (self.paged + count)
        else:
            self.paged_bytes = 0
            self._join()

    def settle(self, numbers: Sequence[int]) -> None:
        """Settle these messages: the journal may delete them."""
        self._forget_marks(numbers)
        if isinstance(numbers, range) and numbers.step == 1:
            self.acked_ranges.append((numbers.start, len(numbers)))
        else:
            self.acked.extend(numbers)
        self.pending.records += len(numbers)
        self._touch()

    def _forget_marks(self, numbers: Sequence[int]) -> None:
        """Remove the marks of these messages."""
        if self.marks:
            marked: Iterable[int] = numbers
            # Iterate over the shorter one.
            if isinstance(numbers, range) and len(self.marks) < len(numbers):
                marked = [number for number in self.marks if number in numbers]
            for number in marked:
                self.marks.pop(number, None)
        if self.expiry is not None:
            self.expiry.discard(numbers)

    def move_out(self, number: int) -> Mark:
        """Record that this message is appended elsewhere in the same commit; return its mark."""
        mark = self.mark_of(number)
        self.move_out_all([number])
        return mark

    def move_out_all(self, numbers: list[int]) -> None:
        """The same for several messages, whose marks are no longer needed."""
        self._forget_marks(numbers)
        self.moved += compress(numbers)
        self._touch()

    def mark_of(self, number: int) -> Mark:
        """The mark of a living message."""
        mark = self.marks.get(number)
        if mark is None and self.expiry is not None:
            mark = Mark(expires_us=self.expiry.own_us(number))
        return mark or NO_MARK

    def trim(self, end: int) -> Work[int]:
        """Drop the ready messages with numbers below `end`; return how many."""
        end, count = min(end, self.next_seq), 0
        while self.oldest_place < end and not self.deleted:
            count += self.trim_some(end)
            yield GOES_ON
        return count

    @property
    def oldest_place(self) -> int:
        """Number of the next message or hole; `next_seq` if there is none."""
        oldest = self.oldest
        return self.next_seq if oldest is None else oldest

    def _pop_returned(self, end: int, count: int) -> list[int]:
        """Remove the first returned messages, with numbers below `end`; return their numbers."""
        gone: list[int] = []
        while len(gone) < count and (self.redo or self.redo_paged) and self.oldest_place < end:
            gone.append(self.pop_redo()[0] if self.redo_is_next else self._pop_redo_paged())
        return gone

    def trim_some(self, end: int, count_max: int = SEQ_MAX) -> int:
        """Drop the oldest ready messages with numbers below `end`, as many as one step takes;
        return how many."""
        if self.skip():
            return 0
        if returned := self._pop_returned(end, min(count_max, STEP_MESSAGES)):
            self.settle(returned)
            return len(returned)
        first = self.cursor
        end = min(end, first + count_max, self.next_seq)
        if first >= end:
            return 0
        on_disk = self.paged
        if self.marks or self.expiry:  # Each one may have a mark or an expiry to remove.
            on_disk = min(on_disk, STEP_BODIES)
        count = min(end - first, min(len(self.head), STEP_BODIES) or on_disk)
        if self.holes:
            count = self._before_hole(first, min(count, STEP_BODIES))
        self._pass(count)
        self.settle(range(first, first + count))
        return count

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
        self._touch()

    def mark(self, number: int, mark: Mark) -> None:
        """Set the mark of a living message, to be written."""
        self.marks[number] = mark
        self.tell_mark(number, mark)

    def tell_mark(self, number: int, mark: Mark) -> None:
        """The same for a mark that is only needed after a restart."""
        self.tell_marks({number: mark})

    def tell_marks(self, marks: Mapping[int, Mark]) -> None:
        self.marked.update(marks)
        self.pending.records += len(marks)
        self._touch()

    def take_change(self) -> LaneChange | None:
        """Take the pending changes, without messages published and settled within the batch."""
        runs, boundary, marks = self.unwritten_runs, self.boundary, self.marked
        acks = union([*self.acked_ranges, *compress(self.acked)])
        moved = union(self.moved)
        if self.unwritten:
            runs.append(Run(self.unwritten_first, self.unwritten))
        gone = union([*acks, *moved]) if moved else acks
        if gone and gone[-1][0] + gone[-1][1] > boundary:
            runs = [
                Run(start, run.lines[start - run.first : start - run.first + count])
                for run in runs
                for start, count in subtract(run.first, run.first + len(run.lines), gone)
            ]
            acks, moved = below(acks, boundary), below(moved, boundary)
            marks = {number: mark for number, mark in marks.items() if not has_number(gone, number)}
        cursor_moved = self.cursor_moved
        self.dirty = self.cursor_moved = False
        self.acked, self.acked_ranges, self.moved = [], [], []
        self.unwritten, self.unwritten_runs, self.marked = [], [], {}
        self.boundary = self.next_seq
        if not (runs or acks or moved or marks or cursor_moved):
            return None
        return LaneChange(self.id, self.next_seq, self.cursor, runs, acks, moved, marks)

    def put_back(self, change: LaneChange, boundary: int) -> None:
        """A change could not be written: make it pending again, with its former `boundary`."""
        self.boundary = min(self.boundary, boundary)
        self.unwritten_runs[:0] = change.runs
        self.acked_ranges.extend(change.acks)
        self.moved.extend(change.moved)
        self.marked = change.marks | self.marked
        self.tell_cursor()

    # -- recovery and paging

    def restore(
        self,
        next_seq: int,
        cursor: int,
        returned: Iterable[tuple[int, Mark]],
        waiting: Iterable[tuple[int, Mark]],
        holes: Iterable[Range] = (),
    ) -> None:
        """Start with the state of the journal: all messages are on disk, `waiting` are the marks of
        those from the cursor on, and the numbers in `holes` there are settled.

        `returned` are the living messages below the cursor, each with its mark; those that a
        consumer held at the crash count as returned once more.
        """
        self.next_seq = self.boundary = next_seq
        self.cursor = cursor
        self.paged = next_seq - cursor
        for number in numbers(holes):
            self.holes.add(number)
        for number, mark in waiting:
            self._restore_mark(number, mark)
        for number, mark in returned:
            # A message below the cursor without a mark was delivered.
            if mark.redelivered or (not mark.version and mark != NO_MARK):
                mark = mark.returned()
                self.tell_mark(number, mark)
            self._restore_mark(number, mark)
            self.redo_paged.add(number, NO_BODY)

    def _restore_mark(self, number: int, mark: Mark) -> None:
        """A mark with only a TTL is stored in `expiry`."""
        if mark.version or mark.joined_us:
            self.marks[number] = mark
        if self.expiry is not None:
            self.expiry.add(number, mark.expires_us, mark.joined_us)

    def spill(self, committed: int) -> Work[None]:
        """Remove bodies from memory that are on disk: numbers below `committed` have been synced.

        A lane that is being consumed keeps its next page in memory.
        """
        while self.redo_bytes > (2 * SCARCE_BYTES if self.owner.is_consumed else 0):
            if not self._spill_returned(committed):
                break
            yield GOES_ON
        if self.paged:
            # A page or a trim between two steps may have joined the tail to the head.
            while self.paged and self._spill_tail(committed):
                yield GOES_ON
            return
        keep = 0
        if self.owner.is_served and self.head:
            keep = SCARCE_BYTES * len(self.head) // self.head_bytes
        durable = min(len(self.head), committed - self.cursor)
        if durable <= keep:
            return
        behind = self.head.take_last(len(self.head) - durable)
        self.tail.extend(behind)
        size = size_of(behind)
        self.head_bytes -= size
        self.tail_bytes += size
        self._spill_head(keep)
        # If they were joined meanwhile, the end of the head may not be on disk.
        yield GOES_ON
        while self._has_spilled and len(self.head) > keep:
            self._spill_head(keep)
            yield GOES_ON

    @property
    def _has_spilled(self) -> bool:
        return self.paged > 0

    def _spill_head(self, keep: int) -> None:
        gone = self.head.take_last(min(len(self.head) - keep, STEP_BODIES))
        self.paged += len(gone)
        size = size_of(gone)
        self.paged_bytes += size - MESSAGE_OVERHEAD_BYTES * len(gone)
        self.head_bytes -= size
        self.memory.used -= size

    def _spill_tail(self, committed: int) -> bool:
        durable = min(len(self.tail), committed - (self.next_seq - len(self.tail)))
        count = max(0, min(durable, STEP_BODIES))
        self.paged += count
        size = size_of(self.tail.take(count))
        self.paged_bytes += size - MESSAGE_OVERHEAD_BYTES * count
        self.tail_bytes -= size
        self.memory.used -= size
        return count > 0

    def _spill_returned(self, committed: int) -> bool:
        """Spill the last ones."""
        for number in (some := self.redo.before(committed)):
            line = self.redo.pop(number)
            assert line is not None
            self.redo_paged.add(number, NO_BODY)
            self.redo_paged_bytes += len(line)
            self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
        return some != []

    @property
    def page_first(self) -> int | None:
        """Number of the first message that is only on disk; None if there is none."""
        if self.redo_paged:
            return self.redo_paged.first
        return self.cursor + len(self.head) if self.paged else None

    @property
    def wants_page(self) -> bool:
        """Whether to read a page. Returned messages are needed first. Others are read ahead of the
        consumers while there is memory for them."""
        if self.paging:
            return False
        if self.redo_paged:
            return not self.redo_is_next
        if not self.paged:
            return False
        if self.memory.is_short:
            return not self.head
        return self.head_bytes < READ_AHEAD_BYTES

    def page_in(self, first: int | None, runs: list[Run]) -> None:
        """Add a page from disk: all living messages from `first` on, which was `page_first` when
        the read began. The queue may have been trimmed or deleted meanwhile: a missing message is
        an error only if it is still wanted. Raises MqksError."""
        self.paging = False
        self.skip()
        if not self.has_attributes:
            self.has_attributes = any(replies.ATTRIBUTES in line for r in runs for line in r.lines)
        wanted = self.page_first
        if first is None or wanted is None:
            return
        is_found = first in self.holes or (runs and runs[0].first == first)
        if wanted == first and not is_found:
            name = shown(self.owner.name)
            raise MqksError(f"messages of queue {name} from {first} are missing")
        if self.redo_paged:
            self._page_in_returned(runs)
            return
        for run in runs:
            self._fill(run.first)
            # A trim may have removed its first messages, or all.
            gone = self.cursor + len(self.head) - run.first
            if self.paged and 0 <= gone < len(run.lines):
                self._extend_head(run.lines[gone:])
        self._fill(self.next_seq)

    def _fill(self, end: int) -> None:
        """Append holes up to `end` to the head, for messages that are no longer on disk; one step
        of them."""
        first = self.cursor + len(self.head)
        end = min(end, first + self.paged, first + STEP_BODIES)
        numbers = range(first, end)
        count = next(filterfalse(self.holes.__contains__, numbers), end) - first
        if count > 0:
            self._extend_head([NO_BODY] * count)

    def _page_in_returned(self, runs: list[Run]) -> None:
        lines = {number: line for run in runs for number, line in enumerate(run.lines, run.first)}
        while self.redo_paged and self.redo_paged.first in lines:
            # Always take what is needed next: it would be requested again at once.
            enough = self.memory.is_short and self.redo_bytes >= SCARCE_BYTES
            if enough and self.redo_is_next:
                break
            number = self._pop_redo_paged()
            self.keep_returned(number, lines[number])

    def _extend_head(self, lines: list[bytes]) -> None:
        del lines[self.paged :]
        if self.memory.is_short:
            # There may be many queues with slow consumers.
            room = SCARCE_BYTES - self.head_bytes
            del lines[max(not self.head, room * len(lines) // size_of(lines)) :]
        size = size_of(lines)
        self.memory.used += size
        self.head_bytes += size
        self.head.extend(lines)
        self._take_paged(len(lines))

    def _join(self) -> None:
        """Join head and tail when no message is only on disk."""
        if self.head:
            self.head.extend(self.tail.take(len(self.tail)))
        else:
            self.head, self.tail = self.tail, self.head
        self.head_bytes += self.tail_bytes
        self.tail_bytes = 0

    def delete(self) -> Iterator[object]:
        """Forget all messages at once. The memory is freed step by step by the returned
        iterator."""
        self.deleted = True
        self.memory.used -= self.memory_bytes
        self.head_bytes = self.tail_bytes = self.redo_bytes = self.paged = 0
        self.paged_bytes = self.redo_paged_bytes = 0
        self.expiry = None
        gone = [each.emptied() for each in (self.head, self.tail, self.redo, self.redo_paged)]
        gone += [
            emptied(items)
            for items in (
                *(self.marks, self.marked, self.unwritten, self.unwritten_runs, self.acked),
                *(self.acked_ranges, self.moved, self.holes.blocks),
            )
        ]
        self.head, self.tail, self.redo, self.redo_paged = (
            Stretch(),
            Stretch(),
            Returned(),
            Returned(),
        )
        self.marks, self.marked, self.holes = {}, {}, Numbers()
        self.unwritten, self.unwritten_runs = [], []
        self.acked, self.acked_ranges, self.moved = [], [], []
        return chain.from_iterable(gone)


def let_go(things: Iterator[object]) -> Work[None]:
    """Consume an iterator of things to be freed, one per step."""
    while sum(1 for _ in islice(things, STEP_BODIES)):
        yield GOES_ON
