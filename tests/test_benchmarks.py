"""The load programs: every work gives its figures against MQKS, and notices a peer that errs.

The one rule: nothing here looks at how long something took.
"""

import json
import math
from pathlib import Path

import pytest

from benchmarks.flow import Stalled
from benchmarks.messages import Messages, Wrong
from benchmarks.run import main, measure, measure_all, medians
from benchmarks.servers import SERVERS
from benchmarks.servers.sink import FAULTS, Sink
from benchmarks.work import Size
from benchmarks.works import WORKS

MQKS = SERVERS["mqks"]
PLAYED = sorted(WORKS.keys() - Sink().skips)


@pytest.mark.parametrize("name", WORKS)
def test_work_against_mqks(name: str) -> None:
    figures = measure(MQKS, WORKS[name], WORKS[name].tiny)
    assert figures
    assert all(value > 0 and math.isfinite(value) for value in figures.values()), figures


@pytest.mark.parametrize("name", PLAYED)
def test_work_against_sink(name: str) -> None:
    assert measure(Sink(), WORKS[name], WORKS[name].tiny)


@pytest.mark.parametrize("payload_bytes", [20, 1_000])
def test_payload_size_is_kept(payload_bytes: int) -> None:
    assert measure(MQKS, WORKS["acked"], Size(100, payload_bytes))


@pytest.mark.parametrize("name", ["stream", "confirm", "fanout", "latency", "fan_in"])
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"none"}))
def test_wrong_delivery_is_noticed(name: str, fault: str) -> None:
    with pytest.raises((Wrong, Stalled)):
        measure(Sink(fault), WORKS[name], WORKS[name].tiny)


def test_refused_publish_is_noticed() -> None:
    replies = b"000000000000 ok \n000000000001 error 65f0c0de65f0c0de65f0c0de\n"
    with pytest.raises(Wrong, match="refused"):
        MQKS.check_confirms(replies, Messages(2), window=1)


def test_confirm_given_twice_is_noticed() -> None:
    with pytest.raises(Wrong, match="once"):
        MQKS.check_confirms(b"000000000001 ok \n" * 2, Messages(2), window=None)


def test_servers_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    _, failed = measure_all([MQKS, SERVERS["sink"]], runs=2, sizes={"stream": Size(100)})
    turns = [line.split(":")[0].strip() for line in capsys.readouterr().err.splitlines()]
    assert turns == ["stream mqks 1/2", "stream sink 1/2", "stream mqks 2/2", "stream sink 2/2"]
    assert not failed


def test_ratio_is_taken_within_each_run() -> None:
    runs = {
        ("stream", "redis"): [{"rate": 1.0}, {"rate": 10.0}, {"rate": 4.0}],
        ("stream", "mqks"): [{"rate": 2.0}, {"rate": 20.0}, {"rate": 12.0}],
    }
    assert medians(runs, to="redis")["stream"]["rate"] == {
        "redis": {"median": 4.0},
        "mqks": {"median": 12.0, "ratio": 2.0},
    }


def test_command_skips_what_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    file = tmp_path / "figures.json"
    main(["stream", "--servers", "redis,sink", "--tiny", "--json", str(file)])
    told = capsys.readouterr()
    assert "redis is skipped: redis-server is not installed" in told.err
    assert told.out.splitlines()[0].split() == ["work", "figure", "sink"]
    written = json.loads(file.read_text())
    assert written["skipped"] == {"redis": "redis-server is not installed"}
    assert written["sizes"]["stream"]["count"] == WORKS["stream"].tiny.count
    assert written["medians"]["stream"]["messages_per_s"]["sink"]["median"] > 0


def test_failed_work_leaves_the_others_their_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SERVERS, "sink", Sink("drop"))
    file = tmp_path / "figures.json"
    with pytest.raises(SystemExit, match="failed: stream sink"):
        main(["stream", "--servers", "mqks,sink", "--tiny", "--json", str(file)])
    written = json.loads(file.read_text())
    assert list(written["failed"]) == ["stream sink"]
    assert list(written["runs"]) == ["stream mqks"]
