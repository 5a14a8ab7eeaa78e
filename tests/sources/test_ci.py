"""A run of all tests passes with one that has failed, if it passes by itself.

The one rule: pytest itself runs, on tests that fail as they are told.
"""

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / ".ci" / "once_more.py"
PYTEST = Path(sys.executable).with_name("pytest")
CONFTEST = """
def pytest_addoption(parser):
    parser.addoption("--hypothesis-profile")
"""
ONCE = """
import os
from pathlib import Path

def fails_once(name):
    print(f"TEST_SEED={os.environ.get('TEST_SEED', 17)}")
    known = Path(f"{name}.known")
    assert known.exists() or known.touch(), name

def test_good(): pass
"""
A, B = (f"def test_{name}(): fails_once('{name}')\n" for name in "ab")


def run(
    directory: Path, file: str = "test_x.py", text: str = A, plugins: Sequence[str] = ()
) -> tuple[int, str, list[str]]:
    """Status, output, and the names of the tests that passed only by themselves."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / file).write_text(ONCE + text)
    named = directory / "named"
    done = subprocess.run(
        [sys.executable, PROGRAM, named, PYTEST, "-q", *plugins, file],
        cwd=directory,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, named.read_text().split() if named.exists() else []


def test_a_test_that_passes_only_by_itself_is_named(tmp_path: Path) -> None:
    status, output, named = run(tmp_path)
    assert status == 0
    assert named == ["test_x.py::test_a"]
    assert "once more: test_x.py::test_a 17\n" in output  # with its seed


@pytest.mark.slow
def test_a_second_one_fails_the_run_also_a_later_run(tmp_path: Path) -> None:
    assert [run(tmp_path, text=each)[0] for each in (A, B)] == [0, 1]
    assert run(tmp_path)[2] == ["test_x.py::test_a", "test_x.py::test_b"]


def test_a_file_that_is_not_read_fails_the_run(tmp_path: Path) -> None:
    """Processes that find different tests run none, and end as if tests had failed."""
    text = "import os\nassert os.environ.get('PYTEST_XDIST_WORKER') != 'gw1'\n"
    status, output, named = run(tmp_path, text=text + A, plugins=["-p", "xdist", "-n2"])
    assert (status, named) == (1, [])
    assert "once more" not in output


def test_none_that_looks_for_losses_may(tmp_path: Path) -> None:
    assert run(tmp_path, "test_chaos.py")[::2] == (1, ["test_chaos.py::test_a"])
    never = runpy.run_path(str(PROGRAM))["NEVER_BY_CHANCE"]
    for kind in ("chaos", "fuzz", "damage", "power_cut", "simulation"):
        path = f"tests/lives/test_{kind}.py"
        assert (ROOT / path).exists()
        assert never.search(f"{path}::test_a[1]")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (A + "def test_c(): assert False", 1),
        (A + "def test_c(): raise KeyboardInterrupt", 2),
        (A + "def test_c(): os.kill(os.getpid(), 15)", -15 % 256),
        ("import nothing_of_this_name", 2),
    ],
)
def test_otherwise_the_run_fails(tmp_path: Path, text: str, status: int) -> None:
    assert run(tmp_path, text=text)[0] == status
