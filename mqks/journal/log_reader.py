"""Messages of a queue as they lie on disk, for whoever wants to look without consuming.

The one rule: the event loop chooses what to read, from the index; reading, checking and cutting
happen in a thread of their own, through a connection of their own.
"""

import sqlite3
from bisect import bisect_left
from pathlib import Path
from typing import NamedTuple

import anyio
from anyio.to_thread import run_sync

from mqks.broker.ranges import Range
from mqks.errors import JournalFailed
from mqks.journal.index import QueueIndex
from mqks.journal.segment import SegmentDamaged, StoredRun, checksum, runs_of


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


class _Wanted(NamedTuple):
    """What to read of one segment."""

    segment_id: int
    first: int
    end: int
    living: list[Range]


class LogReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode=ro",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
        )
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
        bytes, at least one where there is one. Raises JournalFailed on a damaged segment."""
        while True:
            stop = queue.next_seq if end is None else min(end, queue.next_seq)
            wanted, whole = _choose(queue, first, stop, rows_max, bytes_max)
            pieces: list[Piece] | None = []
            if wanted:
                pieces = await run_sync(
                    self._read, queue_id, wanted, rows_max, limiter=self._limiter
                )
            # A compaction may have moved something meanwhile: then choose again.
            if pieces is not None:
                break
        rows = sum(piece.total for piece in pieces)
        if whole and rows == sum(count for each in wanted for _, count in each.living):
            return Page(pieces, rows, max(first, stop))
        if not pieces:
            return Page(pieces, rows, wanted[-1].end)
        return Page(pieces, rows, pieces[-1].first + pieces[-1].total)

    async def first_at(self, queue_id: int, queue: QueueIndex, time_us: int) -> int:
        """Number of the first message that came at or after a time; the next one's if none."""
        # Times grow with the numbers, as far as the clock does.
        position = bisect_left(queue.spans, time_us, key=lambda span: span.time_us)
        later = queue.spans[position].first if position < len(queue.spans) else queue.next_seq
        if not position:
            return later
        span = queue.spans[position - 1]
        wanted = _Wanted(span.segment.id, span.first, span.end, [])
        runs = await run_sync(self._runs, queue_id, wanted, limiter=self._limiter)
        if runs is None:
            # A compaction has moved it meanwhile.
            return await self.first_at(queue_id, queue, time_us)
        return next((run.first for run in runs if run.time_us >= time_us), later)

    # -- in the thread

    def _body(self, segment_id: int) -> bytes | None:
        row = self._db.execute(
            "select crc, body from segment where id = ?", (segment_id,)
        ).fetchone()
        if row is None:
            return None
        crc, body = row
        if checksum(segment_id, body) != crc:
            raise JournalFailed(f"segment {segment_id} of {self._path} is damaged")
        assert isinstance(body, bytes)
        return body

    def _runs(self, queue_id: int, wanted: _Wanted) -> list[StoredRun] | None:
        body = self._body(wanted.segment_id)
        if body is None:
            return None
        return [run for run in runs_of(body, queue_id) if wanted.first <= run.first < wanted.end]

    def _read(self, queue_id: int, wanted: list[_Wanted], rows_max: int) -> list[Piece] | None:
        pieces: list[Piece] = []
        left = rows_max
        for each in wanted:
            body = self._body(each.segment_id)
            if body is None:
                return None
            try:
                runs = runs_of(body, queue_id)
            except SegmentDamaged as error:
                raise JournalFailed(f"segment {each.segment_id}: {error}") from error
            for run in runs:
                if not each.first <= run.first < each.end:
                    continue
                for piece in _cut(run, body, each.living, left):
                    pieces.append(piece)
                    left -= piece.total
                if not left:
                    return pieces
        return pieces


def _choose(
    queue: QueueIndex, first: int, stop: int, rows_max: int, bytes_max: int
) -> tuple[list[_Wanted], bool]:
    """Which spans to read, and whether they are all there are."""
    wanted: list[_Wanted] = []
    rows = size = 0
    for span in queue.overlapping(first, stop):
        if rows >= rows_max or size >= bytes_max:
            return wanted, False
        living = [
            (max(first, start), min(stop, start + count) - max(first, start))
            for start, count in span.living()
            if start < stop and start + count > first
        ]
        if living:
            wanted.append(_Wanted(span.segment.id, span.first, span.end, living))
            count = sum(count for _, count in living)
            rows += count
            size += span.bytes * count // (span.end - span.first)
    return wanted, True


def _cut(run: StoredRun, body: bytes, living: list[Range], rows_max: int) -> list[Piece]:
    """The living messages of a run, in its order, at most so many."""
    pieces: list[Piece] = []
    lines: list[bytes] | None = None
    for first, count in living:
        start, stop = max(first, run.first), min(first + count, run.first + run.total)
        stop = min(stop, start + rows_max)
        if start >= stop:
            continue
        rows_max -= stop - start
        if stop - start == run.total:
            text = body[run.start : run.end] + b"\n"
        else:
            lines = run.lines(body) if lines is None else lines
            text = b"\n".join([*lines[start - run.first : stop - run.first], b""])
        pieces.append(Piece(start, stop - start, run.time_us, text))
    return pieces
