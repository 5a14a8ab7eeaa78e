"""The base install: the clients, with anyio and nothing else. A program that has the clients may
have anything else, in any version.

The one rule: other packages are here, and cannot be imported.
"""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from mqks.testing import Broker
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


def test_anyio_in_any_later_version_is_all_that_they_need() -> None:
    needed = [each for each in requires("mqks") or () if "extra ==" not in each]
    assert [re.split(r"\W", each)[0] for each in needed] == ["anyio"]
    assert not re.search(r"<|~|==", needed[0])
