"""Deletes segments without living messages, and rewrites those with few.

The one rule: one step at a time, by the one who writes the journal, and the index changes with what
it is about.
"""

from collections.abc import Container, Iterator
from itertools import islice
from operator import itemgetter
from typing import Final

import anyio
from anyio.to_thread import run_sync

from mqks.broker.spine.base.ranges import subtract
from mqks.broker.spine.message.mark import Mark
from mqks.journal.dropping import drop, last_words, name_settled, still_settles, withdraw
from mqks.journal.index import QueueIndex, Segment, SegmentFate
from mqks.journal.journal import Journal, Parts, segments
from mqks.journal.living import is_alive
from mqks.journal.segment import ArrivedRun, Section
from mqks.journal.stored import decode
from mqks.limits import SEGMENT_MERGE_COUNT, SEGMENTS_DROPPED_MAX

COMPACT_BYTES: Final = 4 * 1024 * 1024
"""One compaction reads about this much."""


class Compaction:
    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._store, self._index, self._log = journal.store, journal.index, journal.log

    async def maintain(self, *, idle: bool) -> bool:
        """Do one step of the work that is due; return whether there may be more."""
        with anyio.CancelScope(shield=True):
            if self._store.overdue:
                await self._store.tidy(idle=False)
            fate = self._journal.due(idle=idle)
            is_more = True
            if fate is None:
                is_more = await self._store.tidy(idle=idle)
            elif fate is SegmentFate.DROPPABLE:
                await self._drop()
            else:
                await self._compact(self._victims(fate))
        return is_more

    def _victims(self, fate: SegmentFate) -> list[Segment]:
        """The oldest segments of this fate, as many as one step takes."""
        victims, size = [], 0
        for segment in self._index.fates[fate].values():
            victims.append(segment)
            size += segment.bytes
            if size >= COMPACT_BYTES or len(victims) >= SEGMENT_MERGE_COUNT:
                break
        return victims

    async def drop_settled(self) -> None:
        """Delete all segments without living messages."""
        with anyio.CancelScope(shield=True):
            while self._index.fates[SegmentFate.DROPPABLE]:
                await self._drop()

    async def compact_fully(self) -> None:
        """Do everything that makes the store smaller, however long it takes. Only while nothing
        else is written."""
        while await self.maintain(idle=True):
            pass
        while len(self._index.fates[SegmentFate.SMALL]) > 1:
            await self._compact(self._victims(SegmentFate.SMALL))

    async def _drop(self) -> None:
        droppable = self._index.fates[SegmentFate.DROPPABLE].values()
        segments = [*islice(droppable, SEGMENTS_DROPPED_MAX)]
        words = last_words(self._index, segments)
        async with self._log.moving:
            await self._store.commit((), None, [segment.id for segment in segments], words)
            drop(self._index, segments)

    async def _compact(self, victims: list[Segment]) -> None:
        """Write what is alive in these segments into a new one, and drop them."""
        bodies = await self._log.bodies([victim.id for victim in victims])
        # Nothing else changes the index: there is one writer, and it is here.
        await self._replace(victims, await run_sync(self._rewritten, victims, bodies))

    def _rewritten(self, victims: list[Segment], bodies: dict[int, bytes]) -> Parts:
        """What is alive in these segments. In a thread: marks take 3 µs each."""
        index = self._index
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
                    acked for acked in stored.acks if still_settles(queue, acked, gone)
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
        return segments(sections, self._journal.next_segment)

    async def _replace(self, victims: list[Segment], parts: Parts) -> None:
        """Replace these segments by `parts`, which is what is alive in them."""
        index = self._index
        async with self._log.moving:
            ids = [victim.id for victim in victims]
            await self._store.commit([segment for segment, _ in parts], None, ids)
            withdraw(victims)
            placed = self._journal.place(parts)
            for heir, sections in placed:
                for section in sections:
                    queue = index.queues[section.queue_id]
                    for acked in section.acks:
                        name_settled(index, heir, queue, acked)
                    index.mark(heir, queue, (number for number, _ in section.marks))
            heirs = [heir for heir, _ in placed]
            drop(index, victims, heirs)
            for heir in heirs:
                index.update_fate(heir)


def _carried(
    queue: QueueIndex, marks: dict[int, Mark], gone: Container[Segment]
) -> Iterator[tuple[int, Mark]]:
    """The marks that are still needed when these segments are deleted."""
    for number, mark in sorted(marks.items()):
        span = queue.find(number)
        if span is not None and (span.segment not in gone or is_alive(span, number)):
            yield number, mark
