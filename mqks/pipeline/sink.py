"""Publishes rows as messages, each exactly once, however often Spark runs a task.

The one rule: the id of a row depends on its content and never on its position in the plan, which
may differ when a task is repeated.
"""

import secrets
from collections import Counter
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from itertools import islice
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import BinaryType, IntegerType, Row, StringType, StructType

from mqks.client import requests
from mqks.client.errors import RequestFailed
from mqks.client.wire import Wire
from mqks.pipeline.columns import FIELDS, replaced
from mqks.pipeline.errors import BadOption, BadRow, PipelineError
from mqks.pipeline.older import DataSourceStreamArrowWriter, to_arrow_schema
from mqks.pipeline.options import WriteOptions, unknown
from mqks.pipeline.wire import Connected, QueueConnection, ServerAddress
from mqks.protocol.escapes import escape

WINDOW_ROWS, WINDOW_BYTES = 10_000, 1024 * 1024
"""Sent before their confirms are read. The confirms fit into what the server buffers for a slow
reader, so that the two sides never wait for each other."""

_QUOTED = "[^!-~]|[%&=,]"
"""Characters that an attribute or an ordering key cannot have as they are."""
_SAFE = "".join({*map(chr, range(33, 127))} - {*"%&=,"})
_TYPES = {"priority": IntegerType, "ordering_key": StringType}
_BAD_IN_NAME = r"^$|^--|[\x00-\x20\x7f]"


