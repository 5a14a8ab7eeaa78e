"""Reads the bodies of segments in a SQLite database.

The one rule: what is returned is what was written, or does not exist any more.
"""

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import anyio
from anyio.to_thread import run_sync

from mqks.errors import JournalFailed
from mqks.journal.segment import checksum
from mqks.journal.sqlite.migrations import NEWEST
from mqks.journal.sqlite.rows import segment_columns
from mqks.journal.sqlite.texts import TextDamaged, Texts


class ReadConnection:
    """A read-only connection, used by one thread at a time. SQLite opens its descriptors at the
    first read: so it reads now, while there are some."""

    def __init__(self, path: Path, texts: Texts) -> None:
        self._path = path
        self._texts = texts
        self._limiter = anyio.CapacityLimiter(1)
        uri = f"{path.absolute().as_uri()}?mode=ro"
        self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        self._db.execute("select 1 from sqlite_schema").fetchall()

    def close(self) -> None:
        self._db.close()

    async def bodies(self, ids: Sequence[int]) -> dict[int, bytes]:
        return await run_sync(self._bodies, ids, limiter=self._limiter)

    def _bodies(self, ids: Sequence[int]) -> dict[int, bytes]:
        marks = ",".join("?" * len(ids))
        sql = f"select {segment_columns(NEWEST)} from segment where id in ({marks})"
        try:
            bodies = {row[0]: self._intact(*row) for row in self._db.execute(sql, ids).fetchall()}
            return {segment_id: body for segment_id, body in bodies.items() if body is not None}
        except sqlite3.Error as error:
            # None of these is temporary, as a full disk is: readers of a WAL wait for nobody.
            name = getattr(error, "sqlite_errorname", "")
            raise JournalFailed(f"{self._path} can't be read: {error} {name}".rstrip()) from error

    def _intact(
        self, segment_id: int, crc: object, body: object, text_bytes: object, text_file: object
    ) -> bytes | None:
        """None if it was deleted meanwhile, with its text."""
        why = ""
        if isinstance(body, bytes):
            try:
                text = b"" if text_bytes is None else self._texts.text(text_file, text_bytes)
                if checksum(segment_id, body, text) == crc:
                    return body + text
            except TextDamaged as error:
                why = f": {error}"
        if text_bytes is not None:
            sql = "select 1 from segment where id = ?"
            if not self._db.execute(sql, (segment_id,)).fetchall():
                return None
        raise JournalFailed(f"segment {segment_id} of {self._path} is damaged{why}")
