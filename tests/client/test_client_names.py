"""The names that clients give themselves, and where they are shown.

The one rule: each is read as people read it, from the commands and the log.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from mqks import App, InvalidRequest, Options, blocking, connect
from mqks.client.options import default_name
from mqks.pipeline.wire import ServerAddress, connected
from tests.client.programs import environment
from tests.kit import forks
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

MQKS = [sys.executable, "-m", "mqks"]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "mqks.db", "--log-level", "debug") as running:
        yield running


def run(server: ServerProcess, *words: str) -> str:
    environment = {**os.environ, "MQKS_URL": server.url}
    code, out, err = forks.run([*MQKS, *words], b"", environment, Path.cwd())
    assert (code, err) == (0, b"")
    return out.decode()


def rows(server: ServerProcess, what: str) -> list[dict[str, Any]]:
    return [*map(json.loads, run(server, "inspect", what, "--json").splitlines())]


def names(server: ServerProcess) -> set[str]:
    """Of all connections but that of the command that asks."""
    found = {row["name"] for row in rows(server, "connections")}
    return {name for name in found if name is None or not name.startswith("mqks-inspect@")}


def test_a_name_is_shown_with_connections_and_consumers(server: ServerProcess) -> None:
    with LineClient(server.address) as named, LineClient(server.address):
        assert named.ask(b"n set_name --confirm web-\xff1") == b"n ok "
        assert named.ask(b"c consume --confirm q e") == b"c ok "

        assert names(server) == {"web-\udcff1", None}
        assert [row["client"] for row in rows(server, "consumers")] == ["web-\udcff1"]
        assert "web-\\xff1" in run(server, "inspect", "connections")
        assert "web-\\xff1" in run(server, "inspect", "consumers")
        seen = json.loads(run(server, "top", "--count", "1", "--json"))
        assert seen["consumers"][0]["client"] == "web-\udcff1"

        assert named.ask(b"n set_name --confirm web-2") == b"n ok "
        assert names(server) == {"web-2", None}


def test_a_name_is_in_log_lines(server: ServerProcess) -> None:
    with LineClient(server.address) as client:
        assert b" error " in client.ask(b"x before-it")
        assert client.ask(b'n set_name --confirm web"\xff1') == b"n ok "
        assert b" error " in client.ask(b"x frob")
        client.send(b"a line without its end")
    until(lambda: "event=disconnected" in server.log.partition("event=line_dropped")[2])

    lines = server.log.splitlines()
    [before] = [line for line in lines if "action=before-it" in line]
    assert "client=" not in before
    [failed] = [line for line in lines if "action=frob" in line]
    [dropped] = [line for line in lines if "event=line_dropped" in line]
    gone = [line for line in lines if "event=disconnected" in line and "client=" in line]
    for line in (failed, dropped, *gone):
        assert 'client="web\\"\\\\xff1"' in line
    assert len(gone) == 1


@pytest.mark.parametrize("how", ["argument", "options", "url", "url and argument"])
def test_a_blocking_client_has_a_name(server: ServerProcess, how: str) -> None:
    with blocking.connect(server.url):
        assert names(server) == {None}
    client = {
        "argument": lambda: blocking.connect(server.url, client_name="web-1"),
        "options": lambda: blocking.connect(server.url, Options(client_name="web-1")),
        "url": lambda: blocking.connect(f"{server.url}?name=web-1"),
        "url and argument": lambda: blocking.connect(
            f"{server.url}/?name=web-1", client_name="other"
        ),
    }[how]()
    with client, client.consume("q", ["e"]):
        assert names(server) == {"web-1"}
        assert len(rows(server, "connections")) == 3


def test_a_connection_of_spark_has_the_name_of_its_url(server: ServerProcess) -> None:
    wire = connected(ServerAddress(url=f"{server.url}?name=lake-1"))
    try:
        until(lambda: names(server) == {"lake-1"})
    finally:
        wire.close()


def test_an_async_client_keeps_its_name_when_it_connects_again(server: ServerProcess) -> None:
    async def main() -> None:
        async with (
            connect(server.url, client_name="web-1") as client,
            client.consume("q", ["e"]) as consumer,
        ):
            server.kill()
            await anyio.to_thread.run_sync(server.start)
            await client.publish("e", "x", confirm=True)
            await consumer.receive(timeout_s=WAIT_S)
            assert await anyio.to_thread.run_sync(names, server) == {"web-1"}

    anyio.run(main)


@pytest.mark.parametrize("name", ["two words", "--flag", "a\tb"])
def test_a_name_that_cannot_be_sent(server: ServerProcess, name: str) -> None:
    with (
        pytest.raises(InvalidRequest),
        blocking.connect(server.url, client_name=name),
    ):
        pass


SERVICE = """
import mqks
app = mqks.App()

