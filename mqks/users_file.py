"""The users file on disk.

The one rule: a reader always finds a complete file, the old or the new one.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mqks import users
from mqks.durable import sync
from mqks.errors import ConfigurationError
from mqks.limits import USERS_BYTES_MAX
from mqks.users import User


def read(path: Path) -> list[User]:
    """Raises ConfigurationError."""
    try:
        with path.open("rb") as file:
            data = file.read(USERS_BYTES_MAX + 1)
        if len(data) > USERS_BYTES_MAX:
            raise ConfigurationError(f"{path}: the file is longer than {USERS_BYTES_MAX} bytes")
        return users.parse(data.decode(), str(path))
    except FileNotFoundError:
        raise ConfigurationError(
            f"the users file {path} does not exist; mqks user add NAME --token creates it"
        ) from None
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path}: the file is not UTF-8") from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file against changes by others. Raises ConfigurationError."""
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        raise ConfigurationError(f"the directory {path.parent} does not exist") from None
    except OSError as error:
        raise ConfigurationError(f"{path.parent}: {error.strerror}") from None
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)
        yield
    finally:
        os.close(directory)


def write(path: Path, entries: Iterable[User]) -> None:
    """Replace the file, readable by its owner only. If root creates it, it belongs to the owner of
    its directory, so that the server can read it. Raises ConfigurationError."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = Path(name)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                if os.geteuid() == 0:
                    owner = (path if path.exists() else path.parent).stat()
                    os.fchown(descriptor, owner.st_uid, owner.st_gid)
                file.writelines(user.line() for user in entries)
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise ConfigurationError(f"{path}: {error.strerror}") from None
