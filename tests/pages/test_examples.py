"""The examples run as they are, as their docstrings say, against a broker that MQKS_URL names."""

from __future__ import annotations

import json
import re
import signal
import socket
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from mqks import BlockingClient, blocking
from mqks.testing import Broker, BrokerProcess
from tests.kit.program import ROOT, Program, installed, printed
from tests.kit.waiting import WAIT_S, until

EXAMPLES = ROOT / "examples"
OUTPUTS = {
    "hello": ["example.hello: world", 'example.hello: {"to":["everybody","else"]}'],
    "blocking": ["the sum is 45"],
    "delayed": [
        "scheduled: tomorrow's",
        "due: the next",
        "due: tomorrow's",
    ],
    "request_reply": [
        "1 / 4 = 0.25",
        "1 / 0: ZeroDivisionError: division by zero",
        "nobody multiplies",
    ],
    "dead_letters": [
        "coffee: no price, try 1",
        "tea: 3",
        "coffee: no price, try 2",
        "dead: coffee, rejects in shop",
        "1 redriven",
        "coffee: 4",
    ],
    "batches": ["20000 confirmed, 20000 handled, the sum is 199990000"],
}


HELLO_WORLD = {
    "greetings": ["hi", "hello"],
    "greetings-and-byes": ["hi", "hello", "bye", "good-bye"],
    "orders": ["order.new"],
    "mailer": ["user.new"],
}
"""Queues that the README and the other pages leave behind."""


def test_every_example_is_tested() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*OUTPUTS, "service"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_example(name: str, mqks_broker: Broker) -> None:
    """It runs, and leaves the queues of the README alone."""
    with blocking.connect(mqks_broker.url) as client, ExitStack() as consuming:
        for queue, events in HELLO_WORLD.items():
            client.subscribe(queue, events)
            consuming.enter_context(client.consume(queue))
        before = client.request("stats", "queues")
        command = [sys.executable, "-W", "error", EXAMPLES / f"{name}.py"]
        lines = printed(command, mqks_broker.url, ROOT)
        assert lines[: len(OUTPUTS[name])] == OUTPUTS[name]
        # A message that had been published to one of them would have taken a number, too.
        assert of_hello_world(client.request("stats", "queues")) == of_hello_world(before)


def of_hello_world(rows: str) -> list[dict[str, object]]:
    return [row for row in json.loads(rows) if row["name"] in HELLO_WORLD]


def test_service(mqks_broker_process: BrokerProcess) -> None:
    url = mqks_broker_process.url
    command = [sys.executable, "-W", "error", EXAMPLES / "service.py"]
    with blocking.connect(url) as client, Program(command, url, ROOT) as service:
        client.subscribe("mailer", ["user.created"])  # Nothing is lost before it listens.
        client.publish("user.created", {"mail": "nowhere"}, confirm=True)
        client.publish("user.created", {"mail": "ann@example.org"}, confirm=True)
        until(lambda: len(service.lines) == 3, lambda: service.told)
        assert {*service.lines} == {
            "mail to ann@example.org",
            'sent: {"mail":"ann@example.org"}',
            'gave up after 3 tries (rejects): {"mail":"nowhere"}',
        }
        assert service.end(signal.SIGTERM) == 0
        assert client.evaluate("len(state.queues_by_consumer_ids)") == "0"


# ------------------------------------------------------------------------------- libraries


def why_dead(client: BlockingClient, queue: str) -> str | None:
    (letter,) = until(lambda: client.peek(queue))
    assert letter.dead_letter is not None
    return letter.dead_letter.why


@pytest.mark.slow
def test_dramatiq(mqks_broker_process: BrokerProcess) -> None:
    pytest.importorskip("dramatiq", reason="the extra dramatiq is not installed")
    where = mqks_broker_process.url, EXAMPLES / "dramatiq"
    with (
        Program([installed("dramatiq"), "invoices", "-p", "1"], *where) as worker,
        blocking.connect(mqks_broker_process.url) as client,
    ):
        assert printed([sys.executable, "invoices.py"], *where) == ["enqueued"]
        worker.until("is due", times=3)
        assert {*re.findall(r"invoice (\d) is sent", worker.told)} == {"0", "1", "2"}
        why = why_dead(client, "dramatiq.invoices.XQ")
        assert why == "ValueError: there is no customer Ann"
        assert worker.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_faststream(mqks_broker_process: BrokerProcess) -> None:
    pytest.importorskip("faststream", reason="the extra faststream is not installed")
    where, program = (mqks_broker_process.url, EXAMPLES / "faststream"), "orders.py"
    with blocking.connect(mqks_broker_process.url) as client:
        client.set_queue("orders.dead")
        with Program([sys.executable, program], *where) as app:
            until(lambda: len(client.stats("consumers")) == 3, lambda: app.told)
            assert printed([sys.executable, program, "send"], *where) == ["tea is 1.5", "sent"]
            app.until("is paid", times=3)
            assert {*re.findall(r"order (\d) is paid", app.told)} == {"0", "1", "3"}
            assert why_dead(client, "orders.dead") == "order 2 has no customer"
            assert app.end(signal.SIGTERM) == 0


