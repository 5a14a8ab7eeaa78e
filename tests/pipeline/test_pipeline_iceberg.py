"""Iceberg tables in SQL, REST and Glue catalogs: commits, partitions, schemas, merging; readers.

The one rule: what is in a table is read by pyiceberg through the catalog.
"""

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import date
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import TYPE_CHECKING, Any

import httpx
import polars
import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.utils.config import Config

from mqks.commands import main
from mqks.pipeline.errors import LakeInUse, LakeUnfit, StoreAway
from mqks.pipeline.iceberg import MERGED_MAX, IcebergTable, catalog_of, files, found
from mqks.pipeline.lake import COLUMNS, shown, stage
from mqks.pipeline.layout import Layout
from mqks.pipeline.objects import Place
from mqks.pipeline.places import lake_at
from mqks.pipeline.table import DeltaTable, LakeTable, delta
from tests import pipeline_kills as kills
from tests.kit.ports import free_port
from tests.kit.rest_catalog import TOKEN
from tests.pipeline.conftest import Clicks, some
from tests.pipeline.test_pipeline_lake import DAY_US, NOON_US, WRITTEN_LATER, batch, payloads, put
from tests.pipeline.test_pipeline_store import Moto

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

URL = "iceberg://lake/db.events"
COMPACTION = 4
"""Here a table is compacted sooner than by default."""


@pytest.fixture(scope="module")
def _moto() -> Iterator[Moto]:
    moto = Moto()
    yield moto
    moto.stop()


