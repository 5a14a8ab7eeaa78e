"""A Unix socket at a path that may be another's.

The one rule: only what nobody answers at is replaced, and only what is ours is deleted.
"""

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mqks.errors import AddressUnavailable
from mqks.files import identity, lock


class UnixPath:
    """Where a server listens, until `delete`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = -1, -1

    def listen(self, backlog: int) -> socket.socket:
        """Raises AddressUnavailable, OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _alone(self._path.parent):
                self._make_way()
                listener.bind(str(self._path))
                self._identity = identity(self._path.lstat())
                listener.listen(backlog)
        except BaseException:
            listener.close()
            raise
        return listener

    def delete(self) -> None:
        """Before its socket is closed: then nobody takes the path meanwhile."""
        with suppress(OSError):
            if identity(self._path.lstat()) == self._identity:
                self._path.unlink()
        self._identity = -1, -1

    def _make_way(self) -> None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise AddressUnavailable(f"can't listen on {self._path}: it exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)
            # 0: somebody answers; EAGAIN: so many ask already; anything else is no sign of a
            # socket that was left behind.
            if asking.connect_ex(str(self._path)) != errno.ECONNREFUSED:
                raise AddressUnavailable(
                    f"can't listen on {self._path}: another process listens there"
                )
        self._path.unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Of those who start at once one looks and listens, and then the next one looks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    except BlockingIOError:
        raise AddressUnavailable(f"{directory} is locked by another process") from None
    finally:
        os.close(descriptor)
