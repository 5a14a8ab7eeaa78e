"""`--json`: every command has it and prints one JSON object a line, with a server and without.

The one rule: the tree of commands is walked as it is, so that a new command is noticed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.commands.console import Here
from tests.commands.test_command_tree import COMMANDS
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

WITHOUT = {"mqks serve", "mqks push", "mqks follow", "mqks export"}
"""The first three print nothing, the other JSON anyhow."""
SPARK = {
    "mqks pipeline archive": "q lake --once --no-trim",
    "mqks pipeline report": "lake",
    "mqks pipeline replay": "lake --dry-run",
    "mqks pipeline verify": "lake",
    "mqks pipeline schema": "q",
    "mqks pipeline vacuum": "lake",
}
LIVE = {
    "mqks bench": "stream --count 20",
    "mqks backup": "live-copy.db",
    "mqks verify": "mqks.db",
    "mqks check-config": "",
    "mqks import": "export.jsonl --merge",
    "mqks publish": "e x",
    "mqks consume": "q --count 1",
    "mqks tail": "flowing --count 1",
    "mqks peek": "q",
    "mqks requeue": "w --all --pause 0",
    "mqks close": "--user nobody",
    "mqks delete-consumer": "spare",
    "mqks batch open": "night --then e x --for 1h",
    "mqks batch show": "night",
    "mqks batch list": "",
    "mqks inspect batches": "",
    "mqks inspect results": "",
    "mqks batch close": "night",
    "mqks schedule add": "beat e x --every 1h",
    "mqks schedule list": "",
    "mqks schedule pause": "beat",
    "mqks schedule resume": "beat",
    "mqks schedule run": "beat",
    "mqks schedule remove": "beat",
    "mqks subscribe": "made e1 e2",
    "mqks rebind": "made e3",
    "mqks set-queue": "made --ttl 5 --retries= --create",
    "mqks pause": "made --for 1h --deliveries",
    "mqks resume": "made",
    "mqks rename": "spare spare.new --yes",
    "mqks size": "--publishes 10",
    "mqks trace": "'order.*' --for 10m",
    "mqks cancel": "made --all",
    "mqks cancel-job": "made m",
    "mqks result": "m",
    "mqks promote": "made --all",
    "mqks move": "made imported",
    "mqks redrive": "made",
    "mqks purge": "made --scheduled",
    "mqks trim": "made 1",
    "mqks delete-queue": "made",
    "mqks ping": "",
    "mqks eval": "state.queues",
    "mqks top": "--count 1",
    "mqks inspect queues": "",
    "mqks inspect queue": "q",
    "mqks inspect bindings": "",
    "mqks inspect consumers": "",
    "mqks inspect connections": "",
    "mqks inspect messages": "q --data",
    "mqks inspect letters": "letters",
    "mqks inspect unacked": "",
    "mqks inspect schedules": "",
    "mqks inspect message": "m2",
    "mqks inspect traces": "",
    "mqks inspect archives": "",
    "mqks inspect journal": "",
    "mqks inspect stats": "",
    "mqks inspect error": "{0.error_id}",
    "mqks inspect errors": "",
    "mqks inspect audit": "",
    "mqks user add": "bob --token",
    "mqks user list": "",
    "mqks user grant": "alice --admin",
    "mqks user revoke": "alice --bind **",
    "mqks user limit": "alice --connections 3",
    "mqks user remove": "goner",
    "mqks user token": "alice",
    "mqks user sqs": "alice",
    "mqks user password": "alice --password-file secret",
    "mqks drain": "--off",
    "mqks read-only": "off",
    "mqks reload": "",
    "mqks version": "",
}
STOPPED = {
    "mqks backup": "copy.db",
    "mqks compact": "",
    "mqks restore": "followed restored.db",
    "mqks copy": "mqks.db moved.db",
    "mqks diagnose": "report.json",
    "mqks new-epoch": "",
    **{
        name: words for name, words in LIVE.items() if name.startswith(("mqks inspect", "mqks ver"))
    },
}

NEEDS_A_SERVER = {
    f"mqks inspect {what}" for what in ("consumers", "connections", "archives", "message", "traces")
}


class World:
    """A directory with everything in it that the commands above name, and a server."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.server = ServerProcess(directory / "mqks.db")
        with LineClient(self.server.address) as client:
            assert client.ask(b"s subscribe --confirm q e") == b"s ok "
            kept = b"k schedule --confirm kept --every=3600 publish e x"
            assert client.ask(kept) == b"k ok "
            assert client.ask(b"k open_batch --confirm kept") == b"k ok "
            kept = b"job publish --confirm --keep-result=900 e x"
            assert client.ask(kept) == b"job ok "
            assert client.ask(b"x cancel_job --confirm q job") == b"x ok cancelled"
            self.error_id = client.ask(b"x frob").split(b" error ")[1].decode()
        self.client = LineClient(self.server.address)
        assert self.client.ask(b"r range q --archived=1").startswith(b"r ok ")
        assert self.client.ask(b"t trace --confirm e2") == b"t ok "
        self.client.send(b"w consume held e2 --manual-ack\nm publish e2 x\n")
        assert self.client.line() == b"w ok m event=e2 x"
        line = b"d set_queue --confirm held --dead-letters=letters"
        assert self.client.ask(line) == b"d ok "
        self.client.send(b"m2 publish e2 x\n")
        assert self.client.line() == b"w ok m2 event=e2 x"
        assert self.client.ask(b"d reject --confirm --dead w m2") == b"d ok "
        assert self.client.ask(b"spare consume --confirm spare e3") == b"spare ok "
        for data in (b"x", b"\xff"):
            assert self.client.ask(b"m publish --confirm e " + data) == b"m ok "
        queue = {"kind": "queue", "name": "imported", "rule": None}
        end = {"kind": "end", "queues": 1, "messages": 0, "bindings": 0}
        rows = [{"kind": "mqks", "version": 1}, queue, end]
        (directory / "export.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (directory / "secret").write_text("secret\n")
        # A URL would count more than the file when the server has gone.
        self.console = Here(directory, self.server.url, MQKS_USERS="users")
        users = [{"name": name} for name in ("alice", "goner")]
        (directory / "users").write_text("".join(json.dumps(user) + "\n" for user in users))


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    world = World(tmp_path_factory.mktemp("live"))
    with world.client:
        yield world
    world.server.kill()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = World(tmp_path_factory.mktemp("stopped"))
    with world.client:
        world.server.kill()
    assert world.console("follow", "followed", "--once")[0] == 0
    del world.console.environ["MQKS_URL"]
    return world


def printed(world: World, name: str, words: str, code: int = 0) -> list[Any]:
    """The objects that a command prints."""
    arguments = [*name.split()[1:], *words.format(world).split(), "--json"]
    ended, out = (beside_a_flow if name == "mqks tail" else alone)(world, arguments)
    assert ended == code
    return [json.loads(line) for line in out.splitlines()]


def alone(world: World, arguments: list[str]) -> tuple[int, bytes]:
    return world.console(*arguments)[:2]


def beside_a_flow(world: World, arguments: list[str]) -> tuple[int, bytes]:
    with world.console.start(*arguments) as process:
        while process.poll() is None:
            assert world.client.ask(b"m publish --confirm flowing x") == b"m ok "
        return process.wait(WAIT_S), process.stdout.read()


def test_every_command_is_here() -> None:
    have = {
        told.name
        for told in COMMANDS
        if any("--json" in option.opts for option in told.command.params)
    }
    assert have == {told.name for told in COMMANDS} - WITHOUT
    assert have == LIVE.keys() | SPARK.keys() | STOPPED.keys()


@pytest.mark.parametrize("name", LIVE)
def test_a_server_is_told_as_json(live: World, name: str) -> None:
    objects = printed(live, name, LIVE[name])
    assert objects
    assert all(isinstance(each, dict) and each for each in objects)


@pytest.mark.parametrize("name", STOPPED)
def test_a_file_is_told_as_json(stopped: World, name: str) -> None:
    objects = printed(stopped, name, STOPPED[name])
    assert bool(objects) == (name not in NEEDS_A_SERVER)
    assert all(isinstance(each, dict) and each for each in objects)


# ------------------------------------------------------------------------------ what it tells


def test_a_file_that_is_whole_and_one_that_is_not(stopped: World) -> None:
    [whole] = printed(stopped, "mqks verify", "mqks.db")
    assert (whole["damage"], whole["is_served"], whole["queues"]) == ([], False, 4)
    assert whole["messages"] == 4
    damaged = stopped.directory / "damaged.db"
    printed(stopped, "mqks backup", "damaged.db")
    with closing(sqlite3.connect(damaged)) as db:
        db.execute("update segment set crc = crc + 1")
        db.commit()
    [told] = printed(stopped, "mqks verify", "damaged.db", code=65)
    assert {"place", "what"} == told["damage"][0].keys()
