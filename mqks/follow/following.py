"""Follows a journal in SQLite: looks at it twice a second, and writes what has changed to a copy.

The broker does nothing for it. A segment never changes, and the transaction that deletes one has
written what replaces it: so each look, a short read transaction, is a whole state, whatever came
and went since the last one. During an outage of the copy no looks are taken, nothing gathers, and
the next look has everything.

The one rule: what a look names is in the copy before the look is.
"""

import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from mqks.errors import ClaimLost, InspectionFailed, JournalDamaged
from mqks.files import is_file
from mqks.follow.copies import (
    BODIES_AT,
    FIRST,
    FOLLOWER,
    Copy,
    CopyState,
    Generation,
    Kept,
    look_file,
    stamp,
)
from mqks.journal.segment import checksum
from mqks.journal.sqlite.database_file import FileState, connect, is_damage, no_file
from mqks.journal.sqlite.migrations import NEWEST, check_version
from mqks.journal.sqlite.rows import LOOSE, Row, Rows, loose_columns, read_by, segment_columns
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.texts import TextDamaged, kept, text_of, texts_path

LOOK_S: Final = 0.5
"""From one look to the next."""
GENERATION_S: Final = 3600.0
LOOKS_MAX: Final = 4096
"""A generation ends after this time or so many looks: a restore reads no more of them."""
BODIES_BYTES: Final = 4 * 1024 * 1024
"""Bodies that a look reads within its transaction, and that a file of the copy has."""
CLAIM_S: Final = 60.0
"""How often a follower checks that no other one has taken over."""
TRIES: Final = 5
"""Looks in a row that may find a segment deleted; the server deletes no texts from the third on."""
LIVING_MIN: Final = 0.5
"""A file of the copy that has less of its bytes alive at a checkpoint is written anew."""


class _Gone(Exception):
    """A segment of the look was deleted before it could be read."""


class _Seen(NamedTuple):
    time_us: int
    version: int
    marks: dict[str, object]
    """What changes with each table."""
    tables: dict[str, set[Row]]
    segments: dict[int, int]
    """Checksums by id."""
    rows: list[tuple[Any, ...]]
    """Some of the segments that are new."""


