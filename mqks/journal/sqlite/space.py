"""The space that a SQLite database takes: its WAL, its free pages, and what is reserved.

The one rule: what frees space finds the space that it needs.
"""

import sqlite3
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, Final

import aiosqlite
from anyio.to_thread import run_sync

from mqks.errors import DiskFull
from mqks.journal.sqlite.ballast import Ballast
from mqks.journal.sqlite.commits import PAGE_SIZE, SmallCommits
from mqks.journal.sqlite.database_file import wal_path
from mqks.journal.sqlite.lock import FileLock
from mqks.journal.sqlite.tables import PUT_TALLY
from mqks.journal.sqlite.texts import Texts
from mqks.settings import Settings

RESERVE_PAGES: Final = 1024
"""Pages reserved for acks, in a database with a size limit."""
VACUUM_PAGES: Final = 1000
"""Free pages returned to the file system in one step."""
FREE_PAGES_KEPT: Final = 256
"""Free pages that an idle database keeps: 1 MiB."""
FREE_PAGES_BUSY: Final = 16384
"""Free pages that a busy database keeps: 64 MiB."""
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


class DatabaseSpace(SmallCommits):
    """What `SqliteStore` is built on. It knows the sizes of what is written, and nothing else."""

    def __init__(
        self,
        raw: sqlite3.Connection,
        db: aiosqlite.Connection,
        lock: FileLock,
        texts: Texts,
        path: Path,
        settings: Settings,
    ) -> None:
        super().__init__(raw, lock, texts, path, settings)
        self._db = db
        self._path = path
        self._checkpoints = 0
        self._pages_max = settings.db_bytes_max // PAGE_SIZE
        self._reserve_pages = min(self._pages_max // 4, RESERVE_PAGES)
        self._has_reserve = True
        self._room_bytes = settings.batch_bytes_max
        self._wal_bytes_max = settings.wal_bytes_max
        self._wal_is_held = False
        self._restart_pages = WAL_PAGES_RESTART
        self._ballast = Ballast(path, settings.ballast_bytes)
        self._ballast_bytes = settings.ballast_bytes
        self._looked_s = 0.0
        self._freed = True
        """Whether pages may have become free since the last check."""

    # -- the disk

    def facts(self) -> dict[str, Any]:
        """Facts of the open file, whose name may lead elsewhere. Raises OSError."""
        return {
            "db_bytes": _size(self._path) + self._texts.bytes,
            "wal_bytes": _size(wal_path(self._path)),
            "disk_free_bytes": self._disk_free_bytes(),
            "checkpoints": self._checkpoints,
        }

    # -- maintenance

    @property
    def _is_worth_folding(self) -> bool:
        """Whether to fold the WAL while there is nothing else to do."""
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


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
