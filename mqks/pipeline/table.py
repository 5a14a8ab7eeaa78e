"""A table, in a directory or on an object store: Delta here, Iceberg in `iceberg`.

    TABLE/date=2026-11-20/{first}-{last}-{id}.parquet
    TABLE/_delta_log/

Tasks write files to their final names. They are in the table when a commit names them: the next
entry of the table's log, which also records how far the queue was read. Nothing locks the table: of
two archives that commit the same queue, one ends with LakeInUse. Files without a commit belong to
no table.

The one rule: a commit without an answer is looked up in the table, and never just repeated.
"""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from mqks.durable import sync
from mqks.pipeline import objects
from mqks.pipeline.errors import ExtraMissing, LakeInUse, LakeUnfit, PipelineError, StoreAway
from mqks.pipeline.lake import (
    COLUMNS,
    CONTROL,
    PARTITIONS,
    SHARED,
    File,
    Lake,
    Merge,
    Staging,
    kept_by,
)
from mqks.pipeline.objects import OPTIONS, Place, asked, make_directory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COMPACTION = 16
"""A table is compacted each time after this number of versions."""
ICEBERG = "iceberg://"
_DDL = (
    "key binary, value binary, topic string, offset bigint, timestamp timestamp, queue string,"
    " epoch string, archived timestamp, date date"
)
_ALIKE = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal

_log = logging.getLogger("mqks.pipeline")


