"""A file that holds disk space back, to be given up when the disk is full.

The one rule: with the ballast gone there is room to write acks and to drop what they settle, so
that a full disk can be left again.
"""

import os
from contextlib import suppress
from pathlib import Path


class Ballast:
    """`size` in bytes; 0 means that there is none."""

    def __init__(self, database: Path, size: int) -> None:
        self._path = database.with_name(database.name + ".ballast")
        self._size = size

    def fill(self) -> bool:
        """Take the space. Return whether it is there; a disk that has no room is no error."""
        if not self._size:
            self.give_up()
            return True
        try:
            with self._path.open("ab") as file:
                if os.fstat(file.fileno()).st_size != self._size:
                    os.truncate(file.fileno(), 0)
                    os.posix_fallocate(file.fileno(), 0, self._size)
        except OSError:
            self.give_up()
            return False
        return True

    def give_up(self) -> None:
        with suppress(OSError):  # What can't be given up leaves the disk as it is.
            self._path.unlink(missing_ok=True)
