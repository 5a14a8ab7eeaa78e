"""Makes a database that no server uses as small as possible.

The one rule: it holds the server's lock, and uses only the journal's own steps.
"""

import time
from collections.abc import Callable
from pathlib import Path

from mqks.broker.broker import Broker
from mqks.files import exists, is_file
from mqks.journal.compaction import Compaction
from mqks.journal.journal import Journal
from mqks.journal.recovery import Recovery
from mqks.journal.sqlite.database_file import no_file, refuse_wal, wal_path
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.sqlite.texts import size_of, texts_path
from mqks.settings import Settings


async def compact(settings: Settings, report: Callable[[str], None]) -> tuple[int, int]:
    """Drop, merge, compact and vacuum; return the bytes on disk before and after.

    `report` is called with a line for each damaged place.
    Raises like `OpenStore` and `Recovery.run`, InspectionFailed when there is no such file, and
    JournalFailed; CannotWrite when the WAL can't be copied into the file, as while it is read.
    """
    path = settings.db_file
    if not is_file(path):
        raise no_file(path)
    before = _size(path)
    async with await SqliteStore.open(settings, report) as store:
        journal = Journal(store)
        broker = Broker(
            settings,
            clock=time.monotonic,
            now_us=lambda: 0,
            new_error_id=lambda: ("", 0),
            on_error=lambda _: False,
        )
        await Recovery(journal, broker, report).run(salvage=False)
        await Compaction(journal).compact_fully()
        await store.shrink()
    refuse_wal(path, path)
    return before, _size(path)


def _size(path: Path) -> int:
    wal = wal_path(path)
    its_wal = wal.stat().st_size if exists(wal) else 0
    return path.stat().st_size + its_wal + size_of(texts_path(path))
