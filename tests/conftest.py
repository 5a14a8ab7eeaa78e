"""What every test gets: asyncio for coroutines, and no settings from around the test run."""

import os
from pathlib import Path

import pytest

from tests import sync_library as sync

pytest_plugins = ["mqks.testing"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MQKS_")]:
        monkeypatch.delenv(variable)


@pytest.fixture(scope="session")
def sync_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library for LD_PRELOAD, of which tests/sync_library.py tells."""
    return sync.compiled(tmp_path_factory.mktemp("sync"))
