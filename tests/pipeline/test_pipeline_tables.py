"""A lake with a table for each event: names, limits, deaths between the commits of two tables.

The one rule: what is in the tables is read as any program would read each of them.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mqks.commands import main
from mqks.pipeline import job
from mqks.pipeline.archive import Progress
from mqks.pipeline.errors import BadOption, DataLost, LakeUnfit
from mqks.pipeline.lake import File, FileLake, Lake, stage, table_at
from mqks.pipeline.layout import Layout
from mqks.pipeline.objects import Place
from mqks.pipeline.places import existing, lake_at, tables_of
from mqks.pipeline.sums import batches_of
from mqks.pipeline.table import LakeTable
from mqks.pipeline.tables import EventTables
from mqks.pipeline.verify import Verification
from tests import pipeline_kills as kills
from tests.pipeline.conftest import Clicks, place_of, some
from tests.pipeline.test_pipeline_lake import ODD, batch
from tests.pipeline.test_pipeline_lake import put as put_all

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CYCLE = ["order.new", "page.view", "order.new", "rare", "page.view", "order.new", "late"]


Opened = Callable[..., EventTables]
pytestmark = pytest.mark.usefixtures("catalog")


@pytest.fixture
def place(tmp_path: Path, format: str) -> Place:
    place: Place = place_of(tmp_path, format)[0]
    return place


@pytest.fixture
def opened(place: Place, format: str) -> Opened:
    return partial(EventTables, place, format)


def run(clicks: Clicks, opened: Opened, **options: Any) -> list[Progress]:
    with opened() as lake:
        return clicks.archive_into(lake, **options)


def rows(numbers: range, events: Sequence[str]) -> list[pa.RecordBatch]:
    return [batch(range(n, n + 1), events[n % len(events)]) for n in numbers]


def put(lake: Lake, end: int, events: Sequence[str] = CYCLE, most: int = 1000) -> None:
    """What an archive does until `end` numbers of a queue are archived."""
    while (start := lake.next("q", "x-1") or 0) < end:
        until = min(end, start + most)
        files = staged(lake, rows(range(start, until), events))
        if lake.adopts("q", "x-1", start, files):
            files += staged(lake, rows(range(start, until), events))
        lake.commit("q", "x-1", until, files)


def staged(lake: Lake, batches: Sequence[pa.RecordBatch]) -> list[File]:
    lake.prepared(None)
    return [*stage(lake.staging, batches)]


def archived(place: Place) -> dict[str, list[int]]:
    """The numbers in each table, which are as they were archived."""
    found = {}
    for table in tables_of(place):
        with existing(table) as lake:
            verified = Verification(lake).run()
            assert verified.differences == []
            read = [each for file in lake.contents() for each in batches_of(file, _READ)]
        events = {event for each in read for event in each["topic"].to_pylist()}
        assert len(events) == 1
        found[events.pop()] = sorted(n for each in read for n in each["offset"].to_pylist())
    return found


_READ = ["topic", "offset"]


def counted(place: Place) -> dict[str, int]:
    return {event: len(numbers) for event, numbers in archived(place).items()}


def expected(count: int, events: Sequence[str] = CYCLE) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    for n in range(count):
        told.setdefault(events[n % len(events)], []).append(n)
    return told


def test_each_event_has_a_table(opened: Opened) -> None:
    with opened() as lake:
        assert lake.next("q", "x-1") is None
        put(lake, 5)
        put(lake, 20, most=4)
    with opened() as lake:
        assert lake.next("q", "x-1") == 20
        put(lake, 30)
        lake.roll(0)
    assert archived(lake.place) == expected(30)


class DiesError(Exception):
    """As a kill would end it."""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_death_at_any_commit_doubles_and_loses_nothing(
    opened: Opened, is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each of the commits in turn, and the next batches have other sizes."""
    with opened():
        pass
    commits, deaths = 0, 0
    for kind in (FileLake, LakeTable):

        def commit(self: Any, *told: Any, kept: Any = kind.commit) -> None:
            nonlocal commits, deaths
            commits += 1
            dies = commits == deaths + 1
            if dies:
                commits, deaths = 0, deaths + 1
            if not dies or is_done:
                kept(self, *told)
            if dies:
                raise DiesError

        monkeypatch.setattr(kind, "commit", commit)
    sizes = [7, 3, 11, 5, 2]
    for size in sizes * 20:
        try:
            with opened() as lake:
                put(lake, 60, [*CYCLE, "rare.2", "rare"], most=size)
                break
        except DiesError:
            commits = 0
    assert deaths > 8
    assert archived(lake.place) == expected(60, [*CYCLE, "rare.2", "rare"])


