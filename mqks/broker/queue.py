"""One queue: its name and policy, its consumers, and whose turn it is.

The one rule: a consumer is in the ring exactly while it has no reason to rest. A reason that comes
from elsewhere, a slow connection or a full budget, is found when it is the consumer's turn.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple, Self
from zlib import crc32

from mqks.broker import returns
from mqks.broker.consumer import UNLIMITED, Consumer, Rest
from mqks.broker.deaths import Dead, kill, kill_oldest
from mqks.broker.delays import Due
from mqks.broker.lane import Delivery, Lane, let_go
from mqks.broker.pending import Mark, QueueState, Run
from mqks.broker.policy import DEFAULT, Policy
from mqks.broker.ranges import Range
from mqks.broker.shared import Shared
from mqks.broker.times import Times
from mqks.broker.turns import GOES_ON, Work
from mqks.limits import GATHERED_MAX, SEQ_MAX, STEP_MESSAGES, TAKERS_MAX
from mqks.protocol.replies import ATTRIBUTES


class Terms(NamedTuple):
    """What a publish says of one message; times in microseconds since 1970, 0 for none."""

    due_us: int = 0
    is_dated: bool = False
    """By the wall clock, however that is set; otherwise after a delay."""
    expires_us: int = 0
    clock_us: int = 0
    """When it is due after a delay, by the clock that only grows."""

    def mark(self, message_id: bytes) -> Mark:
        return Mark(
            is_dated=self.is_dated,
            due_us=self.due_us,
            expires_us=self.expires_us,
            id_crc=crc32(message_id),
        )


class Limits(NamedTuple):
    """How much may wait in one queue, and whether more than that drops the oldest."""

    messages_max: int
    bytes_max: int
    drops: bool

    @classmethod
    def of(cls, rules: Policy) -> Self | None:
        if rules.messages_max is None and rules.bytes_max is None:
            return None
        maxima = rules.messages_max or UNLIMITED, rules.bytes_max or UNLIMITED
        return cls(*maxima, rules.overflow == "drop")


class Queue:
    __slots__ = (
        *(
            "ack_timeout_us",
            "coming",
            "coming_bytes",
            "consumers",
            "deleted",
            "full",
            "id",
            "is_dropping",
            "lane",
            "limits",
        ),
        *("messages_max", "name", "nearly_full", "policy", "returning", "ring", "rules", "shared"),
        *("timer", "times", "told_at", "updates"),
    )

    def __init__(self, shared: Shared, queue_id: int, name: bytes) -> None:
        self.shared = shared
        self.id = queue_id
        self.name = name
        self.lane = Lane(queue_id, self, shared.memory, shared.pending)
        self.policy = self.rules = DEFAULT
        """What was set for it, and what holds: that, over the defaults of the settings."""
        self.ack_timeout_us: int | None = None
        self.limits: Limits | None = None
        """What of the rules is looked at for each message."""
        self.is_dropping = False
        """The oldest of what is too much are being dropped."""
        self.times: Times | None = None
        """What waits for a time here; made when something does."""
        self.timer: int | None = None
        """What the schedule has for it: it is deleted then."""
        self.deleted = False
        self.messages_max = shared.queue_messages_max or UNLIMITED
        self.full = False
        """It has as many waiting messages as it may have: publishes to it are refused."""
        self.nearly_full = False
        """It has been warned of that."""
        self.coming = self.coming_bytes = 0
        """Messages on their way here, and the length of their lines, which count already."""
        self.told_at = 0
        """With so many waiting messages one of these two is due, or it is near to be full."""
        self._tell_at()
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

    def apply(self, rules: Policy) -> None:
        """These hold from now on."""
        if rules is not self.rules and rules != self.rules:
            before, self.rules = self.rules, rules
            if rules.single_consumer != before.single_consumer:
                self._serve_single()
            self._rules_changed()

    def _rules_changed(self) -> None:
        rules, shared = self.rules, self.shared
        timeout_s = rules.ack_timeout_s
        self.ack_timeout_us = None if timeout_s is None else round(timeout_s * 1e6)
        self.limits = Limits.of(rules)
        shared.limited_queues.pop(self, None)
        if self.limits is not None and not self.limits.drops:
            shared.limited_queues[self] = None
        if rules.ttl_s is not None or self.times is not None:
            self._set_ttl(None if rules.ttl_s is None else round(rules.ttl_s * 1e6))
        self.deliver()

    def _set_ttl(self, ttl_us: int | None) -> None:
        expiry, lane = self.timed().expiry, self.lane
        if expiry.set_ttl(ttl_us):
            for first, joined_us in self.shared.facts.arrivals(self.id):
                expiry.joined_at(first, joined_us)
            expiry.joined(lane.boundary)
        for number, mark in lane.marks.items():
            if mark.joined_us:
                expiry.add(number, mark.expires_us, mark.joined_us)

    def timed(self) -> Times:
        if self.times is None:
            self.times = Times(self)
        return self.times

    @property
    def scheduled(self) -> int:
        """Messages that wait for a time."""
        return 0 if self.times is None else self.times.scheduled

    # -- messages come in

    def publish(self, ids: Sequence[bytes] | None, lines: list[bytes]) -> None:
        """Append messages; where consumers wait, deliver them in this very turn. `ids` are theirs
        where the caller has them at hand."""
        if self.deleted:  # Its routes go in turns.
            return
        lane = self.lane
        if lane.expiry is not None:
            lane.expiry.joined(lane.next_seq)
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
        if self.ring or lane.next_seq - lane.cursor >= self.told_at or self.is_watched:
            self.deliver()

    @property
    def is_watched(self) -> bool:
        """Whether there is something to do with what waits, be there consumers or not."""
        return self.times is not None or self.limits is not None

    def publish_on(self, ids: Sequence[bytes], lines: list[bytes], terms: Terms) -> None:
        """The same of messages that have attributes, wait for a time, or die at one."""
        if self.deleted:
            return
        lane = self.lane
        lane.has_attributes = lane.has_attributes or ATTRIBUTES in lines[0]
        if terms.due_us:
            self._schedule(ids, lines, terms)
        elif terms.expires_us:
            self._publish_mortal(ids, lines, terms.expires_us)
        else:
            self.publish(ids, lines)

    def _schedule(self, ids: Sequence[bytes], lines: list[bytes], terms: Terms) -> None:
        marks = [*map(terms.mark, ids)]
        first = self.lane.append_aside(lines, marks)
        if terms.expires_us:
            self.lane.marks.update(enumerate(marks, first))
        due_us = terms.due_us if terms.is_dated else terms.clock_us
        times = self.timed()
        times.add(first, lines, marks, due_us)
        if self.limits is not None:
            self.deliver()
        else:
            times.set_alarms()

    def _publish_mortal(self, ids: Sequence[bytes], lines: list[bytes], expires_us: int) -> None:
        """They die at a time of their own."""
        lane, times = self.lane, self.timed()
        new = range(lane.next_seq, lane.next_seq + len(lines))
        times.expiry.add_new(new, expires_us)
        self.publish(ids, lines)
        mark, written = Mark(expires_us=expires_us), 0
        for numbers in lane.unwritten_numbers(new.start):
            lane.tell_marks(dict.fromkeys(numbers, mark))
            written += len(numbers)
        if not written:
            times.expiry.discard(new)
        elif written < len(new):
            kept = {*chain.from_iterable(lane.unwritten_numbers(new.start))}
            times.expiry.discard([number for number in new if number not in kept])
        times.set_alarms()

    def take_in(self, line: bytes, mark: Mark) -> None:
        """A message that moves here from another queue. It always fits."""
        if mark.expires_us:
            self.timed()
        self.lane.append_marked(line, mark)

    def no_room(self, size: int) -> str:
        """Why its policy does not let one more message of this size wait; empty if it does."""
        limits = self.limits
        if limits is None or limits.drops:
            return ""
        messages, waiting_bytes = self._waiting
        messages, waiting_bytes = messages + self.coming, waiting_bytes + self.coming_bytes
        if messages >= limits.messages_max:
            return f"messages_max is {limits.messages_max}, and {messages} messages wait"
        if waiting_bytes + size > limits.bytes_max:
            most = limits.bytes_max
            return f"bytes_max is {most}, the message has {size}, and {waiting_bytes} bytes wait"
        return ""

    @property
    def room(self) -> int:
        """How many more messages the setting allows to wait for a consumer."""
        lane = self.lane
        return self.messages_max - (lane.next_seq - lane.cursor - len(lane.holes)) - self.coming

    def reserve(self, count: int, size: int) -> None:
        """So many messages of this size in all are on their way here, or, if negative, arrive."""
        self.coming += count
        self.coming_bytes += size

    @property
    def messages_max_again(self) -> int:
        """Once it was full, it accepts messages again below this number."""
        return max(1, self.messages_max * 7 // 8)

    @property
    def fullness(self) -> float | None:
        """From 0 to 1, how much of what may wait by its policy does; None where it refuses none."""
        limits = self.limits
        if limits is None or limits.drops:
            return None
        messages, waiting_bytes = self._waiting
        return max(messages / limits.messages_max, waiting_bytes / limits.bytes_max)

    @property
    def _waiting(self) -> tuple[int, int]:
        """Messages, and the length of their lines, that wait for a consumer or for a time."""
        lane, times = self.lane, self.times
        if times is None:
            return lane.ready, lane.ready_bytes
        return lane.ready + times.scheduled, lane.ready_bytes + times.scheduled_bytes

    # -- messages leave

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

    def _drop_surplus(self) -> Work[None]:
        """What is too much dies, the oldest first."""
        while (surplus := self._surplus()) and not self.deleted:
            kill_oldest(self, SEQ_MAX, "overflow", min(surplus, STEP_MESSAGES))
            yield GOES_ON
        self.is_dropping = False
        self.deliver()

    def _surplus(self) -> int:
        """How many messages are too much, about; 0 for none. Only those that are ready can go."""
        limits, ready = self.limits, self.lane.ready
        if limits is None or not limits.drops or not ready:
            return 0
        messages, waiting_bytes = self._waiting
        mean = self.lane.ready_bytes // ready + 1
        bytes_over = -(-max(0, waiting_bytes - limits.bytes_max) // mean)
        return min(ready, max(messages - limits.messages_max, bytes_over))

    # -- messages come back

    @property
    def is_ruled(self) -> bool:
        """Whether it matters here how often, and when."""
        rules = self.rules
        return (
            rules.retries is not None
            or rules.backoff is not None
            or rules.dead_letters is not None
            or self.times is not None
        )

    def reject(
        self,
        deliveries: Sequence[Delivery],
        delay_us: int = 0,
        *,
        dead: bool = False,
        defaults: Policy = DEFAULT,
    ) -> None:
        """Rejected by a consumer."""
        returns.reject(self, deliveries, delay_us, dead=dead, defaults=defaults)

    def release(self, deliveries: Sequence[Delivery], delay_us: int = 0) -> None:
        """Given back by a consumer, as if they had not been delivered."""
        returns.release(self, deliveries, delay_us)

    def give_back(self, deliveries: Sequence[Delivery], *, lost: bool) -> None:
        """Their consumer is gone; `lost`: it did not leave of itself. `deliver` comes later."""
        returns.give_back(self, deliveries, lost=lost)

    def lose(self, deliveries: Sequence[Delivery]) -> None:
        """They were not acked in time."""
        if not self.deleted:
            returns.give_back(self, deliveries, lost=True)
            self.deliver()

    def join(self, due: Sequence[Due]) -> None:
        """These scheduled messages are due."""
        lane = self.lane
        if not lane.has_attributes:  # They may have been on disk since the start.
            lane.has_attributes = any(ATTRIBUTES in line for _, line, _ in due)
        if not (lane.marks or lane.expiry):
            lane.move_out_all([number for number, _, _ in due])
            self.publish(None, [line for _, line, _ in due])
            return
        expired, now_us = list[Dead](), self.shared.schedule.wall_us()
        for number, line, keeps_place in due:
            mark = lane.mark_of(number)
            if mark.version and returns.is_overdue(lane, number):
                expired.append(Dead(number, line, mark.retry))
            elif keeps_place:
                lane.give_back(number, line, mark.due(now_us).changed())
            else:
                is_new = not mark.version
                returns.to_tail(self, number, line, lambda mark: mark.due(now_us), is_new=is_new)
        kill(self, expired, "ttl")
        self.deliver()

    def arrived_us(self, number: int) -> int:
        """When a message came, as exactly as the journal knows."""
        arrived_us = self.shared.facts.arrived_us(self.id, number)
        return arrived_us or self.shared.schedule.wall_us()

    def committed(self, end: int) -> None:
        """Numbers below `end` are on disk."""
        if self.times is not None:
            self.shared.turns.add(self.times.committed(end))

    def become_sparse(self) -> None:
        """Numbers of its waiting messages may be missing from now on: the journal must know."""
        if not self.policy.is_sparse:
            self.policy = replace(self.policy, is_sparse=True)
            self.shared.pending.entry.queues[self.id] = QueueState(self.name, self.policy)

    # -- consumers come and go

    def attach(self, consumer: Consumer) -> None:
        self.consumers[consumer] = None
        if not consumer.rests:
            self.ring[consumer] = None
        if self.rules.single_consumer and len(self.consumers) > 1:
            consumer.rest(Rest.STANDBY)
        else:  # It may have stood by in an earlier queue of this name.
            consumer.resume(Rest.STANDBY)

    def detach(self, consumer: Consumer) -> None:
        del self.consumers[consumer]
        self.ring.pop(consumer, None)
        if self.rules.single_consumer and self.consumers:
            next(iter(self.consumers)).resume(Rest.STANDBY)

    def _serve_single(self) -> None:
        """Whether a single one is served has changed: it is the first that came, others stand
        by."""
        single = self.rules.single_consumer
        for place, consumer in enumerate([*self.consumers]):
            if single and place:
                consumer.rest(Rest.STANDBY)
            else:
                consumer.resume(Rest.STANDBY)

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
        times = self.times
        if times is None or not times.must_expire:
            while self.can_deliver and not self._put_off():
                self.deliver_some()
        if times is not None:
            times.set_alarms()
        if self.limits is not None and not self.is_dropping and self._surplus():
            self.is_dropping = True
            # What is dropped may be too much for the next queue, and so on.
            self.shared.turns.later(self._drop_surplus())
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
        if lane.holes.blocks and lane.skip():
            return
        if lane.redo_is_next:
            number, line = lane.redo[0]
            if self._dispatch(number, [line], None, stored=True):
                lane.pop_redo()
            return
        # What one consumer has no room for need not be taken and put back each time.
        most = next(iter(self.ring)).room() if len(self.ring) == 1 else SEQ_MAX
        lines = lane.front(most)
        taken = self._dispatch(lane.cursor, lines, None, stored=True)
        if taken < len(lines):
            lane.put_front(lines[taken:])

    def _look_at_limit(self) -> None:
        """A warning comes at four fifths of it, and again after less than two thirds. Publishes
        are taken again when an eighth of it is free, not one by one."""
        shared, limit = self.shared, self.messages_max
        waiting = limit - self.room
        if waiting >= limit:
            if not self.full:
                self.full = self.nearly_full = True
                shared.full_queues[self] = None
                shared.on_queue_full(self)
        elif self.full and waiting < self.messages_max_again:
            self.full = False
            shared.full_queues.pop(self, None)
            shared.on_queue_full(self)
        elif not self.nearly_full and waiting >= limit * 4 // 5:
            self.nearly_full = True
            shared.on_queue_nearly_full(self)
        if not self.full and waiting < limit * 2 // 3:
            self.nearly_full = False
        self._tell_at()

    def _tell_at(self) -> None:
        limit, near_queues = self.messages_max, self.shared.near_queues
        self.told_at = limit if self.nearly_full else limit * 4 // 5
        if self.room < GATHERED_MAX:
            near_queues[self] = None
        else:
            near_queues.pop(self, None)
            self.told_at = min(self.told_at, limit - GATHERED_MAX + 1)

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

    # -- those who look

    # -- what is looked at

    @property
    def hides_some(self) -> bool:
        """Whether some of its living messages may not wait: they are scheduled, or dying."""
        return bool(self.lane.holes or self.scheduled)

    def hidden(self, numbers: Sequence[int]) -> Work[set[int]]:
        """Those of the numbers that are among them."""
        hidden = {number for number in numbers if number in self.lane.holes}
        if self.times is not None:
            hidden |= yield from self.times.among({*numbers})
        return hidden

    def listed(self, after: int, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, in microseconds since 1970, of the first that are scheduled, with
        numbers above `after`."""
        return [] if self.times is None else (yield from self.times.listed(after, limit))

    # -- recovery, and the end

    def restore(
        self,
        next_seq: int,
        cursor: int,
        returned: Iterable[tuple[int, Mark]],
        waiting: Iterable[tuple[int, Mark]],
        holes: Iterable[Range] = (),
        mean_bytes: float = 0.0,
    ) -> None:
        """See `Lane.restore`. `mean_bytes`: how long a line is, about."""
        lane = self.lane
        waiting = self._unscheduled(waiting, are_holes=True)
        lane.restore(next_seq, cursor, self._unscheduled(returned), waiting, holes)
        lane.paged_bytes = round(mean_bytes * max(0, lane.paged - len(lane.holes)))
        lane.redo_paged_bytes = round(mean_bytes * len(lane.redo_paged))
        if self.times is not None:
            self.times.restored(mean_bytes)
        self._look_at_limit()

    def _unscheduled(
        self, marked: Iterable[tuple[int, Mark]], *, are_holes: bool = False
    ) -> Iterator[tuple[int, Mark]]:
        """Take out those that are scheduled."""
        for number, mark in marked:
            if mark.expires_us:
                self.timed()
            if not mark.due_us:
                yield number, mark
                continue
            self.timed().restore(number, mark)
            if mark.version:  # It came back: its ttl goes on.
                self.timed().expiry.add(number, mark.expires_us, mark.joined_us)
            if mark.version or mark.expires_us:
                self.lane.marks[number] = mark
            if are_holes:
                self.lane.holes.add(number)

    def start(self) -> None:
        """The journal is there, and the time counts."""
        if self.times is not None:
            ttl_us = self.times.expiry.ttl_us
            self._set_ttl(None)
            self._set_ttl(ttl_us)
        self.deliver()

    def delete(self) -> Work[None]:
        """Forget every message, also those that consumers hold, and the policy; at once, but for
        the memory, which goes in turns."""
        self.deleted = True
        self.policy = self.rules = DEFAULT
        self.shared.full_queues.pop(self, None)
        self.shared.near_queues.pop(self, None)
        self.shared.limited_queues.pop(self, None)
        self.shared.outboxes.leave(self)
        gone = [self.lane.delete()]
        if self.times is not None:
            gone.append(self.times.delete())
        for consumer in self.consumers:
            consumer.rest(Rest.NO_QUEUE)
            gone.append(consumer.let_go())
        return let_go(chain.from_iterable(gone))