class Table:
    """A table, open for writing. A store that is away when it is opened is asked again later."""

    by: tuple[str, ...]

    def __init__(self, place: Place, *, by: tuple[str, ...] | None = None) -> None:
        self.place = place.absolute() if isinstance(place, Path) else place
        self.by = by or ("date",)
        self._by = by
        self._table: Any = None
        self._is_open = False

    def __enter__(self) -> Self:
        with suppress(StoreAway):
            self._opened()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def _opened(self) -> Any:
        """The table, or None if there is none yet."""
        if not self._is_open:
            self._table = asked(self.place, self._open)
            self._is_open = True
            if isinstance(self.files, Path):
                make_directory(self.files)
            if self._table is not None:
                self.by = kept_by(self.place, self._by, self._partitions())
        return self._table

    @property
    def files(self) -> Place:
        """Where its files are."""
        return self.place

    @property
    def staging(self) -> Staging:
        self._opened()
        return Staging(self.files, self.by, is_final=True)

    def next(self, queue: str, epoch: str) -> int | None:
        """The first number of the queue that the table does not have; None before the first."""
        return self._recorded(_application(queue, epoch))

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        """The arrival of the latest message of this queue in the table; None before the first."""
        return self._recorded(_arrivals(queue, epoch))

    def _recorded(self, name: str) -> int | None:
        return None if self._opened() is None else self._record(name)

    def fitted(self, data: pa.DataType) -> pa.DataType:
        """The type of the column `data` in files, for payloads of this one: its fields are as wide
        as the table has them. Raises LakeUnfit if one has another type there."""
        if self._opened() is None or "data" not in self._columns().names:
            return data
        return self._unified(self._columns().field("data").type, data, whole=False)

    def _unified(self, old: pa.DataType, new: pa.DataType, *, whole: bool = True) -> pa.DataType:
        try:
            return unified(old, new, whole=whole)
        except pa.ArrowTypeError as error:
            raise LakeUnfit(
                f"{self.place}: the schema does not fit the column data of this table ({error}):"
                " change --schema, or archive into another table"
            ) from None

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Make files part of the table: everything below `number` is in it then."""
        before = self.next(queue, epoch)
        times = [file.arrived_us for file in files]
        records = {_application(queue, epoch): number}
        if times:
            came_us = self.arrived_us(queue, epoch) or 0
            records[_arrivals(queue, epoch)] = max(*times, came_us)
        files = [file for file in files if file.rows]
        self._sync_files(self.staging.path(file) for file in files)

        def check() -> None:
            """What was committed since then would not conflict with this commit."""
            if (now := self.next(queue, epoch)) != before:
                raise self._in_use(queue, now)

        try:
            asked(self.place, partial(self._commit, files, records, check))
        except (LakeInUse, LakeUnfit):
            raise
        except PipelineError:
            self._is_open = False
            now = self.next(queue, epoch)
            if now == before:
                raise
            if now != number:
                raise self._in_use(queue, now) from None

    def _in_use(self, queue: str, number: int | None) -> LakeInUse:
        told = f"another archive has committed the queue {queue} up to {number}"
        return LakeInUse(f"{self.place}: {told}")

    def _sync_files(self, names: Iterable[str]) -> None:
        """In a directory, the names of files must be on the disk before a commit that has them."""
        if isinstance(self.files, Path):
            paths = [self.files / name for name in names]
            if not all(path.exists() for path in paths):
                missing = "the files written by the workers are missing"
                raise LakeUnfit(f"{self.place}: {missing}: {SHARED}")
            for around in {each for path in paths for each in path.parents}:
                if around.is_relative_to(self.files):
                    sync(around)

    def roll(self, run: Merge, age_s: float) -> int:
        """Merge small files, which a table can replace while it is read; nothing waits for it. What
        cannot be done now, is done later."""
        if age_s and self._table is not None:
            self._tried("small files are not merged", self._compact)
        return 0

    def expire(self, before: date) -> None:
        """Remove older days: from the table at once, and their files when no reader of an older
        version needs them."""
        if self._table is not None:
            self._tried("old days are not removed", partial(self._delete, before))

    def _tried(self, otherwise: str, work: Any) -> None:
        try:
            asked(self.place, work)
        except PipelineError as error:
            _log.warning("%s: %s", otherwise, error)

    # What a format has of its own.

    def _open(self) -> Any:
        raise NotImplementedError

    def _partitions(self) -> Iterable[str]:
        raise NotImplementedError

    def _columns(self) -> pa.Schema:
        raise NotImplementedError

    def _record(self, name: str) -> int | None:
        raise NotImplementedError

    def _commit(self, files: Sequence[File], records: dict[str, int], check: Any) -> None:
        raise NotImplementedError

    def _compact(self) -> None:
        raise NotImplementedError

    def _delete(self, before: date) -> None:
        raise NotImplementedError

    def _files_schema(self, files: Sequence[File]) -> pa.Schema:
        """Of the files of a batch, which all have the same."""
        if not files:
            return COLUMNS
        content = objects.read(self.files, self.staging.path(files[0]))
        return pq.read_schema(pa.BufferReader(content))


class DeltaTable(Table):
    """An entry of its log is the commit; application transactions in it are the records."""

    def _open(self) -> Any:
        if isinstance(self.place, Path) and (self.place / CONTROL / "state.json").exists():
            raise LakeUnfit(f"{self.place} is a lake of plain Parquet files: use --format parquet")
        return delta(self.place)

    def _partitions(self) -> Iterable[str]:
        found: list[str] = self._table.metadata().partition_columns
        return found

    def _columns(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    def _record(self, name: str) -> int | None:
        version: int | None = self._table.transaction_version(name)
        return version

    def _commit(self, files: Sequence[File], records: dict[str, int], check: Any) -> None:
        from deltalake import CommitProperties, Transaction

        first = self._grow(self._files_schema(files))
        check()
        told = [Transaction(name, number) for name, number in records.items()]
        self._table.create_write_transaction(
            [self._addition(file) for file in files],
            mode="append",
            schema=self._table.schema(),
            partition_by=[*self.by],
            commit_properties=CommitProperties(app_transactions=told),
        )
        self._table.update_incremental()
        self._sync_log(first)

    def _addition(self, file: File) -> Any:
        """The entry of a file in the log of a table."""
        from deltalake.transaction import AddAction

        return AddAction(
            path=self.staging.path(file),
            size=file.bytes,
            partition_values=dict(zip(self.by, file.values, strict=True)),
            modification_time=time.time_ns() // 10**6,
            data_change=True,
            stats=json.dumps({"numRecords": file.rows}),
        )

    def _grow(self, schema: pa.Schema) -> int:
        """Give the table the columns and fields of these files, and types as wide; returns the
        version before. A file with another type would make the table unreadable."""
        import deltalake as d

        schema = pa.schema([*schema, *((name, PARTITIONS[name]) for name in self.by)])
        try:
            d.Schema.from_arrow(schema)
        except Exception as error:  # It raises nothing more special.
            why = str(error).rpartition("Schema error: ")[2]
            raise LakeUnfit(f"a Delta table cannot have these columns: {why}") from None
        if self._table is None:
            made = d.DeltaTable.create(
                self.place,
                schema,
                mode="ignore",
                partition_by=[*self.by],
                storage_options=_options(self.place),
            )
            self._table, self._is_open = made, True
            return 0
        first: int = self._table.version()
        own = self._columns()
        wide, narrow = pa.struct([*own]), pa.struct([*schema])
        whole = pa.schema([*self._unified(wide, narrow)])
        if self._unified(wide, narrow, whole=False) != narrow:
            raise LakeUnfit(f"{self.place}: the schema does not fit: the table has wider types now")
        if whole == own:
            return first
        before = set(self._table.file_uris())
        try:
            pa.unify_schemas([own, whole])
        except pa.ArrowTypeError:  # Files of this format have the types of the table: all anew.
            rows = d.QueryBuilder().register("t", self._table).execute("select * from t")
            batches = (cast(batch, whole) for batch in pa.RecordBatchReader.from_stream(rows))
            anew = pa.RecordBatchReader.from_batches(whole, batches)
            by = [*self.by]
            d.write_deltalake(
                self._table, anew, mode="overwrite", schema_mode="overwrite", partition_by=by
            )
        else:
            none = whole.empty_table()
            d.write_deltalake(self._table, none, mode="append", schema_mode="merge")
        self._table.update_incremental()
        self._sync_files(self._new(before))
        return first

    def _new(self, before: set[str]) -> Iterator[str]:
        """The files in a directory that were not in the table before."""
        if isinstance(self.place, Path):
            for uri in set(self._table.file_uris()) - before:
                sync(uri)
                yield str(Path(uri).relative_to(self.place))

    def _sync_log(self, first: int) -> None:
        """The log must be synced before the queue is trimmed; `first` is a version."""
        if isinstance(self.place, Path):
            log = self.place / "_delta_log"
            entries = range(first, self._table.version() + 1)
            for entry in (*(log / f"{number:020}.json" for number in entries), log, self.place):
                sync(entry)

    def _compact(self) -> None:
        from deltalake import WriterProperties

        # Compactions are versions, too, so that the next one is some commits away.
        version = self._table.version()
        if version and version % COMPACTION == 0:
            before = set(self._table.file_uris())
            self._table.optimize.compact(writer_properties=WriterProperties(compression="ZSTD"))
            self._sync_files(self._new(before))
            self._vacuum(version + 1)

    def _delete(self, before: date) -> None:
        days = (day["date"] for day in self._table.partitions())
        if any(str(day) < str(before) for day in days):
            version = self._table.version()
            self._table.delete(f"date < '{before}'")
            self._vacuum(version + 1)

    def _vacuum(self, first: int) -> None:
        """Delete files that the table has not used for a week, and those of no commit."""
        self._table.vacuum(dry_run=False, full=True)
        self._sync_log(first)


def cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """With these columns, of which those that are missing are null."""
    columns = [
        batch[field.name].cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def unified(old: pa.DataType, new: pa.DataType, *, whole: bool = True) -> pa.DataType:
    """A type that has the values of both; without `whole`, with the fields of the new one only.
    Raises pa.ArrowTypeError."""
    if pa.types.is_struct(old) and pa.types.is_struct(new):
        fields = {field.name: field.type for field in old}
        made = {
            field.name: unified(fields[field.name], field.type, whole=whole)
            if field.name in fields
            else field.type
            for field in new
        }
        return pa.struct([*((fields | made) if whole else made).items()])
    if pa.types.is_list(old) and pa.types.is_list(new):
        element = unified(old.value_type, new.value_type, whole=whole)
        return pa.list_(new.value_field.with_type(element))
    if old == new:
        return new
    if not any(alike(old) and alike(new) for alike in _ALIKE):
        raise pa.ArrowTypeError(f"{new} after {old}")
    both = [pa.schema([("", each)]) for each in (old, new)]
    return pa.unify_schemas(both, promote_options="permissive").field(0).type


def _options(place: Place) -> dict[str, str] | None:
    return OPTIONS if isinstance(place, str) else None


def delta(place: Place) -> Any:
    """The table, or None if there is none. Raises ExtraMissing, and whatever deltalake does."""
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ExtraMissing("Delta tables need another package: pip install 'mqks[delta]'") from None
    options = _options(place)
    if not DeltaTable.is_deltatable(str(place), options):
        return None
    return DeltaTable(place, storage_options=options)


def _application(queue: str, epoch: str) -> str:
    return f"mqks/{queue}/{epoch}"


def _arrivals(queue: str, epoch: str) -> str:
    return f"{_application(queue, epoch)}/arrived_us"


def is_delta(place: Place) -> bool:
    return isinstance(place, str) or (place / "_delta_log").is_dir()


def messages(spark: "SparkSession", place: Place) -> "DataFrame":
    """The rows of a lake, for Spark: the columns of its files, and `date`. Raises LakeUnfit.

    The event is the column `topic`; the directory may have it cut.
    """
    if isinstance(place, Path) and not is_delta(place):
        if not place.is_dir():
            raise LakeUnfit(f"there is no lake at {place}")
        return spark.read.schema(_DDL).parquet(str(place.absolute()))
    files = [(uri,) for uri in asked(place, partial(_files, place))]
    if not files:
        return spark.createDataFrame([], _DDL)
    tasks = min(len(files), spark.sparkContext.defaultParallelism)
    named = spark.createDataFrame(files, "file string").repartition(tasks)
    return named.mapInArrow(_rows, _DDL)


def _files(place: Place) -> list[str]:
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        return iceberg.files(place)
    found = delta(place)
    if found is None:
        raise LakeUnfit(f"there is no Delta table at {place}")
    names = pa.table(found.get_add_actions())["path"].to_pylist()
    return [f"{place}/{unquote(name)}" for name in names]


def home_of(place: Place) -> Place:
    """Where what belongs to a lake can be stored. Raises what the catalog does."""
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline import iceberg

        return iceberg.place_of(iceberg.found(place).location())
    return place


def _rows(files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    schema = COLUMNS.append(pa.field("date", pa.date32()))
    for uri in (uri for batch in files for uri in batch["file"].to_pylist()):
        content = objects.read(uri if "://" in uri else Path(uri))
        for batch in pq.ParquetFile(pa.BufferReader(content)).iter_batches(columns=COLUMNS.names):
            columns = [batch[name] for name in COLUMNS.names]
            columns.append(batch["timestamp"].cast(pa.date32()))
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def lake_at(
    place: Place, format: str | None = None, by: tuple[str, ...] | None = None
) -> "Lake | Table":
    """The lake at a place, to be entered; in a directory plain files unless the format is given.
    Raises LakeUnfit."""
    if isinstance(place, Path) and format in (None, "parquet"):
        return Lake(place, by=by)
    if isinstance(place, str) and place.startswith(ICEBERG):
        from mqks.pipeline.iceberg import IcebergTable

        return IcebergTable(place, by=by)
    if format == "iceberg":
        raise LakeUnfit(f"{place}: Iceberg tables have a --catalog, and a name as namespace.table")
    if format == "parquet":
        raise LakeUnfit(f"{place} cannot have the format {format}: leave out --format")
    return DeltaTable(place, by=by)
