"""What must hold of a broker whenever none of its methods is running.

They are those of docs/architecture.md. The one rule: everything is counted anew, from what is
there; nothing is believed that the broker has counted.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain, islice
from typing import Final

from mqks.broker.broker import Broker
from mqks.broker.features.admission.capacity import Capacity
from mqks.broker.features.admission.made import MadeCapacity
from mqks.broker.features.admission.pauses import PausableCapacity
from mqks.broker.features.admission.unique import KEY_BYTES, UniqueKeys, _wanted
from mqks.broker.features.death.deaths import _kill_read
from mqks.broker.features.jobs.waiter import ResultWaiter
from mqks.broker.features.order.keyed import Keyed
from mqks.broker.features.order.limited import LimitedKeys
from mqks.broker.features.order.ranked import Ranked
from mqks.broker.features.throttle.breaker import Breaker
from mqks.broker.features.throttle.common import CommonLimit, CommonTerms, CommonThrottle
from mqks.broker.features.throttle.rate import Paced
from mqks.broker.features.throttle.throttles import Throttles
from mqks.broker.features.time.deadlines import Deadlines
from mqks.broker.features.time.delays import _number
from mqks.broker.features.time.receiver import Receiver
from mqks.broker.features.time.times import timed
from mqks.broker.spine.clients.consumer import UNACKED_OVERHEAD_BYTES, Consumer, consumers_of
from mqks.broker.spine.clients.outbox import Slow
from mqks.broker.spine.log.metadata import binding_bytes, consumer_bytes, mask_bytes, queue_bytes
from mqks.broker.spine.message.mark import NO_MARK
from mqks.broker.spine.message.states import AFTER, APPENDS, State
from mqks.broker.spine.queue.blocks import MESSAGE_OVERHEAD_BYTES
from mqks.broker.spine.queue.order import Rest
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.shared import Fetch
from mqks.limits import AUDIT_BEYOND_MAX, AUDIT_TOLD_MAX, SCHEDULED_SEQ
from mqks.protocol.masks import MASK, bound_matches
from mqks.protocol.replies import key_of
from tests.fuzz import Finding
from tests.fuzz.disk import Disk

EVENTS: Final = b"e1", b"a.b", b"a.c.b", b".", b"user.1"
"""Looked at beside those that queues are bound to, while there are masks."""


def require(holds: bool, what: object) -> None:
    if not holds:
        raise Finding(what)


def check(broker: Broker, *, set_clock: bool = False) -> None:
    """Raise Finding for the first invariant that does not hold; `set_clock`: the wall clock may
    have been set back."""
    for name, queue in broker.queues.items():
        require(queue.name == name and not queue.deleted, f"{name!r} leads to another queue")
        _check_queue(queue, is_at_work=broker.has_work)
    for name, queue in broker.orphans.items():
        _check_orphan(broker, name, queue)
    for consumer in _consumers(broker):
        _check_consumer(broker, consumer, set_clock)
    _check_bindings(broker)
    _check_sums(broker)


def _consumers(broker: Broker) -> Iterable[Consumer]:
    return chain.from_iterable(consumers_of(queue) for queue in _all_queues(broker))


def _all_queues(broker: Broker) -> list[Queue]:
    return [*broker.queues.values(), *broker.orphans.values()]


def _size(lines: Iterable[bytes]) -> int:
    sizes = [*map(len, lines)]
    return sum(sizes) + MESSAGE_OVERHEAD_BYTES * len(sizes)


def _deliveries(consumer: Consumer) -> list[tuple[int, bytes]]:
    return [(number, line) for number, line, _ in consumer.held()]


def _check_queue(queue: Queue, *, is_at_work: bool) -> None:
    name, lane = queue.name, queue.lane
    in_order = [*waiting(queue)]
    require(in_order == sorted({*in_order}), f"{name!r}: ready messages out of order")
    lines = [line for _, line in lane.blocks if line is not None]
    require(lane.blocks.held == len(lines), f"{name!r}: {lane.blocks.held} in memory")
    require(lane.blocks.memory_bytes == _size(lines), f"{name!r}: memory_bytes")
    on_disk = [number for number, line in lane.blocks if line is None]
    order = queue.order
    if not isinstance(order, Ranked):
        first = order.frontier if isinstance(order, Keyed) else 0
        later = [number for number in on_disk if number >= first]
        require(order.page_first == min(later, default=None), f"{name!r}: first on disk")
    elif not order.is_learning:
        listed = [number for level in order._levels.values() for number, _ in level]
        require(order._count == len(listed) == len({*listed}), f"{name!r}: levels")
        require({*in_order} <= {*listed}, f"{name!r}: ready messages in no level")
    held = [number for each in consumers_of(queue) for number, _ in _deliveries(each)]
    returned = [number for number in in_order if number < lane.cursor]
    require(lane.returned == len(returned), f"{name!r}: returned is {lane.returned}")
    below = [*held, *returned]
    require(len({*below}) == len(below), f"{name!r}: a message is in two places")
    marked = {number for number, mark in lane.marks.items() if mark.redelivered}
    require(max({*held} - marked, default=0) < lane.cursor, f"{name!r}: delivered above the cursor")
    is_held = marked <= {*held} or queue.returning > 0
    require(is_held, f"{name!r}: marked as delivered, and not held")
    check_counts(queue)
    if lane.marks:
        living = {*below, *range(lane.cursor, lane.next_seq), *scheduled(queue)}
        require(lane.marks.keys() <= living, f"{name!r}: a retry of what is settled")
        require(NO_MARK not in lane.marks.values(), f"{name!r}: a mark of nothing")
    require(lane.taken_end <= lane.next_seq, f"{name!r}: taken_end")
    require(lane.aside_end <= lane.next_aside, f"{name!r}: aside_end")
    aside = [number for number in scheduled(queue) if number >= SCHEDULED_SEQ]
    require(max(aside, default=0) < lane.next_aside, f"{name!r}: next_aside")
    consumers = [each for each in queue.ring if not isinstance(each, Receiver)]
    require({*consumers} <= {*queue.consumers}, f"{name!r}: a stranger in the ring")
    require(lane.dirty == (lane in lane.pending.dirty), f"{name!r}: dirty")
    tight = queue in queue.shared.capacities.tight
    require(queue.capacity.is_tight == tight, f"{name!r}: tight")
    if isinstance(queue.capacity, Capacity) and not is_at_work:
        coming = queue.capacity.coming, queue.capacity.coming_bytes
        require(coming == (0, 0), f"{name!r}: room for {coming}, and nothing comes")
    if isinstance(queue.capacity, MadeCapacity):
        counted, size = queue.capacity._counted, queue.capacity.backlog[1]
        require(counted == size, f"{name!r}: {counted} bytes count for its user, and {size} wait")
    _check_deadline(queue)
    _check_unique(queue)
    _check_times_end(queue)
    _check_turns(queue)
    if isinstance(queue.order, Keyed):
        _check_keys(queue, queue.order)


def _reached() -> dict[State, set[State]]:
    """Where a message may be later under the same number, by the table of states."""
    steps = {(before, after) for (before, event), after in AFTER.items() if event not in APPENDS}
    reached = {state: {state} for state in State}
    for _ in State:
        for before, after in steps:
            reached[before] |= reached[after]
    return reached


REACHED: Final = _reached()


class States:
    """What has become of each message since the last look."""

    def __init__(self) -> None:
        self._before: dict[Queue, tuple[int, dict[int, State]]] = {}

    def look(self, broker: Broker, fetches: Iterable[Fetch]) -> None:
        before, self._before = self._before, {}
        for queue in broker.queues.values():
            next_seq, known = before.get(queue, (1, {}))
            if queue.returning:  # What returns just now is nowhere.
                self._before[queue] = next_seq, known
                continue
            now = states(queue, fetches)
            for number in {*known, *now}:
                was, state = known.get(number, State.NONE), now.get(number, State.NONE)
                may = state in REACHED[was] or (was is State.NONE and number >= next_seq)
                require(may, f"{queue.name!r}: {number} was {was.value} and is {state.value}")
            self._before[queue] = queue.lane.next_seq, now


def states(queue: Queue, fetches: Iterable[Fetch]) -> dict[int, State]:
    held = (number for each in consumers_of(queue) for number, _ in _deliveries(each))
    return {
        **dict.fromkeys(waiting(queue), State.READY),
        **dict.fromkeys(scheduled(queue), State.SCHEDULED),
        **dict.fromkeys(held, State.UNACKED),
        **dict.fromkeys(dying(queue, fetches), State.DEAD),
    }


def waiting(queue: Queue) -> Iterator[int]:
    return (number for number, _ in queue.lane.blocks)


def scheduled(queue: Queue) -> Iterator[int]:
    if queue.times is not None:
        delays = timed(queue).delays
        yield from {_number(entry) for entry in delays._all() if delays._counts(entry)}


def dying(queue: Queue, fetches: Iterable[Fetch]) -> Iterator[int]:
    """Those that are being read from disk to be moved to a dead-letter queue."""
    for fetch in fetches:
        then = fetch.then
        if fetch.queue is queue and isinstance(then, partial) and then.func is _kill_read:
            yield from fetch.numbers


def memory_bytes(queue: Queue) -> int:
    bodies = timed(queue).delays.bodies if queue.times else {}
    keys = 0 if queue.lane.unique is None else _unique(queue)._size
    return queue.lane.blocks.memory_bytes + _size(bodies.values()) + keys


def _unique(queue: Queue) -> UniqueKeys:
    assert isinstance(queue.lane.unique, UniqueKeys)
    return queue.lane.unique


def _check_unique(queue: Queue) -> None:
    """Who holds a key lives, and has it in its text; and nobody else could."""
    lines = {number: line for number, line in queue.lane.blocks if line is not None}
    lines |= timed(queue).delays.bodies if queue.times is not None else {}
    lines |= {n: line for each in consumers_of(queue) for n, line in _deliveries(each)}
    wanted = {number: found for number, line in lines.items() if (found := _wanted(line))}
    if queue.lane.unique is None:
        claims = [n for n, found in wanted.items() if found.until_acked and not found.for_us]
        require(not claims, f"{queue.name!r}: {claims} hold no keys")
        return
    keys = _unique(queue)
    by_number = {holder.number: key for key, holder in keys._holders.items()}
    require(by_number == keys._by_number, f"{queue.name!r}: holders and numbers differ")
    sizes = (len(key) + len(holder.message_id) for key, holder in keys._holders.items())
    require(keys._size == sum(sizes) + KEY_BYTES * len(by_number), f"{queue.name!r}: size of keys")
    for number, key in by_number.items():
        found = wanted.get(number)
        is_its = number not in lines or (found is not None and found.key == key)
        require(is_its, f"{queue.name!r}: {number} holds {key!r}")
    for number, found in wanted.items() if keys.is_known else ():
        can = found.until_acked or keys._is_untried(number)
        is_held = found.key in keys._holders or bool(found.for_us) or not can
        require(is_held, f"{queue.name!r}: nobody holds the key of {number}")
    require(not keys._expected, f"{queue.name!r}: {keys._expected} are expected")


def check_counts(queue: Queue) -> None:
    """Of what waits, for a consumer or for a time."""
    name, lane, times = queue.name, queue.lane, queue.times
    ready = lane.blocks.count
    require(ready == sum(1 for _ in waiting(queue)), f"{name!r}: ready is {ready}")
    require(lane.ready_bytes >= 0, f"{name!r}: ready_bytes is {lane.ready_bytes}")
    require(bool(ready) or not lane.ready_bytes, f"{name!r}: {lane.ready_bytes} of nothing")
    marks = (lane.marks.get(number, NO_MARK) for number in scheduled(queue))
    leased = sum(mark.keeps_place for mark in marks)
    require(queue.leased == leased, f"{name!r}: leased is {queue.leased}, not {leased}")
    if times is not None:
        count = sum(1 for _ in scheduled(queue))
        require(queue.scheduled == count, f"{name!r}: {queue.scheduled} scheduled, not {count}")
        require(times.delays.bytes >= 0, f"{name!r}: scheduled_bytes")
        require(bool(count) or not times.delays.bytes, f"{name!r}: scheduled_bytes of nothing")


def _check_deadline(queue: Queue) -> None:
    rule = queue.policy.delete_when_unused
    due = rule is not None and rule.delay_s is not None and not queue.consumers
    if queue.timer is None:
        require(not due, f"{queue.name!r}: unused, with a rule and no deadline")
    else:
        require(rule is not None, f"{queue.name!r}: a deadline without a rule")
        require(not queue.consumers, f"{queue.name!r}: a deadline while it is used")


def _check_times_end(queue: Queue) -> None:
    """Times of a queue in which nothing waits for a time are about to leave it."""
    if queue.times is not None:
        times = timed(queue)
        delays, expiry = times.delays, times.expiry
        gone = sum(delays._gone.values())
        require(delays._gone_count == gone, f"{queue.name!r}: entries of those taken out")
        waits = any(scheduled(queue)) or bool(expiry._own) or expiry.ttl_us is not None
        waits = waits or bool(delays._reading or delays._aside or len(times.searches))
        require(waits or times._ends_us is not None, f"{queue.name!r}: times without an end")
        expires = times._ends_us is None and times._next_expiry_us() is not None
        require(times._alarm.is_set or not expires, f"{queue.name!r}: no alarm when they expire")


def _check_turns(queue: Queue) -> None:
    """Whoever can take gets what there is, or it is known why not."""
    if queue.ready and any(consumer.room() > 0 for consumer in queue.ring):
        order = queue.order
        waits = queue.lane.paging or queue in queue.shared.outboxes.waiters
        waits = waits or queue.shared.draining or queue.held_back is not None
        waits = waits or (isinstance(order, Keyed) and not _check_keys(queue, order))
        # The first one is to die, by an alarm that is due.
        waits = waits or (queue.times is not None and queue.times.expires())
        # A rate has some again, or a trial is due, and the alarm that tells it is next.
        waits = waits or any(each._alarm.is_set for each in _paced(queue))
        require(waits, f"{queue.name!r}: messages wait for a consumer that has room")


def _paced(queue: Queue) -> Iterator[Paced | Breaker]:
    """Its breaker, its rate, and that which it has in common with others."""
    for part in _parts(queue):
        part = part.limit._paced if isinstance(part, CommonThrottle) else part
        if isinstance(part, Paced | Breaker):
            yield part


def _parts(queue: Queue) -> Iterable[object]:
    throttle = queue.throttle
    return throttle.parts if isinstance(throttle, Throttles) else [throttle]


def _check_keys(queue: Queue, keys: Keyed) -> bool:
    """Return whether a message waits although a consumer with room may have it."""
    name, lane, free = queue.name, queue.lane, {*keys._free}
    known = {number for number in waiting(queue) if number < keys.frontier}
    indexed = {
        number: key
        for key, numbers in keys._ready.items()
        for number in (numbers[numbers[0] :] if isinstance(numbers, array) else [numbers])
    }
    require(known <= indexed.keys(), f"{name!r}: {known - indexed.keys()} have no key")
    require(keys._count == len(indexed), f"{name!r}: {keys._count} numbers of keys")
    require(len(free) == len(keys._free), f"{name!r}: a key is free twice")
    limits = keys if isinstance(keys, LimitedKeys) else None
    waits: set[bytes] = limits._busy | limits._asleep if limits else set()
    require(not free & waits, f"{name!r}: a key is free, and held back by a limit")
    if keys.is_ordered:
        require(not free & keys._holds.keys(), f"{name!r}: a key is free and held")
        waits |= keys._holds.keys()
    turns = free | waits | keys._fetched
    require(keys._ready.keys() <= turns, f"{name!r}: a key has no turn")
    held = Counter(hold.key for hold in keys._held.values())
    require(held == {key: hold.count for key, hold in keys._holds.items()}, f"{name!r}: holds")
    require({*scheduled(queue)} & keys._held.keys() == keys._put_off, f"{name!r}: put off")
    for consumer in consumers_of(queue):
        for number, line in _deliveries(consumer) if keys.is_ordered else ():
            hold = keys._held.get(number)
            if hold is not None:
                require(hold.key == key_of(line), f"{name!r}: {number} holds {hold.key!r}")
                require(hold.taker in (consumer, None), f"{name!r}: two hold {hold.key!r}")
    if keys._unread:
        return False
    able = [each for each in queue.ring if each.room() > 0]
    offered = [
        hold
        for hold in keys._holds.values()
        if keys.is_ordered
        and not (limits and hold.key in limits._busy | limits._asleep)
        and hold.taker in able
        and not hold.put_off
        and known & {n for n in indexed if indexed[n] == hold.key}
    ]
    given = known & {number for number, key in indexed.items() if key in free}
    unknown = lane.blocks.get(keys.frontier) is not None
    return bool(able and (given or offered or unknown))


def _check_consumer(broker: Broker, consumer: Consumer, set_clock: bool) -> None:
    who, queue = consumer.id, consumer.queue
    require(not consumer.deleted, f"{who!r} is deleted and still attached")
    require(broker.consumers.get(who) is consumer, f"{who!r} is not known by its id")
    connection = broker.connections.get(consumer.connection.id)
    require(connection is consumer.connection, f"{who!r}: its connection has gone")
    assert connection is not None
    require(connection.consumers.get(who) is consumer, f"{who!r}: not its connection's")
    takes = consumer in queue.ring
    require(takes is not bool(consumer.rests), f"{who!r} neither rests nor is in the ring")
    _check_reasons(consumer)
    deliveries = _deliveries(consumer)
    size = sum(len(line) + UNACKED_OVERHEAD_BYTES for _, line in deliveries)
    require(consumer.unacked_bytes == size, f"{who!r}: unacked_bytes")
    require(consumer.unacked_count == len(deliveries), f"{who!r}: unacked_count")
    require(consumer.manual_ack or not deliveries, f"{who!r}: unacked without manual ack")
    # `unacked_max` may have been set to less than are held.
    require(len(deliveries) <= consumer.prefetch_max, f"{who!r}: more unacked than it may")
    require(consumer.repeated.keys() <= consumer.unacked.keys(), f"{who!r}: repeated without first")
    require(all(consumer.repeated.values()), f"{who!r}: nothing repeated")
    oldest_us = min((since_us for _, _, since_us in consumer.held()), default=None)
    # A clock that was set back makes a later delivery older.
    require(consumer.oldest_us() == oldest_us or set_clock, f"{who!r}: the oldest is another")
    for message_id, (_, line, _) in consumer.unacked.items():
        require(line.startswith(message_id + b" event="), f"{who!r}: {message_id!r} is another")


def _check_reasons(consumer: Consumer) -> None:
    """Whoever rests has a reason that holds."""
    who, rests, budget = consumer.id, consumer.rests, consumer.budget
    holds = {
        Rest.SLOW: bool(consumer.connection.rests),
        Rest.UNACKED: consumer.unacked_count >= consumer.unacked_max,
        Rest.ALL_UNACKED: bool(consumer.unacked) and consumer in budget.waiters,
        Rest.NO_QUEUE: consumer.queue.deleted,
    }
    for reason, is_true in holds.items():
        require(is_true or not rests & reason, f"{who!r} rests without the reason {reason}")
    require(bool(rests & Rest.NO_QUEUE) == consumer.queue.deleted, f"{who!r}: deleted queue")


def _check_orphan(broker: Broker, name: bytes, queue: Queue) -> None:
    require(queue.deleted and queue.name == name, f"orphan {name!r} is alive")
    require(name not in broker.queues, f"{name!r} is orphaned and there")
    require(bool(queue.consumers), f"orphan {name!r} has no consumers")
    takes = queue.ring or queue.lane.blocks.memory_bytes
    require(not takes, f"orphan {name!r} delivers, or takes memory")


def _check_bindings(broker: Broker) -> None:
    routes: dict[bytes, set[Queue]] = {}
    masks: set[tuple[bytes, Queue]] = set()
    tables = broker.bindings.by_name, broker.bindings.masks_by_name
    for name, bound in chain.from_iterable(table.items() for table in tables):
        require(bool(bound), f"{name!r} is bound to nothing and known")
        most = broker.settings.bindings_per_queue_max
        require(broker.bindings.count(name) <= most, f"{name!r} is bound to more than it may")
    for name, queue in broker.queues.items():
        for event in broker.bindings.by_name.get(name, ()):
            routes.setdefault(event, set()).add(queue)
        known = broker.bindings.masks_by_name.get(name, ())
        masks |= {(mask.removeprefix(MASK), queue) for mask in known}
    told = {event: {*queues} for event, queues in broker.bindings.routes.bound.items()}
    require(told == routes, "routes are not the bindings of queues that exist")
    count = broker.bindings.routes.masks.count
    require(count == len(masks), "masks bound are not those of the queues")
    for event in {*islice(routes, 10), *EVENTS} if masks else ():
        wanted = routes.get(event, set()) | {q for mask, q in masks if bound_matches(mask, event)}
        found = broker.bindings.routes.route(event)
        require(found is None or {*found} == wanted, f"{event!r} goes elsewhere")


def _check_made(broker: Broker) -> None:
    """What counts for users is what their queues say."""
    made, queues = broker.made, broker.queues.values()
    counts = Counter(queue.policy.made_by for queue in queues if queue.policy.made_by)
    require(made._counts == counts, f"{made._counts} queues are made")
    used = Counter[int]()
    for queue in queues:
        if isinstance(queue.capacity, MadeCapacity):
            used[id(queue.capacity.budget)] += queue.capacity._counted
    for user, budget in made._budgets.items():
        require(budget.used == used[id(budget)], f"{user}: {budget.used} bytes are used")


def _check_sums(broker: Broker) -> None:
    _check_made(broker)
    settings = broker.settings
    shared = broker.shared
    memory = sum(map(memory_bytes, broker.queues.values()))
    require(shared.memory.used == memory, f"memory {shared.memory.used}, not {memory}")
    consumers = [*_consumers(broker)]
    unacked = sum(consumer.unacked_bytes for consumer in consumers)
    held = broker.flow.unacked
    require(held.used == unacked, f"unacked {held.used}, not {unacked}")
    require(len(consumers) == len(broker.consumers), "a consumer that is attached to no queue")
    theirs = sum(len(each.consumers) for each in broker.connections.values())
    require(len(consumers) == theirs, "a consumer that is attached to no connection")
    timers = sum(queue.timer is not None for queue in broker.queues.values())
    timers += broker.tails.is_telling + broker.audit.is_counting + len(broker.traces.rows)
    timers += sum(each.pause_entry is not None for each in consumers)
    some = [*chain.from_iterable(each.receivers for each in broker.connections.values())]
    receivers = [each for each in some if isinstance(each, Receiver)]
    waiters = [each for each in some if isinstance(each, ResultWaiter)]
    require(len(some) == broker.flow.receivers, "number of receives and results that wait")
    timers += sum(each.timer is not None for each in waiters)
    _check_results(broker, waiters)
    waiting = {taker for queue in _all_queues(broker) for taker in queue.ring} & {*receivers}
    served = {each for each in receivers if not (each.rests or each.queue.deleted)}
    require(waiting == served, "receives that wait")
    timers += sum(each.timer is not None for each in receivers)
    timers += broker.schedules._is_checking
    timers += bool(broker.drain._waiting)
    require(len(broker.schedule) == timers + _alarms(broker), "timers")
    require(broker.schedule.repeats == 0, "a timer fires again and again for one moment")
    for budget in (held, shared.outboxes):
        require(not budget.waiters or budget.room <= 0, "they wait for a budget that has room")
    for each in held.waiters:
        waits = isinstance(each, Consumer) and each.rests & Rest.ALL_UNACKED
        require(bool(waits), "a consumer waits, and does not rest")
    require(len(broker.queues) <= settings.queues_max, "more queues than there may be")
    metadata = _metadata_bytes(broker)
    require(broker.metadata.bytes == metadata, f"metadata {broker.metadata.bytes}, not {metadata}")
    require(broker.once._id_bytes == sum(map(len, broker.once._ids)), "bytes of ids")
    require(len(broker.once._known) <= len(broker.once._ids) <= settings.once_ids_max, "once")
    errors = len(broker.pending.entry.errors)
    require(errors <= settings.errors_kept_max, "errors wait without a bound")
    traces = broker.traces
    size = sum(step.size for step in traces.steps)
    require(traces.bytes == size <= settings.trace_bytes_max, "bytes of steps")
    for queue in broker.queues.values():
        known = queue.tracers
        require((traces in known) == bool(traces.rows), "a queue has a wrong tracer")
        watched = queue.id in broker.results._places
        # A queue is left later.
        require(not watched or broker.results in known, "a queue has a wrong tracer of results")
    for limit in broker.shared.limits.values():
        _check_limit(broker, limit)
    audit = broker.audit
    records = len(broker.pending.entry.audit), len(audit.last)
    require(max(records) <= min(settings.audit_kept_max, AUDIT_TOLD_MAX), "the audit has no bound")
    require(len(audit._beyond) <= AUDIT_BEYOND_MAX + 1, "records are counted without a bound")
    for connection in broker.connections.values():
        most = settings.consumers_per_connection_max
        require(len(connection.consumers) <= most, "more consumers than a connection may have")
        require(connection.unconfirmed >= 0, "fewer than no confirms are due")
        waits = not connection.rests & Slow.RECEIVES or connection.promised_bytes > 0
        require(waits, "a connection waits for replies, and none was promised")
        tail = connection.splitter.tail_bytes
        require(tail <= connection.splitter.line_bytes_max + 1, "a tail longer than a line")


def _check_results(broker: Broker, waiters: list[ResultWaiter]) -> None:
    results = broker.results
    rows, settings = results.rows.values(), broker.settings
    require(results.bytes == sum(found.size for found in rows), "bytes of results")
    require(len(rows) <= settings.results_max, "more results than there may be")
    known = {*chain.from_iterable(each.values() for each in results._places.values())}
    require(known == {found for found in rows if not found.until_us}, "results that wait")
    for queue in broker.queues.values():
        for number, found in results._places.get(queue.id, {}).items():
            is_here = found.place is queue and found.number == number and not found.until_us
            require(is_here, "a result is not where it is said to be")
    ended = {*chain.from_iterable(results._buckets.values())}
    require(ended == {found.id for found in rows if found.until_us}, "results that are forgotten")
    require(sorted(results._due) == sorted(results._buckets), "times of results")
    require({*chain.from_iterable(results.waiters.values())} == {*waiters}, "waiters for results")
    require(all(results.waiters.values()), "nobody waits for a result")


def _check_limit(broker: Broker, limit: CommonLimit) -> None:
    rules = [(queue, queue.rules.limit) for queue in broker.queues.values()]
    named = [queue for queue, text in rules if text and CommonTerms.of(text).name == limit.name]
    require(limit.queues == len(named) > 0, "a limit has other queues than those that name it")
    held = sum(queue.unacked + queue.leased for queue in named)
    require(limit.held >= held, f"{held} messages are held, and a limit counts {limit.held}")
    known = [*limit.line, *limit.stale]
    require({member.queue for member in known} <= {*named}, "a limit keeps a queue")


def _alarms(broker: Broker) -> int:
    queues = broker.queues.values()
    alarms = [broker.batches._alarm, broker.results._alarm, *broker.schedules._alarms.values()]
    for queue in queues:
        if queue.times is not None:
            alarms += [timed(queue)._alarm, timed(queue)._dated_alarm]
        if isinstance(queue.capacity, PausableCapacity) and queue.capacity._alarm:
            alarms.append(queue.capacity._alarm)
        if isinstance(queue.order, LimitedKeys):
            alarms.append(queue.order._alarm)
        alarms += [each._alarm for each in _parts(queue) if isinstance(each, Paced | Breaker)]
    paced = [limit._paced for limit in broker.shared.limits.values()]
    alarms += [each._alarm for each in paced if each is not None]
    awaited = [each.deadlines for each in _consumers(broker)]
    alarms += [each._alarm for each in awaited if isinstance(each, Deadlines)]
    return sum(alarm.is_set for alarm in alarms)


def _metadata_bytes(broker: Broker) -> int:
    events, masks = broker.bindings.by_name, broker.bindings.masks_by_name
    size = sum(queue_bytes(each.name) + each.policy.size_bytes for each in _all_queues(broker))
    size += sum(map(consumer_bytes, broker.consumers)) + sum(map(len, {*events, *masks}))
    size += sum(map(binding_bytes, chain.from_iterable(events.values())))
    return size + sum(map(mask_bytes, chain.from_iterable(masks.values())))


def _bound(broker: Broker) -> list[tuple[bytes, bytes]]:
    tables = broker.bindings.by_name, broker.bindings.masks_by_name
    return [(name, each) for table in tables for name, bound in table.items() for each in bound]


def check_disk(broker: Broker, disk: Disk, fetches: Iterable[Fetch] = ()) -> None:
    """With nothing pending: what is on disk is what is there, and what is there is on disk."""
    names = {queue_id: state.name for queue_id, state in disk.states.items()}
    require(names == {queue.id: queue.name for queue in broker.queues.values()}, "queues on disk")
    require(disk.bindings == {*_bound(broker)}, "bindings on disk")
    for queue in broker.queues.values():
        known = disk.queues[queue.id]
        require(known.next_seq <= queue.lane.next_seq, f"{queue.name!r}: next_seq on disk")
        wanted = _living(queue)
        wanted |= dict.fromkeys(dying(queue, [*broker.shared.wanted.fetches, *fetches]))
        require(known.lines.keys() == wanted.keys(), f"{queue.name!r}: numbers on disk")
        for number, line in wanted.items():
            require(line is None or known.lines[number] == line, f"{queue.name!r}: body {number}")


def _living(queue: Queue) -> dict[int, bytes | None]:
    """Number → message, None for one that is only on disk, or waits for a time."""
    living = dict(queue.lane.blocks)
    living |= dict.fromkeys(scheduled(queue))
    for consumer in consumers_of(queue):
        living |= _deliveries(consumer)
    return living


def digest(broker: Broker) -> tuple[object, ...]:
    """All that a request may change; errors and what is told of them aside."""
    shared, counters = broker.shared, broker.shared.counters
    waiters = broker.pending.waiters
    return (
        [_queue_digest(queue) for queue in _all_queues(broker)],
        _bound(broker),
        dict(broker.pending.entry.bindings),
        [_consumer_digest(each) for each in broker.consumers.values()],
        [each.id for each in broker.flow.unacked.waiters if isinstance(each, Consumer)],
        (counters.published, counters.queued, counters.unroutable, broker.purged),
        (
            broker.answers.confirmed,
            counters.delivered,
            counters.redelivered,
            counters.consumed,
            counters.rejected,
        ),
        (shared.memory.used, broker.metadata.bytes, broker.flow.unacked.used),
        (broker.unwritable, broker.pending.records, broker.answers.confirmed),
        (len(broker.once), len(broker.pending.entry.once), dict(broker.pending.entry.queues)),
        [len(each) for each in (waiters.confirms, waiters.counts, waiters.held)],
        (len(broker.access.logins), len(shared.wanted.pages), len(broker.pending.dirty)),
        {each.id: (each.user, len(each.reads)) for each in broker.connections.values()},
    )


def _queue_digest(queue: Queue) -> object:
    lane = queue.lane
    return (
        (queue.name, queue.id, queue.policy, queue.timer, lane.next_seq, lane.cursor),
        ([*lane.blocks], lane.paging, dict(lane.marks), dict(lane.marked)),
        ([each.id for each in queue.consumers], [each.id for each in queue.ring]),
        (lane.unwritten_first, len(lane.unwritten), len(lane.unwritten_runs), [*lane.acked]),
        ([*lane.acked_ranges], [*lane.moved], lane.cursor_moved, queue.capacity.refuses_all),
    )


def _consumer_digest(consumer: Consumer) -> object:
    return (
        (consumer.id, consumer.connection.id, consumer.queue.name, consumer.manual_ack),
        (dict(consumer.unacked), {each: [*of] for each, of in consumer.repeated.items()}),
        (consumer.rests, consumer.update_due),
    )
