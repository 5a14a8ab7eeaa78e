"""The files of a copy, in a directory or on an object store.

A *look* is one state of the journal: rows of its tables, and where in the copy its segments are.
The first look of a *generation*, its checkpoint, has all of them; each later one what has changed.

    00000007-20261120T220119.464125Z/000000-20261120T220119.464125Z    a checkpoint
    00000007-20261120T220119.464125Z/000001-20261120T220119.981002Z    what changed until then
    00000007-20261120T220119.464125Z/000002-0000                       bodies for the next look
    follower                                                           who writes here
    first                                                              the first whole generation

The one rule: a file of a generation is never changed, and its checksum covers its name.
"""

import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from mqks.errors import InspectionFailed, JournalDamaged
from mqks.journal.sqlite.rows import Row
from mqks.pipeline import objects

MAGIC: Final = b"mqks-copy 1"
PACKED_BYTES_MAX: Final = 1024 * 1024
"""Longer files are not compressed: this takes 20 ms."""
READ_AT_ONCE: Final = 16
"""Files that are read side by side, of which each has a few MiB."""
FOLLOWER: Final = "follower"
FIRST: Final = "first"
_GENERATION: Final = re.compile(r"(\d{8,})-(\d{8}T\d{6}\.\d{6}Z)")
_LOOK: Final = re.compile(r"(\d{6,})-(\d{8}T\d{6}\.\d{6}Z)")
_TIME: Final = "%Y%m%dT%H%M%S.%fZ"


class CopyFileMissing(JournalDamaged):
    """A file of a copy is not there."""


class Kept(NamedTuple):
    """Where the copy has the body of a segment."""

    crc: int
    file: str
    at: int
    bytes: int
    of: int
    """Bytes of all bodies in the file."""


@dataclass(slots=True)
class CopyState:
    """What one look has seen."""

    time_us: int = 0
    """Everything that was confirmed before this time, in microseconds since 1970, is in it."""
    version: int = 0
    """Of the schema."""
    tables: dict[str, set[Row]] = field(default_factory=dict)
    segments: dict[int, Kept] = field(default_factory=dict)

    def difference(self, before: "CopyState") -> bytes:
        """What has changed since then."""
        put, gone = {}, {}
        for name, rows in self.tables.items():
            old = before.tables.get(name, set())
            if rows is not old:
                put[name] = [_told(row) for row in rows - old]
                gone[name] = [_told(row) for row in old - rows]
        segments = [
            (i, *kept) for i, kept in self.segments.items() if before.segments.get(i) != kept
        ]
        dropped = [*(before.segments.keys() - self.segments.keys())]
        told = (self.time_us, self.version, put, gone, segments, dropped)
        return json.dumps(told, separators=(",", ":")).encode()

    def after(self, difference: bytes) -> Self:
        """The state after a change, which is this one, changed."""
        self.time_us, self.version, put, gone, segments, dropped = json.loads(difference)
        for name, rows in put.items():
            had = self.tables.setdefault(name, set())
            had.difference_update(map(_row, gone[name]))
            had.update(map(_row, rows))
        for segment_id in dropped:
            del self.segments[segment_id]
        self.segments.update((i, Kept(*kept)) for i, *kept in segments)
        return self


def _told(row: Row) -> list[object]:
    """A row for JSON, which has no bytes."""
    return [[value.decode("latin-1")] if isinstance(value, bytes) else value for value in row]


def _row(told: list[Any]) -> Row:
    return tuple(value[0].encode("latin-1") if isinstance(value, list) else value for value in told)


class Generation(NamedTuple):
    number: int
    time_us: int
    """Of its checkpoint."""
    name: str


class Look(NamedTuple):
    number: int
    time_us: int
    name: str
    """With its generation's."""


def stamp(time_us: int) -> str:
    """A time as names have it."""
    return moment(time_us).strftime(_TIME)


def moment(time_us: int) -> datetime:
    seconds, micros = divmod(time_us, 1_000_000)
    return datetime.fromtimestamp(seconds, UTC).replace(microsecond=micros)


def microseconds(time: datetime) -> int:
    return int(time.replace(microsecond=0).timestamp()) * 1_000_000 + time.microsecond


def _time_us(text: str) -> int:
    return microseconds(datetime.strptime(text, _TIME).replace(tzinfo=UTC))


