"""Messages of a queue, read from the segments that have them: for its consumers, and for those who
read it as a log.

The one rule: the event loop chooses what to read, from the index; reading, checking and cutting
happen in threads.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import anyio
from anyio.lowlevel import checkpoint
from anyio.to_thread import run_sync

from mqks.broker.spine.base import ranges
from mqks.broker.spine.base.ranges import Range, compress, within
from mqks.broker.spine.log.pending import Run
from mqks.errors import JournalFailed
from mqks.journal.index import Index, QueueIndex
from mqks.journal.living import is_alive, living_in
from mqks.journal.store import Store
from mqks.journal.stored import StoredRun, runs_of
from mqks.limits import PAGE_BYTES, READ_DISK_BYTES

AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Segments are read until they have this size together."""
CUT_NOW_BYTES: Final = 128 * 1024
"""Larger results are cut in a thread: this much takes 2 ms if each message is a separate run."""
LOOKED_UP_AT_ONCE: Final = 1024


class Piece(NamedTuple):
    """Messages with consecutive numbers and the same arrival; `text` has a newline after each."""

    first: int
    total: int
    time_us: int
    text: bytes


class LogPage(NamedTuple):
    """`pieces` has every living message from the start of the read up to `next_seq`."""

    pieces: list[Piece]
    rows: int
    next_seq: int


class QueueLog:
    """All reads raise JournalFailed when a segment is damaged or missing, or the disk can't be
    read."""

    def __init__(self, store: Store, index: Index) -> None:
        self._store = store
        self._index = index
        self.moving = anyio.Lock()
        """Held while segments are deleted, until the index is updated."""

    # -- for consumers

    async def read(self, queue_id: int, first: int, bytes_max: int = PAGE_BYTES) -> list[Run]:
        """Return the living messages of a queue from number `first` on, in order, about
        `bytes_max` bytes, at least one message if there is one. Messages settled meanwhile may be
        among them."""
        while True:
            queue = self._index.queues.get(queue_id)
            wanted = {} if queue is None else _next(queue, first, bytes_max)
            bodies = await self.bodies([*wanted])
            if len(bodies) == len(wanted):
                return sorted(await _cut_runs(queue_id, wanted, bodies))

    async def fetch(self, queue_id: int, numbers: Sequence[int]) -> dict[int, bytes]:
        """The living ones of these messages by number. Messages settled meanwhile may be among
        them."""
        found: dict[int, bytes] = {}
        left = [*numbers]
        while left:
            wanted, left = await self._where(queue_id, sorted(set(left))), []
            for ids in self._slices([*wanted]):
                bodies = await self.bodies(ids)
                for run in await _cut_runs(queue_id, wanted, bodies):
                    found.update(enumerate(run.lines, run.first))
                for moved in set(ids) - bodies.keys():
                    left += ranges.numbers(wanted[moved])
        return found

    # -- as a log

    async def page(
        self,
        queue_id: int,
        queue: QueueIndex,
        first: int,
        end: int | None,
        rows_max: int,
        bytes_max: int,
    ) -> LogPage:
        """Living messages from `first` on and below `end`: at most `rows_max`, about `bytes_max`
        bytes or up to twice as many, at least one message if there is one."""
        while True:
            stop = queue.next_seq if end is None else min(end, queue.next_seq)
            wanted, next_seq = _choose(queue, first, stop, rows_max, bytes_max)
            pieces = await self._pieces(queue_id, wanted)
            if pieces is not None:
                return LogPage(pieces, sum(piece.total for piece in pieces), next_seq)

    async def these(
        self, queue_id: int, queue: QueueIndex, numbers: Sequence[int], bytes_max: int
    ) -> list[Piece]:
        """By number, the living ones of these messages: as many of the first as fit a page."""
        while True:
            fitting = numbers[: _fitting(queue, numbers, bytes_max)]
            wanted = await self._where(queue_id, sorted(fitting))
            pieces = await self._pieces(queue_id, wanted)
            if pieces is not None:
                return pieces

    async def _pieces(self, queue_id: int, wanted: dict[int, list[Range]]) -> list[Piece] | None:
        """In the order of their numbers; None if a compaction has replaced a segment meanwhile."""
        pieces: list[Piece] = []
        for ids in self._slices([*wanted]):
            bodies = await self.bodies(ids, background=True)
            if len(bodies) < len(ids):
                return None
            pieces += await run_sync(_cut_all, queue_id, wanted, bodies)
        return sorted(pieces)

    async def first_at(self, queue_id: int, queue: QueueIndex, time_us: int) -> int:
        """Number of the first message that arrived at or after a time; that of the next message if
        none."""
        while True:
            # Spans are not sorted by time: the clock may have been set back. 30 ns each.
            spans = queue.overlapping(0, queue.next_seq)
            span = next((span for span in spans if span.latest_us >= time_us), None)
            if span is None or span.time_us >= time_us:
                return span.first if span else queue.next_seq
            segment_id = span.segment.id
            bodies = await self.bodies([segment_id], background=True)
            if body := bodies.get(segment_id):
                for run in runs_of(body, queue_id):
                    if span.first <= run.first < span.end and run.time_us >= time_us:
                        return run.first
                raise JournalFailed(f"segment {segment_id} of {self._store.name} has changed")

    # -- segments

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        """Those of these segments that exist. If any does not, a compaction has replaced it, and
        the index does not name it any more when this returns."""
        bodies = await self._store.bodies(ids, background=background) if ids else {}
        if missing := [each for each in ids if each not in bodies]:
            async with self.moving:
                pass
            if lost := [each for each in missing if each in self._index.segments]:
                raise JournalFailed(
                    f"segment {lost[0]} of {self._store.name} is missing: the file is damaged"
                )
        return bodies

    async def _where(self, queue_id: int, numbers: Sequence[int]) -> dict[int, list[Range]]:
        """The segments that hold the living ones of these ascending numbers, 2 µs each."""
        found: dict[int, list[int]] = {}
        for start in range(0, len(numbers), LOOKED_UP_AT_ONCE):
            queue, span = self._index.queues.get(queue_id), None
            if queue is None:
                return {}
            for number in numbers[start : start + LOOKED_UP_AT_ONCE]:
                if span is None or not span.first <= number < span.end:
                    span = queue.find(number)
                if span is not None and is_alive(span, number):
                    found.setdefault(span.segment.id, []).append(number)
            await checkpoint()
        return {segment_id: compress(there) for segment_id, there in found.items()}

    def _slices(self, ids: list[int]) -> Iterator[list[int]]:
        """Slices of at most AT_ONCE_BYTES; a segment that was deleted meanwhile has no size."""
        at_once, size = list[int](), 0
        for segment_id in ids:
            at_once.append(segment_id)
            segment = self._index.segments.get(segment_id)
            size += segment.bytes if segment else 0
            if size >= AT_ONCE_BYTES:
                yield at_once
                at_once, size = [], 0
        if at_once:
            yield at_once


