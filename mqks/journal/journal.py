"""The journal: one writing connection, one reading connection, and the index of what lies where.

The one rule: one task writes. It takes a batch, writes it in one statement and one commit, and
between batches lets go of what has died.
"""

import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import starmap
from pathlib import Path
from typing import Final

import aiosqlite
import anyio
from anyio.to_thread import run_sync

from mqks.broker.pending import Entry, Run
from mqks.broker.ranges import subtract, union
from mqks.durable import write_again
from mqks.errors import ConfigurationError, DiskFull, JournalDamaged, JournalFailed
from mqks.journal import wal
from mqks.journal.histogram import Histogram
from mqks.journal.index import Index, Segment, Span
from mqks.journal.lock import FileLock, identity
from mqks.journal.log_reader import LogReader, intact, reading
from mqks.journal.metadata import PUT_TALLY, Metadata
from mqks.journal.migrations import migrate
from mqks.journal.reader import State, connect, is_damage, refuse_newer, wal_path
from mqks.journal.segment import Lines, Section, checksum, decode, encode, runs_of
from mqks.journal.structure import UNREADABLE, header_damage, schema_damage, structure_damage
from mqks.journal.tables import shown
from mqks.limits import (
    PAGE_BYTES,
    SEGMENT_MERGE_COUNT,
    SEGMENTS_DROPPED_MAX,
)
from mqks.settings import Settings

