"""Replies to clients that read a queue without consuming it.

The one rule: one page at a time, off the event loop. Next is the connection that has taken least;
who asks for little does not wait for those who ask for much. A client that does not read its
replies gets no more.
"""

import heapq
import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import count, filterfalse, islice
from typing import Final, TypeVar
from urllib.parse import quote_from_bytes

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint

from mqks.broker.broker import Broker
from mqks.broker.spine.base.ranges import numbers
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.selection import Chosen, Read
from mqks.journal.index import QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.living import first_living, living_of
from mqks.journal.queue_log import LogPage, Piece
from mqks.limits import READ_BYTES, READ_BYTES_MIN
from mqks.protocol import replies
from mqks.protocol.lines import split

T = TypeVar("T")
RUN = struct.Struct("<4q")
"""First number, count, time of arrival in microseconds, bytes of text."""

LINES: Final = {"peek", "scheduled", "soonest"}
ATTRIBUTES: Final = re.compile(rb"\t([^\t\n]*)(?:\t[^\t\n]*(?:\t([^\n]*))?)?")
"""Attributes of a message, an internal field, and its traits."""
TRAITS: Final = b"\t,"
"""Some message has traits: attributes begin with no comma."""
LOOKED_AT_ONCE: Final = 2048
SPARE: Final = 64
SELECTED_FROM: Final = 10_000
"""Messages that a peek with a selection looks at for one answer."""


