"""What becomes of a message that a consumer returns, or that is due: it goes to its old place, to
the tail, into the schedule, or dies.

The one rule: `fate` decides, and `_apply` does what was decided. The counts of a message (retry,
rejects, losses) change only here, and those of what a consumer held at a crash in
`recovery.restore`.
"""

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple
from zlib import crc32

from mqks.broker.features.death.dead_letters import with_published
from mqks.broker.features.death.deaths import Dead, kill, kill_ready
from mqks.broker.features.death.moves import move
from mqks.broker.spine.message.mark import Mark, id_checksum
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import AFTER, APPENDS, DEATHS, KILL, REJECT, Event, State
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.shared import Place
from mqks.limits import DURATION_S_MAX
from mqks.protocol import replies
from mqks.protocol.requests import Backoff

JITTER: float = 0.1
"""A backoff is longer or shorter by up to this part of it, so that messages that failed together
are not redelivered together."""

_COUNTED: Final[dict[Event, Callable[[Mark], Mark]]] = {
    Event.REJECT: Mark.rejected,
    Event.KILL: Mark.rejected,
    Event.LOSS: Mark.lost,
    Event.END: Mark.returned,
    Event.RELEASE: Mark.released,
    Event.UNDELIVERED: Mark.released,
}
"""The mark after a consumer has returned the message."""


class Fate(NamedTuple):
    """`event` leads to the next state, see `AFTER`. `keeps_place`: it goes to its old place, after
    `wait_us` if it is scheduled."""

    event: Event
    mark: Mark
    keeps_place: bool = False
    wait_us: int = 0


def fate(
    event: Event,
    mark: Mark,
    rules: Policy,
    line: bytes,
    now_us: int,
    *,
    is_overdue: bool,
    delay_us: int = 0,
) -> Fate:
    """What becomes of a message, by the first of these that is true: it was killed, it has failed
    too often, its TTL is over, it has to wait. `now_us` is the wall clock, or when it was due."""
    if event is Event.DUE:
        if mark.keeps_place and _is_spent(mark.deliveries, rules.deliveries):
            return Fate(Event.DELIVERIES, mark)  # A lease has ended.
        if is_overdue and mark.version:  # Otherwise its TTL starts now.
            return Fate(Event.TTL, mark)
        joined = mark.due(now_us)
        return Fate(event, joined.changed() if mark.keeps_place else joined, mark.keeps_place)
    mark, failures = _COUNTED[event](mark), 0
    if event is KILL:  # Its consumer wants that, whatever the rules allow.
        return Fate(event, mark)
    if event is REJECT:
        failures = mark.rejects
        if _is_spent(failures, rules.retries):
            return Fate(Event.REJECTS, mark)
    elif event is Event.LOSS:
        failures = mark.losses - 1  # A consumer may be lost without a fault of the message.
        if _is_spent(mark.losses, rules.losses):
            return Fate(Event.LOSSES, mark)
    if event is Event.RELEASE and rules.deliveries is not None:
        mark = mark.release_counted()
    if _is_spent(mark.deliveries, rules.deliveries):
        return Fate(Event.DELIVERIES, mark)
    if is_overdue:
        # Also a delivery that was released has been tried.
        is_uncounted = event is Event.RELEASE and rules.deliveries is None
        return Fate(Event.TTL, mark._replace(retry=mark.retry + is_uncounted))
    # In order, one that has failed must come before those of its key that are behind it.
    keeps_place = event not in APPENDS or rules.ordered is not None
    if delay_us:
        return Fate(Event.DELAY, mark, keeps_place, delay_us)
    if wait_us := _backoff_us(rules.backoff, failures, line):
        return Fate(Event.BACKOFF, mark, keeps_place, wait_us)
    return Fate(event, mark, keeps_place)


def _is_spent(count: int, most: int | None) -> bool:
    """Whether a message has had as many tries, or failures, as a rule allows."""
    # It has been tried already: 0 is no fewer than 1.
    return most is not None and count >= max(1, most)


def give_back(
    queue: Place,
    deliveries: Sequence[Delivery],
    event: Event,
    delay_us: int = 0,
    defaults: Policy = DEFAULT,
    why: bytes = b"",
) -> Event | None:
    lane = queue.lane
    if event is REJECT or event is KILL:
        queue.shared.counters.rejected += len(deliveries)
    # Most queues have no rule to ask: without fates a gathered reject takes half the time.
    if not (event is KILL or delay_us or queue.is_ruled or defaults is not DEFAULT):
        mark_of = lane.mark_of
        if event is REJECT:
            move(queue, queue, deliveries, [mark_of(number).rejected() for number, _ in deliveries])
        else:
            count = _COUNTED[event]
            for number, line in deliveries:
                lane.give_back(number, line, count(mark_of(number)))
        queue.deliver()
        return None
    rules, now_us = queue.rules.over(defaults), queue.shared.schedule.wall_us()
    fates = list[Fate]()
    for number, line in deliveries:
        late, mark = _is_overdue(queue, number), lane.mark_of(number)
        fates.append(fate(event, mark, rules, line, now_us, is_overdue=late, delay_us=delay_us))
    _apply(queue, State.UNACKED, deliveries, fates, why)
    return next((each.event for each in fates if each.event in DEATHS), None)


