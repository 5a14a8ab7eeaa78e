"""`mqks diagnose`: a file for somebody who looks for a fault from afar.

The one rule: what must not be in it was given to the broker, and to the command.
"""

import json
from pathlib import Path

import pytest

import mqks
from mqks.commands import main
from mqks.testing import Broker


@pytest.fixture
def asked(mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Broker:
    monkeypatch.setenv("MQKS_DB", "postgresql://mqks:hidden1@db/mqks")
    with mqks.blocking.connect(mqks_broker.url) as client:
        client.subscribe("mail", ["user.new"])
        client.publish("user.new", "hidden2", confirm=True)
        with pytest.raises(mqks.RequestFailed):
            client.purge("missing")
    return mqks_broker


def test_it_has_what_is_asked_for_and_no_secret(
    asked: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    assert main(["diagnose", str(file), "--url", asked.url]) == 0
    assert capsys.readouterr().out == f"{file}: read it before you send it\n"
    text = file.read_text()
    assert "hidden" not in text
    told = json.loads(text)
    assert told["mqks"]["version"] == mqks.__version__
    assert told["settings"]["db"] == {"value": "postgresql://mqks:***@db/mqks", "from": "MQKS_DB"}
    assert [each["name"] for each in told["queues"]] == ["mail"]
    assert told["totals"]["messages_ready"] == 1
    assert "there is no queue 'missing'" in told["errors"][0]["reason"]
    assert "anyio" in told["system"]["packages"]

    assert main(["diagnose", str(file), "--url", asked.url]) == 73, "a report is not replaced"


def test_of_a_stopped_server(asked: Broker, tmp_path: Path) -> None:
    asked.stop()
    file = tmp_path / "report.json"
    assert main(["diagnose", str(file), "--db", str(tmp_path / "mqks.db")]) == 0
    told = json.loads(file.read_text())
    assert [each["name"] for each in told["queues"]] == ["mail"]
    assert len(told["errors"]) == 1
    assert told["connections"] == []
