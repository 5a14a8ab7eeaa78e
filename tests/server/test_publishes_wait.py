"""Clients whose publishes wait until a queue is resumed: they are not read, memory stays bounded,
and who goes, or is stopped, leaves nothing behind.

The one rule: each publish is confirmed and in its queue, or has its error.
"""

import select
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from mqks.server import vanished
from mqks.testing import Broker
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

MIB = 1 << 20


def pause(operator: LineClient, how: bytes = b"--publishes=wait") -> None:
    operator.ask(b"s subscribe --confirm q e")
    operator.ask(b"p pause --confirm q " + how)


def waiting(operator: LineClient) -> int:
    """How many clients have an answer to come."""
    return sum(each["unconfirmed"] for each in operator.stats("connections"))


def refusals(operator: LineClient) -> int:
    return sum("unhandled_bytes_max" in each["reason"] for each in operator.stats("errors"))


def ready(operator: LineClient) -> int:
    return int(operator.stats("queue q")["ready"])


@pytest.mark.parametrize("goes", [LineClient.close, LineClient.break_off])
def test_who_has_gone_publishes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, goes: Callable[[LineClient], None]
) -> None:
    monkeypatch.setattr(vanished, "LOOK_S", 0.02)
    with Broker(tmp_path / "mqks.db") as broker:
        address = "127.0.0.1", broker.port
        with LineClient(address) as operator, LineClient(address) as client:
            pause(operator)
            client.send(b"m1 publish --confirm e x\nm2 publish e x\n" + b"m publish f x\n" * 1000)
            until(lambda: operator.stats()["unhandled_bytes"])
            goes(client)
            until(lambda: len(operator.stats("connections")) == 1)
            assert [each["request_id"] for each in operator.stats("errors")] == ["m1", "m2"]
            assert operator.stats()["unhandled_bytes"] == 0
            operator.ask(b"r resume --confirm q")
            assert ready(operator) == 0


def test_who_sends_no_more_gets_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vanished, "LOOK_S", 0.02)
    with Broker(tmp_path / "mqks.db", unix=tmp_path / "sock") as broker:
        address = "127.0.0.1", broker.port
        with LineClient(address) as operator, LineClient(address) as client:
            pause(operator)
            client.send(b"m1 publish --confirm e x\nm2 publish --confirm f x\n")
            client.close_sending_side()
            assert [each[:8] for each in client.rest()] == [b"m1 error", b"m2 ok "]


def test_a_stop_refuses_what_waits(server: ServerProcess) -> None:
    with LineClient(server.address) as operator, LineClient(server.address) as client:
        pause(operator)
        client.send(b"m1 publish --confirm e x\nm2 publish --confirm f x\n")
        until(lambda: operator.stats("connections")[1]["unconfirmed"])
        assert server.terminate() == 0
        assert {each[:8] for each in client.rest()} == {b"m1 error", b"m2 ok "}


def test_what_waits_has_a_limit_and_others_go_on(tmp_path: Path) -> None:
    flags = "--unhandled-bytes-max", "16MiB"
    with ServerProcess(tmp_path / "mqks.db", *flags) as server, ExitStack() as stack:
        operator = stack.enter_context(LineClient(server.address))
        pause(operator)
        clients = [stack.enter_context(LineClient(server.address)) for _ in range(20)]
        line = b"m publish --confirm e %b\nn ping\n" % (b"x" * (MIB - 100))
        for each in clients:
            each.send(line)
        until(lambda: refusals(operator) + waiting(operator) == len(clients))
        assert operator.ask(b"o publish --confirm f x") == b"o ok "
        assert 4 * MIB < operator.stats()["unhandled_bytes"] < 16 * MIB
        operator.ask(b"r resume --confirm q")
        lines = [line for each in clients for line in (each.line(), each.line())]
        told = [b" ".join(line.split()[:2]) for line in lines]
        refused = refusals(operator)
        assert told.count(b"m error") == refused >= 15
        assert ready(operator) == told.count(b"m ok") == 20 - refused
        assert told.count(b"n ok") == len(clients)


def test_a_client_that_waits_is_not_read(server: ServerProcess) -> None:
    with LineClient(server.address) as operator, LineClient(server.address) as client:
        pause(operator)
        client.send(b"m0 publish --confirm e x\n")
        until(lambda: operator.stats("connections")[1]["unconfirmed"])
        client._socket.setblocking(False)
        sent = 0
        while select.select([], [client._socket], [], 1)[1]:
            sent += client._socket.send(b"m publish f x\n" * 10_000)
            assert sent < 64 * MIB
        assert operator.stats()["unhandled_bytes"] < 2 * MIB
        operator.ask(b"r resume --confirm q")
        client._socket.setblocking(True)
        client.send(b"\nl publish --confirm e x\n")
        assert [client.line(), client.line()] == [b"m0 ok ", b"l ok "]
        assert ready(operator) == 2
