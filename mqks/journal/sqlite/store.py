"""The journal in a SQLite database: one connection that writes, and two that read.

The one rule: nothing of SQLite leaves this package, least of all its errors.
"""

import os
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from itertools import starmap
from math import inf
from pathlib import Path
from typing import Any, Final

import aiosqlite
import anyio
from anyio.to_thread import run_sync

from mqks.broker.pending import Entry
from mqks.errors import (
    ConfigurationError,
    DiskFull,
    JournalDamaged,
    JournalFailed,
    LowDiskSpace,
)
from mqks.files import identity
from mqks.journal.segment import checksum
from mqks.journal.sqlite import opening
from mqks.journal.sqlite.ballast import Ballast
from mqks.journal.sqlite.database_file import is_damage, wal_path
from mqks.journal.sqlite.lock import FileLock
from mqks.journal.sqlite.metadata import INSERT_SEGMENT, PUT_TALLY, Tables, row_of
from mqks.journal.sqlite.migrations import NEWEST, migrate
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.tables import Row, Rows, error_columns, errors, head_of, read_by
from mqks.journal.store import Damage, Head, LastWords, Metadata, NewSegment, Report, shown
from mqks.settings import Settings

PAGE_SIZE: Final = 4096
RESERVE_PAGES: Final = 1024
"""Pages reserved for acks, in a database with a size limit."""
VACUUM_PAGES: Final = 1000
"""Free pages returned to the file system in one step."""
FREE_PAGES_KEPT: Final = 256
"""Free pages that an idle database keeps: 1 MiB."""
FREE_PAGES_BUSY: Final = 16384
"""Free pages that a busy database keeps: 64 MiB."""
SMALL_COMMIT_PAGES: Final = 0.25
"""Pages that a commit adds to the next checkpoint besides its body: consecutive small commits write
the same page to the WAL several times, but a checkpoint copies it once. So 250 pages are some 900
commits of one small message, and 4 MiB of WAL."""
WAL_PAGES_IDLE: Final = 16
"""An idle journal checkpoints a WAL of this many pages."""
WAL_PAGES_RESTART: Final = 4096
"""A WAL of this many pages (16 MiB) is reused from its start, even if readers must be awaited."""
WAL_WAIT_MS: Final = 50
BUSY_WAIT_MS: Final = 100
WAL_BYTES_KEPT: Final = 4 * 1024 * 1024
"""The WAL file is truncated to this size when it is reused from its start."""
FOLD_AGAIN_S: Final = 1.0
"""Time from a checkpoint that readers cut short to the next one."""
VACUUM_LOOK_S: Final = 1.0
"""How often a busy journal checks for free pages."""
FULL_CODES: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
"""Temporary failures; any other ends the process."""


