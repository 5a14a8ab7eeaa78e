"""Which lake is at a place, and its rows.

The one rule: the place alone says how a lake is read; how it is written, its format says as well.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from mqks.pipeline import objects
from mqks.pipeline.errors import LakeUnfit
from mqks.pipeline.lake import COLUMNS, FileLake, Lake
from mqks.pipeline.objects import DELETED, ICEBERG, Place, asked
from mqks.pipeline.table import DeltaTable, delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROWS = COLUMNS.append(pa.field("date", pa.date32()))


def lake_at(place: Place, format: str | None = None, by: tuple[str, ...] | None = None) -> Lake:
    """The lake at a place, to be entered; in a directory plain files unless the format is given.
    Raises LakeUnfit."""
    if isinstance(place, Path) and format in (None, "parquet"):
        return FileLake(place, by=by)
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline.iceberg import IcebergTable

        return IcebergTable(place, by=by)
    if format == "iceberg":
        raise LakeUnfit(f"{place}: Iceberg tables have a --catalog, and a name as namespace.table")
    if format == "parquet":
        raise LakeUnfit(f"{place} cannot have the format {format}: leave out --format")
    return DeltaTable(place, by=by)


def home_of(place: Place) -> Place:
    """Where what belongs to a lake can be stored. Raises what the catalog does."""
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        return iceberg.place_of(asked(place, partial(iceberg.found, place)).location())
    return place


def messages(spark: "SparkSession", place: Place) -> "DataFrame":
    """The rows of a lake, for Spark: the columns of its files, and `date`. Raises LakeUnfit.

    The event is the column `topic`; the directory may have it cut.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    schema = from_arrow_schema(_ROWS)
    if isinstance(place, Path) and not (place / "_delta_log").is_dir():
        if not place.is_dir():
            raise LakeUnfit(f"there is no lake at {place}")
        return spark.read.schema(schema).parquet(str(place.absolute()))
    files = [(uri,) for uri in asked(place, partial(_files, place))]
    if not files:
        return spark.createDataFrame([], schema)
    tasks = min(len(files), spark.sparkContext.defaultParallelism)
    named = spark.createDataFrame(files, "file string").repartition(tasks)
    return named.mapInArrow(_rows, schema)


def _files(place: Place) -> list[str]:
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        return iceberg.files(place)
    found = delta(place)
    if found is None:
        raise LakeUnfit(f"there is no Delta table at {place}")
    if any(len(batch) for batch in found.deletion_vectors()):
        raise LakeUnfit(f"{place}: {DELETED}")
    names = pa.table(found.get_add_actions())["path"].to_pylist()
    return [f"{place}/{unquote(name)}" for name in names]


def _rows(files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for uri in (uri for batch in files for uri in batch["file"].to_pylist()):
        content = objects.read(uri if "://" in uri else Path(uri))
        for batch in pq.ParquetFile(pa.BufferReader(content)).iter_batches(columns=COLUMNS.names):
            columns = [batch[name] for name in COLUMNS.names]
            columns.append(batch["timestamp"].cast(pa.date32()))
            yield pa.RecordBatch.from_arrays(columns, schema=_ROWS)
