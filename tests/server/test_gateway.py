"""The processes that answer the HTTP API and SQS: they come and go, and the broker stays."""

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from socket import create_connection
from urllib.parse import urlsplit

import pytest

from tests.kit.line_client import LineClient
from tests.kit.ports import free_port
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "mqks.db", "--api-port", "0", "--connections-max", "20") as one:
        yield one


def publish(url: str) -> int:
    try:
        with urllib.request.urlopen(f"{url}/publish/e", b"x", WAIT_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def url_of(server: ServerProcess) -> str:
    _ = server.address
    return until(lambda: re.search(r"address=api:(http://[\d.:]+)", server.log))[1]


def gateways(server: ServerProcess) -> list[int]:
    """The ids of its processes."""
    children = Path(f"/proc/{server.pid}/task").glob("*/children")
    return [int(each) for child in children for each in child.read_text().split()]


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_it_is_started_by_the_first_connection(server: ServerProcess) -> None:
    url = url_of(server)
    assert gateways(server) == []
    assert publish(url) == 200
    assert len(gateways(server)) == 1


def test_one_that_was_killed_is_started_again(server: ServerProcess) -> None:
    url = url_of(server)
    assert publish(url) == 200
    [gateway] = gateways(server)
    os.kill(gateway, signal.SIGKILL)
    until(lambda: "event=gateway_failed gateway=api status=-9" in server.log)
    assert publish(url) == 200
    assert gateways(server) != [gateway]


def test_it_does_not_outlive_a_broker_that_was_killed(tmp_path: Path) -> None:
    flags = tmp_path / "mqks.db", "--api-port", str(free_port())
    found = []
    for _ in range(3):
        with ServerProcess(*flags) as server:
            assert publish(url_of(server)) == 200
            found += gateways(server)
    assert len(found) == 3
    until(lambda: not any(map(is_there, found)))


def test_it_loads_no_broker() -> None:
    """There are two of them, and they have no use for its memory."""
    code = """if True:
        import sys, mqks.web.gateway_process
        rooms = {"mqks.broker", "mqks.journal", "mqks.server"}
        print(*rooms.intersection(sys.modules))
    """
    command = sys.executable, "-c", code
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert done.stdout == "\n"


def test_signals_are_for_the_broker(server: ServerProcess) -> None:
    """Those of a terminal or of a service manager come to all processes."""
    url = url_of(server)
    assert publish(url) == 200
    [gateway] = gateways(server)
    for each in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(gateway, each)
    assert publish(url) == 200
    assert gateways(server) == [gateway]
    assert server.terminate() == 0
    assert not is_there(gateway)


def test_many_users_come_in_one_moment(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "mqks.db", "--api-port", "0") as server, ExitStack() as stack:
        url = url_of(server)
        assert publish(url) == 200
        [gateway] = gateways(server)
        place = urlsplit(url)
        peers = [
            stack.enter_context(create_connection((place.hostname, place.port), WAIT_S))
            for _ in range(50)
        ]
        os.kill(gateway, signal.SIGSTOP)
        for number, peer in enumerate(peers):
            head = b"POST /publish/e HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n"
            peer.sendall(head + b"Authorization: Bearer %d\r\n\r\nx" % number)
        os.kill(gateway, signal.SIGCONT)
        assert {peer.recv(12) for peer in peers} == {b"HTTP/1.1 401"}


def test_a_full_broker_says_so(server: ServerProcess) -> None:
    url = url_of(server)
    with ExitStack() as stack:
        clients = [stack.enter_context(LineClient(server.address)) for _ in range(20)]
        assert publish(url) == 503
        clients[0].close()
        until(lambda: publish(url) == 200)
