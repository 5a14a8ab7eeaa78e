"""Reads a database file: what a server would find in it, and more.

    with DatabaseFile.open(path) as file:
        file.queues, file.bindings, file.facts, file.damage      # as of the last `refresh`
        file.messages(b"queue", after=0)                         # an iterator, in order
        file.errors(limit=20)                                    # the newest first

- `Queue`: name, id, policy, next_seq, cursor, ready, unacked, scheduled, bytes, oldest_us
- `Message`: seq, time_us, id, event, data, retry, unacked, doubtful, meta, rejects, losses, due_us,
  expires_us
- `ErrorRecord`: id, time_us, connection, request_id, action, reason
- `Facts`: schema_version, epoch, db_bytes, wal_bytes, page_bytes, free_pages, segments,
  segment_bytes, set_aside
- `Damage`: place, what

It can read while a server uses the file: segments never change, so a list of their ids, read in one
transaction, is a state of the journal, whenever their bodies are read. A damaged file, even with a
damaged SQLite structure, is decoded as far as possible.

The one rule: nothing is written, checkpointed or locked, and each read is short.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from mqks.broker.pending import ErrorRecord, Mark
from mqks.broker.policy import Policy
from mqks.broker.ranges import Range, below, numbers
from mqks.errors import InspectionFailed, JournalDamaged
from mqks.journal.index import Index, QueueIndex
from mqks.journal.marks import NO_MARKS, Marks
from mqks.journal.segment import SegmentDamaged, StoredRun, StoredSection, decode
from mqks.journal.sqlite import wal
from mqks.journal.sqlite.lock import server_of
from mqks.journal.sqlite.migrations import check_version
from mqks.journal.sqlite.structure import UNREADABLE, schema_damage
from mqks.journal.sqlite.tables import Rows, error_columns, errors, head_of, read_by
from mqks.journal.store import Damage, QueueRow, shown
from mqks.journal.survey import Survey, guess, sections_of
from mqks.protocol.replies import split

AT_ONCE: Final = 16
"""New segments that are read in one transaction with the list of all."""
LISTED_ONLY: Final = "is listed, but can't be found by its id"
PROBED_MAX: Final = 100_000
"""Segments that are searched one by one where a page of their list can't be read."""
DAMAGE_CODES: Final = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_MISMATCH,
}
"""SQLite's error codes for a damaged structure."""


def no_file(path: Path) -> InspectionFailed:
    """The error for a path without a database."""
    return InspectionFailed(f"{path}: {'is a directory' if path.is_dir() else 'no such file'}")


def wal_path(path: Path) -> Path:
    """Path of a database's WAL: next to the file itself, also when `path` is a link."""
    return Path(f"{path.resolve()}-wal")


class Queue(NamedTuple):
    name: bytes
    id: int
    policy: Policy
    next_seq: int
    """Number of the next message."""
    cursor: int
    """Every number below has been delivered at least once."""
    ready: int
    unacked: int
    """Messages that a consumer holds; without a server: held at the crash."""
    scheduled: int
    bytes: int
    """Approximate length of the text of all living messages."""
    oldest_us: int | None
    """Arrival of the oldest message, within ten seconds."""


class Message(NamedTuple):
    seq: int
    time_us: int
    """Arrival at the journal, microseconds since 1970."""
    id: bytes
    event: bytes
    data: bytes
    retry: int
    """The `retry` of the next delivery after a restart."""
    unacked: bool
    doubtful: bool
    """Its segment fails its checksum: any byte of it may be wrong, and it may have been acked."""
    meta: bytes
    """Its attributes, as they were published."""
    rejects: int
    losses: int
    due_us: int
    """When it joins the queue, if it is scheduled, else 0."""
    expires_us: int
    """When its own TTL ends, or 0."""


class Facts(NamedTuple):
    schema_version: int
    epoch: str | None
    db_bytes: int
    wal_bytes: int
    page_bytes: int
    free_pages: int
    segments: int
    segment_bytes: int
    set_aside: int
    """Segments that a start with --salvage has put into `damaged_segment`."""


