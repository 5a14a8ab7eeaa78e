"""Requests that wait while a pause makes publishes to a queue wait.

The one rule: who waits is asked nothing meanwhile. The end of the pause goes on with it, or what
ends its patience: its connection ends, or the server stops or drains.
"""

from collections.abc import Callable
from typing import TypeVar

from mqks.broker.broker import Broker
from mqks.broker.spine.base.turns import WAITS, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.broker.spine.clients.transaction import KEPT_OVERHEAD_BYTES
from mqks.errors import LimitExceeded, PublishesWait, QueuePaused

T = TypeVar("T")
COPIES = 3
"""Of the data of a publish that waits: its line, its arguments and they themselves."""


def may_wait(broker: Broker, connection: Connection) -> bool:
    is_leaving = connection.expelled or connection.rests & Slow.END
    return connection.can_wait and not (is_leaving or broker.shared.draining)


def patiently(
    broker: Broker, connection: Connection, size: int, attempt: Callable[[], Work[T]]
) -> Work[T]:
    """Do what publishes data of this size, again after each pause for which it had to wait. An
    attempt that raises has changed nothing. Raises BadRequest."""
    flow, settings = broker.flow, broker.settings
    try:
        while True:
            try:
                return (yield from attempt())
            except PublishesWait as pause:
                if not may_wait(broker, connection):
                    raise QueuePaused(str(pause)) from None
                held = size and size * COPIES + KEPT_OVERHEAD_BYTES
                left = settings.unhandled_bytes_max // 2 - flow.unhandled_bytes
                if not connection.waiting_bytes and held > left:
                    reason = f"{pause}, and no more may wait for that (unhandled_bytes_max)"
                    raise LimitExceeded("unhandled_bytes_max", reason) from None
                connection.waiting_bytes, connection.awaits_resume = held, pause.waiting
            yield WAITS
            connection.awaits_resume = None
    finally:
        connection.waiting_bytes, connection.awaits_resume = 0, None
