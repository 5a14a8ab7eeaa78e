"""Programs of a test, run as a person runs them: from a file, and with the URL in the variable."""

import os
import subprocess
import sys
from pathlib import Path

from tests.kit.waiting import WAIT_S

ROOT = Path(__file__).parents[2]


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "MQKS_URL": url, "PYTHONPATH": str(ROOT)}


def ended(
    directory: Path, url: str, program: str, *flags: str, **more: str
) -> subprocess.CompletedProcess[str]:
    """What became of `program.py`; `more` is its environment, too."""
    path = directory / "program.py"
    path.write_text(program)
    return subprocess.run(
        [sys.executable, *flags, str(path)],
        env=environment(url) | more,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
