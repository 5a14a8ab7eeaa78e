"""`cancel` and `promote`: remove scheduled messages, or make them due.

The one rule: a message is searched by a checksum of its id, and its body decides.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice

from mqks.broker.broker import Broker
from mqks.broker.features.death import fates
from mqks.broker.features.death.moves import some_bodies
from mqks.broker.features.time.times import timed
from mqks.broker.requests.checks import Doing, check_writable, dropped
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.message.mark import group_of
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.limits import STEP_BODIES
from mqks.protocol import replies
from mqks.protocol.requests import ALL, Request, Scheduled

Act = Callable[[Sequence[Delivery]], None]
"""What to do with messages that were taken out."""


def cancel(broker: Broker, connection: Connection, request: Request, wanted: Scheduled) -> Doing:
    cancelled = _cancel(broker, wanted)
    return dropped(broker, wanted.queue, cancelled, confirm=request.confirm)


def _cancel(broker: Broker, wanted: Scheduled) -> Work[int]:
    queue = broker.queues.get(wanted.queue)
    if queue is None:
        return 0
    if wanted.message == ALL:
        return (yield from cancel_all(queue))
    return (yield from cancel_some(queue, wanted.message))


def cancel_some(queue: Queue, message_id: bytes) -> Work[int]:
    """Remove the scheduled messages with this id, or of this group; return how many."""
    return _found(queue, message_id, partial(_settle, queue))


def cancel_all(queue: Queue) -> Work[int]:
    """Remove all scheduled messages; return how many."""
    if queue.times is None:
        return 0
    count, numbers = 0, timed(queue).delays.take_all()
    while some := [*islice(numbers, STEP_BODIES)]:
        if not queue.deleted:
            cancelled(queue, some)
        count += len(some)
        yield GOES_ON
    yield from queue.tidy()
    return count


def cancelled(queue: Queue, numbers: Sequence[int]) -> None:
    """These messages, which were taken out, are cancelled."""
    queue.lane.settle(numbers, dead=True)
    for tracer in queue.tracers:
        tracer.left(queue, "cancelled", numbers)


def promote(broker: Broker, connection: Connection, request: Request, wanted: Scheduled) -> Doing:
    check_writable(broker, request)
    return _promote(broker, wanted)


def _promote(broker: Broker, wanted: Scheduled) -> Work[int]:
    queue = broker.queues.get(wanted.queue)
    if queue is None or queue.times is None:
        return 0
    if wanted.message != ALL:
        return (yield from _found(queue, wanted.message, partial(fates.join, queue)))
    if count := queue.scheduled:
        yield from timed(queue).promote_all()
    return count


def _settle(queue: Queue, found: Sequence[Delivery]) -> None:
    queue.lane.settle([number for number, _ in found], dead=True)
    for tracer in queue.tracers:
        tracer.note(queue, "cancelled", found)


def _found(queue: Queue, message_id: bytes, act: Act) -> Work[int]:
    """Take out the messages with this id, or of this group, in steps; return how many."""
    if queue.times is None:
        return 0
    times, count = timed(queue), 0
    group = group_of(message_id)
    delays = times.delays
    place = yield from times.searches.take()
    try:
        left: Sequence[int] = yield from delays.search(message_id)
        while left and not queue.deleted:
            lines, left = yield from some_bodies(queue, left, delays.bodies.get)
            found: list[Delivery] = []
            for number, line in lines.items():
                # It may have joined the queue while others were read.
                is_there = number in delays.numbers and not queue.deleted
                id_ = replies.message_id(line)
                is_wanted = id_.startswith(group) if group else id_ == message_id
                if is_there and is_wanted:
                    delays.remove(number)
                    found.append((number, line))
            if found:
                act(found)
            count += len(found)
            yield GOES_ON
    finally:
        times.searches.leave(place)
    yield from queue.tidy()
    return count
