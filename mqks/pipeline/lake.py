"""The lake: Parquet files below `date=…/`, which are its partitions; here in a directory.

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
import re
import socket
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqks.durable import sync
from mqks.pipeline import objects
from mqks.pipeline.columns import FIELDS, ORIGIN, PROPERTIES
from mqks.pipeline.errors import LakeInUse, LakeUnfit
from mqks.pipeline.layout import USUAL, Layout, partition, rows_by, sorted_by
from mqks.pipeline.objects import ICEBERG, Place, SyncedFile, make_directory, write_atomically
from mqks.pipeline.sums import Sums, queues_of, records_of_commit, sums_of

COLUMNS = pa.schema(
    [
        *((name, FIELDS[name]) for name in ("key", "value", "topic", "offset", "timestamp")),
        ("queue", pa.string()),
        ("epoch", pa.string()),
        ("archived", FIELDS["timestamp"]),
    ]
)
"""Of all lakes, also of older ones."""
_ORIGINS = [pa.field(f"origin_{of.name}", of.type) for of in ORIGIN.type]
WRITTEN = pa.schema([*COLUMNS, *_ORIGINS, *PROPERTIES])
"""Of a file; its partitions are its directories. A schema for payloads adds `data`."""
PIECE_BYTES = 128 * 1024 * 1024
"""A task writes a file when it has collected this much, which limits its memory."""
SMALL_BYTES = 4 * 1024 * 1024
"""Smaller files stay in staging until those of a directory have this size together."""

CONTROL = "_mqks"
"""Spark and Arrow ignore names that begin with an underscore."""
SHARED = "a lake is one directory that all machines of a cluster share"
_REPEATED = ["topic", "queue", "epoch", "archived", "origin_queue", "origin_epoch"]
_REPEATED += [*PROPERTIES.names[1:], "headers.key_value.key", "headers.key_value.value"]
_ESCAPED = frozenset(map(chr, [*range(0x20), 0x7F])) | set("\"#%'*/:=?\\{[]^")
"""Characters that Spark escapes in directory names, and every reader unescapes."""
_NULL = "__HIVE_DEFAULT_PARTITION__"
"""Readers take a directory with this name for null."""
_EVENT_BYTES_MAX = 200
"""A directory's name may have 255 bytes."""
BY_TABLE = "was created with --table-by event: use --table-by event, or another lake"


class Stages(Protocol):
    """How tasks write; pickles."""

    def written(self, rows: pa.Table) -> Iterator["File"]:
        """Write messages with the columns of a file."""


class Staging(NamedTuple):
    """Where tasks write."""

    place: Place
    layout: Layout
    is_final: bool = False
    """Whether files get their final names: those of a table, which names its files in its log."""
    ids: pa.Schema | None = None
    """Columns with the numbers that an Iceberg table has for them."""

    def path(self, file: "File") -> str:
        """Of a file in `place`."""
        if not self.is_final:
            return file.name
        # Its log says the values. Readers disagree about escapes in the names of objects.
        return re.sub(r"[^\w.=/-]", "_", f"{file.directory}/{shown(file.name)}", flags=re.ASCII)

    def written(self, rows: pa.Table) -> Iterator["File"]:
        """One file for each of their partitions."""
        if self.layout.upsert:
            count, rows = len(rows), self.layout.upsert.last(rows)
            yield File("", "", [""], replaced=count - len(rows))
        by, sources = self.layout.partitions, self.layout.sources
        rows = sorted_by(rows, self.layout.sort)
        for values, part in rows_by(rows, by, self.layout.partitions_max):
            first, last = (edge.as_py() for edge in pc.min_max(part["offset"]).values())
            arrived_us = pc.max(part["timestamp"]).value
            unparsed = part["data"].null_count if "data" in part.column_names else 0
            place, name = directory(by, values), _new_name(first, last)
            counts = part.num_rows, 0, first, last, arrived_us, unparsed
            file = File(name, place, values, *counts, sums=sums_of(part))
            schema = part.schema if self.ids is None else numbered(part.schema, self.ids)
            size = write_file(self.place, self.path(file), [part], schema, sources)
            yield replace(file, bytes=size)


@dataclass(frozen=True, slots=True)
class File:
    """A written file: its name, its directory, and its content."""

    name: str
    directory: str
    values: Sequence[str | None]
    """Of its partitions."""
    rows: int = 0
    bytes: int = 0
    first: int = 0
    last: int = 0
    arrived_us: int = 0
    """The arrival of its latest message, in microseconds since 1970."""
    unparsed: int = 0
    """Rows whose payload did not fit the schema."""
    left_out: int = 0
    """Replayed messages that are in no file; then there is no file, and the name is empty."""
    replaced: int = 0
    """Those that are in no file, since later ones have their keys; there is no file either."""
    sums: Sums = field(default_factory=dict)
    event: str = ""
    """Whose table it is for, in a lake with a table for each event."""


