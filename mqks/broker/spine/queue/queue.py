"""One queue: its name and policy, its consumers, and their turns.

The one rule: a consumer is in the ring exactly while it has no reason to rest. External reasons, a
slow connection or a full budget, are detected at the consumer's turn.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from mqks.broker.spine.base.turns import Work, free
from mqks.broker.spine.log.pending import QueueState
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import REJECT, Event
from mqks.broker.spine.queue.lane import Delivery, Lane
from mqks.broker.spine.queue.order import UNLIMITED, Fifo, Order, Rest, Ring, Taker
from mqks.broker.spine.queue.paging import bring
from mqks.broker.spine.queue.seams import HeldBack, Throttle, Timers, Tracer
from mqks.broker.spine.queue.shared import Fetch, Shared, ToldByArchive
from mqks.limits import STEP_MESSAGES, STEP_RULED, TAKERS_MAX


class Queue:
    __slots__ = (
        *("ack_timeout_us", "archive", "capacity", "consumers", "dead", "deleted"),
        *("has_forgotten", "id", "is_dropping", "is_ruled", "lane", "marks", "name", "order"),
        *("policy", "returning", "ring", "rules", "shared", "show", "throttle", "timer", "times"),
        *("told_at", "tracers", "updates"),
    )

    def __init__(self, shared: Shared, queue_id: int, name: bytes) -> None:
        self.shared = shared
        self.id = queue_id
        self.name = name
        self.lane = Lane(queue_id, self, shared.memory, shared.pending)
        self.order: Order = Fifo(self.lane)
        """Which message is next, and whose."""
        self.throttle: Throttle | None = None
        """How many may be delivered, whoever takes them; only while its rules limit that."""
        self.has_forgotten = False
        """It had an order that may suit again what consumers hold."""
        self.policy = self.rules = DEFAULT
        """The policy that was set, and the rules that apply: the policy over the defaults."""
        self.ack_timeout_us: int | None = None
        self.is_ruled = False
        """What becomes of a message that is returned depends on its counts or on times."""
        self.is_dropping = False
        """Messages above the limits are being dropped, the oldest first."""
        self.times: Timers | None = None
        """Messages that wait for a time; made when there are any."""
        self.timer: int | None = None
        """The entry in the schedule that deletes the queue."""
        self.deleted = False
        self.dead = 0
        """Messages that have died here since the start of the server."""
        self.archive: ToldByArchive | None = None
        self.marks: Mapping[bytes, int] = {}
        """The number below which each of its readers has read all, by what it has told."""
        self.capacity = shared.features.capacity(self, shared.capacities.default_max)
        self.told_at = 0
        """Number of ready messages at which to look at the capacity."""
        self.returning = 0
        """Number of works that return messages: until all are done, nothing is delivered."""
        self.consumers: dict[Taker, None] = {}
        """In order of attachment."""
        self.ring: Ring = OrderedDict()
        """One that cannot take messages is removed at its turn."""
        self.show: Callable[[list[bytes]], None] | None = None
        """Shows the messages that join it to those who watch, if any do."""
        self.tracers: tuple[Tracer, ...] = ()
        """Who learns what becomes of its messages, if anybody does."""
        self.updates = 0
        """Number of updates of its bindings for its consumers."""
        self.update_capacity()
        self.update_tracers()

    def update_throttle(self) -> None:
        """Its rules have changed."""
        self.throttle = self.shared.features.throttle(self, self.throttle)
        self.update_tracers()

    def update_tracers(self) -> None:
        """Who traces has changed."""
        found = (tracer_of(self) for tracer_of in self.shared.tracers)
        common = tuple(tracer for tracer in found if tracer is not None)
        self.tracers = common if self.throttle is None else (*common, *self.throttle.tracers)

    @property
    def ready(self) -> int:
        """Messages that wait for a consumer."""
        return self.lane.blocks.count

    @property
    def is_served(self) -> bool:
        """Whether a consumer can take messages now."""
        return bool(self.ring)

    @property
    def unacked(self) -> int:
        """Messages that consumers hold."""
        return sum(consumer.unacked_count for consumer in self.consumers)

    @property
    def held_back(self) -> HeldBack | None:
        """What holds its ready messages back, though consumers might take them."""
        if not self.ready:
            return None
        return (self.throttle and self.throttle.holds) or self.order.holds

    @property
    def oldest_age_s(self) -> float | None:
        """Seconds, within ten, since the oldest ready message arrived; None without any."""
        oldest = self.lane.blocks.first
        return None if oldest is None else self.shared.facts.age_s(self.id, oldest)

    def set_order(self, order: Order) -> None:
        """Deliver in this order from now on."""
        old = self.order
        if order is not old:
            self.order = order
            self.lane.watcher = order if order.watches else None
            self.has_forgotten = old.watches and not order.watches
            order.follow(old, self.shared.turns)

    def see_attributes(self, lines: list[bytes]) -> None:
        """Messages with attributes will be ready."""
        self.set_order(self.shared.features.orders.by_messages(self, self.order, lines))

    def timed(self) -> Timers:
        """Its timers, which it has from now on."""
        if self.times is None:
            self.times = self.shared.features.timers(self)
            self.lane.on_written = self._written
            self.is_ruled = True
        return self.times

    def untimed(self) -> None:
        """No message waits for a time any more."""
        if self.times is not None:
            self.shared.turns.add(free(self.times.delete()))
            self.times = self.lane.expiry = self.lane.on_written = None
            self.is_ruled = self.rules.count_returns

    def none_expires(self) -> None:
        """The last of its messages that could expire has left."""
        if self.times is not None:
            self.times.set_alarms()

    def is_put_off(self, number: int) -> bool:
        """Whether this message is scheduled."""
        return self.times is not None and number in self.times.delays.numbers

    def tidy(self) -> Work[None]:
        """Scheduled messages were taken out: there may be room again, and what is left of them is
        forgotten, if it is much."""
        self.deliver()
        if self.times is not None:
            yield from self.times.tidy()

    @property
    def scheduled(self) -> int:
        """Messages that wait for a time."""
        return 0 if self.times is None else len(self.times.delays)

    @property
    def leased(self) -> int:
        """Those of them that will return to their old place."""
        return 0 if self.times is None else len(self.times.delays.placed)

    # -- adding messages

    def publish(self, ids: Sequence[bytes] | None, lines: list[bytes]) -> None:
        """Append messages; if consumers wait, deliver them in this turn. `ids` are the message ids;
        None if the journal has the messages already."""
        if self.deleted:  # Its routes are removed in turns.
            return
        if self.show is not None:
            self.show(lines)
        lane = self.lane
        if self.tracers and ids is not None:
            for tracer in self.tracers:
                tracer.note(self, "joined", enumerate(lines, lane.next_seq))
        if lane.expiry is not None:
            lane.expiry.joined(lane.next_seq)
        # If nothing is ready before them, and a consumer waits, they are delivered without having
        # been ready themselves; what is acked before the next commit never needs the disk.
        first = lane.next_seq
        lane.next_seq = first + len(lines)
        if (
            self.ring
            and not lane.blocks.count
            and self.order.passes_new
            and (self.throttle is None or self.throttle.room() >= len(lines))
            and not self.shared.draining
            and (ids is not None or not self.shared.owner.withholds)
            and not self._must_wait
        ):
            taken = self._dispatch(range(first, lane.next_seq), lines, ids, stored=False)
            lane.delivered(first + taken)
            if self.throttle is not None:
                self.throttle.delivered(taken)
            if taken == len(lines):
                if self.times is not None and self.capacity.is_watched:
                    self.update_capacity()  # What is leased counts.
                return
            if taken:
                first += taken
                lines = lines[taken:]
        lane.append(first, lines)
        # Most queues have no consumer that waits: then a publish ends here.
        if self.ring or lane.blocks.count >= self.told_at or self.is_watched:
            self.deliver()

    @property
    def is_watched(self) -> bool:
        """Whether ready messages need work even without consumers."""
        return self.times is not None or self.capacity.is_watched

    @property
    def contents(self) -> tuple[int, int]:
        """Number and length of ready and scheduled messages."""
        lane, times = self.lane, self.times
        if times is None:
            return lane.blocks.count, lane.ready_bytes
        return lane.blocks.count + len(times.delays), lane.ready_bytes + times.delays.bytes

    # -- removing messages

    def settle(self, numbers: list[int], *, together: bool = False) -> None:
        """Settle messages that a consumer has acked. `together`: it must not be written without the
        rest of its entry."""
        self.shared.counters.consumed += len(numbers)
        for tracer in self.tracers:
            tracer.left(self, "acked", numbers)
        if together:
            self.lane.leave_together(numbers)
        else:
            self.lane.settle(numbers)

    # -- returned messages

    @property
    def returned_at_once(self) -> int:
        """How many messages are returned before the time is looked at."""
        return STEP_RULED if self.is_ruled else STEP_MESSAGES

    def give_back(
        self,
        deliveries: Sequence[Delivery],
        event: Event,
        delay_us: int = 0,
        defaults: Policy = DEFAULT,
        why: bytes = b"",
    ) -> Event | None:
        """See `Returns.give_back`. Nothing comes back to a queue that is deleted."""
        if self.deleted:
            return None
        if self.has_forgotten:
            self.lane.see(line for _, line in deliveries)
            self.has_forgotten = bool(self.unacked or self.returning)
        for tracer in self.tracers:
            tracer.returned(self, event, deliveries, why)
        returns = self.shared.features.returns
        reason = returns.give_back(self, deliveries, event, delay_us, defaults, why)
        if self.times is not None or event is not REJECT:
            self.update_capacity()
        return reason

    def put_off(self, number: int, line: bytes, mark: Mark, due_us: int) -> None:
        """Schedule a message, by the clock of its mark."""
        self.order.put_off(number)
        self.timed().add(number, [line], [mark], [due_us])

    def fetch(self, numbers: list[int], then: Callable[[dict[int, bytes]], None]) -> None:
        """Read living messages that are only on disk."""
        self.shared.wanted.fetches.append(Fetch(self, numbers, then))

    def arrived_us(self, number: int) -> int:
        """Arrival of a message, as exactly as the journal knows."""
        arrived_us = self.shared.facts.arrived_us(self.id, number)
        return arrived_us or self.shared.schedule.wall_us()

    def _written(self, end: int) -> None:
        """Numbers below `end` are on disk."""
        if self.times is not None:  # There may be many queues.
            self.shared.turns.later(self.times.committed(end, self.lane.aside_end))

    def become_sparse(self) -> None:
        """Record in the journal that numbers of its ready messages may be missing from now on."""
        if not self.policy.is_sparse:
            self.keep(replace(self.policy, is_sparse=True))

    def keep(self, policy: Policy) -> None:
        """Record a policy in the journal with the next commit."""
        self.policy = policy
        self.shared.pending.entry.queues[self.id] = QueueState(self.name, policy)

    # -- attaching and detaching consumers

    def attach(self, consumer: Taker) -> None:
        self.consumers[consumer] = None
        if not consumer.rests:
            self.serve(consumer)
        if self.rules.single_consumer and len(self.consumers) > 1:
            consumer.rest(Rest.STANDBY)
        else:  # It may have been on standby in an earlier queue of this name.
            consumer.resume(Rest.STANDBY)

    def serve(self, consumer: Taker) -> None:
        """A consumer can take messages: it is the last one in the ring."""
        self.ring[consumer] = None
        self.order.consumer_ready(consumer)

    def detach(self, consumer: Taker) -> None:
        del self.consumers[consumer]
        self.ring.pop(consumer, None)
        self.order.consumer_gone(consumer)
        if self.rules.single_consumer and self.consumers:
            next(iter(self.consumers)).resume(Rest.STANDBY)

    # -- delivering messages

    @property
    def _must_wait(self) -> bool:
        """Whether nothing can be delivered before messages are returned, the outboxes have space,
        or the next turn."""
        outboxes = self.shared.outboxes
        return bool(self.returning or outboxes.used >= outboxes.limit or self.shared.turns.over)

    def _wait(self) -> None:
        """Continue the delivery then. What is returned ends with a delivery of its own."""
        shared = self.shared
        if self.returning:
            return
        if shared.outboxes.used >= shared.outboxes.limit:
            shared.outboxes.wait(self, self.deliver)
        else:
            shared.turns.due[self] = None

    @property
    def _expires(self) -> bool:
        """Whether expired messages must go before others are delivered."""
        return self.times is not None and self.times.expires()

    def go_on(self) -> None:
        """Continue a delivery that the end of the turn has interrupted: with at least one step,
        however short the turn."""
        waits = self.returning or self.deleted or self.shared.outboxes.room <= 0
        if not waits and self._may_deliver and not self._expires:
            self._deliver_some()
        self.deliver()

    def deliver(self) -> None:
        """Deliver ready messages while there are messages and consumers that can take them."""
        if self.deleted:
            return
        times = self.times
        # While an expired message is left its alarm is due, which ends with a delivery.
        if not self._expires:
            while self._may_deliver:
                if self._must_wait:
                    self._wait()
                    break
                if not self._deliver_some():
                    break
        if times is not None:
            times.set_alarms()
        if self.throttle is not None:
            self.throttle.ended()
        lane = self.lane
        if self.capacity.is_watched or lane.blocks.count >= self.told_at:
            self.update_capacity()
        if not (self.ring and lane.blocks.count) or lane.paging or not self._room:
            return
        if numbers := self.order.wants():
            bring(self, numbers)
        elif numbers is not None:
            lane.paging = True
            self.shared.wanted.pages.append(self)

    @property
    def _may_deliver(self) -> bool:
        return bool(self.ring and self.lane.blocks.count) and not self.shared.owner.withholds

    @property
    def _room(self) -> int:
        """How many messages may be delivered now, whoever takes them. A throttle is no reason to
        rest: a `receive` that rests is at its end, and waits no more."""
        if self.shared.draining:
            return 0
        return UNLIMITED if self.throttle is None else self.throttle.room()

    def _deliver_some(self) -> bool:
        """One step of a delivery; return whether another one may deliver more."""
        if not (room := self._room):
            return False
        shares, lane, total = self.order.next(self.ring, room), self.lane, 0
        for numbers, lines, to in shares or ():
            if not isinstance(numbers, range):
                total += self._deliver_out(numbers, lines, to)
                continue
            taken = self._dispatch(numbers, lines, None, stored=True)
            lane.delivered(numbers.start + taken)
            if taken < len(lines):
                lane.put_front(numbers.start + taken, lines[taken:])
            if not lane.fresh:  # Behind these are none but such as were scheduled, or have left.
                lane.delivered(lane.next_seq)
            total += taken
        if self.throttle is not None:
            self.throttle.delivered(total)
        return shares is not None

    def update_capacity(self) -> None:
        """What waits has changed: see whether it is too much."""
        capacity, shared, lane = self.capacity, self.shared, self.lane
        warns, has_turned, more = capacity.update()
        self.told_at = lane.blocks.count + more
        if capacity.is_tight:
            shared.capacities.tight[self] = None
        else:
            shared.capacities.tight.pop(self, None)
        notices = shared.owner.notices
        if has_turned:
            tell = notices.queue_full if capacity.refuses_all else notices.queue_has_room
            tell(self.name, self.ready)
        if warns:
            notices.queue_nearly_full(self.name, self.ready)
        is_busy = self.is_dropping or self.returning
        if capacity.drops and not is_busy and capacity.surplus(self.ready, lane.ready_bytes):
            self.is_dropping = True
            # Dropped messages may exceed the limits of the next queue, and so on.
            shared.turns.later(shared.features.deaths.drop_surplus(self))

    def _dispatch(
        self,
        all_numbers: Sequence[int],
        lines: list[bytes],
        ids: Sequence[bytes] | None,
        *,
        stored: bool,
        held: list[int] | None = None,
    ) -> int:
        """Distribute messages, by increasing numbers, over the ring; return how many were taken:
        not all if the ring is empty, or if a large one has used up the turn. `held` gets the
        numbers that must be acked.

        Consumers take turns message by message; each gets its share of the batch in one piece.
        `stored`: the messages are pending or in the journal already. Others that go only to
        consumers without manual ack are never written.
        """
        lane, ring, counters = self.lane, self.ring, self.shared.counters
        taken, total = 0, len(lines)
        while ring and taken < total:
            left = total - taken
            takers = list(islice(ring, min(left, TAKERS_MAX)))
            # As many for each as the one with the least room can take: then a share is one slice,
            # and that one rests in the next round.
            room = min(taker.room() for taker in takers)
            if room <= 0:
                for taker in takers:
                    taker.rest_if_full()
                continue
            turns = len(takers)
            # Each consumer of a part of the ring takes one: then it is the others' turn.
            count = min(left, room * turns) if turns == len(ring) else turns
            manual = any(taker.manual_ack for taker in takers)
            if manual and turns == len(ring) and any(taker.is_brief for taker in takers):
                count = min(count, STEP_MESSAGES)  # Each lease takes 10 µs.
            start, end = taken, taken + count
            # If all of them settle a message as they take it, it never needs the disk.
            if manual and not stored:
                lane.remember(all_numbers[start], lines[start:end])
            for index, taker in enumerate(takers):
                numbers = all_numbers[start + index : end : turns]
                share = lines[start + index : end : turns]
                share_ids = ids and ids[start + index : end : turns]
                taker.take(numbers, share, share_ids)
                counters.delivered += len(share)
                if not taker.manual_ack:
                    counters.consumed += len(share)
                    if manual or stored:
                        lane.settle(numbers)
                elif held is not None:
                    held += numbers
            if self.tracers:
                for index, taker in enumerate(takers, start):
                    self._trace(taker, all_numbers[index:end:turns], lines[index:end:turns])
            if stored and manual and held is None and all_numbers[0] >= lane.cursor:
                lane.tell_cursor()
            taken = end
            # Those that got one more than the others are the last ones next time.
            for taker in takers[: count % len(ring)]:
                ring.move_to_end(taker)
            if taken < total and self.shared.turns.over:
                break
        return taken

    def _trace(self, taker: Taker, numbers: Sequence[int], lines: Sequence[bytes]) -> None:
        """Note that they were delivered."""
        told = {"consumer": taker.id.decode("utf-8", "surrogateescape")}
        what = "received" if taker.is_brief else "delivered" if taker.manual_ack else "consumed"
        for tracer in self.tracers:
            tracer.note(self, what, zip(numbers, lines, strict=True), told)

    def _deliver_out(
        self, numbers: Sequence[int], lines: list[bytes], to: Taker | None = None
    ) -> int:
        """Deliver messages that were taken out of order, by increasing numbers: to this consumer,
        or to all in turns. Return how many were taken, the first ones."""
        lane, held = self.lane, list[int]()
        if to is None:
            taken = self._dispatch(numbers, lines, None, stored=True, held=held)
            if self.has_forgotten:  # Since what others took was settled.
                lane.see(lines[taken:])
            for number, line in zip(numbers[taken:], lines[taken:], strict=True):
                lane.keep_returned(number, line)
        elif taken := len(numbers):
            to.take(numbers, lines, None)
            if self.tracers:
                self._trace(to, numbers, lines)
            self.shared.counters.delivered += taken
            if to.manual_ack:
                held += numbers
            else:
                self.shared.counters.consumed += taken
                lane.settle(numbers)
        lane.picked(numbers[:taken], held)
        return taken

    # -- reading

    @property
    def hides_some(self) -> bool:
        """Whether some of its living messages may be scheduled, or dying."""
        return self.lane.has_holes or self.scheduled > 0

    def hides(self, number: int) -> bool:
        """Whether this message is one of them."""
        return self.lane.is_hole(number) or self.is_put_off(number)

    def listed(self, after: int | None, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, in microseconds since 1970, of the first scheduled messages with
        numbers above `after`; with None, of those that are due first, in this order."""
        return [] if self.times is None else (yield from self.times.listed(after, limit))
