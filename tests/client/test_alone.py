"""The wheel without extras in an empty environment: the clients, and what they bring.

The one rule: a program that has the clients may have anything else, in any version.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqks.__main__ import SERVER
from mqks.testing import Broker

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys
import mqks, mqks.client
for each in pkgutil.walk_packages(mqks.client.__path__, "mqks.client."):
    if each.name != "mqks.client.tracing":
        importlib.import_module(each.name)
try:
    import mqks.client.tracing
except mqks.ConfigurationError as error:
    assert "mqks[otel]" in str(error)
for name in mqks.__all__:
    getattr(mqks, name)
from mqks.blocking import connect

with connect(sys.argv[1]) as client:
    with client.consume("q", ["e"]) as consumer:
        client.publish("e", "x", confirm=True)
        assert next(iter(consumer)).text == "x"

async def main():
    async with mqks.connect(sys.argv[1]) as client:
        await client.publish("e", "y", confirm=True)

import anyio
anyio.run(main)
"""


@pytest.mark.slow
def test_the_clients_alone(tmp_path: Path, mqks_broker: Broker) -> None:
    def run(*command: object, status: int = 0) -> str:
        words = [str(each) for each in command]
        done = subprocess.run(
            words,
            cwd=tmp_path,
            env=os.environ | {"MQKS_COMPILED": "0"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("mqks-*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    before = {*run(python, "-m", "pip", "list", "--format=freeze").split()}
    run(python, "-m", "pip", "install", "-q", wheel)
    run(python, "-c", PROGRAM, mqks_broker.url)
    listed = run(python, "-m", "pip", "list", "--format=freeze").split()
    names = {re.split(r"[=@ ]", each)[0].replace("-", "_") for each in listed if each not in before}
    assert {"mqks", "anyio"} <= names <= {"mqks", "anyio", "idna", "sniffio", "typing_extensions"}
    asks = "import importlib.metadata as m; print(m.requires('mqks'))"
    needed = [each for each in eval(run(python, "-c", asks)) if "extra ==" not in each]
    assert needed
    assert not any("<" in each or "~" in each or "==" in each for each in needed)
    for command in ("version", "publish", "serve"):
        told = run(tmp_path / "venv/bin/mqks", command, status=69)
        assert told.count("\n") == 1
        assert re.fullmatch(
            rf"mqks: ({'|'.join(SERVER)}) is missing: pip install 'mqks\[server\]'\n", told
        )
