"""A Unix socket at a path that another process may use.

The one rule: only a socket at which nobody answers is replaced, and only our own is deleted.
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
    """The path of a listening server, until `delete`."""

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
        """Call it before the socket is closed, so that nobody else takes the path meanwhile."""
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
            # ECONNREFUSED alone means that the socket is stale. 0 means that somebody answers,
            # EAGAIN that the backlog is full.
            if asking.connect_ex(str(self._path)) != errno.ECONNREFUSED:
                raise AddressUnavailable(
                    f"can't listen on {self._path}: another process listens there"
                )
        self._path.unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Servers that start at the same time check and listen one after the other."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    except BlockingIOError:
        raise AddressUnavailable(f"{directory} is locked by another process") from None
    finally:
        os.close(descriptor)
