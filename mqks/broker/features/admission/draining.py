"""The server drains: nothing is delivered, and only operators are let in, so that consumers finish
what they hold before the server stops.

The one rule: nothing is taken from anybody. What consumers hold is waited for, and told.
"""

import json
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, Final

from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.clients.outbox import Flow, Slow
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.shared import Shared
from mqks.errors import BadRequest, Unwritable
from mqks.limits import DRAIN_HOLDERS_MAX, DRAINS_WAITING_MAX, STEP_NAMES
from mqks.protocol import replies
from mqks.users import GuestPermissions

LOOK_S: Final = 0.1
"""Interval at which it looks whether anything is held, while a connection waits for that."""


class Drain:
    """`flow` counts what `consumers` hold. Whether the server drains is in `shared`, for queues."""

    def __init__(
        self,
        shared: Shared,
        flow: Flow,
        queues: Mapping[bytes, Queue],
        consumers: Mapping[bytes, Consumer],
        connections: Mapping[int, Connection],
    ) -> None:
        self._shared, self._flow = shared, flow
        self._queues, self._consumers, self._connections = queues, consumers, connections
        self._waiting: list[tuple[Connection, bytes, int]] = []
        """Who waits, with which id, and until when."""
        self._owed: Counter[Connection] = Counter()
        """How many answers to `drain` are to come."""

    def begin(self, connection: Connection, request_id: bytes, timeout_s: float) -> bool:
        """Drain; tell the connection when nothing is held, or after this time. Return whether it
        began just now. Raises BadRequest."""
        if self._owed[connection] >= DRAINS_WAITING_MAX:
            raise BadRequest(f"drain: {DRAINS_WAITING_MAX} of this connection have no answer yet")
        began, self._shared.draining = not self._shared.draining, True
        for each in self._connections.values():
            each.look_again()
        end_us = self._shared.schedule.clock_us() + round(timeout_s * 1e6)
        self._waiting.append((connection, request_id, end_us))
        self._owed[connection] += 1
        connection.unconfirmed += 1  # It has an answer to come, also if it sends no more.
        if len(self._waiting) == 1:
            self._look()
        return began

    def end(self) -> bool:
        """Deliver again; return whether it drained until now."""
        shared = self._shared
        ended, shared.draining = shared.draining, False
        if ended:
            shared.turns.due |= dict.fromkeys(each for each in self._queues.values() if each.ring)
            for each in self._connections.values():
                each.is_guest = False
                if isinstance(each.permissions, GuestPermissions):
                    each.permissions = each.permissions.narrowed
        return ended

    def _look(self) -> None:
        shared, now_us = self._shared, self._shared.schedule.clock_us()
        is_over = not (shared.draining and self._flow.unacked.used)
        waiting, self._waiting = self._waiting, []
        for connection, request_id, end_us in waiting:
            is_gone = connection.closed or connection.expelled or connection.rests & Slow.END
            if is_over or end_us <= now_us or is_gone:
                shared.turns.later(self._tell(connection, request_id))
            else:
                self._waiting.append((connection, request_id, end_us))
        if self._waiting:
            shared.schedule.after(LOOK_S, self._look)

    def _tell(self, connection: Connection, request_id: bytes) -> Work[None]:
        """After the next commit: what was acked is durable then."""
        count, holding = 0, list[Consumer]()
        for some in slices([*self._consumers.values()], STEP_NAMES):
            found = [each for each in some if each.unacked]
            count += sum(each.unacked_count for each in found)
            holding += found
            yield GOES_ON
        told = {  # Some may have been acked meanwhile.
            "draining": self._shared.draining,
            "unacked": count,
            "consumers": len(holding),
            "holders": [*map(_holder, holding[:DRAIN_HOLDERS_MAX])],
        }
        then = partial(self._answer, connection, replies.ok(request_id, json.dumps(told).encode()))
        self._shared.pending.waiters.held.append((connection, then, False))

    def _answer(self, connection: Connection, reply: bytes, is_written: bool) -> None:
        connection.unconfirmed -= 1
        self._owed[connection] -= 1
        self._owed += Counter()  # Without those that are owed nothing.
        if connection.closed:
            return
        if is_written:
            connection.write(reply)
        else:
            request_id = reply[: reply.index(b" ")]
            connection.fail(request_id, b"drain", Unwritable("drain: acks are not durable"))


def _holder(consumer: Consumer) -> dict[str, Any]:
    connection = consumer.connection
    return {
        "connection": connection.id,
        "address": connection.address,
        "user": getattr(connection, "user", None),
        "client": connection.name,
        "consumer": consumer.id.decode("utf-8", "surrogateescape"),
        "queue": consumer.queue.name.decode("utf-8", "surrogateescape"),
        "unacked": consumer.unacked_count,
    }
