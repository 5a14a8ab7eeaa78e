"""The lake: Parquet files under `date=…/event=…/` or `date=…/`, plain or as a Delta table.

    LAKE/date=2026-11-20/event=order.new/{first}-{last}-{id}.parquet
    LAKE/_mqks/state.json      how far each queue is archived; staged files, and moves in progress
    LAKE/_mqks/staging/        files to be merged, and files of no commit; their names have no
                               suffix, since many programs read all `**/*.parquet`
    LAKE/_mqks/lock            held by the process that writes to the lake

A visible file never changes and is never deleted, so a program that lists the lake at any time and
opens the files at any later time finds each row once. Small files are merged before they are
visible.

The one rule: files, and how far their queue was read, become part of the lake in ONE atomic write.
Tasks write only into `staging`; files there that no commit names are deleted.
"""

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from mqks.durable import sync
from mqks.pipeline import objects
from mqks.pipeline.columns import FIELDS
from mqks.pipeline.errors import ExtraMissing, LakeInUse, LakeUnfit

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = pa.schema(
    [
        *((name, FIELDS[name]) for name in ("key", "value", "topic", "offset", "timestamp")),
        ("queue", pa.string()),
        ("epoch", pa.string()),
        ("archived", FIELDS["timestamp"]),
    ]
)
"""Of a file; `date` and `event` are its directories. A schema for payloads adds `data`."""

_DDL = (
    "key binary, value binary, topic string, offset bigint, timestamp timestamp, queue string,"
    " epoch string, archived timestamp, date date"
)

PIECE_BYTES = 128 * 1024 * 1024
"""A task writes a file when it has collected this much, which limits its memory."""
SMALL_BYTES = 4 * 1024 * 1024
"""Smaller files stay in staging until those of a directory have this size together."""
DELTA_COMPACTION = 16
"""A Delta table is compacted each time after this number of versions."""

