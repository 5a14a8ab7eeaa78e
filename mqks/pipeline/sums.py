"""What a lake holds, as sums beside the numbers up to which its queues are archived.

For each range of a queue's numbers: how many messages, and the sum of their hashes modulo 2**64,
which has no order. A hash is of number, arrival, id, event, data, attributes, priority and ordering
key.

    mqks-rows/0/EPOCH/QUEUE         a queue's messages with the numbers from 0 to 1,048,575
    mqks-hash/0/EPOCH/QUEUE         and the sum of their hashes
    mqks-since/EPOCH/QUEUE          sums are of this number and later ones; an older version
                                    archived the others

The one rule: sums are part of the commit whose files they are of.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqks.pipeline import objects
from mqks.pipeline.columns import PROPERTIES
from mqks.pipeline.objects import Place

HASHED = [*("key", "value", "topic", "offset", "timestamp", "queue", "epoch"), *PROPERTIES.names]
"""The columns that sums are of, and those that say which queue it is; older files lack the last
ones."""
RANGE_BITS, RANGES_BITS = 20, 9
"""A range has 2**20 numbers; from 2**30 on there are 2**9 ranges for twice the numbers, so that
their count is bounded."""


_SINCE = "mqks-since"
_BASE = 0x9E3779B97F4A7C15
"""Odd, and its bits have no pattern: 2**64 divided by the golden ratio."""
_PIECE_BYTES = 1 << 16
_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}


class SummedRange(NamedTuple):
    """Of the numbers of a queue."""

    queue: str
    epoch: str
    first: int

    @property
    def last(self) -> int:
        return self.first + (1 << _bits(self.first)) - 1


class Sum(NamedTuple):
    """Of the messages of a range."""

    rows: int = 0
    hash: int = 0
    """Modulo 2**64."""

    def plus(self, other: "Sum", sign: int = 1) -> "Sum":
        return Sum(self.rows + sign * other.rows, (self.hash + sign * other.hash) % 2**64)

    def negative(self) -> "Sum":
        return Sum().plus(self, -1)


Sums = dict[SummedRange, Sum]


def _bits(number: int) -> int:
    return max(RANGE_BITS, number.bit_length() - 1 - RANGES_BITS)


def sums_of(rows: pa.Table | pa.RecordBatch) -> Sums:
    """Of rows with the columns `HASHED`. 190 ns for a message of 100 bytes."""
    numbers, hashes = hashes_of(rows)
    bits = np.maximum(RANGE_BITS, np.frexp(numbers.astype(np.float64))[1] - 1 - RANGES_BITS)
    columns = {"first": numbers >> bits << bits, "hash": hashes}
    grouped = pa.table({**columns, "queue": rows["queue"], "epoch": rows["epoch"]})
    found = grouped.group_by(["queue", "epoch", "first"]).aggregate(
        [("hash", "count"), ("hash", "sum")]
    )
    names = ("queue", "epoch", "first", "hash_count", "hash_sum")
    told_rows = zip(*(found[name].to_pylist() for name in names), strict=True)
    return {SummedRange(*of): Sum(count, total) for *of, count, total in told_rows}


def hashes_of(rows: pa.Table | pa.RecordBatch) -> tuple[Any, Any]:
    """The number and the hash of each row."""
    numbers = np.asarray(rows["offset"])
    key, value, topic = (rows[name].cast(pa.binary()) for name in ("key", "value", "topic"))
    # Neither ids nor events have spaces.
    texts = pc.binary_join_element_wise(key, topic, value, b" ")
    times = np.asarray(rows["timestamp"].cast(pa.int64())).astype(np.uint64)
    numbered = numbers.astype(np.uint64) * np.uint64(_BASE) + times
    hashes = _mixed(_hashes(texts) ^ _mixed(numbered))
    for number, name in enumerate(PROPERTIES.names, 2):
        # What is null is as if it were not there: columns come with new versions.
        if name in rows.schema.names and rows[name].null_count < len(rows):
            told = _mixed(hashes + number * _hashes(_texts(rows[name])))
            hashes = np.where(np.asarray(rows[name].is_valid()), told, hashes)
    return numbers, hashes


def _texts(column: Any) -> Any:
    """A column of `PROPERTIES` as texts, which are empty for null."""
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_texts(chunk) for chunk in column.chunks], pa.binary())
    if pa.types.is_map(column.type):
        both = (each.cast(pa.binary()) for each in (column.keys, column.items))
        pairs = pc.binary_join_element_wise(*both, b"\t")  # Neither has tabs as such.
        column = pc.binary_join(pa.ListArray.from_arrays(column.offsets, pairs), b"\n")
    return pc.fill_null(column.cast(pa.string()).cast(pa.binary()), b"")


def _hashes(texts: Any) -> Any:
    """A polynomial of the bytes of each text, and its length."""
    whole = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    _, edges, content = whole.buffers()
    ends = np.frombuffer(edges, np.int32)[whole.offset : whole.offset + len(whole) + 1]
    raw = np.frombuffer(content, np.uint8)
    hashes = np.diff(ends).astype(np.uint64)
    powers, inverse = _powers()
    starts = np.arange(ends[0], ends[-1], _PIECE_BYTES, dtype=np.int32)
    stops = np.minimum(starts + _PIECE_BYTES, ends[-1])
    firsts = np.searchsorted(ends, starts, "right") - 1
    for start, stop, first, last in zip(
        *map(np.ndarray.tolist, (starts, stops, firsts, np.searchsorted(ends, stops))), strict=True
    ):
        piece = raw[start:stop]
        begin = np.maximum(ends[first:last], start) - start
        sums = np.add.reduceat(piece * powers[: len(piece)], begin) * inverse[begin]
        sums[ends[first:last] == ends[first + 1 : last + 1]] = 0  # Reduceat has no empty parts.
        if ends[first] < start:  # It began in an earlier piece.
            sums[:1] *= np.uint64(pow(_BASE, start - int(ends[first]), 2**64))
        hashes[first:last] += sums * np.uint64(_BASE)
    return hashes


@cache
def _powers() -> tuple[Any, Any]:
    """Of the base and of its inverse, for each byte of a piece."""
    made = np.full((2, _PIECE_BYTES), [[_BASE], [pow(_BASE, -1, 2**64)]], np.uint64)
    made[:, 0] = 1
    powers, inverse = made.cumprod(axis=1)
    return powers, inverse


def _mixed(hashes: Any) -> Any:
    """Each bit changes half of the others; the end of SplitMix64 (Steele, Lea, Flood 2014)."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def added(all_sums: Iterable[Sums]) -> Sums:
    whole: Sums = {}
    for each in all_sums:
        for of, total in each.items():
            whole[of] = whole.get(of, Sum()).plus(total)
    return whole