def _moved(path: Path, what: str, was: tuple[int, int]) -> str:
    """What has happened to a file; empty if nothing."""
    try:
        now = identity(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return f"{what} was deleted or moved"
    except OSError as error:
        return f"{what} can't be checked: {error.strerror}"
    return "" if now == was else f"{what} was replaced by another file"


class _ReadConnection:
    """A read-only connection, used by one thread at a time. SQLite opens its descriptors at the
    first read: so it reads now, while there are some."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._limiter = anyio.CapacityLimiter(1)
        uri = f"{path.absolute().as_uri()}?mode=ro"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        self._db.execute("select 1 from sqlite_schema").fetchall()

    def close(self) -> None:
        self._db.close()

    async def bodies(self, ids: Sequence[int]) -> dict[int, bytes]:
        return await run_sync(self._bodies, ids, limiter=self._limiter)

    def _bodies(self, ids: Sequence[int]) -> dict[int, bytes]:
        marks = ",".join("?" * len(ids))
        sql = f"select id, crc, body from segment where id in ({marks})"
        try:
            return {row[0]: self._intact(*row) for row in self._db.execute(sql, ids)}
        except sqlite3.Error as error:
            # None of these is temporary, as a full disk is: readers of a WAL wait for nobody.
            name = getattr(error, "sqlite_errorname", "")
            raise JournalFailed(f"{self._path} can't be read: {error} {name}".rstrip()) from error

    def _intact(self, segment_id: int, crc: object, body: object) -> bytes:
        if not isinstance(body, bytes) or checksum(segment_id, body) != crc:
            raise JournalFailed(f"segment {segment_id} of {self._path} is damaged")
        return body


class SqliteStore:
    """Made by `open`. `Store` describes its methods."""

    def __init__(
        self,
        raw: sqlite3.Connection,
        db: aiosqlite.Connection,
        reading: Sequence[_ReadConnection],
        lock: FileLock,
        path: Path,
        settings: Settings,
    ) -> None:
        self.name = str(path)
        self.versions = {"sqlite": sqlite3.sqlite_version}
        self.torn = ""
        self.gone = ""
        self.commit_now: Callable[[NewSegment], None] | None = self._commit_now
        self._raw = raw
        self._db = db
        self._foreground, self._background = reading
        self._path = path
        self._lock = lock
        self._files = [
            (Path(settings.db).absolute(), "the database", identity(os.fstat(lock.database))),
            (wal_path(path), "its WAL", identity(wal_path(path).stat())),
        ]
        self._rows = Rows(NEWEST, {})
        """As they were loaded."""
        self._tables = Tables(settings.once_ids_max, settings.errors_kept_max)
        self._next_segment = 1
        self._has_begun = False
        self._has_failed = False
        self._begin_wal_anew = False
        """Otherwise the rest of a damaged WAL would be found again after the next commits."""
        self._checkpoints = 0
        self._checkpoint_pages = settings.wal_checkpoint_pages
        self._pages_max = settings.db_bytes_max // PAGE_SIZE
        self._reserve_pages = min(self._pages_max // 4, RESERVE_PAGES)
        self._room_bytes = settings.batch_bytes_max
        self._wal_pages = 0.0
        """Approximate number of pages that a checkpoint would write."""
        self._fold_again_s = inf
        """When to repeat a checkpoint that readers cut short, even if nothing more is written."""
        self._wal_bytes_max = settings.wal_bytes_max
        self._wal_is_held = False
        self._restart_pages = WAL_PAGES_RESTART
        self._free_bytes_min = settings.disk_free_bytes_min
        self._ballast = Ballast(path, settings.ballast_bytes)
        self._ballast_bytes = settings.ballast_bytes
        self._looked_s = 0.0
        self._freed = True
        """Whether pages may have become free since the last check."""

    # -- opening and closing

    @classmethod
    async def open(cls, settings: Settings, report: Report) -> "SqliteStore":
        """Take the lock, check the file, open it and apply migrations.

        Raises DatabaseLocked, SchemaTooNew, JournalDamaged, JournalFailed, ConfigurationError.
        """
        path = Path(settings.db)
        if path.is_dir():  # Before a lock file is created for it.
            raise ConfigurationError(f"can't open {path}: it is a directory")
        try:
            lock = FileLock(path).take()
        except OSError as error:
            why = error.strerror
            if not path.parent.exists():
                why = f"the directory {path.parent} does not exist"
            raise ConfigurationError(f"can't open {path}: {why}") from error
        try:
            async with AsyncExitStack() as undo:
                undo.callback(lock.release)
                finding = await run_sync(opening.look, path, settings, report)
                # Shared between aiosqlite's thread and `commit_now`, never at the same time.
                raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                raw.text_factory = shown
                db = await aiosqlite.Connection(lambda: raw, iter_chunk_size=64)
                undo.push_async_callback(db.close)
                await cls._prepare(db, settings)
                reading = [undo.enter_context(closing(_ReadConnection(path))) for _ in range(2)]
                store = cls(raw, db, reading, lock, path.resolve(), settings)
                store._begin_wal_anew = finding is not None
                if finding and (finding.is_torn or settings.synchronous != "full"):
                    store.torn = f"{wal_path(path).name} {finding}"
                await store._limit_pages(reserve=True)
                undo.pop_all()
        except UNREADABLE as error:
            # The schema has been checked, so a statement that fails means damage.
            if is_damage(error) or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
                raise JournalDamaged(f"{path} is damaged, or is not a database: {error}") from error
            raise ConfigurationError(f"can't open {path}: {error}") from error
        return store

    @staticmethod
    async def _prepare(db: aiosqlite.Connection, settings: Settings) -> None:
        # Page size and auto_vacuum take effect only before the first table and before WAL mode.
        for pragma in (
            f"page_size = {PAGE_SIZE}",
            "auto_vacuum = incremental",
            "journal_mode = wal",
            f"synchronous = {settings.synchronous}",
            # SQLite's own checkpoints hide their failures: `_checkpoint` does them.
            "wal_autocheckpoint = 0",
            f"journal_size_limit = {WAL_BYTES_KEPT}",
            # Debian's SQLite overwrites what it frees unless told not to: 1.7 times the writes.
            "secure_delete = off",
            "cache_size = -16384",
            f"busy_timeout = {BUSY_WAIT_MS}",
        ):
            await db.execute_fetchall(f"pragma {pragma}")
        await migrate(db)

    async def close(self) -> None:
        # The last connection that closes checkpoints and deletes the WAL, unless it is read only.
        # After a failed sync the disk may hold an older WAL, which could reappear beside the new
        # state; another file may have the WAL's name; in doubt, nothing is changed.
        keeps_wal = self._has_failed or not self._has_begun
        if not keeps_wal:
            with suppress(JournalFailed):
                await self._count_segments()
        if self.look() and not keeps_wal:
            with suppress(sqlite3.Error):
                await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")
        self._background.close()
        if not (keeps_wal or self.gone):
            self._foreground.close()
        await self._db.close()
        self._foreground.close()  # A second call does nothing.
        self._lock.release()

    # -- starting

    async def load(self) -> Metadata:
        with self._unreadable():
            raw = {
                table: await self._table(columns, table)
                for table, columns in read_by(NEWEST).items()
            }
        rows = self._rows = Rows(NEWEST, raw)
        try:
            found, notes = errors(NEWEST, await self._table(error_columns(NEWEST), "error"))
        except UNREADABLE as error:
            found, notes = [], [Damage("table error", str(error))]
        return Metadata(
            epoch=rows.epoch or "",
            queues=dict(rows.queues),
            bindings=rows.bindings,
            once=[each for _, _, ids in rows.once for each in ids.split(b"\n")],
            errors=found,
            next_queue_id=rows.tallies["queue"].next,
            queue_ids_end=rows.queue_ids_end,
            damage=[*rows.damage],
            notes=notes,
        )

    async def _table(self, columns: str, table: str) -> list[Row]:
        sql = f"select {columns} from {table} order by 1"
        return [tuple(row) for row in await self._db.execute_fetchall(sql)]

    async def segments(self, metadata: Metadata) -> AsyncIterator[Sequence[Head]]:
        ids: list[int] = []
        with self._unreadable():
            async with self._db.execute(
                "select id, crc, cast(body as blob) from segment order by id"
            ) as cursor:
                cursor.arraysize = 16
                while found := await cursor.fetchmany():
                    ids += (row[0] for row in found)
                    yield [head_of(*row) for row in found]
        metadata.damage += self._rows.count_segments(ids)
        metadata.next_segment = self._rows.tallies["segment"].next

    @contextmanager
    def _unreadable(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise JournalDamaged(
                f"{self.name} can't be read, so it can't be salvaged: {error}"
            ) from error

    async def salvage(self, metadata: Metadata, damaged: Sequence[int]) -> None:
        try:
            await run_sync(self._tables.salvage, self._raw, self._rows, metadata, damaged)
        except sqlite3.Error as error:
            raise JournalFailed(f"the salvaged data can't be written: {error}") from error

    async def begin(self) -> None:
        self._tables.restored(self._rows)
        self._rows = Rows(NEWEST, {})
        self._next_segment = self._tables.tallies["segment"].next
        self._has_begun = True
        if self._begin_wal_anew:
            with self._failures():
                await self._count_segments()
                await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")

    def announce(self, url: str) -> None:
        self._lock.tell(url)

    # -- its files

    def look(self) -> str:
        """Check that the names still lead to the open files; otherwise writes would be lost."""
        gone = next(filter(None, starmap(_moved, self._files)), "")
        if gone and not self.gone:
            self._wal_pages = max(self._wal_pages, 1.0)
        self.gone = gone
        return gone

    def renew_claim(self) -> str:
        """The lock on the database has excluded other servers meanwhile."""
        if self._lock.is_there:
            return ""
        return "recreated" if self._lock.make_again() else "can't be recreated"

    def facts(self) -> dict[str, Any]:
        """Facts of the open file, whose name may lead elsewhere. Raises OSError."""
        return {
            "db_bytes": _size(self._path),
            "wal_bytes": _size(wal_path(self._path)),
            "disk_free_bytes": self._disk_free_bytes(),
            "checkpoints": self._checkpoints,
        }

    def _disk_free_bytes(self) -> int:
        disk = os.fstatvfs(self._lock.database)
        return disk.f_bavail * disk.f_frsize

    # -- writing

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._failure(error) from error

    def _failure(self, error: sqlite3.Error) -> DiskFull | JournalFailed:
        """Distinguish a full disk, which is temporary, from other failures."""
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in FULL_CODES:
            return DiskFull(f"the journal can't be written: {error}")
        self._has_failed = True
        name = getattr(error, "sqlite_errorname", "")
        return JournalFailed(f"the journal can't be written: {error} {name}")

    async def commit(
        self,
        segments: Sequence[NewSegment],
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        next_id = segments[-1].id + 1 if segments else self._next_segment
        if not drop:
            self._check_floor(segments)
        with self._failures():
            if len(segments) == 1 and not (drop or (entry and entry.has_metadata)):
                await self._db.execute(INSERT_SEGMENT, row_of(segments[0]))
            else:
                write = self._tables.write
                await run_sync(write, self._raw, segments, next_id, entry, drop, last_words)
        for segment in segments:
            self._committed(segment)
        if entry is not None:
            self._wal_pages += len(entry.queues) + len(entry.errors)
        if drop:
            self._wal_pages += 2 * len(drop)
            self._freed = True

    def _commit_now(self, segment: NewSegment) -> None:
        """Only while nothing else uses the writing connection."""
        self._check_floor((segment,))
        try:
            self._raw.execute(INSERT_SEGMENT, row_of(segment))
        except sqlite3.Error as error:
            raise self._failure(error) from error
        self._committed(segment)

    def _committed(self, segment: NewSegment) -> None:
        self._next_segment = segment.id + 1
        self._wal_pages += segment.size / PAGE_SIZE + SMALL_COMMIT_PAGES

    def _check_floor(self, segments: Sequence[NewSegment]) -> None:
        """Raise LowDiskSpace for messages if the disk has less free space than required; 1 µs."""
        if self._free_bytes_min and any(segment.texts for segment in segments):
            self.check_free_space()

    def check_free_space(self) -> None:
        """Raise LowDiskSpace."""
        least = self._free_bytes_min
        if least and (free := self._free_bytes()) < least:
            raise LowDiskSpace(
                f"{free} bytes are free on the disk of {self.name}, and disk_free_bytes_min is "
                f"{least}"
            )

    def _free_bytes(self) -> int:
        try:
            return self._disk_free_bytes()
        except OSError as error:
            raise JournalFailed(f"the disk of {self.name} can't be checked: {error}") from error

    # -- maintenance

    @property
    def overdue(self) -> bool:
        return (
            self._wal_pages >= self._checkpoint_pages
            or bool(self.gone and self._wal_pages)
            or time.monotonic() > self._fold_again_s
        )

    async def tidy(self, *, idle: bool) -> bool:
        with self._failures():
            if self.overdue:
                if await self._has_room_to_fold():
                    await self._checkpoint()
                elif await self._vacuum(0):
                    return True  # What is cut off at the end of the database needs no space.
                else:
                    raise DiskFull(f"no space to copy the WAL into {self.name}")
            elif idle and not self._freed and self._wal_pages >= WAL_PAGES_IDLE:
                await self._checkpoint()
                return True
            if self._freed and (idle or time.monotonic() > self._looked_s + VACUUM_LOOK_S):
                return await self._vacuum(FREE_PAGES_KEPT if idle else FREE_PAGES_BUSY)
            return False

    async def shrink(self) -> None:
        """Return all free pages to the file system. Only while nothing else is written."""
        with self._failures():
            while await self._vacuum(0):
                pass

    async def _vacuum(self, keep: int) -> bool:
        self._looked_s = time.monotonic()
        surplus = await self._number("pragma freelist_count") - keep
        if surplus <= 0:
            self._freed = False
            return False
        # `execute` would free only one page: the statement must be stepped to its end.
        await self._db.executescript(f"pragma incremental_vacuum({min(surplus, VACUUM_PAGES)})")
        self._wal_pages += self._checkpoint_pages
        return True

    async def _checkpoint(self) -> None:
        """Copy the WAL into the database file, as far as readers allow. The WAL file keeps its
        size: overwriting is synced in 190 µs, appending in 300.

        SQLite's automatic checkpoint would run within a commit and delay its confirms, and would
        hide a failed fsync.
        """
        await self._count_segments()
        self._wal_pages = 0.0
        self._fold_again_s = inf
        self._checkpoints += 1
        if self.gone:
            # The database must be complete without its WAL, since a WAL left beside another
            # database would be taken for that one's.
            await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")
            return
        ((_, pages, folded),) = await self._db.execute_fetchall("pragma wal_checkpoint(passive)")
        if folded < pages:
            self._fold_again_s = time.monotonic() + FOLD_AGAIN_S
        if pages < min(self._restart_pages, self._wal_bytes_max // PAGE_SIZE):
            return
        # Overlapping readers prevent the WAL from being reused: wait for the current ones.
        await self._db.execute_fetchall(f"pragma busy_timeout = {WAL_WAIT_MS}")
        self._checkpoints += 1
        ((held, pages, _),) = await self._db.execute_fetchall("pragma wal_checkpoint(restart)")
        await self._db.execute_fetchall(f"pragma busy_timeout = {BUSY_WAIT_MS}")
        # The wait must not repeat while one of them stays long.
        self._restart_pages = pages + WAL_PAGES_RESTART if held else WAL_PAGES_RESTART
        self._wal_is_held = bool(held) and pages * PAGE_SIZE >= self._wal_bytes_max
        if self._wal_is_held:
            raise DiskFull(f"another process reads {self.name} for long: the WAL has {pages} pages")

    async def _has_room_to_fold(self) -> bool:
        """Whether a checkpoint succeeds: one that does not takes the last space for nothing."""
        growth = 0 if self.gone else await self._growth()
        return not growth or growth <= self._free_bytes()

    async def _growth(self) -> int:
        """By how many bytes a checkpoint makes the database file longer."""
        pages = await self._number("pragma page_count")
        return max(0, pages * PAGE_SIZE - _size(self._path))

    async def _count_segments(self) -> None:
        """Write the tally of segments before a checkpoint, so that a page lost later is detected.
        Segments after it are in the WAL, where each frame has a checksum."""
        tally = self._tables.segments(self._next_segment)
        if tally != self._tables.tallies["segment"]:
            # On a full disk the checkpoint is more important.
            with suppress(DiskFull), self._failures():
                await self._db.execute(PUT_TALLY, tally.row("segment"))
                self._tables.tallies["segment"] = tally

    # -- space

    async def hold_reserves(self) -> bool:
        """The ballast on the disk, and a part of a database with a size limit."""
        if not self._ballast.fill():
            return False
        await self._limit_pages(reserve=True)
        return True

    async def give_up_reserves(self) -> None:
        self._ballast.give_up()
        await self._limit_pages(reserve=False)

    async def _limit_pages(self, *, reserve: bool) -> None:
        if self._pages_max:
            pages = self._pages_max - (self._reserve_pages if reserve else 0)
            with self._failures():
                await self._db.execute_fetchall(f"pragma max_page_count = {max(1, pages)}")

    async def has_room(self) -> bool:
        with self._failures():
            if self._wal_is_held:
                self._wal_is_held, self._restart_pages = False, 0
                await self._checkpoint()
            # The ballast will need its part again, and so does the next checkpoint.
            wanted = self._free_bytes_min + await self._growth()
            if wanted and self._free_bytes() < wanted + self._ballast_bytes:
                return False
            if not self._pages_max:
                return True
            pages = await self._number("pragma page_count")
            free = await self._number("pragma freelist_count")
            wanted = min(2 * self._room_bytes // PAGE_SIZE, self._pages_max // 8)
            return pages - free + self._reserve_pages + wanted < self._pages_max

    async def _number(self, sql: str) -> int:
        ((number,),) = await self._db.execute_fetchall(sql)
        return int(number)

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        return await (self._background if background else self._foreground).bodies(ids)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