class _Segment(NamedTuple):
    """The part of a segment that is kept in memory: all but its text."""

    size: int
    sections: list[StoredSection]
    damage: str = ""


class State(NamedTuple):
    """State of a database file in the file system."""

    size: int
    changed_ns: int
    wal_bytes: int

    @classmethod
    def of(cls, path: Path) -> Self:
        wal, now = wal_path(path), path.stat()
        return cls(now.st_size, now.st_mtime_ns, wal.stat().st_size if wal.exists() else 0)

    @property
    def is_still(self) -> bool:
        """Whether it was closed cleanly and not opened for writing since. The state must be the
        same after the file was read."""
        return not self.wal_bytes


def connect(path: Path, state: State) -> sqlite3.Connection:
    """A read-only connection; for a file that is still, one that creates no other files.

    Raises JournalDamaged for an empty file with a WAL, which SQLite would delete.
    """
    if state.wal_bytes and state.size <= 1:  # SQLite takes a file of one byte for empty.
        raise JournalDamaged(f"{path} is empty, but its WAL is not")
    how = "mode=ro&immutable=1" if state.is_still else "mode=ro"
    uri = f"{path.absolute().as_uri()}?{how}"
    db = sqlite3.connect(uri, uri=True, isolation_level=None)
    db.text_factory = shown
    db.execute("pragma query_only = 1")
    return db


def refuse_newer(path: Path) -> None:
    """Raise SchemaTooNew when a newer MQKS wrote the file. The file is only read: opening it for
    writing would change it, if only by a checkpoint at the end."""
    with closing(connect(path, State.of(path))) as db:
        try:
            version = db.execute("pragma user_version").fetchone()[0]
        except UNREADABLE:
            return  # SQLite starts a half-made file again, and refuses any other.
    check_version(version, path)


