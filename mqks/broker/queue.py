"""One queue: its name and policy, its consumers, and whose turn it is.

The one rule: a consumer is in the ring exactly while it has no reason to rest. A reason that comes
from elsewhere, a slow connection or a full budget, is found when it is the consumer's turn.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, islice

from mqks.broker.consumer import UNLIMITED, Consumer, Rest
from mqks.broker.lane import Delivery, Lane, let_go
from mqks.broker.moves import move
from mqks.broker.pending import Mark, Run
from mqks.broker.policy import DEFAULT
from mqks.broker.shared import Shared
from mqks.broker.turns import Work
from mqks.limits import TAKERS_MAX


class Queue:
    __slots__ = (
        *("consumers", "deleted", "full", "id", "lane", "messages_max", "name", "nearly_full"),
        *("policy", "returning", "ring", "shared", "timer", "told_at", "updates"),
    )

    def __init__(self, shared: Shared, queue_id: int, name: bytes) -> None:
        self.shared = shared
        self.id = queue_id
        self.name = name
        self.lane = Lane(queue_id, self, shared.memory, shared.pending)
        self.policy = DEFAULT
        self.timer: int | None = None
        """What the schedule has for it: it is deleted then."""
        self.deleted = False
        self.messages_max = shared.queue_messages_max or UNLIMITED
        self.full = False
        """It has as many waiting messages as it may have: publishes to it are refused."""
        self.nearly_full = False
        """It has been warned of that."""
        self.told_at = self.messages_max * 4 // 5
        """With so many waiting messages one of these two is due."""
        self.returning = 0
        """Works that give messages back: until all are back, nothing is delivered."""
        self.consumers: dict[Consumer, None] = {}
        """In the order they came."""
        self.ring: OrderedDict[Consumer, None] = OrderedDict()
        """Those that may take, the next one first; who cannot take rests when that shows."""
        self.updates = 0
        """How often its consumers had to be told what it is bound to."""

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.lane.ready

    @property
    def is_consumed(self) -> bool:
        return bool(self.consumers)

    @property
    def is_served(self) -> bool:
        return bool(self.ring)

    @property
    def unacked(self) -> int:
        """Messages that consumers hold."""
        return sum(consumer.unacked_count for consumer in self.consumers)

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds, within ten, since the oldest waiting message came; None without any."""
        oldest = self.lane.oldest
        return None if oldest is None else self.shared.facts.age_s(self.id, oldest)

    # -- messages come in

    def publish(self, ids: Sequence[bytes], lines: list[bytes]) -> None:
        """Append messages; where consumers wait, deliver them in this very turn."""
        if self.deleted:  # Its routes go in turns.
            return
        lane = self.lane
        first = lane.next_seq
        lane.next_seq = first + len(lines)
        if (
            self.ring
            and lane.cursor == first
            and not lane.redo
            and not lane.redo_paged
            and not self._put_off()
        ):
            taken = self._dispatch(first, lines, ids, stored=False)
            if taken == len(lines):
                return
            if taken:
                first += taken
                lines = lines[taken:]
        lane.append(first, lines)
        if self.ring or lane.next_seq - lane.cursor >= self.told_at:
            self.deliver()

    def publish_marked(self, line: bytes, mark: Mark) -> None:
        """Append one message that has more than its text: attributes, for now."""
        if not self.deleted:
            self.lane.append_marked(line, mark)
            self.deliver()

    def reject(self, deliveries: Sequence[Delivery]) -> None:
        """Rejected by a consumer: to the tail, under new numbers, with one more retry."""
        self.shared.counters.rejected += len(deliveries)
        move(self.lane, deliveries, self.lane, Mark.returned)
        self.deliver()

    def settle(self, deliveries: Sequence[Delivery]) -> None:
        """Acked by a consumer."""
        self.shared.counters.consumed += len(deliveries)
        self.lane.settle([number for number, _ in deliveries])

    def trim(self, end: int) -> Work[int]:
        """Drop the waiting messages with numbers below `end`; return how many."""
        count = yield from self.lane.trim(end)
        if self.nearly_full and not self.deleted:
            self._look_at_limit()
        return count

    # -- consumers come and go

    def attach(self, consumer: Consumer) -> None:
        self.consumers[consumer] = None
        if not consumer.rests:
            self.ring[consumer] = None

    def detach(self, consumer: Consumer) -> None:
        del self.consumers[consumer]
        self.ring.pop(consumer, None)

    # -- messages go out

    def _put_off(self) -> bool:
        """Return whether the delivery has to wait: until all that comes back is there, until there
        is room for what it would deliver, or for the next turn. It goes on by itself then."""
        shared = self.shared
        if self.returning:
            return True
        if shared.outboxes.used >= shared.outboxes.limit:
            shared.outboxes.wait(self, self.deliver)
            return True
        if shared.turns.over:
            shared.due[self] = None
            return True
        return False

    def deliver(self) -> None:
        """Messages may have come, or a consumer can take again: give out what waits, as long as
        there is both."""
        if self.deleted:
            return
        while self.can_deliver and not self._put_off():
            self.deliver_some()
        lane = self.lane
        if self.nearly_full or lane.next_seq - lane.cursor >= self.told_at:
            self._look_at_limit()
        if self.ring and lane.wants_page:
            self.want_page()

    def want_page(self) -> None:
        """Have the next messages that are only on disk read."""
        if not self.lane.paging:
            self.lane.paging = True
            self.shared.page_requests.append(self)

    def page_in(self, first: int | None, runs: list[Run]) -> None:
        """See `Lane.page_in`. Raises MqksError."""
        self.shared.turns.begin()
        self.lane.page_in(first, runs)
        self.deliver()

    @property
    def can_deliver(self) -> bool:
        return bool(self.ring) and self.lane.is_next_in_memory

    def deliver_some(self) -> None:
        """One step of a delivery."""
        lane = self.lane
        if lane.redo_is_next:
            number, line = lane.redo[0]
            if self._dispatch(number, [line], None, stored=True):
                lane.pop_redo()
            return
        lines = lane.front()
        taken = self._dispatch(lane.cursor, lines, None, stored=True)
        if taken < len(lines):
            lane.put_front(lines[taken:])

    def _look_at_limit(self) -> None:
        """A warning comes at four fifths of it, and again after less than two thirds. Publishes
        are taken again when an eighth of it is free, not one by one."""
        shared, limit = self.shared, self.messages_max
        waiting = self.lane.next_seq - self.lane.cursor
        if waiting >= limit:
            if not self.full:
                self.full = self.nearly_full = True
                shared.full_queues[self] = None
                shared.on_queue_full(self)
        elif self.full and waiting < max(1, limit * 7 // 8):
            self.full = False
            shared.full_queues.pop(self, None)
            shared.on_queue_full(self)
        elif not self.nearly_full and waiting >= limit * 4 // 5:
            self.nearly_full = True
            shared.on_queue_nearly_full(self)
        if not self.full and waiting < limit * 2 // 3:
            self.nearly_full = False
        self.told_at = limit if self.nearly_full else limit * 4 // 5

    def _dispatch(
        self, first: int, lines: list[bytes], ids: Sequence[bytes] | None, *, stored: bool
    ) -> int:
        """Share out messages with consecutive numbers among the ring; return how many were taken:
        not all when the ring is empty, or a large one has used up the turn.

        Consumers take turns message by message; each gets its share of the batch in one piece.
        `stored` says that the messages are unwritten or in the journal already; what is not, and
        goes to consumers without manual ack only, never gets there.
        """
        lane, ring, counters = self.lane, self.ring, self.shared.counters
        taken, total = 0, len(lines)
        while ring and taken < total:
            wanted = total - taken
            takers = list(islice(ring, min(wanted, TAKERS_MAX)))
            room = min(taker.room() for taker in takers)
            if room <= 0:
                for taker in takers:
                    taker.rest_if_full()
                continue
            turns = len(takers)
            # Of a part of the ring each takes one: then it is the others' turn.
            count = min(wanted, room * turns) if turns == len(ring) else turns
            manual = any(taker.manual_ack for taker in takers)
            start, end = taken, taken + count
            if manual and not stored:
                lane.remember(first + start, lines[start:end])
            for index, taker in enumerate(takers):
                numbers = range(first + start + index, first + end, turns)
                share = lines[start + index : end : turns]
                share_ids = ids and ids[start + index : end : turns]
                taker.connection.write(taker.take(numbers, share, share_ids))
                counters.delivered += len(share)
                if not taker.manual_ack:
                    counters.consumed += len(share)
                    if manual or stored:
                        lane.settle(numbers)
            if stored and manual and first >= lane.cursor:
                lane.tell_cursor()
            taken = end
            for taker in takers[: count % len(ring)]:
                ring.move_to_end(taker)
            if taken < total and self.shared.turns.over:
                break
        if first >= lane.cursor:
            lane.cursor += taken
        return taken

    # -- recovery, and the end

    def restore(
        self,
        next_seq: int,
        cursor: int,
        returned: Iterable[tuple[int, Mark]],
        waiting: Mapping[int, Mark],
    ) -> None:
        """See `Lane.restore`."""
        self.lane.restore(next_seq, cursor, returned, waiting)
        self._look_at_limit()

    def delete(self) -> Work[None]:
        """Forget every message, also those that consumers hold, and the policy; at once, but for
        the memory, which goes in turns."""
        self.deleted = True
        self.policy = DEFAULT
        self.shared.full_queues.pop(self, None)
        self.shared.outboxes.leave(self)
        gone = [self.lane.delete()]
        for consumer in self.consumers:
            consumer.rest(Rest.NO_QUEUE)
            gone.append(consumer.let_go())
        return let_go(chain.from_iterable(gone))
