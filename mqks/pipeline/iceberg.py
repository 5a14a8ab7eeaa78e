"""An Iceberg table in a catalog that pyiceberg knows, at `iceberg://CATALOG/namespace.table`.

The catalog (REST, SQL, Glue and others) comes from pyiceberg's own settings: `~/.pyiceberg.yaml`,
or `PYICEBERG_CATALOG__NAME__URI`. Partitions are transforms of columns: a day or hour of
`timestamp`, `topic`, and those of fields, which come when the table has these.

The one rule: the files of a batch, and the properties that record how far its queue was read, are
one commit of the catalog, which fails if any other came before it.
"""

import json
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Self

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.fs import FileSelector, FileSystem

from mqks.durable import sync
from mqks.pipeline.errors import ExtraMissing, LakeUnfit
from mqks.pipeline.lake import (
    BY_TABLE,
    SMALL_BYTES,
    WRITTEN,
    File,
    Staging,
    control_of,
    fitted,
    numbered,
    rows_of,
    shown,
    write_file,
)
from mqks.pipeline.layout import PLAIN, partition
from mqks.pipeline.objects import (
    CONNECT_S,
    DELETED,
    ICEBERG,
    REQUEST_S,
    Place,
    SyncedFile,
    make_directory,
)
from mqks.pipeline.sums import batches_of, queues_of
from mqks.pipeline.table import BY, COMPACTION, LAST, LakeTable
from mqks.pipeline.upsert import UPSERT, LastRows

try:
    from pyiceberg.catalog import AVAILABLE_CATALOGS, CatalogType, load_catalog
    from pyiceberg.conversions import partition_to_py
    from pyiceberg.exceptions import CommitFailedException, NoSuchNamespaceError, NoSuchTableError
    from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO, parquet_files_to_data_files
    from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC
    from pyiceberg.table.sorting import NullOrder
    from pyiceberg.transforms import IdentityTransform
    from pyiceberg.typedef import Record
    from pyiceberg.types import DateType
except ImportError:
    raise ExtraMissing("Iceberg tables need another package: pip install 'mqks[iceberg]'") from None

COMMITS_MAX = 20
"""Each time that one fails, that of another has come before it."""
MERGED_MAX = 32
"""Small files are merged so many at a time, in the memory of the driver."""
# It warns about each column without statistics.
logging.getLogger("pyiceberg.io.pyarrow").setLevel(logging.ERROR)
SNAPSHOTS_S = 86_400
"""Those that others have replaced for longer leave the metadata when files are merged; else it
would grow with each commit."""
DELETES = 16
"""Files that are read or deleted at a time."""
_PROPERTIES = {
    "commit.manifest-merge.enabled": "true",
    "write.metadata.delete-after-commit.enabled": "true",
}
_TRANSFORMS = {"date": ("timestamp", "day"), "hour": ("timestamp", "hour")}
_TRANSFORMS["event"] = "topic", "identity"


