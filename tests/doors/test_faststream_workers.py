"""Applications of FastStream as processes: none of their messages is lost, whatever is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqks import blocking
from mqks.client.options import Options
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until
from tests.kit.workers import WorkerGroup

pytest.importorskip("faststream", reason="the extra faststream is not installed")
from mqks.faststream import MqksBroker

pytestmark = pytest.mark.slow


class FastStreamWorkers(WorkerGroup):
    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        """One that consumes."""
        return self.ready(b"listening", sys.executable, "-m", "tests.kit.faststream_tasks")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path / "db") as server:
        yield server


@pytest.fixture
def workers(server: ServerProcess, tmp_path: Path) -> Iterator[FastStreamWorkers]:
    with FastStreamWorkers(tmp_path, MQKS_URL=server.url) as running:
        yield running


def test_no_message_is_lost(
    server: ServerProcess, workers: FastStreamWorkers, capsys: pytest.CaptureFixture[str]
) -> None:
    """While workers and the server are killed."""
    count, path = 2000, str(workers.path / "notes")
    loop = asyncio.new_event_loop()
    broker = MqksBroker(server.url, options=Options(timeout_s=WAIT_S))

    def send(what: str) -> None:
        """Together with those of its ten."""
        if what.endswith("9"):
            bodies = ({"path": path, "what": f"{what[:-1]}{digit}"} for digit in range(10))
            loop.run_until_complete(publish(bodies))

    async def publish(bodies: Iterable[Any]) -> None:
        await asyncio.gather(*(broker.publish(each, "note") for each in bodies))

    loop.run_until_complete(broker.connect())
    try:
        workers.work_on(server, count, send)
    finally:
        loop.run_until_complete(broker.stop())
        loop.close()
    again = sum(workers.notes().values()) - count
    with blocking.connect(server.url) as client:
        until(lambda: not any(client.stats("queue", "note")[each] for each in ("ready", "unacked")))
    with capsys.disabled():
        print(f"\n{count} messages, {again} were handled again")


def test_a_message_that_kills_its_workers_is_a_dead_letter(
    server: ServerProcess, workers: FastStreamWorkers
) -> None:
    with blocking.connect(server.url) as client:
        client.subscribe("dead", ["dead"])
        client.subscribe("die", ["die"])
        client.publish("die", "{}", confirm=True)
        for _ in range(3):
            assert workers.run(sys.executable, "-m", "tests.kit.faststream_tasks").wait(WAIT_S) == 1
        (letter,) = until(lambda: client.peek("dead"))
        assert letter.dead_letter is not None
        assert (letter.dead_letter.reason, letter.dead_letter.tries) == ("losses", 3)


def test_sigterm(server: ServerProcess, workers: FastStreamWorkers, tmp_path: Path) -> None:
    """What runs ends first, and is acked; the rest is done by another worker meanwhile."""
    held, gate = tmp_path / "held", tmp_path / "gate"
    first = workers.start()
    with blocking.connect(server.url) as client:
        client.publish("hold", {"path": str(held), "gate": str(gate)}, confirm=True)
        until(lambda: workers.notes("held")["begun"])
        for number in range(4):
            body = {"path": str(tmp_path / f"held{number}"), "gate": str(held)}
            client.publish("hold", body, confirm=True)
        until(lambda: client.stats("queue", "hold")["unacked"] == 5)
        first.send_signal(signal.SIGTERM)
        workers.start()
        for number in range(4):
            workers.noted("done", name=f"held{number}")
        gate.touch()
        assert first.wait(WAIT_S) == 0
        assert workers.notes("held") == {"begun": 1, "done": 1}
        until(lambda: client.stats("queue", "hold")["unacked"] == 0)
        assert client.stats("queue", "hold")["ready"] == 0
