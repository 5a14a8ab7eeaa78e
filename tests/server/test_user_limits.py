"""Limits of users: who is too fast is read more slowly, and one connection too many is refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mqks import users_file
from mqks.rates import PIECE_BYTES_MIN, UserRate
from mqks.users import User, hash_token
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

ROOT = User("root", token=hash_token("r"), publish=["**"], consume=["**"], admin=True)


def shop(**limits: Any) -> User:
    return User("shop", token=hash_token("s"), publish=["**"], consume=["**"], **limits)


@pytest.fixture
def users(tmp_path: Path) -> Path:
    return tmp_path / "users"


@pytest.fixture
def server(tmp_path: Path, users: Path) -> Iterator[ServerProcess]:
    users_file.write(users, [ROOT, shop()])
    flags = "--users", str(users), "--auth", "always"
    with ServerProcess(tmp_path / "mqks.db", *flags) as running:
        yield running


def login(server: ServerProcess, token: bytes = b"s") -> LineClient:
    client = LineClient(server.address)
    assert client.ask(b"a auth --confirm " + token) == b"a ok "
    return client


def test_a_rate_is_a_debt_that_is_paid_in_time() -> None:
    rate = UserRate(10, 1000)
    assert rate.take(100.0, 10, 10) == 0
    assert rate.take(100.0, 5, 10) == pytest.approx(0.5)
    assert rate.is_in_debt(100.4)
    assert not rate.is_in_debt(100.6)
    assert rate.take(100.5, 0, 2970) == pytest.approx(1.97)
    assert rate.take(200.0, 10, 1000) == 0
    assert UserRate(0, 1).piece_bytes == PIECE_BYTES_MIN
    assert UserRate(100_000, 0).piece_bytes == 3_200_000
    # A clock that stands still, or is set back, gives nothing.
    assert rate.take(200.0, 1, 0) == pytest.approx(0.1)


def test_who_publishes_too_fast_is_slowed_and_nothing_is_refused(
    server: ServerProcess, users: Path
) -> None:
    with login(server, b"r") as root, login(server) as client:
        users_file.write(users, [ROOT, shop(publishes_per_s=100)])
        assert json.loads(root.ask(b"r reload")[5:])["users"] == ["shop"]
        root.send(b"s subscribe --confirm q e\n")
        assert root.line() == b"s ok "
        began_s = time.monotonic()
        client.send(b"".join(b"m%d publish --confirm e x\n" % n for n in range(400)))
        until(lambda: root.stats("connections")[-1]["slowed"])
        # Others are as fast as ever.
        assert root.ask(b"x publish --confirm e x") == b"x ok "
        confirmed = [client.line() for _ in range(400)]
        assert len({*confirmed}) == 400
        # A second's worth comes at once; three more take three seconds, less a piece of them.
        assert time.monotonic() - began_s > 1


def test_a_reload_that_lifts_a_rate_ends_its_waits(server: ServerProcess, users: Path) -> None:
    users_file.write(users, [ROOT, shop(publishes_per_s=1)])
    with login(server, b"r") as root:
        root.ask(b"r reload")
        with login(server) as client:
            # A day's worth, but for the first pieces.
            client.send(b"".join(b"m%d publish --confirm e x\n" % n for n in range(80_000)))
            until(lambda: root.stats("connections")[-1]["slowed"])
            users_file.write(users, [ROOT, shop()])
            root.ask(b"r reload")
            for _ in range(80_000):
                client.line()
            assert root.stats("connections")[-1]["slowed"] is False


def test_bytes_of_all_requests_count(server: ServerProcess, users: Path) -> None:
    users_file.write(users, [ROOT, shop(bytes_per_s=500_000)])
    with login(server, b"r") as root:
        root.ask(b"r reload")
        with login(server) as client:
            began_s = time.monotonic()
            client.send(b"m publish --confirm e " + b"x" * 1_000_000 + b"\n")
            client.send(b"p ping " + b"y" * 500_000 + b"\n")
            assert client.line() == b"m ok "
            assert len(client.line()) > 500_000
            assert time.monotonic() - began_s > 1
            assert root.stats("users")[1] == {
                "name": "shop",
                "connections": 1,
                "publishes_per_s": None,
                "bytes_per_s": 500_000,
                "connections_max": None,
                "queues": 0,
                "queue_bytes": None,
                "queues_max": None,
                "queue_bytes_max": None,
            }


def test_one_login_too_many_is_refused(server: ServerProcess, users: Path) -> None:
    users_file.write(users, [ROOT, shop(connections_max=2)])
    with login(server, b"r") as root:
        root.ask(b"r reload")
        with login(server) as one, login(server), LineClient(server.address) as late:
            # To log in again takes no more.
            assert one.ask(b"a auth --confirm s") == b"a ok "
            assert late.ask(b"a auth --confirm s").startswith(b"a error ")
            reason = root.stats("errors --limit=1")[0]["reason"]
            assert reason.startswith("auth: the user shop has 2 connections already")
            assert late.ask(b"m publish --confirm e x").startswith(b"m error ")
            assert root.stats("users")[1]["connections"] == 2
            # Who becomes another user makes room.
            assert one.ask(b"a auth --confirm r") == b"a ok "
            assert late.ask(b"a auth --confirm s") == b"a ok "
        until(lambda: root.stats("users")[1]["connections"] == 0)
        assert root.stats("users --after=root --limit=1")[0]["name"] == "shop"


def test_who_made_a_queue_is_known_after_a_kill(server: ServerProcess, users: Path) -> None:
    users_file.write(users, [ROOT, shop(queues_max=2, queue_bytes_max=1000)])
    for _ in range(2):
        with login(server, b"r") as root, login(server) as client:
            root.ask(b"r reload")
            if root.stats()["queues"] == 0:
                assert root.ask(b"s subscribe --confirm r e") == b"s ok "
                assert client.ask(b"s subscribe --confirm old e") == b"s ok "
                assert root.ask(b"n rename --confirm old q1") == b"n ok "
                assert root.ask(b"s set_queue --confirm q1 --reset") == b"s ok "
                assert client.ask(b"c consume --confirm q2 f") == b"c ok "
                assert root.ask(b"m publish --confirm e " + b"x" * 70) == b"m ok "
            makers = [root.stats(f"queue {name}")["made_by"] for name in ("r", "q1", "q2")]
            assert makers == ["root", "shop", "shop"]
            assert client.ask(b"s subscribe --confirm q3 e").startswith(b"s error")
            told = root.stats("users")[1]
            assert [told[key] for key in ("queues", "queue_bytes", "queues_max")] == [2, 80, 2]
        server.kill()
        server.start()


def test_a_users_file_says_what_is_wrong(server: ServerProcess, users: Path) -> None:
    root = ROOT.line()
    for wrong in ("-1", "1e9", '"9"', "true", "2000000000"):
        users.write_text(f'{{"name": "shop", "connections_max": {wrong}}}\n{root}')
        with login(server, b"r") as client:
            assert client.ask(b"r reload").startswith(b"r error "), wrong
