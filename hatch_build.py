"""Builds a wheel with compiled modules, if `MQKS_COMPILED=1` is in the environment.

The one rule: without it the wheel is pure Python. The sources are in every wheel, and define what
the compiled modules do. `pyproject.toml` names the modules.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "MQKS_COMPILED"
LEVEL = os.environ.get("MQKS_COMPILED_LEVEL", "3")
"""Of the C compiler: with 0 it takes a third of the time, for tests."""
REQUIREMENTS = ["mypy>=2.4,<3", "setuptools>=69"]
SETUP = """
from mypyc.build import mypycify
from setuptools import setup

modules = {modules!r}
setup(name="mqks", packages=[], ext_modules=mypycify(modules, opt_level={level!r}, debug_level="0"))
"""


def is_wanted() -> bool:
    return os.environ.get(VARIABLE, "") not in ("", "0")


class CompiledModules(BuildHookInterface[Any]):
    """Compiles a copy of the package, so that the source tree stays as it is."""

    def dependencies(self) -> list[str]:
        return REQUIREMENTS if is_wanted() and self.target_name == "wheel" else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if not is_wanted() or self.target_name != "wheel" or version == "editable":
            return
        self._made = tempfile.TemporaryDirectory(prefix="mqks-compiled-")
        directory = Path(self._made.name)
        compile_modules(Path(self.root), directory, self.config["modules"])
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for path in directory.rglob(f"*{suffix}"):
            name = path.relative_to(directory)
            if name.parts[0] != "build":
                build_data["force_include"][str(path)] = str(name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def compile_modules(root: Path, directory: Path, modules: list[str]) -> None:
    """Leave the compiled modules beside a copy of their sources in `directory`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "mqks", directory / "mqks", ignore=ignored)
    # Types are checked with the development tools; here the packages may be missing.
    (directory / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n")
    (directory / "setup.py").write_text(SETUP.format(modules=modules, level=LEVEL))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=directory, check=True)
