"""`format("mqks")` for Spark: queues as a batch or a stream, and rows published as messages.

    spark.dataSource.register(MqksDataSource)      # once for each session
    spark.readStream.format("mqks").option("queue", "clicks").load()

A stream's offset is {"epoch": text, "offset": number}: the next number to read, and the epoch in
which it means something. Of several queues, it is {"queues": {name: offset}}.

The one rule: the content of a batch depends only on its two offsets, so that Spark may plan and
read it any number of times, in any process.
"""

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyspark
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StringType, StructField, StructType

from mqks.client.errors import ClientError
from mqks.limits import SEQ_MAX
from mqks.pipeline import columns
from mqks.pipeline.columns import FIELDS
from mqks.pipeline.errors import BadOption, PipelineError
from mqks.pipeline.older import (
    HAS_LIMITS,
    TAKES_ARROW,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
    to_arrow_schema,
)
from mqks.pipeline.options import (
    EARLIEST,
    ERROR,
    LATEST,
    Places,
    ReadPlace,
    has_many,
    read_options,
    unknown,
    write_options,
)
from mqks.pipeline.reader import LogRange, QueueReader, lost, matching, parts
from mqks.pipeline.sink import BatchWriter, RowsStreamWriter, StreamWriter
from mqks.pipeline.wire import QueueConnection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = from_arrow_schema(columns.SCHEMA)
QUEUE = StructField("queue", StringType())
"""Besides, of several queues."""
ROWS_PER_PARTITION = 500_000
"""Of a batch, unless `minPartitions` asks for more partitions: enough for a task to be worth it."""

_log = logging.getLogger("mqks.pipeline")

Offset = dict[str, Any]
_PASSING = (OSError, ClientError, PipelineError)
"""What may be over by the next time."""


