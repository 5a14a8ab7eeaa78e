"""One server per database file.

The one rule: a server holds two locks. One is on a file next to the database, which also contains
the server's URL. The other is on the database itself; it excludes a server that uses a hard link,
or starts after the lock file was deleted. It is taken before SQLite opens the database and released
after SQLite has closed it: closing any descriptor of the file drops SQLite's own locks (fcntl).
flock and fcntl locks are independent.
"""

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final, Self

from mqks.errors import DatabaseLocked
from mqks.files import exists, identity, lock

LOCK_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
BESIDE: Final = ".lock", ".ballast", "-wal", "-shm", "-journal", "-texts"
"""Ends of the names of everything beside a database."""


def lock_path(database: Path) -> Path:
    """Next to the file itself, so that a symbolic link leads to the same lock."""
    return Path(f"{database.resolve()}.lock")


def refuse_links(database: Path) -> None:
    """Nothing beside a database is opened through a link, which may lead to anybody's file. Raises
    OSError."""
    for end in BESIDE:
        path = Path(f"{database.resolve()}{end}")
        if path.is_symlink():
            raise OSError(errno.ELOOP, f"{path} is a symbolic link", str(path))


class FileLock:
    """Held from the call of `take` until `release` or the end of the process."""

    def __init__(self, database: Path) -> None:
        self._database = database
        self._path = lock_path(database)
        self._url = ""
        self._descriptor = -1
        self.database = -1
        """Descriptor of the database; -1 if it did not exist."""

    def take(self, *, makes_database: bool = True) -> Self:
        """Raises DatabaseLocked when another process holds the lock, OSError when the lock file
        can't be created, or something beside the database is a link."""
        refuse_links(self._database)
        try:
            self._descriptor = os.open(self._path, LOCK_FLAGS, 0o600)
            lock(self._descriptor)
            if makes_database or exists(self._database):
                # Messages are private, as in a backup. WAL and texts get the mode of the database.
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                self.database = os.open(self._database, flags, 0o600)
                lock(self.database)
        except BlockingIOError:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").partition("\n")[0]
            who = "(by another name)" if self.database >= 0 else holder and f"(process {holder})"
            self.release()
            raise DatabaseLocked(
                f"{self._database} is in use by another server {who}".rstrip()
            ) from None
        except OSError:
            self.release()
            raise
        self._write()
        return self

    def tell(self, url: str) -> None:
        """Store the URL of the server that holds the lock."""
        self._url = url
        self._write()

    def _write(self) -> None:
        text = f"{os.getpid()}\n" + (f"{self._url}\n" if self._url else "")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)

    @property
    def is_there(self) -> bool:
        """Whether the lock file is still the one that is held."""
        with suppress(OSError):
            return identity(self._path.stat()) == identity(os.fstat(self._descriptor))
        return False

    def make_again(self) -> bool:
        """Create and lock a deleted lock file again; False when that can't be done. The lock on the
        database has excluded other servers meanwhile."""
        try:
            descriptor = os.open(self._path, LOCK_FLAGS, 0o600)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._write()
        return True

    def release(self) -> None:
        for descriptor in (self.database, self._descriptor):
            if descriptor >= 0:
                os.close(descriptor)
        self.database = self._descriptor = -1


def server_of(database: Path) -> str | None:
    """URL of the server that uses this file now, None without a server. Empty while the server
    starts, and when `database` is another name of the file than the server's.

    Raises OSError when the lock can't be read.
    """
    told = _held(lock_path(database))
    return told if told is not None or _held(database) is None else ""


def _held(path: Path) -> str | None:
    """The URL in a lock file that a server has locked."""
    try:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(path, flags)
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        # Shared, so that two processes that check at once do not take each other for a server.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 1000).decode("utf-8", "replace").partition("\n")[2].strip()
    finally:
        os.close(descriptor)
    return None
