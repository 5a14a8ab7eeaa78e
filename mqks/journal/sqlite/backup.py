"""A copy of a database that may be served meanwhile.

The one rule: the copy is one state of the journal, it is verified, and it gets its name last.
"""

import os
import secrets
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from mqks.durable import sync
from mqks.errors import CannotWrite, InspectionFailed, JournalDamaged
from mqks.journal.sqlite.database_file import State, connect, no_file
from mqks.journal.sqlite.lock import FileLock, lock_path
from mqks.journal.sqlite.metadata import become_another
from mqks.journal.sqlite.migrations import check_version
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.verify import Verdict, verify

STEP_PAGES: Final = 4096
"""Copied between two reports of progress: 16 MiB."""

Progress = Callable[[int, int], object]
"""Told how many pages are done, and how many there are."""


def backup(
    source: Path, target: Path, *, force: bool = False, progress: Progress = lambda done, all: None
) -> Verdict:
    """Copy the database; all that was confirmed before is in the copy. Tell what it holds.

    `force` replaces a file of that name. Raises InspectionFailed and JournalDamaged when the source
    is none, or not whole; SchemaTooNew; DatabaseLocked when the target is served; CannotWrite.
    """
    if not source.is_file():
        raise no_file(source)
    if target.exists() and target.samefile(source):
        raise CannotWrite(f"{target} is the database itself")
    partial = target.with_name(target.name + ".partial")
    try:
        with _locked(target), _cleared(partial):
            _refuse(target, force)
            # Nobody but us may read it before it is as it should be.
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            while not _copied(source, partial, progress):
                pass
            _become_another(source, partial)
            verdict = verify(partial)
            if verdict.damage:
                first = verdict.damage[0]
                raise JournalDamaged(
                    f"{source} is damaged, so it is not backed up: {first.place}: {first.what}; "
                    f"{len(verdict.damage)} places in all, which mqks verify tells"
                )
            shutil.copymode(source, partial)
            sync(partial)
            partial.replace(target)
            sync(target.parent)
    except OSError as error:
        raise CannotWrite(f"{target} can't be written: {error.strerror}") from error
    return verdict


def _refuse(target: Path, force: bool) -> None:
    if target.exists() and not (force and target.is_file()):
        raise CannotWrite(f"{target} is there already")
    wal = target.with_name(target.name + "-wal")
    if wal.exists() and wal.stat().st_size:
        # It would be taken for the copy's.
        raise CannotWrite(f"{wal} is there: it belongs to another state of {target}")


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """Nobody else serves or writes it. No lock file is left that was not there."""
    path = lock_path(target)
    was_there = path.exists()
    lock = FileLock(target).take(makes_database=False)
    try:
        yield
    finally:
        if not was_there:
            path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _cleared(partial: Path) -> Iterator[None]:
    """Nothing is left of an unfinished copy, of this time or of an earlier one."""
    names = [
        partial,
        *(partial.with_name(partial.name + end) for end in ("-wal", "-shm", "-journal")),
    ]

    def clear() -> None:
        for name in names:
            name.unlink(missing_ok=True)

    clear()
    try:
        yield
    finally:
        with suppress(OSError):
            clear()


def _copied(source: Path, partial: Path, progress: Progress) -> bool:
    """Copy in one read transaction; False when a server has come meanwhile, and it must be done
    again with SQLite's locks."""
    state = State.of(source)
    with (
        _failures(source, partial),
        closing(connect(source, state)) as reading,
        closing(_made(partial)) as writing,
    ):
        writing.execute("pragma journal_mode = off")
        reading.execute("begin")
        check_version(reading.execute("pragma user_version").fetchone()[0], source)
        reading.backup(
            writing,
            pages=STEP_PAGES,
            progress=lambda _, left, total: progress(total - left, total),
        )
        reading.execute("rollback")
    return not state.is_still or state == State.of(source)


def _become_another(source: Path, partial: Path) -> None:
    """What is restored goes on in another way than what it was made from: another epoch. And as no
    WAL stands beside it, its segments are counted up to the last."""
    with _failures(source, partial), closing(_made(partial)) as db:
        become_another(db, secrets.token_hex(8))
        db.execute("pragma wal_checkpoint(truncate)")


def _made(partial: Path) -> sqlite3.Connection:
    db = sqlite3.connect(partial, isolation_level=None)
    # It is synced once, in the end.
    db.execute("pragma synchronous = off")
    return db


@contextmanager
def _failures(source: Path, partial: Path) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        is_text = isinstance(error, UnicodeDecodeError)
        if is_text or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise JournalDamaged(f"{source} can't be read: {error}") from error
        if code == sqlite3.SQLITE_ERROR:
            raise InspectionFailed(f"{source} is no database of MQKS: {error}") from error
        raise CannotWrite(f"{partial} can't be written: {error}") from error
