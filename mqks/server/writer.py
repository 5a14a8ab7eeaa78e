"""The one task that writes the journal.

The one rule: take everything pending, write it in one commit, then send its confirms. The next
batch forms during the sync, so batching delays nobody who waits. While the disk is full, only acks
and what else frees space are written, in the space of the reserves; messages wait for these to come
back.
"""

from collections.abc import Callable
from time import monotonic

import anyio

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.spine.log.full_disk import take_settled
from mqks.broker.spine.log.pending import Batch, Need
from mqks.errors import DiskFull, LowDiskSpace
from mqks.journal.compaction import Compaction
from mqks.journal.journal import Journal
from mqks.server.commits import Commits

STALL_S = 10.0
"""A commit or another journal step that takes longer is reported as a stall."""
IDLE_S = 0.2
"""The journal tidies up after this time without writes."""
LOOK_S = 1.0
"""Interval at which the names of the files are checked."""
TODO = "move it back, or save the messages with mqks export and stop the server"
RETRY_S = 0.5
"""Interval at which a full disk is looked at."""


class Writer(Commits):
    """`flush` is called after commits of the task, when confirms are in the outboxes."""

    def __init__(
        self,
        broker: Broker,
        journal: Journal,
        *,
        release: Callable[[], None],
        flush: Callable[[], None],
    ) -> None:
        super().__init__(broker, journal, release=release)
        self._compaction = Compaction(journal)
        self._flush = flush
        self._low: LowDiskSpace | None = None
        """Seen, and not yet acted upon by the task."""

    def progress(self) -> int | None:
        """Changes with each finished journal step; None while there is nothing to do."""
        return self._steps if self.busy or self._broker.pending else None

    @property
    def stalls(self) -> bool:
        """Whether a journal step takes so long that nobody should wait for confirms."""
        # An idle journal makes no steps either.
        return self.busy and monotonic() - self._step_s > STALL_S

    def stop(self) -> None:
        """Write what is pending, then end `run`."""
        self.stopping = True
        self._awake.set()

    def check(self) -> None:
        """Raise the error of a commit at once, if there was one."""
        if self._failure is not None:
            raise self._failure

    def _tell(self) -> None:
        """Inform the broker why nothing can be confirmed now."""
        self._broker.unwritable = self._gone or self.disk_full

    def refused(self) -> int:
        """How many requests were refused since nothing could be written. It ends here."""
        refusals = self._broker.refusals
        count, refusals.unwritable = refusals.unwritable, 0
        return count

    def check_free_space(self) -> None:
        """Refuse publishes from now on if the disk has not enough free space."""
        if not self.disk_full:
            try:
                self._journal.store.check_free_space()
            except LowDiskSpace as low:
                self._low, self.disk_full = low, low.state
                self._tell()
                self._awake.set()

    @property
    def _must_write(self) -> bool:
        """Whether something is pending that cannot be put off."""
        need = self._broker.pending.need
        return need is not Need.NOTHING and (need is not Need.WRITE_LATER or self.stopping)

    async def run(self) -> None:
        """Raises JournalFailed if the disk cannot be trusted any more."""
        try:
            await self._run()
        finally:
            self._ended = True

    async def _run(self) -> None:
        while not self.stopping or self._broker.pending:
            self._awake.clear()
            # The pause before was no stall.
            self.busy, self._step_s = True, monotonic()
            if self._low is not None:
                await self._until_room(self._low)
            self._low = None
            while self._must_write:
                self.check()
                await self._commit(self._broker.pending.take())
                if self._journal.overdue:
                    await self._tidy(idle=False)
                # Nobody waits for room any more: what is left stays unconfirmed.
                if self.stopping and self.disk_full:
                    self.busy = False
                    self._tell_lost()
                    return
            if self._journal.overdue:
                await self._tidy(idle=False)
            self.busy = False
            if not self.stopping and not self._must_write:
                await self._rest()
            self.check()

    async def watch(self) -> None:
        """Check the files of the store, which others may delete, and its overdue work."""
        store, outcome, waits = self._journal.store, "", ""
        while True:
            await anyio.sleep(LOOK_S)
            self.check_free_space()
            gone = store.check_files()
            if gone != self._gone:
                self._gone = gone
                self._tell()
                self._awake.set()
                if gone:
                    log.error("database_gone", reason=gone, path=store.name, todo=TODO)
                else:
                    log.event("database_back", refused=self.refused())
            told, outcome = outcome, store.renew_claim()
            if outcome not in ("", told):
                log.warning("lock_file_gone", outcome=outcome)
            if store.waits != waits:
                was, waits = waits, store.waits
                if waits:
                    log.warning("journal_waits", reason=waits)
                elif was:
                    log.event("journal_goes_on")
            if self._journal.overdue:
                self._awake.set()

    async def _rest(self) -> None:
        """Wait until something is pending; after a while, tidy up step by step."""
        if self._untidy:
            with anyio.move_on_after(IDLE_S):
                await self._wait()
            if not self._awake.is_set():
                self._untidy = False
                self.busy, self._step_s = True, monotonic()
                while not self._awake.is_set() and await self._tidy(idle=True):
                    pass
                self.busy = False
        if not self._must_write:
            await self._wait()

    async def _wait(self) -> None:
        if self._broker.pending.need is Need.WRITE_LATER:
            self._put_off()
        await self._awake.wait()

    async def _tidy(self, *, idle: bool) -> bool:
        try:
            return await self._compaction.maintain(idle=idle)
        except DiskFull as failure:
            await self._until_room(failure)
            return True
        finally:
            self.stepped()

    async def _commit(self, batch: Batch) -> None:
        self._untidy = True
        try:
            await self._journal.write(batch.entry)
        except DiskFull as failure:
            await self._until_room(failure, batch)
        else:
            self.committed(batch)
            self._flush()

    # -- on a full disk

    async def _until_room(self, failure: DiskFull, unwritten: Batch | None = None) -> None:
        """Refuse publishes until there is space again or the writer stops."""
        log.error("disk_full", reason=failure)
        self.disk_full = failure.state
        self._tell()
        await self._answer(failure, unwritten)
        pending, store = self._broker.pending, self._journal.store
        while not self.stopping:
            self.stepped()
            await store.give_up_reserves()
            await self._write(take_settled(pending))
            await self._let_go()
            if await self._has_room() and await self._write(pending.take()):
                self.disk_full = ""
                self._tell()
                log.event("disk_has_room", refused=self.refused())
                return
            self._awake.clear()
            with anyio.move_on_after(RETRY_S):
                await self._awake.wait()

    def _tell_lost(self) -> None:
        """Their publishers have got errors, or have not asked."""
        batch = self._broker.pending.take(whole=True)
        runs = [run for change in batch.entry.changes for run in change.runs]
        if lost := sum(len(run.lines) for run in runs):
            log.error("unwritten_at_stop", messages=lost, reason=self.disk_full)

    async def _answer(self, failure: DiskFull, unwritten: Batch | None) -> None:
        """Write what was accepted before, or answer waiting clients with errors."""
        pending = self._broker.pending
        # Whole: `_until_room` confirms what is settled, and with it everybody who still waits.
        if unwritten is not None:
            pending.put_back(unwritten)
        elif await self._write(pending.take(whole=True)):
            return
        await self._journal.store.give_up_reserves()
        await self._let_go()
        if not (await self._has_room() and await self._write(pending.take(whole=True))):
            batch = pending.take(whole=True)
            if batch.has_messages:  # Otherwise it is settled, and `_until_room` writes it.
                self._broker.answers.failed(batch, failure, for_room=True)
            pending.put_back(batch)
            self._release()
            self._flush()

    async def _write(self, batch: Batch) -> bool:
        """Write it, or put it back with all waiting clients."""
        try:
            await self._journal.write(batch.entry)
        except DiskFull:
            self._broker.pending.put_back(batch)
            return False
        self.committed(batch)
        self._flush()
        return True

    async def _has_room(self) -> bool:
        store = self._journal.store
        try:
            return await store.has_room() and await store.hold_reserves()
        except DiskFull:
            return False

    async def _let_go(self) -> None:
        try:
            # First, as everything else takes space.
            await self._compaction.drop_settled()
            while await self._compaction.maintain(idle=True):
                self.stepped()
        except DiskFull:
            pass
