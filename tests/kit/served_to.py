"""A server with users, as many doors want one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mqks import users_file
from mqks.users import User
from tests.kit.server_process import ServerProcess


@contextmanager
def served_to(
    directory: Path, *users: User, flags: tuple[str, ...] = ()
) -> Iterator[ServerProcess]:
    """Nobody else may ask it. Their file is `users` in the directory."""
    path = directory / "users"
    users_file.write(path, [*users])
    with ServerProcess(directory / "mqks.db", "--users", str(path), *flags) as server:
        yield server
