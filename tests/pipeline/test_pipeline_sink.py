"""`format("mqks")` as a sink: every row is published once, however often it is written."""

import asyncio
import pickle
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import IntegerType, StringType, StructType

import mqks
from mqks.pipeline import sink, wire
from mqks.pipeline.errors import BadOption, BadRow, PipelineError
from mqks.pipeline.older import HAS_LIMITS
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.sink import BatchWriter
from mqks.pipeline.source import MqksDataSource
from mqks.testing import Broker, BrokerProcess
from tests.kit.proxy import Proxy
from tests.kit.waiting import WAIT_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Rows = list[dict[str, Any]]


@pytest.fixture
def broker(mqks_broker: Broker) -> Broker:
    subscribe(mqks_broker)
    return mqks_broker


def subscribe(broker: Broker | BrokerProcess) -> None:
    with mqks.blocking.connect(broker.url) as client:
        client.subscribe("q", ["e", "f"])


def published(url: str) -> Rows:
    with QueueReader(url, "q") as log:
        there = log.range()
        return [row for batch in log.read(there.first, there.next) for row in batch.to_pylist()]


def said(url: str) -> list[tuple[str, bytes]]:
    return [(row["topic"], row["value"]) for row in published(url)]


def batch_of(
    *rows: tuple[str | bytes | int | None, ...], names: str = "topic value"
) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(names.split(), row, strict=True)) for row in rows])


def writer(url: str, batch: pa.RecordBatch, **options: str) -> BatchWriter:
    data_source = MqksDataSource(CaseInsensitiveDict({"url": url} | options))
    return data_source.writer(from_arrow_schema(batch.schema), overwrite=False)


def write(writer: BatchWriter, *batches: pa.RecordBatch) -> None:
    """As a task does, with a writer that came to it pickled."""
    there: BatchWriter = pickle.loads(pickle.dumps(writer))
    there.write(iter(batches))


# ------------------------------------------------------------------------------- what is sent


def test_strings_and_an_event_for_all(broker: Broker) -> None:
    batch = batch_of(("m1", "grün", "g"), names="key value topic")
    write(writer(broker.url, batch, Topic="e"), batch)
    assert [(row["key"], row["topic"], row["value"]) for row in published(broker.url)] == [
        (b"m1", "e", "grün".encode())
    ]


def test_a_priority_and_an_ordering_key(broker: Broker) -> None:
    rows = [(5, "a b,ü"), (-128, None), (None, ""), (0, "k%&=")]
    columns = [("e", b"x", *row) for row in rows]
    batch = batch_of(*columns, names="topic value priority ordering_key")
    batch = batch.set_column(2, "priority", batch["priority"].cast(pa.int32()))
    write(writer(broker.url, batch), batch, batch)
    found = [(row["priority"], row["ordering_key"]) for row in published(broker.url)]
    assert found == [(5, "a b,ü"), (-128, None), (0, None), (0, "k%&=")] * 2


def test_a_write_goes_through_windows(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "WINDOW_BYTES", 1000)
    batch = batch_of(*(("e", b"%0100d" % n) for n in range(95)))
    # A slice of a larger batch begins in the middle of Arrow's memory.
    write(writer(broker.url, batch), batch.slice(3, 50), batch.slice(53))
    assert said(broker.url) == [("e", b"%0100d" % n) for n in range(3, 95)]


def test_long_ids_do_not_fill_both_directions(tmp_path: Path) -> None:
    rows = [pa.array([b"%05d%04000d" % (n, 0) for n in range(4_000)], pa.binary())]
    rows += [pa.array([word] * 4_000, pa.binary()) for word in (b"e", b"")]
    with Broker(tmp_path / "mqks.db", name_bytes_max=5_000) as broker:
        subscribe(broker)
        server = wire.ServerAddress(url=broker.url, reply_timeout_s=WAIT_S, retries=0)
        with sink.Publisher(server) as publisher:
            publisher.publish(*rows)
        assert len(published(broker.url)) == 4_000


# ------------------------------------------------------------------------------------- once


