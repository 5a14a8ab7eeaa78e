"""A Python in which only what some extras bring can be imported.

The one rule: every other package is there, but cannot be imported, neither by the program nor by
the processes that it starts.
"""

import os
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
        if not any(canonicalize_name(each) in allowed for each in distributions)
    }
    assert {"pytest", "_pytest", "hypothesis", "trustme"} <= blocked
    assert not blocked & {"mqks", "anyio"}
    (directory / "sitecustomize.py").write_text(BLOCKER.format(blocked=blocked))
    return {**os.environ, "PYTHONPATH": f"{directory}{os.pathsep}{ROOT}"}


def required(name: str, *extras: str) -> set[str]:
    """The names of a distribution and of all that it needs here."""
    found, waiting = set[str](), [(name, {*extras})]
    while waiting:
        name, wanted = waiting.pop()
        found.add(canonicalize_name(name))
        for needed in map(Requirement, distribution(name).requires or ()):
            applies = needed.marker is None or any(
                needed.marker.evaluate({"extra": each}) for each in ("", *wanted)
            )
            if applies and canonicalize_name(needed.name) not in found:
                waiting.append((needed.name, needed.extras))
    return found
