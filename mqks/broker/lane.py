"""Numbered messages, where they are, and what the journal must learn of them.

The one rule: numbers from `cursor` up to `next_seq` have never been delivered and are all alive.
They lie in three stretches without gaps: `head` in memory, then `paged` of them only on disk,
then `tail` in memory. What was delivered and came back lies below the cursor: in `redo`, or, only
on disk, in `redo_paged`.
"""

import heapq
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Final, Protocol

from mqks.broker.budget import Budget
from mqks.broker.pending import NO_MARK, LaneChange, Mark, Pending, Run
from mqks.broker.ranges import Range, below, compress, subtract, union
from mqks.broker.turns import GOES_ON, Work, emptied
from mqks.errors import MqksError
from mqks.limits import (
    DELIVERY_BYTES,
    READ_AHEAD_BYTES,
    SCARCE_BYTES,
    STEP_BODIES,
    STEP_MESSAGES,
)
from mqks.protocol.requests import shown

MESSAGE_OVERHEAD_BYTES: Final = 64
"""A bytes object and its place in a deque, beside its length (measured: 33 + 8, rounded up by
the allocator)."""

Delivery = tuple[int, bytes]
"""Sequence number and message."""


class Owner(Protocol):
    """Whose lane it is: a queue."""

    name: bytes

    @property
    def is_consumed(self) -> bool:
        """Whether there are consumers."""

    @property
    def is_served(self) -> bool:
        """Whether one of them takes messages now."""


def size_of(lines: Sequence[bytes]) -> int:
    """What messages take in memory, about."""
    return sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * len(lines)


