"""The journal in a SQLite database: one connection that writes, and two that read.

The one rule: nothing of SQLite leaves this package, least of all its errors.
"""

import asyncio
import errno
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Final, TypeVar

import aiosqlite
from anyio.to_thread import run_sync

from mqks.broker.spine.log.pending import Entry
from mqks.errors import ConfigurationError, DiskFull, JournalDamaged, JournalFailed
from mqks.files import exists, identity, is_dir
from mqks.journal.segment import NewSegment
from mqks.journal.sqlite import opening
from mqks.journal.sqlite.ballast import Ballast
from mqks.journal.sqlite.commits import PAGE_SIZE, free_bytes
from mqks.journal.sqlite.database_file import is_damage, wal_path
from mqks.journal.sqlite.lock import FileLock
from mqks.journal.sqlite.migrations import NEWEST, migrate
from mqks.journal.sqlite.reading import ReadConnection
from mqks.journal.sqlite.rows import (
    Row,
    Rows,
    audit,
    errors,
    head_of,
    loose_columns,
    read_by,
    row_crc,
    segment_columns,
)
from mqks.journal.sqlite.space import (
    BUSY_WAIT_MS,
    WAL_BYTES_KEPT,
    DatabaseSpace,
)
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.tables import INSERT_SEGMENT, PUT_META
from mqks.journal.sqlite.texts import SegmentRow, Texts
from mqks.journal.store import Damage, Head, LastWords, Metadata, Report, shown
from mqks.settings import Settings

T = TypeVar("T")
TEXT_BYTES_NOW: Final = 64 * 1024
"""Larger than any segment of `commit_now`."""
DISK_FAILURES: Final = errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT
"""A disk that failed, is full, or that the system has made read-only since: no setting is wrong."""
START_BYTES: Final = 1024 * 1024
"""A start writes less."""


def _moved(path: Path, what: str, was: tuple[int, int]) -> str:
    """What has happened to a file; empty if nothing."""
    try:
        now = identity(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return f"{what} was deleted or moved"
    except OSError as error:
        return f"{what} can't be checked: {error.strerror}"
    return "" if now == was else f"{what} was replaced by another file"


class SqliteStore(DatabaseSpace):
    """Made by `open`, which claims it."""

    def __init__(
        self,
        raw: sqlite3.Connection,
        db: aiosqlite.Connection,
        reading: Sequence[ReadConnection],
        lock: FileLock,
        texts: Texts,
        path: Path,
        settings: Settings,
    ) -> None:
        super().__init__(raw, db, lock, texts, path, settings)
        self.versions = {"sqlite": sqlite3.sqlite_version}
        if not 0 < settings.text_file_bytes_min < TEXT_BYTES_NOW:
            self.commit_now = self._commit_now
        self._thread = ThreadPoolExecutor(1, "commit")
        """Starts within 0.1 ms while the event loop is busy, one of `to_thread` within 0.3."""
        self._foreground, self._background = reading
        self._files = [
            (settings.db_file.absolute(), "the database", identity(os.fstat(lock.database))),
            (wal_path(path), "its WAL", identity(wal_path(path).stat())),
        ]
        self._rows = Rows(NEWEST, {})
        """As they were loaded."""
        self._salvages = settings.salvage
        self._has_begun = False
        self._begin_wal_anew = False
        """Otherwise the rest of a damaged WAL would be found again after the next commits."""

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
                if free_bytes(lock.database) < START_BYTES:
                    # A server that was killed or stopped on a full disk may have left it.
                    Ballast(path.resolve(), 0).give_up()
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
                    undo.enter_context(closing(ReadConnection(path, texts))) for _ in range(2)
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
            is_full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
            kind = JournalFailed if is_full else ConfigurationError
            raise kind(f"can't open {path}: {error}") from error
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
        failed, notes = await self._loose("error", errors)
        records, more = await self._loose("audit", audit)
        return Metadata(
            epoch=rows.epoch or "",
            queues=dict(rows.queues),
            bindings=rows.bindings,
            schedules=dict(rows.schedules),
            results=dict(rows.results),
            batches=dict(rows.batches),
            once=[each for _, _, ids in rows.once for each in ids.split(b"\n")],
            errors=failed,
            audit=records,
            next_queue_id=rows.tallies["queue"].next,
            queue_ids_end=rows.queue_ids_end,
            damage=[*rows.damage],
            notes=notes + more,
        )

    async def _loose(
        self, table: str, sift: Callable[[int, list[Row]], tuple[list[T], list[Damage]]]
    ) -> tuple[list[T], list[Damage]]:
        try:
            return sift(NEWEST, await self._table(loose_columns(table, NEWEST), table))
        except UNREADABLE as error:
            return [], [Damage(f"table {table}", str(error))]

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

    # -- writing

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
                row = SegmentRow(*segments[0].whole())
                await self._db.execute(INSERT_SEGMENT, row)
            self._committed(row)
        else:
            write = partial(self._write, segments, next_id, entry, drop, last_words)
            for row in await asyncio.get_running_loop().run_in_executor(self._thread, write):
                self._committed(row)
        if entry is not None:
            named = entry.schedules, entry.results, entry.batches
            rows = entry.queues, entry.errors, entry.audit, *named
            self._wal_pages += sum(map(len, rows))
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

    async def become(self, epoch: str) -> None:
        with self._failures():
            await self._db.execute(PUT_META, ("epoch", epoch, row_crc("meta", "epoch", epoch)))

    async def skip_to(self, segment_id: int, queue_id: int = 1) -> None:
        skip = self._tables.skip_to
        with self._failures():
            await run_sync(skip, self._raw, self._next_segment, segment_id, queue_id)
        self._next_segment = segment_id

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        return await (self._background if background else self._foreground).bodies(ids)
