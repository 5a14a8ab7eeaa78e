"""Files as the system knows them: which one it is, and who has it.

The one rule: names prove nothing; others may move them meanwhile.
"""

import fcntl
import os
import time
from contextlib import suppress
from typing import Final

TRIES: Final = 20
TRY_S: Final = 0.01


def lock(descriptor: int) -> None:
    """Again and again for a moment: whoever looks for a server holds the lock while it looks.
    Raises BlockingIOError."""
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(TRY_S)
    raise BlockingIOError


def identity(of: os.stat_result) -> tuple[int, int]:
    """What tells a file from every other one, whatever their names."""
    return of.st_dev, of.st_ino
