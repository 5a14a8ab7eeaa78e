"""The fixtures that programs use in their own tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqks import RequestFailed, blocking
from mqks.errors import DatabaseLocked
from mqks.testing import Broker, BrokerProcess, mqks_broker
from tests.kit.waiting import WAIT_S

__all__ = ["mqks_broker"]


@pytest.fixture(params=["mqks_broker", "mqks_broker_process"])
def broker(request: pytest.FixtureRequest) -> Broker | BrokerProcess:
    fixture: Broker | BrokerProcess = request.getfixturevalue(request.param)
    return fixture


def test_it_keeps_messages_over_a_restart_on_the_same_port(broker: Broker | BrokerProcess) -> None:
    with blocking.connect(broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish("e", "x", confirm=True)
    url = broker.url
    broker.stop()
    broker.stop()
    broker.start()
    assert broker.url == url
    with blocking.connect(broker.url) as client, client.consume("q", auto_ack=True) as consumer:
        assert consumer.receive(timeout_s=WAIT_S).text == "x"


@pytest.mark.slow
def test_a_killed_process_keeps_what_was_confirmed(mqks_broker_process: BrokerProcess) -> None:
    broker = mqks_broker_process
    with blocking.connect(broker.url) as client, client.consume("q", ["e"]) as own:
        client.publish("e", "x", confirm=True)
        own.receive(timeout_s=WAIT_S)
        broker.kill()
        broker.start()
        message = own.receive(timeout_s=WAIT_S)
        assert (message.text, message.retry) == ("x", 1)


@pytest.mark.slow
def test_what_keeps_it_from_starting_is_told(mqks_broker: Broker, tmp_path: Path) -> None:
    db = mqks_broker.settings.db_file
    with pytest.raises(DatabaseLocked), Broker(db):
        pass
    with pytest.raises(RuntimeError, match="does not listen"), BrokerProcess(db):
        pass
    with pytest.raises(RuntimeError, match="no-such-flag"):
        BrokerProcess(tmp_path / "other.db", "--no-such-flag").start()


def test_it_takes_settings(tmp_path: Path) -> None:
    with (
        Broker(tmp_path / "a.db", eval="off") as broker,
        blocking.connect(broker.url) as client,
        pytest.raises(RequestFailed),
    ):
        client.evaluate("1")