@pytest.mark.slow
def test_archive_by_event_and_what_reads_all_tables(
    clicks: Clicks, opened: Opened, place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole is verified, vacuumed and replayed; one table has the messages of its event."""
    clicks.publish(some(0, 50) + some(50, 10, "order.new"))
    first = run(clicks, opened, batch_messages=25, trim=False)
    url = ["--url", clicks.broker.url]
    assert main(["pipeline", "verify", str(place), *url]) == 0
    assert "\n60 messages that the server still has: all in the lake" in capsys.readouterr().out
    one = str(table_at(place, "order.new"))
    assert main(["pipeline", "verify", one]) == 0
    assert main(["pipeline", "verify", one, *url]) == 65
    assert f"one event of its queues: with --url, verify {place}" in capsys.readouterr().err
    assert main(["pipeline", "vacuum", str(place), "--dry-run"]) == 0
    clicks.publish(some(60, 7, "rare"))
    [second] = run(clicks, opened)
    assert [(p.first, p.next, p.messages, p.lag, p.files) for p in first] == [
        (1, 26, 25, 35, 2),
        (26, 51, 25, 10, 2),
        (51, 61, 10, 0, 2),
    ]
    assert (second.messages, second.lag) == (7, 0)
    assert clicks.waits() == []
    wanted = {"page.view": 50, "order.new": 10, "rare": 7}
    assert counted(place) == wanted
    assert dict(clicks.messages(place).groupBy("topic").count().collect()) == wanted
    assert clicks.messages(table_at(place, "rare")).count() == 7
    assert main(["pipeline", "verify", str(place)]) == 0
    assert f"{table_at(place, 'rare')}: 7 messages of 1 queue" in capsys.readouterr().out
    assert clicks.replay(lake=place)[-1].messages == 67
    assert [each.messages for each in clicks.replay(lake=place)] == [67], "nothing is left"


@pytest.mark.slow
def test_all_is_killed_and_each_message_is_in_its_table_once(
    spark: "SparkSession", tmp_path: Path
) -> None:
    """Plain files: what is between two tables is the same in each format, and what is within one
    has such tests of its own."""
    count, place = 40_000, tmp_path / "lake"
    kills.archive(spark, tmp_path, count, 1, "parquet", 3, tables=True)
    assert kills.counted_by_spark(spark, place) == (count, count, count)
    found = archived(place)
    assert sorted(n for numbers in found.values() for n in numbers) == [*range(1, count + 1)]
    assert set(found) == {*kills.EVENTS}


HASHES = [f"a-{'0' * 16}", f"a_{'0' * 16}"]
NAMES = [*ODD, *HASHES, ".", "_mqks", "a_b", "a.b", "a:b", "a__b", "a..b", "A.b", "a-b", "é.é"]
NAMES += ["a\nb", "\x01", "~", "'", "\\xff", "l" * 255, "x." * 127 + "x", "a.", "..a", "-a", "💥"]


@pytest.mark.parametrize("place", [Path("/lake"), "s3://bucket/lake", "iceberg://c/db.events"])
def test_each_event_has_a_table_that_no_other_event_has(place: Place) -> None:
    names = [str(table_at(place, event)).removeprefix(str(place)) for event in NAMES]
    hashed = [str(table_at(place, f"a{name[-17:]}")) for name in names]
    assert len({*names}) == len({*NAMES})
    assert not {*hashed} & {f"{place}{name}" for name in names}, "nobody can take another's name"
    for name in names:
        assert len(name[1:].encode()) <= 200
        assert name[1] not in "._"
        assert "/" not in name[1:]
        assert job.place(f"{place}{name}") == type(place)(f"{place}{name}")
    if isinstance(place, str):
        letters = "a-z0-9_" if "iceberg" in place else r"\w.-"
        assert all(re.fullmatch(f"[{letters}]+", name[1:], re.ASCII) for name in names)


def test_names_that_one_would_guess() -> None:
    lake = Path("lake")
    assert [table_at(lake, event) for event in ("order.new", "page_view", "Größe")] == [
        lake / "order.new",
        lake / "page_view",
        lake / "Größe",
    ]
    assert table_at("s3://bucket/lake", "order.new") == "s3://bucket/lake/order.new"
    assert [table_at("iceberg://c/db.t", event) for event in ("order.new", "page_view")] == [
        "iceberg://c/db.t_order__new",
        "iceberg://c/db.t_page_view",
    ]
    assert table_at(lake, "a/b") == lake / "a_b-c14cddc033f64b9d"


def test_any_event_has_a_table(opened: Opened) -> None:
    events = [*dict.fromkeys(NAMES)]
    with opened() as lake:
        put(lake, 2 * len(events), events)
        lake.roll(0)
    assert archived(lake.place) == expected(2 * len(events), events)


def test_beyond_the_limit_nothing_is_committed(opened: Opened) -> None:
    with opened(tables_max=2) as lake:
        put(lake, 2)
        with pytest.raises(LakeUnfit, match=r"is 2 tables.* 2 new events, such as 'late'"):
            put(lake, 7)
        assert (lake.next("q", "x-1"), lake.reached("q", "x-1")) == (2, 2)
    assert archived(lake.place) == expected(2)
    with opened(tables_max=1) as lake:
        put(lake, 3)
    with opened(tables_max=4) as lake:
        put(lake, 7)
    assert archived(lake.place) == expected(7)


def test_a_lake_stays_of_its_kind(tmp_path: Path, place: Place, format: str) -> None:
    with lake_at(place, format) as lake:
        put_all(lake, batch(range(3)))
    with pytest.raises(LakeUnfit, match="was created without --table-by: leave it out"):
        EventTables(place, format).__enter__()
    other: Place = tmp_path / "other" if isinstance(place, Path) else f"{place}2"
    with EventTables(other, format) as tables:
        put(tables, 3)
    with pytest.raises(LakeUnfit, match="was created with --table-by event: use --table-by"):
        lake_at(other, format).__enter__()
    assert {**archived(other)} == expected(3)
    assert archived(place) == {"e1": [0, 1, 2]}


def test_new_tables_have_the_partitions_of_the_first(opened: Opened) -> None:
    with opened(layout=Layout(("date", "hour"))) as lake:
        put(lake, 2)
    with pytest.raises(LakeUnfit, match="was created with --by hour: use --by hour"):
        opened(layout=Layout(("date",))).__enter__()
    with opened() as lake:
        put(lake, 7)
    for table in tables_of(lake.place):
        with existing(table) as each:
            assert each.layout.partitions == ("date", "hour")


def test_old_days_leave_all_tables(opened: Opened) -> None:
    with opened() as lake:
        put(lake, 7)
        if not isinstance(lake.place, str) and not [*lake.place.glob("*/_delta_log")]:
            with pytest.raises(LakeUnfit, match="only tables forget old days"):
                lake.expire(date(2026, 11, 21))
            return
        lake.expire(date(2026, 11, 20))
        assert archived(lake.place) == expected(7)
        lake.expire(date(2026, 11, 21))
        assert lake.contents() == []
        put(lake, 14)
    with opened() as lake:
        assert lake.next("q", "x-1") == 14


def test_a_foreign_table_beside_those_in_a_catalog_is_none_of_them() -> None:
    place = "iceberg://lake/db.events"
    with lake_at(f"{place}_old") as old:
        put_all(old, batch(range(3)))
    with EventTables(place) as lake:
        put(lake, 7)
        lake.expire(date(2026, 11, 21))
    assert archived(f"{place}_old") == {"e1": [0, 1, 2]}


@pytest.mark.slow
@pytest.mark.parametrize("format", ["parquet", "delta"])
def test_a_database_older_than_a_table_is_left_alone(
    clicks: Clicks, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch has come into one of its two tables, and not into the control."""
    clicks.publish(some(0, 5))
    run(clicks, opened, trim=False)
    clicks.publish(some(5, 5))
    restore = clicks.saved()
    clicks.publish(some(10, 5) + some(15, 5, "rare"))
    commit = EventTables.commit

    def dies(self: EventTables, queue: str, epoch: str, number: int, files: list[File]) -> None:
        came = [replace(file, rows=0) for file in files if file.event == "rare"]
        rows = [file for file in files if file.event != "rare"]
        monkeypatch.setattr(self._control, "commit", lambda *told: None)
        commit(self, queue, epoch, number, [*rows, *came])
        raise DiesError

    with monkeypatch.context() as patch:
        patch.setattr(EventTables, "commit", dies)
        with pytest.raises(DiesError):
            run(clicks, opened)
    restore()
    clicks.publish(some(100, 50))
    with pytest.raises(DataLost, match=r"up to 21, but from 11 on .* older state of the database"):
        run(clicks, opened)
    assert len(clicks.waits()) == 60


@pytest.mark.slow
def test_types_of_payloads_are_as_wide_as_any_table_has_them(
    clicks: Clicks, opened: Opened, place: Place
) -> None:
    clicks.publish(some(0, 2) + some(2, 2, "order.new"))
    run(clicks, opened, schema=job.schema_of("n bigint"))
    clicks.publish(some(4, 2) + some(6, 2, "rare") + [("x", "rare", "no json")])
    [progress] = run(clicks, opened, schema=job.schema_of("n int"))
    assert (progress.messages, progress.unparsed) == (5, 1)
    for event, numbers in {"order.new": [2, 3], "page.view": [0, 1, 4, 5], "rare": [6, 7]}.items():
        with existing(table_at(place, event)) as lake:
            read = [row for file in lake.contents() for row in pq.read_table(file).to_pylist()]
        assert sorted(row["data"]["n"] for row in read if row["data"]) == numbers


@pytest.mark.slow
def test_each_event_has_a_schema(clicks: Clicks, opened: Opened, place: Place) -> None:
    """Arrow parses `n`, and Spark the map; of `rare` there is none."""
    schemas = {
        "order.*": "total double",
        "**.view": "n int, m map<string, int>",
        "page.**": "x int",
    }
    told = {mask: job.schema_of(text) for mask, text in schemas.items()}
    orders = [(f"o{n}", "order.new", f'{{"total": {n}.5}}') for n in range(3)]
    views = [(f"v{n}", "page.view", f'{{"n": {n}, "m": {{"a": {n}}}}}') for n in range(3)]
    mixed = [
        message for pair in zip(orders, views, some(0, 3, "rare"), strict=True) for message in pair
    ]
    clicks.publish([*mixed, ("bad", "order.new", "no json")])
    [progress] = run(clicks, opened, schemas=told)
    clicks.publish([("last", "order.new", '{"total": 9.5}')])
    run(clicks, opened, schemas={**told, "order.*": job.schema_of("total float")})

    assert (progress.messages, progress.unparsed) == (10, 1)
    found = {}
    for table in tables_of(place):
        with existing(table) as lake:
            for file in lake.contents():
                for row in pq.read_table(file).to_pylist():
                    found[row["key"].decode()] = row.get("data")
    assert found == {
        **{f"o{n}": {"total": n + 0.5} for n in range(3)},
        **{f"v{n}": {"n": n, "m": [("a", n)]} for n in range(3)},
        **{f"m{n}": None for n in range(3)},
        "bad": None,
        "last": {"total": 9.5},
    }
    assert archived(place).keys() == {"order.new", "page.view", "rare"}


def test_schemas_by_mask(tmp_path: Path) -> None:
    file = tmp_path / "a=b"
    file.write_text("n int")
    assert job.by_mask(["n int", "order.*=id bigint", f"x={file}"]) == {
        "order.*": "id bigint",
        "x": str(file),
        "**": "n int",
    }
    assert job.by_mask([str(file)]) == {"**": str(file)}
    assert job.by_mask(["n int comment 'a=b'"]) == {"**": "n int comment 'a=b'"}
    assert job.by_mask(['{"a=b": 1}']) == {"**": '{"a=b": 1}'}
    with pytest.raises(BadOption, match=r"two for a\.b"):
        job.by_mask(["a.b=n int", "a.b=m int"])


@pytest.mark.slow
def test_bad_rows_of_all_tables_are_in_one_lake(clicks: Clicks, lake: Path) -> None:
    other = lake.with_name("bad")
    clicks.publish([*some(0, 3), ("bad1", "page.view", "no"), ("bad2", "rare", "{")])
    with EventTables(lake) as opened, FileLake(other) as bad:
        [progress] = clicks.archive_into(opened, bad, schema=job.schema_of("n int"))
    assert (progress.messages, progress.unparsed) == (5, 2)
    assert counted(lake) == {"page.view": 3}
    assert {row["key"].decode() for row in clicks.messages(other).collect()} == {"bad1", "bad2"}
