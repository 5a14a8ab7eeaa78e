"""Reads a database file, as `Contents`. A damaged file, even with a damaged SQLite structure, is
decoded as far as possible.

The one rule: nothing is written, checkpointed or locked, and each read is short.
"""

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import ErrorRecord, ResultRow
from mqks.errors import CannotWrite, InspectionFailed, JournalDamaged
from mqks.files import exists, is_dir, is_file
from mqks.journal.contents import AT_ONCE, LISTED_ONLY, Contents, DatabaseFacts, SegmentContent
from mqks.journal.sqlite import wal
from mqks.journal.sqlite.lock import server_of
from mqks.journal.sqlite.migrations import check_version
from mqks.journal.sqlite.rows import (
    AUDIT_SINCE,
    Rows,
    audit,
    errors,
    head_of,
    loose_columns,
    read_by,
    segment_columns,
)
from mqks.journal.sqlite.structure import UNREADABLE, schema_damage
from mqks.journal.sqlite.texts import TextDamaged, size_of, text_of, texts_path
from mqks.journal.store import Damage, Head, shown

PROBED_MAX: Final = 100_000
"""Segments that are searched one by one where a page of their list can't be read."""
DAMAGE_CODES: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_MISMATCH,
}
"""SQLite's error codes for a damaged structure."""


def no_file(path: Path) -> InspectionFailed:
    """The error for a path without a database."""
    return InspectionFailed(f"{path}: {'is a directory' if is_dir(path) else 'no such file'}")


def wal_path(path: Path) -> Path:
    """Path of a database's WAL: next to the file itself, also when `path` is a link."""
    return Path(f"{path.resolve()}-wal")


class FileState(NamedTuple):
    """State of a database file in the file system."""

    size: int
    changed_ns: int
    wal_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        wal, now = wal_path(path), path.stat()
        return cls(now.st_size, now.st_mtime_ns, wal.stat().st_size if exists(wal) else 0)

    @property
    def is_still(self) -> bool:
        """Whether it was closed cleanly and not opened for writing since. The state must be the
        same after the file was read."""
        return not self.wal_bytes


def refuse_wal(path: Path, name: Path) -> None:
    """Raise CannotWrite when the last close has left a WAL: SQLite does not tell why."""
    if not FileState.of(path).is_still:
        raise CannotWrite(f"{name} can't be written: its WAL could not be copied into it")


def connect(path: Path, state: FileState) -> sqlite3.Connection:
    """A read-only connection; for a file that is still, one that creates no other files.

    Raises JournalDamaged for an empty file with a WAL, which SQLite would delete.
    """
    if state.wal_bytes and state.size <= 1:  # SQLite takes a file of one byte for empty.
        raise JournalDamaged(f"{path} is empty, but its WAL is not")
    how = "mode=ro&immutable=1" if state.is_still else "mode=ro"
    uri = f"{path.absolute().as_uri()}?{how}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None)
    db.text_factory = shown
    db.execute("pragma query_only = 1")
    return db


def refuse_newer(path: Path) -> None:
    """Raise SchemaTooNew when a newer MQKS wrote the file. The file is only read: opening it for
    writing would change it, if only by a checkpoint at the end."""
    with closing(connect(path, FileState.of(path))) as db:
        try:
            version = db.execute("pragma user_version").fetchone()[0]
        except UNREADABLE:
            return  # SQLite starts a half-made file again, and refuses any other.
    check_version(version, path)


