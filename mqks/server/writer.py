"""The one task that writes the journal.

The one rule: take everything pending, write it in one commit, then let its confirms go. While it
syncs, the next batch forms: batching comes without any delay.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

import anyio

from mqks.broker.broker import Broker
from mqks.broker.pending import Batch
from mqks.errors import DiskFull, MqksError, Unwritable
from mqks.journal.ballast import Ballast
from mqks.journal.journal import Journal
from mqks.server import log

IDLE_S = 0.2
"""After this long without anything to write, the journal tidies up."""
DISK_FULL_RETRY_S = 0.5
LOOK_S = 1.0
"""How often the names of the files are looked at."""
TODO = "move it back, or save what is there with mqks export, then stop the server"
STALL_S = 10.0
"""A commit or another step of the journal that takes longer is told as a stall."""
AT_ONCE_RECORDS_MAX = 64
"""More than these go to the task, so that the next batch forms meanwhile."""
SLOW_COMMIT_S = 0.002
SLOW_PAUSE_FACTOR = 20
"""After a commit that took longer, all go to the task for this many times as long: a slow disk
holds the loop up for a twentieth of the time at most."""


class Writer:
    """`release` is called after each commit: publishers may go on; `flush` after those of the
    task, when confirms are in the outboxes."""

    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        ballast: Ballast,
        *,
        release: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._journal = journal
        self._ballast = ballast
        self._release = release
        self._flush = flush
        self._wake = asyncio.Event()
        self._busy = False
        """The task has the journal."""
        self._stopping = False
        self._untidy = True
        """Something was written since the last tidying up."""
        self._failure: MqksError | None = None
        self.disk_full = False
        self._steps = 0
        """Of the journal that have ended, well or with a full disk."""
        self._step_s = 0.0
        """When the last of them ended, or the next was begun after a rest."""
        self._at_once_from_s = 0.0

    def wake(self, *, alone: bool) -> None:
        """Something may be pending.

        Confirms that need no commit go at once. What is small and comes `alone`, in a turn
        without other work, is committed at once: two changes of thread would take longer. When
        the disk turns out to be slow, that is left to the task for a while.
        """
        broker = self._broker
        if not broker.pending:
            return
        if self.disk_full:
            # The messages that can't be written are no news.
            if broker.pending.waiters:
                self._wake.set()
        elif self._busy or self._failure or self._journal.gone:
            self._wake.set()
        elif not broker.pending.has_changes:
            self._committed(broker.pending.take())
        elif (
            alone
            and broker.pending.records <= AT_ONCE_RECORDS_MAX
            and not broker.pending.has_metadata
            and monotonic() >= self._at_once_from_s
        ):
            self._commit_at_once()
        else:
            self._wake.set()

    def _commit_at_once(self) -> None:
        batch = self._broker.pending.take()
        start_s = monotonic()
        if batch.entry.writes:
            try:
                self._journal.write_now(batch.entry)
            except DiskFull:
                # The task meets the same, and knows what to do.
                self._broker.pending.put_back(batch)
                self._wake.set()
                return
            except MqksError as failure:
                # What could not be synced is not tried again: the task ends the process.
                self._failure = failure
                self._wake.set()
                return
        took_s = monotonic() - start_s
        if took_s > SLOW_COMMIT_S:
            self._at_once_from_s = start_s + SLOW_PAUSE_FACTOR * took_s
        self._committed(batch)
        if self._journal.overdue or not self._untidy:
            self._untidy = True
            self._wake.set()

    def _committed(self, batch: Batch) -> None:
        self._stepped()
        if self._journal.gone and batch.must_last:
            # It is in the files that are open, which nobody may ever find again.
            self._broker.failed(batch, Unwritable(self._journal.gone))
        self._broker.committed(batch)
        self._release()
        if self._broker.pending:
            # Confirms let consumers go, and what they were given must last, too.
            self._wake.set()

    @property
    def busy(self) -> bool:
        """Whether a commit is under way."""
        return self._busy

    def progress(self) -> int | None:
        """Changes with each step of the journal that ends; None while there is nothing to do."""
        return self._steps if self._busy or self._broker.pending else None

    def _stepped(self) -> None:
        self._steps += 1
        self._step_s = monotonic()

    @property
    def stalls(self) -> bool:
        """Whether a step of the journal takes so long that nobody should wait for confirms."""
        return self._busy and monotonic() - self._step_s > STALL_S

    def stop(self) -> None:
        """Write what is pending, then end `run`."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Raises JournalFailed when the disk can't be trusted any more."""
        while not self._stopping or self._broker.pending:
            self._wake.clear()
            self._busy, self._step_s = True, monotonic()
            while self._broker.pending:
                self.check()
                await self._commit(self._broker.pending.take())
                if self._journal.overdue:
                    await self._tidy(idle=False)
                if self._stopping and self.disk_full:
                    self._busy = False
                    return
            if self._journal.overdue:
                await self._tidy(idle=False)
            self._busy = False
            if not self._stopping and not self._broker.pending:
                await self._rest()
            self.check()

    async def watch(self) -> None:
        """Look after the files by their names, which others may take from them."""
        journal, outcome = self._journal, ""
        while True:
            await anyio.sleep(LOOK_S)
            gone = journal.gone
            if journal.look() != gone:
                self._tell_broker()
                self._wake.set()
                if journal.gone:
                    log.error("database_gone", reason=journal.gone, path=journal.path, todo=TODO)
                else:
                    log.event("database_back")
            told, outcome = outcome, journal.keep_lock_file()
            if outcome not in ("", told):
                log.warning("lock_file_gone", outcome=outcome)

    def check(self) -> None:
        """Raise what a commit at once has met."""
        if self._failure is not None:
            raise self._failure

    async def _rest(self) -> None:
        """Until something is pending; when nothing comes for a while, tidy up step by step."""
        if self._untidy:
            with anyio.move_on_after(IDLE_S):
                await self._wake.wait()
            if not self._wake.is_set():
                self._untidy = False
                self._busy, self._step_s = True, monotonic()
                while not self._wake.is_set() and await self._tidy(idle=True):
                    pass
                self._busy = False
        if not self._broker.pending:
            await self._wake.wait()

    async def _tidy(self, *, idle: bool) -> bool:
        try:
            return await self._journal.maintain(idle=idle)
        except DiskFull as failure:
            await self._disk_full(failure)
            return True
        finally:
            self._stepped()

    async def _commit(self, batch: Batch) -> None:
        self._untidy = True
        try:
            await self._journal.write(batch.entry)
        except DiskFull as failure:
            await self._give_up_reserves()
            try:
                await self._journal.write(batch.entry)
            except DiskFull:
                await self._disk_full(failure, batch)
                return
            self._committed(batch)
            await self._disk_full(failure)
            return
        self._committed(batch)
        self._flush()

    async def _disk_full(self, failure: DiskFull, *unwritten: Batch) -> None:
        """Publishes are refused from here on. Acks are written as far as they can be, and what
        they settle is let go, until there is room again for what waits and for the ballast."""
        broker, pending = self._broker, self._broker.pending
        log.error("disk_full", reason=failure)
        self._set_disk_full(True)
        await self._give_up_reserves()
        # What was accepted before, with all who wait for it. What came last goes first, as what
        # is put back stands before what is pending.
        if unwritten or not await self._try_to_write(pending.take()):
            for batch in (broker.pending.take(whole=True), *unwritten):
                broker.failed(batch, failure)
                broker.pending.put_back(batch)
        self._release()
        self._flush()
        while not self._stopping:
            self._stepped()
            await self._try_to_write(pending.take_settled())
            await self._let_go()
            if await self._try_to_write(pending.take()) and await self._has_room():
                break
            self._wake.clear()
            with anyio.move_on_after(DISK_FULL_RETRY_S):
                await self._wake.wait()
        else:
            return
        await self._journal.hold_reserve(True)
        self._set_disk_full(False)
        log.event("disk_has_room")

    def _set_disk_full(self, is_full: bool) -> None:
        self.disk_full = is_full
        self._tell_broker()

    def _tell_broker(self) -> None:
        self._broker.unwritable = self._journal.gone or ("disk full" if self.disk_full else "")

    async def _try_to_write(self, batch: Batch) -> bool:
        """Write it, or put it back with all who wait for it."""
        try:
            await self._journal.write(batch.entry)
        except DiskFull:
            self._broker.pending.put_back(batch)
            return False
        self._committed(batch)
        self._flush()
        return True

    async def _has_room(self) -> bool:
        try:
            return await self._journal.has_room() and self._ballast.fill()
        except DiskFull:
            return False

    async def _give_up_reserves(self) -> None:
        self._ballast.give_up()
        await self._journal.hold_reserve(False)

    async def _let_go(self) -> None:
        try:
            while await self._journal.maintain(idle=True):
                self._stepped()
        except DiskFull:
            pass
