"""A server that drains or is read-only: who is let in, what it tells, and how it stops."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mqks import users_file
from mqks.server import door, gate
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.server.test_metrics import Web

REASON = b"the server drains: it lets nobody in"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "mqks.db", "--http-port", "0") as running:
        yield running


def asked(server: ServerProcess, path: str) -> tuple[int, str]:
    answer = Web(server).ask(path)
    return answer.status, answer.text


def test_it_is_told_and_a_restart_ends_it(server: ServerProcess, client: LineClient) -> None:
    assert asked(server, "/readyz") == (200, "ok\n")
    assert client.ask(b"d drain").startswith(b"d ok {")
    assert asked(server, "/readyz") == (503, "draining\n")
    assert "\nmqks_draining 1.0\n" in asked(server, "/metrics")[1]
    assert client.stats()["draining"] is True
    assert client.ask(b"m publish --confirm e x") == b"m ok "
    with LineClient(server.address) as late:
        late.send(b"m publish e x\n")
        assert late.line().endswith(REASON)
        with pytest.raises(EOFError):
            late.line()
    with LineClient(server.address) as operator:
        assert operator.ask(b"d drain --off") == b'd ok {"draining": false}'
    assert asked(server, "/readyz") == (200, "ok\n")
    client.ask(b"d drain")
    assert server.stop() == 0
    server.start()
    with LineClient(server.address) as again:
        assert again.stats()["draining"] is False


def test_a_stop_does_not_wait_for_a_drain(server: ServerProcess, client: LineClient) -> None:
    client.send(b"c consume q e --manual-ack\nm publish e x\n")
    assert client.line() == b"c ok m event=e x"
    client.send(b"d drain --timeout=86400\n")
    client.ask(b"p ping x")
    assert server.stop() == 0


def test_who_comes_from_elsewhere_is_told_why(
    mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LineClient(("127.0.0.1", mqks_broker.port)) as client:
        client.ask(b"d drain --timeout=0")
        elsewhere = gate.Peer("192.0.2.1:1", False, b"\xc0\0\2\1")
        monkeypatch.setattr(door, "peer", lambda name: elsewhere)
        with LineClient(("127.0.0.1", mqks_broker.port)) as late:
            assert late.line().endswith(REASON)
            with pytest.raises(EOFError):
                late.line()
        assert client.ask(b"d drain --off") == b'd ok {"draining": false}'
        with LineClient(("127.0.0.1", mqks_broker.port)) as early:
            assert early.ask(b"m publish --confirm e x") == b"m ok "


def test_guests_with_users_are_operators(tmp_path: Path) -> None:
    users = tmp_path / "users"
    root = User("root", token=hash_token("r"), publish=["**"], consume=["**"], admin=True)
    users_file.write(users, [root, User("web", token=hash_token("w"), publish=["**"])])
    flags = "--users", str(users), "--auth", "always"
    with served(tmp_path / "mqks.db", *flags) as (server, client):
        assert client.ask(b"a auth --confirm r") == b"a ok "
        assert json.loads(client.ask(b"d drain")[5:])["unacked"] == 0
        with LineClient(server.address) as web:
            web.send(b"a auth w\n")
            assert web.line().endswith(REASON)
        with LineClient(server.address) as other:
            other.send(b"a auth r\nd drain --off\nm publish --confirm e x\n")
            assert [other.line(), other.line()] == [b'd ok {"draining": false}', b"m ok "]


def test_read_only_ends_with_the_server(server: ServerProcess, client: LineClient) -> None:
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    assert client.ask(b"r read_only --confirm on") == b"r ok "
    assert asked(server, "/readyz") == (503, "read-only\n")
    assert "\nmqks_read_only 1.0\n" in asked(server, "/metrics")[1]
    assert client.ask(b"m publish --confirm e x").startswith(b"m error ")
    assert server.stop() == 0
    server.start()
    with LineClient(server.address) as again:
        assert again.stats()["read_only"] is False
        assert again.ask(b"m publish --confirm e x") == b"m ok "


def test_reload_tells_what_changed_and_what_needs_a_restart(tmp_path: Path) -> None:
    users, config = tmp_path / "users", tmp_path / "mqks.toml"
    users_file.write(users, [User("web", token=hash_token("w"))])
    config.write_text(f"users = '{users}'\nqueues_max = 9\n")
    flags = "--config", str(config), "--log-level", "debug"
    with served(tmp_path / "mqks.db", *flags) as (_, client):

        def told() -> dict[str, object]:
            answer: dict[str, object] = json.loads(client.ask(b"r reload")[5:])
            return {key: value for key, value in answer.items() if value}

        assert told() == {}
        users_file.write(users, [User("web", token=hash_token("x")), User("new")])
        assert told() == {"users_changed": 2, "users": ["new", "web"]}
        with config.open("a") as file:
            file.write("log_level = 'error'\ntails_max = 5\n[[queue]]\nname = '**'\nttl = 9\n")
        # The flag takes precedence over the file.
        assert told() == {"queue_defaults": True, "restart": ["tails_max"]}
        assert told() == {"restart": ["tails_max"]}
        config.write_text(f"users = '{users}'\nqueues_max = many\n")
        users_file.write(users, [])
        assert client.ask(b"r reload").startswith(b"r error ")
        config.write_text(f"users = '{users}'\nqueues_max = 9\n")
        assert told() == {"users_changed": 2, "users": ["new", "web"], "queue_defaults": True}
        client.send(b"".join(b"r%d reload --confirm\n" % number for number in range(20_000)))
        ids = set[bytes]()
        while len(ids) < 20_000:
            ids |= {line.partition(b" ")[0] for line in client.lines()}
