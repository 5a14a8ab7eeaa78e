"""Makes a database of a moment in a copy.

The one rule: as of a backup: it is verified, has a new epoch, and gets its name last.
"""

import os
import secrets
import sqlite3
from contextlib import closing
from datetime import datetime
from pathlib import Path

from mqks.errors import CannotWrite, JournalDamaged
from mqks.follow.copies import Copy, CopyState, microseconds, moment
from mqks.journal.contents import Verdict
from mqks.journal.schema import migrations
from mqks.journal.sqlite.backup import cleared, locked, refuse, rename
from mqks.journal.sqlite.commits import PAGE_SIZE
from mqks.journal.sqlite.database_file import refuse_wal
from mqks.journal.sqlite.migrations import check_version
from mqks.journal.sqlite.rows import LOOSE, loose_columns, read_by, row_crc
from mqks.journal.sqlite.tables import become_another, transaction
from mqks.journal.sqlite.verify import verify


def restore(copy: Copy, target: Path, at: datetime | None) -> tuple[datetime, Verdict]:
    """Make the database of the last look, or of the last one at or before `at`. Return its time,
    before which everything that was confirmed is in it, and its contents.

    Raises what Copy does; InspectionFailed when there is no such look, JournalDamaged when a file
    of the copy that is needed is damaged, SchemaTooNew, CannotWrite, DatabaseLocked.
    """
    partial = target.with_name(target.name + ".partial")
    state = copy.state(None if at is None else microseconds(at))
    check_version(state.version, target)
    try:
        with locked(target), cleared(partial):
            refuse(target, force=False)
            os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            with closing(sqlite3.connect(partial, isolation_level=None)) as db:
                _fill(db, copy, state)
                become_another(db, secrets.token_hex(8))
            refuse_wal(partial, target)
            verdict = verify(partial)
            if verdict.damage:
                place, what = verdict.damage[0]
                raise JournalDamaged(f"{copy.name} is damaged: {place}: {what}")
            rename(partial, target)
    except sqlite3.Error as error:
        raise CannotWrite(f"{target} can't be written: {error}") from error
    except OSError as error:
        raise CannotWrite(f"{target} can't be written: {error.strerror}") from error
    return moment(state.time_us), verdict


def _fill(db: sqlite3.Connection, copy: Copy, state: CopyState) -> None:
    for pragma in (
        f"page_size = {PAGE_SIZE}",
        "auto_vacuum = incremental",
        "journal_mode = wal",
        "synchronous = off",  # It is synced once, at the end.
    ):
        db.execute(f"pragma {pragma}").fetchall()
    db.create_function("row_crc", -1, row_crc)
    for number, sql in migrations():
        if number <= state.version:
            db.executescript(f"begin;\n{sql}\npragma user_version = {number};\ncommit;")
    columns = read_by(state.version) | {name: loose_columns(name, state.version) for name in LOOSE}
    with transaction(db):
        for name, rows in state.tables.items():
            db.execute(f"delete from {name}")
            marks = ", ".join("?" * (columns[name].count(",") + 1))
            db.executemany(f"insert into {name} ({columns[name]}) values ({marks})", rows)
    for segment in copy.bodies(state):
        db.execute("insert into segment (id, crc, body) values (?, ?, ?)", segment)
