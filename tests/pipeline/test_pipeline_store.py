"""Delta tables on a local store of another make: archive, report, replay; answers that are lost.

The one rule: what is in a table is counted by programs that know nothing of mqks.
"""

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import polars
import pyarrow as pa
import pytest
from pyarrow.fs import S3FileSystem
from pyiceberg.utils.config import Config

from mqks.pipeline import objects, table
from mqks.pipeline.archive import Progress
from mqks.pipeline.errors import LakeUnfit, PipelineError, StoreAway
from mqks.pipeline.layout import Layout
from mqks.pipeline.objects import asked
from mqks.pipeline.places import lake_at
from mqks.pipeline.table import DeltaTable, delta
from mqks.pipeline.tables import EventTables
from mqks.testing import Broker
from tests import pipeline_kills as kills
from tests.kit import swift
from tests.kit.ports import accepts, free_port
from tests.kit.preloaded import Clock
from tests.kit.waiting import until
from tests.pipeline import test_pipeline_tables as tables
from tests.pipeline.conftest import Clicks, publish, some, subscribe, waits
from tests.pipeline.test_pipeline_lake import batch
from tests.pipeline.test_pipeline_lake import put as put_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SECRET = "s3cr3t-of-the-store"
LIMIT_S = 60.0


class Moto:
    """The store: a process with a bucket in its memory."""

    def __init__(self) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: accepts(self.port))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Between:
    """The proxy of `store_proxy` before the store, as a process: deltalake holds the GIL while
    it waits."""

    def __init__(self, port: int) -> None:
        self._store_port, self.port = port, 0
        self.start()

    def start(self) -> None:
        """At the port that it had before, if it was stopped."""
        ports = [str(self._store_port), str(self.port)]
        command = [sys.executable, "-m", "tests.kit.store_proxy", *ports]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def _asked(self, path: str) -> list[str]:
        one = HTTPConnection("127.0.0.1", self.port, timeout=LIMIT_S)
        one.request("GET", path)
        told = one.getresponse().read().decode().split(",")
        one.close()
        return told

    @property
    def fault(self) -> str:
        return self._asked("/_fault")[0]

    @fault.setter
    def fault(self, fault: str) -> None:
        self._asked(f"/_fault={fault}")

    @property
    def commits(self) -> int:
        """Conditional puts, and posts to tables, so far."""
        return int(self._asked("/_fault")[1])

    def stop(self) -> None:
        assert self.process.stdout is not None
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@contextmanager
def local_store(store: "Moto | swift.Swift | None" = None) -> Iterator[Between]:
    """A store with `s3://bucket`, behind a proxy, and the environment that says where it is."""
    store = store or Moto()
    proxy = Between(store.port)
    told = {
        "AWS_ACCESS_KEY_ID": swift.USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ALLOW_HTTP": "true",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
    }
    with ExitStack() as opened, pytest.MonkeyPatch.context() as patch:
        opened.callback(store.stop)
        opened.callback(proxy.stop)
        for name, value in told.items():
            patch.setenv(name, value)
        S3FileSystem(
            endpoint_override=told["AWS_ENDPOINT_URL"], allow_bucket_creation=True
        ).create_dir("bucket")
        yield proxy


@pytest.fixture(scope="module", params=["moto", pytest.param("swift", marks=pytest.mark.slow)])
def between(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Between]:
    store: Moto | swift.Swift
    if request.param == "moto":
        store = Moto()
    elif swift.is_there():
        store = swift.Swift(tmp_path_factory.mktemp("swift"), SECRET)
    else:
        pytest.skip("there is no swift-proxy-server on PATH: pip install swift")
    with local_store(store) as opened:
        yield opened


@pytest.fixture(scope="module")
def spark(spark: "SparkSession", between: Between) -> Iterator["SparkSession"]:
    """The session of all tests, whose workers know the store, whenever it was started."""
    told = spark.sparkContext.environment
    store = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    told.update(store)
    yield spark
    for name in store:
        del told[name]


@pytest.fixture
def url(between: Between, request: pytest.FixtureRequest) -> Iterator[str]:
    yield f"s3://bucket/{request.node.name.partition('[')[0]}"
    between.fault = ""


def put(lake: DeltaTable, offsets: range) -> None:
    put_rows(lake, batch(offsets))


def offsets(url: str) -> list[int]:
    """As polars finds them in the table."""
    return sorted(polars.read_delta(url)["offset"].to_list())