class Lane:
    """`memory` counts what waits in memory, `pending` is told what must last."""

    __slots__ = (
        *("acked", "acked_ranges", "boundary", "cursor", "cursor_moved", "deleted", "dirty"),
        *("head", "head_bytes", "id", "marked", "marks", "memory", "moved", "next_seq"),
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
        self.head: deque[bytes] = deque()
        self.head_bytes = 0
        self.paged = 0
        self.paging = False
        """A page has been asked for and has not come yet."""
        self.tail: deque[bytes] = deque()
        self.tail_bytes = 0
        self.redo: list[Delivery] = []
        """A heap: the oldest comes first."""
        self.redo_bytes = 0
        self.redo_paged: list[int] = []
        """A heap as well: numbers of those that are only on disk."""
        self.marks: dict[int, Mark] = {}
        """Of living messages, where there is something to tell."""

        self.dirty = False
        self.boundary = 1
        """Everything below it was taken by an earlier batch."""
        self.unwritten: list[bytes] = []
        self.unwritten_first = 1
        self.unwritten_runs: list[Run] = []
        self.acked: list[int] = []
        self.acked_ranges: list[Range] = []
        self.moved: list[Range] = []
        """Numbers whose messages are unwritten elsewhere, under new numbers."""
        self.marked: dict[int, Mark] = {}
        self.cursor_moved = False

    # -- what there is

    @property
    def ready(self) -> int:
        """Messages that wait."""
        return self.next_seq - self.cursor + len(self.redo) + len(self.redo_paged)

    @property
    def memory_bytes(self) -> int:
        """Waiting messages in memory, about."""
        return self.head_bytes + self.tail_bytes + self.redo_bytes

    @property
    def oldest(self) -> int | None:
        """Number of the message that has waited longest."""
        if self.redo_is_next:
            return self.redo[0][0]
        if self.redo_paged:
            return self.redo_paged[0]
        return self.cursor if self.next_seq > self.cursor else None

    @property
    def redo_is_next(self) -> bool:
        """Whether the oldest of what came back is in memory."""
        return bool(self.redo) and (not self.redo_paged or self.redo[0][0] < self.redo_paged[0])

    @property
    def is_next_in_memory(self) -> bool:
        """Whether the message that is next can be delivered at once."""
        return self.redo_is_next or bool(self.head and not self.redo_paged)

    # -- messages come in

    def append(self, first: int, lines: list[bytes]) -> None:
        """Take messages in, from number `first` on, up to `next_seq`: they must last."""
        size = size_of(lines)
        self.memory.used += size
        if self.paged:
            self.tail.extend(lines)
            self.tail_bytes += size
        else:
            self.head.extend(lines)
            self.head_bytes += size
        self.remember(first, lines)

    def append_marked(self, line: bytes, mark: Mark) -> None:
        """Take one in with its mark."""
        number = self.next_seq
        self.next_seq = number + 1
        if mark != NO_MARK:
            self.mark(number, mark)
        self.append(number, [line])

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Returned because its consumer is gone: to the place it had, with one more retry."""
        for number, line in deliveries:
            self.mark(number, self.marks.get(number, NO_MARK).returned())
            self._keep_returned(number, line)

    def _keep_returned(self, number: int, line: bytes) -> None:
        heapq.heappush(self.redo, (number, line))
        self._count_redo(len(line) + MESSAGE_OVERHEAD_BYTES)

    def _count_redo(self, size: int) -> None:
        self.redo_bytes += size
        self.memory.used += size

    # -- messages go out

    def front(self) -> list[bytes]:
        """Take the first messages of the head, as many as one delivery brings; what of them is not
        delivered must come back by `put_front`."""
        return self._pop_head(max(1, DELIVERY_BYTES * len(self.head) // self.head_bytes))

    def _pop_head(self, count: int) -> list[bytes]:
        head = self.head
        if count >= len(head):
            lines = list(head)
            head.clear()
            size = self.head_bytes
        else:
            popleft = head.popleft
            lines = [popleft() for _ in range(count)]
            size = size_of(lines)
        self.head_bytes -= size
        self.memory.used -= size
        return lines

    def put_front(self, lines: list[bytes]) -> None:
        size = size_of(lines)
        self.head.extendleft(reversed(lines))
        self.head_bytes += size
        self.memory.used += size

    def pop_redo(self) -> Delivery:
        """Take the oldest of what came back and is in memory."""
        number, line = heapq.heappop(self.redo)
        self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
        return number, line

    def pop_waiting(self, end: int) -> list[Delivery]:
        """Take the next messages with numbers below `end`, as many as one step takes; none when
        the next one is only on disk, or there is none."""
        if self.redo_is_next or self.redo_paged:
            some: list[Delivery] = []
            while self.redo_is_next and self.redo[0][0] < end and len(some) < STEP_MESSAGES:
                some.append(self.pop_redo())
            return some
        lines = self._pop_head(min(end - self.cursor, len(self.head), STEP_MESSAGES))
        first = self.cursor
        self.cursor += len(lines)
        if lines:
            self.tell_cursor()
        return list(enumerate(lines, first))

    def settle(self, numbers: Sequence[int]) -> None:
        """These messages are done with: the journal may forget them."""
        if self.marks:
            marked: Iterable[int] = numbers
            # A trim settles millions at once: of the two the shorter one is walked.
            if isinstance(numbers, range) and len(self.marks) < len(numbers):
                marked = [number for number in self.marks if number in numbers]
            for number in marked:
                self.marks.pop(number, None)
        if isinstance(numbers, range) and numbers.step == 1:
            self.acked_ranges.append((numbers.start, len(numbers)))
        else:
            self.acked.extend(numbers)
        self.pending.records += len(numbers)
        self._touch()

    def move_out(self, number: int) -> Mark:
        """This message is appended elsewhere in the same commit; return its mark."""
        self.moved.append((number, 1))
        self._touch()
        return self.marks.pop(number, NO_MARK)

    def trim(self, end: int) -> Work[int]:
        """Drop the waiting messages with numbers below `end`; return how many."""
        end, count = min(end, self.next_seq), 0
        while returned := self._pop_returned(end):
            self.settle(returned)
            count += len(returned)
            yield GOES_ON
        while self.cursor < end and not self.deleted:
            count += self._trim_some(end)
            yield GOES_ON
        return count

    def _pop_returned(self, end: int) -> list[int]:
        """Let go of some of what came back and has a number below `end`; return the numbers."""
        gone: list[int] = []
        while self.redo_paged and self.redo_paged[0] < end and len(gone) < STEP_MESSAGES:
            gone.append(heapq.heappop(self.redo_paged))
        while self.redo and self.redo[0][0] < end and len(gone) < STEP_MESSAGES:
            gone.append(self.pop_redo()[0])
        return gone

    def _trim_some(self, end: int) -> int:
        """The first stretch of what was never delivered, or as much of it as one step takes."""
        first = self.cursor
        if self.head:
            count = min(end - first, len(self.head), STEP_BODIES)
            freed = _forget(self.head, count)
            self.head_bytes -= freed
            self.memory.used -= freed
        else:
            count = min(end - first, self.paged)
            self.paged -= count
        if not self.paged:
            self._join()
        self.settle(range(first, first + count))
        self.cursor += count
        self.tell_cursor()
        return count

    # -- what the journal must learn

    def tell_cursor(self) -> None:
        """The journal must learn the cursor, whatever else happens."""
        self.cursor_moved = True
        self._touch()

    def _touch(self) -> None:
        if not self.dirty:
            self.dirty = True
            self.pending.dirty.append(self)

    def remember(self, first: int, lines: list[bytes]) -> None:
        """These messages must last."""
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
        """What is told of a living message, and must last."""
        self.marks[number] = self.marked[number] = mark
        self.pending.records += 1
        self._touch()

    def take_change(self) -> LaneChange | None:
        """Take what is pending. What was published and settled within the batch leaves no trace."""
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
        cursor_moved = self.cursor_moved
        self.dirty = self.cursor_moved = False
        self.acked, self.acked_ranges, self.moved = [], [], []
        self.unwritten, self.unwritten_runs, self.marked = [], [], {}
        self.boundary = self.next_seq
        if not (runs or acks or moved or marks or cursor_moved):
            return None
        return LaneChange(self.id, self.next_seq, self.cursor, runs, acks, moved, marks)

    def put_back(self, change: LaneChange, boundary: int) -> None:
        """A change could not be written: it is pending again; `boundary` as it was before."""
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
        waiting: Mapping[int, Mark],
    ) -> None:
        """Begin with what the journal knows: everything is on disk, and `waiting` are the marks
        of those from the cursor on.

        `returned` are the living messages below the cursor, each with its mark; what a consumer
        held at the crash counts as rejected.
        """
        self.next_seq = self.boundary = next_seq
        self.cursor = cursor
        self.paged = next_seq - cursor
        self.marks.update(waiting)
        for number, mark in returned:
            if mark.redelivered:
                self.mark(number, mark.returned())
            elif mark != NO_MARK:
                self.marks[number] = mark
            self.redo_paged.append(number)
        heapq.heapify(self.redo_paged)

    def spill(self, committed: int) -> Work[None]:
        """Let go of bodies in memory that are on disk: what is below `committed` has been synced.

        What is being consumed keeps its next page.
        """
        while self.redo_bytes > (2 * SCARCE_BYTES if self.owner.is_consumed else 0):
            if not self._spill_returned(committed):
                break
            yield GOES_ON
        if self.paged:
            # Between two steps a page or a trim may have joined the tail to the head.
            while self.paged and self._spill_tail(committed):
                yield GOES_ON
            return
        keep = 0
        if self.owner.is_served and self.head:
            keep = SCARCE_BYTES * len(self.head) // self.head_bytes
        durable = min(len(self.head), committed - self.cursor)
        if durable <= keep:
            return
        behind = [self.head.pop() for _ in range(len(self.head) - durable)]
        self.tail.extendleft(behind)
        size = size_of(behind)
        self.head_bytes -= size
        self.tail_bytes += size
        self._spill_head(keep)
        # Joined meanwhile, the head would end with what is not on disk.
        yield GOES_ON
        while self._has_spilled and len(self.head) > keep:
            self._spill_head(keep)
            yield GOES_ON

    @property
    def _has_spilled(self) -> bool:
        return self.paged > 0

    def _spill_head(self, keep: int) -> None:
        pop = self.head.pop
        gone = [pop() for _ in range(min(len(self.head) - keep, STEP_BODIES))]
        self.paged += len(gone)
        size = size_of(gone)
        self.head_bytes -= size
        self.memory.used -= size

    def _spill_tail(self, committed: int) -> bool:
        durable = min(len(self.tail), committed - (self.next_seq - len(self.tail)))
        count = max(0, min(durable, STEP_BODIES))
        self.paged += count
        size = _forget(self.tail, count)
        self.tail_bytes -= size
        self.memory.used -= size
        return count > 0

    def _spill_returned(self, committed: int) -> bool:
        """Whatever is taken off a heap's end, a heap is left."""
        some = [self.redo.pop() for _ in range(min(len(self.redo), STEP_MESSAGES))]
        freed = 0
        for delivery in some:
            if delivery[0] < committed:
                heapq.heappush(self.redo_paged, delivery[0])
                freed += len(delivery[1]) + MESSAGE_OVERHEAD_BYTES
            else:
                heapq.heappush(self.redo, delivery)
        self._count_redo(-freed)
        return freed > 0

    @property
    def page_first(self) -> int | None:
        """Number of the first message that is only on disk; None when there is none."""
        if self.redo_paged:
            return self.redo_paged[0]
        return self.cursor + len(self.head) if self.paged else None

    @property
    def wants_page(self) -> bool:
        """What came back is needed before anything else. All other comes ahead of its consumers,
        as long as there is memory for it."""
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
        """A page has come from disk: all living messages from `first` on, which was `page_first`
        when the reading began. What is missing from it now counts only if it is still wanted: the
        queue may have been trimmed or deleted meanwhile. Raises MqksError."""
        self.paging = False
        wanted = self.page_first
        if first is None or wanted is None:
            return
        if wanted == first and not (runs and runs[0].first == first):
            name = shown(self.owner.name)
            raise MqksError(f"messages of queue {name} from {first} are missing")
        if self.redo_paged:
            self._page_in_returned(runs)
            return
        for run in runs:
            # A trim may have gone past its beginning, or past all of it.
            gone = self.cursor + len(self.head) - run.first
            if self.paged and 0 <= gone < len(run.lines):
                self._extend_head(run.lines[gone:])

    def _page_in_returned(self, runs: list[Run]) -> None:
        lines = {number: line for run in runs for number, line in enumerate(run.lines, run.first)}
        while self.redo_paged and self.redo_paged[0] in lines:
            # What is needed next is taken in any case, or it would be asked for again at once.
            enough = self.memory.is_short and self.redo_bytes >= SCARCE_BYTES
            if enough and self.redo_is_next:
                break
            number = heapq.heappop(self.redo_paged)
            self._keep_returned(number, lines[number])

    def _extend_head(self, lines: list[bytes]) -> None:
        del lines[self.paged :]
        if self.memory.is_short:
            # There may be many queues whose consumers take little.
            room = SCARCE_BYTES - self.head_bytes
            del lines[max(not self.head, room * len(lines) // sum(map(len, lines))) :]
        size = size_of(lines)
        self.memory.used += size
        self.head_bytes += size
        self.head.extend(lines)
        self.paged -= len(lines)
        if not self.paged:
            self._join()

    def _join(self) -> None:
        """Nothing lies only on disk any more: what is in memory is one stretch."""
        self.head.extend(self.tail)
        self.head_bytes += self.tail_bytes
        self.tail.clear()
        self.tail_bytes = 0

    def delete(self) -> Iterator[object]:
        """Forget every message, at once, but for the memory, which is let go as what is returned
        is walked."""
        self.deleted = True
        self.memory.used -= self.memory_bytes
        self.head_bytes = self.tail_bytes = self.redo_bytes = self.paged = 0
        gone = [
            emptied(items)
            for items in (
                *(self.head, self.tail, self.redo, self.redo_paged, self.marks, self.marked),
                *(self.unwritten, self.unwritten_runs, self.acked, self.acked_ranges, self.moved),
            )
        ]
        self.head, self.tail, self.redo, self.redo_paged = deque(), deque(), [], []
        self.marks, self.marked = {}, {}
        self.unwritten, self.unwritten_runs = [], []
        self.acked, self.acked_ranges, self.moved = [], [], []
        return chain.from_iterable(gone)


def _forget(lines: deque[bytes], count: int) -> int:
    """Take lines off the front; return what they took in memory."""
    return sum(len(lines.popleft()) + MESSAGE_OVERHEAD_BYTES for _ in range(count))


def let_go(things: Iterator[object]) -> Work[None]:
    """Take them one by one, and keep none."""
    while sum(1 for _ in islice(things, STEP_BODIES)):
        yield GOES_ON
