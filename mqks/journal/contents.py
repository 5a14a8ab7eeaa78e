"""The contents of a journal's database, as they are read from outside: what a server would find in
it, and more.

    with DatabaseFile.open(path) as found:        # or with Database.open(url)
        found.queues, found.bindings, found.facts, found.damage      # as of the last `refresh`
        found.messages(b"queue", after=0)                            # an iterator, in order
        found.errors(limit=20)                                       # the newest first

It can be read while a server uses it: segments never change, so a list of their ids, read in one
transaction, is a state of the journal, whenever their bodies are read. Heads are kept in memory,
texts are not.

The one rule: nothing is written or locked, and each transaction is short.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Self

from mqks.audit import AuditRecord
from mqks.broker.features.batches.batches import BatchRow
from mqks.broker.features.jobs.results import Result
from mqks.broker.features.time.ticks import ScheduleRow
from mqks.broker.spine.base.ranges import Range, below, numbers
from mqks.broker.spine.log.pending import ErrorRecord, ResultRow
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.message.policy import Policy
from mqks.errors import JournalDamaged
from mqks.journal.index import Index, QueueIndex
from mqks.journal.living import living_in, living_of
from mqks.journal.marks import NO_MARKS, Marks
from mqks.journal.store import Damage, Head, QueueRow
from mqks.journal.stored import SegmentDamaged, StoredRun, StoredSection, decode
from mqks.journal.survey import Survey, guess, sections_of
from mqks.limits import SEQ_MAX
from mqks.protocol.replies import parts

AT_ONCE: Final = 16
"""New segments that are read in one transaction with the list of all."""
LISTED_ONLY: Final = "is listed, but can't be found by its id"


class StoredQueue(NamedTuple):
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


class StoredMessage(NamedTuple):
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
    traits: bytes
    """As in `replies.Parts`."""
    batch: int
    """The number of its batch, or 0."""


class DatabaseFacts(NamedTuple):
    schema_version: int
    epoch: str | None
    db_bytes: int
    wal_bytes: int | None
    page_bytes: int | None
    free_pages: int | None
    segments: int
    segment_bytes: int
    set_aside: int
    """Segments that a start with --salvage has put into `damaged_segment`."""


class Verdict(NamedTuple):
    damage: list[Damage]
    facts: DatabaseFacts
    queues: int
    messages: int
    is_served: bool
    """A server uses it. Then the structure of a file is not checked: the read takes long, and the
    WAL would grow meanwhile."""
    torn: str
    """State of the WAL's end, if a power cut may have torn it."""


class SegmentContent(NamedTuple):
    """The part of a segment that is kept in memory: all but its text."""

    size: int
    sections: list[StoredSection]
    damage: str = ""


