"""Messages that die, and their way to the dead-letter queue.

The one rule: a dead message moves to the dead-letter queue of its queue in one commit, with the
reason. Without such a queue it is dropped and counted.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from mqks.broker.features.death.dead_letters import Death
from mqks.broker.features.death.moves import move
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Lane
from mqks.broker.spine.queue.shared import Place
from mqks.errors import MqksError
from mqks.limits import SEQ_MAX, STEP_BYTES, STEP_MESSAGES
from mqks.protocol.requests import shown


class Dead(NamedTuple):
    """A message that is no longer ready in its lane. `tries`: how often it was delivered."""

    number: int
    line: bytes
    tries: int


def kill(queue: Place, dead: Sequence[Dead], reason: Event, why: bytes = b"") -> None:
    """Move or drop these dead messages. `why`: the reason that their consumer gave."""
    if not dead:
        return
    target = queue.shared.owner.dead_letter_queue(queue, reason)
    _count(queue, len(dead), reason, dropped=target is None)
    for tracer in queue.tracers:
        told = {"reason": str(reason)}
        tracer.note(queue, "dead", [(n, line) for n, line, _ in dead], told)
    if target is None:
        queue.lane.settle([each.number for each in dead], dead=True)
        return
    death = Death(reason, queue.name, queue.shared.schedule.wall_us(), why)
    letters = [
        (n, death.dead_letter(line, tries, partial(queue.arrived_us, n))) for n, line, tries in dead
    ]
    move(queue, target, letters)
    target.deliver()


def kill_ready(queue: Place, numbers: Iterable[int], reason: Event) -> None:
    """Kill ready messages; those that are only on disk move when they have been read."""
    lane, dead, on_disk = queue.lane, list[Dead](), list[int]()
    is_dropped = queue.shared.owner.dead_letter_queue(queue, reason) is None
    for number in numbers:
        # A message that is dropped needs no body.
        line = b"" if is_dropped else lane.body(number)
        lane.take_out(number)
        if line is None:
            on_disk.append(number)
        else:
            dead.append(Dead(number, line, lane.mark_of(number).deliveries))
    kill(queue, dead, reason)
    for some in step_parts(queue, on_disk):
        queue.fetch(some, partial(_kill_read, queue, some, reason))


def step_parts(queue: Place, numbers: Iterable[int]) -> Iterator[list[int]]:
    """Split numbers into parts for one step each."""
    some, size = list[int](), 0
    for number in numbers:
        some.append(number)
        size += queue.shared.facts.bytes_of(queue.id, number)
        if size >= STEP_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _kill_read(queue: Place, numbers: list[int], reason: Event, lines: dict[int, bytes]) -> None:
    if missing := [number for number in numbers if number not in lines]:
        raise MqksError(f"messages of queue {shown(queue.name)} are missing: {missing[:5]}")
    mark_of = queue.lane.mark_of
    kill(queue, [Dead(each, lines[each], mark_of(each).deliveries) for each in numbers], reason)


def kill_oldest(queue: Place, end: int, reason: Event, count: int = STEP_MESSAGES) -> None:
    """Kill at most `count` ready messages with numbers below `end`, the oldest first."""
    lane = queue.lane
    if queue.shared.owner.dead_letter_queue(queue, reason) is None:
        gone = lane.trim_some(end, count, dead=True)
        _count(queue, len(gone), reason, dropped=True)
        for tracer in queue.tracers:
            tracer.left(queue, "dead", gone, {"reason": str(reason)})
    else:
        fitting = STEP_BYTES * lane.blocks.count // (lane.ready_bytes + 1) + 1
        kill_ready(queue, _oldest(lane, end, min(count, fitting)), reason)


def _oldest(lane: Lane, end: int, count: int) -> Iterator[int]:
    """The oldest ready messages below `end`. The caller takes each out before it asks for the
    next."""
    while count and (oldest := lane.blocks.first) is not None and oldest < end:
        yield oldest
        count -= 1


def _count(queue: Place, count: int, reason: Event, *, dropped: bool) -> None:
    counters = queue.shared.counters
    counters.dead[reason] += count
    queue.dead += count
    if dropped:
        counters.dropped += count
        queue.shared.owner.notices.dropped(queue.name, count, reason)


def drop_surplus(queue: Place) -> Work[None]:
    """Kill messages above the limits, the oldest of the lowest priority first."""
    lane = queue.lane
    while not queue.deleted:
        surplus = queue.capacity.surplus(queue.ready, lane.ready_bytes)
        if not surplus:
            break
        most = min(surplus, STEP_MESSAGES)
        # Dead letters are copied: so many of the mean length as one step can take.
        fitting = STEP_BYTES * queue.ready // (lane.ready_bytes + 1) + 1
        lowest = queue.order.lowest(min(most, fitting))
        if lowest is None:
            kill_oldest(queue, SEQ_MAX, Event.OVERFLOW, most)
        else:
            kill_ready(queue, lowest, Event.OVERFLOW)
        yield GOES_ON
    queue.is_dropping = False
    queue.deliver()