class IcebergTable(LakeTable):
    """The place is a name in a catalog, and the files are where the catalog says."""

    _catalog: Any = None

    def __enter__(self) -> Self:
        try:
            return super().__enter__()
        except BaseException:
            self._close()
            raise

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._catalog is not None:
            self._catalog.close()

    def _open(self) -> Any:
        if self._catalog is None:
            self._catalog, self._name = catalog_of(str(self.place))
        name = self._name
        try:
            return self._catalog.load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            pass
        if self._catalog.table_exists(str(control_of(self.place)).rpartition("/")[2]):
            raise LakeUnfit(f"{self.place} {BY_TABLE}")
        if "parsed" in (by := self.layout.partitions):
            raise LakeUnfit(f"{self.place}: Iceberg has no partitions by parsed")
        self._catalog.create_namespace_if_not_exists(name.rpartition(".")[0])
        told = _PROPERTIES | ({BY: json.dumps(by)} if {*by} - PLAIN.keys() else {})
        if upsert := self.layout.upsert:
            told[UPSERT] = json.dumps(upsert)
        made = self._catalog.create_table_transaction(name, WRITTEN, properties=told)
        with made:
            self._lay_out(made)
        return self._catalog.load_table(name)

    @property
    def files(self) -> Place:
        return place_of(f"{self._table.location()}/data")

    @property
    def staging(self) -> Staging:
        return super().staging._replace(ids=self._opened().schema().as_arrow())

    def _properties(self) -> Mapping[str, str]:
        told: dict[str, str] = self._table.properties
        return told

    def _partitions(self) -> Iterable[str]:
        if told := self._table.properties.get(BY):
            by: list[str] = json.loads(told)
            return by
        names = [field.name for field in self._table.spec().fields]
        if not names or not set(names) <= _TRANSFORMS.keys():
            raise LakeUnfit(f"{self.place} has other partitions than date, hour and event: {names}")
        return ("date", *(name for name in names if name != "date"))

    def _lay_out(self, change: Any) -> None:
        """Give the table, in a transaction, those of its partitions and of its order that it has
        the columns for: fields come with a schema for payloads."""
        metadata, by = change.table_metadata, self.layout.partitions
        schema, there = metadata.schema(), {field.name for field in metadata.spec().fields}
        with change.update_spec() as spec:
            for each in map(partition, by):
                transform, source = each.transform, each.source
                if not transform:
                    source, transform = _TRANSFORMS[each.column]
                is_told = each.column == "date" and "hour" in by  # An hour says its day.
                if each.column in there or is_told or not _has(schema, source):
                    continue
                size = f"[{each.buckets}]" if each.buckets else ""
                spec.add_field(source, transform + size, each.column)
        sort = [name for name in self.layout.sort if _has(schema, name)]
        if sort and sort != [
            schema.find_column_name(each.source_id) for each in metadata.sort_order().fields
        ]:
            with change.update_sort_order() as update:
                for name in sort:
                    update.asc(name, IdentityTransform(), NullOrder.NULLS_LAST)

    def _prepared(self, data: pa.DataType | None) -> pa.DataType | None:
        fitted = super()._prepared(data)
        with suppress(CommitFailedException), self._table.transaction() as change:
            self._lay_out(change)
            if change.table_metadata == self._table.metadata:
                return fitted
        self._is_open = False
        return fitted

    def _columns(self) -> pa.Schema:
        return _plain(self._table.schema().as_arrow())

    def summed(self) -> set[tuple[str, str]]:
        return queues_of(self._opened().properties)

    def queues(self) -> list[str]:
        table = self._opened()
        names = [] if table is None else table.properties
        queues = (name.removeprefix(LAST) for name in names if name.startswith(LAST))
        return [queue for queue in queues if self.knows(queue)]

    def _record(self, name: str) -> int | None:
        told = self._table.properties.get(name)
        return None if told is None else int(told)

    def _commit(self, files: Sequence[File], records: dict[str, int], check: Any) -> None:
        paths = self._paths(files)
        for left in reversed(range(COMMITS_MAX)):
            check()
            try:
                # Also without files: a commit of properties alone would conflict with nothing.
                with self._once(records) as one, one.update_snapshot().fast_append() as append:
                    for path, file in zip(paths, files, strict=True):
                        append.append_data_file(self._described(path, self._partition(file)))
                return
            except CommitFailedException:
                if not left:
                    raise

    def _upsert(self, last: LastRows, records: dict[str, int], check: Any) -> None:
        if not last.holders and not len(last.new):
            self._commit([], records, check)
            return
        columns = self._columns()
        check()
        told = (task.file for task in self._opened().scan().plan_files())
        old = {place_of(each.file_path): each for each in told}
        files: list[File] = []
        for place in last.holders:
            batches = [fitted(each, columns) for each in batches_of(place, columns.names)]
            rows = pa.Table.from_batches(batches)
            files += self.staging.written(rows.filter(pc.invert(last.have_keys(rows))))
        files += self.staging.written(last.new)
        files = [file for file in files if file.rows]
        self._sync_files(self.staging.path(file) for file in files)
        paths = self._paths(files)
        with self._once(records) as one, one.update_snapshot().overwrite() as change:
            for place in last.holders:
                change.delete_data_file(old[place])
            for path, file in zip(paths, files, strict=True):
                change.append_data_file(self._described(path, self._partition(file)))

    def _paths(self, files: Iterable[File]) -> list[str]:
        return [f"{self._table.location()}/data/{self.staging.path(file)}" for file in files]

    def _once(self, records: dict[str, int]) -> Any:
        """A transaction that fails if another commit comes before it. What looks at the table
        within would have it as it was before."""
        table = self._opened()
        self._is_open = False  # The next look loads it: another may have committed by then.
        # Pyiceberg would repeat the commit. In memory only: others may do so.
        table.metadata.properties["commit.retry.num-retries"] = "0"
        one = table.transaction()
        one.set_properties({name: str(number) for name, number in records.items()})
        return one

    def _grow(self, own: pa.Schema | None, whole: pa.Schema) -> None:
        self._is_open = False
        with suppress(CommitFailedException), self._table.update_schema() as update:
            update.union_by_name(whole)

    def _compact(self) -> None:
        """Each time after some commits; what another commits at the same time, goes before."""
        if self._opened().metadata.last_sequence_number % COMPACTION:
            return
        small: dict[tuple[Any, ...], list[Any]] = {}
        for task in self._table.scan().plan_files():
            file = task.file
            is_small = file.file_size_in_bytes < SMALL_BYTES and not task.delete_files
            if is_small and file.spec_id == self._table.spec().spec_id:
                key = file.file_path.rpartition("/")[0], *file.partition
                small.setdefault(key, []).append(file)
        for (directory, *_), files in small.items():
            if len(files) > 1:
                self._merge(directory, files[:MERGED_MAX])
        table, before_ms = self._opened(), (time.time() - SNAPSHOTS_S) * 1000
        # Readers begin with a snapshot until another takes its place.
        told = table.snapshots()
        old = {each.parent_snapshot_id for each in told if each.timestamp_ms < before_ms}
        old &= {each.snapshot_id for each in told}
        if old := old - {each.snapshot_id for each in table.refs().values()}:
            table.maintenance.expire_snapshots().by_ids([*old]).commit()
            self._is_open = False

    def _merge(self, directory: str, files: Sequence[Any]) -> None:
        columns = self._columns()
        path = f"{directory}/{shown(uuid.uuid4().hex)}"
        schema = numbered(columns, self._table.schema().as_arrow())
        rows = rows_of((place_of(file.file_path) for file in files), columns, self.layout.sort)
        name, sources = path.rpartition("/")[2], self.layout.sources
        write_file(place_of(directory), name, rows, schema, sources)
        with self._table.transaction() as one, one.update_snapshot().overwrite() as change:
            for file in files:
                change.delete_data_file(file)
            change.append_data_file(self._described(path, files[0].partition))
        self._is_open = False

    def _described(self, path: str, values: Record) -> Any:
        """A file of these partitions, for a commit. Pyiceberg would tell them from statistics,
        which a hash has not."""
        table, none = self._table, UNPARTITIONED_PARTITION_SPEC
        told = {"partition_specs": [none], "default_spec_id": none.spec_id}
        plain = table.metadata.model_copy(update=told)
        [file] = parquet_files_to_data_files(table.io, plain, iter([path]))
        file[3], file.spec_id = values, table.spec().spec_id  # Its fourth field is `partition`.
        return file

    def _partition(self, file: File) -> Record:
        names = (partition(each).column for each in self.layout.partitions)
        told = dict(zip(names, file.values, strict=True))
        if hour := told.get("hour"):
            told["hour"] = f"{told['date']}-{hour}"
        schema, fields = self._table.schema(), self._table.spec().fields
        return Record(
            *(
                _value(str(each.transform), schema.find_type(each.source_id), told[each.name])
                for each in fields
            )
        )

    def _files(self, before: date | None = None) -> list[Place]:
        where = [] if before is None else [_before(before)]
        return _data_files(self._opened(), self.place, *where)

    def _delete(self, before: date, records: dict[str, int]) -> None:
        with self._table.transaction() as one:
            one.delete(_before(before))
            one.set_properties({name: str(number) for name, number in records.items()})
        self._is_open = False

    def _vacuum(self, age_s: float, dry_run: bool) -> list[str]:
        """Files of the table's two directories that no snapshot names."""
        io, before = self._opened().io, datetime.now(UTC) - timedelta(seconds=age_s)
        needed = {self._table.metadata_location, *map(str, self._files())}
        listed = []
        for part in ("data", "metadata"):
            scheme, host, path = io.parse_location(f"{self._table.location()}/{part}")
            store = io.fs_by_scheme(scheme, host)
            listed += store.get_file_info(FileSelector(path, recursive=True, allow_not_found=True))
        # Where names are not as they are listed, all files would be of no snapshot.
        strange = {io.parse_location(each)[2] for each in needed} - {one.path for one in listed}
        if strange:
            raise LakeUnfit(f"{self.place}: {min(strange)} is not in its directories")
        self._is_open = False  # What was committed while the files were listed is named, too.
        with ThreadPoolExecutor(DELETES) as threads:
            named = {io.parse_location(each)[2] for each in _named(self._opened(), threads)}
            old = [
                one.path
                for one in listed
                if one.is_file and one.mtime < before and one.path not in named
            ]
            if not dry_run:
                [*threads.map(partial(_delete_file, store), old)]
        return sorted(old)


