"""The examples run as they are, against a broker that MQKS_URL names."""

from __future__ import annotations

import json
import signal
import sys
from contextlib import ExitStack

import pytest

from mqks import blocking
from mqks.testing import Broker, BrokerProcess
from tests.kit.program import ROOT, Program, printed
from tests.kit.waiting import until

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
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*OUTPUTS, "service"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_example(name: str, mqks_broker: Broker) -> None:
    """It runs, and leaves the queues of the README alone."""
    with blocking.connect(mqks_broker.url) as client, ExitStack() as consuming:
        for queue, events in HELLO_WORLD.items():
            client.subscribe(queue, events)
            consuming.enter_context(client.consume(queue))
        before = client.request("stats", "queues")
        command = [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py"]
        lines = printed(command, mqks_broker.url, ROOT)
        assert lines[: len(OUTPUTS[name])] == OUTPUTS[name]
        # A message that had been published to one of them would have taken a number, too.
        assert of_hello_world(client.request("stats", "queues")) == of_hello_world(before)


def of_hello_world(rows: str) -> list[dict[str, object]]:
    return [row for row in json.loads(rows) if row["name"] in HELLO_WORLD]


def test_service(mqks_broker_process: BrokerProcess) -> None:
    url = mqks_broker_process.url
    command = [sys.executable, "-W", "error", ROOT / "examples/service.py"]
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
