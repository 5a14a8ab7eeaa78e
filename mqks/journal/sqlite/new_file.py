"""Makes the database file that a copy of a journal fills.

The one rule: it gets its name when it is complete.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from mqks.errors import CannotWrite
from mqks.journal.sqlite.backup import cleared, locked, refuse, rename
from mqks.journal.sqlite.database_file import refuse_wal
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.store import Report
from mqks.settings import Settings


@asynccontextmanager
async def new_file(settings: Settings, report: Report) -> AsyncIterator[SqliteStore]:
    """Raises DatabaseLocked when a server uses the file, CannotWrite when it exists or can't be
    written."""
    target = settings.db_file
    partial = target.with_name(target.name + ".partial")
    try:
        with locked(target), cleared(partial):
            refuse(target, force=False)
            partial.touch(0o600, exist_ok=False)
            # It is synced once, at the end, and has all texts in its rows.
            settings = replace(settings, db=partial, synchronous="off", text_file_bytes_min=0)
            async with await SqliteStore.open(settings, report) as store:
                yield store
            refuse_wal(partial, target)
            rename(partial, target)
    except OSError as error:
        raise CannotWrite(f"{target} can't be written: {error.strerror}") from error