def _has(schema: Any, name: str) -> bool:
    return name in schema.column_names


def _value(transform: str, kind: Any, text: str | None) -> Any:
    """Of a partition, as Iceberg has it: days, hours and months since 1970."""
    if text is None:
        return None
    match transform:
        case "day":
            return (date.fromisoformat(text) - date(1970, 1, 1)).days
        case "hour":
            day, _, hour = text.rpartition("-")
            return _value("day", kind, day) * 24 + int(hour)
        case "month":
            year, _, month = text.rpartition("-")
            return (int(year) - 1970) * 12 + int(month) - 1
        case "identity":
            is_date = isinstance(kind, DateType)
            return _value("day", kind, text) if is_date else partition_to_py(kind, text)
    return int(text)


def _delete_file(store: FileSystem, path: str) -> None:
    with suppress(FileNotFoundError):  # Another has deleted it.
        store.delete_file(path)


def _named(table: Any, threads: ThreadPoolExecutor) -> Iterator[str]:
    """The files of all snapshots, and of the metadata that tell them."""
    metadata, io = table.metadata, table.io
    yield table.metadata_location
    yield from (each.metadata_file for each in metadata.metadata_log)
    for each in (*metadata.statistics, *metadata.partition_statistics):
        yield each.statistics_path
    yield from (each.manifest_list for each in metadata.snapshots)
    lists = threads.map(lambda each: each.manifests(io), metadata.snapshots)
    manifests = {each.manifest_path: each for several in lists for each in several}
    yield from manifests
    for entries in threads.map(lambda each: each.fetch_manifest_entry(io), manifests.values()):
        yield from (entry.data_file.file_path for entry in entries)


