"""Ids of error replies: 24 hexadecimal digits that sort by time.

The one rule: of two ids of one server the later one is the greater, also within a microsecond.
"""

import secrets
import time


class ErrorIds:
    def __init__(self) -> None:
        self._last_us = 0

    def __call__(self) -> tuple[str, int]:
        """Return a new id and its time in microseconds since 1970."""
        time_us = max(time.time_ns() // 1000, self._last_us + 1)
        self._last_us = time_us
        return f"{time_us:014x}{secrets.randbits(40):010x}", time_us
