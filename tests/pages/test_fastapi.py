"""examples/fastapi: a real web server with a worker in it, and a real broker; both may die."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from mqks import blocking
from mqks.testing import BrokerProcess
from tests.client.programs import ROOT, environment
from tests.kit.waiting import WAIT_S, until

COMMAND = [sys.executable, "-u", "-m", "uvicorn", "--app-dir", "examples/fastapi", "--port", "0"]


class Web:
    """The server as its docstring starts it, on a free port; killed at the end."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, "signups:web"],
            cwd=ROOT,
            env=environment(url),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.url = ""
        for line in self.lines():
            if found := re.search(r"running on (http://\S+)", line):
                self.url = found[1]
                break

    def lines(self) -> Iterator[str]:
        assert self.process.stdout is not None
        yield from iter(self.process.stdout.readline, "")

    def mailed(self, count: int) -> list[str]:
        """The next mails."""
        mails = (line.split()[-1] for line in self.lines() if line.startswith("mail to "))
        return [next(mails) for _ in range(count)]

    def put(self, name: str) -> int:
        return httpx.put(f"{self.url}/users/{name}", timeout=WAIT_S, trust_env=False).status_code

    def __enter__(self) -> Web:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
def test_it_publishes_in_a_request_and_handles_the_message(
    mqks_broker_process: BrokerProcess,
) -> None:
    with Web(mqks_broker_process.url) as web, blocking.connect(mqks_broker_process.url) as client:
        assert [web.put(name) for name in ("ann", "ann", "ben")] == [202] * 3
        assert web.mailed(2) == ["ann", "ben"]

        # A restart of the broker.
        mqks_broker_process.stop()
        mqks_broker_process.start()
        assert web.put("cleo") == 202
        assert web.mailed(1) == ["cleo"]

        client.rebind("welcome", remove=["user.created"])
        assert web.put("dan") == 503

        web.process.send_signal(signal.SIGTERM)
        assert "Application shutdown complete" in "".join(web.lines())
        until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "0")
        assert client.stats("queue", "welcome")["unacked"] == 0


@pytest.mark.slow
def test_it_does_not_start_without_a_broker() -> None:
    with Web("mqks://127.0.0.1:1") as web:
        assert web.process.wait(WAIT_S) != 0
        assert not web.url


@pytest.mark.slow
def test_without_its_worker_the_server_ends(mqks_broker_process: BrokerProcess) -> None:
    with Web(mqks_broker_process.url) as web:
        with blocking.connect(mqks_broker_process.url) as client:
            until(lambda: client.evaluate("len(state.queues_by_consumer_ids)") == "1")
            [worker] = json.loads(client.request("stats", "consumers"))
        address = "127.0.0.1", mqks_broker_process.port
        with socket.create_connection(address, WAIT_S) as other:
            other.sendall(f"{worker['id']} consume welcome\n".encode())
            told = "".join(web.lines())  # To their end.
        assert "the worker has failed" in told
        assert "ConsumerReplaced" in told
