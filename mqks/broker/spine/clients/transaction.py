"""A transaction that is not committed.

The one rule: nothing of it has any effect yet.
"""

from typing import Any, Final

from mqks.broker.spine.clients.outbox import Flow
from mqks.errors import LimitExceeded
from mqks.limits import TRANSACTION_BYTES_MAX, TRANSACTION_LINES_MAX, TRANSACTIONS_BYTES_MAX
from mqks.protocol.requests import Request

KEPT_OVERHEAD_BYTES: Final = 700
"""Memory of a request besides its text: two tuples, their values and what holds them."""


class Transaction:
    """What has come since `begin`, parsed."""

    __slots__ = ("_flow", "_size", "failed", "kept")

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._size = 0
        self.kept: list[tuple[Request, Any]] = []
        self.failed = False
        """A request was refused, and so will be `commit`."""

    def keep(self, request: Request, wanted: Any, size: int) -> None:
        """Keep a request with a text of this size until `commit`. Raises LimitExceeded."""
        if self.failed:
            return
        size += KEPT_OVERHEAD_BYTES
        if len(self.kept) >= TRANSACTION_LINES_MAX or self._size + size > TRANSACTION_BYTES_MAX:
            reason = f"more than {TRANSACTION_LINES_MAX} requests or {TRANSACTION_BYTES_MAX} bytes "
            reason += "since begin"
            raise LimitExceeded("transaction_max", reason)
        if self._flow.kept_bytes + size > TRANSACTIONS_BYTES_MAX:
            reason = f"more than {TRANSACTIONS_BYTES_MAX} bytes of all connections wait for commit"
            raise LimitExceeded("transaction_max", reason)
        self._size += size
        self._flow.kept_bytes += size
        self.kept.append((request, wanted))

    def end(self) -> None:
        """Its requests are done, or dropped."""
        self._flow.kept_bytes -= self._size
        self._size, self.kept = 0, []

    def fail(self) -> None:
        """A request was refused."""
        self.failed = True
        self.end()
