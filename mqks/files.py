"""The identity of files, and locks on them.

The one rule: names prove nothing, since files may be renamed at any time.
"""

import errno
import fcntl
import os
import stat
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

NOTHING: Final = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)

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


def exists(path: Path) -> bool:
    """Raises OSError if it cannot be told, as `is_file` and `is_dir` do. Those of `Path` return
    False in this case, from Python 3.14 on."""
    return _mode(path) != 0


def is_file(path: Path) -> bool:
    return stat.S_ISREG(_mode(path))


def is_dir(path: Path) -> bool:
    return stat.S_ISDIR(_mode(path))


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except ValueError:  # No name that the system could have.
        return 0
    except OSError as error:
        if error.errno in NOTHING:
            return 0
        raise
