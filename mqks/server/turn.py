"""The end of a turn of the event loop, and its timer.

The one rule: each connection with replies is flushed once a turn, with one joined write. After a
large chunk it is flushed at once, so that a consumer works while its publisher is read.
"""

import asyncio
from functools import partial
from math import inf

from mqks.broker.broker import Broker
from mqks.journal.paging import Paging
from mqks.server.chunks import LARGE_CHUNK_BYTES
from mqks.server.clients import Clients
from mqks.server.logins import Logins
from mqks.server.reads import Reads
from mqks.server.writer import Writer

LATE_S = 0.05
LATE_TURNS = 10
LATE_TURN_S = 0.005
LATE_MAX_S = 2.0
"""A timer that is so late waits until nothing was read in so many turns; at most for as long as it
is late, and not longer than this. The turns need time: what does not fit into a socket's buffer
comes when that was read, by the system's leave."""
WAIT_S = 0.002
"""Interval at which work that waits for the journal is retried."""


class Turn:
    """The server sets whom it calls: all of them are made with `flush` or `schedule_flush`."""

    clients: Clients
    logins: Logins
    paging: Paging
    reads: Reads
    writer: Writer

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._loop = asyncio.get_running_loop()
        self._flush_scheduled = False
        self._work_scheduled = False
        self._timer: asyncio.Handle | None = None
        self._timer_at_s = self._due_from_s = inf

    def schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._flush_scheduled = False
        self.flush()
        self.clients.end_turn()

    def flush(self) -> None:
        """Send the replies of this turn, and schedule the remaining work."""
        broker, clients, began_s = self._broker, self.clients, self._loop.time()
        clients.handle_chunks()
        self.writer.wake(alone=clients.turn_bytes < LARGE_CHUNK_BYTES)
        clients.turn_bytes = 0
        if broker.expelled:
            clients.close_expelled()
        clients.send()
        self.reads.wake()
        self.logins.wake()
        self.paging.wake()
        if broker.has_work and not self._work_scheduled:
            self._work_scheduled = True
            # Not now: a step takes time, and who has sent something comes in between.
            self._loop.call_soon(self._go_on)
        due_s = broker.schedule.next_s()
        # A timer that comes too early finds nothing, and another one is set then.
        if due_s is not None and due_s < self._timer_at_s:
            if self._timer:
                self._timer.cancel()
            self._timer_at_s, self._timer = due_s, self._loop.call_at(due_s, self._expire)
            # Some are due before they are set: looks ahead, and what an earlier turn has left. But
            # from when replies are sent on, clients may do what is in time.
            self._due_from_s = max(due_s, began_s)

    def _go_on(self) -> None:
        """Continue the work of earlier turns."""
        self._work_scheduled = False
        waits = self._broker.go_on()
        self.clients.resume_worked()
        if waits and self._broker.has_work:
            # Leave the processor to the commit that it waits for.
            self._work_scheduled = True
            self._loop.call_later(WAIT_S, self._go_on)
        self.flush()

    def _expire(self) -> None:
        """Do what is due. If the timer is late, what was sent in time may not have been read yet:
        it is read first."""
        now_s = self._loop.time()
        late_s = now_s - self._due_from_s
        if late_s > LATE_S:
            self._due_from_s, self._timer_at_s = inf, -inf
            self._catch_up(LATE_TURNS, now_s + min(late_s, LATE_MAX_S))
            return
        self.clients.handle_chunks()
        self._timer, self._timer_at_s = None, inf
        self._broker.schedule.run_due(self._broker.turns)
        self.flush()

    def _catch_up(self, turns: int, until_s: float) -> None:
        """Let some turns pass in which nothing is read."""
        clients = self.clients
        if (clients.has_read or clients.has_unhandled) and self._loop.time() < until_s:
            turns = LATE_TURNS
        clients.has_read = False
        again = partial(self._catch_up, turns - 1, until_s) if turns else self._expire
        self._timer = self._loop.call_later(LATE_TURN_S, again)
