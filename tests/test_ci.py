"""A run of all tests passes with one test at most that has failed, and only if that one passes by
itself.

The one rule: pytest itself runs, on tests that fail as they are told.
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / ".ci" / "once_more.py"
PYTEST = Path(sys.executable).with_name("pytest")
CONFTEST = """
from hypothesis import settings
settings.register_profile("full", settings())
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
A, B = "def test_a(): fails_once('a')\n", "def test_b(): fails_once('b')\n"


def run(directory: Path, file: str = "test_x.py", text: str = A) -> tuple[int, str, list[str]]:
    """Status, output, and the names of the tests that passed only by themselves."""
    (directory / "conftest.py").write_text(CONFTEST)
    (directory / file).write_text(ONCE + text)
    named = directory / "named"
    done = subprocess.run(
        [sys.executable, PROGRAM, named, PYTEST, "-q", file],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, named.read_text().split() if named.exists() else []


def test_one_test_may_pass_only_by_itself(tmp_path: Path) -> None:
    status, output, named = run(tmp_path)
    assert status == 0
    assert named == ["test_x.py::test_a"]
    assert "once more: test_x.py::test_a 17\n" in output  # with its seed
    assert run(tmp_path)[0] == 0


def test_a_second_one_may_not_also_not_of_a_later_run(tmp_path: Path) -> None:
    assert run(tmp_path, text=A)[0] == 0
    status, _, named = run(tmp_path, text=B)
    assert status == 1
    assert named == ["test_x.py::test_a", "test_x.py::test_b"]


@pytest.mark.parametrize(
    ("file", "text", "status"),
    [
        ("test_fuzz.py", A, 1),
        ("test_x.py", A + B, 1),
        ("test_x.py", A + "def test_c(): assert False", 1),
        ("test_x.py", "def test_c(): assert False", 1),
        ("test_x.py", A + "def test_c(): raise KeyboardInterrupt", 2),
        ("test_x.py", "import nothing_of_this_name", 2),
    ],
)
def test_otherwise_the_run_fails(tmp_path: Path, file: str, text: str, status: int) -> None:
    assert run(tmp_path, file, text)[0] == status
