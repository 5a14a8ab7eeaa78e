"""The lake without Spark: what a commit promises, names of directories, and what readers see.

The one rule: a lake is read back with pyarrow as any program would read it.
"""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqks.pipeline.errors import LakeInUse, LakeUnfit
from mqks.pipeline.lake import (
    COLUMNS,
    DELTA_COMPACTION,
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
    files = list(stage(lake.staging, [batch(offsets, event)], by_event=lake.by_event))
    lake.commit("q", "x-1", offsets.stop, files)
    return files


def offsets(path: Path) -> list[int]:
    table = ds.dataset(path, partitioning="hive").to_table(columns=["offset"])
    return sorted(table["offset"].to_pylist())


def roll(lake: Lake, age_s: float = 0) -> int:
    return lake.roll(lambda groups: [merge(lake.staging, group) for group in groups], age_s)


def shown(path: Path) -> list[Path]:
    return sorted(path.glob("date=*/**/*.parquet"))


def test_files_by_day_and_event(tmp_path: Path) -> None:
    with Lake(tmp_path, by_event=True) as lake:
        staged = stage(
            lake.staging,
            [batch(range(3)), batch(range(3, 6), "e2"), batch(range(6, 8), "e1", NOON_US + DAY_US)],
            by_event=True,
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
        assert len(list(lake.staging.iterdir())) == 1
        assert roll(lake) == 0
        assert list(lake.staging.iterdir()) == []

    assert offsets(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_commit_that_was_cut_short_is_finished(tmp_path: Path, moved: int) -> None:
    with Lake(tmp_path, by_event=True) as lake:
        put(lake, range(1, 5))
        roll(lake)
        files = [
            *stage(lake.staging, [batch(range(5, 7)), batch(range(7, 9), "e2")], by_event=True)
        ]
        state = json.loads((lake.control / "state.json").read_text())
        state["queues"]["q"]["x-1"] = 9
        state["moves"] = [[file.name, file.directory] for file in files]
        (lake.control / "state.json").write_text(json.dumps(state))
        for file in files[:moved]:  # So far it came.
            (tmp_path / file.directory).mkdir(parents=True, exist_ok=True)
            (lake.staging / file.name).rename(tmp_path / file.directory / f"{file.name}.parquet")
    for _ in range(2):
        with Lake(tmp_path, by_event=True) as lake:
            assert lake.next("q", "x-1") == 9
        assert offsets(tmp_path) == list(range(1, 9))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Lake(tmp_path), pytest.raises(LakeInUse):
        Lake(tmp_path).__enter__()
    with Lake(tmp_path):
        pass


ODD = ["a/b", "ö%ü", "x=1", "17", "..", "a\\b", '"*?#', "l" * 300, "ö" * 150, "%" * 120, "a b"]
ODD += ["null", "__HIVE_DEFAULT_PARTITION__", "_x"]


@pytest.mark.parametrize("event", ODD)
def test_any_event_has_a_directory(tmp_path: Path, event: str) -> None:
    with Lake(tmp_path, by_event=True) as lake:
        put(lake, range(1, 3), event)
        roll(lake)
    partitioning = ds.partitioning(
        pa.schema([("date", pa.string()), ("event", pa.string())]), flavor="hive"
    )
    table = ds.dataset(tmp_path, partitioning=partitioning).to_table()

    assert set(table["topic"].to_pylist()) == {event}
    assert set(table["date"].to_pylist()) == {"2026-11-20"}
    if len(event) < 20:
        assert set(table["event"].to_pylist()) == {event}
    assert table["event"].null_count == 0


def test_long_events_stay_apart() -> None:
    assert directory("2026-11-20", "l" * 300) != directory("2026-11-20", "l" * 301)
    assert all(len(directory("d", event).split("/")[1].encode()) <= 255 for event in ODD)


@pytest.mark.parametrize("kind", [Lake, DeltaLake])
def test_a_lake_by_day_has_a_directory_for_each(tmp_path: Path, kind: type[Lake]) -> None:
    with kind(tmp_path) as lake:
        rows = [batch(range(n, n + 1), f"e{n}", NOON_US + n // 500 * DAY_US) for n in range(1000)]
        lake.commit("q", "x-1", 1000, list(stage(lake.staging, rows)))
        roll(lake)
    with pytest.raises(LakeUnfit, match="--by day"):
        kind(tmp_path, by_event=True).__enter__()
    with kind(tmp_path) as lake:
        assert lake.next("q", "x-1") == 1000

    assert [file.parent.name for file in sorted(tmp_path.glob("date=*/*.parquet"))] == [
        "date=2026-11-20",
        "date=2026-11-21",
    ]
    table = ds.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(table["offset"].to_pylist()) == list(range(1000))
    assert len(set(table["topic"].to_pylist())) == 1000


def test_what_waits_does_not_look_like_a_file_of_the_lake(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        put(lake, range(5))
        assert list(tmp_path.glob("**/*.parquet")) == []
        roll(lake)

    assert list(tmp_path.glob("**/*.parquet")) == shown(tmp_path)


def test_small_files_wait_to_be_merged(tmp_path: Path) -> None:
    with Lake(tmp_path, by_event=True) as lake:
        for n in range(5):
            put(lake, range(n * 10, n * 10 + 10))
        put(lake, range(50, 60), "e2")
        assert roll(lake, 60) == 60
        assert shown(tmp_path) == []
    with Lake(
        tmp_path, by_event=True
    ) as lake:  # They are in the lake: a restart does not lose them.
        assert roll(lake) == 0
        assert list(lake.staging.iterdir()) == []

    merged, alone = shown(tmp_path)
    assert pq.read_table(merged)["offset"].to_pylist() == list(range(50))
    assert pq.read_table(alone)["offset"].to_pylist() == list(range(50, 60))


def test_files_show_when_they_have_waited_or_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lake(tmp_path) as lake:
        [file] = put(lake, range(10))
        assert roll(lake, 0.05) in (0, 10)
        while roll(lake, 0.05):
            pass
        assert offsets(tmp_path) == list(range(10))
        monkeypatch.setattr("mqks.pipeline.lake.SMALL_BYTES", file.bytes * 5 // 2)
        for n in (1, 2):
            put(lake, range(n * 10, n * 10 + 10))
            assert roll(lake, 60) == n * 10
        put(lake, range(30, 40))
        assert roll(lake, 60) == 0
        assert offsets(tmp_path) == list(range(40))
        monkeypatch.setattr("mqks.pipeline.lake.SMALL_BYTES", file.bytes // 2)
        put(lake, range(40, 50))
        assert offsets(tmp_path) == list(range(50)), "a large one shows at once"
    assert len(shown(tmp_path)) == 3


def test_a_clock_that_is_put_back_keeps_nothing_from_showing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lake(tmp_path) as lake:
        for age_s in (0, 60):
            put(lake, range(10))
            before_s = time.time() - 3600
            with monkeypatch.context() as patch:
                patch.setattr("mqks.pipeline.lake.time.time", lambda: before_s)  # noqa: B023
                assert roll(lake, age_s) == 0


def test_the_names_of_a_new_lake_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("mqks.pipeline.lake.sync", synced.append)
    with Lake(tmp_path / "a" / "lake"):
        assert {tmp_path, tmp_path / "a", tmp_path / "a" / "lake"} <= set(synced)


def test_a_roll_that_was_cut_short_is_as_if_it_had_not_begun(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        for n in range(5):
            put(lake, range(n * 10, n * 10 + 10))

        def die(groups: list[list[str]]) -> list[list[str]]:
            merge(lake.staging, groups[0])
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            lake.roll(die, 0)
    assert shown(tmp_path) == []
    with Lake(tmp_path) as lake:
        assert len(list(lake.staging.iterdir())) == 5
        roll(lake)

    assert offsets(tmp_path) == list(range(50))


def test_files_whose_columns_differ_are_not_merged(tmp_path: Path) -> None:
    with Lake(tmp_path) as lake:
        for first, value in ((0, 1), (2, "text")):
            data = pa.array([{"n": value}] * 2)
            other = batch(range(first, first + 2)).append_column("data", data)
            lake.commit("q", "x-1", first + 2, list(stage(lake.staging, [other])))
        put(lake, range(4, 6))
        roll(lake)

    assert len(shown(tmp_path)) == 3


def test_a_file_that_shows_never_changes_and_never_goes(tmp_path: Path) -> None:
    found: dict[Path, tuple[int, int]] = {}
    with Lake(tmp_path) as lake:
        for n in range(20):
            put(lake, range(n * 10, n * 10 + 10), f"e{n % 3}")
            if n % 4 == 3:
                roll(lake)
            now = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in shown(tmp_path)}
            assert found.items() <= now.items()
            found = now

    assert offsets(tmp_path) == list(range(200))


def test_delta_has_the_files_and_how_far_they_go_in_one_log(tmp_path: Path) -> None:
    with DeltaLake(tmp_path, by_event=True) as lake:
        assert lake.next("q", "x-1") is None
        for n in range(2 * DELTA_COMPACTION):
            put(lake, range(n * 10, n * 10 + 10), ["e1", "ö%/ü"][n % 2])
            roll(lake, 60)
        lake.commit("q", "x-1", 1000, [])
        assert lake.next("q", "x-1") == 1000
    with DeltaLake(tmp_path, by_event=True) as lake:
        assert lake.next("q", "x-1") == 1000
        assert lake.next("q", "x-2") is None
    table = delta_table(tmp_path).to_pyarrow_table()

    assert sorted(table["offset"].to_pylist()) == list(range(20 * DELTA_COMPACTION))
    assert set(table["event"].to_pylist()) == {"e1", "ö%/ü"}
    assert len(delta_table(tmp_path).file_uris()) < 2 * DELTA_COMPACTION


def test_a_delta_table_takes_no_payloads_of_another_type(tmp_path: Path) -> None:
    with DeltaLake(tmp_path) as lake:

        def commit(first: int, value: Any) -> None:
            data = pa.array([{"n": value}] * 2)
            rows = batch(range(first, first + 2)).append_column("data", data)
            lake.commit("q", "x-1", first + 2, list(stage(lake.staging, [rows])))

        commit(0, 1)
        with pytest.raises(LakeUnfit, match="data"):
            commit(2, "text")
        assert lake.next("q", "x-1") == 2
        commit(2, 3)
        put(lake, range(4, 6))
    data = delta_table(tmp_path).to_pyarrow_table().sort_by("offset")["data"].to_pylist()

    assert data == [{"n": 1}, {"n": 1}, {"n": 3}, {"n": 3}, None, None]


def test_a_delta_table_grows_with_the_schema(tmp_path: Path) -> None:
    rows = [None, {"n": 1}, {"n": 2, "user": "ann"}, {"n": 3}, None]
    with DeltaLake(tmp_path) as lake:
        for first, data in enumerate(rows):
            part = batch(range(first, first + 1))
            if data is not None:
                part = part.append_column("data", pa.array([data]))
            lake.commit("q", "x-1", first + 1, list(stage(lake.staging, [part])))
    table = delta_table(tmp_path)

    filled = [data and {"n": data["n"], "user": data.get("user")} for data in rows]
    read = table.to_pyarrow_table().sort_by("offset")
    assert read["data"].to_pylist() == filled
    assert table.transaction_version("mqks/q/x-1") == 5


def test_a_delta_table_tells_what_it_cannot_have(tmp_path: Path) -> None:
    with DeltaLake(tmp_path) as lake:
        data = pa.array([{"took": timedelta(1)}] * 2)
        rows = batch(range(2)).append_column("data", data)
        with pytest.raises(LakeUnfit, match=r"cannot have .* Duration"):
            lake.commit("q", "x-1", 2, list(stage(lake.staging, [rows])))

    assert list(tmp_path.glob("**/*.parquet")) == []


def test_what_delta_has_merged_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    with DeltaLake(tmp_path, by_event=True) as lake:
        for n in range(DELTA_COMPACTION):
            put(lake, range(n * 10, n * 10 + 10), "ö%/ü")
        monkeypatch.setattr("mqks.pipeline.lake.sync", synced.append)
        roll(lake, 60)
    [merged] = map(Path, delta_table(tmp_path).file_uris())
    log = {tmp_path / "_delta_log" / f"{DELTA_COMPACTION + 1:020}.json", tmp_path / "_delta_log"}

    assert {merged, merged.parent, *log} <= set(synced)


def test_a_lake_keeps_its_format(tmp_path: Path) -> None:
    for first, second in ((Lake, DeltaLake), (DeltaLake, Lake)):
        path = tmp_path / first.__name__
        with first(path) as lake:
            put(lake, range(3))
        with pytest.raises(LakeUnfit, match="--format"):
            second(path).__enter__()


@pytest.mark.parametrize("kind", [Lake, DeltaLake])
def test_what_a_worker_wrote_elsewhere_is_not_committed(tmp_path: Path, kind: type[Lake]) -> None:
    with kind(tmp_path / "lake") as lake:
        put(lake, range(1, 5))
        files = list(stage(lake.staging, [batch(range(5, 9))]))
        (lake.staging / files[0].name).unlink()
        with pytest.raises(LakeUnfit, match="a lake is one directory that all machines"):
            lake.commit("q", "x-1", 9, files)

        assert lake.next("q", "x-1") == 5


def test_what_a_worker_merged_elsewhere_is_not_committed(tmp_path: Path) -> None:
    with Lake(tmp_path / "lake") as lake:
        put(lake, range(1, 5))
        with pytest.raises(LakeUnfit, match="the files written by the workers are missing"):
            lake.roll(lambda groups: [["000000000001-000000000004-0"] for _ in groups], 0)
    with Lake(tmp_path / "lake") as lake:
        roll(lake)

    assert offsets(tmp_path / "lake") == [1, 2, 3, 4]


def test_a_worker_without_the_lake_says_so(tmp_path: Path) -> None:
    with pytest.raises(LakeUnfit, match=r"is not on the machine .*: a lake is one directory"):
        list(stage(tmp_path / "staging", [batch(range(1, 5))]))
