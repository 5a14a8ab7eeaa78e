"""Whether a lake has exactly the rows that were archived into it.

The one rule: rows are compared with what the commits have recorded of them; nothing is changed.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqks.pipeline.lake import Lake
from mqks.pipeline.objects import Place
from mqks.pipeline.sums import (
    HASHED,
    Sum,
    SummedRange,
    Sums,
    added,
    batches_of,
    ranges,
    recorded_sum,
    since,
    sums_of,
)

DOUBLED_MAX = 10
"""Numbers that are told of each difference."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A range of numbers of a queue whose rows are not those that were archived."""

    queue: str
    epoch: str
    first: int
    last: int
    archived: int
    """The number of messages that were archived."""
    rows: int
    doubled: Sequence[int] = ()
    """Some numbers that are in several rows."""

    def __str__(self) -> str:
        told = f"queue {self.queue}, epoch {self.epoch}, numbers {self.first} to {self.last}: "
        if self.rows == self.archived:
            told += f"the {self.rows:,} rows are not as they were archived"
        else:
            told += f"{self.rows:,} rows, and {self.archived:,} were archived"
        twice = ", ".join(map(str, self.doubled))
        return told + (f"; several rows have the number {twice}" if twice else "")


@dataclass(frozen=True, slots=True)
class Verified:
    """What `Verification.run` found."""

    messages: int
    """Rows in ranges without a difference."""
    queues: int
    unchecked: int
    """Rows that a version without sums has archived."""
    differences: list[Difference]


@dataclass
class Verification:
    """Of a lake that is open, whose files are read by so many threads."""

    lake: Lake
    threads: int = os.cpu_count() or 1

    def __post_init__(self) -> None:
        self._starts: dict[tuple[str, str], int | None] = {}
        self._unchecked: list[int] = []

    @cached_property
    def _files(self) -> Sequence[Place]:
        return self.lake.contents()

    def run(self) -> Verified:
        """Read all rows. Raises LakeUnfit."""
        with ThreadPoolExecutor(self.threads) as threads:
            found = added(threads.map(self._sums, self._files))
        recorded = {of: recorded_sum(of, self.lake.recorded) for of in self._ranges(found)}
        differing = [of for of in recorded if found.get(of, Sum()) != recorded[of]]
        doubled = self._doubled(differing)
        differences = [
            Difference(
                *of, of.last, recorded[of].rows, found.get(of, Sum()).rows, doubled.get(of, [])
            )
            for of in sorted(differing)
        ]
        return Verified(
            messages=sum(recorded[of].rows for of in recorded if of not in differing),
            queues=len({of.queue for of in found}),
            unchecked=sum(self._unchecked),
            differences=differences,
        )

    def _sums(self, file: Place) -> Sums:
        return added(map(sums_of, self._checked(file)))

    def _checked(self, file: Place) -> Iterator[pa.RecordBatch]:
        """Its rows, but for those of which there are no sums."""
        for batch in batches_of(file, HASHED):
            for queue, epoch, rows in _queues(batch):
                start = self._start(queue, epoch)
                kept = rows.slice(0, 0 if start is None else None)
                if start:
                    kept = rows.filter(pc.greater_equal(rows["offset"], start))
                self._unchecked.append(len(rows) - len(kept))
                if len(kept):
                    yield kept

    def _start(self, queue: str, epoch: str) -> int | None:
        """The first number of which there are sums; None if an older version archived all."""
        if (queue, epoch) not in self._starts:
            start = self.lake.recorded(since(queue, epoch))
            # Nobody has archived rows of a queue that is not known at all.
            if start is None and self.lake.next(queue, epoch) is None:
                start = 0
            self._starts[queue, epoch] = start
        return self._starts[queue, epoch]

    def _ranges(self, found: Sums) -> set[SummedRange]:
        """Those that have rows, and those that should."""
        every = set(found)
        for queue, epoch in {*self._starts, *self.lake.summed()}:
            if (start := self._start(queue, epoch)) is not None:
                every.update(ranges(queue, epoch, start, self.lake.next(queue, epoch) or 0))
        return every

    def _doubled(self, differing: list[SummedRange]) -> dict[SummedRange, list[int]]:
        """Some numbers in these ranges that are in several rows."""
        numbers: dict[SummedRange, list[Any]] = {of: [] for of in differing}
        for file in self._files if differing else ():
            for batch in batches_of(file, ["offset", "queue", "epoch"]):
                for queue, epoch, rows in _queues(batch):
                    told = np.asarray(rows["offset"])
                    for of in differing:
                        if of[:2] == (queue, epoch):
                            numbers[of].append(told[(told >= of.first) & (told <= of.last)])
        twice = {}
        for of, found in numbers.items():
            each, counts = np.unique(np.concatenate(found or [[]]), return_counts=True)
            twice[of] = each[counts > 1][:DOUBLED_MAX].tolist()
        return twice


def _queues(batch: pa.RecordBatch) -> Iterator[tuple[str, str, pa.RecordBatch]]:
    """The rows of each queue and epoch."""
    pairs = pa.table([batch["queue"], batch["epoch"]], ["queue", "epoch"])
    distinct = pairs.group_by(["queue", "epoch"]).aggregate([]).to_pylist()
    for pair in distinct:
        rows = batch
        if len(distinct) > 1:
            is_of = (pc.equal(batch[name], told) for name, told in pair.items())
            rows = batch.filter(pc.and_(*is_of))
        yield pair["queue"], pair["epoch"], rows
