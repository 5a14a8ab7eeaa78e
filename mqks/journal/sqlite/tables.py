"""Writes the small tables: each row with its checksum, each table with its tally.

The one rule: a tally is written in the transaction that changes its rows, and is stored here only
after the commit.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import Entry, ErrorRecord
from mqks.errors import JournalFailed
from mqks.journal.once import OnceRow, OnceRows
from mqks.journal.sqlite.rows import (
    CHECKSUMS_SINCE,
    Row,
    Rows,
    Tally,
    queue_crc,
    row_crc,
    segment_crcs,
)
from mqks.journal.sqlite.texts import SegmentRow
from mqks.journal.store import (
    LastWords,
    Metadata,
    QueueRow,
    changed_queues,
    keep_queues,
    named_rows,
)

PUT_META: Final = "insert or replace into meta values (?, ?, ?)"
PUT_TALLY: Final = "insert or replace into tally values (?, ?, ?, ?, ?)"
INSERT_SEGMENT: Final = "insert into segment values (?, ?, ?, ?, ?)"
TALLIED: Final = ("queue", "binding", "once", "segment", "schedule", "result", "batch")
_PUT_QUEUE: Final = "insert or replace into queue values (?, ?, ?, ?, ?, ?)"
_PUT_BINDING: Final = "insert or ignore into binding values (?, ?, ?)"
_DELETE_BINDING: Final = "delete from binding where queue = ? and event = ?"
_PUT_ONCE: Final = "insert into once values (?, ?, ?, ?)"


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    db.execute("begin immediate")
    try:
        yield
        db.execute("commit")
    except BaseException:
        if db.in_transaction:
            db.execute("rollback")
        raise


def counted(segments: Tally, next_id: int) -> Tally:
    """The tally of segments up to an id: from its end on, the ids have no gap."""
    new = segment_crcs(range(segments.next, next_id))
    return segments._replace(next=next_id).plus(new)


class Tables:
    """The content of the small tables that is needed to write them. `queues` are rows, with the
    numbers from dropped segments."""

    def __init__(self, once_ids_max: int, errors_kept_max: int, audit_kept_max: int) -> None:
        self.queues: dict[int, QueueRow] = {}
        self.tallies: dict[str, Tally] = {}
        self.once = OnceRows(once_ids_max)
        self.named: dict[str, dict[bytes, int]] = {"schedule": {}, "result": {}, "batch": {}}
        """Of tables whose rows have a name: the checksums, by name."""
        self._errors_kept_max = errors_kept_max
        self._audit_kept_max = audit_kept_max

    def restored(self, rows: Rows) -> None:
        """Start with what was loaded."""
        self.queues, self.tallies = dict(rows.queues), dict(rows.tallies)
        self.named = {
            "schedule": {row[0]: row_crc("schedule", *row) for row in rows.schedules.items()},
            "result": {each: row_crc("result", each, *row) for each, row in rows.results.items()},
            "batch": {row[0]: row_crc("batch", *row) for row in rows.batches.items()},
        }
        for number, count, ids in rows.once:
            self.once.restored(OnceRow(number, count, row_crc("once", number, count, ids)))
        self.once.next = self.tallies["once"].next

    # -- a commit

    def write(
        self,
        db: sqlite3.Connection,
        segments: Sequence[SegmentRow],
        next_id: int,
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        """Write in one transaction: add and delete segments, all below `next_id`, and update the
        small tables.

        Raises JournalFailed when a segment to delete does not exist.
        """
        tallies: dict[str, Tally] = {}
        once: OnceRow | None = None
        named: dict[str, dict[bytes, int | None]] = {}
        queues = changed_queues(self.queues, last_words, {} if entry is None else entry.queues)
        with transaction(db):
            if drop:
                tallies["segment"] = self.segments(next_id, drop)
                _delete_segments(db, drop)
            for segment in segments:
                db.execute(INSERT_SEGMENT, segment)
            if queues:
                tallies["queue"] = self._put_queues(db, queues)
            if entry is not None:
                if entry.bindings:
                    tallies["binding"] = self._put_bindings(db, entry.bindings)
                if entry.once:
                    once, tallies["once"] = self._put_once(db, entry.once)
                for table, rows in named_rows(entry).items():
                    if rows:
                        named[table], tallies[table] = self._put_named(db, table, rows)
                if entry.errors:
                    self._put_errors(db, entry.errors)
                if entry.audit:
                    self._put_audit(db, entry.audit)
            db.executemany(PUT_TALLY, [tally.row(name) for name, tally in tallies.items()])
        self.tallies |= tallies
        if once:
            self.once.written(once)
        keep_queues(self.queues, queues)
        for table, crcs in named.items():
            known = self.named[table]
            for name, crc in crcs.items():
                known.pop(name, None)
                if crc is not None:
                    known[name] = crc

    def _put_queues(self, db: sqlite3.Connection, rows: Mapping[int, QueueRow | None]) -> Tally:
        olds = [self.queues[queue_id] for queue_id in rows if queue_id in self.queues]
        news = [(*row, queue_crc(row)) for row in rows.values() if row is not None]
        db.executemany("delete from queue where id = ?", [(row.id,) for row in olds])
        db.executemany(_PUT_QUEUE, news)
        tally = self.tallies["queue"].minus([queue_crc(row) for row in olds])
        next_id = max(tally.next, *(queue_id + 1 for queue_id in rows))
        return tally.plus([crc for *_, crc in news])._replace(next=next_id)

    def _put_bindings(
        self, db: sqlite3.Connection, bindings: Mapping[tuple[bytes, bytes], bool]
    ) -> Tally:
        """Bindings that exist already, or are deleted already, change nothing."""
        put, gone = [], []
        for key, is_bound in bindings.items():
            crc = row_crc("binding", *key)
            if not is_bound and db.execute(_DELETE_BINDING, key).rowcount:
                gone.append(crc)
            elif is_bound and db.execute(_PUT_BINDING, (*key, crc)).rowcount:
                put.append(crc)
        return self.tallies["binding"].minus(gone).plus(put)

    def _put_once(self, db: sqlite3.Connection, ids: list[bytes]) -> tuple[OnceRow, Tally]:
        gone, number = self.once.surplus(len(ids)), self.once.next
        values = number, len(ids), b"\n".join(ids)
        row = OnceRow(number, len(ids), row_crc("once", *values))
        db.executemany("delete from once where number = ?", [(old.number,) for old in gone])
        db.execute(_PUT_ONCE, (*values, row.crc))
        tally = self.tallies["once"]._replace(next=number + 1)
        return row, tally.minus([old.crc for old in gone]).plus([row.crc])

    def _put_named(
        self, db: sqlite3.Connection, table: str, rows: Mapping[bytes, Row | None]
    ) -> tuple[dict[bytes, int | None], Tally]:
        """Replace or delete rows by their names; return their new checksums, and the tally."""
        known, crcs = self.named[table], dict[bytes, int | None]()
        olds = [name for name in rows if name in known]
        db.executemany(f"delete from {table} where name = ?", [(name,) for name in olds])
        news = list[Row]()
        for name, row in rows.items():
            crcs[name] = None if row is None else row_crc(table, name, *row)
            if row is not None:
                news.append((name, *row, crcs[name]))
        if news:
            db.executemany(f"insert into {table} values ({_marks(news[0])})", news)
        tally = self.tallies[table].minus([known[name] for name in olds])
        return crcs, tally.plus([crc for *_, crc in news])

    def _put_errors(self, db: sqlite3.Connection, errors: list[ErrorRecord]) -> None:
        db.executemany(
            "insert or ignore into error values (?, ?, ?, ?, ?, ?, ?)",
            [(*record[:6], row_crc("error", *record[:6])) for record in errors],
        )
        db.execute(
            "delete from error where id <="
            " (select id from error order by id desc limit 1 offset ?)",
            (self._errors_kept_max,),
        )

    def _put_audit(self, db: sqlite3.Connection, records: list[AuditRecord]) -> None:
        rows = [(record.id, record.row()) for record in records]
        db.executemany(
            "insert or replace into audit values (?, ?, ?)",
            [(*row, row_crc("audit", *row)) for row in rows],
        )
        oldest = records[-1].id - self._audit_kept_max
        db.execute("delete from audit where id <= ?", (oldest,))

    # -- segments

    def segments(self, next_id: int, gone: Iterable[int] = ()) -> Tally:
        """The tally of segments up to an id, without those in `gone`."""
        return counted(self.tallies["segment"], next_id).minus(segment_crcs(gone))

    def skip_to(self, db: sqlite3.Connection, end: int, segment_id: int, queue_id: int) -> None:
        """All segments are below `end`; ids below the two others are never used from now on."""
        queue = self.tallies["queue"]
        tallies = {
            "segment": self.segments(end)._replace(next=segment_id),
            "queue": queue._replace(next=max(queue.next, queue_id)),
        }
        with transaction(db):
            db.executemany(PUT_TALLY, [tally.row(name) for name, tally in tallies.items()])
        self.tallies |= tallies

    # -- salvage

    def salvage(
        self, db: sqlite3.Connection, rows: Rows, found: Metadata, segments: Iterable[int]
    ) -> None:
        """Rewrite what is whole, set damaged rows and these segments aside. One transaction."""
        ids = [(segment_id,) for segment_id in segments]
        queues = found.queues.values()
        rows.epoch, rows.queues = found.epoch, found.queues
        rows.tallies |= {
            "queue": Tally(found.next_queue_id).plus([*map(queue_crc, queues)]),
            "segment": rows.tallies["segment"].minus(segment_crcs(i for (i,) in ids)),
        }
        whole: dict[str, Iterable[Row]] = {
            "meta": [("epoch", rows.epoch)],
            "queue": queues,
            "binding": rows.bindings,
            "once": rows.once,
            "schedule": [*found.schedules.items()],
            "result": [(each, *row) for each, row in found.results.items()],
            "batch": [*found.batches.items()],
            "error": [record[:6] for record in found.errors],
            "audit": [(record.id, record.row()) for record in found.audit],
            "tally": [(name, *rows.tallies[name]) for name in TALLIED],
        }
        with transaction(db):
            db.executemany(
                "insert into damaged_segment"
                " select id, crc, body, text_bytes, text_file from segment where id = ?",
                ids,
            )
            db.executemany("delete from segment where id = ?", ids)
            db.executemany("insert into damaged_row values (?, ?)", rows.aside)
            for table, values in whole.items():
                # A look-up by key may find nothing if pages are damaged.
                db.execute(f"delete from {table}")
                for row in values:
                    stored = *row, row_crc(table, *row)
                    db.execute(f"insert into {table} values ({_marks(stored)})", stored)


def _marks(row: Row) -> str:
    return ", ".join("?" * len(row))


def become_another(db: sqlite3.Connection, epoch: str) -> None:
    """Give a copy, of any schema, another epoch, and count its segments up to the last."""
    ((version,),) = db.execute("pragma user_version")
    if version < CHECKSUMS_SINCE:
        db.execute("update meta set value = ? where key = 'epoch'", (epoch,))
        return
    ((last,),) = db.execute("select ifnull(max(id), 0) from segment")
    told = db.execute("select next, count, sum from tally where name = 'segment'").fetchone()
    with transaction(db):
        row = "epoch", epoch, row_crc("meta", "epoch", epoch)
        db.execute(PUT_META, row)
        if told is not None:
            tally = counted(Tally(*told), max(last + 1, told[0]))
            db.execute(PUT_TALLY, tally.row("segment"))


def _delete_segments(db: sqlite3.Connection, gone: Sequence[int]) -> None:
    ids = ",".join(map(str, gone))
    count = db.execute(f"delete from segment where id in ({ids})").rowcount
    if count != len(gone):
        raise JournalFailed(f"{len(gone) - count} of the segments {ids} are missing")
