"""Copies a database, also while a server uses it. The copy is one file, with all texts in it.

The one rule: the copy is one state of the journal, it is verified, and it is renamed last.
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
from mqks.files import exists, is_file
from mqks.journal.contents import Verdict
from mqks.journal.sqlite.database_file import FileState, connect, no_file
from mqks.journal.sqlite.lock import FileLock, lock_path
from mqks.journal.sqlite.migrations import check_version
from mqks.journal.sqlite.rows import TEXTS_SINCE, text_columns
from mqks.journal.sqlite.structure import UNREADABLE
from mqks.journal.sqlite.tables import become_another
from mqks.journal.sqlite.texts import TextDamaged, kept, text_of, texts_path
from mqks.journal.sqlite.verify import verify

STEP_PAGES: Final = 4096
"""Pages copied between two reports of progress: 16 MiB."""

Progress = Callable[[int, int], object]
"""Called with the number of pages copied, and of all pages."""


def backup(
    source: Path, target: Path, *, force: bool = False, progress: Progress = lambda done, all: None
) -> Verdict:
    """Copy the database, with everything that was confirmed before; return what the copy contains.

    `force` replaces an existing target. Raises InspectionFailed when the source is not a database,
    JournalDamaged when it is damaged; SchemaTooNew; DatabaseLocked when a server uses the target;
    CannotWrite.
    """
    if not is_file(source):
        raise no_file(source)
    if exists(target) and target.samefile(source):
        raise CannotWrite(f"{target} is the database itself")
    partial = target.with_name(target.name + ".partial")
    try:
        with locked(target), cleared(partial):
            refuse(target, force)
            # No other user may read it before it has the right mode.
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            while not _copied(source, partial, progress):
                pass
            _become_another(source, partial)
            verdict = verify(partial)
            if verdict.damage:
                first = verdict.damage[0]
                raise JournalDamaged(
                    f"{source} is damaged, so it is not backed up: {first.place}: {first.what}; "
                    f"{len(verdict.damage)} places in all, listed by mqks verify"
                )
            shutil.copymode(source, partial)
            rename(partial, target)
    except OSError as error:
        raise CannotWrite(f"{target} can't be written: {error.strerror}") from error
    return verdict


def refuse(target: Path, force: bool) -> None:
    """Raise CannotWrite if something is in the way."""
    if exists(target) and not (force and is_file(target)):
        raise CannotWrite(f"{target} exists already")
    wal = target.with_name(target.name + "-wal")
    if exists(wal) and wal.stat().st_size:
        # SQLite would take it for the copy's.
        raise CannotWrite(f"{wal} exists: it belongs to another state of {target}")
    if exists(texts := texts_path(target)):
        raise CannotWrite(f"{texts} exists: it belongs to another state of {target}")


@contextmanager
def locked(target: Path) -> Iterator[None]:
    """Hold the server's lock of the target. A lock file that did not exist is deleted again."""
    path = lock_path(target)
    was_there = exists(path)
    lock = FileLock(target).take(makes_database=False)
    try:
        yield
    finally:
        if not was_there:
            path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def cleared(partial: Path) -> Iterator[None]:
    """Delete an unfinished copy, of this or of an earlier run."""
    names = [
        partial,
        *(partial.with_name(partial.name + end) for end in ("-wal", "-shm", "-journal", ".lock")),
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


def rename(partial: Path, target: Path) -> None:
    """Give a complete copy its name."""
    sync(partial)
    partial.replace(target)
    sync(target.parent)


def _copied(source: Path, partial: Path, progress: Progress) -> bool:
    """Copy in one read transaction; False when a server has opened the file meanwhile, and the copy
    must be repeated with SQLite's locks."""
    state, had_texts = FileState.of(source), exists(texts_path(source))
    with (
        _failures(source, partial),
        kept(source),
        closing(connect(source, state)) as reading,
        closing(_made(partial)) as writing,
    ):
        writing.execute("pragma journal_mode = off")
        reading.execute("begin")
        version = reading.execute("pragma user_version").fetchone()[0]
        check_version(version, source)
        reading.backup(
            writing,
            pages=STEP_PAGES,
            progress=lambda _, left, total: progress(total - left, total),
        )
        reading.execute("rollback")
        missing = "" if version < TEXTS_SINCE else _joined(source, writing, version)
    if had_texts != exists(texts_path(source)) or (
        state.is_still and state != FileState.of(source)
    ):
        return False
    if missing:
        raise JournalDamaged(f"{source} is damaged, so it is not backed up: {missing}")
    return True


def _joined(source: Path, writing: sqlite3.Connection, version: int) -> str:
    """Put all texts into the copy's rows; return what is missing. Checksums are verified later."""
    columns = f"id, {text_columns(version)}"
    rows = writing.execute(f"select {columns} from segment where text_bytes is not null")
    for segment_id, size, number in rows.fetchall():
        try:
            text = text_of(texts_path(source), number, size)
        except TextDamaged as error:
            return f"segment {segment_id}: {error}"
        sql = "update segment set body = cast(body || ? as blob), text_bytes = null where id = ?"
        writing.execute(sql, (text, segment_id))
    return ""


def _become_another(source: Path, partial: Path) -> None:
    """Give the copy a new epoch, since its history will differ from the source's, and count its
    segments up to the last one, since it has no WAL."""
    with _failures(source, partial), closing(_made(partial)) as db:
        become_another(db, secrets.token_hex(8))
        db.execute("pragma wal_checkpoint(truncate)")


def _made(partial: Path) -> sqlite3.Connection:
    db = sqlite3.connect(partial, isolation_level=None)
    # It is synced once, at the end.
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
            raise InspectionFailed(f"{source} is not an MQKS database: {error}") from error
        raise CannotWrite(f"{partial} can't be written: {error}") from error
