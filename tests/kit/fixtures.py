"""Servers and clients, as many tests want them; loaded when pytest has loaded `mqks.testing`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mqks.testing import Broker
from tests.kit.line_client import LineClient
from tests.kit.proxy import Proxy
from tests.kit.server_process import ServerProcess
from tests.kit.skins import SKINS


@contextmanager
def served(
    db: Path | str, *flags: str, environment: Mapping[str, str] | None = None
) -> Iterator[tuple[ServerProcess, LineClient]]:
    """By a server that is killed at the end, one client."""
    with (
        ServerProcess(db, *flags, environment=environment) as server,
        LineClient(server.address) as client,
    ):
        yield server, client


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


@pytest.fixture
def layout_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog `layout` of Iceberg, in a database."""
    from pyiceberg.utils.config import Config  # here, since others need no pyiceberg

    told = {"URI": f"sqlite:///{tmp_path}/catalog.db", "WAREHOUSE": f"file://{tmp_path}/files"}
    for name, value in told.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__LAYOUT__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # Else as at the import.
