"""The writer while the disk is full.

The one rule: only acks are written in the space of the reserves, and what else frees space;
messages wait until the reserves are held again.
"""

from typing import TYPE_CHECKING, Final

from mqks.broker.broker import Broker
from mqks.broker.log.pending import Batch
from mqks.errors import DiskFull
from mqks.journal.journal import Journal
from mqks.server import log

if TYPE_CHECKING:
    from mqks.server.writer import Writer

RETRY_S: Final = 0.5


class FullDisk:
    def __init__(self, writer: "Writer", broker: Broker, journal: Journal) -> None:
        self._writer = writer
        self._broker = broker
        self._pending = broker.pending
        self._journal = journal
        self._store = journal.store

    async def leave(self, failure: DiskFull, unwritten: Batch | None = None) -> None:
        """Refuse publishes until there is space again or the writer stops."""
        writer = self._writer
        log.error("disk_full", reason=failure)
        writer.become(disk_full=failure.state)
        await self._answer(failure, unwritten)
        while not writer.stopping:
            writer.stepped()
            await self._store.give_up_reserves()
            await self._write(self._pending.take_settled())
            await self._let_go()
            if await self._has_room() and await self._write(self._pending.take()):
                writer.become(disk_full="")
                log.event("disk_has_room", refused=writer.refused())
                return
            await writer.pause(RETRY_S)

    async def _answer(self, failure: DiskFull, unwritten: Batch | None) -> None:
        """Write what was accepted before, or answer waiting clients with errors."""
        # Whole: `leave` confirms what is settled, and with it everybody who still waits.
        if unwritten is not None:
            self._pending.put_back(unwritten)
        elif await self._write(self._pending.take(whole=True)):
            return
        await self._store.give_up_reserves()
        await self._let_go()
        if not (await self._has_room() and await self._write(self._pending.take(whole=True))):
            batch = self._pending.take(whole=True)
            if batch.has_messages:  # Otherwise it is settled, and `leave` writes it.
                self._broker.failed(batch, failure)
            self._pending.put_back(batch)
            self._writer.release()

    async def _write(self, batch: Batch) -> bool:
        """Write it, or put it back with all waiting clients."""
        if await self._writer.writes(batch):
            return True
        self._pending.put_back(batch)
        return False

    async def _has_room(self) -> bool:
        try:
            return await self._store.has_room() and await self._store.hold_reserves()
        except DiskFull:
            return False

    async def _let_go(self) -> None:
        try:
            # First, as everything else takes space.
            await self._journal.drop_dead()
            while await self._journal.maintain(idle=True):
                self._writer.stepped()
        except DiskFull:
            pass
