"""A Python in which only what some extras bring can be imported.

The one rule: every other package is there, but cannot be imported, neither by the program nor by
the processes that it starts.
"""

import os
import re
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
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


def environment(directory: Path, *extras: str) -> dict[str, str]:
    """The variables of such a Python, which uses the directory."""
    allowed = required("mqks", *extras)
    blocked = {
        module
        for module, distributions in packages_distributions().items()
        if not any(normal(each) in allowed for each in distributions)
    }
    assert {"pytest", "_pytest", "hypothesis", "trustme"} <= blocked
    assert not blocked & {"mqks", "anyio"}
    (directory / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


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
