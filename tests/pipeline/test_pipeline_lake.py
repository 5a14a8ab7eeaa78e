"""The lake without Spark: what a commit promises, names of directories, and what readers see.

The one rule: a lake is read back with pyarrow as any program would read it.
"""

import json
import os
import resource
import time
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from mqks.commands import main
from mqks.pipeline.errors import BadOption, LakeInUse, LakeUnfit
from mqks.pipeline.lake import COLUMNS, File, FileLake, Lake, Staging, directory, merge, stage
from mqks.pipeline.layout import USUAL, Layout, partitions
from mqks.pipeline.objects import SyncedFile
from mqks.pipeline.table import COMPACTION, DeltaTable, delta

BY_EVENT = ("date", "event")

WRITTEN_LATER = {"origin_queue", "origin_epoch", "origin_offset"}

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


def files_of(lake: Lake) -> Path:
    assert isinstance(lake.staging, Staging)
    assert isinstance(lake.staging.place, Path)
    return lake.staging.place


def put(
    lake: Lake, rows: range | pa.RecordBatch, event: str = "e1", queue: str = "q"
) -> list[File]:
    given = batch(rows, event) if isinstance(rows, range) else rows
    given = given.set_column(5, "queue", pa.array([queue] * len(given)))
    names = given.schema.names
    lake.prepared(given.schema.field("data").type if "data" in names else None)
    files = list(stage(lake.staging, [given]))
    lake.commit(queue, "x-1", given["offset"][-1].as_py() + 1, files)
    return files


def offsets(path: Path) -> list[int]:
    table = ds.dataset(path, partitioning="hive").to_table(columns=["offset"])
    return sorted(table["offset"].to_pylist())


def shown(path: Path) -> list[Path]:
    return sorted(path.glob("date=*/**/*.parquet"))


