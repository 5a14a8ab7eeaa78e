"""A batch in its tasks: read from the broker, payloads parsed, rows staged.

    read ─► the messages of each type ─┬─► good ─► files
                                       ├─► bad  ─► files of the lake of bad rows, if there is one
                                       └─► left ─► numbers; Spark parses their payloads

The one rule: what is left is read again, and no other message passes through the JVM.
"""

import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, repeat
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mqks.pipeline.columns import FIELDS, ORIGIN, PROPERTIES, subset
from mqks.pipeline.errors import LakeUnfit
from mqks.pipeline.lake import PIECE_BYTES, WRITTEN, File, Stages, stage
from mqks.pipeline.payloads import parsed_here, read_as
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.records import RecordSchema
from mqks.pipeline.session import yields
from mqks.pipeline.upsert import Upsert, empty

_OWN = subset(("key", "value", "topic", "offset", "timestamp"))
READ = pa.schema([*_OWN, ORIGIN, *PROPERTIES])
_PARSED_ROWS, _LEFT_ROWS = 4096, 256
"""So many payloads are parsed at once, and halves of them, down to so many, if one does not fit."""

_Numbers = tuple[int, int]
"""From the first to, not including, the second."""


class Staged(NamedTuple):
    """What a task has made of its messages."""

    good: list[File]
    bad: list[File]
    left: list[tuple[int, _Numbers]]
    """Of messages of one type, those that Spark is to parse."""


