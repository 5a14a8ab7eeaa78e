"""Schema versions, forward only.

The one rule: each migration and its version, `pragma user_version`, are one transaction.
"""

from pathlib import Path
from typing import Final

import aiosqlite

from mqks.errors import SchemaTooNew
from mqks.journal.schema import migrations
from mqks.journal.sqlite.rows import CHECKSUMS_SINCE, is_ruled_queue, row_crc

NEWEST: Final = migrations()[-1][0]

_MARK_DAMAGED: Final = """
update queue set crc = crc + 1
where not is_ruled_queue(id, name, delete_when_unused, delete_delay_s, next_seq, cursor);
"""
"""The first checksums must not accept a row that makes no sense: the next migration would read a
policy from any."""


def check_version(version: int, path: Path) -> None:
    """Raise SchemaTooNew when the version is newer than all known migrations."""
    if version > NEWEST:
        raise SchemaTooNew(
            f"{path} has schema version {version}, this mqks supports versions up to {NEWEST}: "
            "use a newer mqks"
        )


async def migrate(db: aiosqlite.Connection) -> int:
    """Bring the schema up to date and return the version that it had, 0 for a new database."""
    rows = list(await db.execute_fetchall("pragma user_version"))
    version = int(rows[0][0])
    known = migrations()
    await db.create_function("row_crc", -1, row_crc)
    await db.create_function("is_ruled_queue", -1, is_ruled_queue)
    for number, sql in known:
        if number > version:
            if number == CHECKSUMS_SINCE:
                sql += _MARK_DAMAGED
            await db.executescript(
                f"begin immediate;\n{sql}\npragma user_version = {number};\ncommit;"
            )
    return version
