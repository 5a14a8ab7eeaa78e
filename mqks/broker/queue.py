"""One queue: messages in order, the consumers that take turns, and what the journal must learn.

The one rule: numbers from `cursor` up to `next_seq` have never been delivered and are all alive.
They lie in three stretches without gaps: `head` in memory, then `paged` of them only on disk,
then `tail` in memory. What was delivered and came back lies below the cursor: in `redo`, or, only
on disk, in `redo_paged`.
"""

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Final

from mqks.broker.consumer import Consumer, Delivery
from mqks.broker.pending import Mark, QueueChange, Run
from mqks.broker.policy import DEFAULT, Policy
from mqks.broker.ranges import Range, below, compress, subtract, union
from mqks.broker.turns import GOES_ON, Work, emptied
from mqks.errors import MqksError
from mqks.limits import (
    DELIVERY_BYTES,
    READ_AHEAD_BYTES,
    SCARCE_BYTES,
    STEP_BODIES,
    STEP_MESSAGES,
    TAKERS_MAX,
)
from mqks.protocol import replies
from mqks.protocol.requests import shown

if TYPE_CHECKING:
    from mqks.broker.broker import Broker

MESSAGE_OVERHEAD_BYTES: Final = 64
"""A bytes object and its place in a deque, beside its length (measured: 33 + 8, rounded up by
the allocator)."""


