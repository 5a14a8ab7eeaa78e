"""The journal: writes segments to the `Store` behind it, and keeps their index.

The one rule: one writer. It takes a batch, writes it in one commit, and between batches does what
`Compaction` has to do.
"""

import time
from bisect import bisect_left
from typing import Final

import anyio
from anyio.to_thread import run_sync

from mqks.broker.spine.log.pending import Entry
from mqks.journal.cutting import cut
from mqks.journal.dropping import forget_queue
from mqks.journal.index import Index, Segment, SegmentFate
from mqks.journal.queue_log import QueueLog
from mqks.journal.segment import ArrivedRun, NewSegment, Section, new_segment
from mqks.journal.store import Store
from mqks.limits import SEGMENT_BYTES_MAX, SEGMENT_MERGE_COUNT

SPARSE_BYTES_MIN: Final = 1024 * 1024
"""Sparse segments are not compacted until they hold this much together."""
SMALL_COUNT_MAX: Final = 4096
"""Small segments are merged when the journal is idle, or when there are this many."""
ENCODED_AT_ONCE_MAX: Final = 4 * 1024
"""An entry of more messages, acks and marks is encoded in a thread: its marks take a microsecond
each."""
DROP_COUNT_MIN: Final = 16
"""Segments without living messages are dropped this many at a time, while there is other work."""
COMMITTED_NOW_BYTES_MAX: Final = 64 * 1024
"""A larger segment is committed in a thread, though only its end may have come in this turn."""
# Compiled, a Final with the type of a tuple of known length is never set.
COMMIT_SECONDS: Final[tuple[float, ...]] = (
    *(1e-4, 2.5e-4, 5e-4, 0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.1, 0.25, 1.0),
)
BATCH_RECORDS: Final = tuple(4.0**power for power in range(9))
"""Commits are counted by duration, and by their number of messages, acks and marks."""

Parts = list[tuple[NewSegment, list[Section]]]
"""Segments to be written, each with its sections."""


class Histogram:
    """`bounds` are the ascending, inclusive upper ends of the buckets; one more bucket counts
    everything above."""

    def __init__(self, *bounds: float) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self.counts)


class Journal:
    """Made with an open store; `Recovery` fills it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index = Index()
        self.next_segment = 1
        self.epoch = ""
        """Different for each store created."""
        self.log = QueueLog(store, self.index)
        self.commit_seconds = Histogram(*COMMIT_SECONDS)
        self.batch_records = Histogram(*BATCH_RECORDS)

    # -- writing

    async def write(self, entry: Entry) -> None:
        """Write an entry in one commit. Returns when it is durable.

        Raises DiskFull when there is no space (then nothing was written, and the same entry may be
        tried again), JournalFailed when the state of the store is unknown, and ClaimLost.
        """
        if not entry.writes:
            return
        start_s = time.monotonic()
        # A commit that has begun is awaited even when cancelled: the index must learn of it.
        with anyio.CancelScope(shield=True):
            if entry.records > ENCODED_AT_ONCE_MAX:
                parts = await run_sync(_encoded, entry, self.next_segment)
            else:
                parts = _encoded(entry, self.next_segment)
            await self.store.commit([segment for segment, _ in parts], entry)
            self._written(entry, parts, start_s)

    def write_now(self, entry: Entry) -> bool:
        """Write a small entry, without metadata except ids, on the caller's thread: for a
        commit that takes less time than two thread switches. Only while no other step is under
        way. Returns False, and does nothing, if that is not possible."""
        commit_now = self.store.commit_now
        start_s = time.monotonic()
        parts = _encoded(entry, self.next_segment)
        if commit_now is None or len(parts) != 1 or parts[0][0].size > COMMITTED_NOW_BYTES_MAX:
            return False
        commit_now(parts[0][0], entry.once)
        self._written(entry, parts, start_s)
        return True

    def _written(self, entry: Entry, parts: Parts, start_s: float) -> None:
        self.batch_records.observe(entry.records)
        self.commit_seconds.observe(time.monotonic() - start_s)
        index = self.index
        for queue_id, state in entry.queues.items():
            if state is None:
                forget_queue(index, queue_id)
        placed = self.place(parts)
        for segment, sections in placed:
            for section in sections:
                queue = index.queues[section.queue_id]
                if section.acks:
                    index.settle(segment, queue, section.acks)
                if section.marks:
                    index.mark(segment, queue, (number for number, _ in section.marks))
            index.update_fate(segment)

    def place(self, parts: Parts) -> list[tuple[Segment, list[Section]]]:
        """Add the messages of segments that have been written to the index."""
        index, placed = self.index, []
        # Within one part the runs of each queue are in the order of their numbers.
        over_gaps = len(parts) == 1
        for new, sections in parts:
            self.next_segment = new.id + 1
            segment = index.add_segment(new.id, new.size)
            placed.append((segment, sections))
            for section in sections:
                queue = index.touch(segment, section.queue_id, section.next_seq, section.cursor)
                for first, time_us, lines in section.runs:
                    size = sum(map(len, lines))
                    index.add_messages(
                        segment, queue, first, len(lines), size, time_us, over_gaps=over_gaps
                    )
        return placed

    # -- deleting

    @property
    def overdue(self) -> bool:
        """Whether `Compaction.maintain` has work that should not wait until the journal is idle."""
        return self.store.overdue or self.due(idle=False) is not None

    def due(self, *, idle: bool) -> SegmentFate | None:
        """Which segments to delete or rewrite now. While there is other work, only when there are
        enough of them to be worth a commit."""
        index = self.index
        if len(index.fates[SegmentFate.DROPPABLE]) >= (1 if idle else DROP_COUNT_MIN):
            return SegmentFate.DROPPABLE
        if len(index.fates[SegmentFate.SMALL]) >= (
            SEGMENT_MERGE_COUNT if idle else SMALL_COUNT_MAX
        ):
            return SegmentFate.SMALL
        if index.sparse_bytes >= (1 if idle else SPARSE_BYTES_MIN):
            return SegmentFate.SPARSE
        return None


def _encoded(entry: Entry, first_id: int) -> Parts:
    """The segments of an entry."""
    sections = [
        Section(
            change.lane_id,
            change.next_seq,
            change.cursor,
            [ArrivedRun(run.first, entry.time_us, run.lines) for run in change.runs],
            change.acks + change.moved,
            sorted(change.marks.items()),
        )
        for change in entry.changes
    ]
    return segments(sections, first_id)


def segments(sections: list[Section], first_id: int) -> Parts:
    """These sections as one segment, or as several of at most `SEGMENT_BYTES_MAX` each (or of a
    single larger message), each with its sections."""
    if not sections:
        return []
    encoded = new_segment(first_id, sections)
    if encoded.size <= SEGMENT_BYTES_MAX:
        return [(encoded, sections)]
    del encoded
    parts = enumerate(cut(sections, SEGMENT_BYTES_MAX), first_id)
    return [(new_segment(segment_id, part), part) for segment_id, part in parts]
