"""The journal: writes segments to the `Store` behind it, keeps their index, and deletes them.

The one rule: one task writes. It takes a batch, writes it in one commit, and between batches
deletes segments without living messages.
"""

import time
from collections.abc import Container, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final

import anyio
from anyio.to_thread import run_sync

from mqks.broker.spine.base.ranges import subtract
from mqks.broker.spine.log.pending import Entry
from mqks.broker.spine.message.mark import Mark
from mqks.journal.histogram import Histogram
from mqks.journal.index import Index, QueueIndex, Segment, SegmentFate
from mqks.journal.queue_log import QueueLog
from mqks.journal.segment import ArrivedRun, NewSegment, Section, decode, segments
from mqks.journal.store import Store
from mqks.limits import SEGMENT_MERGE_COUNT, SEGMENTS_DROPPED_MAX

COMPACT_BYTES: Final = 4 * 1024 * 1024
"""One compaction reads about this much."""
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
                index.forget_queue(queue_id)
        placed = self._place(parts)
        for segment, sections in placed:
            for section in sections:
                queue = index.queues[section.queue_id]
                if section.acks:
                    index.settle(segment, queue, section.acks)
                if section.marks:
                    index.mark(segment, queue, (number for number, _ in section.marks))
            index.update_fate(segment)

    def _place(self, parts: Parts) -> list[tuple[Segment, list[Section]]]:
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
        """Whether `maintain` has work that should not wait until the journal is idle."""
        return self.store.overdue or self._due(idle=False) is not None

    def _due(self, *, idle: bool) -> SegmentFate | None:
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

    async def maintain(self, *, idle: bool) -> bool:
        """Do one step of the work that is due; return whether there may be more."""
        with anyio.CancelScope(shield=True):
            if self.store.overdue:
                await self.store.tidy(idle=False)
            fate = self._due(idle=idle)
            is_more = True
            if fate is None:
                is_more = await self.store.tidy(idle=idle)
            elif fate is SegmentFate.DROPPABLE:
                await self._drop()
            else:
                await self._compact(self._victims(fate))
        return is_more

    def _victims(self, fate: SegmentFate) -> list[Segment]:
        """The oldest segments of this fate, as many as one step takes."""
        victims, size = [], 0
        for segment in self.index.fates[fate].values():
            victims.append(segment)
            size += segment.bytes
            if size >= COMPACT_BYTES or len(victims) >= SEGMENT_MERGE_COUNT:
                break
        return victims

    async def drop_settled(self) -> None:
        """Delete all segments without living messages."""
        with anyio.CancelScope(shield=True):
            while self.index.fates[SegmentFate.DROPPABLE]:
                await self._drop()

    async def compact_fully(self) -> None:
        """Do everything that makes the store smaller, however long it takes. Only while nothing
        else is written."""
        while await self.maintain(idle=True):
            pass
        while len(self.index.fates[SegmentFate.SMALL]) > 1:
            await self._compact(self._victims(SegmentFate.SMALL))

    async def _drop(self) -> None:
        droppable = self.index.fates[SegmentFate.DROPPABLE].values()
        segments = [*islice(droppable, SEGMENTS_DROPPED_MAX)]
        words = self.index.last_words(segments)
        async with self.log.moving:
            await self.store.commit((), None, [segment.id for segment in segments], words)
            self.index.drop(segments)

    async def _compact(self, victims: list[Segment]) -> None:
        """Write what is alive in these segments into a new one, and drop them."""
        bodies = await self.log.bodies([victim.id for victim in victims])
        # Nothing else changes the index: there is one writer, and it is here.
        await self._replace(victims, await run_sync(self._rewritten, victims, bodies))

    def _rewritten(self, victims: list[Segment], bodies: dict[int, bytes]) -> Parts:
        """What is alive in these segments. In a thread: marks take 3 µs each."""
        index = self.index
        gone = set(victims)
        carried: dict[int, Section] = {}
        marks: dict[int, dict[int, Mark]] = {}
        for victim in victims:
            body = bodies[victim.id]
            # Queues that share a text still share it.
            texts: dict[tuple[int, int], list[bytes]] = {}
            for stored in decode(body):
                queue = index.queues.get(stored.queue_id)
                if queue is None:
                    continue
                section = carried.get(stored.queue_id)
                if section is None:
                    section = Section(stored.queue_id, queue.next_seq, queue.cursor, [], [], [])
                    carried[stored.queue_id] = section
                for run in stored.runs:
                    span = queue.find(run.first)
                    if span is None or span.segment is not victim:
                        continue
                    span.tidy()
                    place = run.start, run.end
                    lines = texts.get(place) or texts.setdefault(place, run.lines(body))
                    section.runs.extend(
                        ArrivedRun(
                            first, run.time_us, lines[first - run.first : first - run.first + count]
                        )
                        for first, count in subtract(run.first, run.first + run.total, span.settled)
                    )
                section.acks.extend(
                    acked for acked in stored.acks if index.still_settles(queue, acked, gone)
                )
                known = marks.setdefault(stored.queue_id, {})
                for number, mark in stored.marks.items():
                    known[number] = max(mark, known.get(number, mark))
        for queue_id, section in carried.items():
            section.runs.sort(key=itemgetter(0))
            section.marks.extend(_carried(index.queues[queue_id], marks[queue_id], gone))
        sections = [
            section
            for queue_id, section in carried.items()
            if section.runs
            or section.acks
            or section.marks
            or index.queues[queue_id].latest in gone
        ]
        return segments(sections, self.next_segment)

    async def _replace(self, victims: list[Segment], parts: Parts) -> None:
        """Replace these segments by `parts`, which is what is alive in them."""
        index = self.index
        async with self.log.moving:
            ids = [victim.id for victim in victims]
            await self.store.commit([segment for segment, _ in parts], None, ids)
            index.withdraw(victims)
            placed = self._place(parts)
            for heir, sections in placed:
                for section in sections:
                    queue = index.queues[section.queue_id]
                    for acked in section.acks:
                        index.name_settled(heir, queue, acked)
                    index.mark(heir, queue, (number for number, _ in section.marks))
            heirs = [heir for heir, _ in placed]
            index.drop(victims, heirs)
            for heir in heirs:
                index.update_fate(heir)


def _carried(
    queue: QueueIndex, marks: dict[int, Mark], gone: Container[Segment]
) -> Iterator[tuple[int, Mark]]:
    """The marks that are still needed when these segments are deleted."""
    for number, mark in sorted(marks.items()):
        span = queue.find(number)
        if span is not None and (span.segment not in gone or span.is_alive(number)):
            yield number, mark


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
