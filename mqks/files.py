"""The identity of files, and locks on them.

The one rule: names prove nothing, since files may be renamed at any time.
"""

import fcntl
import os
import time
from contextlib import suppress
from typing import Final

TRIES: Final = 20
TRY_S: Final = 0.01


def lock(descriptor: int) -> None:
    """Lock a file, with retries for a moment: a program that checks for a server holds the lock
    shortly. Raises BlockingIOError."""
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(TRY_S)
    raise BlockingIOError


def identity(of: os.stat_result) -> tuple[int, int]:
    """Identifies a file, independent of its names."""
    return of.st_dev, of.st_ino
