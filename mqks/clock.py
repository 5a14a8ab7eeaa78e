"""The wall clock, and timers that judge others.

The one rule: nobody is late because this process stood still (SIGSTOP, a suspended machine). After
that, timers come before anything is read that was sent in time.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Final

STILL_S: Final = 1.0
"""A timer that is so late begins anew: the process stood still."""


def now_us() -> int:
    """Microseconds since 1970."""
    return time.time_ns() // 1000


class Patient:
    """Calls `act` after some seconds in which the process did not stand still."""

    __slots__ = ("_act", "_loop", "_seconds", "_timer", "_until_s")

    def __init__(self, seconds: float, act: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._act = act
        self._begin()

    def _begin(self) -> None:
        self._until_s = self._loop.time() + self._seconds
        self._timer = self._loop.call_later(self._seconds, self._ring)

    def _ring(self) -> None:
        if self._loop.time() > self._until_s + STILL_S:
            self._begin()
        else:
            self._act()

    def cancel(self) -> None:
        self._timer.cancel()
