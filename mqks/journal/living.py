"""Which messages are alive, read from the index.

The one rule: nothing is changed, but for the order of what is settled.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from mqks.broker.spine.base.ranges import Range
from mqks.journal.index import QueueIndex, Span
from mqks.limits import SCHEDULED_SEQ, SEQ_MAX


def living_in(span: Span, first: int = 0, end: int = SEQ_MAX) -> Iterator[Range]:
    """Those of its living messages with numbers from `first` on and below `end`."""
    span.tidy()
    first, end = max(first, span.first), min(end, span.end)
    place = max(0, bisect_left(span.settled, (first + 1,)) - 1)
    while first < end and place < len(span.settled):
        start, count = span.settled[place]
        if start > first:
            yield first, min(start, end) - first
        first, place = max(first, start + count), place + 1
    if first < end:
        yield first, end - first


def is_alive(span: Span, number: int) -> bool:
    span.tidy()
    place = bisect_left(span.settled, (number + 1,)) - 1
    return place < 0 or number >= sum(span.settled[place])


def living_of(queue: QueueIndex, first: int, end: int) -> Iterator[Range]:
    """The messages in the range that are not settled."""
    for span in queue.overlapping(first, end):
        if span.settled_count < span.end - span.first:
            yield from living_in(span, first, end)


def holes(queue: QueueIndex, first: int, end: int) -> Iterator[Range]:
    """The numbers in the range that no living message has."""
    for start, count in living_of(queue, first, end):
        if start > first:
            yield first, start - first
        first = start + count
    if first < end:
        yield first, end - first


def arrivals(queue: QueueIndex) -> Iterator[tuple[int, int]]:
    """First number of each span with living messages, but those with a delay, and the latest
    arrival in it. The index may change meanwhile."""
    first = -1
    while (position := bisect_right(queue.firsts, first)) < len(queue.firsts):
        span = queue.spans[position]
        first = span.first
        if first >= SCHEDULED_SEQ:
            return
        if span.settled_count < span.end - span.first:
            yield first, span.latest_us


def first_living(queue: QueueIndex) -> int:
    """Number of the first message that is not settled; that of the next message if none."""
    return next(living_of(queue, 0, queue.next_seq), (queue.next_seq, 0))[0]
