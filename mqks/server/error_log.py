"""Failed requests: their ids, and their lines in the log.

The one rule: no more than a fixed number of lines a second; omitted ones are counted, and the count
is logged.
"""

import asyncio
import secrets
from contextlib import suppress

from mqks import log
from mqks.broker.spine.log.pending import ErrorRecord
from mqks.clock import now_us
from mqks.limits import ERRORS_PER_SECOND_MAX


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
            **log.who(record.connection, record.user, record.client),
            request_id=record.request_id.decode("utf-8", "backslashreplace"),
            action=record.action.decode("utf-8", "backslashreplace"),
            reason=record.reason,
        )
        return True


class ErrorIds:
    """24 hexadecimal digits that sort by time. A later id of the same database is greater, also
    within a microsecond and after the clock was set back."""

    def __init__(self) -> None:
        self._last_us = 0

    def follow(self, error_id: str) -> None:
        """Continue after this id."""
        with suppress(ValueError):  # A damaged id must not prevent a start.
            self._last_us = int(error_id[:14], 16)

    def __call__(self) -> tuple[str, int]:
        """Return a new id and the time in microseconds since 1970."""
        time_us = now_us()
        self._last_us = max(time_us, self._last_us + 1)
        return f"{self._last_us:014x}{secrets.randbits(40):010x}", time_us
