"""Waiting for what can be seen.

The one rule: a limit is so long that only a fault reaches it, on however busy a machine.
"""

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_S = 120
_LOOK_AGAIN_S = 0.01

T = TypeVar("T")


def until(
    look: Callable[[], T | None], otherwise: str | Callable[[], str] = "it does not happen"
) -> T:
    """Look again and again; what was seen first that is true. AssertionError with what is
    `otherwise` the case when nothing is, then asked for if it is a function."""
    limit_s = time.monotonic() + WAIT_S
    while not (found := look()):
        assert time.monotonic() < limit_s, otherwise() if callable(otherwise) else otherwise
        time.sleep(_LOOK_AGAIN_S)
    return found
