"""The base install: the clients, with anyio and nothing else. A program that has the clients may
have anything else, in any version.

The one rule: other packages are here, and cannot be imported; in the last test they are not here.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mqks.__main__ import SERVER
from mqks.testing import Broker
from tests.client.programs import ROOT
from tests.kit import only

EVERYTHING = """
import pkgutil, sys
from importlib import import_module
import mqks, mqks.client
for each in pkgutil.iter_modules(mqks.client.__path__):
    if each.name != "tracing":  # It is an extra of its own.
        import_module("mqks.client." + each.name)
from mqks import *
from mqks.blocking import connect
assert connect is mqks.blocking.connect is blocking.connect
for each in (mqks.connect, connect):
    try:
        each(options=mqks.Options(tracing=True))
    except mqks.ConfigurationError as error:
        assert str(error) == "tracing needs OpenTelemetry: pip install 'mqks[otel]'"
home = {each.split(".")[0] for each in sys.modules} - sys.stdlib_module_names
print(*sorted(each for each in home if not each.startswith("_")))
"""

BOTH = """
import asyncio, sys
import mqks

with mqks.blocking.connect(sys.argv[1]) as client:
    with client.consume("hellos", events=["hello"]) as consumer:
        client.publish("hello", "blocking", confirm=True, mandatory=True)
        with consumer.receive(timeout_s=60).process() as message:
            print(message.text)

app = mqks.App(sys.argv[1])

@app.consumer("hellos")
async def handle(message):
    print(message.text)
    stop.set()

async def main():
    global stop
    stop = asyncio.Event()
    async with mqks.connect(sys.argv[1]) as client:
        await client.publish("hello", "async", confirm=True, mandatory=True)
    await app.serve(stop)

asyncio.run(main())
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return only.environment(tmp_path)


def run(environment: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_every_module_of_the_clients_is_there(environment: dict[str, str]) -> None:
    done = run(environment, "-c", EVERYTHING)
    assert done.returncode == 0, done.stderr
    assert {"anyio", "mqks"} <= {*done.stdout.split()}
    assert {*done.stdout.split()} <= {
        *("anyio", "idna", "mqks", "sitecustomize", "sniffio", "typing_extensions")
    }


def test_they_publish_and_consume(environment: dict[str, str], mqks_broker: Broker) -> None:
    done = run(environment, "-c", BOTH, mqks_broker.url)
    assert (done.stdout, done.returncode) == ("blocking\nasync\n", 0), done.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--db", "x.db"),
        pytest.param(("ping",), marks=pytest.mark.slow),
        pytest.param((), marks=pytest.mark.slow),
    ],
)
def test_a_command_says_what_to_install(environment: dict[str, str], words: tuple[str]) -> None:
    done = run(environment, "-m", "mqks", *words)
    assert (done.stdout, done.returncode) == ("", 69)
    assert done.stderr == "mqks: typer is missing: pip install 'mqks[server]'\n"


def test_with_spark_alone_so_does_the_server(tmp_path: Path) -> None:
    environment = only.environment(tmp_path, "spark")
    done = run(environment, "-m", "mqks", "serve", "--db", str(tmp_path / "x.db"))
    assert done.returncode == 69
    assert done.stderr.splitlines()[-1].endswith(" is missing: pip install 'mqks[server]'")


@pytest.mark.slow
def test_the_clients_alone(tmp_path: Path, mqks_broker: Broker) -> None:
    def told_by(*command: object, status: int = 0) -> str:
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

    told_by(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    [wheel] = tmp_path.glob("mqks-*.whl")
    told_by(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    before = {*told_by(python, "-m", "pip", "list", "--format=freeze").split()}
    told_by(python, "-m", "pip", "install", "-q", wheel)
    for program in (EVERYTHING, BOTH):
        told_by(python, "-c", program, mqks_broker.url)
    listed = told_by(python, "-m", "pip", "list", "--format=freeze").split()
    names = {re.split(r"[=@ ]", each)[0].replace("-", "_") for each in listed if each not in before}
    assert {"mqks", "anyio"} <= names <= {"mqks", "anyio", "idna", "sniffio", "typing_extensions"}
    asks = "import importlib.metadata as m; print(m.requires('mqks'))"
    needed = [each for each in eval(told_by(python, "-c", asks)) if "extra ==" not in each]
    assert needed
    assert not any("<" in each or "~" in each or "==" in each for each in needed)
    for command in ("version", "publish", "serve"):
        told = told_by(tmp_path / "venv/bin/mqks", command, status=69)
        assert told.count("\n") == 1
        assert re.fullmatch(
            rf"mqks: ({'|'.join(SERVER)}) is missing: pip install 'mqks\[server\]'\n", told
        )