class DatabaseFile:
    """Made by `open`; a context manager. One thread at a time."""

    queues: list[Queue]
    """Sorted by name."""
    bindings: list[tuple[bytes, bytes]]
    """Name of the queue, whether it exists or not, and event; sorted."""
    facts: Facts
    damage: list[Damage]
    torn: str = ""
    """State of the WAL's end, if a power cut may have torn it."""

    def __init__(self, path: Path, *, thorough: bool = False) -> None:
        self.path = path
        self._thorough = thorough
        self.queues, self.bindings, self.damage = [], [], []
        self._segments: dict[int, _Segment] = {}
        with self._failures():
            self._db = self._connect()

    @classmethod
    def open(cls, path: Path, *, thorough: bool = False) -> Self:
        """`thorough` checks the text of each message, too.

        Raises InspectionFailed when there is no such database, JournalDamaged when SQLite can't
        read it at all, SchemaTooNew when a newer MQKS wrote it.
        """
        if not path.is_file():
            raise no_file(path)
        file = cls(path, thorough=thorough)
        try:
            file.refresh()
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the connection

    def _connect(self) -> sqlite3.Connection:
        self._before = State.of(self.path)
        # Before SQLite opens the file: checking for its server drops SQLite's locks.
        self._look_at_wal()
        db = connect(self.path, self._before)
        try:
            db.execute("select count(*) from sqlite_schema").fetchone()
            self._structure = ""
        except UNREADABLE as error:
            # With this pragma SQLite reads a file that has lost its end.
            self._structure = str(error)
            db.execute("pragma writable_schema = 1")
        except BaseException:
            db.close()
            raise
        return db

    @property
    def _has_moved(self) -> bool:
        return self._before.is_still and self._before != State.of(self.path)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            if is_damage(error) or self.damage:
                told = "".join(f"; {place}: {what}" for place, what in self.damage)
                raise JournalDamaged(f"{self.path} can't be read: {error}{told}") from error
            raise InspectionFailed(f"{self.path}: {error}") from error

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("begin")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("rollback")

    # -- contents

    def refresh(self) -> None:
        """Read the state again. Raises like `open`."""
        with self._failures():
            while not self._settled():
                if self._has_moved:
                    # A server has opened it.
                    self._db.close()
                    self._segments.clear()
                    self._db = self._connect()

    def _settled(self) -> bool:
        """Do one step; return whether what was read is a complete state."""
        self.damage = [*self._wal_damage]
        if self._structure:
            self.damage.append(Damage("file", self._structure))
        with self._transaction():
            facts = self._read_facts()
            if not self._structure:
                self.damage += schema_damage(self._db)
            columns = read_by(facts.schema_version)
            raw = {table: self._table(columns[table], table) for table in columns}
            rows = Rows(facts.schema_version, raw)
            if any(place == "table queue" for place, _ in self.damage):
                rows.queue_ids_end = 0  # Some rows can't be read.
            self.damage += rows.damage
            self._rows = rows.queues
            ids = self._segment_ids()
            new = [segment_id for segment_id in ids if segment_id not in self._segments]
            for segment_id in new[:AT_ONCE]:
                self._read_segment(segment_id, of_now=True)
        if len(new) > AT_ONCE or self._has_moved:
            for segment_id in new[AT_ONCE:]:
                self._read_segment(segment_id)
            return False
        self._segments = {i: self._segments[i] for i in ids if i in self._segments}
        self.bindings = sorted(rows.bindings)
        self.damage += rows.count_segments(ids)
        self._build(rows)
        sizes = [segment.size for segment in self._segments.values()]
        self.facts = facts._replace(epoch=rows.epoch, segments=len(sizes), segment_bytes=sum(sizes))
        return True

    def _look_at_wal(self) -> None:
        """Check the WAL, unless a server uses the file and writes it meanwhile."""
        self._wal_damage, self.torn = list[Damage](), ""
        if self._before.is_still or server_of(self.path) is not None:
            return
        its_wal = wal_path(self.path)
        finding = wal.look(its_wal)
        if finding and finding.is_torn:
            self.torn = f"{its_wal.name} {finding}"
        elif finding:
            self._wal_damage = [Damage(its_wal.name, str(finding))]

    def _read_facts(self) -> Facts:
        version = self._number("pragma user_version")
        check_version(version, self.path)
        page_bytes = self._number("pragma page_size")
        return Facts(
            version,
            None,
            self._number("pragma page_count") * page_bytes,
            State.of(self.path).wal_bytes,
            page_bytes,
            self._number("pragma freelist_count"),
            0,
            0,
            len(self._table("id", "damaged_segment", order="rowid")),
        )

    def _number(self, sql: str) -> int:
        return int(self._db.execute(sql).fetchone()[0])

    def _table(self, columns: str, table: str, order: str = "") -> list[tuple[Any, ...]]:
        """All rows; if pages are unreadable, those before the first and after the last of them."""
        rows: dict[tuple[Any, ...], None] = {}
        order = order or columns.partition(", ")[0]
        for direction in ("asc", "desc"):
            try:
                for row in self._db.execute(
                    f"select {columns} from {table} order by {order} {direction}"
                ):
                    if direction == "desc" and row in rows:
                        break
                    rows[row] = None
                if direction == "asc":
                    return list(rows)
            except UNREADABLE as error:
                if not is_damage(error):
                    raise
                reason = str(error)
        self.damage.append(Damage(f"table {table}", f"{reason}; {len(rows)} rows can be read"))
        return list(rows)

    # -- segments

    def _segment_ids(self) -> list[int]:
        already = len(self.damage)
        listed = [segment_id for (segment_id,) in self._table("id", "segment")]
        ids = sorted(segment_id for segment_id in listed if isinstance(segment_id, int))
        if len(ids) < len(listed):
            self.damage.append(Damage("table segment", "there are rows without an id"))
        if len(self.damage) > already:
            # Pages between two unreadable ones hold more rows: a look-up by id finds them.
            steps = zip([0, *ids], ids, strict=False)
            low, high = max(steps, key=lambda step: step[1] - step[0], default=(0, 0))
            there = range(low + 1, min(high, low + PROBED_MAX))
            ids = sorted([*ids, *filter(self._is_there, there)])
        return ids

    def _is_there(self, segment_id: int) -> bool:
        sql = "select 1 from segment where id = ?"
        try:
            return self._db.execute(sql, (segment_id,)).fetchone() is not None
        except UNREADABLE:
            return False

    def _read_segment(self, segment_id: int, *, of_now: bool = False) -> None:
        """Store its sections, unless it was deleted meanwhile; `of_now`: it can't have been."""
        try:
            row = self._row(segment_id)
        except UNREADABLE as error:
            if not is_damage(error):
                raise
            self._segments[segment_id] = _Segment(0, [], f"{error}")
            return
        if row is None:
            if of_now:
                self._segments[segment_id] = _Segment(0, [], LISTED_ONLY)
            return
        head = head_of(segment_id, *row)
        try:
            segment = _Segment(head.size, sections_of(head))
            if self._thorough and segment.sections != _credible(head.head):
                head = head._replace(damage="its text does not match its head")
        except SegmentDamaged as error:
            head = head._replace(damage=str(error))
        if head.damage:
            segment = _Segment(head.size, _credible(head.head), guess(head, self._rows))
        self._segments[segment_id] = segment

    def _row(self, segment_id: int) -> tuple[object, bytes] | None:
        sql = "select crc, cast(body as blob) from segment where id = ?"
        row = self._db.execute(sql, (segment_id,)).fetchone()
        return None if row is None else (row[0], row[1] if row[1] is not None else b"")

    def _build(self, rows: Rows) -> None:
        self._index = Index()
        survey = Survey(self._index, rows.queues, rows.queue_ids_end)
        for segment_id, segment in self._segments.items():
            if not segment.damage:
                survey.place(segment_id, segment.size, segment.sections)
        self.damage += survey.finish()
        self._marks = survey.marks
        for segment_id, segment in self._segments.items():
            if segment.damage:
                self.damage.append(Damage(f"segment {segment_id}", segment.damage))
                self._place_doubtful(segment_id, segment)
        self.damage += survey.missing().values()
        self.queues = [
            _queue(row, self._index.queues[row.id], self._marks.get(row.id, NO_MARKS))
            for row in sorted(rows.queues.values(), key=lambda row: row.name)
        ]

    def _place_doubtful(self, segment_id: int, segment: _Segment) -> None:
        """Add the messages of a damaged segment, unless an undamaged one contradicts them."""
        there = self._index.add_segment(segment_id, segment.size)
        for section in segment.sections:
            queue = self._index.queues.get(section.queue_id)
            if queue is None:
                continue
            for first, count, time_us, start, end in section.runs:
                is_free = not any(queue.overlapping(first, first + count))
                if is_free and 0 < first <= first + count <= queue.next_seq:
                    self._index.add_messages(there, queue, first, count, end - start, time_us)

    # -- messages and errors

    def messages(self, name: bytes, after: int = 0) -> Iterator[Message]:
        """The living messages of a queue with numbers above `after`, in order; none for a missing
        queue.

        Reads one segment at a time. If a server uses the file and has deleted a listed segment, the
        list is read again.
        """
        queue_id = next((queue.id for queue in self.queues if queue.name == name), None)
        moved = 0
        while queue_id is not None:
            if moved in self._segments:
                raise JournalDamaged(f"{self.path}: segment {moved} {LISTED_ONLY}")
            index, marks = self._index.queues[queue_id], self._marks.get(queue_id, NO_MARKS)
            for span in index.overlapping(after + 1, max(index.next_seq, after + 2)):
                with self._failures():
                    row = self._row(span.segment.id)
                if row is None:
                    moved = span.segment.id
                    break
                doubtful = bool(self._segments[span.segment.id].damage)
                lines = _lines(row[1], queue_id, span.first, span.end)
                for first, count in span.living():
                    for number in range(max(first, after + 1), first + count):
                        time_us, line = lines[number]
                        after = number
                        yield _message(number, time_us, line, index, marks, doubtful)
            else:
                return
            self.refresh()
            if queue_id not in self._index.queues:
                return

    def errors(self, limit: int = 1000, before: str = "\x7f") -> list[ErrorRecord]:
        """Error replies, the newest first; those older than the one with the id `before`."""
        with self._failures():
            version = self._number("pragma user_version")
            rows = self._db.execute(
                f"select {error_columns(version)} from error where id < ? order by id desc limit ?",
                (before, limit),
            )
            whole, damage = errors(version, rows)
        self.damage += damage
        return whole


