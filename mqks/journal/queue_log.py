"""Messages of a queue as they are on disk, read without consuming.

The one rule: the event loop chooses what to read, from the index; reading, checking and cutting
happen in threads.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from anyio.to_thread import run_sync

from mqks.broker.base.ranges import Range, within
from mqks.errors import JournalFailed
from mqks.journal.index import QueueIndex
from mqks.journal.segment import StoredRun, runs_of
from mqks.limits import READ_DISK_BYTES

if TYPE_CHECKING:
    from mqks.journal.journal import Journal

AT_ONCE_BYTES: Final = 4 * 1024 * 1024
"""Segments are read until they have this size together."""


class Piece(NamedTuple):
    """Messages with consecutive numbers and the same arrival; `text` has a newline after each."""

    first: int
    total: int
    time_us: int
    text: bytes


class Page(NamedTuple):
    """`pieces` has every living message from the start of the read up to `next_seq`."""

    pieces: list[Piece]
    rows: int
    next_seq: int


class QueueLog:
    def __init__(self, journal: "Journal") -> None:
        self._journal = journal

    async def page(
        self,
        queue_id: int,
        queue: QueueIndex,
        first: int,
        end: int | None,
        rows_max: int,
        bytes_max: int,
    ) -> Page:
        """Living messages from `first` on and below `end`: at most `rows_max`, about `bytes_max`
        bytes or up to twice as many, at least one message if there is one.

        Raises JournalFailed when a segment is damaged or missing, or the disk can't be read.
        """
        while True:
            stop = queue.next_seq if end is None else min(end, queue.next_seq)
            wanted, next_seq = _choose(queue, first, stop, rows_max, bytes_max)
            pieces = await self._pieces(queue_id, wanted)
            if pieces is not None:
                return Page(pieces, sum(piece.total for piece in pieces), next_seq)

    async def these(
        self, queue_id: int, queue: QueueIndex, numbers: Sequence[int], bytes_max: int
    ) -> list[Piece]:
        """The living ones of these messages, as many as fit a page, at least the first one. Raises
        like `page`."""
        while True:
            fitting = numbers[: _fitting(queue, numbers, bytes_max)]
            wanted = await self._journal.where(queue_id, fitting)
            pieces = await self._pieces(queue_id, wanted)
            if pieces is not None:
                return pieces

    async def _pieces(self, queue_id: int, wanted: dict[int, list[Range]]) -> list[Piece] | None:
        """In the order of their numbers; None if a compaction has replaced a segment meanwhile."""
        pieces: list[Piece] = []
        for ids in self.slices([*wanted]):
            bodies = await self._journal.store.bodies(ids, background=True)
            if moved := set(ids) - bodies.keys():
                await self._journal.await_move(moved.pop())
                return None
            pieces += await run_sync(_cut_all, queue_id, wanted, bodies)
        return sorted(pieces)

    async def first_at(self, queue_id: int, queue: QueueIndex, time_us: int) -> int:
        """Number of the first message that arrived at or after a time; that of the next message if
        none.

        Raises like `page`.
        """
        while True:
            # Spans are not sorted by time: the clock may have been set back. 30 ns each.
            span = next((span for span in queue.spans if span.latest_us >= time_us), None)
            if span is None or span.time_us >= time_us:
                return span.first if span else queue.next_seq
            segment_id = span.segment.id
            store = self._journal.store
            bodies = await store.bodies([segment_id], background=True)
            if body := bodies.get(segment_id):
                for run in runs_of(body, queue_id):
                    if span.first <= run.first < span.end and run.time_us >= time_us:
                        return run.first
                raise JournalFailed(f"segment {segment_id} of {store.name} has changed")
            # As above.
            await self._journal.await_move(segment_id)

    def slices(self, ids: list[int]) -> Iterator[list[int]]:
        """Slices of at most AT_ONCE_BYTES; a segment that was deleted meanwhile has no size."""
        at_once, size = list[int](), 0
        for segment_id in ids:
            at_once.append(segment_id)
            segment = self._journal.index.segments.get(segment_id)
            size += segment.bytes if segment else 0
            if size >= AT_ONCE_BYTES:
                yield at_once
                at_once, size = [], 0
        if at_once:
            yield at_once


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
        if span.dead_count == span.end - span.first:
            continue
        if span.segment.id not in wanted:
            disk += span.segment.bytes
        for start, living in span.living_in(first, stop):
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
