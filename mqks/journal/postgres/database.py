"""Reads a journal in PostgreSQL, as `Contents`, whether a broker owns it or not.

The one rule: no transaction is open while messages are passed on. An old one would keep all
versions of the owner's row, of which each commit makes one.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import psycopg

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import ErrorRecord, ResultRow
from mqks.errors import InspectionFailed
from mqks.journal.contents import AT_ONCE, Contents, DatabaseFacts
from mqks.journal.postgres import migrations, statements
from mqks.journal.postgres.address import line_of, parse
from mqks.journal.postgres.connection import Row
from mqks.journal.postgres.store import HEADS_AT_ONCE, check_policies, error_record, head_of
from mqks.journal.segment import checksum
from mqks.journal.store import Damage, Head, QueueRow
from mqks.settings import DatabaseUrl

PIECE_BYTES: Final = 1024 * 1024
"""Texts are read in pieces of this size."""
SNAPSHOT: Final = b"begin isolation level repeatable read read only"


class Database(Contents):
    """Made by `open`."""

    def __init__(self, url: DatabaseUrl, *, thorough: bool = False) -> None:
        """Without the first `refresh`."""
        self._address = parse(url)
        super().__init__(self._address.shown, thorough=thorough)
        with self._failures():
            self._db: psycopg.Connection[Row] = psycopg.connect(
                **self._address.parameters, autocommit=True
            )

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except psycopg.errors.UndefinedTable as error:
            schema = self._address.schema
            raise InspectionFailed(f"{self.name}: no journal in schema {schema}") from error
        except psycopg.Error as error:
            raise InspectionFailed(f"{self.name} can't be read: {line_of(error)}") from error

    def _all(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        with self._db.cursor(binary=True) as cursor:
            return cursor.execute(statement.encode(), values or None).fetchall()

    def refresh(self) -> None:
        with self._failures():
            while new := self._read_at_once():
                for start in range(0, len(new), HEADS_AT_ONCE):
                    self._read(new[start : start + HEADS_AT_ONCE])

    def _read_at_once(self) -> list[int]:
        """Read a state in one transaction. Returns segments that are to be read before the next
        attempt; none if the state is complete."""
        with self._db.cursor() as cursor:
            cursor.execute(SNAPSHOT)
            try:
                return self._state()
            finally:
                if not self._db.closed:
                    cursor.execute("rollback")

    def _state(self) -> list[int]:
        self.damage = []
        [(version, epoch, holder, segments, next_queue_id, aside, size)] = self._all(
            statements.FACTS
        )
        migrations.check(version, epoch, self._address)
        ids = [segment_id for (segment_id,) in self._all(statements.IDS)]
        new = [segment_id for segment_id in ids if segment_id not in self._segments]
        rows = {row[0]: QueueRow(*row) for row in self._all(statements.QUEUES)}
        check_policies(rows.values())
        self._rows = rows
        if len(new) > AT_ONCE:
            return new
        self._read(new)
        self._segments = {segment_id: self._segments[segment_id] for segment_id in ids}
        self.bindings = sorted((queue, event) for queue, event in self._all(statements.BINDINGS))
        [(has_batches,)] = self._all(statements.HAS_BATCHES)
        batches = self._all(statements.BATCHES) if has_batches else []
        self._keep_named(self._all(statements.SCHEDULES), batches)
        if len(ids) != segments:
            what = f"{len(ids)} exist, {segments} were written"
            self.damage.append(Damage("table segment", what))
        self.server = (holder or "").rpartition(" ")[0]
        self._build(rows, next_queue_id)
        sizes = sum(segment.size for segment in self._segments.values())
        self.facts = DatabaseFacts(version, epoch, size, None, None, None, len(ids), sizes, aside)
        return []

    def _read(self, ids: list[int]) -> None:
        """Keep these segments, except those that were deleted meanwhile."""
        for row in self._all(statements.HEADS_OF, [ids]):
            self._read_one(head_of(*row))

    def _read_one(self, head: Head) -> None:
        """Its text is given back before the next one is read."""
        whole = self._head(head.id) if self._thorough or head.damage else head
        if whole is not None:
            self._keep(whole)

    def _head(self, segment_id: int) -> Head | None:
        rows = self._all(statements.PARTS, [PIECE_BYTES, segment_id])
        if not rows:
            return None
        [(head_crc, head, text_crc, text_bytes, piece)] = rows
        pieces, there = [head, piece], len(piece)
        while there < text_bytes:
            rows = self._all(statements.PIECE, [there + 1, PIECE_BYTES, segment_id])
            if not rows:
                return None  # It was deleted meanwhile.
            [(piece,)] = rows
            pieces.append(piece)
            there += len(piece)
        is_right = checksum(segment_id, head) == head_crc
        is_right &= checksum(segment_id, *pieces[1:]) == text_crc
        body = b"".join(pieces)
        return Head.checked(segment_id, len(body), body, is_right=is_right)

    def errors(self, limit: int | None = 1000, before: str = "\x7f") -> list[ErrorRecord]:
        with self._failures():
            rows = self._all(statements.ERRORS_BEFORE, [before, limit])
        return [error_record(*row) for row in rows]

    def _stored_results(self) -> Iterable[tuple[bytes, ResultRow]]:
        with self._failures():
            [(exists,)] = self._all(statements.HAS_RESULTS)
            rows = self._all(statements.RESULTS) if exists else []
        return [(message_id, (row, data)) for message_id, row, data in rows]

    def audit(self, limit: int) -> list[AuditRecord]:
        with self._failures():
            [(exists,)] = self._all(statements.HAS_AUDIT)
            rows = self._all(statements.LAST_AUDIT, [limit]) if exists else []
        return [AuditRecord.parse(*row) for row in rows]