CONTROL = "_mqks"
"""Spark and Arrow ignore names that begin with an underscore."""
SHARED = "a lake is one directory that all machines of a cluster share"
_ESCAPED = frozenset(map(chr, [*range(0x20), 0x7F])) | set("\"#%'*/:=?\\{[]^")
"""Characters that Spark escapes in directory names, and every reader unescapes."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Readers take a directory with this name for a null event."""
_EVENT_BYTES_MAX = 200
"""A directory's name may have 255 bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """A staged file: its name, its directory, and its content."""

    name: str
    date: str
    event: str
    """Empty in a lake by day."""
    rows: int
    bytes: int
    first: int
    last: int
    arrived_us: int
    """The arrival of its latest message, in microseconds since 1970."""
    unparsed: int = 0
    """Rows whose payload did not fit the schema."""
    left_out: int = 0
    """Replayed messages that are in no file; then there is no file, and the name is empty."""

    @property
    def directory(self) -> str:
        return directory(self.date, self.event)


def directory(date: str, event: str) -> str:
    """The directory of the messages of a day and an event, relative to the lake.

    An event that is too long for a directory name, or that readers would take for null, is cut and
    gets a hash; the column `topic` has the complete event.
    """
    if not event:
        return f"date={date}"
    name = "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in event)
    if len(name.encode()) > _EVENT_BYTES_MAX or name == _NULL:
        digest = sha256(event.encode()).hexdigest()[:32]
        head = name.encode()[: _EVENT_BYTES_MAX - 33].decode("utf-8", "ignore")
        name = f"{head.rpartition('%')[0] if '%' in head[-2:] else head}~{digest}"
    return f"date={date}/event={name}"


def stage(
    staging: Path | str, batches: Iterable[pa.RecordBatch], *, by_event: bool = False
) -> Iterator[File]:
    """Write messages with the columns of a file into `staging`: one file for each day and event, or
    for each day. Rows with a null as topic are left out, and counted in a file without a name.
    For a table on a store `staging` is its URL, and the names are final."""
    gathered: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        gathered.append(batch)
        size += batch.nbytes
        if size >= PIECE_BYTES:
            yield from _stage(staging, gathered, by_event)
            gathered, size = [], 0
    if gathered:
        yield from _stage(staging, gathered, by_event)


def _stage(staging: Path | str, batches: list[pa.RecordBatch], by_event: bool) -> Iterator[File]:
    table = pa.Table.from_batches(batches)
    if left_out := table["topic"].null_count:
        arrived_us = pc.max(table["timestamp"]).value
        yield File("", "", "", 0, 0, 0, 0, arrived_us, left_out=left_out)
        table = table.filter(table["topic"].is_valid())
    for date, event, part in _parts(table, by_event):
        offsets = part["offset"]
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        name = _new_name(first, last)
        if isinstance(staging, Path):
            size = _write(staging / name, [part], part.schema)
        else:
            sink = pa.BufferOutputStream()
            _write_parquet(sink, [part], part.schema)
            content = sink.getvalue()
            objects.write(staging, f"date={date}/{_shown(name)}", content)
            size = content.size
        arrived_us = pc.max(part["timestamp"]).value
        unparsed = part["data"].null_count if "data" in part.column_names else 0
        yield File(name, date, event, part.num_rows, size, first, last, arrived_us, unparsed)


def _parts(table: pa.Table, by_event: bool) -> Iterator[tuple[str, str, pa.Table]]:
    """The rows of each day and event, or of each day, in their order."""
    days = table["timestamp"].cast(pa.date32()).combine_chunks().dictionary_encode()
    topics = table["topic"].combine_chunks() if by_event else pa.repeat("", len(table))
    events = topics.dictionary_encode()
    dates = [str(day) for day in days.dictionary.to_pylist()]
    names = events.dictionary.to_pylist()
    if len(dates) == len(names) == 1:
        yield dates[0], names[0], table
        return
    codes = pc.add(
        pc.multiply(days.indices.cast(pa.int64()), len(names)), events.indices.cast(pa.int64())
    )
    table = table.take(pc.sort_indices(codes))  # It is stable.
    counts = sorted((pair["values"], pair["counts"]) for pair in pc.value_counts(codes).to_pylist())
    at = 0
    for code, count in counts:
        yield dates[code // len(names)], names[code % len(names)], table.slice(at, count)
        at += count


def _new_name(first: int, last: int) -> str:
    return f"{first:012}-{last:012}-{uuid.uuid4().hex}"


def _shown(name: str) -> str:
    """The name of a staged file in its final directory."""
    return f"{name}.parquet"


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """Write and sync a Parquet file; returns its size in bytes."""
    if not path.parent.is_dir():
        raise LakeUnfit(f"{path.parent} is not on the machine {socket.gethostname()}: {SHARED}")
    with path.open("wb") as file:
        _write_parquet(file, tables, schema)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _write_parquet(sink: Any, tables: Iterable[pa.Table], schema: pa.Schema) -> None:
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=["topic", "queue", "epoch", "archived"],
        write_statistics=["offset", "timestamp"],
    ) as writer:
        for table in tables:
            writer.write_table(table)


def merge(staging: Path, names: list[str]) -> list[str]:
    """Merge staged files of one directory into one, without holding all rows in memory.

    Returns its name, or the names of the files themselves if their columns are incompatible.
    """
    if len(names) == 1:
        return names
    files = [staging / name for name in sorted(names)]
    try:
        schema = pa.unify_schemas([pq.read_schema(file) for file in files])
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return names
    firsts, lasts = zip(*(name.split("-")[:2] for name in names), strict=True)
    name = _new_name(min(map(int, firsts)), max(map(int, lasts)))
    _write(staging / name, _row_groups(files, schema), schema)
    return [name]


def _row_groups(files: list[Path], schema: pa.Schema) -> Iterator[pa.Table]:
    """Larger tables: one for each small file would result in small row groups."""
    gathered: list[pa.Table] = []
    for file in files:
        with pq.ParquetFile(file) as parquet:
            for number in range(parquet.num_row_groups):
                gathered.append(_fit(parquet.read_row_group(number), schema))
                if sum(table.nbytes for table in gathered) >= PIECE_BYTES:
                    yield pa.concat_tables(gathered)
                    gathered = []
    if gathered:
        yield pa.concat_tables(gathered)


def _fit(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with all columns of the schema; missing ones are null."""
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


Merge = Callable[[list[list[str]]], Iterable[list[str]]]
"""Calls `merge` for each group of files."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that is in the lake and not visible yet."""

    name: str
    directory: str
    rows: int
    bytes: int
    since_s: float
    """In seconds since 1970."""