@pytest.fixture(autouse=True)
def _catalog(
    request: pytest.FixtureRequest, tmp_path: Path, catalog: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """A SQL catalog, or in a test for `EACH` another one."""
    monkeypatch.setattr("mqks.pipeline.iceberg.COMPACTION", COMPACTION)
    (tmp_path / "warehouse").mkdir()
    told = dict[str, str]()
    with ExitStack() as opened:
        match getattr(request, "param", "sql"):
            case "rest":
                command = [sys.executable, "-m", "tests.kit.rest_catalog", str(tmp_path)]
                server = opened.enter_context(Popen(command, stdout=PIPE, text=True))
                opened.callback(server.kill)
                assert server.stdout is not None
                told = {"URI": f"http://127.0.0.1:{int(server.stdout.readline())}", "TOKEN": TOKEN}
                monkeypatch.delenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE")
            case "glue":
                url = f"http://127.0.0.1:{request.getfixturevalue('_moto').port}"
                httpx.post(f"{url}/moto-api/reset").raise_for_status()
                keys = {"GLUE__ACCESS_KEY_ID": "key", "GLUE__SECRET_ACCESS_KEY": "secret"}
                told = {"TYPE": "glue", "GLUE__ENDPOINT": url, "GLUE__REGION": "us-east-1", **keys}
                monkeypatch.delenv("PYICEBERG_CATALOG__LAKE__URI")
        for name, value in told.items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__LAKE__{name}", value)
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # Else as at the import.
        yield


CATALOGS = ["sql", "rest", "glue"]
EACH = pytest.mark.parametrize("_catalog", CATALOGS, indirect=True)
ALSO_DELTA = pytest.mark.parametrize("_catalog", ["DeltaTable", *CATALOGS], indirect=True)
# Moto's Glue updates a table whatever version it is told to be of: the last of two commits wins.
COMPARING = pytest.mark.parametrize("_catalog", ["sql", "rest"], indirect=True)
Opened = Callable[..., LakeTable]


@pytest.fixture
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Opened:
    if "DeltaTable" in request.node.name:
        return partial(DeltaTable, tmp_path / "lake")
    return partial(IcebergTable, URL)


def rows(place: Place = URL) -> pa.Table:
    if isinstance(place, Path):
        return delta(place).to_pyarrow_table().sort_by("offset")
    return found(place).scan().to_arrow().sort_by("offset")


def offsets(place: Place = URL) -> list[int]:
    told: list[int] = rows(place)["offset"].to_pylist()
    return told


@ALSO_DELTA
def test_a_commit_has_files_and_how_far_they_go(opened: Opened) -> None:
    with opened() as lake:
        assert lake.next("q", "x-1") is None
        put(lake, batch(range(4)))
        lake.commit("q", "x-1", 9, [])
        assert (lake.next("q", "x-1"), lake.arrived_us("q", "x-1")) == (9, NOON_US)
    with opened() as lake:
        assert lake.layout.partitions == ("date",)
        assert (lake.next("q", "x-1"), lake.next("q", "x-2")) == (9, None)
    assert offsets(lake.place) == [0, 1, 2, 3]


@EACH
def test_partitions_are_transforms() -> None:
    url = "iceberg://lake/db.hours"
    with IcebergTable(url, layout=Layout(("date", "hour", "event"))) as lake:
        put(lake, batch(range(4)))
        put(lake, batch(range(4, 6), "ö%/ü x"))
    with IcebergTable(url) as lake:
        assert lake.layout.partitions == ("date", "hour", "event")
    assert [field.name for field in found(url).spec().fields] == ["hour", "event"]
    rows = found(url).scan("topic = 'ö%/ü x' and timestamp >= '2026-11-20T12:00:00+00:00'")
    assert sorted(rows.to_arrow()["offset"].to_pylist()) == [4, 5]
    with pytest.raises(LakeUnfit, match="use --by hour,event"):
        IcebergTable(url, layout=Layout(("date",))).__enter__()
    with pytest.raises(LakeUnfit, match="no partitions by parsed"):
        IcebergTable("iceberg://lake/db.other", layout=Layout(("date", "parsed"))).__enter__()


@ALSO_DELTA
def test_of_two_archives_one_ends(opened: Opened) -> None:
    with opened() as one, opened() as other:
        assert one.next("q", "x-1") is other.next("q", "x-1") is None
        put(one, batch(range(4)))
        with pytest.raises(LakeInUse, match="another archive has committed the queue q up to 4"):
            put(other, batch(range(6)))
        with pytest.raises(LakeInUse):
            other.commit("q", "x-1", 2, [])
    with opened() as one, opened() as other:
        assert one.next("q", "x-1") == other.next("q", "x-1") == 4
        put(one, batch(range(4, 8)))
        with pytest.raises(LakeInUse, match="queue q up to 8"):
            put(other, batch(range(4, 6)))
        put(one, batch(range(8, 10)))
        other.commit("q2", "x-2", 5, [])
        assert other.next("q", "x-1") == 10
        put(one, batch(range(10, 12)))
    assert offsets(one.place) == list(range(12))


@pytest.mark.lakes
@COMPARING
def test_archives_of_several_queues_commit_at_once() -> None:
    """Each of their commits fails when another comes before it, and is done again."""

    def work(queue: int) -> None:
        with IcebergTable(URL) as lake:
            assert lake.next(f"q{queue}", "x") is None
            for n in range(5):
                rows = batch(range(queue * 100 + n, queue * 100 + n + 1))
                lake.prepared(None)
                lake.commit(f"q{queue}", "x", n + 1, list(stage(lake.staging, [rows])))

    with IcebergTable(URL), ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert offsets() == [queue * 100 + n for queue in range(3) for n in range(5)]


@EACH
def test_an_answer_of_the_catalog_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(catalog_of(URL)[0]) as opened:
        catalog = type(opened)
    commit = catalog.commit_table

    def lost(*told: Any) -> Any:
        commit(*told)
        monkeypatch.setattr(catalog, "commit_table", commit)
        raise TimeoutError("no answer")

    with IcebergTable(URL) as lake:
        put(lake, batch(range(4)))
        monkeypatch.setattr(catalog, "commit_table", lost)
        put(lake, batch(range(4, 6)))
        assert lake.next("q", "x-1") == 6
    assert offsets() == list(range(6))


@ALSO_DELTA
def test_a_table_grows_with_the_schema_and_gets_wider_types(opened: Opened) -> None:
    narrow, wide = (
        pa.struct([("n", n), ("xs", pa.list_(pa.field("element", x)))])
        for n, x in ((pa.int32(), pa.float32()), (pa.int64(), pa.float64()))
    )
    with opened() as lake:
        put(lake, batch(range(1)))
        put(lake, payloads(range(1, 2), pa.array([{"n": 7, "xs": [0.5]}], narrow)))
        put(lake, payloads(range(2, 3), pa.array([{"n": 2**40, "xs": None}], wide)))
        assert lake.prepared(narrow) == wide
        assert lake.prepared(pa.struct([("n", pa.int8())])) == pa.struct([("n", pa.int64())])
        with pytest.raises(LakeUnfit, match=r"string after int64"):
            lake.prepared(pa.struct([("n", pa.string())]))
        assert lake.next("q", "x-1") == 3
        more = pa.struct([*wide, ("user", pa.string())])
        put(lake, payloads(range(3, 4), pa.array([{"user": "ann"}], more)))
        put(lake, payloads(range(4, 5), pa.array([{"n": 8, "xs": []}], wide)))
    data = rows(lake.place)["data"].to_pylist()
    assert [each and each["n"] for each in data] == [None, 7, 2**40, None, 8]
    assert data[1]["xs"] == [0.5]
    assert data[3]["user"] == "ann"
    if isinstance(lake, DeltaTable):
        by_polars = polars.read_delta(str(lake.place)).sort("offset")["data"]
        assert by_polars.struct.field("n").to_list() == [None, 7, 2**40, None, 8]


@ALSO_DELTA
def test_a_table_of_an_older_version_gets_the_columns_of_origins(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as older:
        for module in ("iceberg", "table"):
            older.setattr(f"mqks.pipeline.{module}.WRITTEN", COLUMNS)
        with opened() as lake:
            put(lake, batch(range(4)))
    assert not WRITTEN_LATER & {*rows(lake.place).column_names}
    with opened() as lake:
        assert lake.next("q", "x-1") == 4
        put(lake, batch(range(4, 8)))
    assert {*rows(lake.place).column_names} > WRITTEN_LATER
    assert offsets(lake.place) == list(range(8))


@pytest.mark.lakes
def test_old_snapshots_leave_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqks.pipeline.iceberg.SNAPSHOTS_S", 0)
    with IcebergTable(URL) as lake:
        for n in range(COMPACTION):
            put(lake, batch(range(n, n + 1)))
            lake.roll(60)
        assert lake.next("q", "x-1") == COMPACTION
    assert len(found(URL).snapshots()) < COMPACTION
    assert offsets() == list(range(COMPACTION))


@pytest.mark.lakes
@EACH
def test_small_files_are_merged_and_old_days_leave() -> None:
    with IcebergTable(URL) as lake:
        for n in range(2 * COMPACTION):
            put(lake, batch(range(n * 2, n * 2 + 2)))
            lake.roll(60)
        assert offsets() == list(range(4 * COMPACTION))
        assert len(files(URL)) < COMPACTION <= MERGED_MAX
        put(lake, batch(range(100, 104), time_us=NOON_US + DAY_US))
        before = found(URL).current_snapshot().snapshot_id
        lake.expire(date(2026, 11, 21))
        lake.expire(date(2026, 11, 21))
        assert lake.next("q", "x-1") == 104
    assert offsets() == list(range(100, 104))
    assert found(URL).scan(snapshot_id=before).to_arrow().num_rows == 4 * COMPACTION + 4


def age(path: Path, days: float = 8) -> None:
    """All files that are there now are so old."""
    for file in path.rglob("*.*"):
        os.utime(file, (time.time() - days * 86_400,) * 2)


def vacuum(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """The names of the files that the command tells."""
    capsys.readouterr()
    assert main(["pipeline", "vacuum", URL, "--json", *arguments]) == 0
    return [Path(file).name for file in json.loads(capsys.readouterr().out)["files"]]


@pytest.mark.lakes
@EACH
def test_a_vacuum_deletes_what_no_snapshot_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def there() -> set[str]:
        return {file.name for file in tmp_path.rglob("*.*") if file.suffix != ".db"}

    with IcebergTable(URL) as lake:
        for n in range(COMPACTION - 1):
            put(lake, batch(range(n, n + 1)))
        replaced = {Path(file).name for file in files(URL)}
        monkeypatch.setattr("mqks.pipeline.iceberg.SNAPSHOTS_S", 0)
        put(lake, batch(range(COMPACTION - 1, COMPACTION)))
        lake.roll(60)  # All snapshots but one are expired.
        [orphan] = stage(lake.staging, [batch(range(90, 91))])
        reader = found(URL).scan()
        put(lake, batch(range(COMPACTION, COMPACTION + 1)))
        age(tmp_path)
        [fresh] = stage(lake.staging, [batch(range(91, 92))])
        before = there()
        dry = vacuum(capsys, "--dry-run")
        assert there() == before
        assert vacuum(capsys, "--older-than", "9d") == []
        assert vacuum(capsys) == dry
        assert there() == before - {*dry}
        assert {*dry} >= {*replaced, shown(orphan.name)}
        assert any(name.startswith("snap-") for name in dry)
        assert shown(fresh.name) in there()
        assert reader.to_arrow().num_rows == COMPACTION
        assert vacuum(capsys) == []
        lake.commit("q", "x-1", 92, [fresh])
    assert offsets() == [*range(COMPACTION + 1), 91]
    assert main(["pipeline", "verify", URL]) == 0
    assert main(["pipeline", "vacuum", URL, "--older-than", "1h"]) == os.EX_USAGE


def test_a_vacuum_deletes_nothing_of_a_table_with_files_elsewhere(tmp_path: Path) -> None:
    with IcebergTable(URL) as lake:
        put(lake, batch(range(4)))
        [orphan] = stage(lake.staging, [batch(range(4, 5))])
        elsewhere = shutil.copy(files(URL)[0], tmp_path / "elsewhere.parquet")
        catalog, name = catalog_of(URL)
        with closing(catalog):
            catalog.load_table(name).add_files([f"file://{elsewhere}"])
        age(tmp_path)
    with IcebergTable(URL) as lake, pytest.raises(LakeUnfit, match="elsewhere"):
        lake.vacuum(86_400)
    assert [*tmp_path.rglob(shown(orphan.name))]


@pytest.mark.lakes
def test_a_snapshot_is_kept_for_a_day_since_another_replaced_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, old = time.time, []
    with IcebergTable(URL) as lake:
        with monkeypatch.context() as before:
            before.setattr(time, "time", lambda: now() - 2 * 86_400)
            for n in range(2):
                put(lake, batch(range(n, n + 1)))
                old.append(found(URL).current_snapshot().snapshot_id)
        for n in range(2, COMPACTION):
            put(lake, batch(range(n, n + 1)))
        lake.roll(60)
    assert found(URL).snapshot_by_id(old[0]) is None
    assert found(URL).scan(snapshot_id=old[1]).to_arrow().num_rows == 2


def test_its_files_are_on_the_disk_before_the_catalog_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    synced: set[str] = set()
    fsync, commit = os.fsync, SqlCatalog.commit_table

    def note(number: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{number}"))
        fsync(number)

    def checked(*told: Any) -> Any:
        answer = commit(*told)
        snapshot = answer.metadata.current_snapshot()
        if snapshot is not None:
            lists = [snapshot.manifest_list, answer.metadata_location]
            lists += [each.manifest_path for each in snapshot.manifests(found(URL).io)]
            assert {each.removeprefix("file://") for each in lists} <= synced
        return answer

    with IcebergTable(URL) as lake:
        monkeypatch.setattr(os, "fsync", note)
        monkeypatch.setattr(SqlCatalog, "commit_table", checked)
        put(lake, batch(range(4)))
        assert set(files(URL)) <= synced


@pytest.mark.lakes
@EACH
def test_from_the_queue_to_readers_and_back(clicks: Clicks) -> None:
    clicks.lake = URL
    rows = some(0, 40) + some(40, 10, "order.new")
    clicks.publish(rows)
    assert sum(p.messages for p in clicks.archive(batch_messages=20)) == 50
    assert clicks.waits() == []
    ids = sorted(row[0] for row in rows)
    assert sorted(row["key"].decode() for row in clicks.messages().collect()) == ids
    for _ in range(2):
        clicks.replay()
        assert [row[1:] for row in clicks.waits()] == [row[1:] for row in rows]


def test_what_is_no_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The command says so before it starts Spark, which would end the session of other tests."""
    for wrong in ("iceberg://lake", "iceberg://lake/events", "iceberg://other/db.events"):
        assert main(["pipeline", "archive", "q", wrong]) == os.EX_DATAERR
    assert "PYICEBERG_CATALOG__OTHER__URI" in capsys.readouterr().err
    with pytest.raises(LakeUnfit, match="there is no Iceberg table"):
        files("iceberg://lake/db.none")
    with pytest.raises(LakeUnfit, match="--catalog"):
        lake_at(tmp_path, "iceberg")
    catalog, name = catalog_of("iceberg://lake/db.foreign")
    with closing(catalog):
        catalog.create_namespace("db")
        catalog.create_table(name, pa.schema([("x", pa.int64())]))
    with pytest.raises(LakeUnfit, match="other partitions"):
        IcebergTable("iceberg://lake/db.foreign").__enter__()


@pytest.mark.parametrize("_catalog", ["rest"], indirect=True)
def test_a_catalog_that_refuses_or_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__TOKEN", "bad")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    with pytest.raises(LakeUnfit, match=r"the store refuses this: .*another token"):
        IcebergTable(URL).__enter__()
    monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    with IcebergTable(URL) as lake, pytest.raises(StoreAway):
        lake.next("q", "x-1")


@pytest.mark.parametrize("token", ["given", "from_catalog", "from_oauth2"])
def test_a_catalog_that_never_answers(
    token: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it is asked for its settings first, or for a token."""
    monkeypatch.setattr("mqks.pipeline.iceberg.REQUEST_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told: dict[str, Any] = {"uri": url}
        match token:
            case "given":
                told["token"] = TOKEN
            case "from_catalog":
                told |= {"credential": "a:b", "oauth2-server-uri": url}
            case "from_oauth2":
                client = {"client_id": "a", "client_secret": "b", "token_url": url}
                told["auth"] = {"type": "oauth2", "oauth2": client}
        config = Config()
        config.config = {"catalog": {"lake": told}}
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", config)
        with IcebergTable(URL) as lake, pytest.raises(StoreAway, match="timed out"):
            lake.next("q", "x-1")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_all_is_killed_and_each_message_is_in_the_table_once(
    spark: "SparkSession", tmp_path: Path
) -> None:
    count, warehouse = 40_000, tmp_path / "warehouse"
    kills.archive(spark, tmp_path, count, 1, "iceberg", 2, lake=URL, files=warehouse)
    age(tmp_path)
    assert main(["pipeline", "vacuum", URL]) == 0
    assert kills.counted_by_spark(spark, URL) == (count, count, count)
    assert offsets() == list(range(1, count + 1))
    left = {Path(file).name for file in files(URL)}
    assert {file.name for file in warehouse.rglob("*.parquet")} == left
