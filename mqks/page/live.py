"""What open pages show, renewed while anybody watches.

The one rule: one sample serves all who watch, and equal views are formatted once. Sampling takes a
hundredth of the time at most: the longer a sample takes, the later the next one comes.
"""

import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final, NamedTuple

import anyio
from anyio.lowlevel import checkpoint

from mqks.client import listing
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError
from mqks.inspection.sample import add_rates
from mqks.inspection.source import Row
from mqks.page.overview import numbers
from mqks.page.tables import TABLES, View, shown

INTERVAL_S: Final = 2.0
SHARE: Final = 100
"""A sample that takes a second is followed by this many seconds without one."""
INTERVAL_S_MAX: Final = 60.0
EVENT_S: Final = 0.001
"""About the time that one event takes on its way to its page."""
HISTORY: Final = 900
"""Points of the charts: half an hour, when samples come every two seconds."""
RATES: Final = ("received", "delivered", "acknowledged", "rejected", "dead")
WATCHERS_MAX: Final = 192
"""Fewer than connections to the HTTP port, so that metrics and health always have some."""
ROWS_MAX: Final = 10_000
"""Of a list; those after it are not shown."""


@dataclass(eq=False)
class Watcher:
    """One open page. `view` is its table, if it has one."""

    view: View | None
    changed: anyio.Event = field(default_factory=anyio.Event)
    message: bytes = b""


class Derived(NamedTuple):
    """Rows that are no list of `stats`: made of a sample that has the lists of `needs`."""

    needs: frozenset[str]
    rows: Callable[[Row], Sequence[Mapping[str, Any]]]


class Live:
    """`open_client` connects to the broker, with every permission. `derived` has the tables that
    are no lists of `stats`."""

    def __init__(
        self,
        open_client: Callable[[], AbstractAsyncContextManager[AsyncClient]],
        derived: Mapping[str, Derived],
    ) -> None:
        self._open_client = open_client
        self._derived = derived
        self._watchers: set[Watcher] = set()
        self._watched = anyio.Event()
        self._latest: Row | None = None
        self.history: deque[list[float]] = deque(maxlen=HISTORY)
        """Time in seconds since the start of the server, then the rates of `RATES`."""

    @property
    def is_full(self) -> bool:
        return len(self._watchers) >= WATCHERS_MAX

    async def watch(
        self, view: View | None, may_look: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """Server-sent events: one for each sample, the newest only when the reader is slow. They
        end when the reader may no longer look."""
        watcher = Watcher(view)
        self._watchers.add(watcher)
        self._watched.set()
        try:
            yield b"retry: 2000\n\n"
            while True:
                await watcher.changed.wait()
                watcher.changed = anyio.Event()
                if not await may_look():
                    return
                yield watcher.message
        finally:
            self._watchers.discard(watcher)

    async def run(self) -> None:
        """Sample while anybody watches."""
        while True:
            await self._watched.wait()
            with suppress(ClientError):
                async with self._open_client() as client:
                    while self._watchers:
                        began_s = monotonic()
                        await self._renew(client)
                        took_s = monotonic() - began_s + EVENT_S * len(self._watchers)
                        await anyio.sleep(min(INTERVAL_S_MAX, max(INTERVAL_S, SHARE * took_s)))
            self._latest = None
            self._watched = anyio.Event()
            if self._watchers:
                self._watched.set()
                await anyio.sleep(INTERVAL_S)

    async def _renew(self, client: AsyncClient) -> None:
        wanted = {each.view.table for each in self._watchers if each.view is not None}
        sample = await self._take(client, wanted)
        add_rates(sample, self._latest)
        self._latest = sample
        rates = [sample["rates_per_s"][key] for key in RATES]
        if None not in rates:
            self.history.append([sample["totals"]["uptime_s"], *rates])
        messages: dict[View | None, bytes] = {}
        for watcher in [*self._watchers]:
            if watcher.view not in messages:
                messages[watcher.view] = message(sample, watcher.view)
                await checkpoint()
            watcher.message = messages[watcher.view]
            watcher.changed.set()

    async def sample(self, client: AsyncClient, lists: set[str]) -> Row:
        """A sample for a page that is opened now, with the rates since the last one."""
        sample = await self._take(client, lists)
        add_rates(sample, self._latest)
        return sample

    async def _take(self, client: AsyncClient, tables: set[str]) -> Row:
        """Totals, journal and what some tables need."""
        derived = {key: self._derived[key] for key in self._derived.keys() & tables}
        lists = (tables - derived.keys()).union(*(each.needs for each in derived.values()))
        sample: Row = {"connected": True, "queues": []}
        sample["totals"] = json.loads(await client.request("stats"))
        sample["journal"] = json.loads(await client.request("stats", "journal"))
        for key in sorted(lists):
            sample[key] = await rows_of(client, key)
        for key, each in derived.items():
            sample[key] = each.rows(sample)
        return sample


async def rows_of(client: AsyncClient, key: str) -> list[Row]:
    """The rows of a list of `stats`; of the errors the last ones."""
    rows: list[Row] = []
    words = [key, f"--limit={listing.PAGE_ROWS}"]
    if key == "errors":
        return [*json.loads(await client.request("stats", *words))]
    name = "name" if key == "queues" else "id"
    while True:
        after = [f"--after={rows[-1][name]}"] if rows else []
        page = json.loads(await client.request("stats", *words, *after))
        rows += page
        if len(page) < listing.PAGE_ROWS or len(rows) >= ROWS_MAX:
            return rows


def message(sample: Row, view: View | None) -> bytes:
    """One server-sent event."""
    told: dict[str, Any] = {
        "time": sample["totals"]["uptime_s"],
        "numbers": numbers(sample),
        "rates": [sample["rates_per_s"][key] for key in RATES],
    }
    if view is not None:
        table = shown(TABLES[view.table], view, sample[view.table])
        told["rows"], told["first"], told["total"] = table.rows, table.first, table.total
    return b"data: %b\n\n" % json.dumps(told, separators=(",", ":")).encode()
