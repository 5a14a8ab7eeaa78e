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


def rows(root: LineClient, what: bytes) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(root.ask(b"s stats " + what)[5:])
    return found


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
        until(lambda: rows(root, b"connections")[-1]["slowed"])
        # Others are as fast as ever.
        assert root.ask(b"x publish --confirm e x") == b"x ok "
        confirmed = [client.line() for _ in range(400)]
        assert len({*confirmed}) == 400
        # A second's worth comes at once; three more take three seconds, less a piece of them.
        assert time.monotonic() - began_s > 1
        users_file.write(users, [ROOT, shop()])
        root.ask(b"r reload")
        client.send(b"".join(b"n%d publish --confirm e x\n" % n for n in range(20_000)))
        for _ in range(20_000):
            client.line()
        assert rows(root, b"connections")[-1]["slowed"] is False


def test_a_reload_that_lifts_a_rate_ends_its_waits(server: ServerProcess, users: Path) -> None:
    users_file.write(users, [ROOT, shop(publishes_per_s=1)])
    with login(server, b"r") as root:
        root.ask(b"r reload")
        with login(server) as client:
            # A day's worth, but for the first pieces.
            client.send(b"".join(b"m%d publish --confirm e x\n" % n for n in range(80_000)))
            until(lambda: rows(root, b"connections")[-1]["slowed"])
            users_file.write(users, [ROOT, shop()])
            root.ask(b"r reload")
            for _ in range(80_000):
                client.line()


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
            assert rows(root, b"users")[1] == {
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
            reason = json.loads(root.ask(b"s stats errors --limit=1")[5:])[0]["reason"]
            assert reason.startswith("auth: the user shop has 2 connections already")
            assert late.ask(b"m publish --confirm e x").startswith(b"m error ")
            assert rows(root, b"users")[1]["connections"] == 2
            # Who becomes another user makes room.
            assert one.ask(b"a auth --confirm r") == b"a ok "
            assert late.ask(b"a auth --confirm s") == b"a ok "
        until(lambda: rows(root, b"users")[1]["connections"] == 0)
        assert rows(root, b"users --after=root --limit=1")[0]["name"] == "shop"


QUEUES_MAX = "queues_max of user shop is 2, and 2 that it has made exist"


def reason(root: LineClient) -> str:
    return str(rows(root, b"errors --limit=1")[0]["reason"])


def made_by(root: LineClient, queue: bytes) -> Any:
    return json.loads(root.ask(b"s stats queue " + queue)[5:])["made_by"]


@pytest.mark.parametrize("store", ["db", "journal_url"])
def test_who_made_a_queue_is_known_after_a_kill(
    store: str, users: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue(store)
    where = str(getattr(place, "text", place))
    flags = "--db-replication", "none", "--users", str(users), "--auth", "always"
    users_file.write(users, [ROOT, shop(queues_max=2, queue_bytes_max=100)])
    with ServerProcess(where, *flags) as server:
        with login(server, b"r") as root, login(server) as client:
            assert root.ask(b"s subscribe --confirm r e") == b"s ok "
            assert client.ask(b"s subscribe --confirm old e") == b"s ok "
            assert root.ask(b"n rename --confirm old q1") == b"n ok "
            assert root.ask(b"s set_queue --confirm q1 --reset") == b"s ok "
            assert client.ask(b"c consume --confirm q2 f") == b"c ok "
            assert root.ask(b"m publish --confirm e " + b"x" * 70) == b"m ok "
            assert root.ask(b"d publish --confirm --delay=99 e x").startswith(b"d error")
        server.kill()
    with (
        ServerProcess(where, *flags) as server,
        login(server, b"r") as root,
        login(server) as client,
    ):
        assert [made_by(root, each) for each in (b"r", b"q1", b"q2")] == [
            "root",
            "shop",
            "shop",
        ]
        assert client.ask(b"s subscribe --confirm q3 e").startswith(b"s error")
        assert reason(root) == QUEUES_MAX
        assert root.ask(b"m publish --confirm e xxxxxxxxxxxx").startswith(b"m error")
        assert reason(root).startswith("queue_bytes_max is 100, the message has 22, and 80 ")
        told = rows(root, b"users")[1]
        assert [told[key] for key in ("queues", "queue_bytes", "queues_max")] == [2, 80, 2]
        # A limit that is lifted, and set again below what is used.
        users_file.write(users, [ROOT, shop()])
        root.ask(b"r reload")
        assert client.ask(b"s subscribe --confirm q3 e") == b"s ok "
        assert root.ask(b"m publish --confirm e x") == b"m ok "
        users_file.write(users, [ROOT, shop(queues_max=1, queue_bytes_max=1)])
        server.hang_up()
        until(lambda: rows(root, b"users")[1]["queue_bytes"] == 80 + 2 * 11)
        assert rows(root, b"users")[1]["queues"] == 3
        assert root.ask(b"m publish --confirm e x").startswith(b"m error")


def test_a_users_file_says_what_is_wrong(server: ServerProcess, users: Path) -> None:
    root = ROOT.line()
    for wrong in ("-1", "1e9", '"9"', "true", "2000000000"):
        users.write_text(f'{{"name": "shop", "connections_max": {wrong}}}\n{root}')
        with login(server, b"r") as client:
            assert client.ask(b"r reload").startswith(b"r error "), wrong