class Publisher(Connected):
    """Publishes columns of messages, each id exactly once."""

    def __init__(self, server: ServerAddress) -> None:
        super().__init__(QueueConnection(server))

    def publish(self, ids: Any, events: Any, values: Any, flags: Any = None) -> None:
        """Publish binary arrays of ids, events and data, and of flags, each after a space; returns
        when all are stored on disk.

        After a lost connection, everything unconfirmed is sent again; the server drops duplicates.
        Raises BadRow, which counts rows from 0; RequestFailed, which names the id; OSError.
        """
        size = ids.nbytes + values.nbytes
        rows = max(1, min(WINDOW_ROWS, WINDOW_BYTES * len(values) // max(1, size)))
        for first in range(0, len(values), rows):
            window = [
                None if column is None else column.slice(first, rows)
                for column in (ids, events, values, flags)
            ]
            lines = _lines(first, *window)
            count = min(rows, len(values) - first)
            self._connection.again(partial(_exchange, lines, count))


def _exchange(lines: memoryview, count: int, wire: Wire) -> None:
    wire.send(lines)
    for _ in range(count):
        line = wire.line()
        if line[-4:] != b" ok ":
            request_id, _, text = requests.Reply.parse(line)
            name, error_id = requests.decoded(request_id), requests.decoded(text)
            raise RequestFailed(
                f"the server refused the message {name}, error {error_id}", error_id
            )


def _lines(
    first: int, ids: Any, events: Any, values: Any, flags: Any, escaped: Any = b" "
) -> memoryview:
    """The requests, one after the other, in Arrow's own memory. `escaped` is the flag of those
    whose values are escaped."""
    # One carriage return belongs to the end of a line: behind data that end in one, another goes.
    ends = pc.if_else(pc.ends_with(values, b"\r"), b"\r\n", b"\n")
    told = b"" if flags is None else flags
    words = [ids, b" publish --confirm --once", told, escaped, events, b" ", values, ends, b""]
    lines = pc.binary_join_element_wise(
        *[pa.scalar(word, pa.binary()) if isinstance(word, bytes) else word for word in words]
    )
    if lines.null_count:
        raise BadRow(f"row {first + pc.index(lines.is_null(), True).as_py()} has a null")
    edges = np.frombuffer(lines.buffers()[1], np.int32)[
        lines.offset : lines.offset + len(lines) + 1
    ]
    text = memoryview(lines.buffers()[2])[edges[0] : edges[-1]]
    raw = np.frombuffer(text, np.uint8)
    _check(ids, "key", first)
    _check(events, "topic", first)
    # What would end a line too early, or not be there at its end, shows in the whole at once.
    if np.count_nonzero(raw == 10) > len(lines) or (raw == 9).any():
        is_escaped = pc.match_substring_regex(values, r"[\t\n]")
        raws = values.filter(is_escaped).to_pylist()
        some = pa.array(map(escape, raws), pa.binary())
        values = pc.replace_with_mask(values, is_escaped, some)
        escaped = pc.if_else(is_escaped, b" --escaped ", b" ")
        return _lines(first, ids, events, values, flags, escaped)
    return text


def delivery_flags(priorities: Any, keys: Any) -> Any:
    """The flags for priorities and ordering keys, each after a space; without null, 0 and ""."""
    texts = pc.if_else(pc.equal(priorities, 0), None, priorities).cast(pa.string())
    priority = pc.binary_join_element_wise(" --priority=", texts, "")
    key = pc.binary_join_element_wise(
        " --key=", quoted(pc.if_else(pc.equal(keys, ""), None, keys)), ""
    )
    return pc.binary_join_element_wise(pc.fill_null(priority, ""), pc.fill_null(key, ""), "")


def quoted(words: Any) -> Any:
    """Percent-encoded, as attributes and ordering keys are sent."""
    return replaced(words, _QUOTED, partial(quote, safe=_SAFE))


def _check(column: Any, name: str, first: int) -> None:
    """Raises BadRow for the first row that no id or event can be."""
    at = pc.index(pc.match_substring_regex(column, _BAD_IN_NAME), True).as_py()
    if at >= 0:
        raise BadRow(
            f"row {first + at}: the {name} {column[at].as_py()[:80]!r} must not be empty, begin"
            " with two dashes, or contain spaces or control bytes"
        )


class Published(WriterCommitMessage):
    """What a task tells when all its rows are on disk."""


class _Writer:
    """What batch and stream have in common. Nothing is left for `commit` to do: a message is there
    as soon as it is confirmed, and after an `abort` a repeated job publishes only what is missing.
    """

    def __init__(self, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise BadOption('a queue cannot be overwritten: add .mode("append") before .save()')
        names = schema.fieldNames()
        for field in schema:
            if field.name not in FIELDS:
                raise unknown("column", field.name, FIELDS)
            if field.name in ("key", "value", "topic") and not isinstance(
                field.dataType, (BinaryType, StringType)
            ):
                raise BadOption(f"the column {field.name} is neither binary nor string")
            if (own := _TYPES.get(field.name)) and not isinstance(field.dataType, own):
                raise BadOption(f"the column {field.name} is not {FIELDS[field.name]}")
        if "value" not in names:
            raise BadOption("the column value is missing: the data of each message")
        if "topic" not in names and options.topic is None:
            raise BadOption(
                "the event of each message is missing: add a column topic, or the option topic"
            )
        self._options = options
        taken = ("key", "value", "topic", *_TYPES)
        self._schema = StructType([field for field in schema if field.name in taken])
        self._run = secrets.token_hex(8)

    def _publish(self, batches: Iterator[pa.RecordBatch], run: str) -> Published:
        context = TaskContext.get()
        partition = context.partitionId() if context else 0
        seen: Counter[bytes] = Counter()
        salt = blake2b(f"{run} {partition}".encode()).digest()
        rows = 0
        with Publisher(self._options.server) as publisher:
            for batch in batches:
                try:
                    values = batch["value"].cast(pa.binary())
                    events = self._events(batch)
                    ids = _ids(batch, events, values, salt, seen)
                    publisher.publish(ids, events, values, _flags(batch))
                except BadRow as bad:
                    raise BadRow(
                        f"partition {partition}, after its first {rows} rows: {bad}"
                    ) from None
                rows += len(batch)
        return Published()

    def _events(self, batch: pa.RecordBatch) -> Any:
        topic = self._options.topic
        if topic is not None:  # As with Kafka, the option goes before the column.
            return pa.repeat(pa.scalar(topic.encode(), pa.binary()), len(batch))
        return batch["topic"].cast(pa.binary())


def _ids(batch: pa.RecordBatch, events: Any, values: Any, salt: bytes, seen: Counter[bytes]) -> Any:
    """The column key; where there is none or null, ids made of what the row says.

    Ids of batch, partition and place would lose rows where a repeated task finds its rows in
    another order: what has taken a place the first time is taken for what stands there now. A
    content that comes again within a task is counted, so that equal rows all arrive. This costs
    about 100 bytes of memory for each row of a task.
    """
    keys = batch["key"].cast(pa.binary()) if "key" in batch.schema.names else None
    if keys is not None and not keys.null_count:
        return keys
    made = []
    for event, value in zip(events.to_pylist(), values.to_pylist(), strict=True):
        content = blake2b(b"%b %b" % (event or b"", value or b""), digest_size=16, key=salt)
        digest = content.digest()
        again = seen[digest]
        seen[digest] = again + 1
        made.append(f"{content.hexdigest()}-{again}" if again else content.hexdigest())
    ids = pa.array(made, pa.binary())
    return ids if keys is None else pc.coalesce(keys, ids)


def _flags(batch: pa.RecordBatch) -> Any:
    """How the messages are delivered, of the columns that are there."""
    if not {*_TYPES} & {*batch.schema.names}:
        return None
    told = [
        batch[name] if name in batch.schema.names else pa.nulls(len(batch), FIELDS[name])
        for name in _TYPES
    ]
    return delivery_flags(*told).cast(pa.binary())


class BatchWriter(_Writer, DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        # One run for all tasks of a write, and another for each write: what is written twice on
        # purpose is there twice.
        return self._publish(iterator, self._run)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        # The query's id and the batch's number outlive a restart of the query, as this object does
        # not: a batch that is run again makes the same ids.
        context = TaskContext.get()
        words = ("sql.streaming.queryId", "streaming.sql.batchId")
        told = [context.getLocalProperty(word) for word in words] if context else []
        if not all(told) or not told:
            raise PipelineError("Spark has not set the query and batch of this task")
        return self._publish(iterator, " ".join(map(str, told)))


class RowsStreamWriter(StreamWriter):
    """For a Spark that gives the sink of a stream rows."""

    def write(self, iterator: Iterator[Row]) -> Published:
        schema = to_arrow_schema(self._schema)
        some = iter(lambda: [row.asDict() for row in islice(iterator, WINDOW_ROWS)], [])
        return super().write(pa.RecordBatch.from_pylist(rows, schema) for rows in some)
