"""`stats errors`: which error replies a server tells. To whom is told in test_security."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqks.limits import ERRORS_TOLD_MAX
from tests.kit.bare import BareWorld
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess

Told = Callable[..., list[str]]
"""The ids of what is told for some arguments of `stats errors`."""


def bare(**settings: Any) -> tuple[BareWorld, Told]:
    world = BareWorld(**settings)

    def told(arguments: str = "") -> list[str]:
        world.send("k", f"st stats errors {arguments}\n".encode())
        rows = json.loads(world.received("k").removeprefix(b"st ok "))
        return [row["id"] for row in rows]

    return world, told


def ids_of(replies: bytes) -> list[str]:
    return [line.split(b" ")[2].decode() for line in replies.splitlines()]


def test_the_last_ones_and_then_page_by_page() -> None:
    world, told = bare()
    world.send("k", b"r dance\n" * 7)
    ids = ids_of(world.received("k"))

    assert told() == ids
    assert told("--limit=2") == ids[-2:]
    assert told(f"--limit=2 --after={ids[0]}") == ids[1:3]
    assert told("--limit=2 --after=0") == ids[:2]
    assert told(f"--after={ids[4]}") == ids[5:]
    assert told(f"--after={ids[6]}") == []
    assert told(ids[3]) == [ids[3]]


def test_one_is_told_before_it_is_written() -> None:
    world = BareWorld()
    connection = world.connection("k")

    world.intake.receive(connection, b"r dance\nst stats errors\n")

    error, answer = b"".join(connection.outbox).splitlines()
    [row] = json.loads(answer.removeprefix(b"st ok "))
    assert row == {
        "id": error.split()[2].decode(),
        "time_us": 0,
        "connection": "test:k",
        "client": None,
        "user": None,
        "request_id": "r",
        "action": "dance",
        "reason": "there is no action 'dance'; 'help' lists all",
    }


def test_only_so_many_are_told() -> None:
    for kept_max, count in ((10**6, ERRORS_TOLD_MAX), (2, 2), (0, 0)):
        world, told = bare(errors_kept_max=kept_max)
        world.send("k", b"r dance\n" * (ERRORS_TOLD_MAX + 5))
        ids = ids_of(world.received("k"))

        assert told() == ids[len(ids) - count :]


def test_a_restart_forgets_none(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        for number in range(3):
            client.ask(b"\xff%d dance" % number)
        before = client.stats("errors")
        assert server.stop() == 0
    with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
        assert client.stats("errors") == before
        client.ask(b"r dance")
        ids = [row["request_id"] for row in client.stats("errors")]
        assert ids == ["\udcff0", "\udcff1", "\udcff2", "r"]
