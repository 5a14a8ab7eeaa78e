"""Checks of SQLite's structure: the pages of a database file, and its schema.

The one rule: nothing is changed; findings are returned with their places.
"""

import sqlite3
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Final

from mqks.journal.schema import migrations
from mqks.journal.sqlite.rows import row_crc
from mqks.journal.store import Damage

UNREADABLE: Final = (sqlite3.DatabaseError, MemoryError, UnicodeDecodeError)
"""Errors that a damaged file causes. SQLite's message may quote damaged bytes, which Python fails
to decode."""
FINDINGS_MAX: Final = 100
"""Maximum number of SQLite's own findings."""


@cache
def _schema(version: int) -> dict[str, str]:
    """The tables that the migrations up to this version create, and their SQL."""
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
    """Check the format versions in the header: SQLite opens an unknown format read only. Call this
    only while SQLite does not have the file open: closing any descriptor drops its locks."""
    with path.open("rb") as file:
        formats = file.read(20)[18:]
    if any(each not in (1, 2) for each in formats):
        return [Damage("file", f"its header has unknown formats {[*formats]}")]
    return []


def schema_damage(db: sqlite3.Connection) -> list[Damage]:
    """Tables that differ from what the migrations create. Other objects are ignored."""
    ((version,),) = db.execute("pragma user_version")
    found = _tables(db)
    damage = [
        Damage(f"table {name}", "differs from the schema" if name in found else "is missing")
        for name, sql in _schema(version).items()
        if found.get(name) != sql
    ]
    if version == 0 and found:
        damage.append(Damage("file", "has tables, and no version of the schema of MQKS"))
    return damage


def structure_damage(db: sqlite3.Connection) -> list[Damage]:
    """SQLite's integrity check of its pages. Reads the whole file: about 1 s per GiB."""
    try:
        rows = db.execute(f"pragma integrity_check({FINDINGS_MAX})").fetchall()
    except UNREADABLE as error:
        rows = [(str(error),)]
    lines = [line for (text,) in rows for line in str(text).splitlines()]
    return [
        Damage("file", line)
        for line in lines
        # Only some versions report invalid rows; `Rows` checks them.
        if line != "ok" and not line.startswith("***") and " value in " not in line
    ]