class Payloads(NamedTuple):
    """How the payloads of some events are parsed."""

    pattern: str
    kind: pa.DataType
    named: pa.DataType
    """That of the payloads with the names of the lake."""
    records: RecordSchema | None
    """The schema of payloads that are not JSON."""


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """What the tasks of a batch need; pickles."""

    reader: QueueReader
    queue: str
    epoch: str
    start: int
    ranges: list[_Numbers]
    archived_us: int
    staging: Stages
    fail_on_data_loss: bool
    leaves_out: bool
    """Whether replayed messages that the lake has are left out."""
    types: Sequence[Payloads] = ()
    """The first whose pattern finds the event counts."""
    only: int | None = None
    """Only messages of this one of the types."""
    bad: Stages | None = None
    """Where those go that do not fit, if not with the others."""
    bad_start: int = 0
    """Those with lower numbers are there."""
    upsert: Upsert | None = None

    def read(self, ranges: Iterable[_Numbers]) -> Iterator[pa.RecordBatch]:
        """The messages of a task, with the columns of a file."""
        yields()
        with self.reader as reader:
            for start, end in ranges:
                fail = self.fail_on_data_loss
                batches = reader.read(start, end, epoch=self.epoch, fail_on_data_loss=fail)
                yield from map(self._complete, batches)

    def _complete(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """A replayed message that the lake has already gets no topic."""
        columns = batch.columns[: len(_OWN)]
        origin, *properties = batch.columns[len(_OWN) :]
        queue, epoch, offset = origin.flatten()
        if self.leaves_out and origin.null_count < len(origin):
            is_own = pc.and_(pc.equal(queue, self.queue), pc.equal(epoch, self.epoch))
            is_here = pc.and_(is_own, pc.less(offset, self.start))
            topic = batch.schema.get_field_index("topic")
            columns[topic] = pc.if_else(pc.fill_null(is_here, False), None, columns[topic])
        archived = pa.scalar(self.archived_us, pa.int64()).cast(FIELDS["timestamp"])
        same = [pa.repeat(value, len(batch)) for value in (self.queue, self.epoch, archived)]
        columns += [*same, queue, epoch, offset, *properties]
        return pa.RecordBatch.from_arrays(columns, schema=WRITTEN)

    def read_and_stage(self, ranges: Iterable[_Numbers]) -> Iterator[Staged]:
        """From the broker to the files within one process."""
        staged = Staged([], [], [])
        rows = self._with_data(self.read(ranges), staged)
        staged.good.extend(stage(self.staging, self._good(rows, staged.bad)))
        yield staged

    def _with_data(
        self, batches: Iterable[pa.RecordBatch], staged: Staged
    ) -> Iterator[pa.RecordBatch]:
        for which, batch in self._by_type(batches):
            if which is None:
                yield batch
                continue
            _, kind, named, records = self.types[which]
            if records:
                yield from self._decoded(batch, kind, named, records)
                continue
            is_known = read_as(kind) is not None
            size = _PARSED_ROWS if is_known else len(batch)
            pieces = [batch.slice(at, size) for at in range(0, len(batch), size)]
            while pieces:
                rows = pieces.pop(0)
                half = len(rows) // 2
                data = parsed_here(rows["value"], kind)
                if data is not None:
                    yield rows.append_column("data", data if kind == named else data.view(named))
                elif half >= _LEFT_ROWS and is_known:
                    pieces[:0] = rows.slice(0, half), rows.slice(half)
                else:
                    numbers = rows["offset"]
                    staged.left.append((which, (numbers[0].as_py(), numbers[-1].as_py() + 1)))

    def _decoded(
        self, batch: pa.RecordBatch, kind: pa.DataType, named: pa.DataType, records: RecordSchema
    ) -> Iterator[pa.RecordBatch]:
        """With `data`, and `bad` if bad rows have a place."""
        for at in range(0, len(batch), _PARSED_ROWS):
            rows = batch.slice(at, _PARSED_ROWS)
            data, why = records.decoded(rows["value"], kind)
            whole = rows.append_column("data", data if kind == named else data.view(named))
            yield whole if self.bad is None else whole.append_column("bad", why)

    def _by_type(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[tuple[int | None, pa.RecordBatch]]:
        """The messages of each type, and of none."""
        if not self.types:
            yield from zip(repeat(None), batches)
            return
        for batch in batches:
            if self.upsert:  # An empty payload deletes, and is not parsed.
                is_empty = empty(batch)
                yield None, batch.filter(is_empty)
                batch = batch.filter(pc.invert(is_empty))
            events = batch["topic"].dictionary_encode("encode")
            found = [self._type(event) for event in events.dictionary.to_pylist()]
            for which in {*found}:
                own = [at for at, each in enumerate(found) if each == which]
                is_own = pc.is_in(events.indices, pa.array(own, events.indices.type))
                yield which, batch if len(own) == len(found) else batch.filter(is_own)

    def _type(self, event: str | None) -> int | None:
        return None if event is None else first_of((each.pattern for each in self.types), event)

    # Two steps for Spark's expressions to stand between: of the messages only the payloads pass
    # through Java as rows, beside the first of which is the whole batch.

    def read_rows(self, tasks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        ranges = (self.ranges[number] for task in tasks for number in task["id"].to_pylist())
        for which, batch in self._by_type(self.read(ranges)):
            if which != self.only:
                continue
            whole = [batch.serialize().to_pybytes(), *[None] * (len(batch) - 1)]
            yield pa.RecordBatch.from_pydict({"value": batch["value"], "batch": whole})

    def stage_rows(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yields()
        staged = Staged([], [], [])
        staged.good.extend(stage(self.staging, self._good(_joined(rows), staged.bad)))
        yield pa.RecordBatch.from_pydict({"staged": [pickle.dumps(staged)]})

    def _good(
        self, batches: Iterable[pa.RecordBatch], bad_files: list[File]
    ) -> Iterator[pa.RecordBatch]:
        """What is not bad; the bad rows are staged. Everything, if these have no place. Raises
        LakeUnfit for a message without a key, which has none then."""
        bad, size = list[pa.RecordBatch](), 0
        for batch in batches:
            why = batch["bad"] if "bad" in batch.schema.names else None
            if self.upsert:
                why = self.upsert.keyless(pa.Table.from_batches([batch]), why)
            if why is None:
                yield batch
                continue
            is_bad = pc.and_(why.is_valid(), batch["topic"].is_valid())
            names = batch.schema.names
            if self.bad is None:
                if len(numbers := batch["offset"].filter(is_bad)):
                    raise LakeUnfit(
                        f"the message {numbers[0]} of the queue {self.queue} has no key of this"
                        " table: archive such messages into another lake by --bad-rows"
                    )
                yield batch
                continue
            good = batch.drop_columns(["bad"]) if "bad" in names else batch
            yield good.filter(pc.invert(is_bad))
            is_new = pc.and_(is_bad, pc.greater_equal(batch["offset"], self.bad_start))
            told = good.drop_columns(["data"]) if "data" in names else good
            bad.append(told.append_column("data", why).filter(is_new))
            size += bad[-1].nbytes
            if size >= PIECE_BYTES:
                bad_files += stage(self.bad, bad)
                bad, size = [], 0
        if self.bad is not None and size:
            bad_files += stage(self.bad, bad)


def warmed(tasks: Iterable[int]) -> Iterable[int]:
    """Nothing: a worker that was asked has this module and what it imports, and pandas, which Arrow
    imports for its first array."""
    pa.array([0])
    return []


def first_of(patterns: Iterable[str], event: str) -> int | None:
    """Which of them is the first that finds the event."""
    return next((at for at, each in enumerate(patterns) if re.search(each, event)), None)


def _joined(rows: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Each `batch` with the other columns of its rows and of those behind it."""
    batch, told = None, list[pa.RecordBatch]()
    for some in rows:
        starts = np.flatnonzero(some["batch"].is_valid()).tolist()
        for start, end in pairwise(sorted({0, *starts, len(some)})):
            if start in starts:
                if batch is not None:
                    yield _beside(batch, told)
                batch = pa.ipc.read_record_batch(some["batch"][start].as_py(), WRITTEN)
                told = []
            told.append(some.slice(start, end - start).drop_columns(["batch"]))
    if batch is not None:
        yield _beside(batch, told)


def _beside(batch: pa.RecordBatch, told: list[pa.RecordBatch]) -> pa.RecordBatch:
    whole = pa.concat_batches(told)
    schema = pa.schema([*batch.schema, *whole.schema])
    return pa.RecordBatch.from_arrays([*batch.columns, *whole.columns], schema=schema)
