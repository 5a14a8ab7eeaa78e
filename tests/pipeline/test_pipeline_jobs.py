"""Archive, report and replay on a real Spark with a real broker, and what their commands say.

The one rule: what is in a lake is counted by pyarrow and by Spark alike.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqks.client.errors import RequestFailed
from mqks.commands import main
from mqks.commands.connection import explained
from mqks.errors import MqksError
from mqks.pipeline import archive as archives
from mqks.pipeline import job
from mqks.pipeline.errors import BadOption, DataLost, LakeUnfit, NoQueue
from mqks.pipeline.lake import FileLake
from mqks.pipeline.page import page
from mqks.pipeline.places import existing, lake_at
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.replay import Replay
from mqks.pipeline.report import between, report, waiting
from mqks.pipeline.sink import Publisher
from mqks.pipeline.table import delta
from mqks.pipeline.verify import Verification, Verified
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker, BrokerProcess
from tests import pipeline_kills as kills
from tests.commands.test_command_json import SPARK
from tests.kit import forks
from tests.kit.preloaded import Clock
from tests.kit.server_process import ServerProcess
from tests.pipeline.conftest import Clicks, publish, some, subscribe, waits

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAIN_AND_DELTA = pytest.mark.parametrize("format", ["parquet", "delta"])
YEAR_S = 365 * 86400
INSTALL = "pip install 'mqks[spark]' there; "
NAMED = "PYSPARK_PYTHON, or --conf spark.pyspark.python=PATH, names theirs"


@PLAIN_AND_DELTA
def test_archive_takes_each_message_once_and_trims(clicks: Clicks, format: str) -> None:
    clicks.publish(some(0, 50) + some(50, 10, "order.new"))
    first = clicks.archive(format, batch_messages=25)
    clicks.publish(some(60, 7, "rare"))
    second = clicks.archive(format)
    assert [(p.first, p.next, p.messages, p.lag) for p in first] == [
        (1, 26, 25, 35),
        (26, 51, 25, 10),
        (51, 61, 10, 0),
    ]
    assert [p.waiting for p in first] == ([25, 50, 60] if format == "parquet" else [0, 0, 0])
    assert sum(p.messages for p in second) == 7
    assert clicks.waits() == []
    rows = clicks.messages().collect()
    assert sorted(row["key"].decode() for row in rows) == sorted(f"m{n}" for n in range(67))
    if format == "parquet":
        assert clicks.keys() == sorted(f"m{n}" for n in range(67))
    assert {(row["topic"], bytes(row["value"])) for row in rows} >= {("rare", b'{"n": 66}')}
    assert {row["queue"] for row in rows} == {"clicks"}
    assert all(row["timestamp"] <= row["archived"] for row in rows)
    assert clicks.archive(format) == []


def test_archive_trims_what_the_last_run_could_not(clicks: Clicks) -> None:
    clicks.publish(some(0, 10))
    clicks.archive(trim=False)
    assert len(clicks.waits()) == 10
    assert clicks.archive() == []
    assert clicks.waits() == []
    assert len(clicks.keys()) == 10


@pytest.mark.slow
def test_a_queue_made_anew_before_the_trim_is_archived_whole(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clicks.publish(some(0, 10))
    trims: list[Any] = []
    trim = QueueReader.trim

    def trim_too_late(reader: QueueReader, *told: Any) -> None:
        if not trims:
            with clicks.client() as client:
                client.delete_queue("clicks")
            clicks.subscribe()
            clicks.publish(some(10, 5))
        trims.append(told)
        trim(reader, *told)

    monkeypatch.setattr(QueueReader, "trim", trim_too_late)
    clicks.archive(fail_on_data_loss=False)

    assert clicks.keys() == sorted(f"m{n}" for n in range(15))


@pytest.mark.slow
@PLAIN_AND_DELTA
def test_payloads_of_one_batch_by_arrow_and_by_spark(
    clicks: Clicks, lake: Path, format: str
) -> None:
    bad = {0: "{", 3999: '{"n": "x"}', 4000: "", 4001: '{"n": 1}{"n": 2}', 9_999: '{"n": 1e3}'}
    texts = [bad.get(n, json.dumps({"n": n, "at": "2026-11-20T00:00:00Z"})) for n in range(10_000)]
    clicks.publish([(f"m{n}", "rare", text) for n, text in enumerate(texts)])
    schema = job.schema_of("n bigint, at timestamp")
    progress = clicks.archive(format, schema=schema, batch_messages=6_000)
    files = [str(file) for file in lake.glob("date=*/*.parquet")]
    rows = pa.concat_tables([pq.read_table(file) for file in files]).sort_by("offset").to_pylist()
    assert [each.unparsed for each in progress] == [4, 1]
    assert [row["value"].decode() for row in rows] == texts
    at = datetime(2026, 11, 20, tzinfo=UTC)
    wanted = [None if n in bad else {"n": n, "at": at} for n in range(10_000)]
    assert [row["data"] for row in rows] == wanted
    with existing(lake) as opened:
        assert Verification(opened).run() == Verified(10_000, 1, 0, [])


@PLAIN_AND_DELTA
@pytest.mark.parametrize("published_since", [0, 5, 50])
def test_a_database_older_than_the_lake_is_left_alone(
    clicks: Clicks, format: str, published_since: int
) -> None:
    clicks.publish(some(0, 5))
    restore = clicks.saved()
    clicks.publish(some(5, 10))
    clicks.archive(format)
    restore()
    if published_since:  # They get numbers that the lake has, and more.
        clicks.publish(some(100, published_since))
    with pytest.raises(DataLost, match=r"up to 16, but from 6 on .* older state of the database"):
        clicks.archive(format)
    assert len(clicks.waits()) == 5 + published_since


@pytest.mark.slow
def test_a_clock_that_is_set_back_stops_no_archive(
    spark: "SparkSession", clock: Clock, db: Path, lake: Path
) -> None:
    with ServerProcess(db, environment=clock.environment) as server:
        clicks = Clicks(spark, server, lake)
        for turn, ahead_s in enumerate((YEAR_S, 0, -YEAR_S)):
            clock.ahead(ahead_s)
            clicks.publish(some(10 * turn, 10))
            # What is archived stays, so that times of all turns are looked through.
            clicks.archive(trim=False)
        clicks.publish(some(30, 10))
        clicks.archive()
        assert clicks.waits() == []
    assert clicks.keys() == sorted(f"m{n}" for n in range(40))
    assert len(list(lake.glob("date=*"))) == 3


@pytest.mark.slow
def test_two_archives_of_a_queue_notice_each_other(clicks: Clicks, lake: Path) -> None:
    other = lake.with_name("other")
    for first, path in ((0, lake), (10, other), (20, other)):
        clicks.publish(some(first, 10))
        clicks.archive(lake=path)
    clicks.publish(some(30, 5))
    with pytest.raises(DataLost, match="messages 11 to 30 of the queue clicks are gone"):
        clicks.archive()
    assert len(clicks.waits()) == 5
    clicks.archive(fail_on_data_loss=False)
    assert clicks.keys() == sorted(f"m{n}" for n in [*range(10), *range(30, 35)])
    assert clicks.archive() == []


@pytest.mark.slow
def test_lakes_of_one_queue_have_readers_of_their_own(clicks: Clicks, lake: Path) -> None:
    other = lake.with_name("other")

    def readers() -> Any:
        return clicks.stats()["readers"]

    with clicks.client() as client:
        client.set_queue("clicks", readers="lake,other")
    for first in (0, 10):
        clicks.publish(some(first, 10))
        clicks.archive(reader="lake")
    assert (readers(), len(clicks.waits())) == ({"lake": 21, "other": None}, 20)
    clicks.archive(lake=other, reader="other", batch_messages=15)
    assert (readers(), clicks.waits()) == ({"lake": 21, "other": 21}, [])

    clicks.publish(some(20, 10))
    clicks.archive(reader="lake")
    clicks.broker.stop()
    clicks.broker.start()
    clicks.publish(some(30, 10))
    clicks.archive(lake=other, reader="other")
    assert (readers(), len(clicks.waits())) == ({"lake": None, "other": 41}, 20)
    clicks.archive(reader="lake")
    assert clicks.waits() == []
    assert clicks.keys() == sorted(f"m{n}" for n in range(40))
    assert clicks.keys(other) == clicks.keys()

    clicks.publish(some(40, 10))
    for reader in (None, "third"):
        with pytest.raises(RequestFailed):
            clicks.archive(lake=lake.with_name("third"), reader=reader)
    assert len(clicks.waits()) == 10
    with clicks.client() as client:
        client.set_queue("clicks", readers="other")
    clicks.archive(lake=other, reader="other")
    assert clicks.waits() == []


def test_what_is_trimmed_under_a_batch_is_noticed(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    clicks.publish(some(0, 10))
    stage = archives._Run._stage

    def trimmed_meanwhile(*told: Any) -> Any:
        with QueueReader(clicks.broker.url, "clicks") as reader:
            reader.trim(4)
        return stage(*told)

    monkeypatch.setattr(archives._Run, "_stage", trimmed_meanwhile)
    with pytest.raises(DataLost, match="messages 1 to 3 of the queue clicks are gone"):
        clicks.archive()

    assert len(clicks.waits()) == 7


@pytest.mark.usefixtures("jobs_here")
def test_archive_of_no_queue(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestFailed):
        clicks.archive(queue="none")
    shutil.rmtree(lake)
    for queue in ("none", "none.*"):
        told = ["pipeline", "archive", queue, str(lake), "--once", "--url", clicks.broker.url]
        assert (main(told), capsys.readouterr().out, lake.exists()) == (65, "", False)


@pytest.mark.slow
@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("format", ["parquet", "delta", "iceberg"])
def test_a_queue_that_is_gone_is_a_loss(
    clicks: Clicks, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    if format == "iceberg":
        clicks.lake = "iceberg://lake/db.events"

    def archived(queue: str, **options: Any) -> dict[str, int]:
        told = clicks.archive(format, queue=queue, **options)
        return {progress.queue: progress.messages for progress in told}

    def delete() -> None:
        clicks.publish_to("o.eu", 20, 7)  # Not archived.
        with clicks.client() as client:
            client.delete_queue("o.eu")

    for queue, first in (("o.eu", 0), ("o.us", 10)):
        clicks.publish_to(queue, first, 5)
    assert archived("o.*") == {"o.eu": 5, "o.us": 5}
    delete()
    if format != "delta":  # It does not tell the queues it has.
        with pytest.raises(DataLost, match=r"the queue o\.eu was deleted: "):
            archived("o.*")
        assert archived("o.*", fail_on_data_loss=False) == {}
        assert "the queue o.eu was deleted: " in caplog.text
        assert archived("o.*") == {}  # It is said once.
        clicks.publish_to("o.eu", 30, 3)
        assert archived("o.*") == {"o.eu": 3}
        delete()
    clicks.publish_to("o.eu", 40, 4)
    for queue in ("o.eu", "o.*"):
        with pytest.raises(DataLost, match=r"the queue o\.eu was deleted and created again: "):
            archived(queue)
    assert archived("o.*", fail_on_data_loss=False) == {"o.eu": 4}
    assert archived("o.*") == archived("o.eu") == {}


# ------------------------------------------------------------------------------------- report


def sent(n: int, event: str, ago_s: float, form: str) -> tuple[str, str, str]:
    at = time.time() - ago_s
    told: Any = datetime.fromtimestamp(at, UTC).isoformat() if form == "iso" else at
    if form in ("ms", "us"):
        told = round(at * (1e3 if form == "ms" else 1e6))
    return f"m{n}", event, json.dumps({"sent": told})


reported = partial(report, title="t", window_s=1, sent_field="sent")


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_report_of_a_queue_and_of_its_lake(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.publish([sent(0, "rare", 5, "s"), *some(100, 1)])
    clicks.publish([("again", "order.new", "x"), ("other", "order.new", "yy")])
    with clicks.client() as client:
        client.publish("order.new", "x", id="again", confirm=True)
    time.sleep(1.1)  # The next ones are to lie in another window than the first.
    forms = ("s", "ms", "us", "iso")
    clicks.publish([sent(n, "page.view", 10, forms[n % 4]) for n in range(1, 41)])
    live = reported(waiting(clicks.spark, "clicks", clicks.broker.url))
    assert len(clicks.waits()) == 45, "a report changes nothing"
    clicks.archive()
    kept = reported(clicks.messages())

    assert (live.events, live.windows, live.delays) == (kept.events, kept.windows, kept.delays)
    assert [(e.event, e.messages, e.ids, e.retries) for e in kept.events] == [
        ("page.view", 41, 41, 0),
        ("order.new", 3, 2, 1),
        ("rare", 1, 1, 0),
    ]
    assert {e.event: e.bytes for e in kept.events}["order.new"] == 4
    assert sum(window.messages for window in kept.windows) == kept.messages == 45
    assert [event.event for event in kept.silent] == ["order.new", "rare"]
    [delay] = kept.delays
    assert (delay.queue, delay.messages) == ("clicks", 41)
    assert 9 < delay.p50 <= delay.p90 <= delay.p99 <= delay.most < 300
    [waited] = report(clicks.messages(), title="t").delays
    assert 0 <= waited.p50 <= waited.most < 300

    html, windows = lake.with_name("report.html"), lake.with_name("windows.parquet")
    files = ["--html", str(html), "--parquet", str(windows)]
    assert main(["pipeline", "report", str(lake), *files, "--top", "1"]) == 0
    told = capsys.readouterr().out
    assert "45 messages" in told
    top, _, _ = told.partition("Windows of ")
    assert ("page.view" in top, "rare" in top) == (True, False)
    assert html.read_text().startswith("<!doctype html>")
    assert sum(pq.read_table(windows)["messages"].to_pylist()) == 45


@pytest.mark.slow
def test_a_time_that_is_none_is_passed_over(clicks: Clicks) -> None:
    odd = ["NaN", "Infinity", "-Infinity", 1e300, -1e300, -5, "9" * 400, "", None, {}]
    rows = [(f"m{n}", "rare", json.dumps({"sent": told})) for n, told in enumerate(odd)]
    clicks.publish([*rows, sent(99, "rare", 10, "s")])
    found = reported(waiting(clicks.spark, "clicks", clicks.broker.url))
    [delay] = found.delays
    assert (delay.messages, 9 < delay.p50 == delay.most < 300) == (1, True)
    assert "rare" in page(found)


@pytest.mark.slow
def test_windows_have_a_limit(clicks: Clicks) -> None:
    from pyspark.sql import functions as F

    clicks.publish(some(0, 2))
    rows = waiting(clicks.spark, "clicks", clicks.broker.url)
    days = rows.withColumn("timestamp", F.timestamp_seconds(F.col("offset") * 86_400))
    assert report(days, title="t").window_s == 3_600
    with pytest.raises(BadOption, match="windows of 1 s"):
        report(days, title="t", window_s=1)


@pytest.mark.slow
def test_report_between_two_times(clicks: Clicks, lake: Path) -> None:
    clicks.publish(some(0, 5))
    clicks.archive()
    rows = clicks.messages()
    now = datetime.now(UTC)
    assert between(rows, now - timedelta(hours=1), now).count() == 5
    assert between(rows, now, None).count() == 0
    assert between(rows, None, now - timedelta(days=2)).count() == 0
    assert report(between(rows, now, None), title="none").events == []
    with pytest.raises(LakeUnfit, match="no lake"):
        clicks.messages(lake / "none")


# ------------------------------------------------------------------------------------- replay


@pytest.mark.slow
def test_replay_publishes_each_message_once_and_in_order(clicks: Clicks, lake: Path) -> None:
    clicks.publish(some(0, 30) + some(30, 10, "order.new"))
    clicks.archive(batch_messages=7)
    clicks.subscribe("copy")
    options: dict[str, Any] = {"lake": lake, "server": clicks.server}
    some_of_it = Replay(**options, events="order.*", name="some")
    assert some_of_it.counts(clicks.spark) == [("order.new", 10)]
    assert Replay(**options, events="ord**w").counts(clicks.spark) == [("order.new", 10)]
    assert clicks.waits("copy") == []
    for _ in range(2):
        *_, last = some_of_it.run(clicks.spark, Event())
        assert (last.messages, last.total) == (10, 10)
    assert [row[1:] for row in clicks.waits("copy")] == [
        row[1:] for row in some(30, 10, "order.new")
    ]
    *_, last = clicks.replay()
    copied = clicks.waits("copy")[10:]

    assert last.total == 40
    assert [row[1:] for row in copied] == [
        row[1:] for row in some(0, 30) + some(30, 10, "order.new")
    ]
    assert len({row[0] for row in copied}) == 40
    with QueueReader(clicks.broker.url, "copy", meta=True) as reader:
        [headers] = [batch["headers"].to_pylist() for batch in reader.read(11, 51)]
    with QueueReader(clicks.broker.url, "clicks") as reader:
        epoch = reader.range().epoch
    assert [[header["key"] for header in told] for told in headers] == [
        ["origin_queue", "origin_epoch", "origin_offset"]
    ] * 40
    assert [tuple(header["value"].decode() for header in told) for told in headers] == [
        ("clicks", epoch, str(number)) for number in range(1, 41)
    ]
    with pytest.raises(BadOption, match="another name"):
        clicks.replay(events="rare")


@pytest.mark.parametrize(
    ("before", "now", "goes_on"),
    [
        ("*", "**", True),
        ("*", "*", False),
        ("rare", "rare", True),
        ("order.*", "order.*", False),
        ("order.*", "order.**", False),
        ("rar?", "rar?", False),
    ],
)
def test_a_replay_that_an_older_version_began(
    tmp_path: Path, before: str, now: str, goes_on: bool
) -> None:
    """In its masks a star stood for any characters."""
    job = Replay(lake=tmp_path, server=ServerAddress(url="mqks://here"), events=now)
    job._save(tmp_path, 17, {"offset": 3})
    state = json.loads((tmp_path / job._state).read_bytes())
    del state["job"]["mask"]
    state["job"]["events"] = before
    (tmp_path / job._state).write_text(json.dumps(state))
    if goes_on:
        assert job._load(tmp_path) == (17, {"offset": 3})
    else:
        with pytest.raises(BadOption, match="another name"):
            job._load(tmp_path)


def test_a_lake_whose_older_files_have_no_data(clicks: Clicks, lake: Path) -> None:
    """The way to read it with pyarrow that the docs tell."""
    clicks.publish(some(0, 3))
    clicks.archive()
    assert FileLake(lake).lacks_data()
    clicks.publish(some(3, 2))
    clicks.archive(schema=job.schema_of("n bigint"), roll_s=1e9)
    read = ds.dataset(lake, partitioning="hive")
    schemas = [fragment.physical_schema for fragment in read.get_fragments()]
    read = read.replace_schema(pa.unify_schemas([read.schema, *schemas]))
    rows = sorted(read.to_table().to_pylist(), key=lambda row: row["key"])
    assert [row["data"] for row in rows] == [None, None, None, {"n": 3}, {"n": 4}]
    assert {row["topic"] for row in rows} == {"page.view"}


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_a_replay_that_would_be_archived_again_needs_a_yes(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.publish(some(0, 5))
    clicks.archive()
    job_of_it = Replay(lake=lake, server=clicks.server)
    assert job_of_it.archived_here(clicks.spark) == ["clicks"]
    replay = ["pipeline", "replay", str(lake), "--url", clicks.broker.url]
    capsys.readouterr()
    assert main(replay) == 65
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"mqks: {lake} was archived from clicks of this server: ")
    assert "the lake contains each of them twice" in err
    assert err.endswith("or give --yes\n")
    assert main([*replay, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert "page.view" in out
    assert "without --dry-run this needs --yes" in err
    assert clicks.waits() == []
    assert main([*replay, "--yes"]) == 0
    assert len(clicks.waits()) == 5
    # The queue of this name is another one now, and so is another server's.
    with clicks.client() as client:
        client.delete_queue("clicks")
        assert job_of_it.archived_here(clicks.spark) == []
        client.subscribe("clicks", ["page.view"])
    assert job_of_it.archived_here(clicks.spark) == []


@pytest.mark.slow
@PLAIN_AND_DELTA
def test_an_archive_leaves_out_what_a_replay_published(
    clicks: Clicks, lake: Path, format: str
) -> None:
    clicks.publish(some(0, 30))
    clicks.archive(format)
    *_, last = clicks.replay()
    assert last.messages == 30
    [all_of_it] = clicks.archive(format)
    assert (all_of_it.messages, all_of_it.left_out, all_of_it.files) == (0, 30, 0)
    assert clicks.waits() == []
    assert clicks.archive(format) == []  # The lake has up to there.

    clicks.replay(name="again")
    clicks.publish(some(30, 5))
    [some_of_it] = clicks.archive(format, schema=job.schema_of("n bigint"))
    assert (some_of_it.messages, some_of_it.left_out, some_of_it.unparsed) == (5, 30, 0)
    assert clicks.keys() == sorted(f"m{n}" for n in range(35))

    clicks.replay(name="third")
    [told] = clicks.archive(format, include_replays=True)
    assert (told.messages, told.left_out) == (35, 0)
    assert len(clicks.keys()) == 70
    table = delta(lake).to_pyarrow_dataset() if format == "delta" else ds.dataset(lake)
    origins = table.filter(ds.field("origin_queue") == "clicks").to_table()["origin_offset"]
    assert sorted(origins.to_pylist()) == [*range(1, 31), *range(91, 96)]

    # Another queue has no originals of it.
    clicks.subscribe("copy")
    clicks.replay(name="fourth")
    [copied] = clicks.archive(format, lake=lake.with_name("copy"), queue="copy")
    assert (copied.messages, copied.left_out) == (70, 0)


@pytest.mark.slow
def test_a_replay_of_many_parts_keeps_the_order(
    clicks: Clicks, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = "x" * 1000
    for n in range(0, 40, 5):  # Arrivals at several times: a part holds what came at one whole.
        clicks.publish([(f"m{m}", "rare", f"{m}{data}") for m in range(n, n + 5)])
    clicks.archive()
    clicks.subscribe("copy")
    sent_at_once: list[int] = []
    publish_all = Publisher.publish

    def publish_some(publisher: Publisher, ids: Any, *columns: Any) -> None:
        sent_at_once.append(len(ids))
        publish_all(publisher, ids, *columns)

    monkeypatch.setattr("mqks.pipeline.replay.PART_BYTES", 8_000)
    monkeypatch.setattr(Publisher, "publish", publish_some)
    clicks.replay()

    assert [row[2] for row in clicks.waits("copy")] == [f"{n}{data}" for n in range(40)]
    assert max(sent_at_once) < 40


@pytest.mark.slow
def test_replay_in_the_pace_it_had(
    clicks: Clicks, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0  # Of a clock that goes on while one waits, and else stands still.

    class Waits(Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now_s
            assert timeout
            now_s += timeout
            return False

    published_s: list[float] = []
    publish_all = Publisher.publish

    def publish_some(publisher: Publisher, ids: Any, *columns: Any) -> None:
        published_s.extend([now_s] * len(ids))
        publish_all(publisher, ids, *columns)

    for n in range(3):
        clicks.publish(some(n, 1))
    with QueueReader(clicks.broker.url, "clicks") as reader:
        [came] = [batch["timestamp"].to_pylist() for batch in reader.read(1, 4)]
    clicks.archive()
    monkeypatch.setattr("mqks.pipeline.replay.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(Publisher, "publish", publish_some)
    job = Replay(lake=lake, server=clicks.server, speed=2.0)
    list(job.run(clicks.spark, Waits()))

    passed_s = [(at - came[0]).total_seconds() for at in came]
    assert passed_s == sorted(set(passed_s)), "they came one after the other"
    assert [at_s - 1000 for at_s in published_s] == pytest.approx([at / 2 for at in passed_s])


# ------------------------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("lake", "code", "end"),
    [
        ("table", 65, b"is a Delta table: use --format delta\n"),
        ("empty", 69, b"; on Debian: apt install openjdk-17-jre-headless\n"),
    ],
    ids=["a lake", "no Java"],
)
def test_without_java_exactly_that_is_said_after_what_is_wrong_with_a_lake(
    lake: str, code: int, end: bytes, tmp_path: Path
) -> None:
    for name in ("table/_delta_log", "empty"):
        (tmp_path / name).mkdir(parents=True)
    command = [sys.executable, "-m", "mqks", "pipeline", "archive", "q", lake, "--once"]
    nowhere = os.environ | {"JAVA_HOME": "/nowhere", "PATH": "/nowhere"}
    done, out, err = forks.run(command, environment=nowhere, directory=tmp_path)
    assert (done, out, err.count(b"\n"), err.endswith(end)) == (code, b"", 1, True), err


@pytest.mark.parametrize(
    "url",
    [
        *("ftp://bucket/lake", "s3:/bucket/lake", "file:///lake"),
        *("s3://bucket", "gs://bucket", "s3://key:secret@bucket/lake"),
    ],
)
@pytest.mark.parametrize("command", [["archive", "q"], ["report"], ["replay"]])
def test_a_url_is_no_directory(
    command: list[str],
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pipeline", *command, url]) == os.EX_DATAERR
    told = capsys.readouterr().err
    assert told.startswith(f"mqks: a lake cannot be at {url.partition('/')[0]}/")
    assert "secret" not in told
    assert not list(tmp_path.iterdir())


def test_without_the_extra_its_name_is_told(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pyspark'] = None")
    command = [sys.executable, "-m", "mqks", "pipeline", "report", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 69
    assert done.stderr.strip().endswith("pip install 'mqks[spark]'")


@pytest.mark.parametrize(
    "arguments",
    [
        ["report"],
        ["report", "lake", "--queue", "q"],
        ["report", "lake", "--start", "noon"],
        ["replay", "lake", "--speed", "0"],
        ["archive", "q", "lake", "--conf", "nothing"],
    ],
)
def test_what_the_command_line_does_not_understand(arguments: list[str]) -> None:
    assert main(["pipeline", *arguments]) == os.EX_USAGE


def test_a_schema_is_read_from_a_file_or_as_it_stands(
    spark: "SparkSession", tmp_path: Path
) -> None:
    told = job.schema_of("n bigint")
    assert told is not None
    for name, text in (("ddl", "n bigint"), ("json", told.json())):
        (tmp_path / name).write_text(text)
        assert job.schema_of(str(tmp_path / name)) == told


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_jobs_are_told_as_json(
    clicks: Clicks,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By the table of the test of all commands."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MQKS_URL", clicks.broker.url)
    clicks.publish_to("q", 0, 1)
    for name, words in SPARK.items():
        assert main([*name.split()[1:], *words.split(), "--json"]) == 0
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert objects
        assert all(isinstance(each, dict) and each for each in objects)


@pytest.mark.parametrize(
    ("told", "code", "line"),
    [
        ("mqks.pipeline.errors.DataLost: messages 1 to 3 are gone", 65, "messages 1 to 3 are gone"),
        ("mqks.client.errors.RequestFailed: no such queue", 65, "no such queue"),
        (
            "mqks.client.errors.ConnectionLost: queues:25000 from node7: [Errno 111] no",
            69,
            "the server cannot be reached: queues:25000 from node7: [Errno 111] no",
        ),
        ("mqks.pipeline.errors.LakeUnfit: not on node7", 65, "not on node7"),
        ("ModuleNotFoundError: No module named 'mqks.pipeline'", 70, f"no mqks: {INSTALL}{NAMED}"),
        (
            "x.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different"
            " version: 3.13 than that in driver: 3.11, PySpark cannot",
            70,
            f"Python is 3.13, and this one is 3.11; {NAMED}",
        ),
        (
            ": org.apache.spark.SparkException: Job aborted: java.io.IOException: Cannot run"
            ' program "/opt/python": error=2, No such file or directory',
            70,
            f"the workers have no Python /opt/python; {NAMED}",
        ),
        (
            ": java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.",
            70,
            "there is no master at that URL; see Spark's own lines above",
        ),
        ("OSError: [Errno 28] No space left", 70, "OSError: [Errno 28] No space left"),
    ],
)
def test_what_ended_a_task_is_told_in_a_line(told: str, code: int, line: str) -> None:
    frames = "org.apache.spark.SparkException: Job aborted\n\tat org.apache.spark.Executor"
    text = f"An exception was thrown from the worker\n  File x\n{told}\n\n{frames}"
    failure = job.failure(text)
    assert isinstance(failure, MqksError)
    assert failure.exit_code == code
    assert str(failure).endswith(line)


def test_the_server_tells_why_it_refused_a_task(mqks_broker: Broker) -> None:
    with QueueReader(mqks_broker.url, "none") as reader, pytest.raises(RequestFailed) as refused:
        reader.range()
    told = f"Traceback\nmqks.client.errors.RequestFailed: {refused.value}\n SQLSTATE: 38000"
    failure = explained(job.failure(told), mqks_broker.url)
    assert str(failure) == f"{refused.value}: range: there is no queue 'none'"


def test_an_error_that_says_nothing_is_told_by_its_cause() -> None:
    from py4j.protocol import Py4JNetworkError

    silent = Py4JNetworkError()
    assert job.text(silent) == "Py4JNetworkError"
    silent.__cause__ = ConnectionResetError(104, "reset")
    assert job.text(silent) == "[Errno 104] reset"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_until_java_has_started(number: signal.Signals) -> None:
    steps = []

    def start() -> None:
        with job.signals_wait():
            signal.raise_signal(number)
            steps.append("started")

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert steps == ["started"]


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_an_archive_beside_its_broker_is_gentle(mqks_broker: Broker, tmp_path: Path) -> None:
    """It leaves a core, and its workers, which wait for the first message, have the lowest
    priority."""
    subscribe(mqks_broker)
    flags = ["--url", mqks_broker.url, "--interval", "0"]
    lake = str(tmp_path / "lake")
    job = kills.Job(tmp_path / "log", "archive", "clicks", lake, *flags, master=())
    kills.wait_for("workers", lambda: job.is_running() and kills.workers(job.process.pid))
    publish(mqks_broker, some(0, 500))
    kills.wait_for("a batch", lambda: job.told or not job.is_running())
    priorities = [os.getpriority(os.PRIO_PROCESS, each) for each in kills.workers(job.process.pid)]
    job.process.terminate()
    assert job.succeed()[0]["files"] == len(priorities) == max(1, (os.cpu_count() or 1) - 1)
    assert {*priorities} == {19}


# ----------------------------------------------------------------------------------------- kills


@pytest.mark.slow
@pytest.mark.usefixtures("spark")
def test_when_java_alone_is_killed_that_is_said(mqks_broker: Broker, tmp_path: Path) -> None:
    subscribe(mqks_broker)
    publish(mqks_broker, some(0, 10))
    flags = ["--url", mqks_broker.url, "--interval", "0.2", "--batch", "10"]
    job = kills.Job(tmp_path / "log", "archive", "clicks", str(tmp_path / "lake"), *flags)
    kills.wait_for("a batch", lambda: job.told or not job.is_running())
    driver = job.process.pid
    for child in Path(f"/proc/{driver}/task/{driver}/children").read_text().split():
        with suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    publish(mqks_broker, some(10, 10))
    assert job.process.wait(kills.LIMIT_S) == 70
    # A thread of PySpark may write its own trace before or after it.
    assert "mqks: Spark's Java process has died" in (tmp_path / "log").read_text().splitlines()
    assert len(waits(mqks_broker)) == 10, "nothing is trimmed that is not in the lake"


@pytest.mark.slow
@pytest.mark.parametrize(("format", "driver_kills"), [("parquet", 4), ("delta", 2)])
def test_all_is_killed_and_each_message_is_in_the_lake_once(
    spark: "SparkSession", tmp_path: Path, format: str, driver_kills: int
) -> None:
    count = 40_000
    lake = kills.archive(spark, tmp_path, count, seed=1, format=format, driver_kills=driver_kills)
    assert kills.counted_by_spark(spark, lake) == (count, count, count)
    if format == "parquet":
        assert kills.counted(lake) == (count, count, count)


@pytest.mark.slow
def test_replay_while_the_broker_is_killed(spark: "SparkSession", tmp_path: Path) -> None:
    count = 60_000  # Six parts: the kills come within them.
    copy = kills.replay(spark, tmp_path, count, seed=1)
    assert kills.counted(copy) == kills.counted_by_spark(spark, copy) == (count,) * 3


# ------------------------------------------------------------------------------------- many queues


@pytest.mark.slow
def test_queues_by_a_mask_into_one_table(
    clicks: Clicks, lake: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "FIND_S", 0.0)
    for number, queue in enumerate(("orders.eu", "orders.us", "orders.us.test", "other")):
        clicks.publish_to(queue, 100 * number, 10)
    found = clicks.archive("delta", queue="orders.*", batch_messages=6)
    assert sorted((p.queue, p.messages) for p in found) == [
        *(("orders.eu", count) for count in (4, 6)),
        *(("orders.us", count) for count in (4, 6)),
    ]
    with pytest.raises(NoQueue, match=r"no queue matches none\.\*"):
        clicks.archive("delta", queue="none.*")

    stop, told = Event(), []
    job = clicks.job(queue="orders.*", once=False, interval_s=0, fail_on_data_loss=False)
    with lake_at(lake, "delta") as opened:
        clicks.publish_to("orders.eu", 50, 3)
        for progress in job.run(clicks.spark.sparkContext, opened, stop):
            told.append((progress.queue, progress.messages))
            if len(told) == 1:
                with clicks.client() as client:
                    client.delete_queue("orders.us")
                clicks.publish_to("orders.new", 60, 2)
            else:
                stop.set()

    assert told == [("orders.eu", 3), ("orders.new", 2)]
    rows = [(row["queue"], row["key"].decode()) for row in clicks.messages().collect()]
    keys = {"orders.eu": [*range(10), 50, 51, 52], "orders.new": [60, 61]}
    keys["orders.us"] = [*range(100, 110)]
    assert sorted(rows) == sorted((name, f"m{n}") for name in keys for n in keys[name])


@pytest.mark.slow
def test_a_paused_archive_commits_nothing_and_goes_on(
    spark: "SparkSession",
    mqks_broker_process: BrokerProcess,
    lake: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, plain = count(), QueueReader.range

    def looked(reader: QueueReader, *told: Any, **how: Any) -> Any:
        next(looks)
        return plain(reader, *told, **how)

    def follow(*, once: bool, until: int) -> None:
        """Archive; it is stopped after so many looks, or ends by itself."""

        def stopped() -> None:
            first = next(looks)
            kills.wait_for("looks", lambda: next(looks) > first + 2 * until)
            stop.set()

        stop, job = Event(), clicks.job(interval_s=0.01, once=once)
        with kills.at_the_same_time(stopped if until else lambda: None), FileLake(lake) as opened:
            found.extend(job.run(spark.sparkContext, opened, stop))

    monkeypatch.setattr(QueueReader, "range", looked)
    found: list[archives.Progress] = []
    broker, clicks = mqks_broker_process, Clicks(spark, mqks_broker_process, lake)
    clicks.publish(some(0, 5))
    follow(once=False, until=20)
    assert [each.messages for each in found] == [5]
    with clicks.client() as client:
        client.pause("clicks", deliveries=True)
    clicks.publish(some(5, 5))
    follow(once=True, until=20)
    broker.kill()
    broker.start()
    follow(once=False, until=20)
    row = clicks.stats()
    assert (row["archive_state"], row["archive_lag"], row["ready"]) == ("paused", 5, 5)
    assert len(found) == 1
    with clicks.client() as client:
        client.resume("clicks")
    follow(once=True, until=0)
    assert clicks.keys() == sorted(f"m{n}" for n in range(10))
    assert clicks.waits() == []


@pytest.mark.slow
def test_the_server_shows_how_far_an_archive_is(clicks: Clicks, lake: Path) -> None:
    row = clicks.stats
    clicks.publish(some(0, 10))
    assert (row()["archived_seq"], row()["archive_lag"]) == (None, None)
    with lake_at(lake) as opened:
        steps = clicks.job(batch_messages=4).run(clicks.spark.sparkContext, opened, Event())
        assert (next(steps).lag, row()["archived_seq"], row()["archive_lag"]) == (6, 5, 6)
        list(steps)
    clicks.publish(some(10, 3))
    assert (row()["archived_seq"], row()["archive_lag"]) == (11, 3)
