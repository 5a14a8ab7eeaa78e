"""Ids of error replies: 24 hexadecimal digits that sort by time.

The one rule: a later id of the same database is greater, also within a microsecond and after the
clock was set back.
"""

import secrets
from contextlib import suppress

from mqks.server.clock import now_us


class ErrorIds:
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