class ReadLine:
    """Connections that wait for answers of one kind. Next is the one that has taken least time."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Connection]] = []
        self._arrivals = count()
        self._taken_s: dict[int, float] = {}
        """Id of a connection → what it has taken, while others wait."""
        self._now_s = 0.0
        """What the one has taken whose turn was last: who comes later starts there."""
        self._wanted = anyio.Event()

    def add(self, connection: Connection) -> None:
        taken_s = max(self._now_s, self._taken_s.pop(connection.id, 0.0))
        heapq.heappush(self._heap, (taken_s, next(self._arrivals), connection))
        self._wanted.set()

    async def next(self) -> Connection:
        while not self._heap:
            self._wanted = anyio.Event()
            await self._wanted.wait()
        self._now_s, _, connection = heapq.heappop(self._heap)
        return connection

    def took(self, connection: Connection, seconds: float) -> None:
        """The connection whose turn was last has taken so long."""
        if len(self._taken_s) > 2 * len(self._heap) + SPARE:
            self._taken_s.clear()  # Most of them ask for nothing more.
        self._taken_s[connection.id] = self._now_s + seconds


class Reads:
    """`flush` is called when a reply is in an outbox."""

    def __init__(self, broker: Broker, journal: Journal, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._journal = journal
        self._flush = flush
        self._waiting = ReadLine(), ReadLine(), ReadLine()
        """For answers from memory, answers of one page, and those that take a search."""
        self._asking: set[Connection] = set()
        """Those that are in a line, or get an answer."""

    def wake(self) -> None:
        """Reads may be waiting."""
        if not self._broker.reads_waiting:
            return
        if self._broker.shared.outboxes.room <= 0:
            self._broker.shared.outboxes.wait(self, self.wake)
        else:
            waiting, self._broker.reads_waiting = self._broker.reads_waiting, []
            for connection in waiting:
                if connection.reads and connection not in self._asking:
                    self._asking.add(connection)
                    self._waiting[self._kind(connection.reads[0])].add(connection)

    def _kind(self, read: Read) -> int:
        if read.form == "range" and read.at_us is None:
            return 0
        if read.chosen is not None or read.form in ("scheduled", "soonest", "range"):
            return 2
        queue = self._queue(read) if read.form == "peek" else None
        return 2 if queue is not None and queue.hides_some else 1

    def start(self, tasks: TaskGroup) -> None:
        for line in self._waiting:
            tasks.start_soon(self._serve, line)

    async def _serve(self, line: ReadLine) -> None:
        while True:
            connection = await line.next()
            # What it asks for from now on queues it again.
            self._asking.discard(connection)
            gone = connection.closed or connection.expelled
            if gone or connection.rests or not connection.reads:
                continue  # A blocked client is queued again later.
            if self._broker.shared.outboxes.room <= 0:
                self._broker.reads_waiting.append(connection)
                continue
            read, start_s = connection.reads[0], time.monotonic()
            self._asking.add(connection)
            answer = await self._answer(read)
            self._asking.discard(connection)
            line.took(connection, time.monotonic() - start_s)
            connection.reads.popleft()
            if not (connection.closed or connection.expelled):
                self._broker.answer(connection, read, answer)
            if connection.reads and not connection.rests:
                self._broker.reads_waiting.append(connection)
            self._flush()

    async def _answer(self, read: Read) -> bytes | None:
        """None if the queue was deleted meanwhile: its numbers are unknown."""
        index = self._journal.index.queues.get(read.queue_id)
        if index is None:
            if read.form not in LINES and not self._broker.is_there(read):
                return None
            # Nothing of it is durable yet.
            index = QueueIndex(1, 1)
        if read.form == "range":
            return await self._range(read, index)
        # Replies shrink with the remaining memory, so unread replies cannot use it up.
        size = min(READ_BYTES, max(READ_BYTES_MIN, self._broker.shared.outboxes.room // 8))
        if read.chosen is not None:
            return await self._selected(read, read.chosen, index, size)
        if read.form in ("scheduled", "soonest"):
            return await self._scheduled(read, index, size)
        if read.form == "peek" and (queue := self._queue(read)) and queue.hides_some:
            return await self._unhidden(read, index, queue, size)
        page = await self._journal.log.page(
            read.queue_id, index, read.first, read.end, read.limit, size
        )
        return self._lines(read, page.pieces) if read.form == "peek" else self._columns(read, page)

    async def _scheduled(self, read: Read, index: QueueIndex, size: int) -> bytes:
        queue, due = self._queue(read), dict[int, int]()
        if queue is not None:
            after = None if read.form == "soonest" else read.first - 1
            due = dict(await done(queue.listed(after, read.limit)))
        pieces = await self._journal.log.these(read.queue_id, index, [*due], size)
        return self._lines(read, pieces, due)

    async def _selected(self, read: Read, chosen: Chosen, index: QueueIndex, size: int) -> bytes:
        """Of the messages that one page holds those that are chosen; where it goes on is told."""
        queue, due = self._queue(read), dict[int, int]()
        if read.form == "scheduled":
            if queue is not None:
                due = dict(await done(queue.listed(read.first - 1, LOOKED_AT_ONCE)))
            pieces = await self._journal.log.these(read.queue_id, index, [*due], size)
            last = max(due, default=0) if len(due) == LOOKED_AT_ONCE else 0
            shown = sum(piece.total for piece in pieces)
            if shown < len(due):  # No more fit the page.
                last = max((piece.first + piece.total - 1 for piece in pieces), default=0)
        else:
            page = await self._journal.log.page(
                read.queue_id, index, read.first, None, SELECTED_FROM, size
            )
            pieces = page.pieces
            last = page.next_seq - 1 if page.next_seq < index.next_seq else 0
        found = list[Piece]()
        for piece in pieces:
            lines = enumerate(split(piece.text[:-1]), piece.first)
            if not chosen.is_old(piece.time_us):
                continue
            wanted = await done(chosen.by_body(lines))
            hides = None if queue is None or read.form == "scheduled" else queue.hides
            for seq, line in wanted.items():
                if not (hides and hides(seq)) and len(found) < read.limit:
                    found.append(Piece(seq, 1, piece.time_us, line + b"\n"))
            if len(found) == read.limit:
                last = found[-1].first
                break
        return self._lines(read, found, due if read.form == "scheduled" else None, last)

    async def _unhidden(self, read: Read, index: QueueIndex, queue: Queue, size: int) -> bytes:
        """Messages that the queue does not hide."""
        found: list[int] = []
        first = read.first
        while len(found) < read.limit:
            living = numbers(living_of(index, first, index.next_seq))
            some = [*islice(living, LOOKED_AT_ONCE)]
            if not some:
                break
            found += filterfalse(queue.hides, some)
            first = some[-1] + 1
            await checkpoint()
        found = found[: read.limit]
        pieces = await self._journal.log.these(read.queue_id, index, found, size)
        return self._lines(read, pieces)

    async def _range(self, read: Read, index: QueueIndex) -> bytes:
        at = None
        if read.at_us is not None:
            at = await self._journal.log.first_at(read.queue_id, index, read.at_us)
        # Not before the wait: `at` may be the number of a message that came meanwhile.
        first = first_living(index)
        words = f"epoch={self._epoch(read)} first={first} next={index.next_seq}"
        if at is not None:
            words += f" at={max(at, first)}"
        if (queue := self._queue(read)) and queue.rules.paused:
            words += " paused=yes"
        return b"%b ok %b\n" % (read.request_id, words.encode())

    def _columns(self, read: Read, page: LogPage) -> bytes:
        texts = [piece.text for piece in page.pieces]
        told = partial(_shown, has_meta=read.has_meta)
        texts = [told(text) if replies.ATTRIBUTES in text else text for text in texts]
        runs = [
            RUN.pack(piece.first, piece.total, piece.time_us, len(text))
            for piece, text in zip(page.pieces, texts, strict=True)
        ]
        size = RUN.size * len(runs) + sum(map(len, texts))
        header = (
            f" ok --read epoch={self._epoch(read)} runs={len(runs)} rows={page.rows}"
            f" next={page.next_seq} bytes={size}\n"
        )
        return b"".join([read.request_id, header.encode(), *runs, *texts])

    def _epoch(self, read: Read) -> str:
        return self._broker.shared.facts.epoch_of(read.queue_id)

    def _queue(self, read: Read) -> Queue | None:
        return self._broker.queues[read.queue] if self._broker.is_there(read) else None

    def _lines(
        self,
        read: Read,
        pieces: Iterable[Piece],
        due: Mapping[int, int] | None = None,
        last: int = 0,
    ) -> bytes:
        """`last`: the messages behind this number are still to be looked at."""
        queue = self._queue(read)
        marks: Mapping[int, Mark] = queue.lane.marks if queue is not None else {}
        rows = [
            (seq, piece.time_us, line)
            for piece in pieces
            for seq, line in enumerate(split(piece.text[:-1]), piece.first)
        ]
        if due is not None and read.form == "soonest":
            rows.sort(key=lambda row: due[row[0]])
        told = []
        for seq, time_us, line in rows:
            where = b",seq=%d,time=%d" % (seq, time_us)
            if due is not None:
                where += b",due=%.3f" % (due[seq] / 1e6)
            mark = marks.get(seq, NO_MARK)
            if read.has_batches and (batch := self._broker.batches.name_of(mark.batch)):
                where += b",batch=" + quote_from_bytes(batch, safe="").encode()
            told.append(replies.shown(read.request_id, line, mark.retry, where))
        told.append(read.request_id + b" ok --end" + (b" after=%d" % last if last else b"") + b"\n")
        return b"".join(told)


def _shown(text: bytes, *, has_meta: bool) -> bytes:
    """Messages with their attributes and traits behind their data, or as they are delivered."""
    if has_meta:
        return ATTRIBUTES.sub(_told, text)
    if TRAITS in text:
        return b"".join([replies.plain(line) + b"\n" for line in split(text[:-1])])
    return ATTRIBUTES.sub(b"", text)


def _told(found: re.Match[bytes]) -> bytes:
    told = found[1] + (found[2] or b"")
    return told and replies.ATTRIBUTES + told


async def done(work: Work[T]) -> T:
    """Do the work in several turns of the event loop; return its result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await checkpoint()
