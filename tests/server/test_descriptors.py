"""A server that may open few files, and a crowd that wants all of them; and the path of a Unix
socket that two servers want.

The one rule: who has business here is served all the while, and none of it ends the server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from mqks import users_file
from mqks.errors import ConfigurationError
from mqks.server.running import OPEN_FILES_MIN
from mqks.users import User, hash_token
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess, refusal
from tests.kit.waiting import until
from tests.server.test_gateway import gateways
from tests.server.test_metrics import Web
from tests.server.test_tls import TOKEN, with_tls

EXIT_IN_USE = 69
CROWD = 400
HONEST = User(
    "honest", token=hash_token(TOKEN), publish=["**"], consume=["**"], bind=["**"], admin=True
)


class Limited(ServerProcess):
    """One that may open so many files."""

    def __init__(self, open_files: int, db: Path, *flags: str) -> None:
        files = {"OPEN_FILES": str(open_files)}
        super().__init__(db, *flags, environment=files, module="tests.kit.limited")

    @property
    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@pytest.fixture(autouse=True)
def _many_files_for_the_crowd() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def come(stack: ExitStack, address: tuple[str, int], said: bytes, *, ends: bool) -> None:
    """A part of the crowd, which stays as far as it is let."""
    for _ in range(CROWD // 8):
        peer = stack.enter_context(socket.socket())
        peer.setblocking(False)
        with suppress(BlockingIOError):
            peer.connect(address)
        peer.settimeout(0.1)
        with suppress(OSError):  # It may have been refused already, or stand in the backlog.
            peer.sendall(said)
            if ends:
                peer.shutdown(socket.SHUT_WR)


def served(server: ServerProcess, what: Callable[[LineClient], bytes]) -> bytes:
    """What an honest client gets; one that is crowded out comes again."""

    def look() -> bytes | None:
        with suppress(EOFError, OSError), LineClient(server.address) as client:
            if client.ask(b"a auth --confirm " + TOKEN.encode()) == b"a ok ":
                return what(client)
        return None

    return until(look)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("open_files", "loop"),
    [(OPEN_FILES_MIN, "--uvloop"), (OPEN_FILES_MIN, "--no-uvloop"), (256, "--uvloop")],
)
def test_a_crowd_of_every_kind(tmp_path: Path, tls_port: int, open_files: int, loop: str) -> None:
    context, tls = with_tls(tmp_path, tls_port)
    users_file.write(tmp_path / "users", [HONEST])
    flags = (*tls, "--users", str(tmp_path / "users"), "--auth", "always", "--http-port", "0")
    flags = (*flags, "--api-port", "0", loop)
    with Limited(open_files, tmp_path / "mqks.db", *flags) as server, ExitStack() as stack:
        web = Web(server)
        known = stack.enter_context(LineClient(server.address))
        assert known.ask(b"a auth --confirm " + TOKEN.encode()) == b"a ok "
        assert known.ask(b"s subscribe --confirm q e") == b"s ok "
        for address, said, ends in (
            (("127.0.0.1", tls_port), b"", False),
            (("127.0.0.1", tls_port), b"\x16\x03\x01\x02\x00\x01", False),
            (server.address, b"", False),
            (server.address, b"a auth", False),
            (server.address, b"p ping\n" * 20, False),
            (server.address, b"a auth", True),
            (web.address, b"", False),
            (web.address, b"GET /metrics HTTP/1.1\r\n", False),
        ):
            come(stack, address, said, ends=ends)
            assert known.ask(b"m publish --confirm e x") == b"m ok "
        assert known.ask(b"p peek --limit=1 q").startswith(b"p ok m event=e,seq=1,")
        assert known.line() == b"p ok --end"
        assert b" ok --read " in known.ask(b"r read --from=1 q")
        until(lambda: server.open_files < open_files, "it keeps all that it may open")
        assert served(server, lambda client: client.ask(b"m publish --confirm e x")) == b"m ok "
        url = f"mqks://{TOKEN}@{server.address[0]}:{server.address[1]}"
        mqks = [sys.executable, "-m", "mqks", "inspect", "journal", "--json", "--url", url]
        told = until(lambda: subprocess.run(mqks, capture_output=True).stdout)
        assert json.loads(told)["unwritable"] == ""
        server.hang_up()
        until(lambda: "event=reloaded" in server.log)

        def over_tls() -> bool:
            with (
                suppress(OSError),
                socket.create_connection(("127.0.0.1", tls_port)) as plain,
                context.wrap_socket(plain, server_hostname="127.0.0.1") as client,
            ):
                client.sendall(b"p ping\n")
                return client.recv(1000) == b"p ok \n"
            return False

        assert until(over_tls)
        assert server.stop() == 0
    assert "Traceback" not in server.log
    assert "internal_error" not in server.log


def test_a_crowd_of_users_of_the_api(tmp_path: Path) -> None:
    """Each has a connection to the broker."""
    crowd = [User(f"u{n}", token=hash_token(f"t{n}"), publish=["**"]) for n in range(CROWD // 2)]
    users_file.write(tmp_path / "users", [HONEST, *crowd])
    flags = ("--users", str(tmp_path / "users"), "--auth", "always", "--api-port", "0")
    statuses = set()
    with Limited(256, tmp_path / "mqks.db", *flags) as server:
        assert served(server, lambda client: client.ask(b"s subscribe --confirm q e")) == b"s ok "
        host = until(lambda: re.search(r"address=api:http://(\S+)", server.log))[1]
        for n in range(len(crowd)):
            api = http.client.HTTPConnection(host)
            api.request("POST", "/publish/e", b"x", {"Authorization": f"Bearer t{n}"})
            statuses.add(api.getresponse().status)
            api.close()
            assert server.open_files < 192, "there are none for the journal"
    assert statuses == {200, 503}
    assert "event=connection_failed" not in server.log


def test_the_http_port_has_descriptors_of_its_own(tmp_path: Path) -> None:
    with Limited(1024, tmp_path / "mqks.db", "--http-port", "0") as server:
        assert until(lambda: "open_files=1024 connections_max=768" in server.log)


def test_two_thirds_of_the_descriptors_may_poll(tmp_path: Path) -> None:
    given = b'{"QueueName": "q", "QueueUrl": "q", "WaitTimeSeconds": 20}'

    def asking(action: bytes, address: tuple[str, int]) -> socket.socket:
        peer = stack.enter_context(socket.create_connection(address))
        head = b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Amz-Target: AmazonSQS.%b\r\n" % action
        peer.sendall(head + b"Content-Length: %d\r\n\r\n" % len(given) + given)
        return peer

    with Limited(512, tmp_path / "mqks.db", "--sqs-port", "0") as server, ExitStack() as stack:
        port = until(lambda: re.search(r"address=sqs:http://\S+:(\d+)", server.log))[1]
        place = "127.0.0.1", int(port)
        assert asking(b"CreateQueue", place).recv(12) == b"HTTP/1.1 200"
        polls = [asking(b"ReceiveMessage", place) for _ in range(240)]
        [gateway] = gateways(server)
        until(lambda: len(os.listdir(f"/proc/{gateway}/fd")) > len(polls))
        with LineClient(server.address) as client:
            for n in range(len(polls)):
                assert client.ask(b"m%d publish --confirm --to=q e x" % n) == b"m%d ok " % n
        assert {poll.recv(12) for poll in polls} == {b"HTTP/1.1 200"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: ",
        b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nname=",
        b"GET /metrics/queues HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["silence", "half a request", "keep-alive", "half a body", "an unread response"],
)
def test_who_asks_over_http_is_answered_at_once(tmp_path: Path, said: bytes) -> None:
    """However many connections wait for their peers: the oldest makes room."""
    users_file.write(tmp_path / "users", [HONEST])
    page = ("--http-port", "0", "--page", "full", "--users", str(tmp_path / "users"))
    with Limited(128, tmp_path / "mqks.db", *page) as server, ExitStack() as stack:
        web = Web(server)
        if b"queues" in said:
            with LineClient(server.address) as client:
                name = b"q" * 240
                client.send(b"".join(b"s subscribe %s%d e\n" % (name, n) for n in range(4000)))
                assert client.ask(b"p ping") == b"p ok "
        for _ in range(128 // 8):
            peer = stack.enter_context(socket.socket())
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect(web.address)
            peer.sendall(said)

        def answered() -> bool:
            with suppress(ConnectionError):
                return web.ask("/healthz").text == "ok\n"
            return False

        if b"queues" in said:
            until(answered)  # Nobody makes room until their responses have filled the buffers.
        for _ in range(10):
            assert answered()


def test_handshakes_count_as_connections(tmp_path: Path, tls_port: int) -> None:
    _, tls = with_tls(tmp_path, tls_port)
    with (
        ServerProcess(tmp_path / "mqks.db", *tls, "--connections-max", "3") as server,
        LineClient(server.address) as first,
    ):

        def connections() -> int:
            return int(first.stats()["connections"])

        silent = [socket.create_connection(("127.0.0.1", tls_port)) for _ in range(2)]
        until(lambda: connections() == 3)
        with LineClient(server.address) as second:
            assert second.ask(b"p ping") == b"p ok ", "the oldest handshake has made room"
            silent[0].settimeout(10)
            with suppress(ConnectionError):
                assert silent[0].recv(1) == b""
            until(lambda: connections() == 3)
        for each in silent:
            each.close()


@pytest.mark.parametrize("open_files", [20, 24, OPEN_FILES_MIN - 1])
def test_too_few_files_for_a_server(tmp_path: Path, open_files: int) -> None:
    """It says so, and how many it needs, instead of listening and answering nobody."""
    server = Limited(open_files, tmp_path / "mqks.db")
    assert server.wait() == ConfigurationError.exit_code
    assert f"{open_files} open files are allowed" in server.log
    assert f"needs at least {OPEN_FILES_MIN}" in server.log
    assert not (tmp_path / "mqks.db").exists()


def test_without_a_descriptor_to_accept_with(server: ServerProcess, client: LineClient) -> None:
    """It waits for one, tells it once and serves those who are there."""
    assert client.ask(b"s subscribe --confirm q e") == b"s ok "
    soft, hard = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    used = len(os.listdir(f"/proc/{server.pid}/fd"))
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (used, hard))
    with LineClient(server.address) as waiting:
        waiting.send(b"p ping\n")
        until(lambda: "event=connection_failed reason=accept" in server.log)
        for _ in range(20):
            assert client.ask(b"m publish --confirm e x") == b"m ok "
        assert client.ask(b"p peek --limit=1 q").startswith(b"p ok m event=e,seq=1,")
        assert client.line() == b"p ok --end"
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (soft, hard))
        assert waiting.line() == b"p ok "
    assert server.log.count("event=connection_failed") == 1
    assert server.stop() == 0


# --------------------------------------------------------------------------------- Unix sockets


def asked(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(b"p ping\n")
        return client.recv(100)


def test_a_path_at_which_somebody_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ServerProcess(tmp_path / "mqks.db", "--unix", str(path)) as server:
        code, log = refusal(tmp_path / "other.db", "--unix", str(path))
        assert code == EXIT_IN_USE, log
        assert f"can't listen on {path}: another process listens there" in log
        assert asked(path) == b"p ok \n"
        assert server.stop() == 0
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with ServerProcess(tmp_path / "mqks.db", "--unix", str(path)) as server:
        server.kill()
        assert path.is_socket()
        server.start()
        assert asked(path) == b"p ok \n"


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    path.write_text("precious")
    code, log = refusal(tmp_path / "mqks.db", "--unix", str(path))
    assert (code, "it exists and is not a socket" in log) == (EXIT_IN_USE, True), log
    assert path.read_text() == "precious"


def test_a_stop_deletes_no_socket_of_others(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with (
        ServerProcess(tmp_path / "mqks.db", "--unix", str(path)) as server,
        socket.socket(socket.AF_UNIX) as other,
    ):
        path.unlink()
        other.bind(str(path))
        assert server.stop() == 0
        assert path.is_socket()


def test_of_two_that_start_at_once_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    both = [ServerProcess(tmp_path / f"{n}.db", "--unix", str(path)) for n in range(2)]
    until(lambda: any(not each.is_running for each in both))
    [loser] = [each for each in both if not each.is_running]
    [winner] = [each for each in both if each is not loser]
    assert loser.wait() == EXIT_IN_USE
    with winner:
        assert asked(path) == b"p ok \n"