class Copy:
    """All methods raise StoreAway when the object store does not answer, and OSError for a
    directory; those that read, JournalDamaged for a damaged or missing file."""

    def __init__(self, place: str) -> None:
        """A directory, or a URL such as s3://bucket/prefix. Raises ExtraMissing."""
        self.name = place
        self._path = None if "://" in place else Path(place)
        self._store: Any = None if self._path else objects.store(place)

    # -- files

    def _asked(self, work: Any) -> Any:
        return objects.asked(self.name if self._path is None else self._path, work)

    def names(self, directory: str = "") -> list[str]:
        """What is directly in a directory, sorted; nothing if there is none."""
        if self._path is not None:
            path = self._path / directory
            return sorted(each.name for each in path.iterdir()) if path.is_dir() else []
        under = f"{directory}/" if directory else None
        found = self._asked(lambda: self._store.list_with_delimiter(under))
        paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def write(self, name: str, content: bytes) -> None:
        """One file, whole or not at all."""
        is_packed = len(content) <= PACKED_BYTES_MAX
        payload = zlib.compress(content, 1) if is_packed else content
        head = b"%s %s %s\n" % (MAGIC, b"zlib" if is_packed else b"plain", _sum(name, payload))
        if self._path is not None:
            objects.write(self._path, name, head + payload)
        else:
            self._asked(lambda: self._store.put(name, head + payload))

    def read(self, name: str) -> bytes:
        try:
            if self._path is not None:
                raw = (self._path / name).read_bytes()
            else:
                raw = self._asked(lambda: self._got(name))
        except FileNotFoundError:
            raw = None
        if raw is None:
            raise CopyFileMissing(f"{self.name}/{name} is missing")
        head, _, payload = raw.partition(b"\n")
        magic, _, rest = head.rpartition(b" ")
        if rest != _sum(name, payload) or magic not in (MAGIC + b" zlib", MAGIC + b" plain"):
            raise JournalDamaged(f"{self.name}/{name} is damaged")
        return zlib.decompress(payload) if magic.endswith(b"zlib") else payload

    def _got(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.get(name).bytes())
        except FileNotFoundError:
            return None

    def read_all(self, names: Iterable[str]) -> Iterator[tuple[str, bytes]]:
        """The files and their contents, in this order."""
        names = [*names]
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            for first in range(0, len(names), READ_AT_ONCE):
                some = names[first : first + READ_AT_ONCE]
                yield from zip(some, pool.map(self.read, some), strict=True)

    def delete(self, name: str) -> None:
        if self._path is not None:
            (self._path / name).unlink(missing_ok=True)
            with suppress(OSError):  # Others are in it.
                (self._path / name).parent.rmdir()
        else:
            self._asked(lambda: self._store.delete(name))

    # -- looks

    def generations(self, *, removed: bool = False) -> list[Generation]:
        """Those that are whole, and with `removed` those of which only bodies are kept, too."""
        names = self.names()
        first = int(self.read(FIRST)) if FIRST in names and not removed else 0
        found = [m for m in map(_GENERATION.fullmatch, names) if m and int(m[1]) >= first]
        return sorted(Generation(int(m[1]), _time_us(m[2]), m[0]) for m in found)

    def looks(self, generation: Generation) -> list[Look]:
        """Raises JournalDamaged if one is missing."""
        found = map(_LOOK.fullmatch, self.names(generation.name))
        looks = sorted(
            Look(int(m[1]), _time_us(m[2]), f"{generation.name}/{m[0]}") for m in found if m
        )
        for number, look in enumerate(looks):
            if look.number != number:
                raise CopyFileMissing(f"{self.name}/{generation.name}/{number:06}-… is missing")
        return looks

    def state(self, until_us: int | None = None) -> CopyState:
        """The last look, or the last one at or before a time.

        Raises InspectionFailed when there is none.
        """
        for generation in reversed(self.generations()):
            if until_us is None or generation.time_us <= until_us:
                looks = self.looks(generation)
                while looks and until_us is not None and looks[-1].time_us > until_us:
                    looks.pop()
                if looks:
                    return self._state(looks)
        when = "" if until_us is None else f" of {moment(until_us).isoformat()} or before"
        raise InspectionFailed(f"{self.name} has no state of a journal{when}")

    def checkpoint(self, generation: Generation) -> CopyState:
        return self._state(self.looks(generation)[:1])

    def _state(self, looks: list[Look]) -> CopyState:
        state = CopyState()
        for _, content in self.read_all(look.name for look in looks):
            state.after(difference_of(content))
        return state

    def bodies(self, state: CopyState) -> Iterator[tuple[int, int, bytes]]:
        """Id, checksum and body of each segment."""
        by_file: dict[str, list[tuple[int, Kept]]] = {}
        for segment_id, kept in state.segments.items():
            by_file.setdefault(kept.file, []).append((segment_id, kept))
        for name, content in self.read_all(sorted(by_file)):
            for segment_id, kept in by_file[name]:
                yield segment_id, kept.crc, content[kept.at : kept.at + kept.bytes]

    def damage(self) -> Iterator[str]:
        """Reads all files; yields what is wrong, also beside a follower, which adds and removes."""
        there = self._files()
        for name in sorted(there):
            if not name.endswith(".new"):  # Its follower was killed.
                try:
                    self.read(name)
                except CopyFileMissing:
                    pass  # It was removed since; if a look needs it, that is told below.
                except JournalDamaged as error:
                    yield str(error)
        told = set[str]()
        for generation in self.generations():
            try:
                state = CopyState()
                for look in self.looks(generation):
                    state.after(difference_of(self.read(look.name)))
                    lost = {kept.file for kept in state.segments.values()} - there - told
                    if lost:
                        there |= self._files()
                        lost -= there
                    told |= lost
                    yield from (f"{self.name}/{name} is missing" for name in sorted(lost))
            except CopyFileMissing as error:
                if generation in self.generations():
                    yield str(error)
            except JournalDamaged:
                pass  # That is told above.

    def _files(self) -> set[str]:
        return {
            f"{each.name}/{name}"
            for each in self.generations(removed=True)
            for name in self.names(each.name)
        }


def look_file(difference: bytes, bodies: Iterable[bytes]) -> bytes:
    return b"".join([b"%012d" % len(difference), *bodies, difference])


BODIES_AT: Final = 12
"""Where the bodies of a look's file begin."""


def difference_of(content: bytes) -> bytes:
    return content[-int(content[:BODIES_AT]) :]


def _sum(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\n" + payload).hexdigest().encode()
