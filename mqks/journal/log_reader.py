"""Messages of a queue as they lie on disk, for whoever wants to look without consuming.

The one rule: the event loop chooses what to read, from the index; reading, checking and cutting
happen in a thread of their own, through a connection of their own.
"""

import sqlite3
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.to_thread import run_sync

from mqks.broker.ranges import Range
from mqks.errors import JournalFailed
from mqks.journal.index import QueueIndex
from mqks.journal.segment import StoredRun, checksum, runs_of
from mqks.limits import READ_DISK_BYTES


class Piece(NamedTuple):
    """Messages with consecutive numbers that came together; `text` has a newline after each."""

    first: int
    total: int
    time_us: int
    text: bytes


class Page(NamedTuple):
    """`next_seq`: every living message from where the reading began up to there is in `pieces`."""

    pieces: list[Piece]
    rows: int
    next_seq: int


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise JournalFailed for whatever SQLite raises. Nothing of it passes by itself, as a full
    disk does: readers of a WAL wait for nobody."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "")
        raise JournalFailed(f"{path} can't be read: {error} {name}".rstrip()) from error


def intact(path: Path, segment_id: int, crc: object, body: object) -> bytes:
    """The body of a segment as it was written. Raises JournalFailed."""
    if not isinstance(body, bytes) or checksum(segment_id, body) != crc:
        raise JournalFailed(f"segment {segment_id} of {path} is damaged")
    return body


class LogReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self.await_move: Callable[[int], Awaitable[None]]
        """The journal's: given a segment that the index names and the file does not have, it
        returns when the index does not name it any more; JournalFailed if that will never be."""
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
        # Its descriptors are opened by the first read: now, while there are some.
        self._db.execute("select 1 from meta").fetchall()
        self._limiter = anyio.CapacityLimiter(1)

    def close(self) -> None:
        self._db.close()

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
        bytes or up to twice as many, at least one where there is one.

        Raises JournalFailed when a segment is damaged or missing, or the disk can't be read.
        """
        while True:
            stop = queue.next_seq if end is None else min(end, queue.next_seq)
            wanted, next_seq = _choose(queue, first, stop, rows_max, bytes_max)
            pieces: list[Piece] | int = []
            if wanted:
                pieces = await run_sync(self._read, queue_id, wanted, limiter=self._limiter)
            if not isinstance(pieces, int):
                return Page(pieces, sum(piece.total for piece in pieces), next_seq)
            # A compaction may have moved something meanwhile: then choose again.
            await self.await_move(pieces)

    async def first_at(self, queue_id: int, queue: QueueIndex, time_us: int) -> int:
        """Number of the first message that came at or after a time; the next one's if none.

        Raises as `page`.
        """
        while True:
            # Spans are not sorted by time: the clock may have been set back. 30 ns each.
            span = next((span for span in queue.spans if span.latest_us >= time_us), None)
            if span is None or span.time_us >= time_us:
                return span.first if span else queue.next_seq
            segment_id = span.segment.id
            body = await run_sync(self._body, segment_id, limiter=self._limiter)
            if body is not None:
                for run in runs_of(body, queue_id):
                    if span.first <= run.first < span.end and run.time_us >= time_us:
                        return run.first
                raise JournalFailed(f"segment {segment_id} of {self._path} is not as it was")
            # As above.
            await self.await_move(segment_id)

    # -- in the thread

    def _body(self, segment_id: int) -> bytes | None:
        with reading(self._path):
            row = self._db.execute(
                "select crc, body from segment where id = ?", (segment_id,)
            ).fetchone()
        return None if row is None else intact(self._path, segment_id, *row)

    def _read(self, queue_id: int, wanted: dict[int, list[Range]]) -> list[Piece] | int:
        """The pieces, or the number of a segment that is not there."""
        pieces: list[Piece] = []
        for segment_id, living in wanted.items():
            body = self._body(segment_id)
            if body is None:
                return segment_id
            for run in runs_of(body, queue_id):
                pieces += _cut(run, body, living)
        pieces.sort()
        return pieces


def _choose(
    queue: QueueIndex, first: int, stop: int, rows_max: int, bytes_max: int
) -> tuple[dict[int, list[Range]], int]:
    """Which messages to read of each segment, in ascending order, and where to go on."""
    wanted: dict[int, list[Range]] = {}
    size = disk = 0
    for span in queue.overlapping(first, stop):
        if span.dead_count == span.end - span.first:
            continue
        if span.segment.id not in wanted:
            disk += span.segment.bytes
        for start, count in span.living():
            end = min(stop, start + count)
            start = max(first, start)
            if start < end:
                # A span is cut only where it would make the page twice as large.
                fitting = (2 * bytes_max - size) * (span.end - span.first) // (span.bytes + 1)
                count = min(end - start, rows_max, max(1, fitting))
                rows_max -= count
                wanted.setdefault(span.segment.id, []).append((start, count))
                size += span.bytes * count // (span.end - span.first)
                if not rows_max or start + count < end:
                    return wanted, start + count
        if wanted and (size >= bytes_max or disk >= READ_DISK_BYTES):
            return wanted, min(stop, span.end)
    return wanted, max(first, stop)


def _cut(run: StoredRun, body: bytes, living: list[Range]) -> list[Piece]:
    """The living messages of a run."""
    pieces: list[Piece] = []
    lines: list[bytes] | None = None
    end = run.first + run.total
    for position in range(max(0, bisect_left(living, (run.first + 1,)) - 1), len(living)):
        first, count = living[position]
        if first >= end:
            break
        start, stop = max(first, run.first), min(first + count, end)
        if start >= stop:
            continue
        if stop - start == run.total:
            text = body[run.start : run.end] + b"\n"
        else:
            lines = run.lines(body) if lines is None else lines
            text = b"\n".join([*lines[start - run.first : stop - run.first], b""])
        pieces.append(Piece(start, stop - start, run.time_us, text))
    return pieces
