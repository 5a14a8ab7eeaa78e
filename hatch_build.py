"""Builds a wheel with compiled modules where there is a C compiler, otherwise one of pure Python.

The one rule: only who asks for compiled modules (`MQKS_COMPILED=1`) gets an error instead of pure
Python. The sources are in every wheel, and define what the compiled modules do. `pyproject.toml`
names the modules.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

WANTED = os.environ.get("MQKS_COMPILED", "")
"""0: pure Python; 1: compiled, or an error; empty: compiled if that is possible."""
LEVEL = os.environ.get("MQKS_COMPILED_LEVEL", "3")
"""Of the C compiler: with 0 it takes a third of the time, for tests."""
REQUIREMENTS = ["mypy>=2.4,<3", "setuptools>=69"]
SETUP = """
from mypyc.build import mypycify
from setuptools import setup

modules = {modules!r}
setup(name="mqks", packages=[], ext_modules=mypycify(modules, opt_level={level!r}, debug_level="0"))
"""


@cache
def is_wanted() -> bool:
    return WANTED != "0" if WANTED else can_compile()


def can_compile() -> bool:
    """Whether this is CPython, and a C compiler finds its headers."""
    if sys.implementation.name != "cpython":
        return False
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    command = [*shlex.split(compiler), "-I", sysconfig.get_path("include"), "-c", "probe.c"]
    with tempfile.TemporaryDirectory(prefix="mqks-compiler-") as directory:
        Path(directory, "probe.c").write_text("#include <Python.h>\n")
        try:
            done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
        except OSError:
            return False
    return done.returncode == 0


class CompiledModules(BuildHookInterface[Any]):
    """Compiles a copy of the package, so that the source tree stays as it is."""

    def dependencies(self) -> list[str]:
        # Of an editable installation, too, since it is not told which kind is built.
        return REQUIREMENTS if is_wanted() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        if not is_wanted():
            self.app.display_info("Pure Python: there is no C compiler, or MQKS_COMPILED is 0")
            return
        self._made = tempfile.TemporaryDirectory(prefix="mqks-compiled-")
        directory = Path(self._made.name)
        try:
            compile_modules(Path(self.root), directory, self.config["modules"])
        except subprocess.CalledProcessError as error:
            if WANTED:
                raise
            self.app.display_warning(f"Pure Python, since the modules do not compile: {error}")
            return
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        for path in directory.rglob(f"*{suffix}"):
            name = path.relative_to(directory)
            if name.parts[0] != "build":
                build_data["force_include"][str(path)] = str(name)
        build_data["pure_python"] = False
        build_data["infer_tag"] = True
        self.app.display_info("Compiled: MQKS_COMPILED=0 builds it as pure Python")


def compile_modules(root: Path, directory: Path, modules: list[str]) -> None:
    """Leave the compiled modules beside a copy of their sources in `directory`."""
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(root / "mqks", directory / "mqks", ignore=ignored)
    # Types are checked with the development tools; here the packages may be missing.
    (directory / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n")
    (directory / "setup.py").write_text(SETUP.format(modules=modules, level=LEVEL))
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(command, cwd=directory, check=True)