def _next(queue: QueueIndex, first: int, bytes_max: int) -> dict[int, list[Range]]:
    """Which messages to read from each segment: the living ones from `first` on."""
    wanted: dict[int, list[Range]] = {}
    size = 0
    for span in queue.overlapping(first, queue.next_seq):
        if span.settled_count == span.end - span.first:
            continue
        if living := [*living_in(span, first)]:
            wanted.setdefault(span.segment.id, []).extend(living)
            size += span.bytes
            if size >= bytes_max:
                break
    return wanted


async def _cut_runs(
    queue_id: int, wanted: Mapping[int, list[Range]], bodies: Mapping[int, bytes]
) -> list[Run]:
    """The wanted messages of each segment."""
    if sum(map(len, bodies.values())) <= CUT_NOW_BYTES:
        return _cut_now(queue_id, wanted, bodies)
    return await run_sync(_cut_now, queue_id, wanted, bodies)


def _cut_now(
    queue_id: int, wanted: Mapping[int, list[Range]], bodies: Mapping[int, bytes]
) -> list[Run]:
    found: list[Run] = []
    for segment_id, body in bodies.items():
        for run in runs_of(body, queue_id):
            if there := [*within(wanted[segment_id], run.first, run.first + run.total)]:
                lines = run.lines(body)
                found += (
                    Run(first, lines[first - run.first : first - run.first + count])
                    for first, count in there
                )
    return found


def _cut_all(
    queue_id: int, wanted: dict[int, list[Range]], bodies: dict[int, bytes]
) -> list[Piece]:
    return [
        piece
        for segment_id, body in bodies.items()
        for run in runs_of(body, queue_id)
        for piece in _cut(run, body, wanted[segment_id])
    ]


def _fitting(queue: QueueIndex, numbers: Sequence[int], bytes_max: int) -> int:
    """How many of these fit a page."""
    size = 0
    for count, number in enumerate(numbers):
        span = queue.find(number)
        size += span.bytes // span.count if span is not None else 0
        if size >= bytes_max:
            return count + 1
    return len(numbers)


def _choose(
    queue: QueueIndex, first: int, stop: int, rows_max: int, bytes_max: int
) -> tuple[dict[int, list[Range]], int]:
    """Which messages to read from each segment, in ascending order, and where to continue."""
    wanted: dict[int, list[Range]] = {}
    size = disk = 0
    for span in queue.overlapping(first, stop):
        if span.settled_count == span.end - span.first:
            continue
        if span.segment.id not in wanted:
            disk += span.segment.bytes
        for start, living in living_in(span, first, stop):
            # A span is cut only where it would make the page twice as large.
            fitting = (2 * bytes_max - size) * span.count // (span.bytes + 1)
            count = min(living, rows_max, max(1, fitting))
            rows_max -= count
            wanted.setdefault(span.segment.id, []).append((start, count))
            size += span.bytes * count // span.count
            if not rows_max or count < living:
                return wanted, start + count
        if wanted and (size >= bytes_max or disk >= READ_DISK_BYTES):
            return wanted, min(stop, span.end)
    return wanted, max(first, stop)


def _cut(run: StoredRun, body: bytes, living: list[Range]) -> list[Piece]:
    """The living messages of a run."""
    pieces: list[Piece] = []
    lines: list[bytes] | None = None
    for first, count in within(living, run.first, run.first + run.total):
        if count == run.total:
            text = body[run.start : run.end] + b"\n"
        else:
            lines = run.lines(body) if lines is None else lines
            text = b"\n".join([*lines[first - run.first : first - run.first + count], b""])
        pieces.append(Piece(first, count, run.time_us, text))
    return pieces