class Queue:
    __slots__ = (
        "acked",
        "acked_ranges",
        "boundary",
        "broker",
        "consumers",
        "cursor",
        "cursor_moved",
        "deadline",
        "deleted",
        "dirty",
        "full",
        "head",
        "head_bytes",
        "id",
        "marks",
        "moved",
        "name",
        "nearly_full",
        "next_seq",
        "paged",
        "paging",
        "pending",
        "pending_first",
        "pending_runs",
        "policy",
        "redo",
        "redo_bytes",
        "redo_paged",
        "retries",
        "returning",
        "ring",
        "tail",
        "tail_bytes",
        "told_at",
        "updates",
    )

    def __init__(self, broker: "Broker", queue_id: int, name: bytes) -> None:
        self.broker = broker
        self.id = queue_id
        self.name = name
        self.policy: Policy = DEFAULT
        self.deadline: float | None = None
        self.deleted = False
        self.full = False
        """It has as many waiting messages as it may have: publishes to it are refused."""
        self.nearly_full = False
        """It has been warned of that."""
        self.told_at = broker.queue_messages_max * 4 // 5
        """With so many waiting messages one of these two is due."""

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
        self.retries: dict[int, int] = {}
        """Number → retry, for those above zero."""
        self.returning = 0
        """Works that give messages back: until all are back, nothing is delivered."""

        self.consumers: dict[Consumer, None] = {}
        """In the order they came."""
        self.ring: OrderedDict[Consumer, None] = OrderedDict()
        """Those that may take, the next one first; who cannot take leaves it when that shows."""

        self.updates = 0
        """How often its consumers had to be told what it is bound to."""

        self.dirty = False
        self.boundary = 1
        """Everything below it was taken by an earlier batch."""
        self.pending: list[bytes] = []
        self.pending_first = 1
        self.pending_runs: list[Run] = []
        self.acked: list[int] = []
        self.acked_ranges: list[Range] = []
        self.moved: list[Range] = []
        """Rejected numbers, whose messages are pending under new ones."""
        self.marks: dict[int, Mark] = {}
        self.cursor_moved = False

    # -- what there is

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.next_seq - self.cursor + len(self.redo) + len(self.redo_paged)

    @property
    def unacked(self) -> int:
        """Messages that consumers hold."""
        return sum(consumer.unacked_count for consumer in self.consumers)

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
    def oldest_age_s(self) -> float | None:
        """Seconds, within ten, since the oldest waiting message came; None without any."""
        oldest = self.oldest
        return None if oldest is None else self.broker.facts.age_s(self.id, oldest)

    # -- messages come in

    def publish(self, ids: Sequence[bytes], lines: list[bytes]) -> None:
        """Append messages; where consumers wait, deliver them in this very turn."""
        if self.deleted:  # Its routes go in turns.
            return
        first = self.next_seq
        self.next_seq = first + len(lines)
        if (
            self.ring
            and self.cursor == first
            and not self.redo
            and not self.redo_paged
            and not self.broker.postpone(self)
        ):
            taken = self._dispatch(first, lines, ids, stored=False)
            if taken == len(lines):
                return
            if taken:
                first += taken
                lines = lines[taken:]
        self._append(first, lines)
        if self.ring:
            self.deliver()

    def _append(self, first: int, lines: list[bytes]) -> None:
        size = sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * len(lines)
        self.broker.memory_bytes += size
        if self.paged:
            self.tail.extend(lines)
            self.tail_bytes += size
        else:
            self.head.extend(lines)
            self.head_bytes += size
        self._remember(first, lines)
        if self.next_seq - self.cursor >= self.told_at:
            self._look_at_limit()

    def requeue(self, deliveries: Iterable[Delivery]) -> None:
        """Rejected by a consumer: to the tail, under new numbers, with one more retry."""
        for number, line in deliveries:
            self.broker.rejected += 1
            retry = self.retries.pop(number, 0) + 1
            self.moved.append((number, 1))
            first = self.next_seq
            self.next_seq = first + 1
            self.retries[first] = retry
            self._mark(first, Mark(retry))
            self._append(first, [line])
        self.deliver()

    def give_back(self, deliveries: Iterable[Delivery]) -> None:
        """Returned because its consumer is gone: to the place it had, with one more retry."""
        for number, line in deliveries:
            retry = self.retries[number] = self.retries.get(number, 0) + 1
            self._mark(number, Mark(retry))
            self._keep_returned(number, line)

    def _keep_returned(self, number: int, line: bytes) -> None:
        heapq.heappush(self.redo, (number, line))
        self._count_redo(len(line) + MESSAGE_OVERHEAD_BYTES)

    def _count_redo(self, size: int) -> None:
        self.redo_bytes += size
        self.broker.memory_bytes += size

    # -- consumers come and go

    def attach(self, consumer: Consumer) -> None:
        self.consumers[consumer] = None
        self.deadline = None
        self.wake(consumer)

    def detach(self, consumer: Consumer) -> None:
        del self.consumers[consumer]
        self.ring.pop(consumer, None)
        consumer.in_ring = False

    def wake(self, consumer: Consumer) -> None:
        """This consumer may be able to take (again): give it its place behind the others."""
        if not consumer.in_ring and not consumer.held:
            consumer.in_ring = True
            self.ring[consumer] = None

    # -- messages go out

    def deliver(self) -> None:
        """Give waiting messages to consumers, as long as both are there."""
        while self.can_deliver and not self.broker.postpone(self):
            self.deliver_some()
        if self.nearly_full:
            self._look_at_limit()
        if self.ring and not self.paging and self._wants_page():
            self.paging = True
            self.broker.page_requests.append(self)

    @property
    def can_deliver(self) -> bool:
        return bool(self.ring and (self.redo_is_next or (self.head and not self.redo_paged)))

    def deliver_some(self) -> None:
        """One step of a delivery."""
        if self.redo_is_next:
            number, line = self.redo[0]
            if self._dispatch(number, [line], None, stored=True):
                heapq.heappop(self.redo)
                self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
            return
        head = self.head
        count = max(1, DELIVERY_BYTES * len(head) // self.head_bytes)
        if count >= len(head):
            lines = list(head)
            head.clear()
            size = self.head_bytes
        else:
            popleft = head.popleft
            lines = [popleft() for _ in range(count)]
            size = sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * count
        taken = self._dispatch(self.cursor, lines, None, stored=True)
        if taken < len(lines):
            back = lines[taken:]
            size -= sum(map(len, back)) + MESSAGE_OVERHEAD_BYTES * len(back)
            head.extendleft(reversed(back))
        self.head_bytes -= size
        self.broker.memory_bytes -= size

    def _look_at_limit(self) -> None:
        """A warning comes at four fifths of it, and again after less than two thirds. Publishes
        are taken again when an eighth of it is free, not one by one."""
        waiting, limit = self.next_seq - self.cursor, self.broker.queue_messages_max
        if waiting >= limit:
            if not self.full:
                self.full = self.nearly_full = True
                self.broker.queue_filled(self)
        elif self.full and waiting < max(1, limit * 7 // 8):
            self.full = False
            self.broker.queue_has_room(self)
        elif not self.nearly_full and waiting >= limit * 4 // 5:
            self.nearly_full = True
            self.broker.on_queue_nearly_full(self)
        if not self.full and waiting < limit * 2 // 3:
            self.nearly_full = False
        self.told_at = limit if self.nearly_full else limit * 4 // 5

    @property
    def redo_is_next(self) -> bool:
        """Whether the oldest of what came back is in memory."""
        return bool(self.redo) and (not self.redo_paged or self.redo[0][0] < self.redo_paged[0])

    def _wants_page(self) -> bool:
        """What came back is needed before anything else. All other comes ahead of its consumers,
        as long as there is memory for it."""
        if self.redo_paged:
            return not self.redo_is_next
        if not self.paged:
            return False
        if self.broker.memory_is_short:
            return not self.head
        return self.head_bytes < READ_AHEAD_BYTES

    def _dispatch(
        self, first: int, lines: list[bytes], ids: Sequence[bytes] | None, *, stored: bool
    ) -> int:
        """Share out messages with consecutive numbers among the ring; return how many were taken:
        not all when the ring is empty, or a large one has used up the turn.

        Consumers take turns message by message; each gets its share of the batch in one piece.
        `stored` says that the messages are in `pending` or in the journal already; what is not,
        and goes to consumers without manual ack only, never gets there.
        """
        ring = self.ring
        taken, total = 0, len(lines)
        while ring and taken < total:
            wanted = total - taken
            takers = list(islice(ring, min(wanted, TAKERS_MAX)))
            room = min(taker.room() for taker in takers)
            if room <= 0:
                for taker in takers:
                    if taker.room() <= 0:
                        del ring[taker]
                        taker.in_ring = False
                        self.broker.hold_back(taker)
                continue
            turns = len(takers)
            # Of a part of the ring each takes one: then it is the others' turn.
            count = min(wanted, room * turns) if turns == len(ring) else turns
            manual = any(taker.manual_ack for taker in takers)
            start, end = taken, taken + count
            if manual and not stored:
                self._remember(first + start, lines[start:end])
            for index, taker in enumerate(takers):
                numbers = range(first + start + index, first + end, turns)
                share = lines[start + index : end : turns]
                share_ids = ids and ids[start + index : end : turns]
                self.broker.write(taker.connection, taker.take(numbers, share, share_ids))
                self.broker.delivered += len(share)
                if not taker.manual_ack:
                    self.broker.consumed += len(share)
                    if manual or stored:
                        self._settled(numbers)
            if stored and manual and first >= self.cursor:
                self.tell_cursor()
            taken = end
            for taker in takers[: count % len(ring)]:
                ring.move_to_end(taker)
            if taken < total and self.broker.turns.over:
                break
        if first >= self.cursor:
            self.cursor += taken
        return taken

    def redelivered(
        self, numbers: Sequence[int], lines: Sequence[bytes], manual_ack: bool
    ) -> list[bytes]:
        """Tell the retry of those messages that have one, and mark them as delivered again."""
        told = []
        for number, line in zip(numbers, lines, strict=True):
            retry = self.retries.get(number)
            if retry is None:
                told.append(line)
                continue
            told.append(replies.with_retry(line, retry))
            self.broker.redelivered += 1
            if manual_ack:
                self._mark(number, Mark(retry, True))
        return told

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Acked by a consumer."""
        self.broker.consumed += len(deliveries)
        self._settled([number for number, _ in deliveries])

    def _settled(self, numbers: Sequence[int]) -> None:
        """These messages are done with: the journal may forget them."""
        if self.retries:
            retried: Iterable[int] = numbers
            # A trim settles millions at once: of the two the shorter one is walked.
            if isinstance(numbers, range) and len(self.retries) < len(numbers):
                retried = [number for number in self.retries if number in numbers]
            for number in retried:
                self.retries.pop(number, None)
        if isinstance(numbers, range) and numbers.step == 1:
            self.acked_ranges.append((numbers.start, len(numbers)))
        else:
            self.acked.extend(numbers)
        self.broker.pending.records += len(numbers)
        self._touch()

    def trim(self, end: int) -> Work[int]:
        """Drop the waiting messages with numbers below `end`; return how many."""
        end, count = min(end, self.next_seq), 0
        while returned := self._pop_returned(end):
            self._settled(returned)
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
            number, line = heapq.heappop(self.redo)
            gone.append(number)
            self._count_redo(-len(line) - MESSAGE_OVERHEAD_BYTES)
        return gone

    def _trim_some(self, end: int) -> int:
        """The first stretch of what was never delivered, or as much of it as one step takes."""
        first = self.cursor
        if self.head:
            count = min(end - first, len(self.head), STEP_BODIES)
            freed = self._forget(self.head, count)
            self.head_bytes -= freed
            self.broker.memory_bytes -= freed
        else:
            count = min(end - first, self.paged)
            self.paged -= count
        if not self.paged:
            self._join()
        self._settled(range(first, first + count))
        self.cursor += count
        self.tell_cursor()
        if self.nearly_full:
            self._look_at_limit()
        return count

    @staticmethod
    def _forget(lines: deque[bytes], count: int) -> int:
        """Take lines off the front; return what they took in memory."""
        return sum(len(lines.popleft()) + MESSAGE_OVERHEAD_BYTES for _ in range(count))

    # -- what the journal must learn

    def tell_cursor(self) -> None:
        """The journal must learn the cursor, whatever else happens."""
        self.cursor_moved = True
        self._touch()

    def _touch(self) -> None:
        if not self.dirty:
            self.dirty = True
            self.broker.pending.dirty.append(self)

    def _remember(self, first: int, lines: list[bytes]) -> None:
        """These messages must last."""
        if self.pending and self.pending_first + len(self.pending) != first:
            self.pending_runs.append(Run(self.pending_first, self.pending))
            self.pending = []
        if self.pending:
            self.pending.extend(lines)
        else:
            self.pending_first = first
            self.pending = lines.copy()
        self.broker.pending.records += len(lines)
        self._touch()

    def _mark(self, number: int, mark: Mark) -> None:
        self.marks[number] = mark
        self.broker.pending.records += 1
        self._touch()

    def take_change(self) -> QueueChange | None:
        """Take what is pending. What was published and settled within the batch leaves no trace."""
        runs, boundary, marks = self.pending_runs, self.boundary, self.marks
        acks = union([*self.acked_ranges, *compress(self.acked)])
        moved = union(self.moved)
        if self.pending:
            runs.append(Run(self.pending_first, self.pending))
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
        self.pending, self.pending_runs, self.marks = [], [], {}
        self.boundary = self.next_seq
        if not (runs or acks or moved or marks or cursor_moved):
            return None
        return QueueChange(self.id, self.next_seq, self.cursor, runs, acks, moved, marks)

    def put_back(self, change: QueueChange, boundary: int) -> None:
        """A change could not be written: it is pending again; `boundary` as it was before."""
        self.boundary = min(self.boundary, boundary)
        self.pending_runs[:0] = change.runs
        self.acked_ranges.extend(change.acks)
        self.moved.extend(change.moved)
        self.marks = change.marks | self.marks
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
        self.retries.update((number, mark.retry) for number, mark in waiting.items())
        for number, mark in returned:
            retry = mark.retry + mark.redelivered
            if retry:
                self.retries[number] = retry
            if mark.redelivered:
                self._mark(number, Mark(retry))
            self.redo_paged.append(number)
        heapq.heapify(self.redo_paged)
        self._look_at_limit()

    def spill(self, committed: int) -> Work[None]:
        """Let go of bodies in memory that are on disk: what is below `committed` has been synced.

        A queue that is being consumed keeps its next page.
        """
        while self.redo_bytes > (2 * SCARCE_BYTES if self.consumers else 0):
            if not self._spill_returned(committed):
                break
            yield GOES_ON
        if self.paged:
            count = min(len(self.tail), committed - (self.next_seq - len(self.tail)))
            while count > 0 and self.paged:
                count -= self._spill_tail(min(count, STEP_BODIES))
                yield GOES_ON
            return
        keep = SCARCE_BYTES * len(self.head) // self.head_bytes if self.ring and self.head else 0
        durable = min(len(self.head), committed - self.cursor)
        if durable <= keep:
            return
        behind = [self.head.pop() for _ in range(len(self.head) - durable)]
        self.tail.extendleft(behind)
        size = sum(map(len, behind)) + MESSAGE_OVERHEAD_BYTES * len(behind)
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
        size = sum(map(len, gone)) + MESSAGE_OVERHEAD_BYTES * len(gone)
        self.head_bytes -= size
        self.broker.memory_bytes -= size

    def _spill_tail(self, count: int) -> int:
        count = min(count, len(self.tail))
        self.paged += count
        size = self._forget(self.tail, count)
        self.tail_bytes -= size
        self.broker.memory_bytes -= size
        return count

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

    def page_in(self, first: int | None, runs: list[Run]) -> None:
        """A page has come from disk: all living messages from `first` on, which was `page_first`
        when the reading began. What is missing from it now counts only if it is still wanted: the
        queue may have been trimmed or deleted meanwhile. Raises MqksError."""
        self.paging = False
        wanted = self.page_first
        if first is None or wanted is None:
            return
        if wanted == first and not (runs and runs[0].first == first):
            raise MqksError(f"messages of queue {shown(self.name)} from {first} are missing")
        self.broker.turns.begin()
        if self.redo_paged:
            lines = {
                number: line for run in runs for number, line in enumerate(run.lines, run.first)
            }
            while self.redo_paged and self.redo_paged[0] in lines:
                # What is needed next is taken in any case, or it would be asked for again at once.
                enough = self.broker.memory_is_short and self.redo_bytes >= SCARCE_BYTES
                if enough and self.redo_is_next:
                    break
                number = heapq.heappop(self.redo_paged)
                self._keep_returned(number, lines[number])
        else:
            for run in runs:
                # A trim may have gone past its beginning, or past all of it.
                gone = self.cursor + len(self.head) - run.first
                if self.paged and 0 <= gone < len(run.lines):
                    self._extend_head(run.lines[gone:])
        self.deliver()

    def _extend_head(self, lines: list[bytes]) -> None:
        del lines[self.paged :]
        if self.broker.memory_is_short:
            # There may be many queues whose consumers take little.
            room = SCARCE_BYTES - self.head_bytes
            del lines[max(not self.head, room * len(lines) // sum(map(len, lines))) :]
        size = sum(map(len, lines)) + MESSAGE_OVERHEAD_BYTES * len(lines)
        self.broker.memory_bytes += size
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

    def delete(self) -> Work[None]:
        """Forget every message, also those that consumers hold, and the rule; at once, but for
        the memory, which goes in turns."""
        self.deleted = True
        self.policy = DEFAULT
        self.broker.full_queues.pop(self, None)
        self.broker.memory_bytes -= self.memory_bytes
        self.head_bytes = self.tail_bytes = self.redo_bytes = self.paged = 0
        gone = [
            emptied(items)
            for items in (
                *(self.head, self.tail, self.redo, self.redo_paged, self.retries, self.marks),
                *(self.pending, self.pending_runs, self.acked, self.acked_ranges, self.moved),
            )
        ]
        self.head, self.tail, self.redo, self.redo_paged = deque(), deque(), [], []
        self.retries, self.marks = {}, {}
        self.pending, self.pending_runs, self.acked, self.acked_ranges = [], [], [], []
        self.moved = []
        self.ring.clear()
        for consumer in self.consumers:
            consumer.in_ring = False
            gone.append(consumer.let_go())
        return _let_go(chain.from_iterable(gone))


def _let_go(things: Iterator[object]) -> Work[None]:
    """Take them one by one, and keep none."""
    while sum(1 for _ in islice(things, STEP_BODIES)):
        yield GOES_ON
