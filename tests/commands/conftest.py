"""What tests of commands get."""

from pathlib import Path

import pytest

from tests.commands.console import Console, Here
from tests.kit.server_process import ServerProcess


@pytest.fixture
def shell(server: ServerProcess, tmp_path: Path) -> Console:
    """Against a server."""
    return Here(tmp_path, server.url)


@pytest.fixture
def alone(tmp_path: Path) -> Console:
    """Without a server."""
    return Here(tmp_path)
