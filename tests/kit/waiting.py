"""Waiting for what can be seen.

The one rule: a limit is so long that only a fault reaches it, on however busy a machine.
"""

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120
_LOOK_AGAIN_S = 0.01, 0.1
"""At first, and at most: what has not happened for long is looked at less often."""

T = TypeVar("T")


def until(
    look: Callable[[], T | None], otherwise: str | Callable[[], str] = "it does not happen"
) -> T:
    """Look again and again; what was seen first that is true. AssertionError with what is
    `otherwise` the case when nothing is, then asked for if it is a function."""
    begin_s, (first_s, most_s) = time.monotonic(), _LOOK_AGAIN_S
    while not (found := look()):
        waited_s = time.monotonic() - begin_s
        assert waited_s < WAIT_S, otherwise() if callable(otherwise) else otherwise
        time.sleep(min(max(first_s, waited_s / 10), most_s))
    return found
