"""`format("mqks")`: what the source plans and reads, most of it without Spark; a few real runs."""

import json
import pickle
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql.datasource import (
    CaseInsensitiveDict,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.types import StringType, StructType

import mqks
from mqks.client import urls
from mqks.client.errors import RequestFailed
from mqks.pipeline import columns
from mqks.pipeline.errors import BadOption, DataLost
from mqks.pipeline.older import HAS_LIMITS, ReadAllAvailable, ReadMaxRows, to_arrow_schema
from mqks.pipeline.options import EARLIEST, Places, ReadPlace, read_options, write_options
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.source import (
    ROWS_PER_PARTITION,
    SCHEMA,
    BatchReader,
    MqksDataSource,
    Slice,
    StreamReader,
    UnlimitedStreamReader,
    offsets_behind,
)
from mqks.testing import Broker, BrokerProcess
from tests.kit.log_peer import LogPeer
from tests.kit.waiting import WAIT_S

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIME_US = 1_700_000_000_000_000


def publish(broker: Broker | BrokerProcess, numbers: Iterable[int]) -> None:
    with mqks.blocking.connect(broker.url) as client:
        client.subscribe("q", ["e.0", "e.1"])
        client.publish_many([(f"e.{n % 2}", f"data {n}") for n in numbers])


def log_of(numbers: Iterable[int], epoch: str = "one") -> LogPeer:
    return LogPeer([(n, TIME_US + n, b"m%d event=e data" % n) for n in numbers], epoch)


@pytest.fixture
def peer() -> Iterator[LogPeer]:
    """With the numbers from 1 to 10."""
    with log_of(range(1, 11)) as peer:
        yield peer


def source(url: str, **options: object) -> MqksDataSource:
    """Of the queue `q`, unless options name others."""
    told = {"url": url} | {name: str(value) for name, value in options.items()}
    return MqksDataSource(CaseInsensitiveDict(told if "queues" in told else {"queue": "q"} | told))


def batch_reader(url: str, **options: object) -> BatchReader:
    made = source(url, **options)
    return BatchReader(made.options, made.schema())


Make = Callable[..., StreamReader]
Unlimited = Callable[..., UnlimitedStreamReader]


@pytest.fixture
def made() -> Iterator[ExitStack]:
    """Stops readers in the end."""
    with ExitStack() as readers:
        yield readers


def _made(kind: Any, made: ExitStack, url: str, **options: object) -> Any:
    """A reader that begins at the earliest, unless options say where."""
    told = source(url, **{"startingOffsets": EARLIEST} | options)
    reader = kind(told.options, told.schema())
    made.callback(reader.stop)
    return reader


@pytest.fixture
def stream_reader(made: ExitStack) -> Make:
    return partial(_made, StreamReader, made)


@pytest.fixture
def unlimited(made: ExitStack) -> Unlimited:
    """For a Spark without limits."""
    return partial(_made, UnlimitedStreamReader, made)


def rows(
    reader: DataSourceReader | DataSourceStreamReader, partitions: Sequence[InputPartition]
) -> list[dict[str, Any]]:
    """What tasks read, each with a reader and a partition that came to it pickled."""
    found = []
    for partition in partitions:
        there, mine = pickle.loads(pickle.dumps((reader, partition)))
        found += [row for batch in there.read(mine) for row in batch.to_pylist()]
    return found


def everything(url: str, **options: object) -> list[dict[str, Any]]:
    """What a batch reads."""
    reader = batch_reader(url, **options)
    return rows(reader, reader.partitions())


def offsets(reader: BatchReader | StreamReader, partitions: Sequence[InputPartition]) -> list[int]:
    return [row["offset"] for row in rows(reader, partitions)]


# -------------------------------------------------------------------------- several queues


def publish_to(broker: Broker, queue: str, numbers: Iterable[int]) -> None:
    with mqks.blocking.connect(broker.url) as client:
        client.subscribe(queue, [queue])
        client.publish_many([(queue, f"{n}") for n in numbers])


def told(found: Iterable[dict[str, Any]]) -> list[tuple[str, int]]:
    return sorted((row["queue"], int(row["value"])) for row in found)


def test_a_batch_of_several_queues(mqks_broker: Broker) -> None:
    for queue, count in (("o.eu", 3), ("o.us", 2), ("other", 1), ("o.eu.old", 1)):
        publish_to(mqks_broker, queue, range(count))
    assert told(everything(mqks_broker.url, queue="o.*")) == [
        *(("o.eu", n) for n in range(3)),
        *(("o.us", n) for n in range(2)),
    ]
    only = source(mqks_broker.url, queue="o.*").reader(StructType().add("queue", StringType()))
    found = [row["queue"] for row in rows(only, only.partitions())]
    assert sorted(found) == ["o.eu"] * 3 + ["o.us"] * 2


@pytest.mark.parametrize("options", [{"startingOffsets": "5"}, {"endingOffsets": "5"}])
def test_numbers_are_of_one_queue(options: dict[str, str]) -> None:
    with pytest.raises(BadOption, match="several queues"):
        batch_reader("mqks://localhost:1", queue="o.*", **options)


def test_a_list_of_queues_and_an_offset_of_each(mqks_broker: Broker) -> None:
    for queue in ("a", "b", "o.eu", "other"):
        publish_to(mqks_broker, queue, range(4))
    ends = {"b": 3, "o.eu": {"0": -1}, "a": 4}
    for starts in (
        {"a": 2, "o.eu": {"0": 3}},
        {"queues": {"a": {"epoch": epoch(mqks_broker, "a"), "offset": 2}, "o.eu": {"0": 3}}},
    ):
        offsets = {"startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
        assert told(everything(mqks_broker.url, queues="a,b,o.*", **offsets)) == [
            *[("a", 1), ("a", 2), ("b", 0), ("b", 1)],
            *[("o.eu", 2), ("o.eu", 3)],
        ]
    with pytest.raises(RequestFailed, match="none"):
        everything(mqks_broker.url, queues="a,none")
    assert "queue" in source(mqks_broker.url, queues="b").schema().names


def epoch(broker: Broker, queue: str) -> str:
    with QueueReader(broker.url, queue) as log:
        return log.range().epoch


def arrivals_ms(broker: Broker, queue: str) -> list[int]:
    """When its messages arrived."""
    with QueueReader(broker.url, queue) as log:
        batches = [*log.read(0, log.range().next)]
    return [arrived.value // 1000 for batch in batches for arrived in batch["timestamp"]]


def test_a_time_of_each_queue(mqks_broker: Broker) -> None:
    for queue in ("a", "b"):
        for n in range(3):
            publish_to(mqks_broker, queue, range(n, n + 1))
            while time.time_ns() // 10**6 <= arrivals_ms(mqks_broker, queue)[-1]:
                pass  # The next one has a later millisecond.
    a, b = (arrivals_ms(mqks_broker, queue) for queue in ("a", "b"))
    timed = {
        "startingOffsetsByTimestamp": json.dumps({"a": a[1], "b": {"0": b[2]}}),
        "endingOffsetsByTimestamp": json.dumps({"a": a[2]}),
    }
    for more in ({}, {"startingOffsets": "latest", "endingOffsets": "earliest"}):
        found = everything(mqks_broker.url, queues="a,b", **timed, **more)
        assert told(found) == [("a", 1), ("b", 2)]
    # A time of all has precedence.
    assert told(everything(mqks_broker.url, queues="a,b", **timed, startingTimestamp=0)) == [
        *[("a", 0), ("a", 1)],
        *[("b", 0), ("b", 1), ("b", 2)],
    ]


def test_a_stream_of_a_list_with_times(stream_reader: Make, mqks_broker: Broker) -> None:
    for queue in ("a", "b"):
        publish_to(mqks_broker, queue, range(3))
    times = {"a": arrivals_ms(mqks_broker, "a")[0], "b": 2**53}
    options = {"queues": "a,b", "startingOffsetsByTimestamp": json.dumps(times)}
    name = "startingOffsetsByTimestampStrategy"
    for strategy, positions in (({}, {"a": 1}), ({name: "latest"}, {"a": 1, "b": 4})):
        reader = stream_reader(mqks_broker.url, **options, **strategy)
        pinned = reader.latestOffset(reader.initialOffset(), ReadMaxRows(100))
        assert {name: at["offset"] for name, at in pinned["queues"].items()} == positions
    options[name] = "error"
    with pytest.raises(BadOption, match="nothing arrived in the queue b"):
        stream_reader(mqks_broker.url, **options).initialOffset()
    with pytest.raises(BadOption, match="nothing arrived in the queue b"):
        everything(mqks_broker.url, **options)


def test_how_far_a_stream_is_behind(stream_reader: Make, mqks_broker: Broker) -> None:
    for queue, count in (("a", 10), ("b", 4)):
        publish_to(mqks_broker, queue, range(count))
    reader = stream_reader(mqks_broker.url, queues="a,b")
    start = reader.initialOffset()

    def behind(end: Any) -> dict[str, float]:
        latest = reader.reportLatestOffset()
        return offsets_behind({"endOffset": json.dumps(end), "latestOffset": json.dumps(latest)})

    assert behind(start) == {}
    pinned = reader.latestOffset(start, ReadMaxRows(4))
    end = reader.latestOffset(pinned, ReadMaxRows(4))
    expected = [
        ("minOffsetsBehindLatest", 2),
        ("maxOffsetsBehindLatest", 8),
        ("avgOffsetsBehindLatest", 5),
    ]
    assert [*behind(end).items()] == (expected if HAS_LIMITS else [])
    assert offsets_behind({"endOffset": json.dumps(end), "latestOffset": "null"}) == {}


def test_a_stream_of_several_queues_reads_later_ones_from_their_begin(
    stream_reader: Make, mqks_broker: Broker
) -> None:
    publish_to(mqks_broker, "o.eu", range(3))
    reader = stream_reader(mqks_broker.url, queue="o.*", startingOffsets="latest")
    offset, found = reader.initialOffset(), list[dict[str, Any]]()

    def drain_it() -> None:
        nonlocal offset
        while (end := reader.latestOffset(offset, ReadMaxRows(4))) != offset:
            assert json.loads(json.dumps(end)) == end
            found.extend(rows(reader, reader.partitions(offset, end)))
            offset = end

    drain_it()
    assert found == []  # It begins at the latest.
    publish_to(mqks_broker, "o.us", range(10))
    publish_to(mqks_broker, "o.eu", range(3, 6))
    drain_it()
    assert told(found) == [*(("o.eu", n) for n in (3, 4, 5)), *(("o.us", n) for n in range(10))]


def test_a_lone_busy_queue_has_what_others_leave(stream_reader: Make, mqks_broker: Broker) -> None:
    for queue, count in (("o.a", 100), ("o.b", 1), ("o.c", 0), ("o.d", 30)):
        publish_to(mqks_broker, queue, range(count))
    reader = stream_reader(mqks_broker.url, queue="o.*")
    offset, taken = reader.initialOffset(), []
    while (end := reader.latestOffset(offset, ReadMaxRows(41))) != offset:
        offset = end
        taken.append([end["queues"][queue]["offset"] - 1 for queue in ("o.a", "o.b", "o.d")])
    assert taken == [[0, 0, 0], [20, 1, 20], [51, 1, 30], [92, 1, 30], [100, 1, 30]]


def test_a_trigger_waits_for_many_messages(stream_reader: Make) -> None:
    with log_of(range(1, 4)) as peer:
        for delay, then in (("1h", 3), ("0ms", 4)):
            reader = stream_reader(peer.url, minOffsetsPerTrigger=5, maxTriggerDelay=delay)
            limit = reader.getDefaultReadLimit()
            assert reader.latestOffset(at(1), limit) == at(4)  # Nothing was read before.
            peer.next = 5
            assert reader.latestOffset(at(4), limit) == at(then + 1)
            peer.next = 9
            assert reader.latestOffset(at(4), limit) == at(9)
            assert reader.latestOffset(at(5), limit) == at(5 if delay == "1h" else 9)
            peer.next = 4
        reader = stream_reader(peer.url, minOffsetsPerTrigger=5)
        reader.prepareForTriggerAvailableNow()
        for number in (1, 3):  # All that is there.
            assert reader.latestOffset(at(number), reader.getDefaultReadLimit()) == at(4)


@pytest.mark.parametrize("queue", ["o.*", "o.eu"])
@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_queue_that_is_gone_is_a_loss(
    stream_reader: Make,
    mqks_broker: Broker,
    queue: str,
    is_made_again: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def numbers(offset: dict[str, Any]) -> dict[str, int]:
        told = offset["queues"] if queue == "o.*" else {queue: offset}
        return {name: each["offset"] for name, each in told.items()}

    limit = ReadMaxRows(1000)
    for name in ("o.eu", "o.us"):
        publish_to(mqks_broker, name, range(10))
    strict = stream_reader(mqks_broker.url, queue=queue)
    loose = stream_reader(mqks_broker.url, queue=queue, failOnDataLoss="false")
    begin = strict.latestOffset(strict.initialOffset(), limit)
    planned = strict.latestOffset(begin, limit)
    publish_to(mqks_broker, "o.eu", range(70))
    with mqks.blocking.connect(mqks_broker.url) as client:
        client.delete_queue("o.eu")
    if is_made_again:
        publish_to(mqks_broker, "o.eu", range(3))

    # A batch that was planned before, as a start finds it; and the next one.
    failed = strict.latestOffset(planned, limit)
    for start, end in ((begin, planned), (planned, failed)):
        with pytest.raises(DataLost, match=r"queue o\.eu was deleted"):
            strict.partitions(start, end)
    others = [("o.us", n) for n in range(10)] if queue == "o.*" else []
    assert told(rows(loose, loose.partitions(begin, planned))) == others
    assert loose.partitions(planned, failed) == []
    for start in (planned, failed):
        offset = loose.latestOffset(start, limit)
        gone = {} if queue == "o.*" else {"o.eu": 11}
        expected = ({"o.eu": 1} if is_made_again else gone) | dict.fromkeys(
            [n for n, _ in others], 11
        )
        assert numbers(offset) == expected
        assert loose.partitions(start, offset) == []
    assert "the queue o.eu was deleted" in caplog.text


def test_a_time_that_is_still_to_come(stream_reader: Make) -> None:
    with log_of(range(1, 4)) as peer:
        reader = stream_reader(peer.url, startingTimestamp=TIME_US // 1000 + 1)
        start = reader.initialOffset()
        assert reader.latestOffset(start, ReadMaxRows(9)) == start
        for number, after_us in ((4, 999), (5, 1000), (6, 1001)):
            peer.messages[number] = TIME_US + after_us, b"m event=e data"
        peer.next = 7
        pinned = reader.latestOffset(start, ReadMaxRows(9))
        assert pinned == at(5)
        assert reader.latestOffset(pinned, ReadMaxRows(9)) == at(7)


def test_offsets_beyond_the_end(caplog: pytest.LogCaptureFixture) -> None:
    with log_of(range(1, 4)) as peer:
        options = {"startingOffsets": 3, "endingOffsets": 9, "failOnDataLoss": "false"}
        reader = batch_reader(peer.url, **options)
        assert offsets(reader, reader.partitions()) == [3]
        assert batch_reader(peer.url, **options | {"startingOffsets": 8}).partitions() == []
    assert "startingOffsets is 8, but the queue ends at 4" in caplog.text


# ----------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"queu": "q"}, "did you mean queue?"),
        ({"queue": "q", "StartingOffset": "1"}, "did you mean startingOffsets?"),
        ({"queue": "q", "topic": "e"}, "no option topic"),
        ({"queue": "q", "kafka.bootstrap.servers": "x"}, "no option kafka.bootstrap.servers"),
    ],
)
def test_unknown_options_are_refused(options: dict[str, str], hint: str) -> None:
    with pytest.raises(BadOption, match=re.escape(hint)):
        read_options(options)


BAD_VALUES: dict[str, list[str]] = {
    "queue": ["a b"],
    "queues": ["q,r"],
    "startingOffsets": [
        *('{"q": 5, "r": 5}', "{}", "[" * 5000, "first", "-5", "true"),
        *('{"epoch": "", "offset": -1}', '{"q": {"0": true}}', '{"other": {"0": 5}}'),
        *('{"q": {"1": 5}}', '{"q": {"0": -3}}'),
    ],
    "endingOffsets": ["1.5"],
    "startingOffsetsByTimestamp": ["5", "latest", '{"q": -1}', '{"q": {"1": 5}}'],
    "endingOffsetsByTimestamp": ['{"r": 5}'],
    "port": ["0", "many"],
    "tls": ["yes"],
    "failOnDataLoss": ["1"],
    "fetchSize": ["0", "1000001"],
    "maxOffsetsPerTrigger": ["-1"],
    "minOffsetsPerTrigger": ["200001"],
    "maxTriggerDelay": ["5m"],
    "minPartitions": ["0"],
    "startingTimestamp": ["yesterday"],
    "endingTimestamp": ["tomorrow"],
    "includeHeaders": ["yes"],
    "user": ["u"],
    "password": ["p"],
    "url": ["http://h"],
}
BAD_TOGETHER = [
    {"startingOffsetsByTimestampStrategy": "first", "startingTimestamp": "5"},
    {"startingOffsetsByTimestampStrategy": "latest", "startingOffsets": "5"},
    {"minOffsetsPerTrigger": "5", "maxTriggerDelay": "5 weeks"},
    {"token": "t", "user": "u"},
    {"url": "mqks://h", "port": "1"},
]


@pytest.mark.parametrize(
    "options",
    [*({name: value} for name in BAD_VALUES for value in BAD_VALUES[name]), *BAD_TOGETHER],
    ids=lambda options: " ".join(f"{name}={options[name]:.40}" for name in options),
)
def test_bad_values_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(BadOption):
        read_options({"queue": "q"} | options)


def test_without_a_queue_nothing_is_read() -> None:
    with pytest.raises(BadOption):
        read_options({})


def test_where_the_server_is_gets_to_the_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MQKS_URL", "mqks://somewhere:1")
    told = pickle.dumps(read_options({"queue": "q"}))
    monkeypatch.delenv("MQKS_URL")  # A task on another machine.
    assert pickle.loads(told).server.url == "mqks://somewhere:1"


@pytest.mark.parametrize(
    ("options", "url"),
    [
        ({"HOST": "h"}, "mqks://h"),
        ({"port": "1"}, "mqks://127.0.0.1:1"),
        ({"host": "::1", "port": "1"}, "mqks://[::1]:1"),
        ({"host": "h", "tls": "TRUE"}, "mqkss://h"),
        ({"host": "h", "ca": "/ca.pem"}, "mqkss://h"),
        ({"host": "h", "token": "a/b@c"}, "mqks://a%2Fb%40c@h"),
        ({"host": "h", "user": "u:", "password": "p"}, "mqks://u%3A:p@h"),
        ({"url": "mqks+unix:///run/mqks"}, "mqks+unix:///run/mqks"),
    ],
)
def test_where_the_server_is(options: dict[str, str], url: str) -> None:
    server = read_options({"queue": "q"} | options).server
    assert urls.parse(server.url) == urls.parse(url)
    assert urls.parse(write_options(options).server.url) == urls.parse(url)


def test_credentials_do_not_show() -> None:
    options = read_options({"queue": "q", "host": "h", "token": "secret"})
    assert "secret" not in repr(options) + repr(options.server)
    with pytest.raises(BadOption) as told:
        read_options({"queue": "q", "token": "secret", "port": "x"})
    assert "secret" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("Earliest", ReadPlace("earliest")),
        ("latest", ReadPlace("latest")),
        ("7", ReadPlace(7)),
        ('{"q": 7}', {"q": ReadPlace(7)}),
        ('{"q": {"0": 7}}', {"q": ReadPlace(7)}),
        ('{"q": {"0": -1}}', {"q": ReadPlace("latest")}),
        ('{"q": {"0": -2}}', {"q": ReadPlace("earliest")}),
        ('{"epoch": "one", "offset": 7}', ReadPlace(7, "one")),
    ],
)
def test_places(text: str, place: Places) -> None:
    assert read_options({"queue": "q", "startingoffsets": text}).start == place


def test_patience() -> None:
    server = read_options({"queue": "q", "connectTimeoutMs": "1500", "numRetries": "0"}).server
    assert (server.connect_timeout_s, server.retries) == (1.5, 0)


# ----------------------------------------------------------------------------------- columns


def test_the_columns_are_the_same_for_spark_and_for_arrow() -> None:
    assert to_arrow_schema(SCHEMA) == columns.SCHEMA


@pytest.mark.parametrize(
    ("schema", "hint"),
    [
        (StructType().add("valu", StringType()), "did you mean value?"),
        (StructType().add("value", StringType()), "the column value is binary, not string"),
    ],
)
def test_columns_that_a_message_does_not_have(schema: StructType, hint: str) -> None:
    with pytest.raises(BadOption, match=re.escape(hint)):
        source("mqks://h").reader(schema)


# ------------------------------------------------------------------------------------ a batch


def test_headers_are_the_attributes(mqks_broker: Broker) -> None:
    with mqks.blocking.connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish("e", "plain")
        client.publish("e", b"t\tn\n", meta={"=&": "ü,%"}, priority=3, key="k 1", confirm=True)
    for is_told, headers in ((False, None), (True, [{"key": "=&", "value": "ü,%".encode()}])):
        found = everything(mqks_broker.url, includeHeaders=is_told)
        assert [row["topic"] for row in found] == ["e", "e"]
        assert [row["value"] for row in found] == [b"plain", b"t\tn\n"]
        assert [row["headers"] for row in found] == [None, headers]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": 3}, range(3, 11)),
        ({"endingOffsets": 3}, range(1, 3)),
        ({"startingOffsets": 3, "endingOffsets": 3}, range(0)),
        ({"startingOffsets": 8, "endingOffsets": 3}, range(0)),
        ({"startingTimestamp": TIME_US // 1000 + 1}, range(0)),
        ({"startingTimestamp": TIME_US // 1000}, range(1, 11)),
        ({"endingTimestamp": TIME_US // 1000}, range(0)),
        ({"endingTimestamp": TIME_US // 1000 + 1, "endingOffsets": 3}, range(1, 11)),
        ({"startingOffsets": '{"epoch": "one", "offset": 9}'}, range(9, 11)),
    ],
)
def test_bounds_of_a_batch(options: dict[str, object], expected: range, peer: LogPeer) -> None:
    reader = batch_reader(peer.url, **options)
    assert offsets(reader, reader.partitions()) == list(expected)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"startingOffsets": "latest"}, "a batch ends there"),
        ({"startingOffsets": '{"q": -1}'}, "a batch ends there"),
        ({"startingOffsets": 12}, "startingOffsets is 12, but the queue ends at 11"),
        ({"endingOffsets": 12}, "endingOffsets is 12"),
        ({"startingOffsets": '{"epoch": "two", "offset": 9}'}, "created again"),
    ],
)
def test_bounds_that_are_not_there(peer: LogPeer, options: dict[str, object], told: str) -> None:
    with pytest.raises(BadOption, match=told):
        batch_reader(peer.url, **options).partitions()


def test_partitions_are_equal_parts() -> None:
    with log_of([1, 2 * ROWS_PER_PARTITION + 10]) as peer:
        assert len(batch_reader(peer.url).partitions()) == 3
    with log_of(range(1, 11)) as peer:
        split = parts(batch_reader(peer.url, minPartitions=4).partitions())
        assert [(part.start, part.end) for part in split] == [(1, 3), (3, 6), (6, 8), (8, 11)]
        reader = batch_reader(peer.url, minPartitions=50)
        assert len(reader.partitions()) == 10
        assert offsets(reader, reader.partitions()) == list(range(1, 11))


def parts(partitions: Sequence[InputPartition]) -> Iterator[Slice]:
    for partition in partitions:
        assert isinstance(partition, Slice)
        yield partition


def test_an_empty_plan_reads_nothing(mqks_broker: Broker) -> None:
    publish(mqks_broker, [])
    reader = batch_reader(mqks_broker.url)
    assert reader.partitions() == []
    assert offsets(reader, [InputPartition(None)]) == []  # What Spark makes of it.


def test_a_batch_of_what_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with log_of(range(5, 11)) as peer:
        with pytest.raises(DataLost, match="messages 2 to 4 of the queue q are gone"):
            batch_reader(peer.url, startingOffsets=2).partitions()
        reader = batch_reader(peer.url, startingOffsets=2, failOnDataLoss="false")
        assert offsets(reader, reader.partitions()) == list(range(5, 11))
    assert "messages 2 to 4 of the queue q are gone; continuing" in caplog.text


@pytest.mark.slow
def test_a_task_resumes_when_the_server_was_killed_meanwhile(
    mqks_broker_process: BrokerProcess,
) -> None:
    publish(mqks_broker_process, range(5000))
    reader = batch_reader(mqks_broker_process.url, fetchSize=500)
    [part] = reader.partitions()
    batches = reader.read(part)
    found = next(batches)["offset"].to_pylist()
    mqks_broker_process.kill()
    mqks_broker_process.start()
    found += [number for batch in batches for number in batch["offset"].to_pylist()]
    assert found == list(range(1, 5001))


# ----------------------------------------------------------------------------------- a stream


def test_a_stream_begins_with_an_empty_batch_that_pins_its_start(
    stream_reader: Make, mqks_broker: Broker
) -> None:
    publish(mqks_broker, range(3))
    reader = stream_reader(mqks_broker.url, startingOffsets="latest")
    unpinned = reader.initialOffset()
    pinned = reader.latestOffset(unpinned, ReadMaxRows(100))
    assert pinned["offset"] == 4
    assert reader.partitions(unpinned, pinned) == []
    # The query dies within that batch, more comes, and Spark runs the batch again.
    publish(mqks_broker, range(5))
    again = stream_reader(mqks_broker.url, startingOffsets="latest")
    assert again.initialOffset() == unpinned
    assert again.partitions(unpinned, pinned) == []
    end = again.latestOffset(pinned, ReadMaxRows(100))
    assert offsets(again, again.partitions(pinned, end)) == [4, 5, 6, 7, 8]


def test_read_limits_are_kept(stream_reader: Make, mqks_broker: Broker) -> None:
    publish(mqks_broker, range(10))
    reader = stream_reader(mqks_broker.url, maxOffsetsPerTrigger=4)
    assert reader.getDefaultReadLimit() == ReadMaxRows(4)
    assert stream_reader(mqks_broker.url).getDefaultReadLimit() == ReadMaxRows(200_000)
    offset = reader.latestOffset(reader.initialOffset(), ReadMaxRows(4))
    batches = []
    while (end := reader.latestOffset(offset, ReadMaxRows(4))) != offset:
        batches.append(offsets(reader, reader.partitions(offset, end)))
        offset = end
    assert batches == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]
    start = {**offset, "offset": 2}
    assert reader.latestOffset(start, ReadAllAvailable())["offset"] == 11


def test_available_now_ends_at_what_was_there_at_its_start(stream_reader: Make) -> None:
    with log_of(range(1, 11)) as peer:
        reader = stream_reader(peer.url)
        reader.prepareForTriggerAvailableNow()
        offset = reader.latestOffset(reader.initialOffset(), ReadMaxRows(6))
        peer.next = 100
        assert offset["offset"] == 1
        offset = reader.latestOffset(offset, ReadMaxRows(6))
        assert offset["offset"] == 7
    # A server that is away now must not look like the end of the stream.
    offset = reader.latestOffset(offset, ReadMaxRows(6))
    assert offset["offset"] == 11
    assert reader.latestOffset(offset, ReadMaxRows(6)) == offset


def test_a_server_away_ends_no_query(
    stream_reader: Make, mqks_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    publish(mqks_broker, range(10))
    reader = stream_reader(mqks_broker.url)
    start = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    end = reader.latestOffset(start, ReadAllAvailable())
    mqks_broker.stop()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    assert reader.reportLatestOffset() is None
    assert "no new offset of the queue q" in caplog.text
    reader.commit(end)
    planned = reader.partitions(start, end)
    mqks_broker.start()
    assert offsets(reader, planned) == list(range(1, 11))
    assert reader.latestOffset(start, ReadAllAvailable()) == end
    assert reader.reportLatestOffset() == end


def test_a_query_without_its_queue_ends_at_its_start(
    stream_reader: Make, mqks_broker: Broker
) -> None:
    reader = stream_reader(mqks_broker.url)
    with pytest.raises(mqks.RequestFailed, match="is there one"):
        reader.initialOffset()
    with pytest.raises(BadOption, match="cannot be used for a stream"):
        stream_reader(mqks_broker.url, endingOffsets=5)
    with pytest.raises(BadOption, match="endingTimestamp cannot be used for a stream"):
        stream_reader(mqks_broker.url, endingTimestamp=5)


def test_a_stream_from_a_number_or_a_time(stream_reader: Make, peer: LogPeer) -> None:
    for options in ({"startingOffsets": 1}, {"startingTimestamp": TIME_US // 1000}):
        reader = stream_reader(peer.url, **options)
        pinned = reader.latestOffset(reader.initialOffset(), ReadMaxRows(5))
        assert pinned == {"epoch": "one", "offset": 1}
    with pytest.raises(BadOption, match="ends at 11"):
        stream_reader(peer.url, startingOffsets=12).initialOffset()


def test_a_batch_can_be_several_partitions(stream_reader: Make, peer: LogPeer) -> None:
    reader = stream_reader(peer.url, minPartitions=3)
    planned = reader.partitions(at(1), at(11))
    assert [part.start for part in parts(planned)] == [1, 4, 7]
    assert offsets(reader, planned) == list(range(1, 11))


# ------------------------------------------------------------------------------- what is lost


def at(number: int, epoch: str = "one") -> dict[str, Any]:
    return {"epoch": epoch, "offset": number}


def anew(peer: LogPeer) -> None:
    peer.epoch = "two"


def back(peer: LogPeer) -> None:
    for number in range(4, 11):
        del peer.messages[number]
    peer.next = 4


LOSSES = [(anew, at(1, "two"), "created again"), (back, at(4), "ends at 4, and 6 was seen before")]


@pytest.mark.parametrize(("happens", "goes_on", "told"), LOSSES)
def test_an_offset_that_would_go_back_fails_when_it_is_planned_or_goes_on_with_what_is_there(
    stream_reader: Make,
    unlimited: Unlimited,
    peer: LogPeer,
    happens: Callable[[LogPeer], None],
    goes_on: dict[str, Any],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    strict, without_limits = stream_reader(peer.url), unlimited(peer.url)
    assert without_limits.partitions(at(6), at(6)) == []
    happens(peer)
    failed = strict.latestOffset(at(6), ReadMaxRows(100))
    # Never another epoch or a lower number: Spark would write it down without a word.
    assert (failed["epoch"], failed["offset"]) == ("one", 6)
    assert failed != at(6)
    for reader, end in ((strict, failed), (without_limits, without_limits.latestOffset())):
        with pytest.raises(DataLost, match=told):
            reader.partitions(at(6), end)
    loose = stream_reader(peer.url, failOnDataLoss="false")
    assert loose.partitions(at(6), failed) == []  # The batch that could not be planned.
    pinned = loose.latestOffset(failed, ReadMaxRows(100))
    assert pinned == goes_on
    assert loose.partitions(failed, pinned) == []
    peer.next += 1
    end = loose.latestOffset(pinned, ReadMaxRows(100))
    assert end == goes_on | {"offset": peer.next}
    assert told in caplog.text


def test_after_a_repair_the_stream_goes_on_where_it_was(stream_reader: Make, peer: LogPeer) -> None:
    reader = stream_reader(peer.url)
    anew(peer)
    failed = reader.latestOffset(at(6), ReadMaxRows(100))
    peer.epoch = "one"  # The right disk is mounted again.
    assert reader.partitions(at(6), failed) == []
    end = reader.latestOffset(failed, ReadMaxRows(100))
    assert offsets(reader, reader.partitions(failed, end)) == [6, 7, 8, 9, 10]


def test_what_was_trimmed_under_a_stream(
    stream_reader: Make, caplog: pytest.LogCaptureFixture
) -> None:
    with log_of(range(5, 11)) as peer:
        with pytest.raises(DataLost, match="messages 2 to 4 of the queue q are gone"):
            stream_reader(peer.url).partitions(at(2), at(11))
        reader = stream_reader(peer.url, failOnDataLoss="false")
        assert offsets(reader, reader.partitions(at(2), at(11))) == list(range(5, 11))
        # The limit counts what is there.
        assert reader.latestOffset(at(2), ReadMaxRows(3)) == at(8)
    assert "continuing without them" in caplog.text


def test_a_log_that_has_become_shorter_after_the_plan(stream_reader: Make, peer: LogPeer) -> None:
    reader = stream_reader(peer.url)
    planned = reader.partitions(at(1), at(11))
    back(peer)
    with pytest.raises(DataLost, match="ends at 4, and 11 was seen before"):
        rows(reader, planned)
    reader = stream_reader(peer.url, failOnDataLoss="false")
    assert offsets(reader, planned) == [1, 2, 3]


# ------------------------------------------------------------------ for a Spark without limits


def test_without_limits_the_first_batch_has_all(
    unlimited: Unlimited, stream_reader: Make, mqks_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    publish(mqks_broker, range(10))
    for starts, expected in ((EARLIEST, range(1, 11)), (4, range(4, 11)), ("latest", range(0))):
        reader = unlimited(mqks_broker.url, startingOffsets=starts)
        begin = reader.initialOffset()
        end = json.loads(json.dumps(reader.latestOffset()))
        assert offsets(reader, reader.partitions(begin, end)) == [*expected]
        assert reader.latestOffset() == end
    assert "all that is new" in caplog.text
    # The query dies within that batch, and this or another Spark runs it again.
    publish(mqks_broker, range(5))
    again = unlimited(mqks_broker.url, startingOffsets="latest")
    assert again.initialOffset() == begin
    for other in (again, stream_reader(mqks_broker.url, startingOffsets="latest")):
        assert other.partitions(begin, end) == []
        assert other.partitions(end, end) == []  # How Spark tells a reader where the query is.
        more = again.latestOffset()
        assert offsets(other, other.partitions(end, more)) == [*range(11, 16)]
        again.partitions(end, end)


def test_without_limits_later_queues_are_read_from_their_begin(
    unlimited: Unlimited, stream_reader: Make, mqks_broker: Broker
) -> None:
    publish_to(mqks_broker, "o.eu", range(3))
    reader = unlimited(mqks_broker.url, queue="o.*", startingOffsets="latest")
    start = reader.initialOffset()
    begun = reader.latestOffset()
    assert reader.partitions(start, begun) == []
    publish_to(mqks_broker, "o.us", range(4))
    publish_to(mqks_broker, "o.eu", range(3, 6))
    end = reader.latestOffset()
    for other in (reader, stream_reader(mqks_broker.url, queue="o.*")):
        found = told(rows(other, other.partitions(begun, end)))
        assert found == [*(("o.eu", n) for n in (3, 4, 5)), *(("o.us", n) for n in range(4))]


def test_without_limits_a_server_away_is_no_end(unlimited: Unlimited, mqks_broker: Broker) -> None:
    publish(mqks_broker, range(3))
    reader = unlimited(mqks_broker.url, numRetries=2)
    reader.initialOffset()
    mqks_broker.stop()
    with pytest.raises(ConnectionError):
        reader.latestOffset()
    mqks_broker.start()
    assert reader.latestOffset()["offset"] == 4


@pytest.mark.parametrize("name", ["maxOffsetsPerTrigger", "minOffsetsPerTrigger"])
def test_without_limits_none_is_taken(unlimited: Unlimited, name: str) -> None:
    with pytest.raises(BadOption, match=rf"{name} needs PySpark 4\.2"):
        unlimited("mqks://h", **{name: 5})


# ------------------------------------------------------------------------------- with Spark


def load(spark: "SparkSession", url: str, **options: object) -> "DataFrame":
    stream = spark.readStream.format("mqks").option("url", url).option("queue", "q")
    if not HAS_LIMITS:
        options.pop("maxOffsetsPerTrigger", None)
    for name, value in {"startingOffsets": EARLIEST, **options}.items():
        stream = stream.option(name, str(value))
    return stream.load()


def drain(frame: "DataFrame", tmp_path: Path, each: Callable[["DataFrame", int], None]) -> None:
    """Run it until everything that is there now has been read."""
    writer = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = writer.foreachBatch(each).trigger(availableNow=True).start()
    assert query.awaitTermination(4 * WAIT_S)


def test_spark_reads_a_batch(spark: "SparkSession", mqks_broker: Broker) -> None:
    publish(mqks_broker, range(100))
    frame = (
        spark.read.format("mqks")
        .option("PORT", mqks_broker.port)
        .option("Queue", "q")
        .option("minPartitions", 3)
        .load()
    )
    assert frame.schema == SCHEMA
    assert frame.rdd.getNumPartitions() == 3
    counted = {row["topic"]: row["count"] for row in frame.groupBy("topic").count().collect()}
    assert counted == {"e.0": 50, "e.1": 50}
    some = spark.read.format("mqks").schema("value binary, topic string")
    [first, *_] = some.option("url", mqks_broker.url).option("queue", "q").load().take(1)
    assert (bytes(first["value"]), first["topic"]) == (b"data 0", "e.0")


def test_spark_shows_what_is_wrong_with_an_option(spark: "SparkSession") -> None:
    with pytest.raises(PySparkException, match="did you mean queue") as told:
        spark.read.format("mqks").option("queu", "q").load().collect()
    assert "BadOption" in str(told.value)


@pytest.mark.slow
def test_a_crash_in_the_first_batch_loses_nothing(
    spark: "SparkSession", mqks_broker: Broker, tmp_path: Path
) -> None:
    publish(mqks_broker, range(10))
    found: list[int] = []
    crashes = [True]

    def each(frame: "DataFrame", batch: int) -> None:
        if crashes and crashes.pop():
            raise RuntimeError("crash")
        found.extend(row["offset"] for row in frame.collect())

    frame = load(spark, mqks_broker.url, startingOffsets="latest")
    with pytest.raises(PySparkException, match="crash"):
        drain(frame, tmp_path, each)
    publish(mqks_broker, range(5))
    for _ in range(1 if HAS_LIMITS else 2):  # One batch each: the first is the one that failed.
        drain(load(spark, mqks_broker.url, startingOffsets="latest"), tmp_path, each)

    assert found == [11, 12, 13, 14, 15]


@pytest.mark.slow
def test_a_query_goes_on_as_messages_come(
    spark: "SparkSession", mqks_broker: Broker, tmp_path: Path
) -> None:
    publish(mqks_broker, range(10))
    found: list[list[int]] = []

    def each(frame: "DataFrame", batch: int) -> None:
        found.append([row["offset"] for row in frame.collect()])

    frame = load(spark, mqks_broker.url, maxOffsetsPerTrigger=6)
    query = (
        frame.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(processingTime="50 milliseconds")
        .start()
    )
    try:
        query.processAllAvailable()
        publish(mqks_broker, range(3))
        query.processAllAvailable()
        assert query.lastProgress is not None
        behind = offsets_behind(query.lastProgress.sources[0])
    finally:
        query.stop()

    first = [[], [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]] if HAS_LIMITS else [[*range(1, 11)]]
    assert found == [*first, [11, 12, 13]]
    assert [*behind.values()] == ([0, 0, 0] if HAS_LIMITS else [])
