"""Failed requests in the log, limited per second.

The one rule: omitted lines are counted, and the count is logged.
"""

import asyncio

from mqks.broker.spine.log.pending import ErrorRecord
from mqks.limits import ERRORS_PER_SECOND_MAX
from mqks.server import log


class ErrorLog:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._count = 0
        """Since the first of this second."""

    def allows(self) -> bool:
        """Whether one more line may be logged now."""
        if not self._count:
            self._loop.call_later(1.0, self._next_second)
        self._count += 1
        return self._count <= ERRORS_PER_SECOND_MAX

    def _next_second(self) -> None:
        suppressed = self._count - ERRORS_PER_SECOND_MAX
        self._count = 0
        if suppressed > 0:
            log.warning("errors_suppressed", count=suppressed)

    def __call__(self, record: ErrorRecord) -> bool:
        """Log a failed request; return whether it was logged."""
        if not self.allows():
            return False
        log.warning(
            "request_failed",
            error_id=record.id,
            connection=record.connection,
            client=log.client(record.client),
            request_id=record.request_id.decode("utf-8", "backslashreplace"),
            action=record.action.decode("utf-8", "backslashreplace"),
            reason=record.reason,
        )
        return True
