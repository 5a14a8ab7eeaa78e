"""Unsent replies of all connections.

The one rule: a client that reads is served, whatever others do. From half of the limit on, a client
gets no more before it has read everything. Near the limit, clients that read nothing are
disconnected, the largest first; at the limit no replies are produced.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from operator import attrgetter

from mqks import log
from mqks.broker.broker import Broker
from mqks.clock import Patient
from mqks.errors import Limit, LimitExceeded
from mqks.limits import STUCK_S
from mqks.server.client import NOT_SEEN, ReadBuffer, ServerClient
from mqks.server.unhandled import Unhandled

CLOSE_S = 10.0
"""How long a connection that sends no more may leave its last replies unread."""
LOOK_S = 1.0
"""Sent bytes count as unsent until the next check: this long, unless they are many."""
LOOK_AGAIN_S = 0.1
"""Until the next check, while many bytes are unsent."""


class Unsent:
    """`drop` disconnects a client with a reason; `flush` is called when more can be sent."""

    def __init__(
        self,
        broker: Broker,
        clients: Mapping[int, ServerClient],
        unhandled: Unhandled,
        reading: ReadBuffer,
        drop: Callable[[ServerClient, LimitExceeded], None],
        flush: Callable[[], None],
    ) -> None:
        self._broker = broker
        self._outboxes = broker.shared.outboxes
        self._clients = clients
        self._unhandled = unhandled
        self._reading = reading
        self._drop = drop
        self._flush = flush
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | Patient | None = None
        self._bytes_max = broker.settings.unsent_bytes_max
        self.high_water_bytes = broker.settings.delivery_pause_bytes
        """A client with more unsent bytes is slow; 1 while the total is large."""
        self._check_due_bytes: float = 0.0
        """It looks when the broker counts more than this."""

    def check_if_due(self) -> None:
        """Check soon what was read; immediately if many bytes are unsent."""
        if self._outboxes.used <= self._check_due_bytes:
            return
        if self._timer is None:
            self._check_after(LOOK_S, 0)
        if self._timer is not None and self._outboxes.used > self._check_due_bytes:
            self._timer.cancel()
            self._timer = self._loop.call_soon(self._check)
            self._check_due_bytes = inf

    def _check_after(self, seconds: float, unsent_bytes: int) -> None:
        self._timer = Patient(seconds, self._check)
        self._check_due_bytes = float(unsent_bytes + self._bytes_max // 8)

    def _check(self) -> None:
        now_s = self._loop.time()
        unsent_bytes = sum(_unsent(client, now_s) for client in self._clients.values())
        self._tell(unsent_bytes)
        if self._reading.outboxes_full:
            wanted_bytes = unsent_bytes - self._bytes_max * 3 // 4
            stuck = self._stuck(attrgetter("unsent_bytes"), wanted_bytes, now_s)
            unsent_bytes -= self._drop_all(stuck, "unsent_bytes_max")
        if self._unhandled.is_short:
            # What they have sent waits until they have read.
            wanted_bytes = self._unhandled.excess_bytes
            stuck = self._stuck(attrgetter("unhandled_bytes"), wanted_bytes, now_s)
            unsent_bytes -= self._drop_all(stuck, "unhandled_bytes_max")
        self._set_high_water(unsent_bytes)
        self._timer, self._check_due_bytes = None, 0.0
        if unsent_bytes:
            much = unsent_bytes > self._bytes_max // 4
            self._check_after(LOOK_AGAIN_S if much else LOOK_S, unsent_bytes)
        # What this turn has written already comes on top, and what is promised.
        flow = self._broker.flow
        self._outboxes.set(
            unsent_bytes
            + flow.promised_bytes
            + sum(len(data) for connection in flow.touched for data in connection.outbox)
        )
        self._flush()

    def _stuck(
        self, size_of: Callable[[ServerClient], int], wanted_bytes: int, now_s: float
    ) -> Iterator[ServerClient]:
        """Clients that have read nothing for long, the largest first, until they have so much."""
        for client in sorted(self._clients.values(), key=size_of, reverse=True):
            if wanted_bytes <= 0 or not size_of(client):
                return
            if client.unsent_bytes and now_s - client.moved_s >= STUCK_S:
                wanted_bytes -= size_of(client)
                yield client

    def _drop_all(self, clients: Iterable[ServerClient], limit: Limit) -> int:
        """Disconnect them; return their unsent bytes."""
        freed_bytes = 0
        for client in clients:
            freed_bytes += client.unsent_bytes
            self._broker.limits_reached[limit] += 1
            reason = (
                f"{client.unsent_bytes} bytes of replies were not read for {STUCK_S:g} s, and the "
                f"server has reached {limit}"
            )
            self._drop(client, LimitExceeded(limit, reason))
        return freed_bytes

    def _tell(self, unsent_bytes: int) -> None:
        # Two bounds: one client that reads and asks would cross a single one all the time.
        if not self._reading.outboxes_full and unsent_bytes > self._bytes_max * 7 // 8:
            self._reading.outboxes_full = True
            log.warning("outboxes_full", unsent_bytes=unsent_bytes)
        elif self._reading.outboxes_full and unsent_bytes <= self._bytes_max * 3 // 4:
            self._reading.outboxes_full = False
            log.event("outboxes_have_room", unsent_bytes=unsent_bytes)

    def _set_high_water(self, unsent_bytes: int) -> None:
        high_water_bytes = self.high_water_bytes
        if unsent_bytes > self._bytes_max // 2:
            # Not 0: a TLS transport would count as slow with nothing in it, and not come back.
            high_water_bytes = 1
        elif unsent_bytes <= self._bytes_max // 4:
            high_water_bytes = self._broker.settings.delivery_pause_bytes
        if high_water_bytes != self.high_water_bytes:
            self.high_water_bytes = high_water_bytes
            for client in self._clients.values():
                client.set_high_water(high_water_bytes)


def _unsent(client: ServerClient, now_s: float) -> int:
    """Check what it has read; return the bytes that may still be in memory for it."""
    size = client.transport.get_write_buffer_size()
    taken = client.unsent_bytes - size
    if not size:
        client.unsent_bytes, client.taken_bytes = 0, NOT_SEEN
    elif taken != client.taken_bytes:
        client.taken_bytes, client.moved_s = taken, now_s
    elif client.ended and now_s - client.moved_s > CLOSE_S:
        client.transport.abort()
    return client.unsent_bytes
