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
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from mqks.durable import sync
from mqks.pipeline.errors import ExtraMissing, LakeInUse, LakeUnfit, PipelineError
from mqks.pipeline.lake import (
    BY_TABLE,
    CONTROL,
    WRITTEN,
    File,
    Lake,
    Staging,
    check_are_here,
    check_case,
    control_of,
    fitted,
    latest,
    names_of,
)
from mqks.pipeline.layout import USUAL, Layout, partition
from mqks.pipeline.objects import DELETED, OPTIONS, Got, Place, asked, delete, make_directory, tried
from mqks.pipeline.sums import added, records, records_of_commit, sums_of_file
from mqks.pipeline.upsert import UPSERT, LastRows, Upsert, last_rows

BY = "mqks.by"
"""The property of a table with its partitions, if their names do not say them."""
LAST = "mqks-last/"
"""Before a queue: the record of the epoch of its last commit."""
COMPACTION = 16
"""A table is compacted each time after this number of versions."""
TRIES = 3
"""A commit may fail since another removes old days at the same time."""
GROWTHS_MAX = 5
"""Others may make or change the table at the same time."""
_ALIKE = pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal

_log = logging.getLogger("mqks.pipeline")


class LakeTable(Lake):
    """A table. A store that is away when it is opened is asked again later."""

    def __init__(self, place: Place, layout: Layout = USUAL) -> None:
        super().__init__(place, layout)
        self._table: Any = None
        self._is_open = False
        self._told: dict[str, int | None] = {}
        """What `next` has told, by the names of the records: the batches begin there."""

    def __enter__(self) -> Self:
        tried(self._opened)
        return self

    def _asked(self, work: Callable[[], Got]) -> Got:
        """What the store or the catalog answers. After an error the table is loaded again: what is
        known of it may be old, or half changed."""
        try:
            return asked(self.place, work)
        except Exception:
            self._is_open = False
            raise

    def _opened(self) -> Any:
        """The table, or None if there is none yet."""
        return self._asked(self._loaded)

    def _loaded(self) -> Any:
        if not self._is_open:
            self._table = self._open()
            self._is_open = True
            if isinstance(self.files, Path):
                make_directory(self.files)
            if self._table is not None:
                upsert = Upsert.of(self._properties().get(UPSERT))
                self.layout = self.layout.kept(self.place, self._partitions(), upsert)
        return self._table

    @property
    def files(self) -> Place:
        """Where its files are."""
        return self.place

    @property
    def staging(self) -> Staging:
        self._opened()
        return Staging(self.files, self.layout, is_final=True)

    def next(self, queue: str, epoch: str) -> int | None:
        """Raises LakeUnfit if the table has the last values of another queue."""
        self._opened()
        if self.layout.upsert and self.layout.upsert.queue != queue:
            told = f"{self.place} has the last values {self.layout.upsert.option}"
            raise LakeUnfit(f"{told}: archive the queue {queue} into another table")
        name = _application(queue, epoch)
        self._told[name] = self.recorded(name)
        return self._told[name]

    def queues(self) -> list[str]:
        return []

    def knows(self, queue: str, epoch: str = "") -> bool:
        return self.recorded(LAST + queue) not in (None, 0, _sum(epoch))

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        return self.recorded(_arrivals(queue, epoch))

    def recorded(self, name: str) -> int | None:
        return self._asked(lambda: None if self._loaded() is None else self._record(name))

    def prepared(
        self, data: pa.DataType | None, is_of: Callable[[str], bool] | None = None
    ) -> pa.DataType | None:
        return self._asked(partial(self._prepared, data))

    def _prepared(self, data: pa.DataType | None) -> pa.DataType | None:
        self._opened()  # It knows its partitions.
        self.layout.check(data)
        schema = WRITTEN if data is None else WRITTEN.append(pa.field("data", data))
        try:
            for _ in range(GROWTHS_MAX):
                own = None if self._opened() is None else self._columns()
                check_case(self.place, names_of(own or ()), names_of(schema))
                if own is None:
                    self._grow(None, schema)
                    continue
                whole = pa.schema([*unified(pa.struct([*own]), pa.struct([*schema]))])
                if whole == own:
                    return data and unified(own.field("data").type, data, whole=False)
                self._grow(own, whole)
        except pa.ArrowTypeError as error:
            raise LakeUnfit(
                f"{self.place}: the schema does not fit the column data of this table ({error}):"
                " change --schema, or archive into another table"
            ) from None
        raise LakeUnfit(f"{self.place}: the table does not take these columns: {whole}")

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Raises LakeInUse if another has committed since `next`."""
        name = _application(queue, epoch)
        before, records = self._told.get(name), {name: number}
        if (came_us := latest(self.arrived_us(queue, epoch), files)) is not None:
            records[_arrivals(queue, epoch)] = came_us
        if self.recorded(LAST + queue) != _sum(epoch):
            records[LAST + queue] = _sum(epoch)
        files = [file for file in files if file.rows]
        self._sync_files(self.staging.path(file) for file in files)

        def check() -> None:
            """What was committed since then would not conflict with this commit."""
            if (now := self.recorded(name)) != before:
                raise self._in_use(queue, now)

        for left in reversed(range(TRIES)):
            try:
                if files and self.layout.upsert:
                    last = self._asked(partial(self._last_rows, files))
                    sums, put = last.sums, partial(self._upsert, last)
                else:
                    sums, put = [file.sums for file in files], partial(self._commit, files)
                every = records | records_of_commit(queue, epoch, before, sums, self.recorded)
                self._asked(partial(put, every, check))
                break
            except (LakeInUse, LakeUnfit):
                raise
            except PipelineError:
                now = self.recorded(name)
                if now == number:
                    break
                if now != before:
                    raise self._in_use(queue, now) from None
                if not left:
                    raise
        self._told[name] = number
        if self.layout.upsert:
            self._tried("files of a batch are not deleted", partial(self._delete_staged, files))

    def _last_rows(self, files: Sequence[File]) -> LastRows:
        assert self.layout.upsert is not None
        staged = [f"{self.files}/{path}" for path in map(self.staging.path, files)]
        places = map(Path, staged) if isinstance(self.files, Path) else staged
        self._opened()
        made = partial(fitted, schema=self._columns())
        return last_rows(self.layout.upsert, places, self._files(), made)

    def _delete_staged(self, files: Sequence[File]) -> None:
        for file in files:
            delete(self.files, self.staging.path(file))

    def _in_use(self, queue: str, number: int | None) -> LakeInUse:
        told = f"another archive has committed the queue {queue} up to {number}"
        return LakeInUse(f"{self.place}: {told}")

    def _sync_files(self, names: Iterable[str]) -> None:
        """In a directory, the names of files must be on the disk before a commit that has them."""
        if isinstance(self.files, Path):
            paths = [self.files / name for name in names]
            check_are_here(self.place, paths)
            for around in {each for path in paths for each in path.parents}:
                if around.is_relative_to(self.files):
                    sync(around)

    def roll(self, age_s: float) -> int:
        """Merge small files, which a table can replace while it is read; nothing waits for it. What
        cannot be done now, is done later."""
        if age_s and self._table is not None:
            self._tried("small files are not merged", self._compact)
        return 0

    def expire(self, before: date) -> None:
        """Remove older days: from the table at once, and their files when no reader of an older
        version needs them."""
        if self._table is not None:
            self._tried("old days are not removed", partial(self._expire, before))

    def _expire(self, before: date) -> None:
        if files := self._files(before):
            sums = added(map(sums_of_file, files))
            self._delete(before, records(sums, self.recorded, -1))

    def vacuum(self, age_s: float, *, dry_run: bool = False) -> list[str]:
        self._check_is_there()
        return self._asked(partial(self._vacuum, age_s, dry_run))

    def summed(self) -> set[tuple[str, str]]:
        return set()

    def contents(self) -> list[Place]:
        self._check_is_there()
        return self._asked(self._files)

    def _check_is_there(self) -> None:
        if self._opened() is None:
            raise LakeUnfit(f"there is no table at {self.place}")

    def _tried(self, otherwise: str, work: Any) -> None:
        try:
            self._opened()
            self._asked(work)
        except PipelineError as error:
            _log.warning("%s: %s", otherwise, error)

    # What a format has of its own.

    @abstractmethod
    def _open(self) -> Any: ...

    @abstractmethod
    def _partitions(self) -> Iterable[str]: ...

    @abstractmethod
    def _columns(self) -> pa.Schema: ...

    @abstractmethod
    def _grow(self, own: pa.Schema | None, whole: pa.Schema) -> None:
        """Give the table, which has its own columns or is none yet, these."""

    @abstractmethod
    def _record(self, name: str) -> int | None: ...

    @abstractmethod
    def _properties(self) -> Mapping[str, str]: ...

    @abstractmethod
    def _commit(self, files: Sequence[File], records: dict[str, int], check: Any) -> None: ...

    @abstractmethod
    def _upsert(self, last: LastRows, records: dict[str, int], check: Any) -> None:
        """Commit these rows in the place of those that have their keys."""

    @abstractmethod
    def _compact(self) -> None: ...

    @abstractmethod
    def _files(self, before: date | None = None) -> list[Place]:
        """Its files, or those of older days."""

    @abstractmethod
    def _delete(self, before: date, records: dict[str, int]) -> None: ...

    @abstractmethod
    def _vacuum(self, age_s: float, dry_run: bool) -> list[str]: ...


class DeltaTable(LakeTable):
    """An entry of its log is the commit; application transactions in it are the records."""

    def _open(self) -> Any:
        if isinstance(self.place, Path) and (self.place / CONTROL / "state.json").exists():
            raise LakeUnfit(f"{self.place} is a lake of plain Parquet files: use --format parquet")
        found = delta(self.place)
        if found is None and delta(control_of(self.place)) is not None:
            raise LakeUnfit(f"{self.place} {BY_TABLE}")
        return found

    def _properties(self) -> Mapping[str, str]:
        told: dict[str, str] = self._table.metadata().configuration
        return told

    def _partitions(self) -> Iterable[str]:
        told = self._properties().get(BY)
        by: list[str] = json.loads(told) if told else self._table.metadata().partition_columns
        return by

    def _prepared(self, data: pa.DataType | None) -> pa.DataType | None:
        fitted = super()._prepared(data)
        if self.layout.sort and self.layout.upsert:
            raise LakeUnfit(f"{self.place}: a Delta table does not keep --sort with --upsert")
        return fitted

    def _columns(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    def _record(self, name: str) -> int | None:
        version: int | None = self._table.transaction_version(name)
        return version

    def _commit(self, files: Sequence[File], records: dict[str, int], check: Any) -> None:
        from deltalake import CommitProperties, Transaction

        check()
        version = self._table.version()
        told = [Transaction(name, number) for name, number in records.items()]
        self._table.create_write_transaction(
            [self._addition(file) for file in files],
            mode="append",
            schema=self._table.schema(),
            partition_by=self._names,
            commit_properties=CommitProperties(app_transactions=told),
        )
        self._table.update_incremental()
        self._sync_log(version + 1)

    def _upsert(self, last: LastRows, records: dict[str, int], check: Any) -> None:
        from deltalake import CommitProperties, Transaction, WriterProperties

        check()
        if not last.holders and not len(last.new):  # A merge without an effect is no commit.
            self._commit([], records, check)
            return
        rows, columns = last.rows, self._columns()
        for each in map(partition, self.layout.partitions):
            at, texts = columns.get_field_index(each.column), each.texts(each.values(rows))
            if pa.types.is_string(columns.field(at).type):
                texts = pc.if_else(pc.equal(texts, ""), None, texts)
            rows = rows.set_column(at, each.column, texts.cast(columns.field(at).type))
        told = [Transaction(name, number) for name, number in records.items()]
        key, deletes = last.upsert.sql, "_mqks_deletes"
        with self._synced():
            self._table.merge(
                rows.append_column(deletes, last.deletes),
                f"t.{key} = s.{key}",
                source_alias="s",
                target_alias="t",
                writer_properties=WriterProperties(compression="ZSTD"),
                commit_properties=CommitProperties(app_transactions=told),
            ).when_matched_delete(f"s.{deletes}").when_matched_update_all(
                except_cols=[deletes]
            ).when_not_matched_insert_all(f"not s.{deletes}", except_cols=[deletes]).execute()

    @staticmethod
    def _column(by: str) -> pa.Field:
        return pa.field(partition(by).column, partition(by).type)

    @property
    def _names(self) -> list[str]:
        """Of the columns that are its partitions."""
        return [partition(each).column for each in self.layout.partitions]

    def _addition(self, file: File) -> Any:
        """The entry of a file in the log of a table."""
        from deltalake.transaction import AddAction

        return AddAction(
            path=self.staging.path(file),
            size=file.bytes,
            partition_values=dict(zip(self._names, file.values, strict=True)),
            modification_time=time.time_ns() // 10**6,
            data_change=True,
            stats=json.dumps({"numRecords": file.rows}),
        )

    def _grow(self, own: pa.Schema | None, whole: pa.Schema) -> None:
        import deltalake as d

        by, partitions, upsert = self._names, self.layout.partitions, self.layout.upsert
        told = {} if by == [*partitions] else {BY: json.dumps(partitions)}
        told |= {UPSERT: json.dumps(upsert)} if upsert else {}
        try:
            d.Schema.from_arrow(whole)
        except Exception as error:  # It raises nothing more special.
            why = str(error).rpartition("Schema error: ")[2]
            raise LakeUnfit(f"a Delta table cannot have these columns: {why}") from None
        if own is None:
            self._is_open = False  # It may be there, as another has made it.
            self._table = d.DeltaTable.create(
                self.place,
                pa.schema([*whole, *map(self._column, partitions)]),
                mode="ignore",
                partition_by=by,
                configuration=told,
                storage_options=_options(self.place),
                raise_if_key_not_exists=False,
            )
            self._sync_log(0)
            return
        with self._synced():
            try:
                pa.unify_schemas([own, whole])
            except pa.ArrowTypeError:  # Files of this format have the types of the table: all anew.
                rows = d.QueryBuilder().register("t", self._table).execute("select * from t")
                batches = (fitted(batch, whole) for batch in pa.RecordBatchReader.from_stream(rows))
                anew = pa.RecordBatchReader.from_batches(whole, batches)
                d.write_deltalake(
                    self._table, anew, mode="overwrite", schema_mode="overwrite", partition_by=by
                )
            else:
                none = whole.empty_table()
                d.write_deltalake(self._table, none, mode="append", schema_mode="merge")
            self._table.update_incremental()

    @contextmanager
    def _synced(self) -> Iterator[None]:
        """Files that the table makes itself within are on the disk in the end, with its log."""
        version, before = self._table.version(), set(self._table.file_uris())
        yield
        if isinstance(self.place, Path):
            files = [Path(uri) for uri in set(self._table.file_uris()) - before]
            for file in files:
                sync(file)
            self._sync_files(str(file.relative_to(self.place)) for file in files)
        self._sync_log(version + 1)

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
            with self._synced():
                self._table.optimize.compact(writer_properties=WriterProperties(compression="ZSTD"))
            self._vacuum()

    def _files(self, before: date | None = None) -> list[Place]:
        return delta_files(self._table, self.place, before)

    def _delete(self, before: date, records: dict[str, int]) -> None:
        from deltalake import CommitProperties, Transaction

        told = [Transaction(name, number) for name, number in records.items()]
        with self._synced():
            self._table.delete(
                f"date < '{before}'", commit_properties=CommitProperties(app_transactions=told)
            )
        self._vacuum()

    def _vacuum(self, age_s: float | None = None, dry_run: bool = False) -> list[str]:
        """Delete files that the table has not used for this time, or as long as its properties say,
        which is a week without any; and those of no commit."""
        hours = None if age_s is None else int(age_s // 3600)
        told = {"dry_run": dry_run, "enforce_retention_duration": hours is None, "full": True}
        with self._synced():
            found: list[str] = self._table.vacuum(hours, **told)
        return found


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
    if pa.types.is_map(old) and pa.types.is_map(new) and old.key_type == new.key_type:
        return pa.map_(new.key_type, unified(old.item_type, new.item_type, whole=whole))
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


def delta_files(table: Any, place: Place, before: date | None = None) -> list[Place]:
    """The data files of a table, or those of older days. Raises LakeUnfit."""
    if any(len(batch) for batch in table.deletion_vectors()):
        raise LakeUnfit(f"{place}: {DELETED}")
    actions = pa.table(table.get_add_actions())
    if before is not None:
        actions = actions.filter(pc.less(pc.struct_field(actions["partition"], "date"), before))
    names = map(unquote, actions["path"].to_pylist())
    return [place / name if isinstance(place, Path) else f"{place}/{name}" for name in names]


def _application(queue: str, epoch: str) -> str:
    return f"mqks/{queue}/{epoch}"


def _sum(epoch: str) -> int:
    """What is recorded of the last epoch of a queue; 0 for none."""
    return crc32(epoch.encode()) | 1 << 32 if epoch else 0


def _arrivals(queue: str, epoch: str) -> str:
    return f"{_application(queue, epoch)}/arrived_us"