def test_nothing_is_in_the_lake_before_its_commit(tmp_path: Path) -> None:
    with FileLake(tmp_path) as lake:
        assert lake.next("q", "x-1") is None
        put(lake, range(1, 5))
        list(stage(lake.staging, [batch(range(5, 9))]))  # Its driver dies here.
    with FileLake(tmp_path) as lake:
        assert lake.next("q", "x-1") == 5
        assert lake.next("q", "x-2") is None
        assert len(list(files_of(lake).iterdir())) == 1
        assert lake.roll(0) == 0
        assert list(files_of(lake).iterdir()) == []
    assert offsets(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_commit_that_was_cut_short_is_finished(tmp_path: Path, moved: int) -> None:
    with FileLake(tmp_path, layout=Layout(BY_EVENT)) as lake:
        put(lake, range(1, 5))
        lake.roll(0)
        files = [*stage(lake.staging, [batch(range(5, 7)), batch(range(7, 9), "e2")])]
        state = json.loads((lake.control / "state.json").read_text())
        state["queues"]["q"]["x-1"] = 9
        state["moves"] = [[file.name, file.directory] for file in files]
        (lake.control / "state.json").write_text(json.dumps(state))
        for file in files[:moved]:  # So far it came.
            (tmp_path / file.directory).mkdir(parents=True, exist_ok=True)
            (files_of(lake) / file.name).rename(tmp_path / file.directory / f"{file.name}.parquet")
    for _ in range(2):
        with FileLake(tmp_path, layout=Layout(BY_EVENT)) as lake:
            assert lake.next("q", "x-1") == 9
        assert offsets(tmp_path) == list(range(1, 9))


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with FileLake(tmp_path), pytest.raises(LakeInUse):
        FileLake(tmp_path).__enter__()
    with FileLake(tmp_path):
        pass


ODD = ["a/b", "ö%ü", "x=1", "17", "..", "a\\b", '"*?#', "l" * 300, "ö" * 150, "%" * 120, "a b"]
ODD += ["null", "__HIVE_DEFAULT_PARTITION__", "_x"]


@pytest.mark.parametrize("event", ODD)
def test_any_event_has_a_directory(tmp_path: Path, event: str) -> None:
    with FileLake(tmp_path, layout=Layout(BY_EVENT)) as lake:
        put(lake, range(1, 3), event)
        lake.roll(0)
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
    assert directory(BY_EVENT, ["d", "l" * 300]) != directory(BY_EVENT, ["d", "l" * 301])
    assert all(
        len(directory(BY_EVENT, ["d", event]).split("/")[1].encode()) <= 255 for event in ODD
    )


@pytest.mark.parametrize("kind", [FileLake, DeltaTable])
def test_a_lake_by_day_has_a_directory_for_each(
    tmp_path: Path, kind: type[FileLake | DeltaTable]
) -> None:
    with kind(tmp_path) as lake:
        rows = [batch(range(n, n + 1), f"e{n}", NOON_US + n // 500 * DAY_US) for n in range(1000)]
        lake.prepared(None)
        lake.commit("q", "x-1", 1000, list(stage(lake.staging, rows)))
        lake.roll(0)
    with pytest.raises(LakeUnfit, match="--by day"):
        kind(tmp_path, layout=Layout(BY_EVENT)).__enter__()
    with kind(tmp_path) as lake:
        assert lake.next("q", "x-1") == 1000
    assert [file.parent.name for file in sorted(tmp_path.glob("date=*/*.parquet"))] == [
        "date=2026-11-20",
        "date=2026-11-21",
    ]
    table = ds.dataset(tmp_path, partitioning="hive").to_table()
    assert sorted(table["offset"].to_pylist()) == list(range(1000))
    assert len(set(table["topic"].to_pylist())) == 1000


def test_small_files_wait_to_be_merged(tmp_path: Path) -> None:
    with FileLake(tmp_path, layout=Layout(BY_EVENT)) as lake:
        for n in range(5):
            put(lake, range(n * 10, n * 10 + 10))
        put(lake, range(50, 60), "e2")
        assert lake.roll(60) == 60
        assert list(tmp_path.glob("**/*.parquet")) == [], "what waits does not look like a file"
    # They are in the lake: a restart does not lose them.
    with FileLake(tmp_path, layout=Layout(BY_EVENT)) as lake:
        assert lake.roll(0) == 0
        assert list(files_of(lake).iterdir()) == []
    merged, alone = shown(tmp_path)
    assert pq.read_table(merged)["offset"].to_pylist() == list(range(50))
    assert pq.read_table(alone)["offset"].to_pylist() == list(range(50, 60))


def test_files_show_when_they_have_waited_or_are_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLake(tmp_path) as lake:
        [file] = put(lake, range(10))
        assert lake.roll(0.05) in (0, 10)
        while lake.roll(0.05):
            pass
        assert offsets(tmp_path) == list(range(10))
        monkeypatch.setattr("mqks.pipeline.lake.SMALL_BYTES", file.bytes * 5 // 2)
        for n in (1, 2):
            put(lake, range(n * 10, n * 10 + 10))
            assert lake.roll(60) == n * 10
        put(lake, range(30, 40))
        assert lake.roll(60) == 0
        assert offsets(tmp_path) == list(range(40))
        monkeypatch.setattr("mqks.pipeline.lake.SMALL_BYTES", file.bytes // 2)
        put(lake, range(40, 50))
        assert offsets(tmp_path) == list(range(50)), "a large one shows at once"
    assert len(shown(tmp_path)) == 3


def test_a_clock_that_is_put_back_keeps_nothing_from_showing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLake(tmp_path) as lake:
        for age_s in (0, 60):
            put(lake, range(10))
            before_s = time.time() - 3600
            with monkeypatch.context() as patch:
                patch.setattr("mqks.pipeline.lake.time.time", lambda: before_s)  # noqa: B023
                assert lake.roll(age_s) == 0


def test_the_names_of_a_new_lake_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("mqks.pipeline.objects.sync", synced.append)
    with FileLake(tmp_path / "a" / "lake"):
        assert {tmp_path, tmp_path / "a", tmp_path / "a" / "lake"} <= set(synced)


def test_a_file_of_which_the_disk_takes_a_part_is_no_file(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"), SyncedFile(tmp_path / "file") as file:
            file.write(bytes(20_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_roll_that_was_cut_short_is_as_if_it_had_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLake(tmp_path) as lake:
        for n in range(5):
            put(lake, range(n * 10, n * 10 + 10))

        def die(*told: Any) -> None:
            merge(*told)
            raise KeyboardInterrupt

        monkeypatch.setattr("mqks.pipeline.lake.merge", die)
        with pytest.raises(KeyboardInterrupt):
            lake.roll(0)
        monkeypatch.undo()
    assert shown(tmp_path) == []
    with FileLake(tmp_path) as lake:
        assert len(list(files_of(lake).iterdir())) == 5
        lake.roll(0)

    assert offsets(tmp_path) == list(range(50))


def test_files_whose_columns_differ_are_not_merged(tmp_path: Path) -> None:
    with FileLake(tmp_path) as lake:
        for first, value in ((0, 1), (2, "text")):
            data = pa.array([{"n": value}] * 2)
            other = batch(range(first, first + 2)).append_column("data", data)
            put(lake, other)
        put(lake, range(4, 6))
        lake.roll(0)
    assert len(shown(tmp_path)) == 3


def test_a_file_that_shows_never_changes_and_never_goes(tmp_path: Path) -> None:
    found: dict[Path, tuple[int, int]] = {}
    with FileLake(tmp_path) as lake:
        for n in range(20):
            put(lake, range(n * 10, n * 10 + 10), f"e{n % 3}")
            if n % 4 == 3:
                lake.roll(0)
            now = {file: (file.stat().st_ino, file.stat().st_mtime_ns) for file in shown(tmp_path)}
            assert found.items() <= now.items()
            found = now
    assert offsets(tmp_path) == list(range(200))


def test_a_delta_table_tells_what_it_cannot_have(tmp_path: Path) -> None:
    with DeltaTable(tmp_path) as lake:
        data = pa.array([{"took": timedelta(1)}] * 2)
        rows = batch(range(2)).append_column("data", data)
        with pytest.raises(LakeUnfit, match=r"cannot have .* Duration"):
            put(lake, rows)
    assert delta(tmp_path) is None
    assert list(tmp_path.glob("**/*.parquet")) == []


def test_what_delta_has_merged_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    with DeltaTable(tmp_path, layout=Layout(BY_EVENT)) as lake:
        for n in range(COMPACTION):
            put(lake, range(n * 10, n * 10 + 10), "ö%/ü")
        monkeypatch.setattr("mqks.pipeline.table.sync", lambda name: synced.append(Path(name)))
        lake.roll(60)
    [merged] = map(Path, delta(tmp_path).file_uris())
    log = {tmp_path / "_delta_log" / f"{COMPACTION + 1:020}.json", tmp_path / "_delta_log"}
    assert {merged, merged.parent, *log} <= set(synced)


def test_a_lake_keeps_its_format(tmp_path: Path) -> None:
    for first, second in ((FileLake, DeltaTable), (DeltaTable, FileLake)):
        path = tmp_path / first.__name__
        with first(path) as lake:
            put(lake, range(3))
        with pytest.raises(LakeUnfit, match="--format"):
            second(path).__enter__()


@pytest.mark.parametrize("kind", [FileLake, DeltaTable])
def test_what_a_worker_wrote_elsewhere_is_not_committed(
    tmp_path: Path, kind: type[FileLake | DeltaTable]
) -> None:
    with kind(tmp_path / "lake") as lake:
        put(lake, range(1, 5))
        files = list(stage(lake.staging, [batch(range(5, 9))]))
        (files_of(lake) / lake.staging.path(files[0])).unlink()
        with pytest.raises(LakeUnfit, match="a lake is one directory that all machines"):
            lake.commit("q", "x-1", 9, files)
        assert lake.next("q", "x-1") == 5


def test_a_worker_without_the_lake_says_so(tmp_path: Path) -> None:
    with pytest.raises(LakeUnfit, match=r"is not on the machine .*: a lake is one directory"):
        list(stage(Staging(tmp_path / "staging", USUAL), [batch(range(1, 5))]))


def payloads(offsets: range, data: pa.Array) -> pa.RecordBatch:
    return batch(offsets).append_column("data", data)


def test_partitions_by_hour_and_by_what_was_parsed(tmp_path: Path) -> None:
    by = partitions("parsed,hour")
    assert by == ("date", "hour", "parsed")
    rows = payloads(range(4), pa.array([{"n": 1}, None, {"n": 3}, None]))
    for kind in (FileLake, DeltaTable):
        with kind(tmp_path / kind.__name__, layout=Layout(by)) as lake:
            put(lake, rows)
            put(lake, range(4, 6))
            lake.roll(0)
        with kind(tmp_path / kind.__name__) as lake:
            assert lake.layout.partitions == by
    files = tmp_path / "FileLake"
    places = {str(file.parent.relative_to(files)) for file in shown(files)}
    assert places == {f"date=2026-11-20/hour=12/parsed={told}" for told in ("true", "false")}
    for apart in ("true", "false"):
        table = delta(tmp_path / "DeltaTable").to_pyarrow_table(
            filters=[("parsed", "=", apart == "true")]
        )
        assert set(table["hour"].to_pylist()) == {12}
        assert sorted(table["offset"].to_pylist()) == ([0, 2] if apart == "true" else [1, 3, 4, 5])
    with pytest.raises(BadOption, match="week is none of"):
        partitions("week")


def test_a_vacuum_of_a_delta_table_and_of_plain_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lake"
    with DeltaTable(path) as lake:
        put(lake, range(4))
        orphan, fresh = (
            file for _ in range(2) for file in stage(lake.staging, [batch(range(4, 5))])
        )
        old = path / lake.staging.path(orphan)
        os.utime(old, (time.time() - 8 * 86_400,) * 2)
    for arguments, files in (
        (["--dry-run"], [old.name]),
        (["--older-than", "9d"], []),
        ([], [old.name]),
        ([], []),
    ):
        assert main(["pipeline", "vacuum", str(path), *arguments]) == 0
        *told, count = capsys.readouterr().out.splitlines()
        assert [Path(name).name for name in told] == (files if arguments == ["--dry-run"] else [])
        assert count == f"{len(files)} files {'to delete' if told else 'deleted'}"
        assert old.exists() == (arguments != [])
    assert (path / lake.staging.path(fresh)).exists()
    assert main(["pipeline", "verify", str(path)]) == 0
    with FileLake(tmp_path / "files") as plain:
        put(plain, range(4))
    assert main(["pipeline", "vacuum", str(tmp_path / "files")]) == 0
    assert capsys.readouterr().out.endswith("0 files deleted\n")


def test_old_days_leave_a_table_and_its_files_later(tmp_path: Path) -> None:
    with DeltaTable(tmp_path) as lake:
        for day in range(3):
            rows = batch(range(day * 10, day * 10 + 10), time_us=NOON_US + day * DAY_US)
            put(lake, rows)
        before = delta(tmp_path)
        lake.expire(date(2026, 11, 22))
        version = delta(tmp_path).version()
        lake.expire(date(2026, 11, 22))
        assert delta(tmp_path).version() == version, "nothing is too old any more"
        assert lake.next("q", "x-1") == 30
        put(lake, range(30, 33))
    told = sorted(delta(tmp_path).to_pyarrow_table()["offset"].to_pylist())
    assert told == [*range(20, 33)]
    assert before.to_pyarrow_table().num_rows == 30, "a reader of the older version goes on"
