"""What the index forgets with queues and segments that are deleted, or replaced by heirs.

The one rule: an ack or mark goes only when its message has gone, or is in an heir.
"""

from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence

from mqks.broker.spine.base.ranges import Range
from mqks.journal.index import Index, QueueIndex, Segment
from mqks.journal.store import LastWords


def forget_queue(index: Index, queue_id: int) -> None:
    """A queue was deleted: its messages are settled wherever they are."""
    queue = index.queues.pop(queue_id, None)
    if queue is None:
        return
    for span in queue.spans:
        span.segment.live -= span.end - span.first - span.settled_count
    for segment in dict.fromkeys(span.segment for span in queue.spans):
        index.update_fate(segment)


def last_words(index: Index, segments: Sequence[Segment]) -> list[LastWords]:
    """Those of the queues whose latest state is in these segments."""
    words = []
    for queue_id in {queue_id for segment in segments for queue_id in segment.queues}:
        queue = index.queues.get(queue_id)
        if queue is not None and queue.latest in segments:
            words.append(LastWords(queue_id, queue.next_seq, queue.cursor))
    return words


def still_settles(queue: QueueIndex, acked: Range, gone: Container[Segment]) -> bool:
    """Whether an old ack is about a segment that still exists and is not in `gone`."""
    return any(span.segment not in gone for span in queue.overlapping(acked[0], sum(acked)))


def name_settled(index: Index, segment: Segment, queue: QueueIndex, acked: Range) -> None:
    """A segment repeats an ack that has been counted already."""
    for span in queue.overlapping(acked[0], sum(acked)):
        index.name(segment, span.segment)


def withdraw(segments: Iterable[Segment]) -> None:
    """The messages of these segments no longer exist."""
    for segment in segments:
        for span in segment.spans:
            queue = span.queue
            position = bisect_left(queue.firsts, span.first)
            del queue.firsts[position], queue.spans[position]
        segment.spans.clear()
        segment.live = 0


def drop(index: Index, segments: Sequence[Segment], heirs: Sequence[Segment] = ()) -> None:
    """These segments were deleted. `heirs` hold what was alive in them."""
    withdraw(segments)
    for segment in segments:
        for queue_id in segment.queues:
            queue = index.queues.get(queue_id)
            if queue is not None and queue.latest is segment:
                queue.latest = None
        del index.segments[segment.id]
        index.forget_fate(segment)
        for other_id in segment.about:
            if (other := index.segments.get(other_id)) is not None:
                other.named_by.discard(segment.id)
    for segment in segments:
        for speaker_id in segment.named_by:
            speaker = index.segments.get(speaker_id)
            if speaker is None or speaker in heirs:
                continue
            speaker.about.discard(segment.id)
            if speaker.has_marks:
                for heir in heirs:
                    index.name(speaker, heir)
            index.update_fate(speaker)
