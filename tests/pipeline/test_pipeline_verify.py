"""`mqks pipeline verify`: rows that were added, lost, doubled or changed since are found.

The one rule: what changes a lake here is another program, which knows nothing of its sums.
"""

import json
import re
import shutil
from collections.abc import Callable
from datetime import date
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.utils.config import Config

from mqks.client.blocking import connect
from mqks.commands import main
from mqks.pipeline.archive import Archive
from mqks.pipeline.columns import PROPERTIES
from mqks.pipeline.job import schema_of
from mqks.pipeline.lake import CONTROL, WRITTEN, FileLake, Lake, stage
from mqks.pipeline.replay import Replay
from mqks.pipeline.sums import ranges, sums_of
from mqks.pipeline.table import COMPACTION, DeltaTable, LakeTable
from mqks.pipeline.tables import EventTables
from mqks.pipeline.verify import Verification
from mqks.pipeline.wire import ServerAddress
from mqks.testing import Broker, BrokerProcess
from tests.pipeline.test_pipeline_jobs import EVENTS, publish, run, some, subscribe
from tests.pipeline.test_pipeline_lake import DAY_US, NOON_US, batch, put

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SIZE = 1 << 20
Opened = Callable[[Path], Lake]


def iceberg(path: Path) -> LakeTable:
    from mqks.pipeline.iceberg import IcebergTable

    return IcebergTable("iceberg://sums/lake.events")


@pytest.fixture(params=[FileLake, DeltaTable, iceberg])
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Opened:
    monkeypatch.setenv("PYICEBERG_CATALOG__SUMS__TYPE", "sql")
    monkeypatch.setenv("PYICEBERG_CATALOG__SUMS__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__SUMS__WAREHOUSE", f"file://{tmp_path}/lake")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # Else as at the import.
    kind: Opened = request.param
    return kind


def verified(lake: Lake, capsys: pytest.CaptureFixture[str], code: int = 0) -> list[str]:
    """The lines that the command writes."""
    capsys.readouterr()
    assert main(["pipeline", "verify", str(lake.place)]) == code
    told = capsys.readouterr()
    return [*told.out.splitlines(), *told.err.splitlines()]


def files(path: Path) -> list[Path]:
    """Those with rows; of plain files also what is not visible yet."""
    found = [*path.rglob("*.parquet"), *(path / CONTROL / "staging").glob("*")]
    return sorted(found, key=lambda each: pq.read_table(each)["offset"][0].as_py())


