"""Reads the state of a running server, page by page."""

from collections.abc import Iterator
from contextlib import suppress
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import Self, cast

from mqks.client import requests
from mqks.client.errors import ConnectionLost, RequestFailed
from mqks.client.messages import peeked
from mqks.client.options import Options
from mqks.client.wire import Wire, queue, rows
from mqks.errors import InspectionFailed, did_you_mean
from mqks.inspection.source import EVERY, Row, WantedRows, error_row, message_row, timed

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

    @property
    def address(self) -> object:
        return self._server.address

    def totals(self) -> Row:
        return self._object()

    def queues(self) -> Iterator[Row]:
        return self._rows("queues", "name")

    def queue(self, name: str) -> Row:
        try:
            return queue(self._server.stats, requests.decoded(requests.name(name)))
        except RequestFailed:
            names = self._names()
            if names is None or name in names:  # Who may list the queues may see each.
                raise
            raise self._missing(name, names) from None

    def _names(self) -> list[str] | None:
        """The first queues; None for a user who may not list them."""
        with suppress(RequestFailed):
            return [row["name"] for row in islice(self.queues(), COMPARED_MAX)]
        return None

    def _missing(self, queue: str, names: list[str] | None) -> InspectionFailed:
        near = did_you_mean(queue, names or ())
        return InspectionFailed(f"{self._server.address}: there is no queue {queue}{near}")

    def bindings(self, event: str | None) -> Iterator[Row]:
        return self._rows(_words("bindings", event), "queue", "event", "mask")

    def consumers(self) -> Iterator[Row]:
        return self._rows("consumers", "id")

    def connections(self) -> Iterator[Row]:
        return self._rows("connections", "id")

    def unacked(self, queue: str | None) -> Iterator[Row]:
        if queue is not None:
            self.queue(queue)
        return self._rows(_words("unacked", queue), "queue", "seq")

    def schedules(self) -> Iterator[Row]:
        return self._rows("schedules", "name")

    def batches(self) -> Iterator[Row]:
        return self._rows("batches", "name")

    def results(self) -> Iterator[Row]:
        return self._rows("results", "id")

    def message(self, message_id: str) -> Iterator[Row]:
        """The steps of a traced message."""
        return self._rows(_words("message", message_id), "step")

    def traces(self) -> Iterator[Row]:
        return self._rows("traces", "name")

    def journal(self) -> Row:
        return self._object("journal")

    def errors(self, limit: int, error_id: str | None = None) -> list[Row]:
        """Error replies, the newest first; or only the one with this id, if it exists."""
        rows = self._server.stats(_words("errors", error_id), f"--limit={limit}")
        return list(map(error_row, reversed(rows)))

    def audit(self, limit: int) -> list[Row]:
        """Records of the audit, the newest first."""
        return [*map(timed, reversed(self._server.stats("audit", f"--limit={limit}")))]

    def messages(self, queue: str, wanted: WantedRows = EVERY) -> Iterator[Row]:
        self._check_readable(queue)
        if wanted.soonest:
            return self._peeked(queue, wanted, True)
        forms = [False, True] if wanted.scheduled is None else [wanted.scheduled]
        found = (self._peeked(queue, wanted, scheduled) for scheduled in forms)
        return islice(merge(*found, key=itemgetter("seq")), wanted.limit)

    def _check_readable(self, queue: str) -> None:
        """Raises InspectionFailed unless the queue exists. `peek` takes the permission of `range`,
        and does not mind if there is no such queue."""
        name = requests.name(queue)
        try:
            self._server.ask(b"range " + name)
        except RequestFailed as error:
            with suppress(RequestFailed):
                self._server.ask_lines(b"peek %b --limit=1" % name)
                raise self._missing(queue, self._names()) from None
            raise error from None

    def pages(self, queue: str, *, batches: bool = False) -> Iterator[list[bytes]]:
        """The messages of a queue that are not scheduled, as `peek` tells them. Each page is asked
        for before the one before it is processed: until the last one nothing else may be asked."""
        self._check_readable(queue)
        goes_on: int | None = 0
        lines = list[bytes]()
        while goes_on is not None:
            body = requests.peek(queue, goes_on, requests.PAGE_ROWS, False, {}, batches=batches)
            self._server.ask_ahead(body)
            if lines:
                yield lines
            lines, end = self._server.take_lines()
            goes_on = requests.peek_goes_on(end, [each.seq for each in map(peeked, lines[-1:])])

    def _peeked(self, queue: str, wanted: WantedRows, scheduled: bool) -> Iterator[Row]:
        """Read one complete page at a time, so that other requests can be sent in between."""
        chosen = cast(requests.SelectionKeywords, wanted.selection)
        rows = min(wanted.limit or requests.PAGE_ROWS, requests.PAGE_ROWS)
        goes_on: int | None = wanted.after
        while goes_on is not None:
            soonest, form = wanted.soonest, scheduled and not wanted.soonest
            body = requests.peek(
                *(queue, goes_on, rows, form, chosen), soonest=soonest, batches=wanted.batches
            )
            lines, end = self._server.ask_lines(body)
            page = [*map(peeked_row, lines)]
            yield from page
            seqs = [] if wanted.soonest else [each["seq"] for each in page]
            goes_on = requests.peek_goes_on(end, seqs)

    def _rows(self, words: str, *keys: str) -> Iterator[Row]:
        return rows(self._server.stats, words, *keys)

    def _object(self, *words: str) -> Row:
        told: Row = self._server.stats(*words)
        return told


def peeked_row(line: bytes) -> Row:
    """A message as `peek` tells it."""
    return message_row(**peeked(line)._asdict())


def _words(what: str, name: str | None) -> str:
    return what if name is None else f"{what} {requests.decoded(requests.name(name))}"