def sums_of_file(file: Place) -> Sums:
    """Of the rows of a Parquet file."""
    return added(map(sums_of, batches_of(file, HASHED)))


def batches_of(file: Place, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The rows of a Parquet file, with those of these columns that it has."""
    source = file if isinstance(file, Path) else pa.BufferReader(objects.read(file))
    with pq.ParquetFile(source) as opened:
        for batch in opened.iter_batches(columns=columns):
            # Files that Delta's own merging has made have views, which Arrow filters none of.
            kinds = [each.with_type(_VIEWS.get(each.type, each.type)) for each in batch.schema]
            yield batch.cast(pa.schema(kinds))


Recorded = Callable[[str], int | None]
"""What a lake has recorded under a name."""


def records(sums: Sums, recorded: Recorded, sign: int = 1) -> dict[str, int]:
    """What a commit records that adds, or with `sign` -1 removes, rows with these sums."""
    told: dict[str, int] = {}
    for of, total in sums.items():
        now = recorded_sum(of, recorded).plus(total, sign)
        # Tables record numbers of 64 bits with a sign.
        numbers = now.rows, (now.hash + 2**63) % 2**64 - 2**63
        told |= dict(zip(_names(of), numbers, strict=True))
    return told


def recorded_sum(of: SummedRange, recorded: Recorded) -> Sum:
    """Of a range, what the commits so far have recorded."""
    rows, hashes = (recorded(name) or 0 for name in _names(of))
    return Sum(rows, hashes % 2**64)


def ranges(queue: str, epoch: str, start: int, end: int) -> Iterator[SummedRange]:
    """Those of the numbers from `start` up to, not including, `end`."""
    while start < end:
        bits = _bits(start)
        yield (of := SummedRange(queue, epoch, start >> bits << bits))
        start = of.last + 1


def _names(of: SummedRange) -> tuple[str, ...]:
    return tuple(f"mqks-{what}/{of.first}/{of.epoch}/{of.queue}" for what in ("rows", "hash"))


def since(queue: str, epoch: str) -> str:
    """The name of the record of the first number that sums are of."""
    return f"{_SINCE}/{epoch}/{queue}"


def queues_of(names: Iterable[str]) -> set[tuple[str, str]]:
    """The queues, with their epochs, of which records with these names have sums."""
    parts = (name.split("/", 2) for name in names)
    return {(told[2], told[1]) for told in parts if told[0] == _SINCE}


def records_of_commit(
    queue: str, epoch: str, done: int | None, sums: Iterable[Sums], recorded: Recorded
) -> dict[str, int]:
    """What a commit records of its files; `done` is the number up to which the queue was archived
    before."""
    name = since(queue, epoch)
    told = {} if recorded(name) is not None else {name: done or 0}
    return told | records(added(sums), recorded)
