"""A queue as a log: its range, its messages as Arrow record batches, trimming.

Reading acks nothing. After a lost connection it continues with the next number, so that no row is
read twice and none is omitted.

The one rule: a reader pickles, without its connection.
"""

import logging
import re
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from mqks.client import requests
from mqks.client.errors import ProtocolViolation, RequestFailed
from mqks.client.wire import Wire, rows
from mqks.pipeline.columns import SCHEMA, Ints, record_batch
from mqks.pipeline.errors import DataLost
from mqks.pipeline.wire import Connected, QueueConnection, ServerAddress

FETCH_ROWS = 100_000
RUN_BYTES = 32
"""Of a run in a reply: first number, count, arrival and bytes, each 8 bytes."""

_log = logging.getLogger("mqks.pipeline")


class LogRange(NamedTuple):
    """The range of a queue at one time."""

    epoch: str
    """Changes when the queue or its database is created again; numbers are valid in one epoch."""
    first: int
    """The lowest number of a message; `next` without messages."""
    next: int
    """The number after the last durable message."""
    at: int | None = None
    """The first message that arrived at or after the given time, or `next`."""
    is_paused: bool = False
    """Whether its deliveries are paused."""


class _Page(NamedTuple):
    epoch: str
    next: int
    runs: Ints
    text: memoryview


class QueueReader(Connected):
    """Reads one queue, at `url` or `server`; `schema` has the columns to read.

    With `meta`, `headers` are the attributes of the messages; else they are null.
    `fetch_rows` limits one reply; the server also limits it to about 4 MiB. `connection` may be
    that of other readers. Calls raise RequestFailed if the server refuses them (no such queue),
    AuthenticationFailed, and OSError if the server cannot be reached within all retries.
    """

    def __init__(
        self,
        url: str | None,
        queue: str,
        *,
        server: ServerAddress | None = None,
        schema: pa.Schema = SCHEMA,
        fetch_rows: int = FETCH_ROWS,
        meta: bool = False,
        connection: QueueConnection | None = None,
    ) -> None:
        super().__init__(connection or QueueConnection(server or ServerAddress(url=url)))
        self._name = queue
        self._queue = requests.name(queue)
        self._schema = schema
        self._fetch_rows = fetch_rows
        self._has_headers = meta
        self._meta = meta or bool({"priority", "ordering_key"} & {*schema.names})
        self._memory = memoryview(bytearray())

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_memory": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._memory = memoryview(bytearray())

    def range(self, at_us: int | None = None, archived: int | None = None) -> LogRange:
        """The range of the queue now; `at_us` are microseconds since 1970. `archived` tells the
        server that everything below this number is archived."""
        told = ((b" --at=%d", at_us), (b" --archived=%d", archived))
        flags = b"".join(flag % number for flag, number in told if number is not None)
        reply = self._ask(b"r range %b%b \n" % (self._queue, flags), "range")
        fields = requests.fields_told(requests.decoded(reply))
        at = int(fields["at"]) if "at" in fields else None
        first, end = int(fields["first"]), int(fields["next"])
        return LogRange(fields["epoch"], first, end, at, "paused" in fields)

    def range_if_there(self, at_us: int | None = None) -> LogRange | None:
        """The range of the queue now, or None if there is no such queue."""
        try:
            return self.range(at_us)
        except RequestFailed:
            # This takes the same permission, and does not mind.
            answer = self._ask(b"r peek %b --limit=1 \n" % self._queue, "peek")
            self.close()  # A message may follow.
            if answer == b"--end":
                return None
            raise

    def trim(self, seq: int, epoch: str | None = None, reader: str | None = None) -> None:
        """Durably drop all ready messages below this number; with a `reader` of the queue, those
        that all its readers have read. With an `epoch`, raises RequestFailed if the queue has
        another one."""
        number = requests.sequence_number(seq)
        line = requests.confirmed("trim", self._name, number, epoch=epoch, reader=reader)
        self._ask(b"r %b\n" % line, "trim")

    def read(
        self, start: int, end: int, *, epoch: str | None = None, fail_on_data_loss: bool = True
    ) -> Iterator[pa.RecordBatch]:
        """The messages from `start` up to, not including, `end`; fewer if the log ends before.

        With an `epoch`, it is checked that the queue still has this epoch, that the log reaches
        `end`, and that missing messages were not trimmed. If not, raises DataLost, or logs a
        warning and continues with what exists.
        """
        try:
            while start < end:
                if self._connection.ahead not in (None, (start, end)):
                    self.close()  # Another reading was left in its middle.
                page = self._connection.again(partial(self._page, start, end))
                if epoch is not None and page.epoch != epoch:
                    lost(f"the queue {self._name} was deleted and created again", fail_on_data_loss)
                    return
                if epoch is not None and (gap := _gap(page, start)) is not None:
                    self._check_gap(gap, page.next, fail_on_data_loss)
                if len(page.runs):
                    yield self._batch(page)
                elif page.next <= start:
                    if epoch is not None:
                        what = f"the queue {self._name} ends at {start}, and {end} was seen before"
                        lost(what, fail_on_data_loss)
                    return
                start = page.next
        finally:
            if self._connection.ahead:  # Nobody will take that reply.
                self.close()

    def _page(self, start: int, end: int, wire: Wire) -> _Page:
        """The next reply. The one after it is requested before its text is read, so that the server
        prepares it while this one is split."""
        if self._connection.ahead != (start, end):
            self._send_read(wire, start, end)
        self._connection.ahead = None
        header = wire.answer(b"r", f"to read the queue {self._name}")
        if not header.startswith(b"--read "):
            raise ProtocolViolation(f"the peer sent {header[:80]!r} to a read")
        fields = requests.fields_told(requests.decoded(header))
        count, size, after = (int(fields[name]) for name in ("runs", "bytes", "next"))
        if count and after < end:
            self._send_read(wire, after, end)
        if len(self._memory) < size:
            self._memory = memoryview(bytearray(size))
        memory = self._memory[:size]
        wire.fill(memory)
        table = np.frombuffer(memory[: count * RUN_BYTES], "<i8").reshape(count, 4)
        return _Page(fields["epoch"], after, table, memory[count * RUN_BYTES :])

    def _batch(self, page: _Page) -> pa.RecordBatch:
        try:
            told = {"has_meta": self._meta, "has_headers": self._has_headers}
            return record_batch(page.text, page.runs, self._schema, **told)
        except ValueError as error:
            raise ProtocolViolation(f"a reply to a read is damaged: {error}") from None

    def _send_read(self, wire: Wire, start: int, end: int) -> None:
        words = (self._queue, start, end, self._fetch_rows, b" --meta" * self._meta)
        wire.send(b"r read %b --from=%d --to=%d --limit=%d%b\n" % words)
        self._connection.ahead = start, end

    def _check_gap(self, gap: int, after: int, fail: bool) -> None:
        """Missing numbers in the middle were consumed by others, which is not a loss. Those below
        the first message were trimmed before they were read."""
        with QueueReader(None, self._name, server=self._connection.server) as other:
            first = other.range().first
        if first > gap:
            last = min(first, after) - 1
            lost(f"messages {gap} to {last} of the queue {self._name} are gone", fail)

    def _ask(self, line: bytes, asked: str) -> bytes:
        if self._connection.ahead:  # A reading was left in its middle.
            self.close()

        def ask(wire: Wire) -> bytes:
            wire.send(line)
            return wire.answer(b"r", f"{asked} of the queue {self._name} (is there one?)")

        return self._connection.again(ask)


