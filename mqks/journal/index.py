"""Which segment holds each living message, and which segments can be deleted.

The one rule: a segment may be dropped when none of its messages is alive and none of its acks and
marks is about a message of a segment that still exists.

The journal only appends, so an ack is in another segment than its message, mostly. If the ack went
first, the message would be alive again after a restart; hence `about` and `named_by`, by segment
and not by message, as there may be a billion messages and only some thousand segments.

For messages the unit is the span, neighbours of one queue that one segment has: it costs as much
for one message as for a million. Acks come in any order; they are appended to the span's `settled`
and only sorted when somebody reads them or they are many, so that an ack costs no search among the
earlier ones. A count per segment tells when nothing of it is alive; then its fate changes, and no
pass over all segments ever looks for what could be deleted. Dropping one may free those that are
about it, and so on: a chain of segments goes one by one.

One old message would keep its segment, and with it all acks about that, for ever. So the few that
are alive in a SPARSE segment are rewritten to a new one, its heir. An ack is about no message of
an heir; a mark may be, and nobody looks which: so a segment with marks is then about every heir,
one too many now and then, never one too few.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum, auto
from typing import Final

from mqks.broker.spine.base.ranges import Range, union
from mqks.limits import SCHEDULED_SEQ, SEGMENT_SMALL_BYTES

SPAN_TIME_US: Final = 10_000_000
"""Messages that arrived further apart are in separate spans, so that the age of each is known
without reading it."""
SETTLED_RANGES: Final = 64


class SegmentFate(IntEnum):
    """What to do with a segment next."""

    KEPT = auto()
    SMALL = auto()
    """To be merged with others."""
    SPARSE = auto()
    """Less than half of its messages are alive: these are to be rewritten."""
    DROPPABLE = auto()


class Segment:
    """`about`: ids of other segments whose messages this one settles or marks; `named_by`: the
    reverse."""

    __slots__ = (
        "about",
        "bytes",
        "count",
        "fate",
        "has_marks",
        "id",
        "live",
        "named_by",
        "queues",
        "spans",
    )

    def __init__(self, segment_id: int, size: int) -> None:
        self.id = segment_id
        self.bytes = size
        self.fate = SegmentFate.SMALL if size < SEGMENT_SMALL_BYTES else SegmentFate.KEPT
        self.count = 0
        """Number of messages when it was written."""
        self.live = 0
        self.queues: list[int] = []
        self.spans: list[Span] = []
        self.has_marks = False
        self.about: set[int] = set()
        self.named_by: set[int] = set()


class Span:
    """Messages of one queue with numbers from `first` up to `end` in one segment, in one or
    several runs; the `settled` ones are no longer there, nor are numbers between two of its runs:
    no other segment has messages with these numbers.

    A span exists until its segment is deleted, even when all of it is settled: while the messages
    are on disk, the acks that settle them must be, too."""

    __slots__ = (
        "bytes",
        "count",
        "end",
        "first",
        "is_tidy",
        "latest_us",
        "queue",
        "segment",
        "settled",
        "settled_count",
        "settled_max",
        "time_us",
    )

    def __init__(
        self,
        queue: "QueueIndex",
        first: int,
        end: int,
        size: int,
        time_us: int,
        segment: Segment,
    ) -> None:
        self.queue = queue
        self.first = first
        self.end = end
        self.bytes = size
        self.count = end - first
        """Number of messages, settled or not."""
        self.time_us = self.latest_us = time_us
        """Arrival of the first message (the others are within SPAN_TIME_US of it), and the latest
        arrival of all, which is not that of the last message if the clock was set back."""
        self.segment = segment
        self.settled: list[Range] | tuple[()] = ()
        self.settled_max = SETTLED_RANGES
        """Length at which `settled` is tidied up: twice what was left the last time, so that each
        range is examined only a few times, however many there are."""
        self.is_tidy = True
        self.settled_count = 0

    def reaches(self, first: int, time_us: int, ranges: int = 0) -> bool:
        """Whether messages from `first` on, with this many settled ranges, may be added."""
        gaps = (first > self.end) + ranges
        is_small = not gaps or len(self.settled) + gaps <= SETTLED_RANGES
        is_log = first < SCHEDULED_SEQ or self.first >= SCHEDULED_SEQ
        return is_log and is_small and abs(time_us - self.time_us) < SPAN_TIME_US

    def extend(self, first: int, end: int, count: int, size: int, latest_us: int) -> None:
        if first > self.end:
            self.add_settled([(self.end, first - self.end)], first - self.end)
        self.end = end
        self.count += count
        self.bytes += size
        self.latest_us = max(self.latest_us, latest_us)

    def add_settled(self, ranges: Sequence[Range], count: int) -> None:
        """These, `count` numbers together, are settled."""
        if self.settled:
            self.settled += ranges
        else:  # Most spans never have any: a list for each would take much memory.
            self.settled = [*ranges]
        self.settled_count += count
        self.is_tidy = False

    def tidy(self) -> None:
        """Sort and merge `settled`, if needed."""
        if not self.is_tidy:
            self.settled = union(self.settled)
            self.settled_max = SETTLED_RANGES + 2 * len(self.settled)
            self.is_tidy = True


class QueueIndex:
    """Spans of one queue in the order of their numbers, and its latest state.

    Messages with a delay have numbers behind all others, and behind `next_seq`: whoever reads up to
    that does not meet them.
    """

    __slots__ = ("cursor", "firsts", "latest", "next_seq", "settled_end", "spans")

    def __init__(self, next_seq: int, cursor: int) -> None:
        self.next_seq = next_seq
        self.cursor = cursor
        self.settled_end = 0
        """After a start: the number behind all that any segment settles."""
        self.latest: Segment | None = None
        """The segment with the latest next_seq and cursor; None: they are in the queue's row."""
        self.firsts: list[int] = []
        self.spans: list[Span] = []

    def find(self, number: int) -> Span | None:
        position = bisect_right(self.firsts, number) - 1
        if position >= 0 and number < self.spans[position].end:
            return self.spans[position]
        return None

    def is_next(self, span: Span, end: int) -> bool:
        """Whether no other span has numbers from the first of `span` up to `end`."""
        position = bisect_right(self.firsts, span.first)
        return position == len(self.firsts) or self.firsts[position] >= end

    def insert(self, span: Span) -> None:
        if not self.firsts or span.first > self.firsts[-1]:
            self.firsts.append(span.first)
            self.spans.append(span)
        else:
            position = bisect_left(self.firsts, span.first)
            self.firsts.insert(position, span.first)
            self.spans.insert(position, span)

    def overlapping(self, first: int, end: int) -> Iterator[Span]:
        """Spans that have numbers in the range."""
        for position in range(max(0, bisect_right(self.firsts, first) - 1), len(self.spans)):
            span = self.spans[position]
            if span.first >= end:
                return
            if span.end > first:
                yield span

    def by_span(self, ranges: Sequence[Range]) -> Iterator[tuple[Span, list[Range]]]:
        """The parts of these ranges, which are in order, that are in spans, by span."""
        parts, at = dict[Span, list[Range]](), 0
        while at < len(ranges):
            first, end = ranges[at][0], sum(ranges[at])
            at += 1
            for span in self.overlapping(first, end):
                start = max(first, span.first)
                found = parts.setdefault(span, [])
                found.append((start, min(end, span.end) - start))
                # Mostly all that begin in a span are inside.
                stop = bisect_left(ranges, (span.end,), at)
                if end <= span.end and at < stop and sum(ranges[stop - 1]) <= span.end:
                    found += ranges[at:stop]
                    at = stop
        yield from parts.items()


