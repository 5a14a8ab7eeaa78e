"""A file that reserves disk space, deleted when the disk is full.

The one rule: without the ballast there is space to write acks and to delete what they settle, so
that the server can recover from a full disk.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path


class Ballast:
    """`size` in bytes; 0 means no ballast."""

    def __init__(self, database: Path, size: int) -> None:
        self._path = database.with_name(database.name + ".ballast")
        self._size = size

    def fill(self) -> bool:
        """Reserve the space. Return whether that succeeded; a full disk is not an error."""
        if not self._size:
            self.give_up()
            return True
        try:
            if not self._is_there:
                # Always a new file: what has the name may have others, too.
                self._path.unlink(missing_ok=True)
                with self._path.open("xb") as file:
                    os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError:
            self.give_up()
            return False
        return True

    @property
    def _is_there(self) -> bool:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == self._size

    def give_up(self) -> None:
        with suppress(OSError):  # If it can't be deleted, the disk stays full.
            self._path.unlink(missing_ok=True)
