"""What open pages show, renewed while anybody watches.

The one rule: one sample serves all who watch; its rows are sorted and formatted once for all views
that show them. This takes a hundredth of the time: the longer it takes, the later the next one
comes. Only pages that were just opened are served earlier.
"""

import json
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from time import monotonic, time
from typing import Any, Final, NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError
from mqks.inspection.sample import add_rates
from mqks.inspection.source import Row
from mqks.page.overview import RateHistory, mark, numbers, trends
from mqks.page.tables import TABLES, Ordered, TableView, cell, trend

INTERVAL_S: Final = 2.0
SHARE: Final = 100
"""A sample that takes a second is followed by this many seconds without one."""
SHARE_NEW: Final = 10
"""So many seconds without one, for pages that were just opened."""
INTERVAL_S_MAX: Final = 60.0
FIRST_S: Final = 1.0
"""The first rates of a page are those of this time at least, after it was opened."""
EVENT_S: Final = 0.0003
"""About the time that one event takes on its way to its page."""
RATES: Final = ("received", "delivered", "acknowledged", "rejected", "dead")
MARKED: Final = frozenset({"queues", "consumers", "connections", "schedules"})
WATCHERS_MAX: Final = 192
"""Fewer than connections to the HTTP port, so that metrics and health always have some."""
ROWS_MAX: Final = 10_000
"""Of a list; those after it are shown by themselves, and not renewed."""
PUBLISH_MAX: Final = 1000
"""Characters of what a schedule publishes."""
ERRORS_MAX: Final = requests.PAGE_ROWS
"""The last ones."""


@dataclass(eq=False)
class Watcher:
    """One open page. `view` is its table, if it has one."""

    view: TableView | None
    changed: anyio.Event = field(default_factory=anyio.Event)
    message: bytes = b""
    is_new: bool = True
    """It has not got everything yet."""


class Derived(NamedTuple):
    """Rows that are no list of `stats`: made of a sample that has the lists of `needs`."""

    needs: frozenset[str]
    rows: Callable[[Row], Sequence[Mapping[str, Any]]]


class LivePage:
    """`open_client` connects to the broker, with every permission. `derived` has the tables that
    are no lists of `stats`; the `history` tells what the rows do not."""

    def __init__(
        self,
        open_client: Callable[[], AbstractAsyncContextManager[AsyncClient]],
        derived: Mapping[str, Derived],
        history: RateHistory,
    ) -> None:
        self._history = history
        self._open_client = open_client
        self._derived = derived
        self._watchers: set[Watcher] = set()
        self._watched = anyio.Event()
        self._joined = anyio.Event()
        """Somebody new watches."""
        self._latest: Row | None = None
        self._latest_s = 0.0
        self._one_takes = anyio.Lock()

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= WATCHERS_MAX

    async def watch(self, view: TableView | None) -> AsyncGenerator[bytes]:
        """Server-sent events: one for each sample, the newest only when the reader is slow."""
        watcher = Watcher(view)
        self._watchers.add(watcher)
        self._watched.set()
        self._joined.set()
        try:
            yield b"retry: 2000\n\n"
            while True:
                await watcher.changed.wait()
                watcher.changed = anyio.Event()
                yield watcher.message
        finally:
            self._watchers.discard(watcher)

    async def run(self) -> None:
        """Sample while anybody watches."""
        while True:
            await self._watched.wait()
            with suppress(ClientError):
                async with self._open_client() as client:
                    await self._sample_all(client)
            self._latest = None
            self._watched = anyio.Event()
            if self._watchers:
                self._watched.set()
                await anyio.sleep(INTERVAL_S)

    async def _sample_all(self, client: AsyncClient) -> None:
        """While anybody watches: for all when it is time, between that for those who are new."""
        due_s = 0.0
        while self._watchers:
            if self._latest is not None:
                await anyio.sleep(max(0.0, self._latest_s + FIRST_S - monotonic()))
            began_s = monotonic()
            is_due = began_s >= due_s
            served = await self._renew(client, only_new=not is_due)
            took_s = monotonic() - began_s + EVENT_S * served
            if is_due:
                due_s = monotonic() + min(INTERVAL_S_MAX, max(INTERVAL_S, SHARE * took_s))
            await self._wait(max(INTERVAL_S, SHARE_NEW * took_s), due_s)

    async def _wait(self, least_s: float, due_s: float) -> None:
        """Until somebody new watches, but so many seconds at least; or until this time."""
        await anyio.sleep(max(0.0, min(least_s, due_s - monotonic())))
        with anyio.move_on_after(due_s - monotonic()):
            while not any(each.is_new for each in self._watchers):
                self._joined = anyio.Event()
                await self._joined.wait()

    async def _renew(self, client: AsyncClient, *, only_new: bool) -> int:
        """Sample once, and return how many pages get it."""
        wanted = {each.view.table for each in self._watchers if each.view is not None}
        sample = await self._take(client, wanted)
        has_rates = self._add_rates(sample)
        self._remember(sample)
        messages, served = PageMessages(sample), 0
        for watcher in [*self._watchers]:
            view = watcher.view
            # The table of somebody who has come meanwhile may not be in this sample.
            if (only_new and not watcher.is_new) or not (view is None or view.table in sample):
                continue
            watcher.message = messages.of(view)
            watcher.is_new = not has_rates
            watcher.changed.set()
            served += 1
            await checkpoint()
        return served

    async def sample(self, client: AsyncClient, lists: set[str], after: str = "") -> Row:
        """A sample for a page that is opened now, with the rates since the last one; of lists what
        comes `after` a key."""
        sample = await self._take(client, lists, after)
        if not self._add_rates(sample) and not after:
            self._remember(sample)
        return sample

    def _add_rates(self, sample: Row) -> bool:
        """Add the rates since the last sample; return whether that had what they need."""
        latest = self._latest
        if latest is not None and monotonic() - self._latest_s > INTERVAL_S_MAX + INTERVAL_S:
            latest = None
        add_rates(sample, latest)
        return latest is not None and latest["has_queues"] >= sample["has_queues"]

    def _remember(self, sample: Row) -> None:
        self._latest, self._latest_s = sample, monotonic()

    async def _take(self, client: AsyncClient, tables: set[str], after: str = "") -> Row:
        """Totals, journal and what some tables need; for one after the other."""
        derived = {key: self._derived[key] for key in self._derived.keys() & tables}
        lists = (tables - derived.keys()).union(*(each.needs for each in derived.values()))
        sample: Row = {"connected": True, "queues": [], "has_queues": "queues" in lists}
        async with self._one_takes:
            sample["totals"] = await client.stats()
            sample["journal"] = await client.stats("journal")
            for key in sorted(lists):
                sample[key] = await rows_of(client, key, after)
        for key in tables & MARKED:
            for row in sample[key]:
                row["mark"] = mark(self._history, key, row)
        for queue in sample["queues"] if "queues" in tables else ():
            queue["trend"] = trend(self._history.trend(requests.name(queue["name"]), 2))
        if "attention" in derived:
            sample["trends"] = trends(self._history)
        for key, each in derived.items():
            sample[key] = each.rows(sample)
        return sample