def directory(by: Sequence[str], values: Sequence[str | None]) -> str:
    """The directory of these partitions, relative to the lake.

    A value that is too long for a directory name, or that readers would take for null, is cut and
    gets a hash; the column `topic` has the complete event.
    """
    names = (partition(each).column for each in by)
    # Readers take a name that is empty for null, too, or for an error.
    told = (_quoted(value) if value else _NULL for value in values)
    return "/".join(f"{name}={value}" for name, value in zip(names, told, strict=True))


def _quoted(value: str) -> str:
    name = "".join(f"%{ord(c):02X}" if c in _ESCAPED else c for c in value)
    if len(name.encode()) > _EVENT_BYTES_MAX or name == _NULL:
        digest = sha256(value.encode()).hexdigest()[:32]
        head = name.encode()[: _EVENT_BYTES_MAX - 33].decode("utf-8", "ignore")
        name = f"{head.rpartition('%')[0] if '%' in head[-2:] else head}~{digest}"
    return name


def table_at(place: Place, event: str) -> Place:
    """The table of an event in a lake with a table for each.

    Events whose names do not fit get others with a hash, which no event has as its own. What begins
    with a dot or an underscore would be hidden from readers.
    """
    join, odd, fit, name, flags = "-", r"[^\w.-]", r"[^\W_][\w.-]*", event, re.NOFLAG
    if isinstance(place, str):
        flags = re.ASCII
    if is_iceberg := str(place).startswith(ICEBERG):
        join, odd, fit = "_", "[^a-z0-9]", "[a-z0-9]+([._][a-z0-9]+)*"
        name = event.replace(".", "__")
    is_long = len(name.encode()) > _EVENT_BYTES_MAX
    if is_long or not re.fullmatch(fit, event, flags) or re.search("[_-][0-9a-f]{16}$", event):
        head = re.sub(odd, "_", event.lower() if is_iceberg else event, flags=flags)
        head = head.encode()[: _EVENT_BYTES_MAX - 17].decode("utf-8", "ignore").lstrip("._-")
        name = f"{head or 'event'}{join}{sha256(event.encode()).hexdigest()[:16]}"
    if isinstance(place, Path):
        return place / name
    return f"{place}{'_' if is_iceberg else '/'}{name}"


def control_of(place: Place) -> Place:
    """The lake of the events that have tables in this one."""
    if isinstance(place, Path):
        return place / CONTROL / "tables"
    return f"{place}_{CONTROL}" if place.startswith(ICEBERG) else f"{place}/{CONTROL}/tables"


def stage(staging: Stages, batches: Iterable[pa.RecordBatch]) -> Iterator[File]:
    """Write messages with the columns of a file, into one file for each of their partitions. Rows
    with a null as topic are left out, and counted in a file without a name."""
    gathered: dict[pa.Schema, list[pa.RecordBatch]] = {}
    size = 0
    for batch in batches:
        gathered.setdefault(batch.schema, []).append(batch)
        size += batch.nbytes
        if size >= PIECE_BYTES:
            for some in gathered.values():
                yield from _stage(staging, some)
            gathered, size = {}, 0
    for some in gathered.values():
        yield from _stage(staging, some)


def _stage(staging: Stages, batches: list[pa.RecordBatch]) -> Iterator[File]:
    table = pa.Table.from_batches(batches)
    if left_out := table["topic"].null_count:
        arrived_us = pc.max(table["timestamp"]).value
        yield File("", "", [""], arrived_us=arrived_us, left_out=left_out)
        table = table.filter(table["topic"].is_valid())
    yield from staging.written(table)


def numbered(schema: pa.Schema, ids: pa.Schema) -> pa.Schema:
    """A schema with the numbers of its columns and fields."""
    return pa.schema([_numbered(field, ids.field(field.name)) for field in schema])


def _numbered(field: pa.Field, like: pa.Field) -> pa.Field:
    kind = field.type
    if pa.types.is_struct(kind):
        kind = pa.struct([_numbered(each, like.type.field(each.name)) for each in kind])
    elif pa.types.is_list(kind):
        kind = pa.list_(_numbered(kind.value_field, like.type.value_field))
    elif pa.types.is_map(kind):
        keys = _numbered(kind.key_field, like.type.key_field)
        kind = pa.map_(keys, _numbered(kind.item_field, like.type.item_field))
    return pa.field(field.name, kind, field.nullable, metadata=like.metadata)


