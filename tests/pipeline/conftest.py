"""A queue with a lake behind it, and what the tests of the jobs do to the two."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pyiceberg.utils.config import Config

from mqks.client.blocking import BlockingClient, connect
from mqks.pipeline import places, wire
from mqks.pipeline.archive import Archive, Progress
from mqks.pipeline.errors import JavaMissing
from mqks.pipeline.lake import Lake
from mqks.pipeline.objects import Place
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.replay import Replay, ReplayProgress
from mqks.pipeline.session import check_java
from mqks.pipeline.sink import Publisher
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker, BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Served = Broker | BrokerProcess
Row = tuple[str, str, str]
"""Id, event and data."""
EVENTS = ["page.view", "order.new", "rare"]


def subscribe(broker: Served, queue: str = "clicks", events: list[str] = EVENTS) -> None:
    with connect(broker.url) as client:
        client.subscribe(queue, events)


def publish(broker: Served, rows: Iterable[Row]) -> None:
    columns = zip(*((i.encode(), e.encode(), d.encode()) for i, e, d in rows), strict=True)
    with Publisher(ServerAddress(url=broker.url)) as publisher:
        publisher.publish(*(pa.array(column, pa.binary()) for column in columns))


def some(first: int, count: int, event: str = "page.view") -> list[Row]:
    return [(f"m{n}", event, json.dumps({"n": n})) for n in range(first, first + count)]


def waits(broker: Served, queue: str = "clicks") -> list[Row]:
    """What waits in a queue."""
    with QueueReader(broker.url, queue) as reader:
        log = reader.range()
        rows = [row for batch in reader.read(log.first, log.next) for row in batch.to_pylist()]
    return [(row["key"].decode(), row["topic"], row["value"].decode()) for row in rows]


class Clicks:
    """The queue `clicks` of a broker, its lake, and the session of Spark that jobs have."""

    def __init__(self, spark: "SparkSession", broker: Served, lake: Place) -> None:
        self.spark, self.broker, self.lake = spark, broker, lake
        self.subscribe()

    @property
    def server(self) -> ServerAddress:
        return ServerAddress(url=self.broker.url)

    def client(self) -> BlockingClient:
        return connect(self.broker.url)

    def subscribe(self, queue: str = "clicks", events: list[str] = EVENTS) -> None:
        subscribe(self.broker, queue, events)

    def saved(self) -> Callable[[], None]:
        """Gives what takes the database of a broker of this process back to what it is now."""
        broker = self.broker
        assert isinstance(broker, Broker)
        broker.stop()
        database = broker.settings.db_file
        now = database.read_bytes()
        broker.start()

        def restore() -> None:
            broker.stop()
            database.with_name(f"{database.name}-wal").unlink(missing_ok=True)
            database.write_bytes(now)
            broker.start()

        return restore

    def stats(self) -> dict[str, Any]:
        with self.client() as client:
            told: dict[str, Any] = client.stats("queue", "clicks")
        return told

    def publish(self, rows: Iterable[Row]) -> None:
        publish(self.broker, rows)

    def publish_to(self, queue: str, first: int, count: int) -> None:
        """Make a queue, and publish to its own event."""
        self.subscribe(queue, [queue])
        self.publish(some(first, count, queue))

    def waits(self, queue: str = "clicks") -> list[Row]:
        return waits(self.broker, queue)

    def job(self, **options: Any) -> Archive:
        """Which ends by itself."""
        told: dict[str, Any] = {"queue": "clicks", "server": self.server, "once": True}
        return Archive(**told | options)

    def archive(
        self, format: str | None = None, *, lake: Place | None = None, **options: Any
    ) -> list[Progress]:
        with places.lake_at(self.lake if lake is None else lake, format) as opened:
            return self.archive_into(opened, **options)

    def archive_into(self, lake: Lake, bad: Lake | None = None, **options: Any) -> list[Progress]:
        return [*self.job(**options).run(self.spark.sparkContext, lake, Event(), bad)]

    def replay(self, **options: Any) -> list[ReplayProgress]:
        told = {"lake": self.lake, "server": self.server} | options
        return [*Replay(**told).run(self.spark, Event())]

    def messages(self, lake: Place | None = None, **how: Any) -> "DataFrame":
        return places.messages(self.spark, self.lake if lake is None else lake, **how)

    def keys(self, lake: Place | None = None) -> list[str]:
        """As pyarrow finds them in plain files."""
        table = ds.dataset(lake or self.lake, partitioning="hive").to_table(columns=["key"])
        return sorted(key.decode() for key in table["key"].to_pylist())


@pytest.fixture(autouse=True)
def _retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "RETRY_MIN_S", 0.001)


@pytest.fixture(scope="session")
def java() -> None:
    """What starts Spark in other processes is skipped where there is none."""
    try:
        check_java()
    except JavaMissing as missing:
        pytest.skip(str(missing))


@pytest.fixture(params=["parquet", "delta", "iceberg"])
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    return tmp_path / "lake"


@pytest.fixture
def clicks(spark: "SparkSession", mqks_broker: Broker, lake: Path) -> Clicks:
    return Clicks(spark, mqks_broker, lake)


@pytest.fixture
def catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog `lake` of Iceberg, in a database."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", f"file://{tmp_path}/warehouse")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # Else as at the import.


@contextmanager
def answering(server: ThreadingHTTPServer) -> Iterator[None]:
    """Meanwhile it answers, in a thread."""
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield
    server.shutdown()
    thread.join()


class Quiet(BaseHTTPRequestHandler):
    """What answers, and writes no log."""

    def log_message(self, *_told: object) -> None:
        pass


def place_of(path: Path, kind: str) -> tuple[Any, str | None]:
    """The place of a lake that is files, delta or iceberg, and its format."""
    if kind == "iceberg":
        return "iceberg://lake/db.events", None
    return path / "lake", "delta" if kind == "delta" else None
