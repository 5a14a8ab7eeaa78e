"""`format("mqks")` for Spark: queues as a batch or a stream, and rows published as messages.

    spark.dataSource.register(MqksDataSource)      # once for each session
    spark.readStream.format("mqks").option("queue", "clicks").load()

A stream's offset is {"epoch": text, "offset": number}: the next number to read, and the epoch in
which it means something. Of several queues, it is {"queues": {name: offset}}.

The one rule: the content of a batch depends only on its two offsets, so that Spark may plan and
read it any number of times, in any process.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from mqks.client.errors import ClientError
from mqks.pipeline.columns import FIELDS
from mqks.pipeline.errors import BadOption, PipelineError
from mqks.pipeline.options import (
    EARLIEST,
    LATEST,
    Place,
    ReadOptions,
    near,
    read_options,
    write_options,
)
from mqks.pipeline.reader import LogRange, QueueReader, lost, matching
from mqks.pipeline.sink import BatchWriter, StreamWriter
from mqks.pipeline.wire import Connection

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = (
    StructType()
    .add("key", BinaryType())
    .add("value", BinaryType())
    .add("topic", StringType())
    .add("partition", IntegerType())
    .add("offset", LongType())
    .add("timestamp", TimestampType())
    .add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
)
QUEUE = StructField("queue", StringType())
"""Besides, of several queues."""
ROWS_PER_PARTITION = 500_000
"""Of a batch, unless `minPartitions` asks for more partitions: enough for a task to be worth it."""

_log = logging.getLogger("mqks.pipeline")

Offset = dict[str, Any]


class MqksDataSource(DataSource):
    """A queue of an MQKS server; docs/spark.md lists the options and columns."""

    @classmethod
    def name(cls) -> str:
        return "mqks"

    @property
    def _is_mask(self) -> bool:
        return "*" in self.options.get("queue", "")

    def schema(self) -> StructType:
        return StructType([*SCHEMA, QUEUE]) if self._is_mask else SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return (SeveralBatches if self._is_mask else BatchReader)(self.options, schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return (SeveralStreams if self._is_mask else StreamReader)(self.options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(write_options(self.options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamWriter:
        return StreamWriter(write_options(self.options), schema, overwrite)


def register(spark: "SparkSession") -> None:
    """Register `format("mqks")` in a session."""
    spark.dataSource.register(MqksDataSource)


@dataclass(frozen=True)
class Slice(InputPartition):
    """What one task reads: numbers from `start` up to `end`."""

    epoch: str
    start: int
    end: int


class _Query:
    """What batch and stream have in common: the options, the columns, and how a task reads."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self.options = read_options(options)
        self._schema = _arrow_schema(schema)

    def _reader(self, connection: Connection | None = None) -> QueueReader:
        options = self.options
        return QueueReader(
            None,
            options.queue,
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
        with self._reader() as log:
            yield from log.read(
                partition.start,
                partition.end,
                epoch=partition.epoch,
                fail_on_data_loss=self.options.fail_on_data_loss,
            )

    def _slices(self, epoch: str, start: int, end: int, count: int) -> list[Slice]:
        """Equal parts of the numbers, `count` at most."""
        count = max(1, min(count, end - start))
        edges = [start + (end - start) * part // count for part in range(count + 1)]
        return [Slice(epoch, *edge) for edge in pairwise(edges)]

    def _check(self, epoch: str, start: int, log: LogRange) -> None:
        """Whether everything from this offset on is still there. Raises DataLost, or warns."""
        what = self._broken(epoch, start, log)
        if not what and start < log.first:
            what = f"messages {start} to {log.first - 1} of the queue {self.options.queue} are gone"
        if what:
            lost(what, self.options.fail_on_data_loss)

    def _broken(self, epoch: str, start: int, log: LogRange) -> str:
        """Why the log cannot go on from this offset; empty where it can."""
        if epoch != log.epoch:
            queue = self.options.queue
            return f"the queue {queue} was deleted and created again after {start} was read"
        if start > log.next:
            return f"the queue {self.options.queue} ends at {log.next}, and {start} was seen before"
        return ""

    def _start(self, log: LogRange, otherwise: str) -> int:
        """The number that the options say to begin with."""
        if self.options.start_time_us is not None:
            return log.next if log.at is None else log.at
        return _resolved("startingOffsets", self.options.start or Place(otherwise), log)


class BatchReader(_Query, DataSourceReader):
    """Everything between two offsets, as it is when the query is planned."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        if self.options.start == Place(LATEST):
            raise BadOption(
                "startingOffsets is latest, but a batch ends there: use earliest or a number"
            )

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with self._reader() as reader:
            log = reader.range(options.start_time_us)
            until = reader.range(options.end_time_us)
        start = self._start(log, EARLIEST)
        if options.end_time_us is None:
            end = _resolved("endingOffsets", options.end or Place(LATEST), log)
        else:
            end = log.next if until.at is None else min(until.at, log.next)
        if start >= end:
            return []
        self._check(log.epoch, start, log)
        start = max(start, min(end, log.first))
        count = max(options.partitions_min or 1, -(-(end - start) // ROWS_PER_PARTITION))
        return self._slices(log.epoch, start, end, count)


class StreamReader(_Query, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A queue as a stream. Spark keeps one in a process of its own to plan batches, and others in
    the tasks to read them.

    If it did not say that it supports the trigger availableNow, Spark would read everything in one
    batch then, and ask for no limit.
    """

    def __init__(
        self,
        options: Mapping[str, str],
        schema: StructType,
        connection: Connection | None = None,
    ) -> None:
        super().__init__(options, schema)
        for name, given in (
            ("endingOffsets", self.options.end),
            ("endingTimestamp", self.options.end_time_us),
        ):
            if given is not None:
                raise BadOption(f"{name} cannot be used for a stream, which has no end")
        self._target: LogRange | None = None
        self._connection = connection or _planning(self.options)
        """Kept, since a batch is planned every second."""

    def initialOffset(self) -> Offset:
        # Spark keeps this nowhere, and asks again when the query starts anew before its first
        # batch is done: `latest` would be another number by then, and rows would be lost. So it
        # names no number. The first batch is empty and ends where the stream begins, and that end
        # is in the checkpoint.
        with self._reader() as reader:  # What is mistyped ends the query here, at its start.
            self._start(reader.range(self.options.start_time_us), LATEST)
        return {"epoch": "", "offset": -1}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        with self._reader() as reader:
            self._target = reader.range(self.options.start_time_us)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        # An exception here would end the query, even for a server that is back in a second.
        try:
            # With a target nobody is asked: where the server is away, the stream must not look as
            # if it were at its end.
            return self._latest(start, limit, self._target or self._look())
        except _PASSING as error:
            _log.warning("no new offset of the queue %s: %s", self.options.queue, error)
            return start

    def reportLatestOffset(self) -> Offset | None:
        try:
            log = self._look()
        except _PASSING:
            return None
        return _offset(log.epoch, log.next)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        (epoch, first), (epoch_then, after) = _position(start), _position(end)
        if "lost" in end:
            with self._reader() as reader:
                self._check(epoch, first, reader.range())
        if epoch != epoch_then or first >= after:
            return []  # Where the stream begins, or goes on with what is there.
        try:
            log = self._look()
        except _PASSING:
            pass  # The tasks wait for the server, and check what they get.
        else:
            self._check(epoch, first, log)
        return self._slices(epoch, first, after, self.options.partitions_min or 1)

    def commit(self, end: Offset) -> None:
        # Nothing is trimmed here: Spark calls this only while it plans the next batch that is not
        # empty, never after the last one, and not at all when the query ends.
        pass

    def stop(self) -> None:
        self._connection.close()

    def _look(self) -> LogRange:
        """The log as it is now."""
        return self._reader(self._connection).range(self.options.start_time_us)

    def _latest(self, start: Offset, limit: ReadLimit, log: LogRange) -> Offset:
        epoch, number = _position(start)
        if not epoch:
            return _offset(log.epoch, self._start(log, LATEST))
        if what := self._broken(epoch, number, log):
            # An offset of another life, or one that goes back, would be written into the checkpoint
            # without a word. This one makes Spark plan a batch, and planning it raises DataLost; if
            # the old queue is there again by then, the batch is empty and the stream goes on.
            if self.options.fail_on_data_loss:
                return _offset(epoch, number) | {"lost": what}
            lost(what, False)
            return _offset(log.epoch, log.next if epoch == log.epoch else log.first)
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else log.next
        end = max(number, min(log.next, max(number, log.first) + most))
        return start if end == number else _offset(epoch, end)


@dataclass(frozen=True)
class Part(InputPartition):
    """What one task reads of one of several queues."""

    queue: str
    slice: InputPartition


class _Several:
    """The queues whose names match a mask, each read as if it were alone."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        self._given = {name: value for name, value in options.items() if name.lower() != "queue"}
        self._columns = to_arrow_schema(schema, timezone="UTC")
        others = [field for field in schema if field.name != QUEUE.name]
        self._schema = StructType(others or [SCHEMA["offset"]])
        self.options = read_options(options)
        for place in (self.options.start, self.options.end):
            if place is not None and place.offset not in (EARLIEST, LATEST):
                raise BadOption("offsets of several queues can only be earliest or latest")

    def _of(self, queue: str) -> tuple[Mapping[str, str], StructType]:
        return self._given | {"queue": queue}, self._schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, Part):
            return
        for batch in _Query(*self._of(partition.queue)).read(partition.slice):
            queues = pa.repeat(pa.scalar(partition.queue, pa.string()), len(batch))
            each = [queues if name == QUEUE.name else batch[name] for name in self._columns.names]
            yield pa.RecordBatch.from_arrays(each, schema=self._columns)


class SeveralBatches(_Several, DataSourceReader):
    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        BatchReader(*self._of("any"))  # Other options that it refuses.

    def partitions(self) -> Sequence[InputPartition]:
        with closing(Connection(self.options.server)) as connection:
            names = matching(connection, self.options.queue)
        return [
            Part(name, each) for name in names for each in BatchReader(*self._of(name)).partitions()
        ]


class SeveralStreams(_Several, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Queues that come later are read from their first message on."""

    def __init__(self, options: Mapping[str, str], schema: StructType) -> None:
        super().__init__(options, schema)
        self._streams: dict[str, StreamReader] = {}
        self._connection = _planning(self.options)
        StreamReader(*self._of("any"), self._connection)  # Other options that it refuses.
        self._target: list[str] | None = None

    def _stream(self, name: str) -> StreamReader:
        if name not in self._streams:
            self._streams[name] = StreamReader(*self._of(name), self._connection)
        return self._streams[name]

    def _names(self) -> list[str]:
        return matching(self._connection, self.options.queue)

    def initialOffset(self) -> Offset:
        self._names()  # What is mistyped ends the query here, at its start.
        return {"queues": None}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self.options.offsets_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._names()
        for name in self._target:
            self._stream(name).prepareForTriggerAvailableNow()

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        """Each queue may have an equal part of the limit."""
        begun, told = start["queues"], dict(start["queues"] or {})
        try:
            names = self._names() if self._target is None else self._target
            if isinstance(limit, ReadMaxRows):
                limit = ReadMaxRows(max(1, limit.max_rows // max(1, len(names))))
            for name in names:
                stream = self._stream(name)
                if name in told:
                    told[name] = stream.latestOffset(told[name], limit)
                elif begun is None:
                    log = stream._target or stream._look()
                    told[name] = _offset(log.epoch, stream._start(log, LATEST))
                else:
                    log = stream._look()
                    told[name] = _offset(log.epoch, log.first)
        except _PASSING as error:
            _log.warning("no new offset of the queues %s: %s", self.options.queue, error)
            return start
        return {"queues": told}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        begun = start["queues"] or {}
        return [
            Part(name, each)
            for name, after in end["queues"].items()
            if name in begun and begun[name] != after
            for each in self._stream(name).partitions(begun[name], after)
        ]

    def commit(self, end: Offset) -> None:
        pass  # As of one queue.

    def stop(self) -> None:
        self._connection.close()


_PASSING = (OSError, ClientError, PipelineError)
"""What may be over by the next time."""


def _planning(options: ReadOptions) -> Connection:
    """A connection that gives up soon, for who asks again."""
    return Connection(replace(options.server, retries=1))


def _offset(epoch: str, number: int) -> Offset:
    return {"epoch": epoch, "offset": number}


def _position(offset: Offset) -> tuple[str, int]:
    return offset["epoch"], offset["offset"]


def _resolved(option: str, place: Place, log: LogRange) -> int:
    if place.offset == EARLIEST:
        return log.first
    if place.offset == LATEST:
        return log.next
    number = int(place.offset)
    if place.epoch not in ("", log.epoch):
        raise BadOption(f"{option} has an old epoch: the queue was deleted and created again")
    if number > log.next:
        raise BadOption(f"{option} is {number}, but the queue ends at {log.next}")
    return number


def _arrow_schema(schema: StructType) -> pa.Schema:
    """The columns asked for. Raises BadOption for those that a message does not have."""
    wanted = to_arrow_schema(schema, timezone="UTC")
    for field in wanted:
        if field.name not in FIELDS:
            raise BadOption(f"mqks has no column {field.name[:80]}{near(field.name, FIELDS)}")
        if field.type != FIELDS[field.name]:
            raise BadOption(f"the column {field.name} is {FIELDS[field.name]}, not {field.type}")
    return wanted
