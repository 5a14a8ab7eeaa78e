"""The journal in a SQLite database: one connection that writes, and two that read.

The one rule: nothing of SQLite leaves this package, least of all its errors.
"""

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import starmap
from math import inf
from pathlib import Path
from typing import Any, Final

import aiosqlite
import anyio
from anyio.to_thread import run_sync

from mqks.broker.log.pending import Entry
from mqks.errors import (
    ConfigurationError,
    DiskFull,
    JournalDamaged,
    JournalFailed,
    LowDiskSpace,
)
from mqks.files import exists, identity, is_dir
from mqks.journal.segment import checksum
from mqks.journal.sqlite import opening
from mqks.journal.sqlite.ballast import Ballast
from mqks.journal.sqlite.database_file import is_damage, wal_path
from mqks.journal.sqlite.lock import FileLock
from mqks.journal.sqlite.migrations import NEWEST, migrate
from mqks.journal.sqlite.rows import (
    Row,
    Rows,
    error_columns,
    errors,
    head_of,
    read_by,
    row_crc,
    segment_columns,
)
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.tables import INSERT_SEGMENT, PUT_META, PUT_TALLY, Tables
from mqks.journal.sqlite.texts import (
    DELETED_BYTES,
    SegmentRow,
    TextDamaged,
    Texts,
    row_of,
)
from mqks.journal.store import Damage, Head, LastWords, Metadata, NewSegment, Report, Store, shown
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
TEXT_BYTES_NOW: Final = 64 * 1024
"""Larger than any segment of `commit_now`."""
VACUUM_LOOK_S: Final = 1.0
"""How often a busy journal checks for free pages."""
DISK_FAILURES: Final = errno.EROFS, errno.EIO
"""A disk that failed, or that the system has made read-only since: no setting is wrong."""
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

    def __init__(self, path: Path, texts: Texts) -> None:
        self._path = path
        self._texts = texts
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
        sql = f"select {segment_columns(NEWEST)} from segment where id in ({marks})"
        try:
            bodies = {row[0]: self._intact(*row) for row in self._db.execute(sql, ids).fetchall()}
            return {segment_id: body for segment_id, body in bodies.items() if body is not None}
        except sqlite3.Error as error:
            # None of these is temporary, as a full disk is: readers of a WAL wait for nobody.
            name = getattr(error, "sqlite_errorname", "")
            raise JournalFailed(f"{self._path} can't be read: {error} {name}".rstrip()) from error

    def _intact(
        self, segment_id: int, crc: object, body: object, text_bytes: object, text_file: object
    ) -> bytes | None:
        """None if it was deleted meanwhile, with its text."""
        why = ""
        if isinstance(body, bytes):
            try:
                text = b"" if text_bytes is None else self._texts.text(text_file, text_bytes)
                if checksum(segment_id, body, text) == crc:
                    return body + text
            except TextDamaged as error:
                why = f": {error}"
        if text_bytes is not None:
            sql = "select 1 from segment where id = ?"
            if not self._db.execute(sql, (segment_id,)).fetchall():
                return None
        raise JournalFailed(f"segment {segment_id} of {self._path} is damaged{why}")


