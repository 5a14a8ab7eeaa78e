"""The broker's view of the journal, from memory.

The one rule: nothing is read from the disk except the sizes of files.
"""

import time
from collections.abc import Iterator
from typing import Any

from mqks import __version__
from mqks.broker.spine.base.facts import Facts
from mqks.journal.index import Span
from mqks.journal.journal import Journal
from mqks.journal.living import arrivals
from mqks.limits import STEP_MESSAGES


class JournalFacts(Facts):
    version = __version__

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    @property
    def epoch(self) -> str:
        return self._journal.epoch

    def _span(self, queue_id: int, number: int) -> Span | None:
        queue = self._journal.index.queues.get(queue_id)
        return queue.find(number) if queue is not None else None

    def age_s(self, queue_id: int, number: int) -> float:
        span = self._span(queue_id, number)
        return 0.0 if span is None else max(0.0, round(time.time() - span.time_us / 1e6, 3))

    def arrived_us(self, queue_id: int, number: int) -> int:
        span = self._span(queue_id, number)
        if span is None:
            return 0
        return span.time_us if number == span.first else span.latest_us

    def arrived_by(self, queue_id: int, time_us: int, first: int, end: int) -> tuple[int, int]:
        queue = self._journal.index.queues.get(queue_id)
        spans = queue.overlapping(first, end) if queue is not None else iter(())
        for count, span in enumerate(spans):
            if span.latest_us <= time_us:
                return max(first, span.first), min(end, span.end)
            if span.time_us <= time_us and span.first >= first:
                return span.first, span.first + 1
            if count == STEP_MESSAGES:
                return min(end, span.end), min(end, span.end)
        return end, end

    def bytes_of(self, queue_id: int, number: int) -> int:
        span = self._span(queue_id, number)
        return 0 if span is None else span.bytes // span.count

    def arrivals(self, queue_id: int) -> Iterator[tuple[int, int]]:
        queue = self._journal.index.queues.get(queue_id)
        return iter(()) if queue is None else arrivals(queue)

    def journal(self) -> dict[str, Any]:
        journal = self._journal
        segments = journal.index.segments.values()
        return {
            "path": journal.store.name,
            "epoch": journal.epoch,
            **journal.store.facts(),
            "segments": len(segments),
            "segment_bytes": sum(segment.bytes for segment in segments),
            "messages": sum(segment.live for segment in segments),
            "commits": journal.commit_seconds.count,
            "commit_records": int(journal.batch_records.sum),
            "commit_seconds": round(journal.commit_seconds.sum, 6),
        }