@app.consumer("q", events=["e"])
async def work(message):
    print("done", flush=True)

app.run()
"""


def test_a_service_has_the_name_of_its_program(server: ServerProcess, tmp_path: Path) -> None:
    program = tmp_path / "mailer.py"
    program.write_text(SERVICE)
    with subprocess.Popen(
        [sys.executable, program], env=environment(server.url), stdout=subprocess.PIPE
    ) as service:
        assert service.stdout is not None
        with blocking.connect(server.url, client_name="test") as client:
            client.subscribe("q", ["e"])
            client.publish("e", "x", confirm=True)
            assert service.stdout.readline() == b"done\n"

            host = re.sub(r"[^\w.@:-]+", "-", socket.gethostname())
            assert names(server) == {"test", f"mailer@{host}:{service.pid}"}
        service.terminate()


def test_the_name_of_a_service_may_be_chosen(server: ServerProcess) -> None:
    async def main(app: App, expected: str) -> None:
        stop = anyio.Event()

        async def watch() -> None:
            await anyio.to_thread.run_sync(until, lambda: names(server) == {expected})
            stop.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            await app.serve(stop)

    anyio.run(main, App(server.url, client_name="mailer-1"), "mailer-1")
    anyio.run(main, App(server.url, Options(client_name="mailer-2")), "mailer-2")
    anyio.run(main, App(f"{server.url}?name=mailer-3"), "mailer-3")


@pytest.mark.slow
def test_commands_have_names(server: ServerProcess) -> None:
    with subprocess.Popen(
        [*MQKS, "consume", "q", "e", "--create", "--url", server.url], stdout=subprocess.PIPE
    ) as consuming:
        host = re.sub(r"[^\w.@:-]+", "-", socket.gethostname())
        until(lambda: names(server) == {f"mqks-consume@{host}:{consuming.pid}"})
        [asking] = [
            row["name"]
            for row in rows(server, "connections")
            if row["name"].startswith("mqks-inspect@")
        ]
        assert asking.startswith(f"mqks-inspect@{host}:")
        consuming.terminate()
    with subprocess.Popen(
        [*MQKS, "consume", "q", "--client-name", "mine", "--url", server.url],
        stdout=subprocess.PIPE,
    ) as consuming:
        until(lambda: names(server) == {"mine"})
        consuming.terminate()


def test_a_server_that_knows_no_names() -> None:
    """It refuses the request; everything else works as ever."""
    with socket.create_server(("127.0.0.1", 0)) as old:
        host, port = old.getsockname()
        asking = subprocess.Popen(
            [*MQKS, "inspect", "stats", "--json", "--url", f"mqks://{host}:{port}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        connection, _ = old.accept()
        with connection, connection.makefile("rb") as lines:
            naming, action, name = lines.readline().split()
            assert (action, name[:13]) == (b"set_name", b"mqks-inspect@")
            connection.sendall(naming + b" error 6741f3c2a90be4d5c8123456\n")
            assert lines.readline() == b"q stats\r\n"
            connection.sendall(b'q ok {"queues": 17}\n')
            out, err = asking.communicate(timeout=WAIT_S)
        assert (asking.returncode, json.loads(out), err) == (0, {"queues": 17}, b"")


def test_default_names_can_be_sent() -> None:
    for program in ("my service", "-c", "--x", "ünï", "a\tb", "x" * 999):
        name = default_name(program)
        assert re.fullmatch(r"[\w.@:][\w.@:-]{0,199}", name), name