def key_of(table: str) -> str:
    """What a list is sorted by."""
    return "name" if table in ("queues", "archives", "schedules", "batches") else "id"


async def rows_of(client: AsyncClient, key: str, after: str = "") -> list[Row]:
    """The rows of a list of `stats`; of errors and audit the last ones. What a schedule publishes
    may be long: it has its beginning."""
    rows: list[Row] = []
    behind: Row | None = {key_of(key): after} if after else None
    while True:
        page = await client.stats(*requests.page(key, behind, key_of(key)))
        for row in page:
            if len(row.get("publish", "")) > PUBLISH_MAX:
                row["publish"] = row["publish"][:PUBLISH_MAX] + "…"
        rows += page
        if key in ("errors", "audit") or not page or len(rows) >= ROWS_MAX:
            return rows
        behind = page[-1]


class PageMessages:
    """The server-sent events of a sample. What several views have in common is formatted once."""

    def __init__(self, sample: Row) -> None:
        self._sample = sample
        told = {
            "time": round(time(), 1),
            "numbers": numbers(sample),
            "rates": [sample["rates_per_s"][key] for key in RATES],
            "trends": sample.get("trends", {}),
        }
        self._head = _json(told).removesuffix("}")
        self._tables: dict[str, Ordered] = {}
        self._rows: dict[int, str] = {}
        """Identity of a row → its cells."""
        self._messages: dict[TableView | None, bytes] = {}

    def of(self, view: TableView | None) -> bytes:
        message = self._messages.get(view)
        if message is None:
            end = "}" if view is None else self._table(view)
            message = self._messages[view] = f"data: {self._head}{end}\n\n".encode()
        return message

    def _table(self, view: TableView) -> str:
        key = view.table
        ordered = self._tables.get(key)
        if ordered is None:
            ordered = self._tables[key] = Ordered(TABLES[key], self._sample[key])
        rows, first, total = ordered.part(view)
        cells = ",".join([self._cells(key, row) for row in rows])
        return f',"rows":[{cells}],"first":{first},"total":{total}}}'

    def _cells(self, key: str, row: Mapping[str, Any]) -> str:
        text = self._rows.get(id(row))
        if text is None:
            text = _json([cell(column, row) for column in TABLES[key].columns])
            self._rows[id(row)] = text
        return text


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
