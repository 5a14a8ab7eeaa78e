"""A run of all tests passes with a few that have failed, and only if these pass by themselves.

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
FEW = [f"def test_{name}(): fails_once('{name}')\n" for name in "abcdef"]
A = FEW[0]


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


def test_a_few_tests_may_pass_only_by_themselves(tmp_path: Path) -> None:
    status, output, named = run(tmp_path)
    assert status == 0
    assert named == ["test_x.py::test_a"]
    assert "once more: test_x.py::test_a 17\n" in output  # with its seed
    assert run(tmp_path)[0] == 0


def test_more_may_not_also_not_of_later_runs(tmp_path: Path) -> None:
    assert [run(tmp_path, text=each)[0] for each in FEW] == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("file", "text", "status"),
    [
        ("test_x.py", "".join(FEW), 1),
        ("test_x.py", A + "def test_c(): assert False", 1),
        ("test_x.py", "def test_c(): assert False", 1),
        ("test_x.py", A + "def test_c(): raise KeyboardInterrupt", 2),
        ("test_x.py", "import nothing_of_this_name", 2),
    ],
)
def test_otherwise_the_run_fails(tmp_path: Path, file: str, text: str, status: int) -> None:
    assert run(tmp_path, file, text)[0] == status
