"""Small commits to a SQLite database, on the caller's thread.

The one rule: nothing is written that the disk may have no room for, and an error of SQLite becomes
one of the store's.
"""

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Final

from mqks.broker.spine.log.pending import Entry
from mqks.errors import DiskFull, JournalFailed, LowDiskSpace
from mqks.journal.segment import NewSegment
from mqks.journal.sqlite.lock import FileLock
from mqks.journal.sqlite.tables import INSERT_SEGMENT, Tables
from mqks.journal.sqlite.texts import DELETED_BYTES, SegmentRow, Texts
from mqks.journal.store import Store
from mqks.settings import Settings

PAGE_SIZE: Final = 4096
SMALL_COMMIT_PAGES: Final = 0.25
"""Pages that a commit adds to the next checkpoint besides its body: consecutive small commits write
the same page to the WAL several times, but a checkpoint copies it once. So 250 pages are some 900
commits of one small message, and 4 MiB of WAL."""
FULL_CODES: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
"""Temporary failures; any other ends the process."""


class SmallCommits(Store):
    """What `DatabaseSpace` is built on."""

    def __init__(
        self, raw: sqlite3.Connection, lock: FileLock, texts: Texts, path: Path, settings: Settings
    ) -> None:
        self.name = str(path)
        self.gone = ""
        self._raw = raw
        self._lock = lock
        self._texts = texts
        self._tables = Tables(
            settings.once_ids_max, settings.errors_kept_max, settings.audit_kept_max
        )
        self._next_segment = 1
        self._has_failed = False
        self._checkpoint_pages = settings.wal_checkpoint_pages
        self._wal_pages = 0.0
        """Approximate number of pages that a checkpoint would write."""
        self._fold_again_s = inf
        """When to repeat a checkpoint that readers cut short, even if nothing more is written."""
        self._free_bytes_min = settings.disk_free_bytes_min

    def _commit_now(self, segment: NewSegment, once: list[bytes]) -> None:
        """Only while nothing else uses the writing connection."""
        self._check_floor((segment,))
        row = SegmentRow(*segment.whole())
        with self._failures():
            if once:
                self._tables.write(self._raw, [row], row.id + 1, Entry(once=once))
            else:
                self._raw.execute(INSERT_SEGMENT, row)
        self._committed(row)

    def _committed(self, row: SegmentRow) -> None:
        self._next_segment = row.id + 1
        self._wal_pages += len(row.body) / PAGE_SIZE + SMALL_COMMIT_PAGES

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

    def _disk_free_bytes(self) -> int:
        return free_bytes(self._lock.database)

    @property
    def overdue(self) -> bool:
        return self._folds or (bool(self._texts.gone) and self._texts.is_due)

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


def free_bytes(descriptor: int) -> int:
    """Of the disk that has an open file. Raises OSError."""
    disk = os.fstatvfs(descriptor)
    return disk.f_bavail * disk.f_frsize
