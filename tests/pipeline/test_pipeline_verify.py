"""`mqks pipeline verify`: rows that were added, lost, doubled or changed since are found.

The one rule: what changes a lake here is another program, which knows nothing of its sums.
"""

import json
import re
import shutil
from collections.abc import Callable
from datetime import date
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.commands import main
from mqks.pipeline.columns import PROPERTIES
from mqks.pipeline.iceberg import IcebergTable
from mqks.pipeline.job import schema_of
from mqks.pipeline.lake import CONTROL, WRITTEN, FileLake, Lake, stage
from mqks.pipeline.sums import ranges, sums_of
from mqks.pipeline.table import COMPACTION, DeltaTable, LakeTable
from mqks.pipeline.tables import EventTables
from mqks.pipeline.verify import Verification
from tests.pipeline.conftest import EVENTS, Clicks, some
from tests.pipeline.test_pipeline_lake import DAY_US, NOON_US, batch, put

SIZE = 1 << 20
Opened = Callable[[Path], Lake]


def iceberg(path: Path) -> LakeTable:
    return IcebergTable("iceberg://lake/db.events")


@pytest.fixture(params=[FileLake, DeltaTable, iceberg])
def opened(request: pytest.FixtureRequest, catalog: None) -> Opened:
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
    places = path.rglob("*.parquet"), path.with_name("warehouse").rglob("*.parquet")
    found = [*chain(*places), *(path / CONTROL / "staging").glob("*")]
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
def format(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def archived(clicks: Clicks, format: str) -> Clicks:
    """Nothing was trimmed."""
    with clicks.client() as client:
        for n in range(5):
            client.publish(EVENTS[0], f"{n}", meta={"n": f"{n}"}, priority=n + 1, key=f"k{n}")
        client.publish(EVENTS[0], b"\t\n", confirm=True)
    clicks.publish(some(6, 4))
    clicks.archive(format, trim=False)
    return clicks


def compared(clicks: Clicks, capsys: pytest.CaptureFixture[str], code: int = 0) -> list[str]:
    """The lines of the command, without the epochs."""
    capsys.readouterr()
    assert main(["pipeline", "verify", str(clicks.lake), "--url", clicks.broker.url]) == code
    told = capsys.readouterr()
    lines = [*told.out.splitlines(), *told.err.splitlines()]
    place = f"mqks: {clicks.lake}: "
    return [re.sub(r"epoch \S+, ", "", line.removeprefix(place)) for line in lines]


def still(count: int) -> str:
    return f"{count} messages that the server still has: all in the lake"


@pytest.mark.slow
def test_what_the_broker_still_has_is_in_the_lake(
    archived: Clicks,
    format: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = "10 messages of 1 queue: all as archived"
    assert compared(archived, capsys) == [whole, still(10)]
    monkeypatch.setattr("mqks.pipeline.verify.WINDOW", 3)
    monkeypatch.setattr("mqks.pipeline.reader.FETCH_ROWS", 1)
    assert compared(archived, capsys) == [whole, still(10)]
    archived.publish(some(10, 5))  # Not archived yet.
    with archived.client() as client:
        client.trim("clicks", 3)
        with client.consume("clicks") as consumer:
            for _ in range(3):  # By priority, so that there are holes.
                consumer.receive(timeout_s=60).ack()
    assert compared(archived, capsys) == [whole, still(5)]
    archived.archive(format)
    assert compared(archived, capsys)[1] == still(0)


@pytest.mark.parametrize("name", ["value", "headers", "priority", "timestamp", "lost"])
def test_a_row_that_the_broker_has_otherwise(
    archived: Clicks, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(files(Path(archived.lake))[0], CHANGES[name][0])
    sums, told = compared(archived, capsys, 65)
    assert sums.startswith(f"queue clicks, numbers 0 to {SIZE - 1}: ")
    lacks = "the lake lacks these messages of the queue, or has others: 1"
    assert told == f"queue clicks, numbers from 1 to 1: {lacks}"


def test_rows_that_the_lake_lacks(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.publish(some(0, 15))
    clicks.archive(trim=False)
    for file in files(lake):
        rewrite(file, lambda rows: rows.slice(0, 0))
    told = compared(clicks, capsys, 65)[-1]
    assert told.startswith("queue clicks, numbers from 1 to 15: ")
    assert told.endswith(": 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 and 5 more")


def test_what_was_trimmed_before_it_was_archived(
    archived: Clicks, capsys: pytest.CaptureFixture[str]
) -> None:
    archived.publish(some(10, 5))
    with archived.client() as client:
        client.trim("clicks", 14)
    gone = "neither in the lake nor in the queue: consumed, expired or trimmed by others"
    [_, told] = compared(archived, capsys, 65)
    assert told == f"queue clicks, numbers from 11 to 13: {gone}"


def test_a_queue_that_the_broker_has_no_longer(
    archived: Clicks, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "whether they were archived is not known"
    with archived.client() as client:
        client.delete_queue("clicks")
    assert compared(archived, capsys, 65)[1:] == [
        f"queue clicks, numbers from 11 on: the broker has no such queue: {unknown}"
    ]
    archived.subscribe()
    archived.publish(some(10, 2))
    another = "the broker has this queue under another epoch"
    assert compared(archived, capsys, 65)[1:] == [
        f"queue clicks, numbers from 11 on: {another}: {unknown}"
    ]
    archived.archive(format, trim=False, fail_on_data_loss=False)
    assert compared(archived, capsys) == ["12 messages of 1 queue: all as archived", still(2)]


def test_a_broker_whose_older_state_was_restored(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clicks.publish(some(0, 5))
    restore = clicks.saved()
    clicks.publish(some(5, 5))
    clicks.archive(trim=False)
    restore()
    clicks.publish(some(20, 2))
    [_, told] = compared(clicks, capsys, 65)
    other = "the broker has others: an older state of it was restored"
    assert told.startswith(f"queue clicks, numbers from 6 to 10: {other}")


@pytest.mark.slow
def test_what_a_replay_repeats_may_be_left_out(
    archived: Clicks, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    archived.replay()
    [progress] = archived.archive(format, trim=False)
    assert progress.left_out == 10
    assert compared(archived, capsys)[1] == still(10)


@pytest.mark.slow
def test_bad_rows_are_in_another_lake(
    clicks: Clicks, lake: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = lake.with_name("bad")
    clicks.publish([*some(0, 3), ("m3", EVENTS[0], "no JSON"), *some(4, 2)])
    with FileLake(lake) as opened, FileLake(other) as bad:
        clicks.archive_into(opened, bad, trim=False, schema=schema_of("n int"))
    [_, told] = compared(clicks, capsys, 65)
    assert told.startswith("queue clicks, numbers from 4 to 4: the lake lacks")
    main(["pipeline", "verify", str(lake), "--url", clicks.broker.url, "--bad-rows", str(other)])
    assert capsys.readouterr().out.splitlines()[1:] == [still(6)]
    assert main(["pipeline", "verify", str(lake), "--bad-rows", str(other)]) == 64


@pytest.mark.slow
def test_a_table_for_each_event_is_one_lake(
    clicks: Clicks, lake: Path, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def archive(trim: bool) -> None:
        with EventTables(lake, format) as opened:
            clicks.archive_into(opened, trim=trim)

    clicks.publish(some(0, 3) + some(3, 4, "order.new"))
    archive(trim=False)
    tables = [
        f"{lake}/{event}: {n} messages of 1 queue: all as archived"
        for event, n in (("order.new", 4), ("page.view", 3))
    ]
    assert compared(clicks, capsys) == [*tables, still(7)]
    rewrite(files(lake / "order.new")[0], changed("value", b"x"))
    told = compared(clicks, capsys, 65)[-1]
    assert told.startswith("queue clicks, numbers from 4 to 4: the lake lacks")

    shutil.rmtree(lake)
    archive(trim=True)
    clicks.publish(some(7, 2))
    archive(trim=True)
    assert compared(clicks, capsys)[-1] == still(0)
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
