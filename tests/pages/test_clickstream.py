"""examples/clickstream, with no package but those that `pip install 'mqks[spark]'` brings.

The one rule: every other package is there, but cannot be imported, neither by the example nor by
the processes that it starts.
"""

import os
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUN = [sys.executable, str(ROOT / "examples/clickstream/run.py")]
BLOCKER = """
import sys
from importlib.machinery import PathFinder

class Blocker(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {blocked!r}:
            return super().find_spec(name, path, target)

sys.meta_path = [Blocker if each is PathFinder else each for each in sys.meta_path]
"""


def required(name: str, *extras: str) -> set[str]:
    """The names of a distribution and of all that it needs here."""
    found, waiting = set[str](), [(name, extras)]
    while waiting:
        name, extras = waiting.pop()
        found.add(normal(name))
        for line in distribution(name).requires or ():
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra *== *['\"]([^'\"]+)['\"]", marker)
            needed = re.match(r"[A-Za-z0-9._-]+", requirement)
            assert needed is not None
            if (extra is None or extra[1] in extras) and normal(needed[0]) not in found:
                try:
                    distribution(needed[0])
                except PackageNotFoundError:
                    continue  # For another system or Python.
                waiting.append((needed[0], ()))
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of an installation of `mqks[spark]` alone."""
    allowed = required("mqks", "spark")
    blocked = {
        module
        for module, distributions in packages_distributions().items()
        if not any(normal(each) in allowed for each in distributions)
    }
    assert {"pytest", "_pytest", "hypothesis", "trustme"} <= blocked
    assert not blocked & {"mqks", "anyio", "typer", "rich", "pyspark", "pyarrow", "pandas"}
    (tmp_path / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    return {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}


def test_the_blocker_blocks(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import pytest"], env=environment, capture_output=True, text=True
    )
    assert "ModuleNotFoundError: No module named 'pytest'" in done.stderr


@pytest.mark.slow
def test_it_starts_without_the_packages_of_developers(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [*RUN, "--help"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.stderr, done.returncode) == ("", 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_counts_every_event(environment: dict[str, str], tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    command = [*RUN, "--count", "2000", "--keep", str(kept), "--master", "local[1]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=840)

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "every event is there once, unchanged"
    assert (kept / "report.html").is_file()
