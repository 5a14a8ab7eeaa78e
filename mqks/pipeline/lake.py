"""The lake: Parquet files under `date=…/event=…/` or `date=…/`, plain or as a Delta table.

    LAKE/date=2026-11-20/event=order.new/{first}-{last}-{id}.parquet
    LAKE/_mqks/state.json      how far each queue is archived; what waits, and what is being moved
    LAKE/_mqks/staging/        files that wait to be merged with others, and litter; their names end
                               in nothing, since many a program takes all `**/*.parquet`
    LAKE/_mqks/lock            held by whoever writes to the lake

A file that shows never changes and never goes, so that a program which lists the lake at any moment
and opens the files at any later one finds each row once. Small files are merged before they show.

The one rule: files and how far their queue has been read become part of the lake in ONE atomic
write. Tasks write only into `staging`; what no commit names is litter and is swept away.
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
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from mqks.durable import sync
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
"""A task that has gathered this much writes it: its memory has a bound whatever messages weigh."""
SMALL_BYTES = 4 * 1024 * 1024
"""A file below that size waits for others of its directory, until they have it together."""
DELTA_COMPACTION = 16
"""A Delta table is compacted every so many versions."""

CONTROL = "_mqks"
"""Hidden from Spark and Arrow, which pass over names that begin so."""
SHARED = "a lake is one directory that all machines of a cluster share"
_ESCAPED = frozenset(map(chr, [*range(0x20), 0x7F])) | set("\"#%'*/:=?\\{[]^")
"""What Spark escapes in the name of a directory, and everyone undoes."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
"""A directory of that name has no event at all, say those who read it."""
_EVENT_BYTES_MAX = 200
"""A directory's name may have 255 bytes."""


@dataclass(frozen=True, slots=True)
class File:
    """One that a task has staged: its name, where it belongs, what is in it."""

    name: str
    date: str
    event: str
    """Empty in a lake by day."""
    rows: int
    bytes: int
    first: int
    last: int
    arrived_us: int
    """When the latest of its messages came, in microseconds since 1970."""
    unparsed: int = 0
    """Rows whose payload did not fit the schema."""

    @property
    def directory(self) -> str:
        return directory(self.date, self.event)


