"""examples/clickstream, with no package but those that `mqks[server,spark]` brings.

The one rule: as `tests.kit.only`.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import only
from tests.kit.program import ROOT, Program

RUN = [sys.executable, str(ROOT / "examples/clickstream/run.py")]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of an installation of `mqks[server,spark]` alone."""
    return only.environment(tmp_path, "server", "spark")


def test_the_blocker_blocks(environment: dict[str, str], tmp_path: Path) -> None:
    with Program([sys.executable, "-c", "import pytest"], "", tmp_path, **environment) as program:
        program.end()
    assert "ModuleNotFoundError: No module named 'pytest'" in program.told


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quick_spark")
def test_it_counts_every_event(environment: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [*RUN, "--count", "2000", "--keep", str(kept), "--master", "local[1]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "every event is there once, unchanged"
    assert (kept / "report.html").is_file()
