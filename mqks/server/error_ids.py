"""Ids of error replies: 24 hexadecimal digits that sort by time.

The one rule: of two ids of one database the later one is the greater, also within a microsecond,
and when the clock was set back.
"""

import secrets
from contextlib import suppress

from mqks.server.clock import now_us


class ErrorIds:
    def __init__(self) -> None:
        self._last_us = 0

    def follow(self, error_id: str) -> None:
        """This one was given before."""
        with suppress(ValueError):  # A damaged one keeps no server from starting.
            self._last_us = int(error_id[:14], 16)

    def __call__(self) -> tuple[str, int]:
        """Return a new id and the time in microseconds since 1970."""
        time_us = now_us()
        self._last_us = max(time_us, self._last_us + 1)
        return f"{self._last_us:014x}{secrets.randbits(40):010x}", time_us