@pytest.mark.slow
def test_huey(mqks_broker_process: BrokerProcess) -> None:
    pytest.importorskip("huey", reason="the extra huey is not installed")
    where = mqks_broker_process.url, EXAMPLES / "on_huey"
    with Program([installed("huey_consumer"), "reports.huey"], *where) as consumer:
        told = [*(f"report of month {month}" for month in (1, 2, 3)), "month 3 ends"]
        assert printed([sys.executable, "monthly.py"], *where) == told
        assert consumer.end(signal.SIGINT) == 0


@pytest.mark.slow
def test_taskiq(mqks_broker_process: BrokerProcess) -> None:
    pytest.importorskip("taskiq", reason="the extra taskiq is not installed")
    where = mqks_broker_process.url, EXAMPLES / "taskiq"
    program = [sys.executable, "thumbnails.py", "a.png", "b.png"]
    with Program([installed("taskiq"), "worker", "thumbnails:broker", "--workers", "1"], *where):
        assert printed(program, *where) == ["small-a.png", "small-b.png"]
        with blocking.connect(mqks_broker_process.url) as client:
            (schedule,) = client.schedules()
        assert schedule["name"] == "thumbnails:sweep"


@pytest.mark.slow
def test_django(mqks_broker_process: BrokerProcess, tmp_path: Path) -> None:
    """Its two commands, and its page."""
    pytest.importorskip("django", reason="the extra django is not installed")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{sock.getsockname()[1]}"
    url = f"http://{address}/"

    def page(client: httpx.Client, url: str) -> str:
        with suppress(httpx.TransportError):
            return client.get(url).raise_for_status().text
        return ""

    def managed(*command: str) -> Program:
        line = [sys.executable, EXAMPLES / "django/manage.py", *command]
        return Program(line, mqks_broker_process.url, tmp_path, DEPOT_DATA=str(tmp_path))

    with (
        managed("work") as worker,
        managed("runserver", address, "--noreload"),
        httpx.Client(timeout=WAIT_S, trust_env=False) as client,
    ):
        until(lambda: "Pack an order" in page(client, url))
        worker.until("runs tasks")
        for by in ("celery", "tasks"):
            found = re.search(r'csrfmiddlewaretoken" value="(\w+)"', page(client, url))
            assert found is not None
            answer = client.post(url, data={"by": by, "csrfmiddlewaretoken": found[1]})
            url = str(answer.url.join(answer.headers["location"]))
        until(lambda: page(client, url).count("is packed") == 2)
        shown = page(client, url)
        assert "celery: SUCCESS order 1 is packed" in shown
        assert "tasks: SUCCESSFUL order 2 is packed" in shown
        assert "refresh" not in shown
        assert worker.end(signal.SIGTERM) == 0


FASTAPI = [sys.executable, "-u", "-m", "uvicorn", "--app-dir", "examples/fastapi", "--port", "0"]


class Web(Program):
    """The server of examples/fastapi, with a worker in it, on a free port."""

    def __init__(self, url: str) -> None:
        super().__init__([*FASTAPI, "signups:web"], url, ROOT)

    def put(self, name: str) -> int:
        place = until(lambda: re.search(r"running on (http://\S+)", self.told), lambda: self.told)
        return httpx.put(f"{place[1]}/users/{name}", timeout=WAIT_S, trust_env=False).status_code

    def mailed(self, *names: str) -> None:
        """Wait until these are all that have got a mail."""
        mails = [f"mail to {name}" for name in names]
        until(lambda: [each for each in self.lines if "mail" in each] == mails, lambda: self.told)


@pytest.mark.slow
def test_fastapi_publishes_in_a_request_and_handles_the_message(
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


@pytest.mark.slow
def test_fastapi_does_not_start_without_a_broker() -> None:
    with Web("mqks://127.0.0.1:1") as web:
        assert web.end() != 0
        assert "running on" not in web.told


@pytest.mark.slow
def test_fastapi_ends_without_its_worker(mqks_broker_process: BrokerProcess) -> None:
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
