"""`purge` of some messages: those that are chosen leave the queue, wherever in it they are.

The one rule: a message that waits no more when its turn comes, because a consumer has got it, is
left alone and not counted.
"""

from mqks.broker.features.death.moves import chosen_bodies, ready_numbers
from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen


def purge_some(queue: Queue, chosen: Chosen, limit: int) -> Work[int]:
    """Drop the chosen ones of the waiting messages, so many at most; return how many."""
    lane, count = queue.lane, 0
    for left in ready_numbers(queue, lane.next_seq, chosen):
        while left and count < limit and not lane.deleted:
            if chosen.needs_bodies:
                lines, left = yield from chosen_bodies(queue, left, chosen)
                found = [*lines]
            else:
                found, left = [*left], ()
            count += _drop(queue, found, limit - count)
            yield GOES_ON
            left = [*filter(lane.is_ready, left)]
        if count >= limit or lane.deleted:
            break
        yield GOES_ON
    return count


def _drop(queue: Queue, numbers: list[int], limit: int) -> int:
    """Drop those of them that still wait; return how many."""
    lane = queue.lane
    if lane.deleted:
        return 0
    gone = [number for number in numbers if lane.is_ready(number)][:limit]
    for number in gone:
        lane.take_out(number)
    lane.settle(gone)
    if gone:
        queue.deliver()
    return len(gone)