def rewrite(file: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    with pq.ParquetFile(file) as parquet:
        rows = parquet.read()
    pq.write_table(change(rows), file)


def changed(name: str, value: object) -> Callable[[pa.Table], pa.Table]:
    """The first row has another value in a column."""

    def change(rows: pa.Table) -> pa.Table:
        column = WRITTEN.field(name)
        if name not in rows.schema.names:
            rows = rows.append_column(column, pa.nulls(len(rows), column.type))
        values = [value, *rows[name].to_pylist()[1:]]
        at = rows.schema.get_field_index(name)
        return rows.set_column(at, column, pa.array(values, column.type))

    return change


CHANGES: dict[str, tuple[Callable[[pa.Table], pa.Table], str]] = {
    "lost": (lambda rows: rows.slice(1), "99 rows, and 100 were archived"),
    "added": (
        lambda rows: pa.concat_tables([rows, changed("offset", 1000)(rows.slice(0, 1))]),
        "101 rows, and 100 were archived",
    ),
    "doubled": (
        lambda rows: pa.concat_tables([rows, rows.slice(3, 2)]),
        "102 rows, and 100 were archived; several rows have the number 53, 54",
    ),
    "one for another": (
        lambda rows: pa.concat_tables([rows.slice(1), rows.slice(3, 1)]),
        "the 100 rows are not as they were archived; several rows have the number 53",
    ),
    "value": (changed("value", b"[]"), "the 100 rows are not as they were archived"),
    "key": (changed("key", b"m"), "the 100 rows are not as they were archived"),
    "topic": (changed("topic", "e2"), "the 100 rows are not as they were archived"),
    "offset": (changed("offset", 999), "the 100 rows are not as they were archived"),
    "headers": (changed("headers", {"a": "b"}), "the 100 rows are not as they were archived"),
    "priority": (changed("priority", 0), "the 100 rows are not as they were archived"),
    "ordering_key": (changed("ordering_key", ""), "the 100 rows are not as they were archived"),
    "timestamp": (changed("timestamp", NOON_US), "the 100 rows are not as they were archived"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_and_its_numbers_are_told(
    opened: Opened, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path / "lake") as lake:
        put(lake, range(50))
        put(lake, batch(range(50, 100), time_us=NOON_US + 1))
    assert verified(lake, capsys) == ["100 messages of 1 queue: all as archived"]

    change, told = CHANGES[name]
    rewrite(files(tmp_path / "lake")[1], change)

    place = f"mqks: {lake.place}: queue q, epoch x-1, numbers 0 to {SIZE - 1}: "
    assert verified(lake, capsys, 65) == [place + told]


def test_all_rows_of_a_queue_are_gone(
    opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path / "lake") as lake:
        put(lake, range(50))
        lake.commit("q", "x-2", SIZE + 1, [])
    rewrite(files(tmp_path / "lake")[0], lambda rows: rows.slice(0, 0))

    if isinstance(lake, DeltaTable):  # It knows queues by their rows.
        assert verified(lake, capsys) == ["0 messages of 0 queues: all as archived"]
    else:
        assert f"0 to {SIZE - 1}: 0 rows, and 50 were archived" in verified(lake, capsys, 65)[0]


def test_what_a_lake_does_by_itself_is_no_difference(
    opened: Opened, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path / "lake") as lake:
        for day in range(COMPACTION + 1):
            time_us = NOON_US + day // 6 * DAY_US
            put(lake, batch(range(10 * day, 10 * day + 10), time_us=time_us))
            lake.roll(1e9)
        if not isinstance(lake, FileLake):
            lake.expire(date(2026, 11, 22))
        lake.roll(0)
    left = 170 if isinstance(lake, FileLake) else 50
    assert verified(lake, capsys) == [f"{left} messages of 1 queue: all as archived"]

    assert main(["pipeline", "verify", str(lake.place), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == {"messages": left, "queues": 1, "unchecked": 0, "differences": []}


def test_what_another_archive_commits_and_removes_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "lake"
    with DeltaTable(path) as lake, DeltaTable(path) as other:
        put(lake, batch(range(10)))
        rows = batch(range(10, 20), time_us=NOON_US + 3 * DAY_US)
        lake.next("q", "x-1")
        staged = [*stage(lake.staging, [rows])]
        put(other, range(5), queue="q2")
        other.expire(date(2026, 11, 22))
        lake.commit("q", "x-1", 20, staged)
    found = Verification(DeltaTable(path)).run()
    assert (found.messages, found.queues, found.differences) == (10, 1, [])


def test_rows_of_a_version_without_sums_are_not_checked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileLake(tmp_path / "lake") as lake:
        put(lake, range(50))
    state = tmp_path / "lake" / CONTROL / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"sums": {}}))
    older = "50 rows are not checked: an older version has archived them"
    assert older in "".join(verified(lake, capsys))

    with lake:
        put(lake, range(50, 100))
    told = verified(lake, capsys)
    assert told[0] == "50 messages of 1 queue: all as archived"
    assert older in told[1]
    rewrite(files(tmp_path / "lake")[1], changed("value", b"x"))
    assert "the 50 rows are not as they were archived" in "".join(verified(lake, capsys, 65))


# ------------------------------------------------------------------------- with the broker


@pytest.fixture(params=["parquet", "delta"])
def archived(
    request: pytest.FixtureRequest, spark: "SparkSession", mqks_broker: Broker, tmp_path: Path
) -> Path:
    """A lake of a queue of which nothing was trimmed."""
    with connect(mqks_broker.url) as client:
        client.subscribe("clicks", EVENTS)
        for n in range(5):
            client.publish(EVENTS[0], f"{n}", meta={"n": f"{n}"}, priority=n + 1, key=f"k{n}")
        client.publish(EVENTS[0], b"\t\n", confirm=True)
    publish(mqks_broker, some(6, 4))
    lake = tmp_path / "lake"
    run(spark, mqks_broker, lake, request.param, trim=False)
    return lake


def compared(
    lake: Path, broker: Broker, capsys: pytest.CaptureFixture[str], code: int = 0
) -> list[str]:
    """The lines of the command, without the epochs."""
    capsys.readouterr()
    assert main(["pipeline", "verify", str(lake), "--url", broker.url]) == code
    told = capsys.readouterr()
    lines = [*told.out.splitlines(), *told.err.splitlines()]
    return [re.sub(r"epoch \S+, ", "", line.removeprefix(f"mqks: {lake}: ")) for line in lines]


def format_of(lake: Path) -> str | None:
    return "delta" if (lake / "_delta_log").exists() else None


def still(count: int) -> str:
    return f"{count} messages that the server still has: all in the lake"


def test_what_the_broker_still_has_is_in_the_lake(
    archived: Path,
    spark: "SparkSession",
    mqks_broker: Broker,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = "10 messages of 1 queue: all as archived"
    assert compared(archived, mqks_broker, capsys) == [whole, still(10)]
    monkeypatch.setattr("mqks.pipeline.verify.WINDOW", 3)
    monkeypatch.setattr("mqks.pipeline.reader.FETCH_ROWS", 1)
    assert compared(archived, mqks_broker, capsys) == [whole, still(10)]
    publish(mqks_broker, some(10, 5))  # Not archived yet.
    with connect(mqks_broker.url) as client:
        client.trim("clicks", 3)
        with client.consume("clicks") as consumer:
            for _ in range(3):  # By priority, so that there are holes.
                consumer.receive(timeout_s=60).ack()
    assert compared(archived, mqks_broker, capsys) == [whole, still(5)]
    run(spark, mqks_broker, archived, format_of(archived))
    assert compared(archived, mqks_broker, capsys)[1] == still(0)


@pytest.mark.parametrize("name", ["value", "headers", "priority", "timestamp", "lost"])
def test_a_row_that_the_broker_has_otherwise(
    archived: Path, mqks_broker: Broker, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(files(archived)[0], CHANGES[name][0])
    sums, told = compared(archived, mqks_broker, capsys, 65)
    assert sums.startswith(f"queue clicks, numbers 0 to {SIZE - 1}: ")
    lacks = "the lake lacks these messages of the queue, or has others: 1"
    assert told == f"queue clicks, numbers from 1 to 1: {lacks}"


def test_rows_that_the_lake_lacks(
    spark: "SparkSession", mqks_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    subscribe(mqks_broker)
    publish(mqks_broker, some(0, 15))
    run(spark, mqks_broker, tmp_path, trim=False)
    for file in files(tmp_path):
        rewrite(file, lambda rows: rows.slice(0, 0))
    told = compared(tmp_path, mqks_broker, capsys, 65)[-1]
    assert told.startswith("queue clicks, numbers from 1 to 15: ")
    assert told.endswith(": 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 5 more")


def test_what_was_trimmed_before_it_was_archived(
    archived: Path, mqks_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(mqks_broker, some(10, 5))
    with connect(mqks_broker.url) as client:
        client.trim("clicks", 14)
    gone = "neither in the lake nor in the queue: consumed, expired or trimmed by others"
    [_, told] = compared(archived, mqks_broker, capsys, 65)
    assert told == f"queue clicks, numbers from 11 to 13: {gone}"


def test_a_queue_that_the_broker_has_no_longer(
    archived: Path, spark: "SparkSession", mqks_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "whether they were archived is not known"
    with connect(mqks_broker.url) as client:
        client.delete_queue("clicks")
    assert compared(archived, mqks_broker, capsys, 65)[1:] == [
        f"queue clicks, numbers from 11 on: the broker has no such queue: {unknown}"
    ]
    with connect(mqks_broker.url) as client:
        client.subscribe("clicks", EVENTS)
    publish(mqks_broker, some(10, 2))
    another = "the broker has this queue under another epoch"
    assert compared(archived, mqks_broker, capsys, 65)[1:] == [
        f"queue clicks, numbers from 11 on: {another}: {unknown}"
    ]
    run(spark, mqks_broker, archived, format_of(archived), trim=False, fail_on_data_loss=False)
    assert compared(archived, mqks_broker, capsys) == [
        "12 messages of 1 queue: all as archived",
        still(2),
    ]


def test_a_broker_whose_older_state_was_restored(
    spark: "SparkSession",
    mqks_broker_process: BrokerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    broker, lake, before = mqks_broker_process, tmp_path / "lake", tmp_path / "before"
    subscribe(broker)
    publish(broker, some(0, 5))
    broker.kill()
    before.mkdir()
    for file in tmp_path.glob("mqks.db*"):
        shutil.copy(file, before)
    broker.start()
    publish(broker, some(5, 5))
    run(spark, broker, lake, trim=False)
    broker.kill()
    for file in before.iterdir():
        shutil.copy(file, tmp_path)
    broker.start()
    publish(broker, some(20, 2))
    capsys.readouterr()
    assert main(["pipeline", "verify", str(lake), "--url", broker.url]) == 65
    other = "the broker has others: an older state of it was restored"
    assert re.search(f"numbers from 6 to 10: {other}", capsys.readouterr().err)


def test_what_a_replay_repeats_may_be_left_out(
    archived: Path, spark: "SparkSession", mqks_broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    list(Replay(lake=archived, server=ServerAddress(url=mqks_broker.url)).run(spark, Event()))
    [progress] = run(spark, mqks_broker, archived, format_of(archived), trim=False)
    assert progress.left_out == 10
    assert compared(archived, mqks_broker, capsys)[1] == still(10)


def test_bad_rows_are_in_another_lake(
    spark: "SparkSession", mqks_broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lake, other = tmp_path / "lake", tmp_path / "bad"
    subscribe(mqks_broker)
    publish(mqks_broker, [*some(0, 3), ("m3", EVENTS[0], "no JSON"), *some(4, 2)])
    job = Archive(
        queue="clicks",
        server=ServerAddress(url=mqks_broker.url),
        once=True,
        trim=False,
        schema=schema_of("n int"),
    )
    with FileLake(lake) as opened, FileLake(other) as bad:
        list(job.run(spark.sparkContext, opened, Event(), bad))
    [_, told] = compared(lake, mqks_broker, capsys, 65)
    assert told.startswith("queue clicks, numbers from 4 to 4: the lake lacks")
    main(["pipeline", "verify", str(lake), "--url", mqks_broker.url, "--bad-rows", str(other)])
    assert capsys.readouterr().out.splitlines()[1:] == [still(6)]
    assert main(["pipeline", "verify", str(lake), "--bad-rows", str(other)]) == 64


@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_table_for_each_event_is_one_lake(
    spark: "SparkSession",
    mqks_broker: Broker,
    tmp_path: Path,
    format: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def archive(trim: bool) -> None:
        address = ServerAddress(url=mqks_broker.url)
        with EventTables(lake, format) as opened:
            job = Archive(queue="clicks", server=address, once=True, trim=trim)
            list(job.run(spark.sparkContext, opened, Event()))

    lake = tmp_path / "lake"
    subscribe(mqks_broker)
    publish(mqks_broker, some(0, 3) + some(3, 4, "order.new"))
    archive(trim=False)
    tables = [
        f"{lake}/{event}: {n} messages of 1 queue: all as archived"
        for event, n in (("order.new", 4), ("page.view", 3))
    ]
    assert compared(lake, mqks_broker, capsys) == [*tables, still(7)]
    rewrite(files(lake / "order.new")[0], changed("value", b"x"))
    told = compared(lake, mqks_broker, capsys, 65)[-1]
    assert told.startswith("queue clicks, numbers from 4 to 4: the lake lacks")

    shutil.rmtree(lake)
    archive(trim=True)
    publish(mqks_broker, some(7, 2))
    archive(trim=True)
    assert compared(lake, mqks_broker, capsys)[-1] == still(0)
    assert main(["pipeline", "vacuum", str(lake)]) == 0
    assert capsys.readouterr().out == "0 files deleted\n"


def test_what_is_no_lake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none").mkdir()
    assert main(["pipeline", "verify", str(tmp_path / "none")]) == 65
    assert re.search("was not written by an archive", capsys.readouterr().err)
    assert not [*(tmp_path / "none").iterdir()]


@given(st.lists(st.integers(0, 50)), st.integers(0, 50))
def test_sums_have_no_order_and_are_of_parts(sizes: list[int], cut: int) -> None:
    rows = pa.Table.from_batches([batch(range(100))])
    values = [b"x" * size for size in sizes] + [b"y" * (70_000 * cut // 25)]
    values += [b""] * (100 - len(values)) if len(values) < 100 else []
    at = rows.schema.get_field_index("value")
    rows = rows.set_column(at, "value", pa.array(values[:100], pa.binary()))
    headers = [None, [], [("a", "b")], [("a", ""), ("b", "é")]] * 25
    rows = rows.append_column("headers", pa.array(headers, PROPERTIES.field("headers").type))
    for name in ("priority", "ordering_key"):
        column = pa.array([None, "0", None, "-7"] * 25).cast(PROPERTIES.field(name).type)
        rows = rows.append_column(name, column)
    whole = sums_of(rows)
    order = [*range(cut, 100), *range(cut)]
    assert sums_of(rows.take(order)) == whole
    (of, first), *_ = sums_of(rows.slice(0, cut + 1)).items()
    rest = sums_of(rows.slice(cut + 1)) or {of: first.plus(first, -1)}
    assert first.plus(rest[of]) == whole[of]


def test_ranges_are_bounded_in_number() -> None:
    assert [of.first for of in ranges("q", "e", 5, SIZE + 1)] == [0, SIZE]
    assert sum(1 for _ in ranges("q", "e", 0, 1 << 40)) == 1024 + 10 * 512
    last = 0
    for of in ranges("q", "e", 0, 1 << 34):
        assert of.first == last
        last = of.last + 1
