"""The examples run as they are, against a broker that MQKS_URL names."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mqks import connect_blocking
from mqks.testing import Broker, BrokerProcess
from tests.waiting import WAIT_S

ROOT = Path(__file__).parents[1]


def environ(url: str) -> dict[str, str]:
    return {**os.environ, "MQKS_URL": url, "PYTHONPATH": str(ROOT)}


OUTPUTS = {
    "hello": ["hello: world", 'hello: {"to":["everybody","else"]}'],
    "blocking": ["the sum is 45"],
    "batches": ["20000 confirmed, 20000 handled, the sum is 199990000"],
}


def test_every_example_is_tested() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == {*OUTPUTS, "service"}


@pytest.mark.parametrize("name", OUTPUTS)
def test_example(name: str, mqks_broker: Broker) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", ROOT / "examples" / f"{name}.py"],
        env=environ(mqks_broker.url),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert done.stdout.splitlines()[: len(OUTPUTS[name])] == OUTPUTS[name]


def test_service(mqks_broker_process: BrokerProcess) -> None:
    service = subprocess.Popen(
        [sys.executable, "-W", "error", ROOT / "examples/service.py"],
        env=environ(mqks_broker_process.url),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        with connect_blocking(mqks_broker_process.url) as client:
            client.subscribe("mailer", ["user.created"])  # Nothing is lost before it listens.
            client.publish("user.created", {"mail": "nowhere"}, confirm=True)
            client.publish("user.created", {"mail": "ann@example.org"}, confirm=True)
            assert service.stdout is not None
            lines = {service.stdout.readline() for _ in range(2)}
            assert lines >= {"mail to ann@example.org\n"}
            service.send_signal(signal.SIGTERM)
            output, _ = service.communicate(timeout=WAIT_S)
            lines |= set(output.splitlines(keepends=True))
            assert lines <= {
                "mail to ann@example.org\n",
                "gave up on nowhere\n",
                'sent: {"mail":"ann@example.org"}\n',
            }
            assert service.returncode == 0
            assert client.evaluate("len(state.queues_by_consumer_ids)") == "0"
    finally:
        service.kill()
        service.wait()
