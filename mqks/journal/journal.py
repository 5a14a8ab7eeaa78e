"""The journal: segments, the index of what lies where, and how segments go. What is written is kept
by the `Store` behind it.

The one rule: one task writes. It takes a batch, writes it in one commit, and between batches lets
go of what has died.
"""

import time
from itertools import islice
from typing import Final

import anyio

from mqks.broker.pending import Entry, Run
from mqks.broker.ranges import subtract, union
from mqks.errors import JournalFailed
from mqks.journal.histogram import Histogram
from mqks.journal.index import Fate, Index, Segment, Span
from mqks.journal.queue_log import QueueLog
from mqks.journal.segment import Lines, Section, decode, runs_of, segments
from mqks.journal.store import NewSegment, Store
from mqks.limits import PAGE_BYTES, SEGMENT_MERGE_COUNT, SEGMENTS_DROPPED_MAX

COMPACT_BYTES: Final = 4 * 1024 * 1024
"""One compaction reads about this much."""
SPARSE_BYTES_MIN: Final = 1024 * 1024
"""Sparse segments are left alone until they hold this much together."""
SMALL_COUNT_MAX: Final = 4096
"""Small segments are merged in a quiet moment, or when there are this many."""
DROP_COUNT_MIN: Final = 16
"""Dead segments are dropped this many at a time, while there is other work."""
COMMIT_SECONDS: Final = (
    1e-4,
    2.5e-4,
    5e-4,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
BATCH_RECORDS: Final = tuple(4.0**power for power in range(9))
"""Commits are counted by how long they took, and by how many messages, acks and marks they held."""

Parts = list[tuple[NewSegment, list[Section]]]
"""Segments to be written, and what each of them says."""


class Journal:
    """Made of a store that is open; `Recovery` fills it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.index = Index()
        self.next_segment = 1
        self.epoch = ""
        """Another one for each store made."""
        self.log = QueueLog(self)
        self.commit_seconds = Histogram(*COMMIT_SECONDS)
        self.batch_records = Histogram(*BATCH_RECORDS)
        self._moving = anyio.Lock()
        """Held while segments are deleted, until the index knows it."""

    async def close(self) -> None:
        await self.store.close()

    # -- writing

    async def write(self, entry: Entry) -> None:
        """Write an entry in one commit. Returns when it is durable.

        Raises DiskFull when there is no room (nothing of it was written then; the same entry may
        be tried again), JournalFailed when the store can't be trusted any more, and ClaimLost.
        """
        if not entry.writes:
            return
        start_s = time.monotonic()
        parts = segments(_sections(entry), self.next_segment)
        # What has begun is waited for, whoever wants to stop: the index must know what is there.
        with anyio.CancelScope(shield=True):
            await self.store.commit([segment for segment, _ in parts], entry)
            self._written(entry, parts, start_s)

    @property
    def can_write_now(self) -> bool:
        return self.store.commit_now is not None

    def write_now(self, entry: Entry) -> bool:
        """The same for a small entry without metadata, on the caller's thread: for when waiting for
        another thread, twice, would take longer than the commit. Only while nothing else is under
        way. False, and nothing is done, where that can't be."""
        commit_now = self.store.commit_now
        start_s = time.monotonic()
        parts = segments(_sections(entry), self.next_segment)
        if commit_now is None or len(parts) != 1:
            return False
        commit_now(parts[0][0])
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
                for first, count in section.acks:
                    index.settle(segment, queue, first, count)
                for number, _ in section.marks:
                    index.mark(segment, queue, number)
            index.look_at(segment)

    def _place(self, parts: Parts) -> list[tuple[Segment, list[Section]]]:
        """Segments have been written: their messages lie there now."""
        index, placed = self.index, []
        for new, sections in parts:
            self.next_segment = new.id + 1
            segment = index.add_segment(new.id, new.size)
            placed.append((segment, sections))
            for section in sections:
                queue = index.touch(segment, section.queue_id, section.next_seq, section.cursor)
                for first, time_us, lines in section.runs:
                    size = sum(map(len, lines))
                    index.add_messages(segment, queue, first, len(lines), size, time_us)
        return placed

    # -- letting go

    @property
    def overdue(self) -> bool:
        """Whether `maintain` has something to do that should not wait for a quiet moment."""
        return self.store.overdue or self._due(idle=False) is not None

    def _due(self, *, idle: bool) -> Fate | None:
        """Which segments are to go now. While there is other work, only what has gathered enough to
        be worth a commit."""
        index = self.index
        if len(index.fates[Fate.DROPPABLE]) >= (1 if idle else DROP_COUNT_MIN):
            return Fate.DROPPABLE
        if len(index.fates[Fate.SMALL]) >= (SEGMENT_MERGE_COUNT if idle else SMALL_COUNT_MAX):
            return Fate.SMALL
        if index.sparse_bytes >= (1 if idle else SPARSE_BYTES_MIN):
            return Fate.SPARSE
        return None

    async def maintain(self, *, idle: bool) -> bool:
        """Do one step of what is due; return whether there may be more."""
        with anyio.CancelScope(shield=True):
            if self.store.overdue:
                await self.store.tidy(idle=False)
            fate = self._due(idle=idle)
            is_more = True
            if fate is None:
                is_more = await self.store.tidy(idle=idle)
            elif fate is Fate.DROPPABLE:
                await self._drop()
            else:
                await self._compact(self._victims(fate))
        return is_more

    def _victims(self, fate: Fate) -> list[Segment]:
        """The oldest of them, as many as one step takes."""
        victims, size = [], 0
        for segment in self.index.fates[fate].values():
            victims.append(segment)
            size += segment.bytes
            if size >= COMPACT_BYTES or len(victims) >= SEGMENT_MERGE_COUNT:
                break
        return victims

    async def drop_dead(self) -> None:
        """Let go of all segments in which nothing lives."""
        with anyio.CancelScope(shield=True):
            while self.index.fates[Fate.DROPPABLE]:
                await self._drop()

    async def compact_fully(self) -> None:
        """Do all that makes the store smaller, however long it takes. Only while nothing else is
        written."""
        while await self.maintain(idle=True):
            pass
        while len(self.index.fates[Fate.SMALL]) > 1:
            await self._compact(self._victims(Fate.SMALL))

    async def _drop(self) -> None:
        droppable = self.index.fates[Fate.DROPPABLE].values()
        segments = [*islice(droppable, SEGMENTS_DROPPED_MAX)]
        words = self.index.last_words(segments)
        async with self._moving:
            await self.store.commit((), None, [segment.id for segment in segments], words)
            self.index.drop(segments)

    async def _compact(self, victims: list[Segment]) -> None:
        """Write what is alive in these segments into a new one, and drop them."""
        index = self.index
        bodies = await self.store.bodies([victim.id for victim in victims])
        for victim in victims:
            if victim.id not in bodies:
                raise self._missing(victim.id)
        gone = set(victims)
        tidied: set[Span] = set()
        carried: dict[int, Section] = {}
        for victim in victims:
            body = bodies[victim.id]
            # Queues that share a text go on sharing it.
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
                    if span not in tidied:
                        tidied.add(span)
                        span.dead = union(span.dead)
                    place = run.start, run.end
                    lines = texts.get(place) or texts.setdefault(place, run.lines(body))
                    section.runs.extend(
                        Lines(
                            first, run.time_us, lines[first - run.first : first - run.first + count]
                        )
                        for first, count in subtract(run.first, run.first + run.total, span.dead)
                    )
                section.acks.extend(
                    acked for acked in stored.acks if index.still_settles(queue, acked, gone)
                )
                section.marks.extend(
                    (number, mark) for number, mark in stored.marks if queue.find(number)
                )
        sections = [
            section
            for queue_id, section in carried.items()
            if section.runs
            or section.acks
            or section.marks
            or index.queues[queue_id].latest in gone
        ]
        await self._replace(victims, segments(sections, self.next_segment))

    async def _replace(self, victims: list[Segment], parts: Parts) -> None:
        """Drop these segments; `parts` are what is alive in them."""
        index = self.index
        async with self._moving:
            ids = [victim.id for victim in victims]
            await self.store.commit([segment for segment, _ in parts], None, ids)
            index.withdraw(victims)
            placed = self._place(parts)
            for heir, sections in placed:
                for section in sections:
                    queue = index.queues[section.queue_id]
                    for acked in section.acks:
                        index.name_settled(heir, queue, acked)
                    for number, _ in section.marks:
                        index.mark(heir, queue, number)
            heirs = [heir for heir, _ in placed]
            index.drop(victims, heirs)
            for heir in heirs:
                index.look_at(heir)

    # -- reading

    async def read(self, queue_id: int, first: int, bytes_max: int = PAGE_BYTES) -> list[Run]:
        """Return the living messages of a queue from number `first` on, in order, about
        `bytes_max` bytes of them, at least one when there is one. Settled ones may be among them.

        Raises JournalFailed when a segment is damaged or missing, or the disk can't be read.
        """
        while True:
            ids: set[int] = set()
            end, size = first, 0
            queue = self.index.queues.get(queue_id)
            for span in queue.overlapping(first, queue.next_seq) if queue is not None else ():
                if span.dead_count < span.end - span.first:
                    ids.add(span.segment.id)
                    end, size = span.end, size + span.bytes
                    if size >= bytes_max:
                        break
            bodies = await self.store.bodies(list(ids)) if ids else {}
            if bodies.keys() == ids:
                return sorted(
                    Run(max(first, run.first), run.lines(body)[max(0, first - run.first) :])
                    for body in bodies.values()
                    for run in runs_of(body, queue_id)
                    if run.first < end and run.first + run.total > first
                )
            # A compaction may have moved something meanwhile: then look again.
            for segment_id in ids - bodies.keys():
                await self.await_move(segment_id)

    async def await_move(self, segment_id: int) -> None:
        """A segment that the index names was not found: return when the index does not name it any
        more. Raises JournalFailed when nothing has moved it: another look would not find it."""
        async with self._moving:
            pass
        if segment_id in self.index.segments:
            raise self._missing(segment_id)

    def _missing(self, segment_id: int) -> JournalFailed:
        return JournalFailed(
            f"segment {segment_id} of {self.store.name} is missing: the file is damaged"
        )


def _sections(entry: Entry) -> list[Section]:
    """What an entry says of messages."""
    return [
        Section(
            change.lane_id,
            change.next_seq,
            change.cursor,
            [Lines(run.first, entry.time_us, run.lines) for run in change.runs],
            change.acks + change.moved,
            list(change.marks.items()),
        )
        for change in entry.changes
    ]
