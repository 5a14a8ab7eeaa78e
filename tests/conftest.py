"""What every test gets: asyncio for coroutines, and no settings from around the test run."""

import os

import pytest

pytest_plugins = ["mqks.testing"]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith("MQKS_")]:
        monkeypatch.delenv(variable)
