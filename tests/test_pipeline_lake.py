"""The lake without Spark: what a commit promises, names of directories, and compaction to readers.

The one rule: a lake is read back with pyarrow as any program would read it.
"""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqks.pipeline.errors import LakeInUse, LakeUnfit
from mqks.pipeline.lake import (
    COLUMNS,
    SMALL_COUNT,
    DeltaLake,
    File,
    Lake,
    delta_table,
    directory,
    merge,
    stage,
)

NOON_US = 1_795_176_000_000_000
DAY_US = 86_400_000_000


def batch(offsets: range, event: str = "e1", time_us: int = NOON_US) -> pa.RecordBatch:
    n = len(offsets)
    columns: dict[str, Any] = {
        "key": [b"m%d" % offset for offset in offsets],
        "value": [b"{}"] * n,
        "topic": [event] * n,
        "offset": list(offsets),
        "timestamp": pa.array([time_us] * n).cast(COLUMNS.field("timestamp").type),
        "queue": ["q"] * n,
        "epoch": ["x-1"] * n,
        "archived": pa.array([time_us] * n).cast(COLUMNS.field("archived").type),
    }
    return pa.RecordBatch.from_pydict(columns, schema=COLUMNS)


def put(lake: Lake, offsets: range, event: str = "e1") -> list[File]:
    files = list(stage(lake.staging, [batch(offsets, event)]))
    lake.commit("q", "x-1", offsets.stop, files)
    return files


def offsets(path: Path) -> list[int]:
    table = ds.dataset(path, partitioning="hive").to_table(columns=["offset"])
    return sorted(table["offset"].to_pylist())


def merge_all(lake: Lake) -> Any:
    return lambda groups: [merge(lake.staging, group) for group in groups]