def directory(date: str, event: str) -> str:
    """Where the messages of a day and an event lie, below the lake.

    An event too long for a directory's name is cut and told apart by its hash, as is one that
    readers would take for none; the column `topic` has it whole.
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
    staging: Path, batches: Iterable[pa.RecordBatch], *, by_event: bool = True
) -> Iterator[File]:
    """Write messages with the columns of a file into `staging`, a file for each day and event, or
    for each day."""
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


def _stage(staging: Path, batches: list[pa.RecordBatch], by_event: bool) -> Iterator[File]:
    for date, event, part in _parts(pa.Table.from_batches(batches), by_event):
        offsets = part["offset"]
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        name = _new_name(first, last)
        size = _write(staging / name, [part], part.schema)
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
    """The name of a staged file where it shows."""
    return f"{name}.parquet"


def _write(path: Path, tables: Iterable[pa.Table], schema: pa.Schema) -> int:
    """A Parquet file that is on the disk when this returns; gives its size in bytes."""
    if not path.parent.is_dir():
        raise LakeUnfit(f"{path.parent} is not on the machine {socket.gethostname()}: {SHARED}")
    with path.open("wb") as file:
        with pq.ParquetWriter(
            file,
            schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=["topic", "queue", "epoch", "archived"],
            write_statistics=["offset", "timestamp"],
        ) as writer:
            for table in tables:
                writer.write_table(table)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def merge(staging: Path, names: list[str]) -> list[str]:
    """Write the rows of some staged files of one directory into one, without holding them all.

    Gives its name; those of the files themselves when their columns do not go together.
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
    """Tables of some size: a small file each would make small row groups."""
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
    """With the columns of the others; those it does not have are null."""
    columns = [
        table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


Merge = Callable[[list[list[str]]], Iterable[list[str]]]
"""Does with each group of files what `merge` does."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A file that is in the lake and does not show yet."""

    name: str
    directory: str
    rows: int
    bytes: int
    since_s: float
    """In seconds since 1970."""


class Lake:
    """A plain directory of Parquet files, open for writing; a context that holds its lock.

    `by_event` is whether the messages of a day have a directory for each event, and stays as it was
    when the lake was made. Whatever a crash has left half done is finished on entry. Raises
    LakeInUse and LakeUnfit.
    """

    def __init__(self, path: Path, *, by_event: bool = True) -> None:
        self.path = path.absolute()
        self.by_event = by_event
        self.control = self.path / CONTROL
        self.staging = self.control / "staging"
        self._state: dict[str, Any] = {"queues": {}, "arrived": {}, "waiting": [], "moves": []}
        self._state["by_event"] = by_event

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
            raise LakeUnfit(f"{self.path} is a Delta table: give --format delta")
        with suppress(FileNotFoundError):
            kept = json.loads((self.control / "state.json").read_bytes())
            self._keep(by_event=kept.get("by_event", True))
            self._state |= kept
        self._finish()

    def _keep(self, *, by_event: bool) -> None:
        if by_event != self.by_event:
            by = "event" if by_event else "day"
            raise LakeUnfit(f"{self.path} has its directories by {by}: give --by {by}")

    def _finish(self) -> None:
        """Do what the last commit still had to do, and sweep."""
        self.staging.mkdir(exist_ok=True)
        self._place(self._state["moves"])
        # What nobody names belongs to nobody. A task of a killed run that still writes there makes
        # litter again, and no more than that: only commits move files.
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
        """When the latest message came that the lake has of this queue; None before the first."""
        time_us: int | None = self._state["arrived"].get(epoch)
        return time_us

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Make staged files part of the lake: everything below `number` is in it now.

        Large ones show at once, small ones wait for `roll`.
        """
        self._check_is_here(file.name for file in files)
        queues = dict(self._state["queues"])
        queues[queue] = queues.get(queue, {}) | {epoch: number}
        arrived = self._state["arrived"] | self._arrived(queue, epoch, files)
        moves, waiting, now_s = [], self._waiting(), time.time()
        for file in files:
            if file.bytes < SMALL_BYTES:
                waiting.append(Waiting(file.name, file.directory, file.rows, file.bytes, now_s))
            else:
                moves.append((file.name, file.directory))
        self._write(waiting, moves, queues=queues, arrived=arrived)

    def _check_is_here(self, names: Iterable[str]) -> None:
        """Or a worker's own directory of the same name would have what the queue then forgets."""
        if not all((self.staging / name).exists() for name in names):
            raise LakeUnfit(f"{self.path}: what the workers wrote is not here: {SHARED}")

    def _arrived(self, queue: str, epoch: str, files: Sequence[File]) -> dict[str, int]:
        """By epoch, what `arrived_us` is with these files; an epoch is of one queue."""
        times = [file.arrived_us for file in files]
        if (before := self.arrived_us(queue, epoch)) is not None:
            times.append(before)
        return {epoch: max(times)} if times else {}

    def roll(self, run: Merge, age_s: float) -> int:
        """Merge what waits and let it show, where it is large enough together or has waited so
        long; gives the rows that wait on."""
        places: dict[str, list[Waiting]] = {}
        for file in self._waiting():
            places.setdefault(file.directory, []).append(file)
        now_s = time.time()
        due = {
            place: files
            for place, files in places.items()
            if sum(file.bytes for file in files) >= SMALL_BYTES
            # What waits since the future was committed before the clock was put back.
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
        """The commit, and then the moves that it names. After a crash they are done again, which
        changes nothing where they were done; they are on the disk before the next commit forgets
        them."""
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
    """The same as a Delta table: its log is what commits, and application transactions in it
    tell how far a queue has been read. Files are moved to where they belong before the commit;
    only the log tells what is in the table.

    The table has the columns of its first commit.
    """

    def _recover(self) -> None:
        if (self.control / "state.json").exists():
            raise LakeUnfit(f"{self.path} is a lake of plain Parquet files: give --format parquet")
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
        from deltalake import CommitProperties, DeltaTable, Transaction

        self._check_is_here(file.name for file in files)
        own = pq.read_schema(self.staging / files[0].name) if files else COLUMNS
        partitions = {"date": pa.date32()} | ({"event": pa.string()} if self.by_event else {})
        schema = pa.schema([*own, *partitions.items()])
        self._check(schema)
        self._place((file.name, file.directory) for file in files)
        if self._table is None:
            self._table = DeltaTable.create(self.path, schema, partition_by=[*partitions])
        told = [Transaction(_application(queue, epoch), number)]
        for time_us in self._arrived(queue, epoch, files).values():
            told.append(Transaction(_arrivals(queue, epoch), time_us))
        self._table.create_write_transaction(
            [_addition(file, [*partitions]) for file in files],
            mode="append",
            schema=self._table.schema(),
            partition_by=[*partitions],
            commit_properties=CommitProperties(app_transactions=told),
        )
        self._table.update_incremental()
        self._sync_log()

    def _check(self, schema: pa.Schema) -> None:
        """One file whose payloads have another type, and nobody can read the table any more."""
        from deltalake import Schema

        try:
            fields = Schema.from_arrow(schema).fields
        except Exception as error:  # It raises nothing more special.
            why = str(error).rpartition("Schema error: ")[2]
            raise LakeUnfit(f"a Delta table cannot have these columns: {why}") from None
        there = self._table.schema().fields if self._table else []
        types = {field.name: field.type for field in there}
        for field in fields:
            if types.get(field.name, field.type) != field.type:
                raise LakeUnfit(
                    f"{self.path}: the column {field.name} of this table has another type:"
                    " archive into another one"
                )

    def roll(self, run: Merge, age_s: float) -> int:
        """Nothing waits: a table's files can be replaced under its readers."""
        from deltalake import WriterProperties

        # Compactions are versions, too, so that the next one is some commits away.
        version = self._table.version() if self._table is not None else 1
        if age_s and version and version % DELTA_COMPACTION == 0:
            before = set(self._table.file_uris())
            self._table.optimize.compact(writer_properties=WriterProperties(compression="ZSTD"))
            merged = [Path(file) for file in set(self._table.file_uris()) - before]
            for name in {*merged, *(file.parent for file in merged)}:
                sync(name)
            self._table.vacuum(dry_run=False)
            self._sync_log(version + 1)
        return 0

    def _sync_log(self, first: int | None = None) -> None:
        """The broker forgets what the table has: the log must be on the disk before that."""
        log, last = self.path / "_delta_log", self._table.version()
        entries = range(last if first is None else first, last + 1)
        for entry in (*(log / f"{number:020}.json" for number in entries), log, self.path):
            sync(entry)


def delta_table(path: Path) -> Any:
    """The table, or None where there is none yet. Raises ExtraMissing."""
    try:
        from deltalake import DeltaTable
    except ImportError:
        raise ExtraMissing("Delta tables need: pip install 'mqks[delta]'") from None
    return DeltaTable(path) if DeltaTable.is_deltatable(str(path)) else None


def _addition(file: File, partitions: list[str]) -> Any:
    """What the log of a table tells of a file."""
    from deltalake.transaction import AddAction

    return AddAction(
        path=f"{file.directory}/{_shown(file.name)}",
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
    """Make a directory and those around it, all on the disk when this returns: what lies in one
    is gone with its name."""
    made = [path, *path.parents]
    made = made[: [each.exists() for each in made].index(True)]
    path.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file: after a crash there is the old one or the new one, whole."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync(path.parent)


def messages(spark: "SparkSession", path: Path) -> "DataFrame":
    """The rows of a lake, for Spark: the columns of its files, and `date`. Raises LakeUnfit.

    The event is the column `topic`: unlike the directory it has every event whole.
    """
    if (path / "_delta_log").is_dir():
        files = [str(file) for file in delta_table(path).file_uris()]
    elif path.is_dir():
        files = [str(path.absolute())]
    else:
        raise LakeUnfit(f"{path}: there is no lake")
    if not files:
        return spark.createDataFrame([], _DDL)
    return spark.read.schema(_DDL).parquet(*files, basePath=str(path.absolute()))


def has_files_without_data(path: Path) -> bool:
    """Whether readers that take the columns of the first file, as pyarrow does, miss `data`."""
    return "data" not in ds.dataset(path, partitioning="hive").schema.names
