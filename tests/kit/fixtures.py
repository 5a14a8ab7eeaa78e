"""Servers and clients, as many tests want them; loaded when pytest has loaded `mqks.testing`."""

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mqks import users_file
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from mqks.users import User
from tests.kit.line_client import LineClient
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.skins import SKINS


@contextmanager
def served(
    db: Path | str,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    module: str = "mqks",
) -> Iterator[tuple[ServerProcess, LineClient]]:
    """By a server that is killed at the end, one client."""
    with (
        ServerProcess(db, *flags, environment=environment, module=module) as server,
        LineClient(server.address) as client,
    ):
        yield server, client


watchful = partial(served, module="tests.kit.watchful")
"""The same by a server that looks at its files, and for room on a full disk, at once."""


@contextmanager
def served_to(
    directory: Path, *users: User, flags: tuple[str, ...] = ()
) -> Iterator[ServerProcess]:
    """By a server with these users, and nobody else; their file is `users` in the directory."""
    path = directory / "users"
    users_file.write(path, [*users])
    with ServerProcess(directory / "mqks.db", "--users", str(path), *flags) as server:
        yield server


@contextmanager
def client_here(db: Path | DatabaseUrl, **settings: Any) -> Iterator[LineClient]:
    """Of a server in this process."""
    with (
        Broker(db, **{"db_replication": "none"} | settings) as broker,
        LineClient(("127.0.0.1", broker.port)) as client,
    ):
        yield client


@pytest.fixture
def server(db: Path) -> Iterator[ServerProcess]:
    with ServerProcess(db) as running:
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[LineClient]:
    with LineClient(server.address) as client:
        yield client


@pytest.fixture(params=SKINS)
def connect(request: pytest.FixtureRequest) -> Any:
    """Connects either client."""
    return SKINS[request.param]


@pytest.fixture
def proxy(mqks_broker: Broker) -> Iterator[Proxy]:
    with Proxy(mqks_broker.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def collected() -> Iterator[None]:
    """What is left open is not found by the tests of another file."""
    yield
    gc.collect()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory is one of the test."""
    monkeypatch.chdir(tmp_path)
