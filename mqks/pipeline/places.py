"""Which lake is at a place, and its rows.

The one rule: the place alone says how a lake is read; how it is written, its format says as well.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from mqks.pipeline.columns import PROPERTIES
from mqks.pipeline.errors import LakeUnfit
from mqks.pipeline.lake import (
    COLUMNS,
    CONTROL,
    FileLake,
    Lake,
    control_of,
    fitted,
    names_of,
    table_at,
)
from mqks.pipeline.layout import USUAL, Layout
from mqks.pipeline.objects import ICEBERG, Place, asked
from mqks.pipeline.payloads import BAD
from mqks.pipeline.sums import batches_of
from mqks.pipeline.table import DeltaTable, delta, delta_files

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_DATE = pa.field("date", pa.date32())


def lake_at(place: Place, format: str | None = None, layout: Layout = USUAL) -> Lake:
    """The lake at a place, to be entered; in a directory plain files unless the format is given.
    Raises LakeUnfit."""
    if isinstance(place, Path) and format in (None, "parquet"):
        return FileLake(place, layout)
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline.iceberg import IcebergTable

        return IcebergTable(place, layout)
    if format == "iceberg":
        raise LakeUnfit(f"{place}: Iceberg tables have a --catalog, and a name as namespace.table")
    if format == "parquet":
        raise LakeUnfit(f"{place} cannot have the format {format}: leave out --format")
    return DeltaTable(place, layout)


def existing(place: Place) -> Lake:
    """A lake that is there, to be entered. Raises LakeUnfit, and what the catalog does."""
    home_of(place)  # An archive would make the table.
    if isinstance(place, str) or _is_delta(place):
        return lake_at(place, None if isinstance(place, str) else "delta")
    if not (place / CONTROL / "state.json").exists():
        raise LakeUnfit(f"{place} was not written by an archive")
    return lake_at(place)


def _is_delta(place: Path) -> bool:
    return (place / "_delta_log").is_dir()


def is_there(place: Place) -> bool:
    """Whether a lake is at a place that can be asked. Raises StoreAway."""
    if isinstance(place, Path):
        return _is_delta(place) or (place / CONTROL / "state.json").exists()
    with suppress(LakeUnfit):
        return (
            asked(place, partial(_found if place.startswith(ICEBERG) else delta, place)) is not None
        )
    return False


def has_tables(place: Place) -> bool:
    """Whether a lake has a table for each event. Raises StoreAway."""
    control = control_of(place)
    if isinstance(control, Path):
        return control.is_dir()
    return not is_there(place) and is_there(control)


def tables_of(place: Place) -> list[Place]:
    """The tables of a lake that has one for each event; of another lake, this one itself."""
    if not has_tables(place):
        return [place]
    if isinstance(place, Path):
        # Plain files of an archive that runs can be read, and its control is locked.
        return [*filter(is_there, sorted(place.iterdir()))]
    with existing(control_of(place)) as opened:
        return [table_at(place, event) for event in events_of(opened)]


def parts_of(place: Place) -> list[Place]:
    """The lake itself; of one with a table for each event, its control and then its tables."""
    tables = tables_of(place)
    return tables if tables == [place] else [control_of(place), *tables]


def whole_of(place: Place) -> Place | None:
    """The lake with a table for each event of which this is one. Raises StoreAway."""
    if isinstance(place, Path):
        above: list[Place] = [place.absolute().parent]
    elif place.startswith(ICEBERG):
        above = [place[: end.start()] for end in re.finditer("_", place)]
    else:
        above = [place.rpartition("/")[0]]
    own = place.absolute() if isinstance(place, Path) else place
    return next((each for each in above if has_tables(each) and own in tables_of(each)), None)


def events_of(lake: Lake) -> list[str]:
    batches = (batch for file in lake.contents() for batch in batches_of(file, ["topic"]))
    return sorted({event for batch in batches for event in batch["topic"].to_pylist()})


def home_of(place: Place) -> Place:
    """Where what belongs to a lake can be stored. Raises what the catalog does."""
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        name = str(control_of(place)) if has_tables(place) else place
        return iceberg.place_of(asked(place, partial(iceberg.found, name)).location())
    return place


def _found(url: str) -> Any:
    from mqks.pipeline import iceberg

    return iceberg.found(url)


def messages(
    spark: "SparkSession", place: Place, *, properties: bool = False, bad: bool = False
) -> "DataFrame":
    """The rows of a lake, for Spark: the columns of all lakes, with `properties` those of
    `PROPERTIES`, with `bad` reason and field of bad rows, and `date`. Raises LakeUnfit.

    The event is the column `topic`; the directory may have it cut.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    columns = pa.schema([*COLUMNS, *PROPERTIES]) if properties else COLUMNS
    if bad:
        columns = columns.append(pa.field("data", BAD))
    schema = from_arrow_schema(columns.append(_DATE))
    if isinstance(place, Path) and not place.is_dir():
        raise LakeUnfit(f"there is no lake at {place}")
    if (tables := tables_of(place)) != [place]:
        rows = (messages(spark, table, properties=properties, bad=bad) for table in tables)
        return reduce(lambda a, b: a.unionAll(b), rows, spark.createDataFrame([], schema))
    if isinstance(place, Path) and not _is_delta(place):
        return spark.read.schema(schema).parquet(str(place.absolute()))
    files = [(uri,) for uri in asked(place, partial(_files, place))]
    if not files:
        return spark.createDataFrame([], schema)
    tasks = min(len(files), spark.sparkContext.defaultParallelism)
    named = spark.createDataFrame(files, "file string").repartition(tasks)
    return named.mapInArrow(partial(_rows, columns), schema)


def _files(place: Place) -> list[str]:
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        return iceberg.files(place)
    found = delta(place)
    if found is None:
        raise LakeUnfit(f"there is no Delta table at {place}")
    return [str(file) for file in delta_files(found, place)]


def _rows(columns: pa.Schema, files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    # A column with fields is read with its own, and no others.
    names = [name for name in names_of(columns) if name != "data"]
    for uri in (uri for batch in files for uri in batch["file"].to_pylist()):
        for batch in batches_of(uri if "://" in uri else Path(uri), names):
            date = batch["timestamp"].cast(_DATE.type)
            yield fitted(batch, columns).append_column(_DATE, date)
