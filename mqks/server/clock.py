"""The wall clock."""

import time


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000