SQLITE_VERSION: Final = sqlite3.sqlite_version
INSERT_SEGMENT: Final = "insert into segment (id, crc, body) values (?, ?, ?)"
PAGE_SIZE: Final = 4096
COMPACT_BYTES: Final = 4 * 1024 * 1024
"""One compaction reads about this much."""
SPARSE_BYTES_MIN: Final = 1024 * 1024
"""Sparse segments are left alone until they hold this much together."""
SMALL_COUNT_MAX: Final = 4096
"""Small segments are merged in a quiet moment, or when there are this many."""
DROP_COUNT_MIN: Final = 16
"""Dead segments are dropped this many at a time, while there is other work."""
RESERVE_PAGES: Final = 1024
"""Pages held back for acks, of a database with a size limit."""
VACUUM_PAGES: Final = 1000
"""Free pages given back to the file system in one step."""
FREE_PAGES_KEPT: Final = 256
"""Free pages that an idle database keeps for what comes next: 1 MiB."""
FREE_PAGES_BUSY: Final = 16384
"""Free pages that a busy database keeps: 64 MiB."""
SMALL_COMMIT_PAGES: Final = 0.25
"""What a commit costs the next checkpoint beside its body: small commits in a row write the same
page to the WAL again and again, and a checkpoint folds it once. 250 pages are some 900 commits of
one small message then, and 4 MiB of WAL."""
WAL_PAGES_IDLE: Final = 16
"""An idle journal folds a WAL of this many pages."""
WAL_PAGES_RESTART: Final = 4096
"""A WAL of this many pages (16 MiB) is begun again, if need be by waiting for its readers."""
READERS_WAIT_MS: Final = 50
BUSY_WAIT_MS: Final = 100
WAL_BYTES_KEPT: Final = 4 * 1024 * 1024
"""The WAL's file is cut back to this size when it is begun again."""
VACUUM_LOOK_S: Final = 1.0
"""How often a busy journal looks for free pages."""
COMMIT_SECONDS: Final = (
    1e-4,
    2.5e-4,
    5e-4,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
BATCH_RECORDS: Final = tuple(4.0**power for power in range(9))
"""Commits are counted by how long they took, and by how many messages, acks and marks they held."""
FULL_CODES: Final = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
"""Failures that pass when there is room again; any other ends the process."""


Report = Callable[[str], None]
"""Called with a line for each thing that is damaged."""


def _ready(path: Path, settings: Settings, report: Report) -> wal.Finding | None:
    """Before the file is opened for writing. Tell what is wrong with its WAL, and yet can be gone
    on with. Raises as `Journal.open`, and what SQLite raises."""
    its_wal = wal_path(path)
    try:
        refuse_newer(path)
        finding = None
        if its_wal.exists():
            finding = wal.look(its_wal)
            _refuse_wal(its_wal, finding, settings, report)
            # Commits of a server that died before their sync, or of it, are about to be believed.
            write_again(its_wal)
    except OSError as error:
        if error.filename:
            raise ConfigurationError(f"can't open {error.filename}: {error.strerror}") from error
        raise JournalFailed(f"{its_wal} can't be written again: {error.strerror}") from error
    if path.stat().st_size:
        _refuse_structure(path, report)
    return finding


def _refuse_wal(
    its_wal: Path, finding: wal.Finding | None, settings: Settings, report: Report
) -> None:
    """SQLite takes it to end before the first damaged frame."""
    # With less than full, commits in any order are what a power cut may leave.
    if finding is None or finding.is_torn or settings.synchronous != "full":
        return
    if not settings.salvage:
        report(f"{its_wal.name} {finding}")
        raise JournalDamaged(
            f"{its_wal} is damaged: restore a backup, or start with --salvage to go on without "
            f"the commits from frame {finding.frame} on"
        )
    report(f"salvaged without it: {its_wal.name} {finding}")


def _refuse_structure(path: Path, report: Report) -> None:
    """What SQLite can't read, or would write over, can't be salvaged in place."""
    rollback = path.with_name(f"{path.name}-journal")
    if rollback.exists() and rollback.stat().st_size:
        return  # It was only begun, and SQLite begins it again.
    damage = header_damage(path)
    with closing(connect(path, State.of(path))) as db:
        damage += [*schema_damage(db), *structure_damage(db)]
    for place, what in damage:
        report(f"{place}: {what}")
    if damage:
        raise JournalDamaged(
            f"{path} is damaged or no database of MQKS ({len(damage)} places, told above), and "
            "can't be salvaged: restore a backup, or export what can still be read"
        )


def _moved(path: Path, what: str, was: tuple[int, int]) -> str:
    """What has happened to a file, if anything."""
    try:
        now = identity(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return f"{what} was deleted or moved"
    except OSError as error:
        return f"{what} can't be looked at: {error.strerror}"
    return "" if now == was else f"{what} was replaced by another file"


class Journal:
    def __init__(
        self,
        raw: sqlite3.Connection,
        db: aiosqlite.Connection,
        reader: aiosqlite.Connection,
        log: LogReader,
        lock: FileLock,
        path: Path,
        settings: Settings,
    ) -> None:
        self.raw = raw
        self.db = db
        self.reader = reader
        self.path = path
        self.gone = ""
        """What of its files is no longer where it was, as of the last `look`."""
        self._files = [
            (Path(settings.db).absolute(), "the database", identity(os.fstat(lock.database))),
            (wal_path(path), "its WAL", identity(wal_path(path).stat())),
        ]
        self.index = Index()
        self.next_segment = 1
        self.epoch = ""
        """Another one for each database made."""
        self.metadata = Metadata(settings.once_ids_max, settings.errors_kept_max)
        self.begin_wal_anew = False
        """The rest of a damaged WAL would be found again behind what is written next."""
        self.torn = ""
        """What the WAL's end is like, where a power cut may have torn it."""
        self.log = log
        log.await_move = self._await_move
        self.checkpoints = 0
        self.commit_seconds = Histogram(*COMMIT_SECONDS)
        self.batch_records = Histogram(*BATCH_RECORDS)
        self._lock = lock
        self._moving = anyio.Lock()
        """Held while segments are deleted, until the index knows it."""
        self._has_failed = False
        self._checkpoint_pages = settings.wal_checkpoint_pages
        self._pages_max = settings.db_bytes_max // PAGE_SIZE
        self._reserve_pages = min(self._pages_max // 4, RESERVE_PAGES)
        self._room_bytes = settings.batch_bytes_max
        self._wal_pages = 0.0
        """Pages that a checkpoint would have to write into the database file, about."""
        self._wal_bytes_max = settings.wal_bytes_max
        self._wal_is_held = False
        self._restart_pages = WAL_PAGES_RESTART
        self._free_bytes_min = settings.disk_free_bytes_min
        self._ballast_bytes = settings.ballast_bytes
        self._looked_s = 0.0
        self._freed = True
        """Whether pages may have become free since the last look."""

    # -- opening and closing

    @classmethod
    async def open(cls, settings: Settings, report: Report = lambda line: None) -> "Journal":
        """Take the lock, look whether the file is whole, open it and bring its schema up to date.

        Raises DatabaseLocked, SchemaTooNew, JournalDamaged, JournalFailed, ConfigurationError.
        """
        path = Path(settings.db)
        if path.is_dir():  # Before its lock is made, in a directory that nobody meant.
            raise ConfigurationError(f"can't open {path}: it is a directory")
        try:
            lock = FileLock(path).take()
        except OSError as error:
            raise ConfigurationError(f"can't open {path}: {error.strerror}") from error
        try:
            finding = await run_sync(_ready, path, settings, report)
            # Shared between aiosqlite's thread and `write_now`, never at the same time.
            raw = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            raw.text_factory = shown
            db = await aiosqlite.Connection(lambda: raw, iter_chunk_size=64)
            reader: aiosqlite.Connection | None = None
            try:
                await cls._prepare(db, settings)
                reader = await aiosqlite.connect(
                    f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None
                )
                # All three have their descriptors from their first read on: from now.
                await reader.execute_fetchall("select 1 from sqlite_schema")
                log = LogReader(path)
                journal = cls(raw, db, reader, log, lock, path.resolve(), settings)
                journal.begin_wal_anew = finding is not None
                if finding and (finding.is_torn or settings.synchronous != "full"):
                    journal.torn = f"{wal_path(path).name} {finding}"
                await journal.hold_reserve(True)
            except BaseException:
                if reader:
                    await reader.close()
                await db.close()
                raise
        except UNREADABLE as error:
            lock.release()
            # What it can't execute does not fit the schema, which has been looked at.
            if is_damage(error) or getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_ERROR:
                raise JournalDamaged(f"{path} is damaged or no database: {error}") from error
            raise ConfigurationError(f"can't open {path}: {error}") from error
        except BaseException:
            lock.release()
            raise
        return journal

    @staticmethod
    async def _prepare(db: aiosqlite.Connection, settings: Settings) -> None:
        # Page size and auto_vacuum count only before the first table and before WAL.
        for pragma in (
            f"page_size = {PAGE_SIZE}",
            "auto_vacuum = incremental",
            "journal_mode = wal",
            f"synchronous = {settings.synchronous}",
            # SQLite's own checkpoints hide their failures: `_checkpoint` does them.
            "wal_autocheckpoint = 0",
            f"journal_size_limit = {WAL_BYTES_KEPT}",
            # Debian's SQLite overwrites what it frees unless told not to: 1.7 times the writes.
            "secure_delete = off",
            "cache_size = -16384",
            f"busy_timeout = {BUSY_WAIT_MS}",
        ):
            await db.execute_fetchall(f"pragma {pragma}")
        await migrate(db)

    async def close(self) -> None:
        # The last connection to close folds the WAL and deletes it, unless it may only read. After
        # a failed sync the disk may hold an older WAL, which could come back beside the new state;
        # and what has the WAL's name may be another file.
        if self.metadata.tallies and not self._has_failed:
            with suppress(JournalFailed):
                await self._count_segments()
        if self.look() and not self._has_failed:
            with suppress(sqlite3.Error):
                await self.db.execute_fetchall("pragma wal_checkpoint(truncate)")
        keeps_wal = self._has_failed or self.gone
        first, last = (self.db, self.reader) if keeps_wal else (self.reader, self.db)
        self.log.close()
        await first.close()
        await last.close()
        self._lock.release()

    def leave(self) -> None:
        """What the file says is in doubt: let it and its WAL be as they are, when it is closed."""
        self._has_failed = True

    def announce(self, url: str) -> None:
        """Let those who know the file find its server."""
        self._lock.tell(url)

    # -- its files

    def look(self) -> str:
        """Look whether the names of the files still lead to those that are open; tell what of them
        does not. What is written to a file without its name is lost, or found by nobody."""
        gone = next(filter(None, starmap(_moved, self._files)), "")
        if gone and not self.gone:
            self._wal_pages = max(self._wal_pages, 1.0)
        self.gone = gone
        return gone

    def keep_lock_file(self) -> str:
        """Make the lock file again if it has gone. Tell whether it had: nothing while it had not,
        or else what came of it."""
        if self._lock.is_there:
            return ""
        return "made again" if self._lock.make_again() else "can't be made again"

    @property
    def disk_free_bytes(self) -> int:
        """By the open file: its name may lead elsewhere. Raises OSError."""
        disk = os.fstatvfs(self._lock.database)
        return disk.f_bavail * disk.f_frsize

    # -- writing

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """What has begun on the writer's thread is waited for, whoever wants to stop: the index
        must know what the file says."""
        with anyio.CancelScope(shield=True), self._failures():
            yield

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Tell a full disk, which passes, from one that can't be trusted any more."""
        try:
            yield
        except sqlite3.Error as error:
            code = getattr(error, "sqlite_errorcode", 0)
            if code & 0xFF in FULL_CODES:
                raise DiskFull(f"the journal can't be written: {error}") from error
            self._has_failed = True
            name = getattr(error, "sqlite_errorname", "")
            raise JournalFailed(f"the journal can't be written: {error} {name}") from error

    async def write(self, entry: Entry) -> None:
        """Write an entry in one commit. Returns when it is durable.

        Raises DiskFull when there is no room (nothing of it was written then; the same entry may
        be tried again) and JournalFailed when the disk can't be trusted any more.
        """
        if not entry.writes:
            return
        start_s = time.monotonic()
        self._check_floor(entry)
        sections, row = self._segment(entry)
        with self._whole():
            if entry.has_metadata:
                inserts = [(INSERT_SEGMENT, row)] if sections else []
                await run_sync(self.metadata.write, self.raw, entry, inserts)
            else:
                await self.db.execute(INSERT_SEGMENT, row)
        self._written(entry, sections, row, start_s)

    def write_now(self, entry: Entry) -> None:
        """The same for a small entry without metadata, on the caller's thread: for when waiting
        for another thread, twice, would take longer than the commit. Only while nothing else is
        under way on the writing connection."""
        start_s = time.monotonic()
        self._check_floor(entry)
        sections, row = self._segment(entry)
        with self._failures():
            self.raw.execute(INSERT_SEGMENT, row)
        self._written(entry, sections, row, start_s)

    def _check_floor(self, entry: Entry) -> None:
        """Raise DiskFull for messages while the disk has less space than must stay free; 1 µs."""
        if (
            self._free_bytes_min
            and self._free_bytes() < self._free_bytes_min
            and any(change.runs for change in entry.changes)
        ):
            raise DiskFull(
                f"less than {self._free_bytes_min} bytes are free on the disk of {self.path}"
            )

    def _free_bytes(self) -> int:
        try:
            return self.disk_free_bytes
        except OSError as error:
            raise JournalFailed(f"the disk of {self.path} can't be looked at: {error}") from error

    def _segment(self, entry: Entry) -> tuple[list[Section], tuple[int, int, bytes]]:
        """What an entry says, and the row that says it."""
        sections = [
            Section(
                change.lane_id,
                change.next_seq,
                change.cursor,
                [Lines(run.first, entry.time_us, run.lines) for run in change.runs],
                change.acks + change.moved,
                list(change.marks.items()),
            )
            for change in entry.changes
        ]
        return sections, self._row(sections)

    def _row(self, sections: list[Section]) -> tuple[int, int, bytes]:
        """The next segment, to be inserted."""
        body = encode(sections)
        return self.next_segment, checksum(self.next_segment, body), body

    def _written(
        self, entry: Entry, sections: list[Section], row: tuple[int, int, bytes], start_s: float
    ) -> None:
        self.batch_records.observe(entry.records)
        self.commit_seconds.observe(time.monotonic() - start_s)
        segment_id, _, body = row
        self._wal_pages += len(body) / PAGE_SIZE + SMALL_COMMIT_PAGES
        self._wal_pages += len(entry.queues) + len(entry.errors)
        for queue_id, state in entry.queues.items():
            if state is None:
                self.index.forget_queue(queue_id)
        if not sections:
            return
        index = self.index
        segment = self._place(segment_id, len(body), sections)
        for section in sections:
            queue = index.queues[section.queue_id]
            for first, count in section.acks:
                index.settle(segment, queue, first, count)
            for number, _ in section.marks:
                index.mark(segment, queue, number)
        index.look_at(segment)

    def _place(self, segment_id: int, size: int, sections: Iterable[Section]) -> Segment:
        """A segment has been written: its messages lie there now."""
        self.next_segment += 1
        index = self.index
        segment = index.add_segment(segment_id, size)
        for section in sections:
            queue = index.touch(segment, section.queue_id, section.next_seq, section.cursor)
            for first, time_us, lines in section.runs:
                index.add_messages(segment, queue, first, len(lines), sum(map(len, lines)), time_us)
        return segment

    # -- letting go

    @property
    def overdue(self) -> bool:
        """Whether `maintain` has something to do that should not wait for a quiet moment."""
        index = self.index
        return (
            self._fold_is_due
            or len(index.droppable) >= DROP_COUNT_MIN
            or len(index.small) >= SMALL_COUNT_MAX
            or index.sparse_bytes >= SPARSE_BYTES_MIN
        )

    @property
    def _fold_is_due(self) -> bool:
        return self._wal_pages >= self._checkpoint_pages or bool(self.gone and self._wal_pages)

    async def maintain(self, *, idle: bool) -> bool:
        """Do one step of what is due; return whether there may be more.

        While there is other work, only what has gathered enough to be worth a commit.
        """
        index = self.index
        with self._whole():
            if self._fold_is_due:
                await self._checkpoint()
            if len(index.droppable) >= (1 if idle else DROP_COUNT_MIN):
                await self._drop(list(index.droppable.values())[:SEGMENTS_DROPPED_MAX])
                return True
            if len(index.small) >= (SEGMENT_MERGE_COUNT if idle else SMALL_COUNT_MAX):
                victims = list(index.small.values())[:SEGMENT_MERGE_COUNT]
                await self._compact(victims)
                return True
            if index.sparse_bytes >= (1 if idle else SPARSE_BYTES_MIN):
                victims, size = [], 0
                for segment in index.sparse.values():
                    victims.append(segment)
                    size += segment.bytes
                    if size >= COMPACT_BYTES or len(victims) >= SEGMENT_MERGE_COUNT:
                        break
                await self._compact(victims)
                return True
            if idle and not self._freed and self._wal_pages >= WAL_PAGES_IDLE:
                await self._checkpoint()
                return True
            if self._freed and (idle or time.monotonic() > self._looked_s + VACUUM_LOOK_S):
                return await self._vacuum(FREE_PAGES_KEPT if idle else FREE_PAGES_BUSY)
            return False

    async def compact_fully(self) -> None:
        """Do all that makes the file smaller, however long it takes. Only while nothing else is
        written."""
        while await self.maintain(idle=True):
            pass
        while len(self.index.small) > 1:
            await self._compact(list(self.index.small.values())[:SEGMENT_MERGE_COUNT])
        self._freed = True
        while await self._vacuum(0):
            pass

    async def _drop(self, segments: list[Segment]) -> None:
        """In one hop to another thread."""
        ids = [segment.id for segment in segments]
        words = self.index.last_words(segments)
        async with self._moving:
            await run_sync(self.metadata.drop, self.raw, ids, self.next_segment, words)
            self.index.drop(segments)
        self._wal_pages += 2 * len(segments)
        self._freed = True

    async def _compact(self, victims: list[Segment]) -> None:
        """Write what is alive in these segments into one new segment, and drop them."""
        index = self.index
        victims = [victim for victim in victims if victim.id not in index.droppable]
        bodies = await self._bodies(self.db, [victim.id for victim in victims])
        for victim in victims:
            if victim.id not in bodies:
                raise self._missing(victim.id)
        gone = set(victims)
        tidied: set[Span] = set()
        carried: dict[int, Section] = {}
        for victim in victims:
            body = bodies[victim.id]
            # Queues that share a text go on sharing it.
            texts: dict[tuple[int, int], list[bytes]] = {}
            for stored in decode(body):
                queue = index.queues.get(stored.queue_id)
                if queue is None:
                    continue
                section = carried.get(stored.queue_id)
                if section is None:
                    section = Section(stored.queue_id, queue.next_seq, queue.cursor, [], [], [])
                    carried[stored.queue_id] = section
                for run in stored.runs:
                    span = queue.find(run.first)
                    if span is None or span.segment is not victim:
                        continue
                    if span not in tidied:
                        tidied.add(span)
                        span.dead = union(span.dead)
                    place = run.start, run.end
                    lines = texts.get(place) or texts.setdefault(place, run.lines(body))
                    section.runs.extend(
                        Lines(
                            first, run.time_us, lines[first - run.first : first - run.first + count]
                        )
                        for first, count in subtract(run.first, run.first + run.total, span.dead)
                    )
                section.acks.extend(
                    acked for acked in stored.acks if index.still_settles(queue, acked, gone)
                )
                section.marks.extend(
                    (number, mark) for number, mark in stored.marks if queue.find(number)
                )
        sections = [
            section
            for queue_id, section in carried.items()
            if section.runs
            or section.acks
            or section.marks
            or index.queues[queue_id].latest in gone
        ]
        async with self._moving:
            await self._replace(victims, sections)

    async def _replace(self, victims: list[Segment], sections: list[Section]) -> None:
        """Drop these segments; `sections` are what is alive in them, for a new one."""
        index = self.index
        row = segment_id, _, body = self._row(sections)
        ids = [victim.id for victim in victims]
        inserts = [(INSERT_SEGMENT, row)] if sections else []
        next_id = self.next_segment + len(inserts)
        await run_sync(self.metadata.drop, self.raw, ids, next_id, (), inserts)
        self._freed = True
        self._wal_pages += len(body) // PAGE_SIZE + 3
        index.withdraw(victims)
        heir = None
        if sections:
            heir = self._place(segment_id, len(body), sections)
            for section in sections:
                queue = index.queues[section.queue_id]
                for acked in section.acks:
                    index.name_settled(heir, queue, acked)
                for number, _ in section.marks:
                    index.mark(heir, queue, number)
        index.drop(victims, heir)
        if heir is not None:
            index.look_at(heir)

    async def _vacuum(self, keep: int) -> bool:
        self._looked_s = time.monotonic()
        surplus = await self._number("pragma freelist_count") - keep
        if surplus <= 0:
            self._freed = False
            return False
        # `execute` would free one page only: the statement must be stepped to its end.
        await self.db.executescript(f"pragma incremental_vacuum({min(surplus, VACUUM_PAGES)})")
        self._wal_pages += self._checkpoint_pages
        return True

    async def _checkpoint(self) -> None:
        """Fold the WAL back into the database file, as far as readers let it. The WAL's own file
        keeps its size: to write over it is synced in 190 µs, to append to it in 300.

        SQLite would do it by itself within a commit, whose confirms had to wait for it then, and
        would keep silent about a failed fsync.
        """
        await self._count_segments()
        self._wal_pages = 0.0
        self.checkpoints += 1
        if self.gone:
            # The database alone must be all there is, and a WAL that is left beside another
            # database would be taken for that one's.
            await self.db.execute_fetchall("pragma wal_checkpoint(truncate)")
            return
        ((_, pages, _),) = await self.db.execute_fetchall("pragma wal_checkpoint(passive)")
        if pages < min(self._restart_pages, self._wal_bytes_max // PAGE_SIZE):
            return
        # Readers that overlap keep the WAL from being begun again: wait for those of now.
        await self.db.execute_fetchall(f"pragma busy_timeout = {READERS_WAIT_MS}")
        self.checkpoints += 1
        ((held, pages, _),) = await self.db.execute_fetchall("pragma wal_checkpoint(restart)")
        await self.db.execute_fetchall(f"pragma busy_timeout = {BUSY_WAIT_MS}")
        # The wait must not come again and again while one of them stays for long.
        self._restart_pages = pages + WAL_PAGES_RESTART if held else WAL_PAGES_RESTART
        self._wal_is_held = bool(held) and pages * PAGE_SIZE >= self._wal_bytes_max
        if self._wal_is_held:
            raise DiskFull(f"another process reads {self.path} for long: the WAL has {pages} pages")

    async def _count_segments(self) -> None:
        """Before they are folded, so that a page of them that is lost later is noticed. What is not
        folded stands in the WAL, of which each frame has a checksum."""
        tally = self.metadata.segments(self.next_segment)
        if tally != self.metadata.tallies["segment"]:
            # On a full disk folding matters more.
            with suppress(DiskFull), self._failures():
                await self.db.execute(PUT_TALLY, tally.row("segment"))
                self.metadata.tallies["segment"] = tally

    async def begin_wal(self) -> None:
        """Leave nothing in it, if it must be begun anew."""
        if self.begin_wal_anew:
            with self._whole():
                await self._count_segments()
                await self.db.execute_fetchall("pragma wal_checkpoint(truncate)")

    async def has_room(self) -> bool:
        """Whether the database may grow by a batch or two, as far as its own limits go."""
        if self._wal_is_held:
            self._wal_is_held, self._restart_pages = False, 0
            with self._whole():
                await self._checkpoint()
        # The ballast will take its part again.
        if self._free_bytes_min and self._free_bytes() < self._free_bytes_min + self._ballast_bytes:
            return False
        if not self._pages_max:
            return True
        pages = await self._number("pragma page_count")
        free = await self._number("pragma freelist_count")
        wanted = min(2 * self._room_bytes // PAGE_SIZE, self._pages_max // 8)
        return pages - free + self._reserve_pages + wanted < self._pages_max

    async def hold_reserve(self, held: bool) -> None:
        """A database with a size limit of its own keeps part of it back, as the ballast does on
        the disk: what is written when the rest is full are acks."""
        if self._pages_max:
            pages = self._pages_max - (self._reserve_pages if held else 0)
            await self.db.execute_fetchall(f"pragma max_page_count = {max(1, pages)}")

    async def _number(self, sql: str) -> int:
        ((number,),) = await self.db.execute_fetchall(sql)
        return int(number)

    # -- reading

    async def read(self, queue_id: int, first: int, bytes_max: int = PAGE_BYTES) -> list[Run]:
        """Return the living messages of a queue from number `first` on, in order, about
        `bytes_max` bytes of them, at least one when there is one. Settled ones may be among them.

        Raises JournalFailed when a segment is damaged or missing, or the disk can't be read.
        """
        while True:
            ids: set[int] = set()
            end, size = first, 0
            queue = self.index.queues.get(queue_id)
            for span in queue.overlapping(first, queue.next_seq) if queue is not None else ():
                if span.dead_count < span.end - span.first:
                    ids.add(span.segment.id)
                    end, size = span.end, size + span.bytes
                    if size >= bytes_max:
                        break
            with reading(self.path):
                bodies = await self._bodies(self.reader, list(ids))
            if bodies.keys() == ids:
                return sorted(
                    Run(max(first, run.first), run.lines(body)[max(0, first - run.first) :])
                    for body in bodies.values()
                    for run in runs_of(body, queue_id)
                    if run.first < end and run.first + run.total > first
                )
            # A compaction may have moved something meanwhile: then look again.
            for segment_id in ids - bodies.keys():
                await self._await_move(segment_id)

    async def _await_move(self, segment_id: int) -> None:
        """A segment that the index names was not found: return when the index does not name it any
        more. Raises JournalFailed when nothing has moved it: another look would not find it."""
        async with self._moving:
            pass
        if segment_id in self.index.segments:
            raise self._missing(segment_id)

    def _missing(self, segment_id: int) -> JournalFailed:
        return JournalFailed(f"segment {segment_id} of {self.path} is missing: the file is damaged")

    async def _bodies(self, db: aiosqlite.Connection, ids: list[int]) -> dict[int, bytes]:
        """Bodies by segment id, those that are there, each checked."""
        marks = ",".join("?" * len(ids))
        rows = await db.execute_fetchall(
            f"select id, crc, body from segment where id in ({marks})", ids
        )
        return {row[0]: intact(self.path, *row) for row in rows}