def pattern(mask: str) -> str:
    """A mask as a regular expression for Java and Python, equivalent to `name_masks`."""
    runs = re.findall(r"\*+|[^*]+", mask)
    wild = {"*": "[^.]*"}
    parts = (wild.get(run, ".*") if run[0] == "*" else re.escape(run) for run in runs)
    # A `$` would match before a last line end, too.
    return f"(?s)^{''.join(parts)}(?!.)"


def parts(start: int, end: int, count: int) -> list[tuple[int, int]]:
    """A range of numbers in equal parts, `count` at most."""
    count = max(1, min(count, end - start))
    return [*pairwise(start + (end - start) * part // count for part in range(count + 1))]


def is_mask(queue: str) -> bool:
    return "*" in queue


def matching(connection: QueueConnection, *masks: str) -> list[str]:
    """The names of the queues that match a mask; a name without a star is that of one queue."""
    names = [mask for mask in masks if not is_mask(mask)]
    if len(names) < len(masks):
        found = connection.again(lambda wire: [*rows(wire.stats, "queues", "name")])
        matches = [re.compile(pattern(mask)).search for mask in masks]
        names += (row["name"] for row in found if any(of(row["name"]) for of in matches))
    return [*dict.fromkeys(names)]


def _gap(page: _Page, start: int) -> int | None:
    """The first number that is missing from the page."""
    expected = np.concatenate(([start], page.runs[:, 0] + page.runs[:, 1]))
    there = np.append(page.runs[:, 0], page.next)
    holes = np.flatnonzero(there > expected)
    return int(expected[holes[0]]) if len(holes) else None


def lost(what: str, fail: bool) -> None:
    """Raise DataLost, or log a warning."""
    if fail:
        flag = "failOnDataLoss=false (--no-fail-on-data-loss)"
        raise DataLost(f"{what}; {flag} continues without them")
    _log.warning("%s; continuing without them", what)
