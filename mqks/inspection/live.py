"""Reads the state of a running server, page by page."""

from collections.abc import Iterator
from contextlib import suppress
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Any, Self

from mqks.client import requests
from mqks.client.errors import ConnectionLost, RequestFailed
from mqks.client.messages import peeked
from mqks.client.options import Options
from mqks.client.wire import Wire, rows
from mqks.errors import InspectionFailed, did_you_mean
from mqks.inspection.source import Row, error_row, message_row

COMPARED_MAX = 10_000
"""So many names of queues may be meant by one that does not exist."""


class Live:
    """A server as a source; `otherwise` precedes the reason when the server is not reachable."""

    def __init__(self, url: str | None, options: Options, otherwise: str = "") -> None:
        self._server = Wire(url, options)
        self._otherwise = otherwise

    def __enter__(self) -> Self:
        try:
            self._server.__enter__()
        except ConnectionLost as error:
            raise ConnectionLost(f"{self._otherwise}{error}") from None
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._server.__exit__(kind, error, trace)

    def totals(self) -> Row:
        return self._object()

    def queues(self) -> Iterator[Row]:
        return self._rows([b"queues"], "name")

    def queue(self, name: str) -> Row:
        try:
            return self._object(b"queue", requests.name(name))
        except RequestFailed as error:
            self._check(name, error)
            raise

    def _check(self, name: str, error: RequestFailed) -> None:
        """Raise InspectionFailed if the reason is that there is no such queue."""
        if "there is no queue" in (self._server.reason(error.error_id) or ""):
            near = ""
            with suppress(RequestFailed):
                names = (row["name"] for row in self.queues())
                near = did_you_mean(name, islice(names, COMPARED_MAX))
            where = self._server.address
            raise InspectionFailed(f"{where}: there is no queue {name}{near}") from None

    def bindings(self, event: str | None) -> Iterator[Row]:
        return self._rows([b"bindings", *_given(event)], "queue", "event", "mask")

    def consumers(self) -> Iterator[Row]:
        return self._rows([b"consumers"], "id")

    def connections(self) -> Iterator[Row]:
        return self._rows([b"connections"], "id")

    def unacked(self, queue: str | None) -> Iterator[Row]:
        if queue is not None:
            self.queue(queue)
        return self._rows([b"unacked", *_given(queue)], "queue", "seq")

    def journal(self) -> Row:
        return self._object(b"journal")

    def errors(self, limit: int, error_id: str | None = None) -> list[Row]:
        """Error replies, the newest first; or only the one with this id, if it exists."""
        rows = self._ask(b"errors", *_given(error_id), b"--limit=%d" % limit)
        return list(map(error_row, reversed(rows)))

    def messages(self, queue: str, after: int) -> Iterator[Row]:
        name = self._readable(queue)
        waiting = self._peeked(b"peek %b" % name, after)
        return merge(waiting, self.scheduled(queue, after), key=itemgetter("seq"))

    def scheduled(self, queue: str, after: int) -> Iterator[Row]:
        return self._peeked(b"peek %b --scheduled" % self._readable(queue), after)

    def _readable(self, queue: str) -> bytes:
        """The name of a queue that exists. It takes the permission that reading it takes."""
        name = requests.name(queue)
        try:
            self._server.ask(b"range " + name)
        except RequestFailed as error:
            self._check(queue, error)
            raise
        return name

    def _peeked(self, request: bytes, after: int) -> Iterator[Row]:
        """Read one complete page at a time, so that other requests can be sent in between."""
        while True:
            words = (request, after, requests.PAGE_ROWS)
            page = [*map(_row, self._server.ask_lines(b"%b --after=%d --limit=%d" % words))]
            if not page:
                return
            yield from page
            after = page[-1]["seq"]

    def _rows(self, words: list[bytes], *keys: str) -> Iterator[Row]:
        return rows(self._server.stats, requests.decoded(b" ".join(words)), *keys)

    def _object(self, *words: bytes) -> Row:
        told: Row = self._ask(*words)
        return told

    def _ask(self, *words: bytes) -> Any:
        return self._server.stats(*map(requests.decoded, words))


def _row(line: bytes) -> Row:
    message_id, event, data, retry, meta, seq, time_us, due_us = peeked(line)
    return message_row(seq, time_us, message_id, event, data, retry, meta=meta, due_us=due_us)


def _given(name: str | None) -> list[bytes]:
    return [] if name is None else [requests.name(name)]