def is_damage(error: Exception) -> bool:
    """Whether an error means that SQLite's structure, or a row to be written, is damaged."""
    if isinstance(error, (MemoryError, UnicodeDecodeError)):
        return True
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in DAMAGE_CODES


def _credible(body: bytes) -> list[StoredSection]:
    """The runs of a damaged segment that have the expected number of messages."""
    try:
        sections = decode(body)
    except SegmentDamaged:
        return []
    return [
        section._replace(runs=[run for run in section.runs if _is_credible(run, body)])
        for section in sections
    ]


def _is_credible(run: StoredRun, body: bytes) -> bool:
    if run.end > len(body):
        return False
    lines = run.lines(body)
    return len(lines) == run.total and all(b" event=" in line for line in lines)


def _queue(row: QueueRow, index: QueueIndex, marks: Marks) -> Queue:
    return Queue(
        row.name,
        row.id,
        Policy.decode(row.policy),
        index.next_seq,
        index.cursor,
        *_counts(index, marks),
        _oldest_us(index, marks),
    )


def _counts(queue: QueueIndex, marks: Marks) -> tuple[int, int, int, int]:
    """Numbers of ready, unacked and scheduled messages, and the bytes of all."""
    size = 0
    there: list[Range] = []
    for span in queue.spans:
        living = span.living()
        there += living
        count = sum(count for _, count in living)
        size += span.bytes * count // span.count if count else 0
    unacked = sum(count for _, count in below(there, queue.cursor))
    scheduled = 0
    for number, mark in marks.among(there):
        scheduled += mark.due_us > 0
        unacked -= number < queue.cursor and (mark.due_us > 0 or not mark.redelivered)
    ready = sum(count for _, count in there) - unacked - scheduled
    return ready, unacked, scheduled, size


