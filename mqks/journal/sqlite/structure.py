"""SQLite's side of a database file: its pages, and the schema that the migrations made.

The one rule: nothing is changed; what is found is told with its place.
"""

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Final

from mqks.journal.sqlite.migrations import migrations
from mqks.journal.sqlite.tables import row_crc
from mqks.journal.store import Damage

UNREADABLE: Final = (sqlite3.DatabaseError, MemoryError, UnicodeDecodeError)
"""What comes of a damaged file. SQLite's message may quote what is damaged, and Python fails then
to decode that."""
FINDINGS_MAX: Final = 100
"""Of SQLite's own."""


@cache
def _schema(version: int) -> dict[str, str]:
    """The tables that the migrations up to this one make, and their SQL."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
        db.create_function("row_crc", -1, row_crc)
        for number, sql in migrations():
            if number <= version:
                db.executescript(sql)
        return _tables(db)


def _tables(db: sqlite3.Connection) -> dict[str, str]:
    rows = db.execute(
        "select cast(name as text), cast(sql as text) from sqlite_schema"
        " where type = 'table' and name not like 'sqlite%'"
    )
    return {str(name): " ".join(str(sql).split()) for name, sql in rows}


def header_damage(path: Path) -> list[Damage]:
    """SQLite takes a file for read only whose format it does not know. To be called while it does
    not have the file: closing any descriptor drops its locks."""
    with path.open("rb") as file:
        formats = file.read(20)[18:]
    if any(each not in (1, 2) for each in formats):
        return [Damage("file", f"its header tells of formats {[*formats]}, which there are not")]
    return []


def schema_damage(db: sqlite3.Connection) -> list[Damage]:
    """Tables that are not as the migrations made them. What else there is counts for nothing."""
    ((version,),) = db.execute("pragma user_version")
    found = _tables(db)
    damage = [
        Damage(f"table {name}", "is not as it was made" if name in found else "is missing")
        for name, sql in _schema(version).items()
        if found.get(name) != sql
    ]
    if version == 0 and found:
        damage.append(Damage("file", "has tables, and no version of the schema of MQKS"))
    return damage


def structure_damage(db: sqlite3.Connection) -> list[Damage]:
    """What SQLite finds wrong with its pages. Reads the whole file: about 1 s for a GiB."""
    try:
        rows = db.execute(f"pragma integrity_check({FINDINGS_MAX})").fetchall()
    except UNREADABLE as error:
        rows = [(str(error),)]
    lines = [line for (text,) in rows for line in str(text).splitlines()]
    return [
        Damage("file", line)
        for line in lines
        # That a row makes no sense some versions tell, and others leave to us.
        if line != "ok" and not line.startswith("***") and " value in " not in line
    ]