def _new_name(first: int, last: int) -> str:
    return f"{first:012}-{last:012}-{uuid.uuid4().hex}"


def shown(name: str) -> str:
    """The name of a staged file in its final directory."""
    return f"{name}.parquet"


def write_file(
    place: Place,
    name: str,
    tables: Iterable[pa.Table],
    schema: pa.Schema,
    sources: Iterable[str] = (),
) -> int:
    """Write a Parquet file, synced but for its name, with statistics of these columns and fields,
    too; returns its size in bytes."""
    if isinstance(place, str):
        sink = pa.BufferOutputStream()
        _write_parquet(sink, tables, schema, sources)
        content = sink.getvalue()
        objects.write(place, name, content)
        return int(content.size)
    if not place.is_dir():
        raise LakeUnfit(f"{place} is not on the machine {socket.gethostname()}: {SHARED}")
    path = place / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with SyncedFile(path) as file:
        _write_parquet(file, tables, schema, sources)
        return file.tell()


def _write_parquet(
    sink: Any, tables: Iterable[pa.Table], schema: pa.Schema, sources: Iterable[str]
) -> None:
    with pq.ParquetWriter(
        sink,
        schema,
        compression="zstd",
        compression_level=1,
        use_dictionary=_REPEATED,
        write_statistics=["topic", "offset", "timestamp", *sources],
    ) as writer:
        for table in tables:
            writer.write_table(table)


def merge(staging: Staging, names: list[str]) -> list[str]:
    """Merge staged files of one directory into one, without holding all rows in memory.

    Returns its name, or the names of the files themselves if their columns are incompatible.
    """
    if len(names) == 1:
        return names
    names, place = sorted(names), Path(staging.place)
    try:
        schema = pa.unify_schemas([pq.read_schema(place / name) for name in names])
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return names
    firsts, lasts = zip(*(name.split("-")[:2] for name in names), strict=True)
    name = _new_name(min(map(int, firsts)), max(map(int, lasts)))
    rows = rows_of([place / name for name in names], schema, staging.layout.sort)
    write_file(place, name, rows, schema, staging.layout.sources)
    return [name]