def _oldest_us(queue: QueueIndex, marks: Marks) -> int | None:
    held = Mark(redelivered=True)
    living = numbers(queue.living(0, queue.next_seq))
    for number, mark in marks.of_each(living, held):
        if not mark.due_us and (number >= queue.cursor or not mark.redelivered):
            span = queue.find(number)
            return None if span is None else span.time_us
    return None


def _lines(body: bytes, queue_id: int, first: int, end: int) -> dict[int, tuple[int, bytes]]:
    """Time and text of the messages of one span, by number."""
    return {
        number: (run.time_us, line)
        for section in decode(body)
        if section.queue_id == queue_id
        for run in section.runs
        if first <= run.first < end
        for number, line in enumerate(run.lines(body), run.first)
    }


def _message(
    number: int,
    time_us: int,
    line: bytes,
    queue: QueueIndex,
    marks: Marks,
    doubtful: bool,
) -> Message:
    message_id, _, rest = line.partition(b" event=")
    event, _, data = rest.partition(b" ")
    data, meta = split(data)
    delivered = number < queue.cursor
    mark = marks.get(number, Mark(redelivered=delivered))
    return Message(
        number,
        time_us,
        message_id,
        event,
        data,
        retry=mark.retry + mark.redelivered,
        unacked=delivered and mark.redelivered and not mark.due_us,
        doubtful=doubtful,
        meta=meta,
        rejects=mark.rejects,
        losses=mark.losses,
        due_us=mark.due_us,
        expires_us=mark.expires_us,
    )