class MqksDataSource(DataSource):
    """Queues of an MQKS server; docs/spark.md lists the options and columns."""

    @classmethod
    def name(cls) -> str:
        return "mqks"

    def schema(self) -> StructType:
        return StructType([*SCHEMA, QUEUE]) if has_many(self.options) else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return BatchReader(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return (StreamReader if HAS_LIMITS else UnlimitedStreamReader)(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        made = StreamWriter if TAKES_ARROW else RowsStreamWriter
        return made(write_options(self.options), schema, overwrite)


def register(spark: "SparkSession") -> None:
    """Register `format("mqks")` in a session."""
    spark.dataSource.register(MqksDataSource)


def offsets_behind(source: Mapping[str, Any]) -> dict[str, float]:
    """By how many numbers a stream is behind the ends of its queues, of one of the `sources` in the
    progress of a query: `minOffsetsBehindLatest`, `maxOffsetsBehindLatest` and
    `avgOffsetsBehindLatest`, which Spark's source for Kafka has among its metrics, and a source in
    Python cannot. Empty where it is not known."""
    told = [source[name] for name in ("endOffset", "latestOffset")]
    if not HAS_LIMITS or not all(text.startswith("{") for text in told):  # Its null is a text, too.
        return {}
    ends, latest = (offset.get("queues", {"": offset}) or {} for offset in map(json.loads, told))
    behind = [
        after["offset"] - ends[queue]["offset"]
        for queue, after in latest.items()
        if queue in ends and ends[queue]["epoch"] == after["epoch"]
    ]
    if not behind:
        return {}
    return {
        "minOffsetsBehindLatest": min(behind),
        "maxOffsetsBehindLatest": max(behind),
        "avgOffsetsBehindLatest": sum(behind) / len(behind),
    }


@dataclass(frozen=True)
class Slice(InputPartition):
    """What one task reads: numbers from `start` up to `end`."""

    queue: str
    epoch: str
    start: int
    end: int


class _Query:
    """What batch and stream have in common: the options, the columns, and how a task reads."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = read_options(options)
        self._schema = _arrow_schema(schema, self.options.has_many)
        for place in (self.options.start, self.options.end) if self.options.has_many else ():
            if isinstance(place, ReadPlace) and place.offset not in (EARLIEST, LATEST):
                raise BadOption('of several queues, name the number of each: {"queue": number}')

    def _log(self, queue: str, connection: QueueConnection | None = None) -> QueueReader:
        options = self.options
        return QueueReader(
            None,
            queue,
            connection=connection,
            server=options.server,
            schema=self._schema,
            fetch_rows=options.fetch_rows,
            meta=options.include_headers,
        )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of a slice. A task resumes by itself when the server goes away and comes
        back: `local[n]` runs no task twice, so that a restart of the server would end the query."""
        if not isinstance(partition, Slice):  # An empty plan: Spark makes one partition of none.
            return
        at = self._schema.get_field_index(QUEUE.name)
        with self._log(partition.queue) as log:
            for batch in log.read(
                partition.start,
                partition.end,
                epoch=partition.epoch,
                fail_on_data_loss=self.options.fail_on_data_loss,
            ):
                if at >= 0:
                    queues = pa.repeat(pa.scalar(partition.queue), len(batch))
                    batch = batch.set_column(at, self._schema.field(at), queues)
                yield batch

    def _slices(self, queue: str, epoch: str, start: int, end: int, count: int) -> list[Slice]:
        return [Slice(queue, epoch, *part) for part in parts(start, end, count)]

    def _check(self, queue: str, epoch: str, start: int, log: LogRange | None) -> None:
        """Whether everything from this offset on is still there. Raises DataLost, or warns."""
        what = _broken(queue, epoch, start, log)
        if log is not None and not what and start < log.first:
            what = f"messages {start} to {log.first - 1} of the queue {queue} are gone"
        if what:
            lost(what, self.options.fail_on_data_loss)

    def _queues(self, connection: QueueConnection) -> list[str]:
        return matching(connection, *self.options.queues)

    def _start(self, queue: str, log: LogRange, otherwise: str) -> int:
        """The number that the options say to begin with. Raises BadOption."""
        place = _place(self.options.start, queue, otherwise)
        number = self._resolved("startingOffsets", place, log)
        is_late = place.time_us is not None and number == log.next
        if is_late and self.options.strategy == ERROR:
            raise BadOption(f"nothing arrived in the queue {queue} at the starting time or later")
        return number

    def _resolved(self, option: str, place: ReadPlace, log: LogRange) -> int:
        """The number of a place. Raises BadOption."""
        if place.time_us is not None:
            return log.next if log.at is None else log.at
        if place.offset == EARLIEST:
            return log.first
        if place.offset == LATEST:
            return log.next
        number = int(place.offset)
        if place.epoch not in ("", log.epoch):
            raise BadOption(f"{option} has an old epoch: the queue was deleted and created again")
        if number > log.next:
            what = f"{option} is {number}, but the queue ends at {log.next}"
            if self.options.fail_on_data_loss:
                raise BadOption(what)
            lost(what, False)
        return min(number, log.next)


class BatchReader(_Query, DataSourceReader):
    """Everything between two offsets, as it is when the query is planned."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        start = self.options.start
        if ReadPlace(LATEST) in (start.values() if isinstance(start, dict) else (start,)):
            raise BadOption(
                "startingOffsets is latest, but a batch ends there: use earliest or a number"
            )

    def partitions(self) -> Sequence[InputPartition]:
        with closing(QueueConnection(self.options.server)) as connection:
            return [
                each
                for queue in self._queues(connection)
                for each in self._planned(queue, self._log(queue, connection))
            ]

    def _planned(self, queue: str, reader: QueueReader) -> list[Slice]:
        options = self.options
        until = _place(options.end, queue, LATEST)
        log = reader.range(_place(options.start, queue, EARLIEST).time_us)
        start = self._start(queue, log, EARLIEST)
        end = self._resolved("endingOffsets", until, reader.range(until.time_us))
        if start >= end:
            return []
        self._check(queue, log.epoch, start, log)
        start = max(start, min(end, log.first))
        count = max(options.partitions_min or 1, -(-(end - start) // ROWS_PER_PARTITION))
        return self._slices(queue, log.epoch, start, end, count)


class StreamReader(_Query, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Queues as a stream; those that come later are read from their first message on. Spark keeps
    one in a process of its own to plan batches, and others in the tasks to read them.

    If it did not say that it supports the trigger availableNow, Spark would read everything in one
    batch then, and ask for no limit.
    """

    _passing: tuple[type[Exception], ...] = _PASSING

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        for name in ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"):
            if name in options:
                raise BadOption(f"{name} cannot be used for a stream, which has no end")
        self._targets: dict[str, LogRange] | None = None
        self._advanced_s = -math.inf
        """When a batch last did not wait for more messages, by the monotonic clock."""
        # Kept, since a batch is planned every second; it gives up soon, as Spark asks again.
        self._connection = QueueConnection(replace(self.options.server, retries=1))

    def initialOffset(self) -> Offset:
        # Spark keeps this nowhere, and asks again when the query starts anew before its first
        # batch is done: `latest` would be another number by then, and rows would be lost. So it
        # names no number. The first batch is empty and ends where the stream begins, and that end
        # is in the checkpoint.
        with closing(QueueConnection(self.options.server)) as connection:
            for queue in self._queues(connection):
                # What is mistyped ends the query here, at its start.
                time_us = _place(self.options.start, queue, LATEST).time_us
                self._start(queue, self._log(queue, connection).range(time_us), LATEST)
        return self._packed(None)

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        with closing(QueueConnection(self.options.server)) as connection:
            self._targets = self._look(connection)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        begun = self._unpacked(start)
        told = dict(begun or {})
        # An exception here would end the query, even for a server that is back in a second.
        try:
            # With targets nobody is asked: where the server is away, the stream must not look as
            # if it were at its end.
            logs = self._look(self._connection) if self._targets is None else self._targets
            most = self._most(told, logs, limit)
            for queue, offset in (begun or {}).items():
                if after := self._latest(queue, offset, most.get(queue, 0), logs.get(queue)):
                    told[queue] = after
                else:
                    del told[queue]
            for queue in [queue for queue in logs if queue not in (begun or {})]:
                log = logs[queue]
                waits = log.at is not None and not self.options.strategy
                first = self._start(queue, log, LATEST) if begun is None or waits else log.first
                if not waits or first < log.next:  # What comes next may be of before that time.
                    told[queue] = self._begun(log, first)
        except self._passing as error:
            names = ", ".join(self.options.queues)
            _log.warning("no new offset of the queue %s: %s", names, error)
            return start
        return self._packed(told)

    def reportLatestOffset(self) -> Offset | None:
        try:
            logs = self._look(self._connection)
        except _PASSING:
            return None
        return self._packed({queue: _offset(log.epoch, log.next) for queue, log in logs.items()})

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        begun, until = self._unpacked(start) or {}, self._unpacked(end) or {}
        return [
            each
            for queue, after in until.items()
            # Another Spark may go on with a checkpoint, so each knows a first batch of the others.
            if (before := begun.get(queue) or after.get("from", after)) != after
            for each in self._planned(queue, before, after)
        ]

    def commit(self, end: Offset) -> None:
        # Nothing is trimmed here: Spark calls this only while it plans the next batch that is not
        # empty, never after the last one, and not at all when the query ends.
        pass

    def stop(self) -> None:
        self._connection.close()

    def _look(self, connection: QueueConnection) -> dict[str, LogRange]:
        """The logs as they are now, of the queues that are there."""
        found = {}
        for queue in self._queues(connection):
            time_us = _place(self.options.start, queue, LATEST).time_us
            found[queue] = self._log(queue, connection).range_if_there(time_us)
        return {queue: log for queue, log in found.items() if log is not None}

    def _most(
        self, told: dict[str, Offset], logs: dict[str, LogRange], limit: ReadLimit
    ) -> dict[str, int]:
        """How many of its new numbers each queue may have now: an equal part of the limit, and of
        what others leave."""
        new = {
            queue: max(0, log.next - max(log.first, _position(told[queue])[1]))
            for queue, log in logs.items()
            if queue in told
        }
        delay_s, now_s = self.options.trigger_delay_s, time.monotonic()
        least = 0 if self._targets is not None else self.options.offsets_per_trigger_min
        if sum(new.values()) < least and now_s - self._advanced_s < delay_s:
            return dict.fromkeys(new, 0)
        self._advanced_s = now_s
        most, left = dict[str, int](), limit.max_rows if isinstance(limit, ReadMaxRows) else SEQ_MAX
        for count, queue in enumerate(sorted(new, key=new.__getitem__)):
            most[queue] = min(new[queue], max(1, left // (len(new) - count)))
            left -= most[queue]
        return most

    def _begun(self, log: LogRange, first: int) -> Offset:
        """The end of the first batch of a queue."""
        return _offset(log.epoch, first)

    def _latest(self, queue: str, start: Offset, most: int, log: LogRange | None) -> Offset:
        """The end of the next batch; empty for a queue that is gone."""
        epoch, number = _position(start)
        if what := _broken(queue, epoch, number, log):
            # An offset of another life, or one that goes back, would be written into the checkpoint
            # without a word. This one makes Spark plan a batch, and planning it raises DataLost; if
            # the old queue is there again by then, the batch is empty and the stream goes on.
            if self.options.fail_on_data_loss:
                return _offset(epoch, number) | {"lost": what}
            lost(what, False)
            if log is None:
                return {} if self.options.has_many else start
            return _offset(log.epoch, log.next if epoch == log.epoch else log.first)
        assert log is not None
        end = max(number, log.first) + most
        return start if end == number else _offset(epoch, end)

    def _planned(self, queue: str, start: Offset, end: Offset) -> list[Slice]:
        (epoch, first), (epoch_then, after) = _position(start), _position(end)
        if "lost" in end:
            with self._log(queue) as reader:
                self._check(queue, epoch, first, reader.range_if_there())
        if epoch != epoch_then or first >= after:
            return []  # It goes on with what is there.
        try:
            log = self._log(queue, self._connection).range_if_there()
        except _PASSING:
            pass  # The tasks wait for the server, and check what they get.
        else:
            self._check(queue, epoch, first, log)
            if log is None:
                return []
        return self._slices(queue, epoch, first, after, self.options.partitions_min or 1)

    def _packed(self, told: dict[str, Offset] | None) -> Offset:
        """The stream's offset, of those of its queues; None before the first batch."""
        if self.options.has_many:
            return {"queues": told}
        return (told or {}).get(self.options.queues[0], _NOWHERE)

    def _unpacked(self, offset: Offset) -> dict[str, Offset] | None:
        if self.options.has_many:
            queues: dict[str, Offset] | None = offset["queues"]
            return queues
        return {self.options.queues[0]: offset} if offset["epoch"] else None


class UnlimitedStreamReader(StreamReader):
    """For a Spark that gives each batch all that is new, and does not say where it begins.

    Its availableNow is one batch. So the first one is not empty: its end has its begin, too. And a
    server that is away is an error: it must not look like the end of the stream.
    """

    _passing = ()

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        for name in ("maxOffsetsPerTrigger", "minOffsetsPerTrigger"):
            if name in options:
                raise BadOption(f"{name} needs PySpark 4.2: {_NO_LIMIT}")
        self._connection = QueueConnection(self.options.server)
        self._next = self._packed(None)
        """Where the next batch begins."""

    def initialOffset(self) -> Offset:
        _log.warning(_NO_LIMIT)
        return super().initialOffset()

    def latestOffset(self) -> Offset:  # type: ignore[override]
        self._next = super().latestOffset(self._next, ReadAllAvailable())
        return self._next

    def _begun(self, log: LogRange, first: int) -> Offset:
        return _offset(log.epoch, log.next) | {"from": _offset(log.epoch, first)}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._next = end  # A query that goes on plans an empty batch first, at its place.
        return super().partitions(start, end)


_NO_LIMIT = f"PySpark {pyspark.__version__} gives a batch of a stream all that is new"
_NOWHERE: Offset = {"epoch": "", "offset": -1}
"""Of a queue before its first batch."""


def _broken(queue: str, epoch: str, start: int, log: LogRange | None) -> str:
    """Why the log cannot go on from this offset; empty where it can."""
    if log is None:
        return f"the queue {queue} was deleted after {start} was read"
    if epoch != log.epoch:
        return f"the queue {queue} was deleted and created again after {start} was read"
    if start > log.next:
        return f"the queue {queue} ends at {log.next}, and {start} was seen before"
    return ""


def _place(bound: Places | None, queue: str, otherwise: str) -> ReadPlace:
    """Of a queue; those that are not named begin and end as without the option."""
    if isinstance(bound, ReadPlace):
        return bound
    return (bound or {}).get(queue, ReadPlace(otherwise))


def _offset(epoch: str, number: int) -> Offset:
    return {"epoch": epoch, "offset": number}


def _position(offset: Offset) -> tuple[str, int]:
    return offset["epoch"], offset["offset"]


def _arrow_schema(schema: StructType, has_many: bool) -> pa.Schema:
    """The columns asked for. Raises BadOption for those that a message does not have."""
    known = FIELDS | ({QUEUE.name: pa.string()} if has_many else {})
    wanted = to_arrow_schema(schema)
    for field in wanted:
        if field.name not in known:
            raise unknown("column", field.name, known)
        if field.type != known[field.name]:
            raise BadOption(f"the column {field.name} is {known[field.name]}, not {field.type}")
    return wanted
