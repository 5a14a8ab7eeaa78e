"""A running server, looked into page by page."""

import json
import re
from collections.abc import Iterator
from typing import Any, Self

from mqks.client import listing, requests
from mqks.client.dialogue import Dialogue
from mqks.client.errors import ConnectionLost, ProtocolViolation, RequestFailed
from mqks.client.options import Options
from mqks.errors import InspectionFailed
from mqks.inspection.source import Row, error_row, message_row

_PEEKED = re.compile(rb"event=(.*?)(?:,retry=(\d+))?,seq=(\d+),time=(\d+)")


class Live:
    """A server as a source; `otherwise` is told before the reason when there is none."""

    def __init__(self, url: str | None, options: Options, otherwise: str = "") -> None:
        self._server = Dialogue(url, options)
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
        except RequestFailed:
            raise InspectionFailed(f"{self._server.address}: there is no queue {name}") from None

    def bindings(self, event: str | None) -> Iterator[Row]:
        return self._rows([b"bindings", *_given(event)], "queue", "event")

    def consumers(self) -> Iterator[Row]:
        return self._rows([b"consumers"], "id")

    def connections(self) -> Iterator[Row]:
        return self._rows([b"connections"], "id")

    def unacked(self, queue: str | None) -> Iterator[Row]:
        return self._rows([b"unacked", *_given(queue)], "queue", "seq")

    def journal(self) -> Row:
        return self._object(b"journal")

    def errors(self, limit: int, error_id: str | None = None) -> list[Row]:
        """Error replies, the newest first; or that one, if it is there."""
        rows = self._ask(b"errors", *_given(error_id), b"--limit=%d" % limit)
        return list(map(error_row, reversed(rows)))

    def messages(self, queue: str, after: int) -> Iterator[Row]:
        self.queue(queue)
        while True:
            words = (requests.name(queue), after, listing.PAGE_ROWS)
            last = after
            for line in self._server.ask_lines(b"peek %b --after=%d --limit=%d" % words):
                message_id, attributes, data = line.split(b" ", 2)
                found = _PEEKED.fullmatch(attributes)
                if found is None:
                    raise ProtocolViolation(f"the peer sent {line[:80]!r} for a message")
                event, retry, seq, time_us = found.groups()
                last = int(seq)
                yield message_row(last, int(time_us), message_id, event, data, int(retry or 0))
            if last == after:
                return
            after = last

    def _rows(self, words: list[bytes], *keys: str) -> Iterator[Row]:
        return listing.rows(self._server.ask, b" ".join(words), *keys)

    def _object(self, *words: bytes) -> Row:
        told: Row = self._ask(*words)
        return told

    def _ask(self, *words: bytes) -> Any:
        return json.loads(self._server.ask(b" ".join([b"stats", *words])))


def _given(name: str | None) -> list[bytes]:
    return [] if name is None else [requests.name(name)]