class SqliteStore(Store):
    """Made by `open`, which claims it."""

    def __init__(
        self,
        raw: sqlite3.Connection,
        db: aiosqlite.Connection,
        reading: Sequence[_ReadConnection],
        lock: FileLock,
        texts: Texts,
        path: Path,
        settings: Settings,
    ) -> None:
        self.name = str(path)
        self.versions = {"sqlite": sqlite3.sqlite_version}
        self.gone = ""
        if not 0 < settings.text_file_bytes_min < TEXT_BYTES_NOW:
            self.commit_now = self._commit_now
        self._raw = raw
        self._db = db
        self._thread = ThreadPoolExecutor(1, "commit")
        """Starts within 0.1 ms while the event loop is busy, one of `to_thread` within 0.3."""
        self._foreground, self._background = reading
        self._path = path
        self._lock = lock
        self._texts = texts
        self._files = [
            (settings.db_file.absolute(), "the database", identity(os.fstat(lock.database))),
            (wal_path(path), "its WAL", identity(wal_path(path).stat())),
        ]
        self._rows = Rows(NEWEST, {})
        """As they were loaded."""
        self._tables = Tables(settings.once_ids_max, settings.errors_kept_max)
        self._next_segment = 1
        self._salvages = settings.salvage
        self._has_begun = False
        self._has_failed = False
        self._begin_wal_anew = False
        """Otherwise the rest of a damaged WAL would be found again after the next commits."""
        self._checkpoints = 0
        self._checkpoint_pages = settings.wal_checkpoint_pages
        self._pages_max = settings.db_bytes_max // PAGE_SIZE
        self._reserve_pages = min(self._pages_max // 4, RESERVE_PAGES)
        self._has_reserve = True
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
        path = settings.db_file
        try:
            if is_dir(path):  # Before a lock file is created for it.
                raise ConfigurationError(f"can't open {path}: it is a directory")
            lock = FileLock(path).take()
        except OSError as error:
            if error.errno in DISK_FAILURES:
                raise JournalFailed(f"can't open {path}: {error.strerror}") from error
            why = error.strerror
            if error.errno == errno.ENOENT:
                why = f"the directory {path.resolve().parent} does not exist"
            raise ConfigurationError(f"can't open {path}: {why}") from error
        try:
            async with AsyncExitStack() as undo:
                undo.callback(lock.release)
                finding = await run_sync(opening.check, path, settings, report)
                # Shared between aiosqlite's thread and `commit_now`, never at the same time.
                raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
                raw.text_factory = shown
                db = await aiosqlite.Connection(lambda: raw, iter_chunk_size=64)
                undo.push_async_callback(db.close)
                old = await cls._prepare(db, settings)
                about = os.fstat(lock.database)
                texts = Texts(path, about, settings.text_file_bytes_min, settings.synchronous)
                reading = [
                    undo.enter_context(closing(_ReadConnection(path, texts))) for _ in range(2)
                ]
                store = cls(raw, db, reading, lock, texts, path.resolve(), settings)
                store.made = old == 0
                store.upgraded = (old, NEWEST) if 0 < old < NEWEST else None
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
    async def _prepare(db: aiosqlite.Connection, settings: Settings) -> int:
        """Return the version that the schema had."""
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
        return await migrate(db)

    async def close(self) -> None:
        # The last connection that closes checkpoints and deletes the WAL, unless it is read only.
        # After a failed sync the disk may hold an older WAL, which could reappear beside the new
        # state; another file may have the WAL's name; in doubt, nothing is changed.
        keeps_wal = self._has_failed or not self._has_begun
        if not keeps_wal:
            with suppress(JournalFailed):
                await self._count_segments()
        if self.check_files() and not keeps_wal:
            with suppress(sqlite3.Error):
                await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")
        self._background.close()
        if not (keeps_wal or self.gone):
            self._foreground.close()
        await self._db.close()
        self._thread.shutdown()
        self._foreground.close()  # A second call does nothing.
        is_certain = not (keeps_wal or self.gone) and not exists(wal_path(self._path))
        await run_sync(partial(self._texts.close, is_certain=is_certain))
        self._lock.release()

    # -- starting

    async def load(self) -> Metadata:
        with self._unreadable():
            raw = {
                table: await self._table(columns, table)
                for table, columns in read_by(NEWEST).items()
            }
        rows = self._rows = Rows(NEWEST, raw)
        self._texts.epoch = rows.epoch or ""
        try:
            found, notes = errors(NEWEST, await self._table(error_columns(NEWEST), "error"))
        except UNREADABLE as error:
            found, notes = [], [Damage("table error", str(error))]
        return Metadata(
            epoch=rows.epoch or "",
            queues=dict(rows.queues),
            bindings=rows.bindings,
            schedules=dict(rows.schedules),
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
            columns = segment_columns(NEWEST)
            async with self._db.execute(f"select {columns} from segment order by id") as cursor:
                cursor.arraysize = 16
                while found := await cursor.fetchmany():
                    ids += (row[0] for row in found)
                    if any(row[3] is not None for row in found):
                        yield await run_sync(self._heads, [*map(tuple, found)])
                    else:
                        yield [head_of(*row[:3]) for row in found]
        if aside := self._texts.foreign():
            what = f"it has texts of another database: it is called {aside.name} from now on"
            metadata.notes.append(Damage(self._texts.path.name, what))
        metadata.damage += self._rows.count_segments(ids)
        metadata.next_segment = self._rows.tallies["segment"].next

    def _heads(self, rows: Sequence[Row]) -> Sequence[Head]:
        return [self._head(*row) for row in rows]

    def _head(
        self, segment_id: int, crc: object, body: object, text_bytes: object, text_file: object
    ) -> Head:
        if text_bytes is None or not isinstance(body, bytes):
            return head_of(segment_id, crc, body)
        damage = self._texts.damage(segment_id, crc, body, text_bytes, text_file)
        size = text_bytes if isinstance(text_bytes, int) else 0
        return Head(segment_id, len(body) + size, body, damage)

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
            # First the files: a row that is set aside without its text may find none any more.
            await run_sync(self._texts.set_aside, damaged)
            await run_sync(self._tables.salvage, self._raw, self._rows, metadata, damaged)
        except (sqlite3.Error, OSError) as error:
            raise JournalFailed(f"the salvaged data can't be written: {error}") from error

    async def begin(self) -> None:
        self._tables.restored(self._rows)
        try:
            if self._salvages:
                await run_sync(self._texts.set_aside, ())
            else:
                columns = "coalesce(text_file, id)"
                sql = f"select {columns} from damaged_segment where text_bytes is not null"
                aside = {row[0] for row in await self._db.execute_fetchall(sql)}
                await run_sync(self._texts.keep, aside)
            await run_sync(self._texts.begin, self._rows.epoch or "")
        except OSError as error:
            raise JournalFailed(f"{self._texts.path} can't be used: {error.strerror}") from error
        self._rows = Rows(NEWEST, {})
        self._next_segment = self._tables.tallies["segment"].next
        self._has_begun = True
        await self._limit_pages(reserve=True)
        if self._begin_wal_anew:
            with self._failures():
                await self._count_segments()
                await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")

    def announce(self, url: str, far_url: str) -> None:
        self._lock.tell(url)

    # -- its files

    def check_files(self) -> str:
        """Check that the names still lead to the open files; otherwise writes would be lost."""
        gone = next(filter(None, starmap(_moved, [*self._files, *self._texts.watched])), "")
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
            "db_bytes": _size(self._path) + self._texts.bytes,
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
        is_alone = len(segments) == 1 and not (drop or (entry and entry.has_metadata))
        if is_alone and not self._texts.takes(segments[0]):
            with self._failures():
                row = row_of(segments[0])
                await self._db.execute(INSERT_SEGMENT, row)
            self._committed(row)
        else:
            write = partial(self._write, segments, next_id, entry, drop, last_words)
            for row in await asyncio.get_running_loop().run_in_executor(self._thread, write):
                self._committed(row)
        if entry is not None:
            self._wal_pages += len(entry.queues) + len(entry.errors) + len(entry.schedules)
        if drop:
            self._wal_pages += 2 * len(drop)
            self._freed = True

    def _write(
        self,
        segments: Sequence[NewSegment],
        next_id: int,
        entry: Entry | None,
        drop: Sequence[int],
        last_words: Iterable[LastWords],
    ) -> list[SegmentRow]:
        """In a thread."""
        with self._failures():
            self._check_size(segments)
        try:
            rows = self._texts.rows(segments)
        except JournalFailed:
            self._has_failed = True
            raise
        try:
            self._tables.write(self._raw, rows, next_id, entry, drop, last_words)
        except sqlite3.Error as error:
            failure = self._failure(error)
            if isinstance(failure, DiskFull):
                self._texts.undo(rows)
            raise failure from error
        self._texts.dropped(drop)
        with suppress(sqlite3.Error):  # What was committed is committed.
            self._limit_pages_now()
        return rows

    def _commit_now(self, segment: NewSegment, once: list[bytes]) -> None:
        """Only while nothing else uses the writing connection."""
        self._check_floor((segment,))
        row = row_of(segment)
        with self._failures():
            if once:
                self._tables.write(self._raw, [row], row.id + 1, Entry(once=once))
            else:
                self._raw.execute(INSERT_SEGMENT, row)
        self._committed(row)

    def _committed(self, row: SegmentRow) -> None:
        self._next_segment = row.id + 1
        self._wal_pages += len(row.body) / PAGE_SIZE + SMALL_COMMIT_PAGES

    def _check_size(self, segments: Sequence[NewSegment]) -> None:
        """Raise DiskFull for texts that must wait: SQLite counts only its own pages."""
        if not (new := sum(each.size for each in segments if self._texts.takes(each))):
            return
        if self._texts.held_bytes >= self._wal_bytes_max:
            raise DiskFull(
                f"another process reads {self.name} for long: {self._texts.held_bytes} bytes of "
                "deleted texts wait for it"
            )
        if self._pages_max:
            ((pages,),) = self._raw.execute("pragma page_count")
            ((free,),) = self._raw.execute("pragma freelist_count")
            used = (pages - free) * PAGE_SIZE + self._texts.bytes + new
            if used > self._pages_left * PAGE_SIZE:
                raise DiskFull(f"{self.name} is full: db_bytes_max is reached")

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

    async def become(self, epoch: str) -> None:
        with self._failures():
            await self._db.execute(PUT_META, ("epoch", epoch, row_crc("meta", "epoch", epoch)))

    async def skip_to(self, segment_id: int, queue_id: int = 1) -> None:
        skip = self._tables.skip_to
        with self._failures():
            await run_sync(skip, self._raw, self._next_segment, segment_id, queue_id)
        self._next_segment = segment_id

    # -- maintenance

    @property
    def overdue(self) -> bool:
        return self._folds or self._texts.is_due

    @property
    def _folds(self) -> bool:
        """Whether a checkpoint is due."""
        return (
            self._wal_pages >= self._checkpoint_pages
            or bool(self.gone and self._wal_pages)
            or time.monotonic() > self._fold_again_s
            or self._texts_wait(DELETED_BYTES)
        )

    def _texts_wait(self, at_least: int) -> bool:
        """Whether a checkpoint that readers don't cut short lets so many bytes be deleted."""
        return self._texts.unsynced_bytes >= at_least and self._fold_again_s == inf

    @property
    def _is_worth_folding(self) -> bool:
        """The same while there is nothing else to do."""
        return self._wal_pages >= WAL_PAGES_IDLE or self._texts_wait(1)

    async def tidy(self, *, idle: bool) -> bool:
        with self._failures():
            if self._texts.is_due:
                await run_sync(self._delete_texts)
            if idle and self._texts.has_free:
                await run_sync(self._texts.release)
            if self._folds:
                if await self._has_room_to_fold():
                    await self._checkpoint()
                elif await self._vacuum(0):
                    return True  # What is cut off at the end of the database needs no space.
                else:
                    raise DiskFull(f"no space to copy the WAL into {self.name}")
            elif idle and not self._freed and self._is_worth_folding:
                await self._checkpoint()
                return True
            looks = self._freed and (idle or time.monotonic() > self._looked_s + VACUUM_LOOK_S)
            if looks and await self._vacuum(FREE_PAGES_KEPT if idle else FREE_PAGES_BUSY):
                return True
            return self._texts.is_due or (idle and self._texts_wait(1))

    def _delete_texts(self) -> None:
        self._texts.delete()
        self._limit_pages_now()

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
            ((held, *_),) = await self._db.execute_fetchall("pragma wal_checkpoint(truncate)")
            if not held:
                self._texts.synced()
            return
        ((_, pages, folded),) = await self._db.execute_fetchall("pragma wal_checkpoint(passive)")
        if folded < pages:
            self._fold_again_s = time.monotonic() + FOLD_AGAIN_S
        else:
            self._texts.synced()
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
        # With a limit, files that are kept would take the space of messages.
        self._texts.recycles = not self._pages_max
        await self._limit_pages(reserve=True)
        return True

    async def give_up_reserves(self) -> None:
        self._ballast.give_up()
        self._texts.recycles = False
        await run_sync(self._texts.release)
        await self._limit_pages(reserve=False)

    async def _limit_pages(self, *, reserve: bool) -> None:
        self._has_reserve = reserve
        with self._failures():
            await run_sync(self._limit_pages_now)

    def _limit_pages_now(self) -> None:
        """What the texts take is not left for pages."""
        if self._pages_max:
            pages = self._pages_left - self._texts.bytes // PAGE_SIZE
            self._raw.execute(f"pragma max_page_count = {max(1, pages)}").fetchall()

    @property
    def _pages_left(self) -> int:
        return self._pages_max - (self._reserve_pages if self._has_reserve else 0)

    async def has_room(self) -> bool:
        with self._failures():
            if self._wal_is_held:
                self._wal_is_held, self._restart_pages = False, 0
                await self._checkpoint()
            if self._texts.held_bytes >= self._wal_bytes_max:
                await run_sync(self._delete_texts)
                if self._texts.held_bytes >= self._wal_bytes_max:
                    return False
            # The ballast will need its part again, and so does the next checkpoint.
            wanted = self._free_bytes_min + await self._growth()
            if wanted and self._free_bytes() < wanted + self._ballast_bytes:
                return False
            if not self._pages_max:
                return True
            pages = await self._number("pragma page_count")
            free = await self._number("pragma freelist_count")
            wanted = min(2 * self._room_bytes // PAGE_SIZE, self._pages_max // 8)
            used = pages - free + self._texts.bytes // PAGE_SIZE
            return used + self._reserve_pages + wanted < self._pages_max

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
