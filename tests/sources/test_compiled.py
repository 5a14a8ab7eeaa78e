"""A wheel with compiled modules behaves as the sources do."""

import ast
import importlib
import os
import pkgutil
import shutil
import subprocess
import sys
import tomllib
import venv
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
HERE = "-v", "--no-deps", "--no-build-isolation"
WITH_A_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


def done(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, **variables}
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    result = done(*command, cwd=cwd, **variables)
    assert result.returncode == 0, result.stdout[-8000:]
    return result.stdout


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> tuple[str | Path, ...]:
    """That of an environment that lacks mypyc, so that the modules do not compile."""
    place = tmp_path_factory.mktemp("without")
    venv.create(place, with_pip=True)
    pip = place / "bin/python", "-m", "pip"
    run(*pip, "install", "--quiet", "hatchling", "editables", cwd=place)
    return pip


def is_pure(directory: Path) -> bool:
    [wheel] = directory.glob("*.whl")
    return wheel.name.endswith("-py3-none-any.whl")


def test_every_module_that_is_compiled_exists() -> None:
    installed = Path(mqks.__file__).parents[1]
    assert [name for name in MODULES if not (installed / name).is_file()] == []


def test_no_coroutine_is_compiled() -> None:
    """Their cancelling is a DeprecationWarning from Python 3.12 on."""
    trees = {
        name: ast.parse((Path(mqks.__file__).parents[1] / name).read_text()) for name in MODULES
    }
    found = [
        name
        for name, tree in trees.items()
        if any(isinstance(node, ast.AsyncFunctionDef | ast.Await) for node in ast.walk(tree))
    ]
    assert found == []


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
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_types_are_right_for_each_python(version: str, tmp_path: Path) -> None:
    """The compiler checks them for the Python that runs it; `make lint` does for the oldest."""
    flags = "--python-version", version, "--cache-dir", tmp_path
    run(sys.executable, "-m", "mypy", *flags, *MODULES, cwd=ROOT)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables", [{"CC": "false"}, {"CC": "there-is-none"}, {"MQKS_COMPILED": "0"}]
)
def test_without_a_compiler_the_wheel_is_pure(
    variables: dict[str, str], pip: tuple[str | Path, ...], tmp_path: Path
) -> None:
    told = run(*pip, "wheel", *HERE, ROOT, cwd=tmp_path, **variables)
    assert is_pure(tmp_path)
    assert "Pure Python: there is no C compiler, or MQKS_COMPILED is 0" in told


@pytest.mark.slow
@WITH_A_COMPILER
def test_only_who_asks_for_compiled_modules_must_have_them(
    pip: tuple[str | Path, ...], tmp_path: Path
) -> None:
    wheel = *pip, "wheel", *HERE, ROOT
    failed = done(*wheel, cwd=tmp_path, MQKS_COMPILED="1")
    assert failed.returncode != 0
    assert "No module named 'mypyc'" in failed.stdout
    assert "Pure Python, since the modules do not compile" in run(*wheel, cwd=tmp_path)
    assert is_pure(tmp_path)
    # Nothing is compiled for an editable installation, whoever asks.
    run(*pip, "install", *HERE, "--editable", ROOT, cwd=tmp_path, MQKS_COMPILED="1")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@WITH_A_COMPILER
def test_the_compiled_wheel_does_what_the_sources_do(tmp_path: Path) -> None:
    build = sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", ROOT
    told = run(*build, cwd=tmp_path, MQKS_COMPILED_LEVEL="0")
    [wheel] = tmp_path.glob("*.whl")
    assert not is_pure(tmp_path)
    assert "Compiled: MQKS_COMPILED=0 builds it as pure Python" in told
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
