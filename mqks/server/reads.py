"""Answers to those who look at a queue without consuming it.

The one rule: one page at a time, off the event loop, in turns; a client that does not take what it
asked for gets no more.
"""

import struct
from collections.abc import Callable

import anyio

from mqks.broker.broker import Broker
from mqks.broker.connection import Connection
from mqks.broker.pending import NO_MARK, Mark
from mqks.broker.reads import Read
from mqks.journal.index import QueueIndex
from mqks.journal.journal import Journal
from mqks.journal.queue_log import Page
from mqks.limits import READ_BYTES, READ_BYTES_MIN
from mqks.protocol import replies

RUN = struct.Struct("<4q")
"""First number, how many, time of arrival in microseconds, bytes of text."""


class Reads:
    """`flush` is called when there is an answer in an outbox."""

    def __init__(self, broker: Broker, journal: Journal, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._journal = journal
        self._flush = flush
        self._waiting: list[Connection] = []
        self._wanted = anyio.Event()

    def wake(self) -> None:
        """Some may be waiting."""
        if not self._broker.reads_waiting:
            return
        if self._broker.shared.outboxes.room <= 0:
            self._broker.shared.outboxes.wait(self, self.wake)
        else:
            self._waiting += self._broker.reads_waiting
            self._broker.reads_waiting = []
            self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            waiting, self._waiting = self._waiting, []
            for connection in waiting:
                gone = connection.closed or connection.expelled
                if gone or connection.rests or not connection.reads:
                    continue  # Who is blocked comes again when it is not.
                if self._broker.shared.outboxes.room <= 0:
                    self._broker.reads_waiting.append(connection)
                    continue
                read = connection.reads[0]
                answer = await self._answer(read)
                connection.reads.popleft()
                if not (connection.closed or connection.expelled):
                    if answer is None:
                        self._broker.read_failed(connection, read)
                    else:
                        connection.write(answer)
                if connection.reads and not connection.rests:
                    self._broker.reads_waiting.append(connection)
                self._flush()

    async def _answer(self, read: Read) -> bytes | None:
        """None when the queue was deleted meanwhile: nobody knows its numbers any more."""
        index = self._journal.index.queues.get(read.queue_id)
        if index is None:
            if read.form != "peek" and not self._broker.is_there(read):
                return None
            # Nothing of it has become durable yet.
            index = QueueIndex(1, 1)
        if read.form == "range":
            return await self._range(read, index)
        # Each one takes the less the less is left: those who leave theirs can't use it up.
        size = min(READ_BYTES, max(READ_BYTES_MIN, self._broker.shared.outboxes.room // 8))
        page = await self._journal.log.page(
            read.queue_id, index, read.first, read.end, read.limit, size
        )
        return self._lines(read, page) if read.form == "peek" else self._columns(read, page)

    async def _range(self, read: Read, index: QueueIndex) -> bytes:
        at = None
        if read.at_us is not None:
            at = await self._journal.log.first_at(read.queue_id, index, read.at_us)
        # Not before the wait: `at` may be the number of a message that came meanwhile.
        first = index.first_living()
        words = f"epoch={self._epoch(read)} first={first} next={index.next_seq}"
        if at is not None:
            words += f" at={max(at, first)}"
        return b"%b ok %b\n" % (read.request_id, words.encode())

    def _columns(self, read: Read, page: Page) -> bytes:
        texts = [piece.text for piece in page.pieces]
        if self._marks(read):
            texts = [_plain(text) for text in texts]
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

    def _marks(self, read: Read) -> dict[int, Mark]:
        return self._broker.queues[read.queue].lane.marks if self._broker.is_there(read) else {}

    def _lines(self, read: Read, page: Page) -> bytes:
        marks, told = self._marks(read), []
        for piece in page.pieces:
            for seq, line in enumerate(piece.text[:-1].split(b"\n"), piece.first):
                message_id, event, data = line.split(b" ", 2)
                mark = marks.get(seq, NO_MARK)
                if mark.retry:
                    event += b",retry=%d" % mark.retry
                if mark.has_attributes:
                    data = replies.plain(data)
                told.append(
                    b"%b ok %b %b,seq=%d,time=%d %b\n"
                    % (read.request_id, message_id, event, seq, piece.time_us, data)
                )
        told.append(read.request_id + b" ok --end\n")
        return b"".join(told)


def _plain(text: bytes) -> bytes:
    """Messages without their attributes."""
    if replies.ATTRIBUTES not in text:
        return text
    return b"".join(replies.plain(line) + b"\n" for line in text[:-1].split(b"\n"))
