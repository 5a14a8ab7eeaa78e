"""`cancel` and `promote`: remove scheduled messages, or make them due.

The one rule: a message is searched by a checksum of its id, and its body decides.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from mqks.broker.features.death.moves import some_bodies
from mqks.broker.features.time.times import Times, timed
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.queue import Queue
from mqks.limits import STEP_BODIES
from mqks.protocol import replies

if TYPE_CHECKING:
    from mqks.broker.broker import Broker

Act = Callable[[Sequence[Delivery]], None]
"""What to do with messages that were taken out."""


def cancel(broker: "Broker", name: bytes, message_id: bytes | None) -> Work[int]:
    """Remove the scheduled messages with this id, or all; return how many."""
    queue = broker.queues.get(name)
    if queue is None or queue.times is None:
        return 0
    count = 0
    if message_id is None:
        numbers: Iterator[int] = timed(queue).delays.take_all()
        while some := [*islice(numbers, STEP_BODIES)]:
            if not queue.deleted:
                queue.lane.settle(some)
            count += len(some)
            yield GOES_ON
    else:
        count = yield from _found(queue, timed(queue), message_id, partial(_settle, queue))
    if not queue.deleted:
        queue.deliver()
        yield from queue.tidy()
    return count


def promote(broker: "Broker", name: bytes, message_id: bytes | None) -> Work[int]:
    """Make the scheduled messages with this id, or all, due now; return how many."""
    queue = broker.queues.get(name)
    if queue is None or queue.times is None:
        return 0
    if message_id is None:
        count = queue.scheduled
        yield from timed(queue).promote_all()
        return count
    count = yield from _found(queue, timed(queue), message_id, queue.join)
    if not queue.deleted:
        yield from queue.tidy()
    return count


def _settle(queue: Queue, found: Sequence[Delivery]) -> None:
    queue.lane.settle([number for number, _ in found])


def _found(queue: Queue, times: Times, message_id: bytes, act: Act) -> Work[int]:
    """Take out the messages with this id, in steps; return how many."""
    delays, count = times.delays, 0
    place = yield from times.searches.take()
    try:
        left: Sequence[int] = yield from delays.search(message_id)
        while left and not queue.deleted:
            lines, left = yield from some_bodies(queue, left, delays.bodies.get)
            found: list[Delivery] = []
            for number in sorted(lines):
                if queue.deleted or number not in delays.numbers:
                    continue
                if replies.message_id(lines[number]) == message_id:
                    delays.remove(number)
                    found.append((number, lines[number]))
            if found:
                act(found)
            count += len(found)
            yield GOES_ON
        return count
    finally:
        times.searches.leave(place)