def test_files_by_day_and_event(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        staged = stage(
            lake.staging,
            [batch(range(3)), batch(range(3, 6), "e2"), batch(range(6, 8), "e1", NOON_US + DAY_US)],
        )
        files = {(file.date, file.event): (file.rows, file.first, file.last) for file in staged}

    assert files == {
        ("2026-11-20", "e1"): (3, 0, 2),
        ("2026-11-20", "e2"): (3, 3, 5),
        ("2026-11-21", "e1"): (2, 6, 7),
    }


def test_nothing_is_in_the_lake_before_its_commit(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        assert lake.next("q", "x-1") is None
        put(lake, range(1, 5))
        list(stage(lake.staging, [batch(range(5, 9))]))  # Its driver dies here.
    with Lake(tmp_path) as lake:
        assert lake.next("q", "x-1") == 5
        assert lake.next("q", "x-2") is None
        assert list(lake.staging.iterdir()) == []

    assert offsets(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_commit_that_was_cut_short_is_finished(tmp_path: Path, moved: int) -> None:
    with Lake(tmp_path) as lake:
        put(lake, range(1, 5))
        files = [*stage(lake.staging, [batch(range(5, 7)), batch(range(7, 9), "e2")])]
        state = json.loads((lake.control / "state.json").read_text())
        state["queues"]["q"]["x-1"] = 9
        state["moves"] = [[file.name, file.directory] for file in files]
        (lake.control / "state.json").write_text(json.dumps(state))
        for file in files[:moved]:  # So far it came.
            (tmp_path / file.directory).mkdir(parents=True, exist_ok=True)
            (lake.staging / file.name).rename(tmp_path / file.directory / file.name)
    for _ in range(2):
        with Lake(tmp_path) as lake:
            assert lake.next("q", "x-1") == 9
        assert offsets(tmp_path) == list(range(1, 9))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Lake(tmp_path), pytest.raises(LakeInUse):
        Lake(tmp_path).__enter__()
    with Lake(tmp_path):
        pass


ODD = ["a/b", "ö%ü", "x=1", "17", "..", "a\\b", '"*?#', "l" * 300, "ö" * 150, "%" * 120, "a b"]


@pytest.mark.parametrize("event", ODD)
def test_any_event_has_a_directory(tmp_path: Path, event: str) -> None:
    with Lake(tmp_path) as lake:
        put(lake, range(1, 3), event)
    partitioning = ds.partitioning(
        pa.schema([("date", pa.string()), ("event", pa.string())]), flavor="hive"
    )
    table = ds.dataset(tmp_path, partitioning=partitioning).to_table()

    assert set(table["topic"].to_pylist()) == {event}
    assert set(table["date"].to_pylist()) == {"2026-11-20"}
    if len(event) < 100:
        assert set(table["event"].to_pylist()) == {event}


def test_long_events_stay_apart() -> None:
    assert directory("2026-11-20", "l" * 300) != directory("2026-11-20", "l" * 301)
    assert all(len(directory("d", event).split("/")[1].encode()) <= 255 for event in ODD)


@pytest.fixture
def many_files(tmp_path: Path) -> Iterator[tuple[Lake, list[File]]]:
    with Lake(tmp_path / "lake") as lake:
        files = [file for n in range(SMALL_COUNT) for file in put(lake, range(n * 10, n * 10 + 10))]
        yield lake, files


def test_compaction_merges_small_files(many_files: tuple[Lake, list[File]]) -> None:
    lake, files = many_files
    before = offsets(lake.path)
    lake.compact(files, merge_all(lake))
    [merged] = lake.path.glob("date=*/event=*/*.parquet")

    assert offsets(lake.path) == before == list(range(10 * SMALL_COUNT))
    assert pq.read_table(merged)["offset"].to_pylist() == before
    assert list(lake.staging.iterdir()) == []
    put(lake, range(1000, 1001))
    assert offsets(lake.path) == [*before, 1000]


def test_few_files_are_left_alone(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        files = put(lake, range(10)) + put(lake, range(10, 20))
        lake.compact(files, merge_all(lake))

        assert len(list(tmp_path.glob("date=*/event=*/*.parquet"))) == 2


def test_files_whose_columns_differ_are_left_alone(many_files: tuple[Lake, list[File]]) -> None:
    lake, files = many_files
    for value in (1, "text"):
        data = pa.array([{"n": value}] * 2)
        other = batch(range(500, 502)).append_column("data", data)
        staged = list(stage(lake.staging, [other]))
        lake.commit("q", "x-1", 502, staged)
        files += staged
    lake.compact(files, merge_all(lake))

    assert len(list(lake.path.glob("date=*/event=*/*.parquet"))) == SMALL_COUNT + 2


def test_readers_see_each_row_once_while_files_are_merged(tmp_path: Path) -> None:
    rounds, step = 12, 50
    counts: list[int] = []
    failures: list[BaseException] = []

    def write() -> None:
        try:
            with Lake(tmp_path) as lake:
                for low in range(0, rounds * SMALL_COUNT * step, step):
                    files = put(lake, range(low, low + step))
                    lake.compact(files, merge_all(lake))
        except BaseException as failure:
            failures.append(failure)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        try:
            found = offsets(tmp_path) if (tmp_path / "date=2026-11-20").exists() else []
        except FileNotFoundError:
            continue  # Listed before the change, opened after it: that is told, not hidden.
        counts.append(len(found))
        assert found == list(range(len(found))), "a row is missing or there twice"
    writer.join()

    assert not failures
    assert len(set(counts)) > 3
    assert counts == sorted(counts)
    assert offsets(tmp_path) == list(range(rounds * SMALL_COUNT * step))


def test_delta_has_the_files_and_how_far_they_go_in_one_log(tmp_path: Path) -> None:
    with DeltaLake(tmp_path) as lake:
        assert lake.next("q", "x-1") is None
        for n in range(2 * SMALL_COUNT):
            files = put(lake, range(n * 10, n * 10 + 10), ["e1", "ö%/ü"][n % 2])
            lake.compact(files, merge_all(lake))
        lake.commit("q", "x-1", 1000, [])
        assert lake.next("q", "x-1") == 1000
    with DeltaLake(tmp_path) as lake:
        assert lake.next("q", "x-1") == 1000
        assert lake.next("q", "x-2") is None
    table = delta_table(tmp_path).to_pyarrow_table()

    assert sorted(table["offset"].to_pylist()) == list(range(20 * SMALL_COUNT))
    assert set(table["event"].to_pylist()) == {"e1", "ö%/ü"}
    assert len(delta_table(tmp_path).file_uris()) < 2 * SMALL_COUNT


def test_a_lake_keeps_its_format(tmp_path: Path) -> None:
    for first, second in ((Lake, DeltaLake), (DeltaLake, Lake)):
        path = tmp_path / first.__name__
        with first(path) as lake:
            put(lake, range(3))
        with pytest.raises(LakeUnfit, match="--format"):
            second(path).__enter__()