def failing(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    yield batch
    raise ZeroDivisionError


def test_a_task_run_again_publishes_nothing_twice(broker: Broker) -> None:
    """Though it finds its rows in another order."""
    batch = batch_of(*(("e", b"%d" % (n % 30)) for n in range(100)))
    mine = writer(broker.url, batch)
    with pytest.raises(ZeroDivisionError):
        mine.write(failing(batch.slice(0, 60)))
    assert len(said(broker.url)) == 60
    write(mine, batch.take(pa.array(range(99, -1, -1))))
    # Equal rows are messages each: none is taken for another's repetition.
    assert Counter(said(broker.url)) == Counter(("e", b"%d" % (n % 30)) for n in range(100))


def test_what_is_written_twice_is_there_twice_unless_its_key_says_that_it_is_the_same(
    broker: Broker,
) -> None:
    batch = batch_of((b"m1", "e", b"x"), (None, "e", b"y"), names="key topic value")
    for _ in range(2):
        write(writer(broker.url, batch), batch)
    assert said(broker.url) == [("e", b"x"), ("e", b"y"), ("e", b"y")]


class Breaking(Proxy):
    """Breaks the first connection when so many bytes of replies have passed."""

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        passed = 0
        while data := await reader.read(4096):
            writer.write(data)
            passed += len(data)
            if self.accepted == 1 and writer in self._writers and passed > 40_000:
                raise ConnectionResetError


def test_a_connection_lost_within_a_window(broker: Broker) -> None:
    batch = batch_of(*(("e", b"%d" % n) for n in range(3000)))
    with Breaking(broker.port) as proxy:
        write(writer(proxy.url, batch), batch)
        assert proxy.accepted == 2
    assert said(broker.url) == [("e", b"%d" % n) for n in range(3000)]


def test_any_bytes_are_published_and_read(broker: Broker) -> None:
    values = [b"plain", b"a\nb", b"a\\tb", bytes(range(256)), b"\t", b"end\r", b""]
    values += [b"\r", b"a\r\r", b"\ra"]
    batch = batch_of(*(("e", value) for value in values))
    write(writer(broker.url, batch), batch)
    assert said(broker.url) == [("e", value) for value in values]


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ((b"m", "e", None), "row 2 has a null"),
        ((b"m", None, b"a"), "row 2 has a null"),
        ((b"m", "e e", b"a"), "row 2: the topic b'e e' must not be empty"),
        ((b"m", "", b"a"), "row 2: the topic"),
        ((b"m", "--once", b"a"), "row 2: the topic"),
        ((b"m m", "e", b"a"), "row 2: the key b'm m' must not be empty"),
        ((b"", "e", b"a"), "row 2: the key"),
        ((b"m\n", "e", b"a"), "row 2: the key"),
    ],
)
def test_a_row_that_cannot_be_said(
    broker: Broker, row: tuple[bytes | str | None, ...], told: str
) -> None:
    batch = batch_of((b"1", "e", b"a"), (b"2", "e", b"\r."), row, names="key topic value")
    with pytest.raises(BadRow) as refused:
        writer(broker.url, batch).write(iter([batch.slice(0, 2), batch]))
    assert told in str(refused.value)
    assert "partition 0, after its first 2 rows" in str(refused.value)
    assert len(said(broker.url)) == 2


def test_a_message_that_the_server_refuses_is_named(tmp_path: Path) -> None:
    with Broker(tmp_path / "db", line_bytes_max=1024) as broker:
        subscribe(broker)
        batch = batch_of((b"m1", "e", b"x" * 2000), names="key topic value")
        with pytest.raises(mqks.RequestFailed, match=r"refused the message m1, error \S+"):
            write(writer(broker.url, batch), batch)


@pytest.mark.parametrize(
    ("schema", "options", "told"),
    [
        (StructType().add("topic", StringType()), {}, "the column value is missing"),
        (StructType().add("value", StringType()), {}, "the event of each message is missing"),
        (StructType().add("value", IntegerType()), {"topic": "e"}, "neither binary nor string"),
        (StructType().add("valeu", StringType()), {"topic": "e"}, "did you mean value?"),
        (
            StructType().add("value", StringType()).add("priority", StringType()),
            {"topic": "e"},
            "the column priority is not int32",
        ),
        (StructType().add("value", StringType()), {"topic": "a b"}, "topic:"),
        (StructType().add("value", StringType()), {"topik": "e"}, "did you mean topic?"),
        (StructType().add("value", StringType()), {"queue": "e"}, "no option queue"),
    ],
)
def test_columns_and_options(schema: StructType, options: dict[str, str], told: str) -> None:
    data_source = MqksDataSource(CaseInsensitiveDict({"url": "mqks://h"} | options))
    for make in (data_source.writer, data_source.streamWriter):
        with pytest.raises(BadOption, match=re.escape(told)):
            make(schema, overwrite=False)


