"""What Spark, DuckDB, Polars, pandas and pyarrow read in each kind of lake: every row, once.

The one rule: no reader gets help from mqks, but for those in Spark's session.
"""

import hmac
import json
import shutil
import subprocess
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import duckdb
import pandas  # type: ignore[import-untyped]
import polars
import pyarrow.dataset as ds
import pytest
from pyiceberg.utils.config import Config

from mqks.pipeline import objects
from mqks.pipeline.errors import LakeInUse, LakeUnfit
from mqks.pipeline.iceberg import found
from mqks.pipeline.job import schema_of
from mqks.pipeline.layout import Layout, partitions
from mqks.pipeline.places import lake_at, messages
from mqks.pipeline.table import DeltaTable, delta
from tests.kit.ports import free_port
from tests.pipeline import test_pipeline_store as stores
from tests.pipeline.conftest import Clicks
from tests.pipeline.test_pipeline_lake import put
from tests.pipeline.test_pipeline_store import LIMIT_S

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

between, spark = stores.between, stores.spark  # Fixtures: the store, and a session that knows it.
ROWS = [(f"m{n}", ["page.view", "order.new"][n % 2], json.dumps({"n": n})) for n in range(60)]
BAD = [("bad", "rare", "no json")]
WANTED = sorted((key.encode(), topic, value.encode()) for key, topic, value in ROWS + BAD)
Found = list[dict[str, Any]]
Readers = dict[str, Callable[["SparkSession"], Found]]


def check(rows: Found) -> None:
    assert sorted((bytes(r["key"]), r["topic"], bytes(r["value"])) for r in rows) == WANTED
    numbers = [data["n"] for row in rows if (data := row["data"]) is not None and data == data]
    assert sorted(numbers) == list(range(60))


def _plain(lake: Path) -> Readers:
    files = f"{lake}/**/*.parquet"
    told = f"select * from read_parquet('{files}', hive_partitioning = true)"
    return {
        "Spark": lambda spark: _spark(spark.read.parquet(str(lake))),
        "DuckDB": lambda spark: duckdb.sql(told).to_arrow_table().to_pylist(),
        "Polars": lambda spark: polars.read_parquet(files, hive_partitioning=True).to_dicts(),
        "pandas": lambda spark: pandas.read_parquet(lake).to_dict("records"),
        "pyarrow": lambda spark: ds.dataset(lake, partitioning="hive").to_table().to_pylist(),
    }


def _delta(lake: Path | str) -> Readers:
    def by_duckdb(spark: "SparkSession") -> Found:
        rows = delta(lake).to_pyarrow_dataset()  # noqa: F841 - DuckDB finds it by its name.
        return list(duckdb.sql("select * from rows").to_arrow_table().to_pylist())

    return {
        "Spark": lambda spark: _spark(messages(spark, lake)),
        "DuckDB": by_duckdb,
        "Polars": lambda spark: polars.read_delta(str(lake)).to_dicts(),
        "pandas": lambda spark: delta(lake).to_pandas().to_dict("records"),
        "pyarrow": lambda spark: delta(lake).to_pyarrow_table().to_pylist(),
    }


def _iceberg(lake: str) -> Readers:
    def by_duckdb(spark: "SparkSession") -> Found:
        opened = found(lake).scan().to_duckdb("rows")
        return list(opened.sql("select * from rows").to_arrow_table().to_pylist())

    return {
        "Spark": lambda spark: _spark(messages(spark, lake)),
        "DuckDB": by_duckdb,
        "Polars": lambda spark: polars.scan_iceberg(found(lake)).collect().to_dicts(),
        "pandas": lambda spark: found(lake).scan().to_pandas().to_dict("records"),
        "pyarrow": lambda spark: found(lake).scan().to_arrow().to_pylist(),
    }


def _spark(rows: Any) -> Found:
    """Those of a table come without payloads, which then are parsed here."""
    told = [row.asDict(recursive=True) for row in rows.collect()]
    for row in told:
        if "data" not in row:
            row["data"] = json.loads(row["value"]) if row["value"][:1] == b"{" else None
    return told


KINDS = ["files", "delta", "delta on a store", "iceberg", "iceberg on one"]


@pytest.mark.usefixtures("catalog", "between")
@pytest.mark.parametrize("kind", KINDS)
def test_every_reader_finds_each_row_once(
    clicks: Clicks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    if kind == "iceberg on one":
        monkeypatch.setenv("PYICEBERG_CATALOG__LAKE__WAREHOUSE", "s3://bucket/warehouse")
        monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    places = {"delta on a store": "s3://bucket/readers", "files": tmp_path / "files"}
    lake: Any = places.get(kind, tmp_path / "delta" if kind == "delta" else None)
    readers = _plain(lake) if kind == "files" else _delta(lake)
    if lake is None:
        lake = "iceberg://lake/db.readers"
        readers = _iceberg(lake)
    clicks.publish(ROWS + BAD)
    with lake_at(lake, "delta" if kind == "delta" else None, Layout(partitions("event"))) as opened:
        told = clicks.archive_into(opened, batch_messages=25, schema=schema_of("n bigint"))
    assert sum(progress.unparsed for progress in told) == 1
    for name, read in readers.items():
        try:
            check(read(clicks.spark))
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None


# ------------------------------------------------------------------------------------- Azure


AZURITES = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
"""The key of its account, as its documentation has it."""


def make_container(port: int, name: str) -> None:
    at = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": at, "x-ms-version": "2021-08-06"}
    told = "".join(f"{key}:{value}\n" for key, value in headers.items())
    account = "devstoreaccount1"
    signed = f"PUT{chr(10) * 12}{told}/{account}/{account}/{name}\nrestype:container"
    digest = hmac.digest(b64decode(AZURITES), signed.encode(), "sha256")
    headers["Authorization"] = f"SharedKey {account}:{b64encode(digest).decode()}"
    url = f"http://127.0.0.1:{port}/{account}/{name}?restype=container"
    urlopen(Request(url, method="PUT", headers=headers)).close()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A container of Azurite, where there is one."""
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("there is no azurite-blob: npm install --global azurite")
    port = free_port()
    flags = ["--inMemoryPersistence", "--skipApiVersionCheck", "--blobPort", str(port)]
    process = subprocess.Popen([program, *flags], stdout=subprocess.DEVNULL)
    limit_s = time.monotonic() + LIMIT_S
    while True:
        try:
            make_container(port, "box")
            break
        except URLError:
            assert time.monotonic() < limit_s
            time.sleep(0.1)
    monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{port}")
    yield "az://box/lake"
    process.kill()
    process.wait()


def test_a_table_on_azure(azure: str) -> None:
    with DeltaTable(azure, layout=Layout(partitions("event"))) as one, DeltaTable(azure) as other:
        put(one, range(1, 5))
        put(one, range(5, 9), "ö%/ü x")
        with pytest.raises(LakeUnfit, match="use --by event"):
            DeltaTable(azure, layout=Layout(("date",))).__enter__()
        with pytest.raises(LakeInUse, match="q up to 9"):
            put(other, range(1, 4))
    with DeltaTable(azure) as one:
        assert one.next("q", "x-1") == 9
    assert sorted(delta(azure).to_pyarrow_table()["offset"].to_pylist()) == list(range(1, 9))
    with pytest.raises(LakeUnfit):
        objects.write("az://nobody/x", "y", b"")
