"""From the journal back to a broker, as it was at the last commit.

The one rule: what is damaged is told and refused, or, when told to salvage, told and set aside;
nothing is skipped silently.
"""

import secrets
import sqlite3
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from anyio.to_thread import run_sync

from mqks.broker.broker import Broker
from mqks.broker.pending import ErrorRecord, Mark
from mqks.broker.queue import Queue
from mqks.errors import JournalDamaged, JournalFailed
from mqks.journal.index import QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.migrations import NEWEST
from mqks.journal.segment import SegmentDamaged
from mqks.journal.structure import UNREADABLE
from mqks.journal.survey import Survey, checked, guess, missing
from mqks.journal.tables import Damage, QueueRow, Row, Rows, error_columns, errors, read_by, shown


class Recovery:
    """One start of one server. `report` is called with a line for each thing that is damaged."""

    def __init__(self, journal: Journal, broker: Broker, report: Callable[[str], None]) -> None:
        self._journal = journal
        self._index = journal.index
        self._broker = broker
        self._report = report
        self._damaged: list[int] = []
        self._lost: list[Damage] = []

    async def run(self, *, salvage: bool) -> None:
        """Restore queues, bindings, rules, messages in order, unacked ones as rejected.

        Raises JournalDamaged, unless told to salvage what is whole; JournalFailed when what is
        salvaged can't be written.
        """
        try:
            await self._run(salvage)
        except JournalDamaged:
            self._journal.leave()
            raise
        except UNREADABLE as error:
            self._journal.leave()
            raise JournalDamaged(
                f"{self._journal.path} can't be read, not even to salvage it: {error}"
            ) from error

    async def _run(self, salvage: bool) -> None:
        journal = self._journal
        raw = {
            table: await self._table(columns, table) for table, columns in read_by(NEWEST).items()
        }
        rows = Rows(NEWEST, raw)
        self._lost += rows.damage
        survey = Survey(self._index, rows.queue_ids_end)
        for row in rows.queues.values():
            self._index.queues[row.id] = QueueIndex(row.next_seq, row.cursor)
        self._lost += rows.count_segments(await self._segments(rows, survey))
        self._revive(rows, survey)
        gaps = self._gaps(rows)
        if self._lost and not salvage:
            for place, what in self._lost:
                self._report(f"{place}: {what}")
            raise JournalDamaged(
                f"{journal.path} is damaged ({len(self._lost)} places, told above): restore "
                "a backup, or start with --salvage to go on with what is whole"
            )
        found, damage = await self._errors()
        if self._lost or (damage and salvage):
            self._settle(rows, gaps)
            await self._salvage(rows, found)
        for place, what in damage:
            self._report(f"{place}: {what}")
        self._broker.last_errors.extend(found)
        self._restore(rows, survey, gaps)
        await journal.begin_wal()
        while self._index.droppable:
            await journal.maintain(idle=True)

    async def _table(self, columns: str, table: str) -> list[Row]:
        sql = f"select {columns} from {table} order by 1"
        return [tuple(row) for row in await self._journal.db.execute_fetchall(sql)]

    async def _segments(self, rows: Rows, survey: Survey) -> list[int]:
        """Every segment, checked; their ids."""
        names = {row.id: row.name for row in rows.queues.values()}
        ids: list[int] = []
        async with self._journal.db.execute(
            "select id, crc, cast(body as blob) from segment order by id"
        ) as cursor:
            cursor.arraysize = 16
            while found := await cursor.fetchmany():
                for segment_id, crc, body in found:
                    ids.append(segment_id)
                    self._journal.next_segment = segment_id + 1
                    try:
                        sections = checked(segment_id, crc, body)
                    except SegmentDamaged as error:
                        self._damaged.append(segment_id)
                        what = f"{error}; it held {guess(body, names)}"
                        self._lost.append(Damage(f"segment {segment_id}", what))
                    else:
                        survey.place(segment_id, len(body), sections)
        survey.finish()
        return ids

    def _revive(self, rows: Rows, survey: Survey) -> None:
        """Messages of queues whose rows are lost are kept, in queues with other names."""
        names = {row.id: row.name for row in rows.queues.values()}
        for queue_id, name in survey.name_revived(names).items():
            rows.queues[queue_id] = QueueRow(queue_id, name, 0, None, 1, 1)
            what = f"its row is lost; its messages are those of a queue {shown(name)}"
            self._lost.append(Damage(f"queue with id {queue_id}", what))

    def _gaps(self, rows: Rows) -> set[int]:
        """Queues of which never delivered messages are missing."""
        gaps = set()
        for row in rows.queues.values():
            if lost := missing(self._index.queues[row.id]):
                gaps.add(row.id)
                count = sum(count for _, count in lost)
                what = f"{count} waiting messages are missing"
                self._lost.append(Damage(f"queue {shown(row.name)}", what))
        return gaps

    def _settle(self, rows: Rows, gaps: set[int]) -> None:
        """A gap is told once: then nothing waits any more below the next sequence."""
        for queue_id in gaps:
            next_seq = self._index.queues[queue_id].next_seq
            row = rows.queues[queue_id]
            rows.queues[queue_id] = row._replace(next_seq=next_seq, cursor=next_seq)

    async def _salvage(self, rows: Rows, found: list[ErrorRecord]) -> None:
        """What is damaged is kept, where nothing reads it; all else is written anew."""
        rows.epoch = rows.epoch or secrets.token_hex(8)
        tally = rows.tallies["queue"]
        rows.tallies["queue"] = tally._replace(
            next=max(tally.next, *(i + 1 for i in rows.queues), 1)
        )
        metadata, raw = self._journal.metadata, self._journal.raw
        try:
            await run_sync(metadata.salvage, raw, rows, found, self._damaged)
        except sqlite3.Error as error:
            raise JournalFailed(f"what is salvaged can't be written: {error}") from error
        for place, what in self._lost:
            self._report(f"salvaged without it: {place}: {what}")

    def _restore(self, rows: Rows, survey: Survey, gaps: set[int]) -> None:
        journal, broker = self._journal, self._broker
        journal.metadata.restored(rows)
        journal.epoch = rows.epoch or ""
        journal.next_segment = max(journal.next_segment, rows.tallies["segment"].next)
        for name, bound in groupby(sorted(rows.bindings), key=itemgetter(0)):
            broker.restore_bindings(name, [event for _, event in bound])
        for _, _, ids in rows.once:
            broker.once.restore(ids.split(b"\n"))
        queues = [
            (row.id, broker.restore_queue(row.id, row.name, row.policy))
            for row in rows.queues.values()
        ]
        # A deleted queue's id is never used again.
        broker.next_queue_id = max(broker.next_queue_id, rows.tallies["queue"].next)
        for queue_id, queue in queues:
            marks = survey.marks.get(queue_id, {})
            self._messages(queue_id, queue, marks, whole=queue_id not in gaps)

    def _messages(
        self, queue_id: int, queue: Queue, marks: dict[int, Mark], *, whole: bool
    ) -> None:
        """Everything stays on disk until a consumer comes; what was delivered and is alive goes
        back. A queue with gaps has no stretch to page: all of it goes back."""
        index = self._index.queues[queue_id]
        cursor = index.cursor if whole else index.next_seq
        # Below the cursor without a mark: delivered once, held at the crash.
        returned = (
            (number, marks.get(number, Mark(redelivered=number < index.cursor)))
            for span in index.overlapping(0, cursor)
            for first, count in span.living()
            for number in range(first, min(first + count, cursor))
        )
        waiting = {number: mark for number, mark in marks.items() if number >= cursor}
        queue.restore(index.next_seq, cursor, returned, waiting)
        if not whole:
            queue.lane.tell_cursor()

    async def _errors(self) -> tuple[list[ErrorRecord], list[Damage]]:
        """The last error replies. Nothing depends on them, so damage is told and no more."""
        try:
            return errors(NEWEST, await self._table(error_columns(NEWEST), "error"))
        except UNREADABLE as error:
            return [], [Damage("table error", str(error))]