class Contents:
    """A context manager. One thread at a time."""

    name: str
    """As messages show it."""
    queues: list[StoredQueue]
    """Sorted by name."""
    bindings: list[tuple[bytes, bytes]]
    """Name of the queue, whether it exists or not, and event; sorted."""
    schedules: dict[bytes, ScheduleRow]
    batches: dict[bytes, BatchRow]
    """Both sorted by name."""
    facts: DatabaseFacts
    damage: list[Damage]
    torn: str = ""
    """State of the WAL's end, if a power cut may have torn it."""
    server: str = ""
    """Who has claimed a database that does not know the server's URL. It may have died."""

    def __init__(self, name: str, *, thorough: bool) -> None:
        self.name = name
        self._thorough = thorough
        self.queues, self.bindings, self.damage = [], [], []
        self.schedules, self.batches = {}, {}
        self._segments: dict[int, SegmentContent] = {}
        self._rows: Mapping[int, QueueRow] = {}

    # -- what each database has of its own

    def refresh(self) -> None:
        """Read the state again. Raises like `open`."""
        raise NotImplementedError

    def errors(self, limit: int | None = 1000, before: str = "\x7f") -> list[ErrorRecord]:
        """Error replies, the newest first; those older than the one with the id `before`."""
        raise NotImplementedError

    def audit(self, limit: int) -> list[AuditRecord]:
        """The last ones, the newest first."""
        raise NotImplementedError

    def _stored_results(self) -> Iterable[tuple[bytes, ResultRow]]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _head(self, segment_id: int) -> Head | None:
        """A segment with its text; None if there is none."""
        raise NotImplementedError

    def _failures(self) -> AbstractContextManager[None]:
        """Errors of the database become our own."""
        raise NotImplementedError

    @classmethod
    def open(cls, where: Any, *, thorough: bool = False) -> Self:
        """Of a path or a URL; `thorough` checks the text of each message, too.

        Raises InspectionFailed when there is no such database, JournalDamaged when it can't be read
        at all, or is a copy that is not complete, SchemaTooNew when a newer MQKS wrote it.
        """
        return cls(where, thorough=thorough).read()

    def read(self) -> Self:
        """Do the first `refresh`."""
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def _keep_named(
        self, schedules: Iterable[tuple[bytes, str]], batches: Iterable[tuple[bytes, str]]
    ) -> None:
        self.schedules = {name: ScheduleRow.parse(name, row) for name, row in sorted(schedules)}
        self.batches = {name: BatchRow.parse(name, row) for name, row in sorted(batches)}

    def results(self) -> Iterator[Result]:
        """Messages of which the result is kept, sorted by their ids."""
        names = {queue.id: queue.name for queue in self.queues}
        for message_id, row in sorted(self._stored_results()):
            found = Result.parse(message_id, row)
            # Its queue may have been renamed since.
            found.queue = names.get(found.queue_id, found.queue)
            yield found

    def members(self) -> Mapping[int, tuple[int, int]]:
        """How many messages of each batch, by its number, are alive; how many of these a consumer
        holds, or did at the crash, leased ones included."""
        living, held = Counter[int](), Counter[int]()
        for queue_id, marks in self._marks.items():
            queue = self._index.queues[queue_id]
            for number, mark in marks.among(living_of(queue, 0, SEQ_MAX)):
                if mark.batch:
                    living[mark.batch] += 1
                    held[mark.batch] += mark.keeps_place or _is_held(mark, number, queue.cursor)
        return defaultdict(lambda: (0, 0), {each: (living[each], held[each]) for each in living})

    # -- what all segments together say

    def _keep(self, head: Head) -> None:
        """Keep the sections of a segment."""
        try:
            segment = SegmentContent(head.size, sections_of(head))
            if self._thorough and segment.sections != _credible(head.head):
                head = head._replace(damage="its text does not match its head")
        except SegmentDamaged as error:
            head = head._replace(damage=str(error))
        if head.damage:
            segment = SegmentContent(head.size, _credible(head.head), guess(head, self._rows))
        self._segments[head.id] = segment

    def verdict(self) -> Verdict:
        """After a thorough read."""
        self.errors(limit=None)
        messages = sum(queue.ready + queue.unacked for queue in self.queues)
        is_served = bool(self.server)
        damage = list(dict.fromkeys(self.damage))
        return Verdict(damage, self.facts, len(self.queues), messages, is_served, self.torn)

    def _build(self, rows: dict[int, QueueRow], queue_ids_end: int) -> None:
        """The queues, of these rows and all segments."""
        self._index = Index()
        survey = Survey(self._index, rows, queue_ids_end)
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
            for row in sorted(rows.values(), key=lambda row: row.name)
        ]

    def _place_doubtful(self, segment_id: int, segment: SegmentContent) -> None:
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

    # -- messages

    def messages(self, name: bytes, after: int = 0) -> Iterator[StoredMessage]:
        """The living messages of a queue with numbers above `after`, in order; none for a missing
        queue.

        Reads one segment at a time. If a server uses the file and has deleted a listed segment, the
        list is read again; and so it is when a text turns out to be damaged.
        """
        queue_id = next((queue.id for queue in self.queues if queue.name == name), None)
        moved = 0
        while queue_id is not None:
            if moved in self._segments:
                raise JournalDamaged(f"{self.name}: segment {moved} {LISTED_ONLY}")
            index, marks = self._index.queues[queue_id], self._marks.get(queue_id, NO_MARKS)
            for span in index.overlapping(after + 1, SEQ_MAX):
                with self._failures():
                    head = self._head(span.segment.id)
                if head is None:
                    moved = span.segment.id
                    break
                doubtful = bool(self._segments[span.segment.id].damage)
                if head.damage and not doubtful:  # Its text, which was not read before.
                    self._keep(head)
                    break
                lines = _lines(head.head, queue_id, span.first, span.end)
                for first, count in [*living_in(span)]:
                    for number in range(max(first, after + 1), first + count):
                        time_us, line = lines[number]
                        after = number
                        yield _message(number, time_us, line, index, marks, doubtful)
            else:
                return
            self.refresh()
            if queue_id not in self._index.queues:
                return


def _is_held(mark: Mark, number: int, cursor: int) -> bool:
    """A message below the cursor was delivered, unless its mark says that it was given back: one
    with only a TTL or a batch says nothing of that."""
    return not mark.due_us and (mark.redelivered or (number < cursor and not mark.version))


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


def _queue(row: QueueRow, index: QueueIndex, marks: Marks) -> StoredQueue:
    return StoredQueue(
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
        living = [*living_in(span)]
        there += living
        count = sum(count for _, count in living)
        size += span.bytes * count // span.count if count else 0
    unacked = sum(count for _, count in below(there, queue.cursor))
    scheduled = 0
    for number, mark in marks.among(there):
        scheduled += mark.due_us > 0
        unacked += _is_held(mark, number, queue.cursor) - (number < queue.cursor)
    ready = sum(count for _, count in there) - unacked - scheduled
    return ready, unacked, scheduled, size


def _oldest_us(queue: QueueIndex, marks: Marks) -> int | None:
    living = numbers(living_of(queue, 0, queue.next_seq))
    for number, mark in marks.of_each(living, NO_MARK):
        if not (mark.due_us or _is_held(mark, number, queue.cursor)):
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
) -> StoredMessage:
    message_id, _, rest = line.partition(b" event=")
    event, _, data = rest.partition(b" ")
    data, meta, _, traits = parts(data)
    mark = marks.get(number)
    is_held = _is_held(mark, number, queue.cursor)
    return StoredMessage(
        number,
        time_us,
        message_id,
        event,
        data,
        retry=mark.retry + (is_held or mark.redelivered),
        unacked=is_held,
        doubtful=doubtful,
        meta=meta,
        rejects=mark.rejects,
        losses=mark.losses,
        due_us=mark.due_us,
        expires_us=mark.expires_us,
        traits=traits,
        batch=mark.batch,
    )
