"""`--json` of the jobs, by the table of the test of all commands."""

import json
from pathlib import Path

import pytest

from mqks.client.blocking import connect
from mqks.commands import main
from mqks.testing import Broker
from tests.commands.test_command_json import SPARK


@pytest.mark.slow
@pytest.mark.usefixtures("jobs_here")
def test_jobs_are_told_as_json(
    mqks_broker: Broker,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MQKS_URL", mqks_broker.url)
    with connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish("e", '{"n": 1}', confirm=True)
    for name, words in SPARK.items():
        assert main([*name.split()[1:], *words.split(), "--json"]) == 0
        objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert objects
        assert all(isinstance(each, dict) and each for each in objects)