class Lake:
    """A directory of Parquet files, open for writing; a context manager that holds its lock.

    `by_event`: whether a day has one directory for each event; None: as the lake was created, and
    for a new one no. Entry finishes what a crash has interrupted. Raises LakeInUse and LakeUnfit.
    """

    def __init__(self, path: Path, *, by_event: bool | None = None) -> None:
        self.path: Any = path.absolute()
        self.by_event = bool(by_event)
        self._by_event = by_event
        self.control = self.path / CONTROL
        self.staging: Any = self.control / "staging"
        self._state: dict[str, Any] = {"queues": {}, "arrived": {}, "waiting": [], "moves": []}
        self._state["by_event"] = self.by_event

    def __enter__(self) -> Self:
        make_directory(self.control)
        self._lock = (self.control / "lock").open("wb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise LakeInUse(f"{self.path}: another process writes to this lake") from None
        try:
            self._recover()
        except BaseException:
            self._lock.close()
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._lock.close()

    def _recover(self) -> None:
        if (self.path / "_delta_log").exists():
            raise LakeUnfit(f"{self.path} is a Delta table: use --format delta")
        with suppress(FileNotFoundError):
            kept = json.loads((self.control / "state.json").read_bytes())
            self._keep(by_event=kept.get("by_event", True))
            self._state |= kept
        self._finish()

    def _keep(self, *, by_event: bool) -> None:
        self.by_event = by_event
        if self._by_event not in (None, by_event):
            by = "event" if by_event else "day"
            raise LakeUnfit(f"{self.path} was created with --by {by}: use --by {by}")

    def _finish(self) -> None:
        """Finish the last commit, and delete files of no commit."""
        self.staging.mkdir(exist_ok=True)
        self._place(self._state["moves"])
        # A task of a killed run may still write here; this does no harm, since only commits move
        # files.
        self._sweep({file.name for file in self.staging.iterdir()})

    def _sweep(self, names: set[str]) -> None:
        for name in names - {file.name for file in self._waiting()}:
            (self.staging / name).unlink(missing_ok=True)

    def _waiting(self) -> list[Waiting]:
        return [Waiting(*file) for file in self._state["waiting"]]

    def next(self, queue: str, epoch: str) -> int | None:
        """The first number of the queue that the lake does not have; None before the first."""
        number: int | None = self._state["queues"].get(queue, {}).get(epoch)
        return number

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        """The arrival of the latest message of this queue in the lake; None before the first."""
        time_us: int | None = self._state["arrived"].get(epoch)
        return time_us

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Make staged files part of the lake: everything below `number` is in it then.

        Large files become visible at once, small files when `roll` merges them.
        """
        arrived = self._state["arrived"] | self._arrived(queue, epoch, files)
        files = [file for file in files if file.rows]
        self._check_is_here(file.name for file in files)
        queues = dict(self._state["queues"])
        queues[queue] = queues.get(queue, {}) | {epoch: number}
        moves, waiting, now_s = [], self._waiting(), time.time()
        for file in files:
            if file.bytes < SMALL_BYTES:
                waiting.append(Waiting(file.name, file.directory, file.rows, file.bytes, now_s))
            else:
                moves.append((file.name, file.directory))
        self._write(waiting, moves, queues=queues, arrived=arrived)

    def _check_is_here(self, names: Iterable[str]) -> None:
        """If not, a worker has written elsewhere, and trimming the queue would lose messages."""
        if not all((self.staging / name).exists() for name in names):
            raise LakeUnfit(f"{self.path}: the files written by the workers are missing: {SHARED}")

    def _arrived(self, queue: str, epoch: str, files: Sequence[File]) -> dict[str, int]:
        """The new `arrived_us` with these files, by epoch; an epoch belongs to one queue."""
        times = [file.arrived_us for file in files]
        if (before := self.arrived_us(queue, epoch)) is not None:
            times.append(before)
        return {epoch: max(times)} if times else {}

    def roll(self, run: Merge, age_s: float) -> int:
        """Merge staged files and make them visible, if those of a directory are large or old enough
        together; returns the number of rows that stay in staging."""
        places: dict[str, list[Waiting]] = {}
        for file in self._waiting():
            places.setdefault(file.directory, []).append(file)
        now_s = time.time()
        due = {
            place: files
            for place, files in places.items()
            if sum(file.bytes for file in files) >= SMALL_BYTES
            # A time in the future was stored before the clock was set back.
            or not now_s - age_s < min(file.since_s for file in files) <= now_s
        }
        if due:
            merged = [*run([[file.name for file in files] for files in due.values()])]
            self._check_is_here(name for names in merged for name in names)
            moves = [
                (name, place) for place, names in zip(due, merged, strict=True) for name in names
            ]
            waiting = [file for file in self._waiting() if file.directory not in due]
            old = {file.name for files in due.values() for file in files}
            self._write(waiting, moves)
            self._sweep(old)
        return sum(file.rows for file in self._waiting())

    def _write(self, waiting: list[Waiting], moves: list[tuple[str, str]], **changes: Any) -> None:
        """Write the commit, then do the moves that it names. After a crash they are repeated, which
        has no effect on those already done. They are synced before the next commit forgets them."""
        sync(self.staging)
        changes |= {"waiting": list(map(astuple, waiting)), "moves": moves}
        state = self._state | changes
        write_atomically(self.control / "state.json", json.dumps(state).encode())
        self._state = state
        self._place(moves)

    def _place(self, moves: Iterable[Sequence[str]]) -> None:
        touched = set()
        for name, place in moves:
            target = self.path / place
            if target not in touched:
                target.mkdir(parents=True, exist_ok=True)
                touched.add(target)
            with suppress(FileNotFoundError):
                (self.staging / name).rename(target / _shown(name))
        parents = {around for target in touched for around in (target, target.parent, self.path)}
        for around in parents:
            sync(around)


class DeltaLake(Lake):
    """The same as a Delta table: an entry of its log is the commit, and application transactions in
    it record how far a queue was read. Files are moved before the commit; only the log defines what
    is in the table.
    """

    def _recover(self) -> None:
        if (self.control / "state.json").exists():
            raise LakeUnfit(f"{self.path} is a lake of plain Parquet files: use --format parquet")
        self._finish()
        self._table = delta_table(self.path)
        if self._table is not None:
            self._keep(by_event="event" in self._table.metadata().partition_columns)

    def next(self, queue: str, epoch: str) -> int | None:
        return self._transaction(_application(queue, epoch))

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        return self._transaction(_arrivals(queue, epoch))

    def _transaction(self, application: str) -> int | None:
        if self._table is None:
            return None
        version: int | None = self._table.transaction_version(application)
        return version

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        from deltalake import CommitProperties, Transaction, write_deltalake

        arrived = self._arrived(queue, epoch, files)
        files = [file for file in files if file.rows]
        self._check_is_here(file.name for file in files)
        own = self._read_schema(files[0]) if files else COLUMNS
        partitions = {"date": pa.date32()} | ({"event": pa.string()} if self.by_event else {})
        schema = pa.schema([*own, *partitions.items()])
        before = self.next(queue, epoch)
        whole = self._merged(schema)
        self._place((file.name, file.directory) for file in files)
        if self._table is None:
            self._table = self._create(schema, [*partitions])
        first = self._table.version()
        if whole != self._columns():  # Without it, new columns of the files would be ignored.
            none = whole.empty_table()
            write_deltalake(self._table, none, mode="append", schema_mode="merge")
            self._table.update_incremental()
        if (now := self.next(queue, epoch)) != before:  # This commit would not conflict with that.
            raise in_use(self._table.table_uri, queue, now)
        told = [Transaction(_application(queue, epoch), number)]
        for time_us in arrived.values():
            told.append(Transaction(_arrivals(queue, epoch), time_us))
        self._table.create_write_transaction(
            [_addition(file, self._path(file), [*partitions]) for file in files],
            mode="append",
            schema=self._table.schema(),
            partition_by=[*partitions],
            commit_properties=CommitProperties(app_transactions=told),
        )
        self._table.update_incremental()
        self._sync_log(first)

    def _create(self, schema: pa.Schema, partitions: list[str]) -> Any:
        from deltalake import DeltaTable

        return DeltaTable.create(self.path, schema, partition_by=partitions)

    def _read_schema(self, file: File) -> pa.Schema:
        return pq.read_schema(self.staging / file.name)

    def _path(self, file: File) -> str:
        """In the table."""
        return f"{file.directory}/{_shown(file.name)}"

    def _columns(self) -> pa.Schema:
        return pa.schema(self._table.schema().to_arrow())

    def _merged(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the table with those of the files, which may be new, as fields of `data`
        may be. A single file with another type of payload would make the table unreadable."""
        from deltalake import Schema

        try:
            Schema.from_arrow(schema)
        except Exception as error:  # It raises nothing more special.
            why = str(error).rpartition("Schema error: ")[2]
            raise LakeUnfit(f"a Delta table cannot have these columns: {why}") from None
        try:
            return pa.unify_schemas([self._columns(), schema] if self._table else [schema])
        except pa.ArrowTypeError as error:
            why = str(error).rpartition(": ")[2]
            raise LakeUnfit(
                f"{self.path}: the schema does not fit the column data of this table ({why}):"
                " change --schema, or archive into another table"
            ) from None

    def roll(self, run: Merge, age_s: float) -> int:
        """Nothing stays in staging: files of a table can be replaced while it is read."""
        from deltalake import WriterProperties

        # Compactions are versions, too, so that the next one is some commits away.
        version = self._table.version() if self._table is not None else 1
        if age_s and version and version % DELTA_COMPACTION == 0:
            before = set(self._table.file_uris())
            self._table.optimize.compact(writer_properties=WriterProperties(compression="ZSTD"))
            self._sync(set(self._table.file_uris()) - before)
            self._table.vacuum(dry_run=False)
            self._sync_log(version + 1)
        return 0

    def _sync(self, files: Iterable[str]) -> None:
        merged = [Path(file) for file in files]
        for name in {*merged, *(file.parent for file in merged)}:
            sync(name)

    def _sync_log(self, first: int) -> None:
        """The log must be synced before the queue is trimmed; `first` is a version."""
        log = self.path / "_delta_log"
        entries = range(first, self._table.version() + 1)
        for entry in (*(log / f"{number:020}.json" for number in entries), log, self.path):
            sync(entry)


def delta_table(path: Path | str, options: dict[str, str] | None = None) -> Any:
    """The table, or None if there is none yet. Raises ExtraMissing."""
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ExtraMissing("Delta tables need another package: pip install 'mqks[delta]'") from None
    there = DeltaTable.is_deltatable(str(path), options)
    return DeltaTable(path, storage_options=options) if there else None


def in_use(url: str, queue: str, number: int | None) -> LakeInUse:
    return LakeInUse(f"{url}: another archive has committed the queue {queue} up to {number}")


def table(url: str) -> Any:
    """The table, or None. Raises ExtraMissing, and what `objects.asked` does."""
    return objects.asked(url, partial(delta_table, url, objects.OPTIONS))


def _addition(file: File, path: str, partitions: list[str]) -> Any:
    """The entry of a file in the log of a table."""
    from deltalake.transaction import AddAction

    return AddAction(
        path=path,
        size=file.bytes,
        partition_values={name: getattr(file, name) for name in partitions},
        modification_time=time.time_ns() // 10**6,
        data_change=True,
        stats=json.dumps({"numRecords": file.rows}),
    )


def _application(queue: str, epoch: str) -> str:
    return f"mqks/{queue}/{epoch}"


def _arrivals(queue: str, epoch: str) -> str:
    return f"{_application(queue, epoch)}/arrived_us"


LAKES = {"parquet": Lake, "delta": DeltaLake}


def make_directory(path: Path) -> None:
    """Create a directory and its parents, and sync them: a file is lost with the name of its
    directory."""
    made = [path, *path.parents]
    made = made[: [each.exists() for each in made].index(True)]
    path.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: after a crash it has the complete old or the complete new content."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync(path.parent)


def messages(spark: "SparkSession", path: Path | str) -> "DataFrame":
    """The rows of a lake, for Spark: the columns of its files, and `date`. Raises LakeUnfit.

    The event is the column `topic`; the directory may have it cut.
    """
    if isinstance(path, str):
        return _messages(spark, path)
    if (path / "_delta_log").is_dir():
        files = [str(file) for file in delta_table(path).file_uris()]
    elif path.is_dir():
        files = [str(path.absolute())]
    else:
        raise LakeUnfit(f"there is no lake at {path}")
    if not files:
        return spark.createDataFrame([], _DDL)
    return spark.read.schema(_DDL).parquet(*files, basePath=str(path.absolute()))


def _messages(spark: "SparkSession", url: str) -> "DataFrame":
    """The rows of a table, read by the workers' Python."""
    found = table(url)
    if found is None:
        raise LakeUnfit(f"there is no Delta table at {url}")
    files = [(uri,) for uri in found.file_uris()]
    if not files:
        return spark.createDataFrame([], _DDL)
    tasks = min(len(files), spark.sparkContext.defaultParallelism)
    named = spark.createDataFrame(files, "file string").repartition(tasks)
    return named.mapInArrow(partial(_rows, url), _DDL)


def _rows(url: str, files: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    system, schema = objects.file_system(), COLUMNS.append(pa.field("date", pa.date32()))
    for uri in (uri for batch in files for uri in batch["file"].to_pylist()):
        with objects.asked(
            url, partial(pq.ParquetFile, uri.partition("://")[2], filesystem=system)
        ) as one:
            for batch in one.iter_batches(columns=COLUMNS.names):
                day = batch["timestamp"].cast(pa.date32())
                columns = [batch[name] for name in COLUMNS.names]
                yield pa.RecordBatch.from_arrays([*columns, day], schema=schema)


def has_files_without_data(path: Path) -> bool:
    """Whether readers that take the columns of the first file, as pyarrow does, miss `data`."""
    return "data" not in ds.dataset(path, partitioning="hive").schema.names
