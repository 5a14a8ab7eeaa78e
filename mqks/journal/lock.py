"""One server per database file.

The one rule: the lock stands in a file of its own. Opening the database by other means than SQLite
would drop SQLite's own locks when that descriptor is closed.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

from mqks.errors import DatabaseLocked

TRIES = 20
TRY_S = 0.01


def lock_path(database: Path) -> Path:
    """Beside the file itself: who comes by a link meets the same lock."""
    return Path(f"{database.resolve()}.lock")


def _lock(descriptor: int) -> None:
    """Again and again for a moment: `server_of` holds the lock while it looks."""
    for _ in range(TRIES):
        with suppress(BlockingIOError):
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(TRY_S)
    raise BlockingIOError


class FileLock:
    """Held from the call of `take` until `release` or the end of the process."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = lock_path(database)
        self._descriptor = -1

    def take(self) -> Self:
        """Raises DatabaseLocked when another process holds it, OSError when it can't be made."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").partition("\n")[0]
            os.close(descriptor)
            raise DatabaseLocked(
                f"{self._database} is in use by another server"
                + (f" (process {holder})" if holder else "")
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
        self._descriptor = descriptor
        return self

    def tell(self, url: str) -> None:
        """Write down where the server that holds the lock listens."""
        os.pwrite(self._descriptor, b"%d\n%b\n" % (os.getpid(), url.encode()), 0)

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def server_of(database: Path) -> str | None:
    """URL of the server that has this file now, empty while it starts; None without a server.

    Raises OSError when the lock can't be read.
    """
    try:
        descriptor = os.open(lock_path(database), os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # Shared, so that two who look at once do not take each other for a server.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 1000).decode("utf-8", "replace").partition("\n")[2].strip()
    finally:
        os.close(descriptor)
    return None