def rows_of(
    files: Iterable[Place], schema: pa.Schema, sort: Iterable[str] = ()
) -> Iterator[pa.Table]:
    """The rows of small files, in tables of some size: each is a row group of the next file."""
    gathered: list[pa.Table] = []
    for file in files:
        content = pa.BufferReader(objects.read(file))
        gathered.append(fitted(pq.ParquetFile(content).read(), schema))
        if sum(table.nbytes for table in gathered) >= PIECE_BYTES:
            yield sorted_by(pa.concat_tables(gathered), sort)
            gathered = []
    if gathered:
        yield sorted_by(pa.concat_tables(gathered), sort)


Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def fitted(rows: Rows, schema: pa.Schema) -> Rows:
    """With these columns, of which those that are missing are null."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.schema.names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return type(rows).from_arrays(columns, schema=schema)


def names_of(columns: Iterable[pa.Field], within: str = "") -> Iterator[str]:
    """The names of columns, and of the fields in them behind those of their columns."""
    for each in columns:
        kind, name = each.type, f"{within}{each.name}"
        yield name
        while pa.types.is_list(kind) or pa.types.is_map(kind):
            kind = kind.item_type if pa.types.is_map(kind) else kind.value_type
        if pa.types.is_struct(kind):
            yield from names_of(kind, f"{name}.")


def check_case(place: Place, known: Iterable[str], names: Iterable[str]) -> None:
    """Raises LakeUnfit if one of these names differs from another, or from a known one, by no more
    than case."""
    there = {*known}
    by_case = {name.lower(): name for name in there}
    for name in sorted({*names} - there):
        if (other := by_case.setdefault(name.lower(), name)) != name:
            raise LakeUnfit(
                f"{place}: {min(name, other)} and {max(name, other)} differ only by case, and Spark"
                " and DuckDB cannot read both: change --schema"
            )


class Waiting(NamedTuple):
    """A file that is in the lake and not visible yet."""

    name: str
    directory: str
    rows: int
    bytes: int
    since_s: float
    """In seconds since 1970."""


class Lake(ABC):
    """What messages are archived into: open for writing, as a context manager.

    Entry, and all that follows, raises LakeInUse, LakeUnfit and, if it is on a store, StoreAway.
    """

    def __init__(self, place: Place, layout: Layout = USUAL) -> None:
        self.place = place.absolute() if isinstance(place, Path) else place
        self.layout = layout
        """As it is wanted, and once the lake is read, as it has it."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        return None

    @property
    @abstractmethod
    def staging(self) -> Stages:
        """Where tasks write."""

    @abstractmethod
    def next(self, queue: str, epoch: str) -> int | None:
        """The first number of the queue that the lake does not have; None before the first."""

    def reached(self, queue: str, epoch: str) -> int | None:
        """The number after the last one of the queue that the lake may have; not below `next`."""
        return self.next(queue, epoch)

    @abstractmethod
    def arrived_us(self, queue: str, epoch: str) -> int | None:
        """The arrival of the latest message of this queue in the lake; None before the first."""

    def adopts(self, queue: str, epoch: str, start: int, files: Sequence[File]) -> bool:
        """Whether messages of a batch from `start` on were not written with these files, as there
        was no table for them: now there is, and they are to be staged again."""
        return False

    def prepared(
        self, data: pa.DataType | None, is_of: Callable[[str], bool] | None = None
    ) -> pa.DataType | None:
        """Make the lake ready for files with payloads of this type, if with any; returns the type
        in the files, whose fields are as wide as the lake has them. In a lake with a table for each
        event, only the tables of those events."""
        return data

    @abstractmethod
    def queues(self) -> list[str]:
        """Those that the lake `knows`; none where it cannot list them."""

    @abstractmethod
    def knows(self, queue: str, epoch: str = "") -> bool:
        """Whether the last commit of this queue was under another epoch, and is no loss of it,
        which is a commit without an epoch."""

    @abstractmethod
    def recorded(self, name: str) -> int | None:
        """What a commit has recorded under a name, the last one; None before the first."""

    @abstractmethod
    def summed(self) -> set[tuple[str, str]]:
        """The queues of which sums are recorded, with their epochs; none where it cannot list
        them."""

    @abstractmethod
    def contents(self) -> Sequence[Place]:
        """The files of all its rows."""

    @abstractmethod
    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Make staged files part of the lake: everything below `number` is in it then."""

    @abstractmethod
    def roll(self, age_s: float) -> int:
        """Merge small files; returns the number of rows that are not visible yet."""

    @abstractmethod
    def expire(self, before: date) -> None:
        """Remove older days."""

    def vacuum(self, age_s: float, *, dry_run: bool = False) -> list[str]:
        """Delete files older than this that no version needs which readers may use; returns them.
        Of plain files there are none: they are visible for ever, and entry deletes staged ones."""
        return []

    def lacks_data(self) -> bool:
        """Whether readers that take the columns of the first file, as pyarrow does, miss `data`."""
        return False


class FileLake(Lake):
    """A directory of Parquet files; it holds its lock. Entry finishes what a crash has
    interrupted."""

    def __init__(self, path: Path, layout: Layout = USUAL) -> None:
        super().__init__(path, layout)
        if layout.upsert:
            raise LakeUnfit(
                f"{path}: plain files never change, and cannot have the last value of each key: use"
                " --format delta or a --catalog, or take the last values when you read, as DuckDB"
                ' does by: qualify row_number() over (partition by KEY order by "offset" desc) = 1'
            )
        self.path = path.absolute()
        self.control = self.path / CONTROL
        self._staging = self.control / "staging"
        self._state: dict[str, Any] = {"queues": {}, "arrived": {}, "waiting": [], "moves": []}
        self._state["sums"] = {}

    @property
    def staging(self) -> Staging:
        return Staging(self._staging, self.layout)

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
        """Finish the last commit."""
        if (self.path / "_delta_log").exists():
            raise LakeUnfit(f"{self.path} is a Delta table: use --format delta")
        if control_of(self.path).exists():  # type: ignore[union-attr]
            raise LakeUnfit(f"{self.path} {BY_TABLE}")
        with suppress(FileNotFoundError):
            kept = json.loads((self.control / "state.json").read_bytes())
            # Older versions knew but two, and the oldest one.
            before = ("date", "event") if kept.pop("by_event", True) else ("date",)
            self.layout = self.layout.kept(self.path, kept.get("by", before))
            self._state |= kept | {"waiting": [Waiting(*file) for file in kept.get("waiting", [])]}
        self._state["by"] = self.layout.partitions
        self._staging.mkdir(exist_ok=True)
        self._place(self._state["moves"])
        # A task of a killed run may still write here; this does no harm, since only commits move
        # files.
        self._sweep({file.name for file in self._staging.iterdir()})

    def _sweep(self, names: set[str]) -> None:
        """Delete files of no commit."""
        for name in names - {file.name for file in self._state["waiting"]}:
            (self._staging / name).unlink(missing_ok=True)

    def next(self, queue: str, epoch: str) -> int | None:
        number: int | None = self._state["queues"].get(queue, {}).get(epoch)
        return number

    def queues(self) -> list[str]:
        return [queue for queue in self._state["queues"] if self.knows(queue)]

    def knows(self, queue: str, epoch: str = "") -> bool:
        epochs = [*self._state["queues"].get(queue, {})]
        return bool(epochs) and epochs[-1] not in ("", epoch)

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        time_us: int | None = self._state["arrived"].get(epoch)
        return time_us

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        """Large files become visible at once, small files when `roll` merges them."""
        came_us = latest(self.arrived_us(queue, epoch), files)
        arrived = self._state["arrived"] | ({} if came_us is None else {epoch: came_us})
        files = [file for file in files if file.rows]
        check_are_here(self.path, (self._staging / file.name for file in files))
        sums = records_of_commit(
            queue, epoch, self.next(queue, epoch), (file.sums for file in files), self.recorded
        )
        queues = dict(self._state["queues"])
        numbers = queues.get(queue, {})
        queues[queue] = {e: numbers[e] for e in numbers if e != epoch} | {epoch: number}
        moves, waiting, now_s = [], [*self._state["waiting"]], time.time()
        for file in files:
            if file.bytes < SMALL_BYTES:
                waiting.append(Waiting(file.name, file.directory, file.rows, file.bytes, now_s))
            else:
                moves.append((file.name, file.directory))
        self._write(waiting, moves, queues=queues, arrived=arrived, sums=self._state["sums"] | sums)

    def recorded(self, name: str) -> int | None:
        number: int | None = self._state["sums"].get(name)
        return number

    def summed(self) -> set[tuple[str, str]]:
        return queues_of(self._state["sums"])

    def contents(self) -> list[Path]:
        shown = self.path.glob("date=*/**/*.parquet")
        return [*shown, *(self._staging / file.name for file in self._state["waiting"])]

    def prepared(
        self, data: pa.DataType | None, is_of: Callable[[str], bool] | None = None
    ) -> pa.DataType | None:
        self.layout.check(data)
        if data is not None:
            known = self._state.get("fields")
            if known is None:  # It has no payloads, or of an older version.
                known = {
                    name for file in self.contents() for name in names_of(pq.read_schema(file))
                }
            names = [*names_of([pa.field("data", data)])]
            check_case(self.path, known, names)
            self._state["fields"] = sorted({*known, *names})  # The next commit stores it.
        return data

    def roll(self, age_s: float) -> int:
        """Merge staged files and make them visible, if those of a directory are large or old enough
        together; returns the number of rows that stay in staging."""
        places: dict[str, list[Waiting]] = {}
        for file in self._state["waiting"]:
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
            groups = [[file.name for file in files] for files in due.values()]
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                merged = [*threads.map(partial(merge, self.staging), groups)]
            moves = [
                (name, place) for place, names in zip(due, merged, strict=True) for name in names
            ]
            waiting = [file for file in self._state["waiting"] if file.directory not in due]
            old = {file.name for files in due.values() for file in files}
            self._write(waiting, moves)
            self._sweep(old)
        return sum(file.rows for file in self._state["waiting"])

    def expire(self, before: date) -> None:
        """Raises LakeUnfit: readers of plain files rely on them to stay."""
        raise LakeUnfit(f"{self.path}: only tables forget old days: use --format delta")

    def _write(self, waiting: list[Waiting], moves: list[tuple[str, str]], **changes: Any) -> None:
        """Write the commit, then do the moves that it names. After a crash they are repeated, which
        has no effect on those already done. They are synced before the next commit forgets them."""
        sync(self._staging)
        changes |= {"waiting": waiting, "moves": moves}
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
                (self._staging / name).rename(target / shown(name))
        parents = {around for target in touched for around in (target, target.parent, self.path)}
        for around in parents:
            sync(around)

    def lacks_data(self) -> bool:
        import pyarrow.dataset as ds  # here, since it imports pandas, half of the time of a start

        return "data" not in ds.dataset(self.path, partitioning="hive").schema.names


def latest(came_us: int | None, files: Sequence[File]) -> int | None:
    """The arrival of the latest message of all: what was told before, and that of these files."""
    times = [file.arrived_us for file in files] + ([] if came_us is None else [came_us])
    return max(times, default=None)


def check_are_here(lake: Place, files: Iterable[Path]) -> None:
    """If not, a worker has written elsewhere, and trimming the queue would lose messages."""
    if not all(file.exists() for file in files):
        raise LakeUnfit(f"{lake}: the files written by the workers are missing: {SHARED}")
