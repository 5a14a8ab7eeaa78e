"""The journal in a PostgreSQL database: one connection that writes, and two that read.

The one rule: nothing of PostgreSQL leaves this package, least of all its errors.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import anyio
import psycopg
from anyio.to_thread import run_sync
from psycopg.types.numeric import Int8

from mqks.audit import AuditRecord
from mqks.broker.spine.log.pending import Entry, ErrorRecord
from mqks.errors import (
    ClaimLost,
    ConfigurationError,
    DatabaseUnreachable,
    DiskFull,
    InspectionFailed,
    JournalDamaged,
    JournalFailed,
    MqksError,
)
from mqks.journal.once import OnceRow, OnceRows
from mqks.journal.postgres import migrations, statements
from mqks.journal.postgres.address import PostgresAddress, line_of, parse
from mqks.journal.postgres.claim import BEAT_S, RELEASE_S, RETRY_S, Claim
from mqks.journal.postgres.claim import shown as shown_holder
from mqks.journal.postgres.connection import Reading, Row
from mqks.journal.postgres.statements import ints
from mqks.journal.segment import NewSegment, checksum
from mqks.journal.store import (
    Damage,
    Head,
    LastWords,
    Metadata,
    QueueRow,
    Report,
    Store,
    changed_queues,
    check_policy,
    keep_queues,
    named_rows,
    shown,
)
from mqks.settings import DatabaseUrl, Settings

STORED_AT_ONCE_BYTES_MAX: Final = 256 * 1024
"""More is joined and gets its checksums in a thread."""
HEADS_AT_ONCE: Final = 256
"""Heads that are read in one step of a start."""
StoredSegment = tuple[int, int, int, bytes, bytes]
"""Id, checksum of the head, that of the text, head and text."""


class PostgresStore(Store):
    """Made by `open`."""

    def __init__(
        self, address: PostgresAddress, claim: Claim, settings: Settings, server: str
    ) -> None:
        self.name = f"{address.shown} (schema {address.schema})"
        self.versions = {"postgresql": server}
        self._address = address
        self._claim = claim
        self._beats: asyncio.Task[None] | None = None
        """While the journal is loaded."""
        self._is_loaded = asyncio.Event()
        self._foreground, self._background = Reading(address), Reading(address)
        self._queues: dict[int, QueueRow] = {}
        self._once_ids_max = settings.once_ids_max
        self._once = OnceRows(self._once_ids_max)
        self._errors_kept_max = settings.errors_kept_max
        self._audit_kept_max = settings.audit_kept_max
        self._segments = 0
        """How many there are."""
        self._sizes: dict[int, int] = {}
        self._bytes = 0
        """Of each segment, and of all."""
        self._bytes_max = settings.db_bytes_max
        self._room_bytes = min(2 * settings.batch_bytes_max, self._bytes_max // 8)
        self._next_queue_id = 1

    # -- opening and closing

    @classmethod
    async def open(
        cls, settings: Settings, report: Report, *, must_exist: bool = False
    ) -> "PostgresStore":
        """Connect, check the server's settings, and create the tables if there are none.

        Raises SchemaTooNew, JournalDamaged, JournalFailed, ConfigurationError, DatabaseUnreachable;
        InspectionFailed if there is no journal and `must_exist`.
        """
        assert isinstance(settings.db, DatabaseUrl)
        address = parse(settings.db)
        claim = Claim(address, settings.db_replication)
        made = False
        try:
            connection = await claim.first_connection()
            if not must_exist:
                made = await migrations.create(connection, address)
            elif not await migrations.exists(connection, address):
                raise InspectionFailed(f"{address.shown}: no journal in schema {address.schema}")
            await migrations.version(connection, address)
        except psycopg.Error as error:
            await claim.release()
            # A server that fails meanwhile may be back soon.
            is_lost = isinstance(error, psycopg.OperationalError)
            kind = DatabaseUnreachable if is_lost else ConfigurationError
            raise kind(f"can't use {address.shown}: {line_of(error)}") from error
        except BaseException:
            with anyio.CancelScope(shield=True):
                await claim.release()
            raise
        server = connection.info.parameter_status("server_version") or ""
        store = cls(address, claim, settings, server)
        store.made = made
        return store

    async def claim(self, *, wait: bool) -> None:
        try:
            await self._claim.take(wait=wait)
            connection = await self._claim.connected()
            # Another broker may have upgraded it while this one waited.
            old = await migrations.version(connection, self._address)
            new = await migrations.upgrade(connection, old)
            self.upgraded = (old, new) if old < new else None
        except psycopg.Error as error:
            raise JournalFailed(f"{self.name} can't be claimed: {line_of(error)}") from error
        self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        """Loading may take longer than a suspicion."""
        while not self._is_loaded.is_set():
            await self._claim.beat()
            with anyio.move_on_after(BEAT_S):
                await self._is_loaded.wait()

    async def _end_beats(self) -> None:
        """From here on there are other commits. Raises what the beats have found."""
        self._is_loaded.set()
        if self._beats is not None:
            await self._beats

    async def close(self) -> None:
        with suppress(MqksError), anyio.move_on_after(RELEASE_S):
            await self._end_beats()
        await self._claim.release()
        self._foreground.close()
        self._background.close()

    # -- starting

    async def load(self) -> Metadata:
        [(epoch, segments, next_queue_id)] = await self._rows(statements.OWNER)
        self._segments, self._next_queue_id = segments, next_queue_id
        self._queues = {row[0]: QueueRow(*row) for row in await self._rows(statements.QUEUES)}
        once = await self._rows(statements.ONCE)
        self._once = OnceRows(self._once_ids_max)
        for number, count, _ in once:
            self._once.restored(OnceRow(number, count, 0))
        metadata = Metadata(
            epoch=epoch,
            queues=dict(self._queues),
            bindings=[(queue, event) for queue, event in await self._rows(statements.BINDINGS)],
            once=[each for _, _, ids in once for each in ids.split(b"\n")],
            schedules=dict(await self._rows(statements.SCHEDULES)),
            results={row[0]: (row[1], row[2]) for row in await self._rows(statements.RESULTS)},
            batches=dict(await self._rows(statements.BATCHES)),
            errors=[error_record(*row) for row in await self._rows(statements.ERRORS)],
            audit=[AuditRecord.parse(*row) for row in await self._rows(statements.AUDIT)],
            next_queue_id=next_queue_id,
            queue_ids_end=next_queue_id,
        )
        check_policies(self._queues.values())
        return metadata

    async def segments(self, metadata: Metadata) -> AsyncIterator[Sequence[Head]]:
        count = last = self._bytes = 0
        self._sizes.clear()
        while rows := await self._rows(statements.HEADS, [last, HEADS_AT_ONCE]):
            last = rows[-1][0]
            count += len(rows)
            heads = [head_of(*row) for row in rows]
            self._count(heads)
            yield heads
            if self._beats is not None and self._beats.done():
                await self._beats
        if count != self._segments:
            what = f"{count} exist, {self._segments} were written"
            metadata.damage.append(Damage("table segment", what))
        self._segments = count
        metadata.next_segment = self._claim.owner.last + 1

    async def _rows(self, statement: str, values: Sequence[Any] = ()) -> list[Row]:
        try:
            return await self._foreground.rows(statement, values, self._claim.server)
        except psycopg.Error as error:
            raise JournalFailed(f"{self.name} can't be read: {line_of(error)}") from error

    async def salvage(self, metadata: Metadata, damaged: Sequence[int]) -> None:
        self._next_queue_id = metadata.next_queue_id
        await self._end_beats()
        await self._change(queues=dict(metadata.queues), drop=damaged, salvage=True)

    async def begin(self) -> None:
        await self._end_beats()
        await self._claim.beat()

    def announce(self, url: str, far_url: str) -> None:
        self._claim.url = far_url or url

    # -- writing

    async def commit(
        self,
        segments: Sequence[NewSegment],
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        last_words: Iterable[LastWords] = (),
    ) -> None:
        if not drop:
            self._check_size(segments)
        if len(segments) == 1 and not (drop or last_words or (entry and entry.has_metadata)):
            [(new_last, head_crc, text_crc, head, text)] = await _stored(segments)
            values = {
                "new_last": Int8(new_last),
                "head_crc": Int8(head_crc),
                "text_crc": Int8(text_crc),
                "head": head,
                "text": text,
            }
            await self._claim.commit(statements.ADD, values, new_last)
            self._segments += 1
            self._count(segments)
            return
        states = {} if entry is None else entry.queues
        queues = changed_queues(self._queues, last_words, states)
        await self._change(segments, queues, entry, drop)

    async def _change(
        self,
        segments: Sequence[NewSegment] = (),
        queues: Mapping[int, QueueRow | None] | None = None,
        entry: Entry | None = None,
        drop: Sequence[int] = (),
        *,
        salvage: bool = False,
    ) -> None:
        entry, queues = entry or Entry(), queues or {}
        stored = await _stored(segments)
        kept = self._errors_kept_max
        found = entry.errors[-kept:] if kept else []
        once, gone = [], []
        if entry.once:
            once = [OnceRow(self._once.next, len(entry.once), 0)]
            gone = self._once.surplus(len(entry.once))
        next_queue_id = max(self._next_queue_id, *(queue_id + 1 for queue_id in queues), 1)
        count = self._segments + len(segments) - len(drop)
        last = segments[-1].id if segments else self._claim.owner.last
        bindings = entry.bindings.items()
        values: dict[str, Any] = {
            "new_last": Int8(last),
            "segments": Int8(count),
            "next_queue_id": Int8(next_queue_id),
            **statements.NEW_SEGMENTS.values(stored),
            "drop": ints(drop),
            "salvage": salvage,
            **statements.NEW_QUEUES.values(row for row in queues.values() if row is not None),
            "deleted_queues": ints(each for each, row in queues.items() if row is None),
            **statements.BOUND.values(key for key, is_bound in bindings if is_bound),
            **statements.UNBOUND.values(key for key, is_bound in bindings if not is_bound),
            **statements.NEW_ONCE.values(
                (row.number, row.ids, b"\n".join(entry.once)) for row in once
            ),
            "deleted_once": ints(row.number for row in gone),
            **statements.NEW_ERRORS.values(map(_error_row, found)),
            **statements.NEW_AUDIT.values((each.id, each.row()) for each in entry.audit),
            "audit_end": Int8(entry.audit[-1].id - self._audit_kept_max if entry.audit else 0),
            "has_errors": bool(found),
            "errors_kept": Int8(kept - len(found)),
        }
        for table, rows in named_rows(entry).items():
            put = ((name, *row) for name, row in rows.items() if row is not None)
            values |= statements.NAMED[table].values(put)
            values[f"deleted_{table}"] = [name for name, row in rows.items() if row is None]
        row = await self._claim.commit(statements.CHANGE, values, last)
        if row and row[0] != len(drop):
            raise JournalFailed(f"{len(drop) - row[0]} of the segments {[*drop]} were missing")
        self._segments, self._next_queue_id = count, next_queue_id
        self._count(segments, drop)
        for each in once:
            self._once.written(each)
        keep_queues(self._queues, queues)

    def _count(self, new: Sequence[Head | NewSegment], dropped: Sequence[int] = ()) -> None:
        for segment in new:
            self._sizes[segment.id] = segment.size
            self._bytes += segment.size
        for segment_id in dropped:
            self._bytes -= self._sizes.pop(segment_id, 0)

    def _check_size(self, segments: Sequence[NewSegment]) -> None:
        """Raise DiskFull for messages that db_bytes_max leaves no space for."""
        new = sum(segment.size for segment in segments if segment.texts)
        if new and self._bytes_max and self._bytes + new > self._bytes_max:
            raise DiskFull(f"{self.name} is full: db_bytes_max is reached")

    async def become(self, epoch: str) -> None:
        values = {"journal": epoch}
        await self._claim.commit(statements.BECOME, values, self._claim.owner.last)

    async def skip_to(self, segment_id: int, queue_id: int = 1) -> None:
        values = {"new_last": Int8(segment_id - 1), "next_queue_id": Int8(queue_id)}
        await self._claim.commit(statements.SKIP, values, segment_id - 1)
        self._next_queue_id = max(self._next_queue_id, queue_id)

    # -- maintenance

    @property
    def waits(self) -> str:
        return self._claim.waits

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._claim.committed_s

    @property
    def overdue(self) -> bool:
        return self._claim.beat_is_due

    async def tidy(self, *, idle: bool) -> bool:
        if self._claim.beat_is_due:
            await self._claim.beat()
        return False

    def abandon(self) -> None:
        self._claim.abandon()

    # -- reading

    async def bodies(self, ids: Sequence[int], *, background: bool = False) -> dict[int, bytes]:
        reading = self._background if background else self._foreground
        while True:
            try:
                return await self._bodies(reading, ids)
            except psycopg.OperationalError:
                # The connection was lost, as the writer's perhaps was.
                self._claim.check_abandoned()
                await anyio.sleep(RETRY_S)
            except psycopg.Error as error:
                raise JournalFailed(f"{self.name} can't be read: {line_of(error)}") from error

    async def _bodies(self, reading: Reading, ids: Sequence[int]) -> dict[int, bytes]:
        server = self._claim.server
        rows = await reading.rows(statements.BODIES, [[*ids]], server)
        found = {row[0]: _body(self.name, *row) for row in rows}
        if len(found) < len(ids):
            # A new owner may have deleted them.
            ((epoch,),) = await reading.rows(statements.EPOCH, (), server)
            if epoch != self._claim.owner.epoch:
                raise ClaimLost(f"another mqks has taken over {self.name}")
        return found

    def facts(self) -> dict[str, Any]:
        claim = self._claim
        return {
            "owner": shown_holder(claim.owner.holder or ""),
            "owner_url": claim.url or "",
            "claim": claim.owner.epoch,
            "active_s": round(time.monotonic() - claim.since_s, 3),
            "waits": claim.waits,
        }

    # -- space: that of segments; the database server's own cannot be seen from here

    async def has_room(self) -> bool:
        return not self._bytes_max or self._bytes + self._room_bytes < self._bytes_max


async def _stored(segments: Sequence[NewSegment]) -> list[StoredSegment]:
    """Their rows; much in a thread."""
    if sum(new.size for new in segments) > STORED_AT_ONCE_BYTES_MAX:
        return await run_sync(_stored_now, segments)
    return _stored_now(segments)


def _stored_now(segments: Sequence[NewSegment]) -> list[StoredSegment]:
    texts = [b"".join(new.texts) for new in segments]
    return [
        (new.id, checksum(new.id, new.head), checksum(new.id, text), new.head, text)
        for new, text in zip(segments, texts, strict=True)
    ]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")


def _error_row(record: ErrorRecord) -> tuple[str, int, bytes, bytes, bytes, bytes]:
    connection, reason = _bytes(record.connection), _bytes(record.reason)
    return record.id, record.time_us, connection, record.request_id, record.action, reason


def error_record(
    error_id: str, time_us: int, connection: bytes, request_id: bytes, action: bytes, reason: bytes
) -> ErrorRecord:
    return ErrorRecord(error_id, time_us, shown(connection), request_id, action, shown(reason))


def head_of(segment_id: int, crc: int, head: bytes, text_bytes: int) -> Head:
    is_right = checksum(segment_id, head) == crc
    return Head.checked(segment_id, len(head) + text_bytes, head, is_right=is_right)


def _body(
    name: str, segment_id: int, head_crc: int, head: bytes, text_crc: int, text: bytes
) -> bytes:
    if (checksum(segment_id, head), checksum(segment_id, text)) != (head_crc, text_crc):
        raise JournalFailed(f"segment {segment_id} of {name} is damaged")
    return head + text


def check_policies(rows: Iterable[QueueRow]) -> None:
    for row in rows:
        try:
            check_policy(row)
        except ValueError as error:
            raise JournalDamaged(
                f"the policy of queue {shown(row.name)} is damaged: {error}"
            ) from None
