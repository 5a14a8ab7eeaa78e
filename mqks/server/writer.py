"""The one task that writes the journal.

The one rule: take everything pending, write it in one commit, then let its confirms go. While it
syncs, the next batch forms: batching comes without any delay.
"""

from collections.abc import Callable

import anyio

from mqks.broker.broker import Broker
from mqks.broker.changes import Batch
from mqks.errors import DiskFull
from mqks.journal.ballast import Ballast
from mqks.journal.journal import Journal
from mqks.server import log

IDLE_S = 0.2
"""After this long without anything to write, the journal tidies up."""
DISK_FULL_RETRY_S = 0.5


class Writer:
    """`announce` is called after each commit, when confirms are in the outboxes."""

    def __init__(
        self, broker: Broker, journal: Journal, ballast: Ballast, announce: Callable[[], None]
    ) -> None:
        self._broker = broker
        self._journal = journal
        self._ballast = ballast
        self._announce = announce
        self._wake = anyio.Event()
        self._busy = False
        self._stopping = False

    def wake(self) -> None:
        """Something may be pending. Confirms that need no commit go at once."""
        broker = self._broker
        if not broker.has_pending:
            return
        if self._busy or broker.has_changes:
            self._wake.set()
        else:
            broker.committed(broker.take_batch())

    @property
    def busy(self) -> bool:
        """Whether a commit is under way."""
        return self._busy

    def stop(self) -> None:
        """Write what is pending, then end `run`."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Raises JournalFailed when the disk can't be trusted any more."""
        while True:
            await self._wait()
            self._busy = True
            while self._broker.has_pending:
                await self._commit(self._broker.take_batch())
                await self._tidy(idle=False)
                if self._stopping and self._broker.disk_full:
                    return
            self._busy = False
            if self._stopping:
                return

    async def _wait(self) -> None:
        """Until something is pending; when nothing comes for a while, tidy up step by step."""
        while not (self._broker.has_pending or self._stopping):
            with anyio.move_on_after(IDLE_S):
                await self._wake.wait()
            while not self._wake.is_set() and await self._tidy(idle=True):
                pass
            await self._wake.wait()
            self._wake = anyio.Event()

    async def _tidy(self, *, idle: bool) -> bool:
        try:
            return await self._journal.maintain(idle=idle)
        except DiskFull as failure:
            await self._disk_full(failure)
            return True

    async def _commit(self, batch: Batch) -> None:
        try:
            await self._journal.write(batch)
        except DiskFull as failure:
            await self._give_up_reserves()
            try:
                await self._journal.write(batch)
            except DiskFull:
                await self._disk_full(failure, batch)
                return
            self._broker.committed(batch)
            await self._disk_full(failure)
            return
        self._broker.committed(batch)
        self._announce()

    async def _disk_full(self, failure: DiskFull, *unwritten: Batch) -> None:
        """Publishes are refused from here on. Acks are written as far as they can be, and what
        they settle is let go, until there is room again for what waits and for the ballast."""
        broker, journal = self._broker, self._journal
        log.error("disk_full", reason=failure)
        broker.disk_full = True
        await self._give_up_reserves()
        for batch in (*unwritten, *([broker.take_batch()] if unwritten else [])):
            broker.failed(batch, failure)
            broker.put_back(batch)
        self._announce()
        while True:
            for settled_only in (True, False):
                batch = broker.take_batch(settled_only=settled_only)
                try:
                    await journal.write(batch)
                except DiskFull:
                    broker.failed(batch, failure)
                    broker.put_back(batch)
                else:
                    broker.committed(batch)
                self._announce()
                await self._let_go()
            if not broker.has_changes and await journal.has_room() and self._ballast.fill():
                break
            if self._stopping:
                return
            with anyio.move_on_after(DISK_FULL_RETRY_S):
                await self._wake.wait()
            self._wake = anyio.Event()
        await journal.hold_reserve(True)
        broker.disk_full = False
        log.event("disk_has_room")

    async def _give_up_reserves(self) -> None:
        self._ballast.give_up()
        await self._journal.hold_reserve(False)

    async def _let_go(self) -> None:
        try:
            while await self._journal.maintain(idle=True):
                pass
        except DiskFull:
            pass
