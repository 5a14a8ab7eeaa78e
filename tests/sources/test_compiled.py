"""A wheel with compiled modules behaves as the sources do."""

import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

import mqks.broker
import mqks.journal
import mqks.server

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MODULES = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["hooks"]["custom"]["modules"]
BESIDE = "tests", "docs", "examples", "benchmarks", "tools", ".ci", "migrations"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environment: Mapping[str, str] = {**os.environ, **variables}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_every_module_that_is_compiled_exists() -> None:
    installed = Path(mqks.__file__).parents[1]
    assert [name for name in MODULES if not (installed / name).is_file()] == []


def test_what_inherits_from_a_compiled_class_is_compiled() -> None:
    """An interpreted class cannot: its first instance would raise TypeError."""
    compiled = {name.removesuffix(".py").replace("/", ".") for name in MODULES}
    for package in (mqks.broker, mqks.journal, mqks.server):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(found.name)
    wrong = list[str]()
    for module in compiled:
        for base in vars(sys.modules[module]).values():
            if isinstance(base, type) and base.__module__ == module:
                children: list[type] = base.__subclasses__()
                wrong += [
                    f"{child.__module__}.{child.__qualname__} of {base.__qualname__}"
                    for child in children
                    if child.__module__.startswith("mqks.") and child.__module__ not in compiled
                ]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_the_compiled_wheel_does_what_the_sources_do(tmp_path: Path) -> None:
    build = sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT
    run(*build, cwd=tmp_path, MQKS_COMPILED="1", MQKS_COMPILED_LEVEL="0")
    [wheel] = tmp_path.glob("*.whl")
    assert "none-any" not in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {*MODULES} <= names  # the sources, too

    installed = tmp_path / "installed"
    pip = sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed
    run(*pip, wheel, cwd=tmp_path)
    # The tests beside the installed package, as they import what stands beside them.
    for name in BESIDE:
        shutil.copytree(ROOT / name, installed / name, dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", installed)
    path = {"PYTHONPATH": str(installed)}
    told = run(sys.executable, "-m", "mqks", "version", cwd=tmp_path, **path)
    assert told.endswith("(compiled)\n")
    smoke = sys.executable, ROOT / ".ci" / "smoke.py", installed / "bin" / "mqks", tmp_path
    run(*smoke, cwd=tmp_path, **path)
    pytest_of = "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"
    run(sys.executable, *pytest_of, "tests/broker/test_conformance.py", cwd=installed, **path)