class Index:
    """All segments of the journal, and those of each fate."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.queues: dict[int, QueueIndex] = {}
        self.fates: dict[SegmentFate, dict[int, Segment]] = {fate: {} for fate in SegmentFate}
        self.sparse_bytes = 0

    # -- what a segment says

    def add_segment(self, segment_id: int, size: int) -> Segment:
        segment = self.segments[segment_id] = Segment(segment_id, size)
        self.fates[segment.fate][segment_id] = segment
        return segment

    def touch(self, segment: Segment, queue_id: int, next_seq: int, cursor: int) -> QueueIndex:
        """A segment contains a queue's next sequence number and cursor."""
        queue = self.queues.get(queue_id)
        if queue is None:
            queue = self.queues[queue_id] = QueueIndex(next_seq, cursor)
        queue.next_seq = max(queue.next_seq, next_seq)
        queue.cursor = max(queue.cursor, cursor)
        queue.latest = segment
        segment.queues.append(queue_id)
        return queue

    def add_messages(
        self,
        segment: Segment,
        queue: QueueIndex,
        first: int,
        count: int,
        size: int,
        time_us: int,
        *,
        over_gaps: bool = False,
    ) -> None:
        """`over_gaps`: no message added later has a number between those of its runs."""
        last = segment.spans[-1] if segment.spans else None
        if (
            last is not None
            and last.queue is queue
            and (last.end == first or (over_gaps and last.end < first))
            and last.reaches(first, time_us)
            and (last.end == first or queue.is_next(last, first + count))
        ):
            last.extend(first, first + count, count, size, time_us)
        else:
            span = Span(queue, first, first + count, size, time_us, segment)
            queue.insert(span)
            segment.spans.append(span)
        segment.count += count
        segment.live += count

    def settle(self, segment: Segment, queue: QueueIndex, acks: Iterable[Range]) -> None:
        """A segment settles these numbers."""
        for span, settled in queue.by_span(sorted(acks)):
            self.name(segment, span.segment)
            self._settle(span, settled)

    def mark(self, segment: Segment, queue: QueueIndex, numbers: Iterable[int]) -> None:
        """A segment marks living messages. Consecutive ones cost 70 ns each."""
        span = None
        for number in numbers:
            if span is None or not span.first <= number < span.end:
                span = queue.find(number)
                if span is not None:
                    segment.has_marks = True
                    self.name(segment, span.segment)

    def name(self, segment: Segment, other: Segment) -> None:
        if segment is not other:
            segment.about.add(other.id)
            other.named_by.add(segment.id)

    def _settle(self, span: Span, settled: list[Range]) -> None:
        count = sum([count for _, count in settled])
        span.add_settled(settled, count)
        if len(span.settled) > span.settled_max:
            span.tidy()
        span.segment.live -= count
        self.update_fate(span.segment)

    # -- which segments can be deleted

    def update_fate(self, segment: Segment) -> None:
        """Update the fate of this segment, after a message in it or a reference to it has died."""
        if segment.live == 0 and not segment.about:
            self._set_fate(segment, SegmentFate.DROPPABLE)
        elif segment.live * 2 < segment.count:
            self._set_fate(segment, SegmentFate.SPARSE)

    def _set_fate(self, segment: Segment, fate: SegmentFate) -> None:
        if segment.fate is not fate:
            self.forget_fate(segment)
            segment.fate = fate
            self.fates[fate][segment.id] = segment
            self.sparse_bytes += segment.bytes * (fate is SegmentFate.SPARSE)

    def forget_fate(self, segment: Segment) -> None:
        del self.fates[segment.fate][segment.id]
        self.sparse_bytes -= segment.bytes * (segment.fate is SegmentFate.SPARSE)
