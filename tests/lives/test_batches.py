"""Batches run while their server is killed: what follows each is there once, and never early."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from mqks.settings import DatabaseUrl
from tests.kit.line_client import LineClient
from tests.kit.seeds import printed_seed
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until
from tests.lives.test_standby import Member

LIVES = 8
MESSAGES = 7
BATCHES = 16


def run(server: ServerProcess, life: int, acks: int, closed: set[bytes]) -> None:
    """Open batches, publish and close them all at once; ack so many messages, while other
    connections are still being answered."""
    names = [b"b%d.%d" % (life, number) for number in range(BATCHES)]
    with LineClient(server.address) as client, LineClient(server.address) as worker:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"s subscribe --confirm end done") == b"s ok "
        worker.send(b"c consume q --manual-ack\n")
        for name in names:
            client.send(b"o open_batch --confirm %b publish done %b\n" % (name, name))
            for number in range(MESSAGES):
                flag = (b"", b" --delay=0.01", b" --ttl=99")[number % 3]
                client.send(b"%b/%d publish --batch=%b%b e x\n" % (name, number, name, flag))
            client.send(b"%b close_batch --confirm %b\n" % (name, name))
        for _ in range(acks):
            _, _, message, event, _ = worker.line().split(b" ")
            how = b"reject" if message.endswith(b"/5") and b"retry" not in event else b"ack"
            worker.send(b"a %b c %b\n" % (how, message))
        for _ in range(2 * BATCHES * acks // (acks + 99)):
            told = client.line()
            if told.endswith(b" ok 1"):
                closed.add(told.partition(b" ")[0])


def check(server: ServerProcess) -> list[bytes]:
    """What followed, as the server has it now; none of their messages is there any more."""
    with LineClient(server.address) as client:
        ended = _ids(client, b"peek --limit=1000 end")
        waiting = {each.partition(b"/")[0] for each in _ids(client, b"peek --limit=1000 q")}
        waiting |= {
            each.partition(b"/")[0] for each in _ids(client, b"peek --limit=1000 --scheduled q")
        }
    assert not {each.removesuffix(b":end") for each in ended} & waiting
    assert max(Counter(ended).values(), default=1) == 1
    return ended


def _ids(client: LineClient, request: bytes) -> list[bytes]:
    client.send(b"p %b\n" % request)
    ids = []
    while not re.search(rb"--end|^p ok $", line := client.line()):
        ids.append(line.split(b" ")[2])
    return ids


def live(open_server: Callable[[], ServerProcess]) -> None:
    chance, closed = random.Random(printed_seed()), set[bytes]()
    for life in range(LIVES):
        with open_server() as server:
            check(server)
            run(server, life, chance.randrange(1, BATCHES * MESSAGES), closed)
    with open_server() as server, LineClient(server.address) as worker:
        check(server)
        worker.send(b"c consume q --manual-ack\na ack c --all\n")

        def is_done() -> bool:
            worker.send(b"a ack c --all\n")
            with LineClient(server.address) as client:
                row = client.stats("queue q")
                return not (row["ready"] or row["unacked"] or row["scheduled"])

        until(is_done)
        until(lambda: closed <= {each.removesuffix(b":end") for each in check(server)})
    assert closed


@pytest.mark.slow
def test_over_kills(tmp_path: Path) -> None:
    live(partial(ServerProcess, tmp_path / "mqks.db"))


@pytest.mark.slow
def test_over_kills_on_postgresql(journal_url: DatabaseUrl) -> None:
    live(partial(Member, journal_url))


def test_a_kill_behind_the_last_ack(tmp_path: Path) -> None:
    """Alone, with nothing else to be written: a commit is at its smallest then."""
    for life in range(3):
        with ServerProcess(tmp_path / "mqks.db") as server, LineClient(server.address) as client:
            assert len(check(server)) == life
            for line in (
                b"s subscribe --confirm q e",
                b"s subscribe --confirm end done",
                b"o open_batch --confirm b%d publish done x" % life,
                b"m publish --confirm --batch=b%d e x" % life,
            ):
                assert client.ask(line).endswith(b" ok ")
            assert client.ask(b"x close_batch --confirm b%d" % life) == b"x ok 1"
            assert client.ask(b"c consume --confirm q --manual-ack") == b"c ok "
            assert client.line() == b"c ok m event=e x"
            assert client.ask(b"a ack --confirm c m") == b"a ok "
