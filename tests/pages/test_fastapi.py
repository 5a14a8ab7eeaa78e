"""examples/fastapi: a real web server with a worker in it, and a real broker; both may die."""

import re
import signal
import socket
import sys

import httpx
import pytest

from mqks import blocking
from mqks.testing import BrokerProcess
from tests.kit.program import ROOT, Program
from tests.kit.waiting import WAIT_S, until

COMMAND = [sys.executable, "-u", "-m", "uvicorn", "--app-dir", "examples/fastapi", "--port", "0"]

pytestmark = pytest.mark.slow


class Web(Program):
    """The server as its docstring starts it, on a free port."""

    def __init__(self, url: str) -> None:
        super().__init__([*COMMAND, "signups:web"], url, ROOT)

    def put(self, name: str) -> int:
        place = until(lambda: re.search(r"running on (http://\S+)", self.told), lambda: self.told)
        return httpx.put(f"{place[1]}/users/{name}", timeout=WAIT_S, trust_env=False).status_code

    def mailed(self, *names: str) -> None:
        """Wait until these are all that have got a mail."""
        mails = [f"mail to {name}" for name in names]
        until(lambda: [each for each in self.lines if "mail" in each] == mails, lambda: self.told)


def test_it_publishes_in_a_request_and_handles_the_message(
    mqks_broker_process: BrokerProcess,
) -> None:
    with Web(mqks_broker_process.url) as web, blocking.connect(mqks_broker_process.url) as client:
        assert [web.put(name) for name in ("ann", "ann", "ben")] == [202] * 3
        web.mailed("ann", "ben")

        # A restart of the broker.
        mqks_broker_process.stop()
        mqks_broker_process.start()
        assert web.put("cleo") == 202
        web.mailed("ann", "ben", "cleo")

        client.rebind("welcome", remove=["user.created"])
        assert web.put("dan") == 503

        web.end(signal.SIGTERM)
        assert "Application shutdown complete" in web.told
        until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "0")
        assert client.stats("queue", "welcome")["unacked"] == 0


def test_it_does_not_start_without_a_broker() -> None:
    with Web("mqks://127.0.0.1:1") as web:
        assert web.end() != 0
        assert "running on" not in web.told


def test_without_its_worker_the_server_ends(mqks_broker_process: BrokerProcess) -> None:
    with Web(mqks_broker_process.url) as web:
        with blocking.connect(mqks_broker_process.url) as client:
            until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "1")
            [worker] = client.stats("consumers")
        address = "127.0.0.1", mqks_broker_process.port
        with socket.create_connection(address, WAIT_S) as other:
            other.sendall(f"{worker['id']} consume welcome\n".encode())
            web.end()
        assert "the worker has failed" in web.told
        assert "ConsumerReplaced" in web.told
