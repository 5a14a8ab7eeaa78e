"""One server per database file.

The one rule: the lock stands in a file of its own. Opening the database by other means than SQLite
would drop SQLite's own locks when that descriptor is closed.
"""

import fcntl
import os
from pathlib import Path
from typing import Self

from mqks.errors import DatabaseLocked


class FileLock:
    """Held from the call of `take` until `release` or the end of the process."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = database.with_name(database.name + ".lock")
        self._descriptor = -1

    def take(self) -> Self:
        """Raises DatabaseLocked when another process holds it, OSError when it can't be made."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 20).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise DatabaseLocked(
                f"{self._database} is in use by another server"
                + (f" (process {holder})" if holder else "")
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, b"%d\n" % os.getpid())
        self._descriptor = descriptor
        return self

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