class DatabaseFile(Contents):
    """Made by `open`."""

    def __init__(self, path: Path, *, thorough: bool = False) -> None:
        """Without the first `refresh`."""
        if not is_file(path):
            raise no_file(path)
        super().__init__(str(path), thorough=thorough)
        self.path = path
        self._version = 0
        with self._failures():
            self._db = self._connect()

    def close(self) -> None:
        self._db.close()

    # -- the connection

    def _connect(self) -> sqlite3.Connection:
        self._before = FileState.of(self.path)
        # Before SQLite opens the file: checking for its server drops SQLite's locks.
        self._check_wal()
        db = connect(self.path, self._before)
        try:
            db.execute("select count(*) from sqlite_schema").fetchone()
            self._structure = ""
        except UNREADABLE as error:
            # With this pragma SQLite reads a file that has lost its end.
            self._structure = str(error)
            db.execute("pragma writable_schema = 1")
        except BaseException:
            db.close()
            raise
        return db

    @property
    def _has_moved(self) -> bool:
        return self._before.is_still and self._before != FileState.of(self.path)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            if is_damage(error) or self.damage:
                others = [(place, what) for place, what in self.damage if what != str(error)]
                told = "".join(f"; {place}: {what}" for place, what in others)
                raise JournalDamaged(f"{self.path} can't be read: {error}{told}") from error
            raise InspectionFailed(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("rollback")

    # -- contents

    def refresh(self) -> None:
        """Read the state again. Raises like `open`."""
        with self._failures():
            while not self._settled():
                if self._has_moved:
                    # A server has opened it.
                    self._db.close()
                    self._segments.clear()
                    self._db = self._connect()

    def _settled(self) -> bool:
        """Do one step; return whether what was read is a complete state."""
        self.damage = [*self._wal_damage]
        if self._structure:
            self.damage.append(Damage("file", self._structure))
        with self._transaction():
            facts = self._read_facts()
            if not self._structure:
                self.damage += schema_damage(self._db)
            columns = read_by(facts.schema_version)
            raw = {table: self._table(columns[table], table) for table in columns}
            rows = Rows(facts.schema_version, raw)
            if any(place == "table queue" for place, _ in self.damage):
                rows.queue_ids_end = 0  # Some rows can't be read.
            self.damage += rows.damage
            self._rows = rows.queues
            ids = self._segment_ids()
            new = [segment_id for segment_id in ids if segment_id not in self._segments]
            # A text that is not there may have been deleted meanwhile, with its segment.
            later = [
                *(i for i in new[:AT_ONCE] if not self._read_segment(i, of_now=True)),
                *new[AT_ONCE:],
            ]
        if later or self._has_moved:
            for segment_id in later:
                self._read_segment(segment_id)
            return False
        self._segments = {i: self._segments[i] for i in ids if i in self._segments}
        self.bindings = sorted(rows.bindings)
        self._results = rows.results
        self._keep_named(rows.schedules.items(), rows.batches.items())
        self.damage += rows.count_segments(ids)
        self._build(rows.queues, rows.queue_ids_end)
        sizes = [segment.size for segment in self._segments.values()]
        self.facts = facts._replace(epoch=rows.epoch, segments=len(sizes), segment_bytes=sum(sizes))
        return True

    def _check_wal(self) -> None:
        """Check the WAL, unless a server uses the file and writes it meanwhile."""
        self._wal_damage, self.torn = list[Damage](), ""
        if self._before.is_still or server_of(self.path) is not None:
            return
        its_wal = wal_path(self.path)
        finding = wal.check(its_wal)
        if finding and finding.is_torn:
            self.torn = f"{its_wal.name} {finding}"
        elif finding:
            self._wal_damage = [Damage(its_wal.name, str(finding))]

    def _read_facts(self) -> DatabaseFacts:
        version = self._version = self._number("pragma user_version")
        check_version(version, self.path)
        page_bytes = self._number("pragma page_size")
        return DatabaseFacts(
            version,
            None,
            self._number("pragma page_count") * page_bytes + size_of(texts_path(self.path)),
            FileState.of(self.path).wal_bytes,
            page_bytes,
            self._number("pragma freelist_count"),
            0,
            0,
            len(self._table("id", "damaged_segment", order="rowid")),
        )

    def _number(self, sql: str) -> int:
        return int(self._db.execute(sql).fetchone()[0])

    def _table(self, columns: str, table: str, order: str = "") -> list[tuple[Any, ...]]:
        """All rows; if pages are unreadable, those before the first and after the last of them."""
        rows: dict[tuple[Any, ...], None] = {}
        order = order or columns.partition(", ")[0]
        for direction in ("asc", "desc"):
            try:
                for row in self._db.execute(
                    f"select {columns} from {table} order by {order} {direction}"
                ):
                    if direction == "desc" and row in rows:
                        break
                    rows[row] = None
                if direction == "asc":
                    return list(rows)
            except UNREADABLE as error:
                if not is_damage(error):
                    raise
                reason = str(error)
        self.damage.append(Damage(f"table {table}", f"{reason}; {len(rows)} rows can be read"))
        return list(rows)

    # -- segments

    def _segment_ids(self) -> list[int]:
        already = len(self.damage)
        listed = [segment_id for (segment_id,) in self._table("id", "segment")]
        ids = sorted(segment_id for segment_id in listed if isinstance(segment_id, int))
        if len(ids) < len(listed):
            self.damage.append(Damage("table segment", "there are rows without an id"))
        if len(self.damage) > already:
            # Pages between two unreadable ones hold more rows: a look-up by id finds them.
            steps = zip([0, *ids], ids, strict=False)
            low, high = max(steps, key=lambda step: step[1] - step[0], default=(0, 0))
            there = range(low + 1, min(high, low + PROBED_MAX))
            ids = sorted([*ids, *filter(self._is_there, there)])
        return ids

    def _is_there(self, segment_id: int) -> bool:
        sql = "select 1 from segment where id = ?"
        try:
            return self._db.execute(sql, (segment_id,)).fetchone() is not None
        except UNREADABLE:
            return False

    def _read_segment(self, segment_id: int, *, of_now: bool = False) -> bool:
        """Store its sections, unless it was deleted meanwhile; `of_now`: it can't have been, but
        its text may have been. Return False if it must be read again, in another transaction."""
        try:
            head = self._head(segment_id)
        except UNREADABLE as error:
            if not is_damage(error):
                raise
            self._segments[segment_id] = SegmentContent(0, [], f"{error}")
            return True
        if head is None:
            if of_now:
                self._segments[segment_id] = SegmentContent(0, [], LISTED_ONLY)
            return True
        if head.damage and of_now:
            return False
        self._keep(head)
        return True

    def _head(self, segment_id: int) -> Head | None:
        """A segment with its text; None if it does not exist, or was deleted before its text could
        be read."""
        sql = f"select {segment_columns(self._version)} from segment where id = ?"
        row = self._db.execute(sql, (segment_id,)).fetchone()
        if row is None:
            return None
        _, crc, body, text_bytes, text_file = row
        body = body or b""
        if text_bytes is None:
            return head_of(segment_id, crc, body)
        try:
            text = text_of(texts_path(self.path), text_file, text_bytes)
            head = head_of(segment_id, crc, body + text)
        except TextDamaged as error:
            head = Head(segment_id, len(body), body, str(error))
        return head if not head.damage or self._is_there(segment_id) else None

    def _stored_results(self) -> Iterable[tuple[bytes, ResultRow]]:
        return self._results.items()

    # -- errors

    def errors(self, limit: int | None = 1000, before: str = "\x7f") -> list[ErrorRecord]:
        with self._failures():
            version = self._number("pragma user_version")
            rows = self._db.execute(
                f"select {loose_columns('error', version)} from error"
                " where id < ? order by id desc limit ?",
                (before, -1 if limit is None else limit),
            )
            whole, damage = errors(version, rows)
        self.damage += damage
        return whole

    def audit(self, limit: int) -> list[AuditRecord]:
        with self._failures():
            version = self._number("pragma user_version")
            if version < AUDIT_SINCE:
                return []
            columns = loose_columns("audit", version)
            sql = f"select {columns} from audit order by id desc limit ?"
            whole, damage = audit(version, self._db.execute(sql, (limit,)))
        self.damage += damage
        return whole


def is_damage(error: Exception) -> bool:
    """Whether an error means that SQLite's structure, or a row to be written, is damaged."""
    if isinstance(error, (MemoryError, UnicodeDecodeError)):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE_CODES
