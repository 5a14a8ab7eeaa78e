"""Reads waiting messages from disk for the broker, ahead of their consumers.

The one rule: a request is answered in the order in which it came, pages and single messages in
turns.
"""

from collections import deque
from collections.abc import Callable

import anyio

from mqks.broker.broker import Broker
from mqks.broker.spine.queue.paging import page_in
from mqks.broker.spine.queue.shared import Fetch, Place
from mqks.journal.journal import Journal


class Paging:
    """`flush` is called when messages have come."""

    def __init__(self, broker: Broker, journal: Journal, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._journal = journal
        self._flush = flush
        self._pages: deque[Place] = deque()
        self._fetches: deque[Fetch] = deque()
        self._wanted = anyio.Event()
        self.stopping = False
        """Nothing is delivered any more."""

    def wake(self) -> None:
        """The broker may have requests."""
        wanted = self._broker.shared.wanted
        if wanted.pages or wanted.fetches:
            self._pages += wanted.pages
            self._fetches += wanted.fetches
            wanted.pages, wanted.fetches = [], []
            self._wanted.set()

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            while self._pages or self._fetches:
                if self._pages:
                    await self._bring_page(self._pages.popleft())
                if self._fetches:
                    await self._bring(self._fetches.popleft())

    async def _bring_page(self, queue: Place) -> None:
        first = queue.order.page_first
        runs = [] if first is None else await self._journal.log.read(queue.id, first)
        if not self.stopping:
            page_in(queue, first, runs)
            self._flush()

    async def _bring(self, fetch: Fetch) -> None:
        queue = fetch.queue
        lines = await self._journal.log.fetch(queue.id, fetch.numbers)
        if not (self.stopping or queue.deleted):
            # What waited for the disk has a whole turn, not the rest of an old one.
            self._broker.turns.begin()
            fetch.then(lines)
            self._flush()