@pytest.mark.parametrize("by", [("date",), ("date", "event")])
def test_a_table_on_a_store(url: str, by: tuple[str, ...]) -> None:
    url = f"{url}-{len(by)}"
    for first in (1, 5):
        with DeltaTable(url, layout=Layout(by)) as lake:
            assert lake.next("q", "x-1") == (None if first == 1 else first)
            rows = batch(range(first, first + 4), "ö%/ü x")
            put_rows(lake, rows)
    with DeltaTable(url) as lake:
        assert lake.next("q", "x-1") == 9
        assert lake.layout.partitions == by
    assert offsets(url) == list(range(1, 9))


@pytest.mark.parametrize("fault", ["swallow", "done", "after"])
def test_an_answer_to_a_commit_is_lost_wrong_or_late(
    url: str, between: Between, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{url}-{fault}"
    with DeltaTable(url) as lake:
        put(lake, range(1, 5))
        between.fault, before = fault, between.commits
        if fault == "after":  # Nobody waits as long as it is held.
            monkeypatch.setitem(objects.OPTIONS, "timeout", "1s")
        put(lake, range(5, 9))
        assert between.commits > before, "commits are conditional puts"
        assert between.fault == ("held" if fault == "after" else "")
        between.fault = ""
        assert lake.next("q", "x-1") == 9
        put(lake, range(9, 12))
    assert offsets(url) == list(range(1, 12))


def test_a_store_is_away_when_tables_are_opened_and_when_they_are_committed(
    url: str, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects.OPTIONS, "max_retries", "0")
    between.fault = "500"
    with EventTables(url) as lake:
        with pytest.raises(StoreAway):
            lake.next("q", "x-1")
        between.fault = ""
        tables.put(lake, 9)
        files = tables.staged(lake, tables.rows(range(9, 14), tables.CYCLE))
        between.fault = "500"
        with pytest.raises(StoreAway) as away:
            lake.commit("q", "x-1", 14, files)
        assert SECRET not in str(away.value)
        between.fault = ""
        lake.commit("q", "x-1", 14, files)
        tables.put(lake, 20, tables.NAMES)
    assert tables.archived(url) == tables.expected(14) | {
        name: [n] for n, name in enumerate(tables.NAMES[:20]) if n >= 14
    }
    with pytest.raises(LakeUnfit, match="was created with --table-by event"):
        DeltaTable(url).__enter__()
    with DeltaTable(f"{url}-one") as one:
        put(one, range(3))
    with pytest.raises(LakeUnfit, match="was created without --table-by"):
        EventTables(f"{url}-one").__enter__()
    with pytest.raises(LakeUnfit):
        objects.write("s3://no-such-bucket/x", "y", b"")


COMPACTION = 4
"""Here a table is compacted sooner than by default."""


@pytest.mark.parametrize("hours", [-5, 5])
def test_the_clock_of_an_archive_is_hours_off(
    url: str,
    clock: Clock,
    hours: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It commits, compacts and deletes what is old, and so does another one with the true clock."""
    monkeypatch.setattr(table, "COMPACTION", COMPACTION)
    if "swift" in request.node.name:
        pytest.skip("as AWS does, it refuses requests whose time is off by more than minutes")
    url = f"{url}{hours}"
    clock.ahead(hours * 3600)
    lines = [
        "from tests.pipeline.test_pipeline_store import *",
        "table.COMPACTION = COMPACTION",
        f"with DeltaTable({url!r}) as lake:",
        f"    for n in range({COMPACTION}):",
        "        put(lake, range(n, n + 1))",
        "        lake.roll(60)",
    ]
    # Their threads would wait by the wrong clock, so for no time at all.
    environment = {**os.environ, **clock.environment} | {
        f"{name}_MALLOC_CONF": "background_thread:false" for name in ("JE_ARROW", "_RJEM")
    }
    subprocess.run([sys.executable, "-c", "\n".join(lines)], env=environment, check=True)
    with DeltaTable(url) as lake:
        assert lake.next("q", "x-1") == COMPACTION
        for n in range(COMPACTION, 2 * COMPACTION):
            put(lake, range(n, n + 1))
            lake.roll(60)
    assert offsets(url) == [*range(2 * COMPACTION)]


def test_no_credential_is_told() -> None:
    def fail() -> None:
        raise ValueError("GET https://user:secret@store/box/a?sv=1&sig=secret failed: was there?")

    with pytest.raises(PipelineError, match=r"GET https://store/box/a failed: was there\?"):
        asked("az://box/a", fail)


def test_an_answer_is_lost_and_then_the_store(
    url: str, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(objects.OPTIONS, "max_retries", "0")
    with DeltaTable(url) as lake:
        put(lake, range(1, 5))
        between.fault = "lost"
        with pytest.raises(StoreAway):
            put(lake, range(5, 9))
        with pytest.raises(StoreAway):
            lake.next("q", "x-1")
        with pytest.raises(StoreAway):
            asked(url, partial(delta, url))
        between.fault = ""
        assert lake.next("q", "x-1") == 9, "the commit was there"
        put(lake, range(9, 12))
    assert offsets(url) == list(range(1, 12))


def test_what_is_wrong_is_no_absence(url: str) -> None:
    """A broken table, another division, other columns: nobody waits until they are over."""
    with DeltaTable(url) as lake:
        put(lake, range(1, 5))
        other = batch(range(5, 9)).append_column("data", pa.array([{"n": 1}] * 4))
        put_rows(lake, other)
        with pytest.raises(LakeUnfit, match=f"{url}: the schema does not fit"):
            lake.prepared(pa.struct([("n", pa.string())]))
    with (
        pytest.raises(LakeUnfit, match="use --by day"),
        DeltaTable(url, layout=Layout(("date", "event"))) as lake,
    ):
        lake.next("q", "x-1")
    assert offsets(url) == list(range(1, 9))
    objects.write(f"{url}/_delta_log", f"{0:020}.json", b"no JSON")
    with pytest.raises(PipelineError) as broken:
        asked(url, partial(delta, url))
    assert type(broken.value) is PipelineError


@pytest.fixture
def clicks(clicks: Clicks, url: str) -> Clicks:
    """With a Delta table on the store."""
    clicks.lake = url
    return clicks


def test_from_the_queue_and_back(clicks: Clicks) -> None:
    rows = some(0, 90) + some(90, 10, "order.new")
    clicks.publish(rows)
    assert sum(p.messages for p in clicks.archive(batch_messages=40)) == 100
    assert clicks.waits() == []
    for _ in range(2):  # The second continues the first, which was complete.
        clicks.replay()
        assert [row[1:] for row in clicks.waits()] == [row[1:] for row in rows]


def test_workers_are_killed_while_they_write(clicks: Clicks, url: str, between: Between) -> None:
    """Their files may come late, and are in no commit."""
    clicks.publish(some(0, 20))
    between.fault = "file"
    with ThreadPoolExecutor() as threads:
        archiving = threads.submit(clicks.archive)
        kills.wait_for("a file", lambda: between.fault == "held" or archiving.done())
        assert kills.kill_all(kills.workers(os.getpid()))
        failure = archiving.exception(LIMIT_S)
    assert "Python worker exited unexpectedly" in str(failure)
    between.fault = ""
    assert len(clicks.waits()) == 20, "nothing is trimmed"
    assert sum(p.messages for p in clicks.archive()) == 20
    assert offsets(url) == [*range(1, 21)]


def test_an_archive_waits_for_its_store(
    clicks: Clicks,
    url: str,
    between: Between,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(objects, "PAUSES_S", (0.05, 0.05))
    monkeypatch.setitem(objects.OPTIONS, "max_retries", "0")
    clicks.publish(some(0, 20))
    clicks.archive()
    between.fault = "500"
    clicks.publish(some(20, 20))
    with caplog.at_level(logging.WARNING, "mqks.pipeline"), ThreadPoolExecutor() as threads:
        archiving = threads.submit(clicks.archive)
        kills.wait_for("it", lambda: "the queue waits" in caplog.text or archiving.done())
        assert len(clicks.waits()) == 20, "nothing is trimmed"
        between.fault = ""
        [progress] = archiving.result(LIMIT_S)
    assert progress.messages == 20
    assert caplog.text.count("the queue waits") == 1
    assert SECRET not in caplog.text
    assert clicks.waits() == []
    assert len(offsets(url)) == len(set(offsets(url))) == 40


def test_who_has_no_credentials_is_told_what_to_set(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver, which opens a table, and a worker, which writes its files."""
    names = "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"
    for name in names:
        monkeypatch.delenv(name)
    # As on most machines, which are none of a cloud.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    works: list[Callable[[], object]] = [
        lambda: DeltaTable(url).__enter__(),
        lambda: objects.write(url, "file", b""),
    ]
    wanted = [*names, f"on the machine {socket.gethostname()}", "--conf spark.executorEnv"]
    for work in works:
        with pytest.raises(LakeUnfit) as unfit:
            work()
        assert [word for word in wanted if word not in str(unfit.value)] == []


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("kind", ["delta", "iceberg"])
def test_an_archive_outlives_a_store_that_refuses_connections(
    clicks: Clicks,
    url: str,
    between: Between,
    kind: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clicks.lake = f"{url}-{kind}"
    if kind == "iceberg":
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", clicks.lake)
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
        clicks.lake = "iceberg://lake/db.events"
    stop, found, sent = Event(), list[Progress](), 0
    job = clicks.job(once=False, batch_messages=40, interval_s=0)

    def archive() -> None:
        with lake_at(clicks.lake) as lake:
            found.extend(job.run(clicks.spark.sparkContext, lake, stop))

    def wait(is_so: Callable[[], bool]) -> None:
        kills.wait_for("it", lambda: is_so() or archiving.done())
        assert not archiving.done(), caplog.text

    with caplog.at_level(logging.WARNING, "mqks.pipeline"), ThreadPoolExecutor() as threads:
        archiving = threads.submit(archive)
        try:
            for outage in range(3):
                clicks.publish(some(sent, 60))
                wait(lambda: sum(p.messages for p in found) > sent)  # noqa: B023
                between.stop()
                clicks.publish(some(sent + 60, 20))
                sent += 80
                told = outage + 1
                wait(lambda: caplog.text.count("the queue waits") >= told)  # noqa: B023
                between.start()
                wait(lambda: sum(p.messages for p in found) >= sent)  # noqa: B023
        finally:
            stop.set()

    assert sum(p.messages for p in found) == sent
    assert caplog.text.count("the queue waits") == 3, "once for each, not for each try"
    assert clicks.waits() == []
    rows = clicks.messages().select("offset").collect()
    assert sorted(row[0] for row in rows) == [*range(1, sent + 1)]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_command_waits_for_the_store_of_its_workers(
    mqks_broker: Broker, url: str, between: Between, tmp_path: Path
) -> None:
    subscribe(mqks_broker)
    publish(mqks_broker, some(0, 100))
    between.fault, log = "file", tmp_path / "log"
    job = kills.Job(log, "archive", "clicks", url, "--url", mqks_broker.url, "--once")
    kills.wait_for("a file", lambda: between.fault == "held" or not job.is_running())
    between.fault = "down"
    kills.wait_for("it", lambda: job.is_running() and "the queue waits" in log.read_text())
    assert len(waits(mqks_broker)) == 100
    between.fault = ""
    job.succeed()
    assert offsets(url) == [*range(1, 101)]
    assert waits(mqks_broker) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_drivers_are_killed_in_their_commits(
    mqks_broker: Broker, url: str, between: Between, tmp_path: Path
) -> None:
    """One before the store has the commit, which comes when another archive has gone on; one after
    it; one anywhere."""
    subscribe(mqks_broker)
    log = tmp_path / "log"
    told: list[dict[str, Any]] = []

    def started(*flags: str) -> kills.Job:
        flags = ("--url", mqks_broker.url, "--batch", "1000", "--interval", "0", *flags)
        return kills.Job(log, "archive", "clicks", url, *flags)

    def ended(job: kills.Job, everything: bool) -> None:
        job.kill(everything)
        assert SECRET not in log.read_text() + json.dumps(job.told)

    def held(job: kills.Job) -> bool:
        return between.fault == "held" or not job.is_running()

    publish(mqks_broker, some(0, 2_000))
    told += started("--once").succeed()
    assert [(each["next"], each["lag"]) for each in told] == [(1_001, 1_000), (2_001, 0)]
    publish(mqks_broker, some(2_000, 10_000))

    between.fault = "before"
    job = started()
    kills.wait_for("a commit", partial(held, job))
    ended(job, everything=True)
    assert (len(offsets(url)), len(waits(mqks_broker))) == (2_000, 10_000)

    job = started()
    kills.wait_for("a batch", lambda: job.told or not job.is_running())
    ended(job, everything=False)
    between.fault = ""  # The commit of the first comes too late.

    between.fault = "after"
    job = started()
    kills.wait_for("a commit", partial(held, job))
    ended(job, everything=True)
    between.fault = ""

    told += started("--once").succeed()
    assert SECRET not in log.read_text() + json.dumps(told)
    assert offsets(url) == [*range(1, 12_001)]
    assert waits(mqks_broker) == []