def test_a_queue_cannot_be_overwritten() -> None:
    schema = StructType().add("value", StringType()).add("topic", StringType())
    with pytest.raises(BadOption, match=r'mode\("append"\)'):
        MqksDataSource(CaseInsensitiveDict({})).writer(schema, overwrite=True)


def test_a_stream_needs_to_know_its_batch(broker: Broker) -> None:
    batch = batch_of(("e", b"x"))
    data_source = MqksDataSource(CaseInsensitiveDict({"url": broker.url}))
    stream = data_source.streamWriter(from_arrow_schema(batch.schema), overwrite=False)
    with pytest.raises(PipelineError, match="query and batch"):
        stream.write(iter([batch]))


# ------------------------------------------------------------------------------- with Spark


@pytest.mark.slow
def test_spark_writes_a_batch(spark: "SparkSession", broker: Broker) -> None:
    frame = spark.range(100).selectExpr("'e' as topic", "cast(id % 10 as string) as value")
    frame.repartition(3).write.format("mqks").option("url", broker.url).mode("append").save()
    assert Counter(said(broker.url)) == {("e", b"%d" % n): 10 for n in range(10)}


@pytest.mark.slow
def test_spark_names_the_row_that_cannot_be_said(spark: "SparkSession", broker: Broker) -> None:
    frame = spark.range(10).selectExpr("if(id = 7, 'a b', 'e') as topic", "'x' as value")
    with pytest.raises(PySparkException, match=r"row 7: the topic b'a b'"):
        frame.coalesce(1).write.format("mqks").option("url", broker.url).mode("append").save()


@pytest.mark.slow
def test_a_stream_writes_all_that_a_message_has(
    spark: "SparkSession", broker: Broker, tmp_path: Path
) -> None:
    given = [(b"\x00\xff\n", 3, "k 1"), (b"", None, None), ("ü".encode(), -1, None)]
    with mqks.blocking.connect(broker.url) as client:
        client.subscribe("source", ["s"])
        for data, priority, key in given:
            client.publish("s", data, priority=priority, key=key)
    frame = spark.readStream.format("mqks").options(url=broker.url, queue="source")
    query = (
        frame.option("startingOffsets", "earliest")
        .load()
        .drop("topic")
        .writeStream.format("mqks")
        .options(url=broker.url, topic="e", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(WAIT_S)
    with QueueReader(broker.url, "source") as log:
        [ids] = [batch["key"].to_pylist() for batch in log.read(1, 4)]
    found = published(broker.url)
    assert [row["key"] for row in found] == ids
    told = [(row["value"], row["priority"], row["ordering_key"]) for row in found]
    assert told == [(data, priority or 0, key) for data, priority, key in given]


@pytest.mark.slow
def test_a_stream_run_again_publishes_nothing_twice(
    spark: "SparkSession", broker: Broker, tmp_path: Path
) -> None:
    with mqks.blocking.connect(broker.url) as client:
        client.subscribe("source", ["s"])
        client.publish_many([("s", f"{n % 5}") for n in range(20)])
    checkpoint = tmp_path / "checkpoint"

    def run() -> None:
        stream = spark.readStream.format("mqks").option("url", broker.url)
        stream = stream.option("queue", "source").option("startingOffsets", "earliest")
        if HAS_LIMITS:
            stream = stream.option("maxOffsetsPerTrigger", 10)
        query = (
            stream.load()
            .select("value")
            .writeStream.format("mqks")
            .queryName("copied")
            .options(url=broker.url, topic="e", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(WAIT_S)

    run()
    # The query died before it could note that its last batch was done.
    last = max((checkpoint / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    last.unlink()
    (last.parent / f".{last.name}.crc").unlink(missing_ok=True)
    run()

    assert Counter(said(broker.url)) == {("e", b"%d" % n): 4 for n in range(5)}