class Follower:
    def __init__(self, db: Path, copy: Copy, keep_s: float, note: Callable[[str], object]) -> None:
        """Takes over from another follower. Raises what Copy does."""
        if not is_file(db):
            raise no_file(db)
        self._db, self._copy, self._keep_s = db, copy, keep_s
        self._marks: dict[str, object] = {}
        self._state: CopyState | None = None
        """As it was written; None: a generation begins."""
        self._tables: dict[str, set[Row]] = {}
        """By `_marks`."""
        self._places: dict[tuple[int, int], Kept] = {}
        """By id and checksum: what the copy has."""
        self._generation = Generation(0, 0, "")
        self._generation_s = 0.0
        self._looks = 0
        self._files = 0
        """Names of files with bodies are never used again: what is written may be there, or not."""
        self._token = secrets.token_hex(8)
        copy.write(FOLLOWER, self._token.encode())
        self._claimed_s = time.monotonic()
        if generations := copy.generations(removed=True):
            self._generation = generations[-1]
            try:
                self._resume(copy.state(), generations)
            except InspectionFailed:
                pass
            except JournalDamaged as error:
                note(f"{error}; everything is copied again")

    def _resume(self, state: CopyState, generations: list[Generation]) -> None:
        used = {kept.file.partition("/")[0] for kept in state.segments.values()}
        there = {
            f"{each.name}/{name}"
            for each in generations
            if each.name in used
            for name in self._copy.names(each.name)
        }
        self._places = {
            (i, kept.crc): kept for i, kept in state.segments.items() if kept.file in there
        }

    def look(self) -> int:
        """Copy what has changed; return the time, in microseconds since 1970, before which
        everything that was confirmed is in the copy.

        Raises what Copy does; JournalDamaged for the database, InspectionFailed if it can't be
        read, ClaimLost when another follower writes to the copy.
        """
        self._check_claim()
        try:
            for tries in range(TRIES):
                with ExitStack() as held:
                    if tries > 1:
                        held.enter_context(kept(self._db))
                    try:
                        return self._look(BODIES_BYTES << tries)
                    except _Gone:
                        continue
        except BaseException:
            self._state, self._marks = None, {}  # What was being written may be there, or not.
            raise
        raise InspectionFailed(f"{self._db}: its segments are deleted before they can be read")

    def _look(self, at_once: int) -> int:
        with self._failures(), self._connected() as db:
            seen = self._see(db, at_once)
        if seen.marks == self._marks and self._state:
            return seen.time_us
        if (
            is_first := self._state is None
            or self._looks >= LOOKS_MAX
            or time.monotonic() - self._generation_s >= GENERATION_S
        ):
            number = self._generation.number + 1
            name = f"{number:08}-{stamp(seen.time_us)}"
            self._generation = Generation(number, seen.time_us, name)
            self._generation_s, self._looks, self._state = time.monotonic(), 0, None
            self._refuse_damage(seen)
            self._forget_the_dead(seen.segments)
        prefix = f"{self._generation.name}/{self._looks:06}-"
        name = prefix + stamp(seen.time_us)
        bodies, new = self._write_bodies(seen, prefix, name)
        places = self._places | new
        segments = {i: places[i, crc] for i, crc in seen.segments.items()}
        state = CopyState(seen.time_us, seen.version, seen.tables, segments)
        content = look_file(state.difference(self._state or CopyState()), bodies)
        self._copy.write(name, content)
        self._places = {(i, place.crc): place for i, place in segments.items()}
        self._state, self._tables, self._marks = state, seen.tables, seen.marks
        self._looks += 1
        if is_first:
            self._remove_old(seen.time_us)
        return seen.time_us

    # -- the database

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            if is_damage(error):
                raise JournalDamaged(f"{self._db} can't be read: {error}") from error
            raise InspectionFailed(f"{self._db} can't be read: {error}") from error

    @contextmanager
    def _connected(self) -> Iterator[sqlite3.Connection]:
        """Raises _Gone when a server has opened a file that was still."""
        try:
            before = FileState.of(self._db)
        except OSError as error:
            raise InspectionFailed(f"{self._db} can't be read: {error.strerror}") from error
        with closing(connect(self._db, before)) as db:
            yield db
        if before.is_still and before != FileState.of(self._db):
            raise _Gone

    def _see(self, db: sqlite3.Connection, at_once: int) -> _Seen:
        db.execute("begin")
        time_us = time.time_ns() // 1000
        version = int(db.execute("pragma user_version").fetchone()[0])
        check_version(version, self._db)
        if version < NEWEST:
            raise InspectionFailed(f"{self._db} has an older schema: start its server first")
        columns = read_by(version) | {name: loose_columns(name, version) for name in LOOSE}
        marks: dict[str, object] = dict.fromkeys(columns)
        marks |= {row[0]: row for row in db.execute("select * from tally")}
        for name in ("segment", *LOOSE):
            last = db.execute(f"select max(id) from {name}").fetchone()
            marks[name] = (marks.get(name), last)
        tables = {
            name: {*db.execute(f"select {columns[name]} from {name}")}
            if marks[name] is None or self._marks.get(name) != marks[name]
            else self._tables[name]
            for name in columns
        }
        marks["meta"] = frozenset(tables["meta"])
        marks["tally"] = frozenset(tables["tally"])
        if marks == self._marks and self._state:
            return _Seen(time_us, version, marks, tables, {}, [])
        segments = dict(db.execute("select id, crc from segment").fetchall())
        rows, size = [], 0
        for segment_id in self._new(segments):
            if size >= at_once:
                break
            rows.append(_row_of(db, segment_id, version))
            size += len(rows[-1][2])
        return _Seen(time_us, version, marks, tables, segments, rows)

    def _refuse_damage(self, seen: _Seen) -> None:
        """Raise JournalDamaged if rows are damaged or missing; segments are checked one by one."""
        rows = Rows(seen.version, {name: seen.tables[name] for name in read_by(seen.version)})
        damage = [*rows.damage, *rows.count_segments(sorted(seen.segments))]
        if damage:
            raise JournalDamaged(f"{self._db} is damaged: {damage[0].place}: {damage[0].what}")

    def _new(self, segments: dict[int, int]) -> list[int]:
        return [i for i, crc in segments.items() if (i, crc) not in self._places]

    def _bodies(self, seen: _Seen) -> Iterator[tuple[int, int, bytes]]:
        """Id, checksum and body of each new segment. Raises _Gone."""
        for row in seen.rows:
            yield self._body(*row)
        read = {row[0] for row in seen.rows}
        for segment_id in self._new(seen.segments):
            if segment_id not in read:
                with self._failures(), self._connected() as db:
                    row = _row_of(db, segment_id, seen.version)
                if row[1] != seen.segments[segment_id]:
                    raise _Gone
                yield self._body(*row)

    def _body(
        self, segment_id: int, crc: int, body: bytes, size: int | None, number: int
    ) -> tuple[int, int, bytes]:
        what = "its checksum does not match"
        try:
            if size is not None:
                body += text_of(texts_path(self._db), number, size)
            if checksum(segment_id, body) == crc:
                return segment_id, crc, body
        except TextDamaged as error:
            what = str(error)
        with self._failures(), self._connected() as db:
            _row_of(db, segment_id, NEWEST)  # Raises _Gone.
        raise JournalDamaged(f"{self._db} is damaged: segment {segment_id}: {what}")

    # -- the copy

    def _write_bodies(
        self, seen: _Seen, prefix: str, look: str
    ) -> tuple[list[bytes], dict[tuple[int, int], Kept]]:
        """Write what is large; return what is to be in the file of the look, and its places."""
        bodies: list[bytes] = []
        new: list[tuple[int, int, int, int]] = []
        at = 0
        for i, crc, body in self._bodies(seen):
            bodies.append(body)
            new.append((i, crc, at, len(body)))
            at += len(body)
            if at >= BODIES_BYTES:
                file = f"{prefix}{self._files:04}"
                self._files += 1
                self._copy.write(file, b"".join(bodies))
                self._places |= _placed(new, file, 0, at)
                bodies, new, at = [], [], 0
        return bodies, _placed(new, look, BODIES_AT, at)

    def _forget_the_dead(self, segments: dict[int, int]) -> None:
        """Files of which little is alive are not used any more."""
        living = Counter[str]()
        for (i, crc), place in self._places.items():
            if segments.get(i) == crc:
                living[place.file] += place.bytes
        self._places = {
            key: place
            for key, place in self._places.items()
            if living[place.file] >= LIVING_MIN * place.of
        }

    def _remove_old(self, now_us: int) -> None:
        """Remove what no restore of the time to keep needs."""
        generations = self._copy.generations(removed=True)
        begin_us = now_us - int(self._keep_s * 1e6)
        old = [each for each in generations if each.time_us <= begin_us]
        if len(old) < 2:
            return
        self._copy.write(FIRST, b"%d" % old[-1].number)
        used = {kept.file for kept in self._copy.checkpoint(old[-1]).segments.values()}
        for generation in generations[: generations.index(old[-1])]:
            for name in self._copy.names(generation.name):
                if f"{generation.name}/{name}" not in used:
                    self._copy.delete(f"{generation.name}/{name}")

    def _check_claim(self) -> None:
        if time.monotonic() - self._claimed_s >= CLAIM_S:
            if self._copy.read(FOLLOWER) != self._token.encode():
                raise ClaimLost(f"{self._copy.name}: another follower writes here")
            self._claimed_s = time.monotonic()


def _row_of(db: sqlite3.Connection, segment_id: int, version: int) -> tuple[Any, ...]:
    sql = f"select {segment_columns(version)} from segment where id = ?"
    row: tuple[Any, ...] | None = db.execute(sql, (segment_id,)).fetchone()
    if row is None:
        raise _Gone
    return row


def _placed(
    new: list[tuple[int, int, int, int]], file: str, shift: int, of: int
) -> dict[tuple[int, int], Kept]:
    return {(i, crc): Kept(crc, file, at + shift, size, of) for i, crc, at, size in new}
