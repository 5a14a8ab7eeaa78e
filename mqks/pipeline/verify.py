"""Whether a lake has exactly the rows that were archived into it, and those that its queues have.

The one rule: rows are compared with what the commits have recorded of them, and with what the
broker still has; nothing is changed, here or there.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqks.pipeline.batch import READ
from mqks.pipeline.columns import ORIGIN
from mqks.pipeline.errors import LakeUnfit
from mqks.pipeline.lake import Lake
from mqks.pipeline.objects import Place
from mqks.pipeline.places import existing, parts_of
from mqks.pipeline.reader import LogRange, QueueReader
from mqks.pipeline.sums import (
    HASHED,
    Sum,
    SummedRange,
    Sums,
    added,
    batches_of,
    hashes_of,
    ranges,
    recorded_sum,
    since,
    sums_of,
)
from mqks.pipeline.wire import QueueConnection, ServerAddress

DOUBLED_MAX = 10
"""Numbers that are told of each difference."""
WINDOW = 1 << 22
"""Messages of the broker that are compared in one reading of the lake, with 24 bytes for each."""


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
class Discrepancy:
    """Numbers of a queue that the broker has otherwise than the lake."""

    queue: str
    epoch: str
    first: int
    last: int | None
    """None: all later ones."""
    reason: str

    def __str__(self) -> str:
        last = "on" if self.last is None else f"to {self.last}"
        numbers = f"numbers from {self.first} {last}"
        return f"queue {self.queue}, epoch {self.epoch}, {numbers}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Verified:
    """What `Verification.run` found."""

    messages: int
    """Rows in ranges without a difference."""
    queues: int
    unchecked: int
    """Rows that a version without sums has archived."""
    differences: list[Difference]


@dataclass(slots=True)
class Compared:
    """What the broker still has of what is archived."""

    messages: int = 0
    """Those that the lake has as well."""
    differences: list[Discrepancy] = field(default_factory=list)


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

    @property
    def queues(self) -> set[tuple[str, str]]:
        """Those that `run` has found, with their epochs."""
        return {*self._starts}

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


def compared(
    place: Place, queues: Iterable[tuple[str, str]], server: ServerAddress, bad: Place | None = None
) -> Compared:
    """Of these queues and epochs of a lake; `bad` is the lake of its bad rows. Raises LakeUnfit,
    RequestFailed and OSError."""
    found = Compared()
    with closing(QueueConnection(server)) as connection, ExitStack() as opened:
        readers = {
            queue: QueueReader(None, queue, schema=READ, meta=True, connection=connection)
            for queue, _ in queues
        }
        # Before the lake is opened: an archive trims what it has committed.
        logs = {queue: reader.range_if_there() for queue, reader in readers.items()}
        lake, *tables = (opened.enter_context(existing(part)) for part in parts_of(place))
        holders = [*(tables or [lake])]
        if holders[0].layout.upsert:
            raise LakeUnfit(f"{place} has only the last value of each key: leave out --url")
        if bad is not None:
            holders.append(opened.enter_context(existing(bad)))
        for queue, epoch in sorted(queues):
            # Else it is an older epoch, or of a loss that an archive was told to accept.
            if lake.knows(queue) and not lake.knows(queue, epoch):
                one = _Comparison(found, lake, holders, queue, epoch, readers[queue])
                found.differences += one.run(logs[queue])
    return found


@dataclass
class _Comparison:
    """Of a lake with a queue of the broker."""

    found: Compared
    lake: Lake
    """Which knows how far the queue is archived."""
    holders: Sequence[Lake]
    """Which have the rows."""
    queue: str
    epoch: str
    reader: QueueReader

    def run(self, log: LogRange | None) -> Iterator[Discrepancy]:
        told, lake = partial(Discrepancy, self.queue, self.epoch), self.lake
        done = lake.next(self.queue, self.epoch) or 0
        came_us = lake.arrived_us(self.queue, self.epoch)
        if log is None or log.epoch != self.epoch:
            has = "has no such queue" if log is None else "has this queue under another epoch"
            yield told(done, None, f"the broker {has}: whether they were archived is not known")
            return
        if log.first > done:
            gone = "neither in the lake nor in the queue: consumed, expired or trimmed by others"
            yield told(done, log.first - 1, gone)
        later = self.reader.range(None if came_us is None else came_us + 1)
        end = done if later.at is None else min(done, later.at)
        if end < done:
            yield told(end, done - 1, "the broker has others: an older state of it was restored")
        # Of earlier ones an older version has archived less.
        since_ = lake.recorded(since(self.queue, self.epoch))
        start = max(log.first, done if since_ is None else since_)
        while start < end:
            taken = self._window(start, end)
            if not len(taken):
                return
            yield from self._differing(*taken)
            start = int(taken[0][-1]) + 1

    def _window(self, start: int, end: int) -> list[Any]:
        """The numbers and hashes of messages of the broker, and which of them repeat one that an
        archive has, and may have left out."""
        columns: list[tuple[Any, ...]] = []
        count = 0
        for batch in self.reader.read(start, end):
            queue, epoch, offset = batch[ORIGIN.name].flatten()
            is_own = pc.and_(pc.equal(queue, self.queue), pc.equal(epoch, self.epoch))
            is_own = pc.and_(is_own, pc.less(offset, batch["offset"]))
            columns.append((*hashes_of(batch), np.asarray(pc.fill_null(is_own, False))))
            count += len(batch)
            if count >= WINDOW:
                break
        return [*map(np.concatenate, zip(*columns, strict=True))]

    def _differing(self, numbers: Any, hashes: Any, is_own: Any) -> Iterator[Discrepancy]:
        is_there, is_same = np.zeros((2, len(numbers)), bool)

        def look(file: Place) -> None:
            for batch in batches_of(file, HASHED):
                for queue, epoch, rows in _queues(batch):
                    if (queue, epoch) == (self.queue, self.epoch):
                        told, hashed = hashes_of(rows)
                        at = np.minimum(np.searchsorted(numbers, told), len(numbers) - 1)
                        here = numbers[at] == told
                        is_there[at[here]] = True
                        is_same[at[here]] |= (hashes[at] == hashed)[here]

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            [*threads.map(look, chain(*(lake.contents() for lake in self.holders)))]
        self.found.messages += int(is_same.sum())
        wrong = numbers[~is_same & (is_there | ~is_own)]
        if len(wrong):
            what = "the lake lacks these messages of the queue, or has others: "
            what += ", ".join(map(str, wrong[:DOUBLED_MAX]))
            if (more := len(wrong) - DOUBLED_MAX) > 0:
                what += f" and {more:,} more"
            yield Discrepancy(self.queue, self.epoch, int(wrong[0]), int(wrong[-1]), what)


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