def lease(
    queue: Place, numbers: Sequence[int], lines: Sequence[bytes], lease_us: int
) -> list[Mark]:
    """Ready messages, taken out, are received: they are scheduled, and count as delivered."""
    marks = [queue.lane.mark_of(number).returned() for number in numbers]
    for number, line, mark in zip(numbers, lines, marks, strict=True):
        put_off(queue, number, line, mark, lease_us, keeps_place=True)
    return marks


def join(queue: Place, due: Sequence[Delivery], since_us: Sequence[int] = ()) -> None:
    lane = queue.lane
    lane.see(line for _, line in due)  # They may come from before the start.
    if not (lane.marks or lane.expiry or lane.unique is not None):
        lane.leave_together([number for number, _ in due])
        for tracer in queue.tracers:
            tracer.moved(queue, queue, due, lane.next_seq)
        queue.publish(None, [line for _, line in due])
        return
    rules, clocks, fates = queue.rules, queue.shared.schedule, list[Fate]()
    now_us = clocks.wall_us()
    ahead_us = now_us - clocks.clock_us()
    for (number, line), each_us in zip(due, since_us or [0] * len(due), strict=True):
        late, mark = _is_overdue(queue, number), lane.mark_of(number)
        joined_us = each_us + ahead_us if each_us else now_us
        fates.append(fate(Event.DUE, mark, rules, line, joined_us, is_overdue=late))
    _apply(queue, State.SCHEDULED, due, fates)


def started(queue: Place) -> None:
    """The server has started: those that consumers held when it ended have been counted since."""
    most, lane = queue.rules.deliveries, queue.lane
    if most is not None:
        spent = [n for n, mark in lane.marks.items() if _is_spent(mark.deliveries, most)]
        kill_ready(queue, filter(lane.is_ready, sorted(spent)), Event.DELIVERIES)


def _is_overdue(queue: Place, number: int) -> bool:
    expiry = queue.lane.expiry
    return expiry is not None and expiry.is_overdue(number, queue.lane.next_seq)


def _apply(
    queue: Place,
    state: State,
    deliveries: Sequence[Delivery],
    fates: Sequence[Fate],
    why: bytes = b"",
) -> None:
    """Do what was decided about messages in this state, and deliver."""
    lane = queue.lane
    tail, marks = list[Delivery](), list[Mark]()
    dead: dict[Event, list[Dead]] = {}
    for (number, line), (event, mark, keeps_place, wait_us) in zip(deliveries, fates, strict=True):
        after = AFTER[state, event]
        if after is State.DEAD:
            dead.setdefault(event, []).append(Dead(number, line, mark.deliveries))
        elif after is State.SCHEDULED:
            put_off(queue, number, line, mark, wait_us, keeps_place=keeps_place)
        elif keeps_place:
            lane.give_back(number, line, mark)
        else:
            is_new = state is State.SCHEDULED and not mark.version
            if is_new:
                # It was published with a delay, and is in its queue for the first time.
                if queue.show is not None:
                    queue.show([line])
            elif lane.expiry is not None and not mark.joined_us:
                # Its new number has joined now, but its TTL goes on.
                mark = mark._replace(joined_us=lane.expiry.joined_us(number))
            if queue.rules.dead_letters is not None:
                # Its dead letter will tell when it was published; its new number would not.
                line = with_published(line, queue.arrived_us(number))
            tail.append((number, line))
            marks.append(mark)
    for tracer in queue.tracers:
        tracer.scheduled(queue, *_put_off(state, deliveries, fates, queue))
    if tail:
        move(queue, queue, tail, marks)
    for event, some in dead.items():
        kill(queue, some, event, why)
    queue.deliver()


def _put_off(
    state: State, deliveries: Sequence[Delivery], fates: Sequence[Fate], queue: Place
) -> tuple[list[Delivery], list[int]]:
    """Those that were scheduled, and until when."""
    each = zip(deliveries, fates, strict=True)
    some = [pair for pair in each if AFTER[state, pair[1].event] is State.SCHEDULED]
    now_us = queue.shared.schedule.wall_us()
    return [delivery for delivery, _ in some], [now_us + told.wait_us for _, told in some]


def put_off(
    queue: Place, number: int, line: bytes, mark: Mark, wait_us: int, *, keeps_place: bool
) -> None:
    """Schedule a message. The caller sets the alarms."""
    clocks = queue.shared.schedule
    mark = mark._replace(
        keeps_place=keeps_place,
        due_us=clocks.wall_us() + wait_us,
        id_crc=id_checksum(replies.message_id(line)),
    )
    queue.lane.mark(number, mark)
    queue.put_off(number, line, mark, clocks.clock_us() + wait_us)


def _backoff_us(backoff: Backoff | None, failures: int, line: bytes) -> int:
    if backoff is None or failures <= 0:
        return 0
    most_s = DURATION_S_MAX if backoff.max_s is None else backoff.max_s
    wait_s = min(backoff.first_s * 2.0 ** min(failures - 1, 64), most_s)
    # No clock and no randomness: a replay gives the same time.
    spread = crc32(b"%d %b" % (failures, replies.message_id(line))) / (1 << 31) - 1
    return round(wait_s * (1 + JITTER * spread) * 1e6)
