"""Commits at the end of a turn: those that are small are done at once, all others by the writer.

The one rule: what waits for a commit is answered when it is durable, in one place.
"""

import asyncio
from collections.abc import Callable
from time import monotonic

from mqks.broker.broker import Broker
from mqks.broker.spine.log.pending import Batch, Need
from mqks.errors import DiskFull, MqksError, Unwritable
from mqks.journal.journal import Journal

UNAWAITED_S = 0.01
"""Acks for which nobody waits are put off for so long, if there are not many. With a commit for
each, the broker takes 1.2 to 4 times the CPU time (tasks of Celery that do nothing)."""
SLOW_COMMIT_S = 0.002
"""A commit on the event loop that takes longer shows a slow disk: nobody is served meanwhile."""
SLOW_PAUSE_FACTOR = 20
"""After a commit that took longer, all commits go to the task for this many times as long: a slow
disk blocks the event loop for a twentieth of the time at most."""


class Commits:
    """`release` is called after each commit: publishers may continue."""

    def __init__(self, broker: Broker, journal: Journal, *, release: Callable[[], None]) -> None:
        self._broker = broker
        self._journal = journal
        self._release = release
        self._awake = asyncio.Event()
        self.disk_full = ""
        """Why there is no room."""
        self._gone = ""
        """Why written data may not be found again."""
        self._failure: MqksError | None = None
        """An error of a commit on the event loop: the task ends the process with it."""
        self.busy = False
        """The task has the journal."""
        self.stopping = False
        self._ended = False
        """`run` has ended, and the journal may be closed: nothing is committed any more."""
        self._untidy = True
        """Something was written since the last maintenance."""
        self._steps = 0
        """Steps of the journal that have ended, with success or with a full disk."""
        self._step_s = 0.0
        """When the last step ended, or the next one began after a pause."""
        self._at_once_from_s = 0.0
        """Until then the disk counts as slow."""
        self._timer: asyncio.TimerHandle | None = None
        """Until what was put off is due."""

    def wake(self, *, alone: bool) -> None:
        """Something may be pending.

        Confirms that need no commit go at once. What is small and comes `alone`, in a turn
        without other work, is committed at once: two changes of thread would take longer. When
        the disk turns out to be slow, that is left to the task for a while.
        """
        pending = self._broker.pending
        need = pending.need
        if self._ended or need is Need.NOTHING:
            return
        if self.disk_full:
            # It is known already that the messages cannot be written.
            if pending.waiters:
                self._awake.set()
        elif self.busy or self._failure or self._gone:
            self._awake.set()
        elif need is Need.CONFIRM:
            self.committed(pending.take())
        elif need is Need.WRITE_LATER and not self.stopping:
            self._put_off()
        elif (
            alone
            and self._journal.store.commit_now is not None
            and need is not Need.WRITE_MUCH
            and monotonic() >= self._at_once_from_s
        ):
            self._commit_at_once()
        else:
            self._awake.set()

    def _put_off(self) -> None:
        """Write soon what is pending. Later acks do not postpone it: that might go on for ever."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(UNAWAITED_S, self._due)

    def _due(self) -> None:
        self._timer, self._broker.pending.is_urgent = None, bool(self._broker.pending)
        self.wake(alone=True)

    def _commit_at_once(self) -> None:
        batch = self._broker.pending.take()
        start_s = monotonic()
        if batch.entry.writes:
            try:
                is_written = self._journal.write_now(batch.entry)
            except DiskFull:
                is_written = False  # The task gets the same error and handles it.
            except MqksError as failure:
                # A failed sync is never retried.
                self._failure = failure
                self._awake.set()
                return
            if not is_written:
                self._broker.pending.put_back(batch)
                self._awake.set()
                return
        took_s = monotonic() - start_s
        if took_s > SLOW_COMMIT_S:
            self._at_once_from_s = start_s + SLOW_PAUSE_FACTOR * took_s
        self.committed(batch)
        # When all is tidy, the task waits without a limit: it must learn that this has ended.
        if self._journal.overdue or not self._untidy:
            self._untidy = True
            self._awake.set()

    def committed(self, batch: Batch) -> None:
        """A batch is durable: answer the clients that wait for it."""
        self.stepped()
        if self._gone and batch.must_last:
            # It is in the open files, which may not be found after a restart.
            self._broker.answers.failed(batch, Unwritable(self._gone), for_room=False)
        self._broker.answers.committed(batch)
        self._release()
        if self._broker.pending:
            # Confirms release consumers, and their deliveries must be written too.
            self._awake.set()

    def stepped(self) -> None:
        self._steps += 1
        self._step_s = monotonic()