def _before(day: date) -> str:
    return f"timestamp < '{day}T00:00:00+00:00'"


def _plain(schema: pa.Schema) -> pa.Schema:
    """Iceberg's types as those of a file."""
    return pa.schema([(field.name, _plain_type(field.type)) for field in schema])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, _plain_type(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", _plain_type(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(_plain_type(kind.key_type), _plain_type(kind.item_type))
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(kind, kind)


def catalog_of(url: str) -> tuple[Any, str]:
    """The catalog, and the name of the table in it. Raises LakeUnfit."""
    catalog, _, name = url.removeprefix(ICEBERG).partition("/")
    if not catalog or "." not in name or "/" in name:
        raise LakeUnfit(f"{url} is not {ICEBERG}CATALOG/namespace.table")
    told = {"py-io-impl": f"{__name__}.SyncedIO"}
    for option, variable in (("s3.endpoint", "AWS_ENDPOINT_URL"), ("s3.region", "AWS_REGION")):
        if variable in os.environ:
            told[option] = os.environ[variable]
    try:
        return load_catalog(catalog, **told), name
    except ValueError as error:  # It is not configured.
        raise LakeUnfit(f"{url}: {error}") from None


def _rest(name: str, conf: Mapping[str, Any]) -> Any:
    """Pyiceberg's own, whose requests, also those for tokens, would wait without end."""
    import requests
    from pyiceberg.catalog import rest

    class CatalogSession(requests.Session):
        def request(self, *args: Any, **told: Any) -> requests.Response:
            return super().request(*args, **{"timeout": (CONNECT_S, REQUEST_S)} | told)

    vars(rest)["Session"], vars(rest.auth)["requests"] = CatalogSession, CatalogSession()
    return rest.RestCatalog(name, **conf)


AVAILABLE_CATALOGS[CatalogType.REST] = _rest


def found(url: str) -> Any:
    """The table, to be read: its catalog is closed. Raises LakeUnfit."""
    catalog, name = catalog_of(url)
    with closing(catalog):
        try:
            return catalog.load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            raise LakeUnfit(f"there is no Iceberg table {url}") from None


def files(url: str) -> list[str]:
    """The data files of a table. Raises LakeUnfit."""
    return [str(file) for file in _data_files(found(url), url)]


def _data_files(table: Any, place: Place, *where: str) -> list[Place]:
    tasks = [*table.scan(*where).plan_files()]
    if any(task.delete_files for task in tasks):
        raise LakeUnfit(f"{place}: {DELETED}")
    return [place_of(task.file.file_path) for task in tasks]


def place_of(location: str) -> Place:
    """A directory or file, or a URL."""
    if location.startswith("file:"):
        return Path(re.sub("^file:/*", "/", location))
    return location if "://" in location else Path(location)


class SyncedIO(PyArrowFileIO):
    """Files of a directory are on the disk before the catalog names them."""

    def new_output(self, location: str) -> PyArrowFile:
        output = super().new_output(location)
        place = place_of(location)
        if isinstance(place, Path):
            output.create = lambda overwrite=False: _SyncedName(place)  # type: ignore[method-assign]
        return output


class _SyncedName(SyncedFile):
    """Its name is on the disk, too, when it is closed."""

    def __init__(self, path: Path) -> None:
        make_directory(path.parent)
        self._path = path
        super().__init__(path)

    def close(self) -> None:
        if not self.closed:
            super().close()
            sync(self._path.parent)
