"""From the journal back to a broker, as it was at the last commit.

The one rule: what is damaged is told and refused, or, when told to salvage, told and set aside;
nothing is skipped silently.
"""

import sqlite3
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter

from mqks.broker.broker import Broker
from mqks.broker.changes import ErrorRecord
from mqks.broker.queue import Queue
from mqks.errors import JournalDamaged
from mqks.journal.index import QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.segment import SegmentDamaged
from mqks.journal.survey import Survey, checked, guess, missing, shown
from mqks.protocol.requests import DeleteRule


class Recovery:
    """One start of one server. `report` is called with a line for each thing that is damaged."""

    def __init__(self, journal: Journal, broker: Broker, report: Callable[[str], None]) -> None:
        self._journal = journal
        self._index = journal.index
        self._broker = broker
        self._report = report
        self._survey = Survey(journal.index)
        self._damaged: list[int] = []
        self._lost: list[str] = []

    async def run(self, *, salvage: bool) -> None:
        """Restore queues, bindings, rules, messages in order, unacked ones as rejected.

        Raises JournalDamaged, unless told to salvage what is whole.
        """
        try:
            queues = await self._queues()
            await self._segments(queues)
        except sqlite3.DatabaseError as error:
            raise JournalDamaged(
                f"{self._journal.path} can't be read, not even to salvage it: {error}"
            ) from error
        gaps = self._gaps(queues)
        if self._lost and not salvage:
            for line in self._lost:
                self._report(line)
            raise JournalDamaged(
                f"{self._journal.path} is damaged ({len(self._lost)} places, told above): restore "
                "a backup, or start with --salvage to go on with what is whole"
            )
        if self._damaged:
            await self._set_aside()
        for line in self._lost:
            self._report(f"salvaged without it: {line}")
        for queue_id, queue in queues.items():
            self._messages(queue_id, queue, whole=queue_id not in gaps)
        await self._errors()
        while self._index.droppable:
            await self._journal.maintain(idle=True)

    async def _queues(self) -> dict[int, Queue]:
        """Queues and bindings, from their own tables."""
        db, broker = self._journal.db, self._broker
        bindings = await db.execute_fetchall("select queue, event from binding order by queue")
        for name, rows in groupby(bindings, key=itemgetter(0)):
            broker.restore_bindings(name, [event for _, event in rows])
        queues = {}
        for queue_id, name, has_rule, delay_s, next_seq, cursor in await db.execute_fetchall(
            "select id, name, delete_when_unused, delete_delay_s, next_seq, cursor from queue"
        ):
            rule = DeleteRule(delay_s) if has_rule else None
            queues[queue_id] = broker.restore_queue(queue_id, name, rule)
            self._index.queues[queue_id] = QueueIndex(next_seq, cursor)
        for number, count, ids in await db.execute_fetchall(
            "select number, count, ids from once order by number"
        ):
            self._journal.once.restored(number, count)
            broker.once.restore(ids.split(b"\n"))
        # A deleted queue's id is never used again.
        for (last,) in await db.execute_fetchall(
            "select seq from sqlite_sequence where name = 'queue'"
        ):
            broker.next_queue_id = max(broker.next_queue_id, last + 1)
        return queues

    async def _segments(self, queues: dict[int, Queue]) -> None:
        """Every segment, checked."""
        names = {queue_id: queue.name for queue_id, queue in queues.items()}
        async with self._journal.db.execute(
            "select id, crc, cast(body as blob) from segment order by id"
        ) as cursor:
            cursor.arraysize = 16
            while rows := await cursor.fetchmany():
                for segment_id, crc, body in rows:
                    self._journal.next_segment = segment_id + 1
                    try:
                        sections = checked(segment_id, crc, body)
                    except SegmentDamaged as error:
                        self._damaged.append(segment_id)
                        self._lost.append(
                            f"segment {segment_id}: {error}; it held {guess(body, names)}"
                        )
                    else:
                        self._survey.place(segment_id, len(body), sections)
        self._survey.finish()

    def _gaps(self, queues: dict[int, Queue]) -> set[int]:
        """Queues of which never delivered messages are missing."""
        gaps = set()
        for queue_id, queue in queues.items():
            if lost := missing(self._index.queues[queue_id]):
                gaps.add(queue_id)
                count = sum(count for _, count in lost)
                self._lost.append(
                    f"queue {shown(queue.name)}: {count} waiting messages are missing"
                )
        return gaps

    async def _set_aside(self) -> None:
        """Damaged segments are kept, where nothing reads them."""
        ids = [(segment_id,) for segment_id in self._damaged]
        db = self._journal.db
        await db.execute("begin immediate")
        await db.executemany(
            "insert into damaged_segment select id, crc, body from segment where id = ?", ids
        )
        await db.executemany("delete from segment where id = ?", ids)
        await db.commit()

    def _messages(self, queue_id: int, queue: Queue, *, whole: bool) -> None:
        """Everything stays on disk until a consumer comes; what was delivered and is alive goes
        back. A queue with gaps has no stretch to page: all of it goes back."""
        index = self._index.queues[queue_id]
        marks = self._survey.marks.get(queue_id, {})
        cursor = index.cursor if whole else index.next_seq
        # Below the cursor without a mark: delivered once, held at the crash.
        returned = (
            (number, marks.get(number, 1 if number < index.cursor else 0))
            for span in index.overlapping(0, cursor)
            for first, count in span.living()
            for number in range(first, min(first + count, cursor))
        )
        waiting = {number: mark // 2 for number, mark in marks.items() if number >= cursor}
        queue.restore(index.next_seq, cursor, returned, waiting)
        if not whole:
            queue.tell_cursor()

    async def _errors(self) -> None:
        """The last error replies. Nothing depends on them, so damage is told and no more."""
        last, kinds = self._broker.last_errors, [str, int, str, bytes, bytes, str]
        try:
            rows = await self._journal.db.execute_fetchall(
                "select id, time_us, connection, request_id, action, reason from error"
                " order by id desc limit ?",
                (last.maxlen,),
            )
        except sqlite3.DatabaseError as error:
            self._report(f"the last errors can't be read: {error}")
        else:
            last.extendleft(ErrorRecord(*row) for row in rows if [*map(type, row)] == kinds)
