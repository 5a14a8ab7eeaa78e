"""The load programs: every work gives its figures against MQKS, and notices a peer that errs.

The one rule: nothing here looks at how long something took.
"""

import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import pytest

from benchmarks import bare, fenced, footprint, process, scale, takeovers, talk
from benchmarks.flow import Stalled
from benchmarks.messages import Messages, Wrong
from benchmarks.process import Running
from benchmarks.run import main, measure, measure_all, medians, takes_part
from benchmarks.scale import Costs, Talk, expect, probe, sizes
from benchmarks.servers import SERVERS
from benchmarks.servers.base import TALKERS
from benchmarks.servers.rabbitmq import (
    ACK,
    BASIC_ACK,
    BODY,
    CHANNEL_CLOSE,
    END,
    METHOD,
    Confirmed,
    frame,
)
from benchmarks.servers.sink import FAULTS, Sink
from benchmarks.work import Size
from benchmarks.works import WORKS, paging, scale_consumers, scale_copies, wal_reader
from tests.forks import Forked

MQKS, RABBITMQ = SERVERS["mqks"], SERVERS["rabbitmq"]
PLAYED = sorted(name for name in WORKS if takes_part(Sink(), name))
DIFFERENCES = "_each_bytes"
"""Too small in a tiny run to be told from chance."""
QUICK = "stream", "confirm", "talkers_100"


def some(names: Iterable[str]) -> list[Any]:
    """All of them, of which only some are quick tests."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(autouse=True)
def _forks(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = process.spawn

    def spawn(command: list[str], output: IO[bytes]) -> Forked | subprocess.Popen[bytes]:
        if command[0] != sys.executable:
            return plain(command, output)
        log = output.fileno()
        with open(os.devnull) as none:
            return Forked(command, os.environ, (none.fileno(), log, log))

    monkeypatch.setattr(process, "spawn", spawn)


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for work in (paging, wal_reader):
        monkeypatch.setattr(work, "REST_S", 0)
    for part in (scale, scale_consumers, scale_copies):
        monkeypatch.setattr(part, "ROUNDS", 3)


def skip_without_compiler(name: str) -> None:
    if name in TALKERS and (reason := talk.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize("name", some(WORKS))
def test_work_against_mqks(name: str) -> None:
    skip_without_compiler(name)
    figures = measure(MQKS, WORKS[name], WORKS[name].tiny)
    assert figures
    figures.pop("server_cpu_s", None)  # It is counted in hundredths of a second.
    told = {key: value for key, value in figures.items() if not key.endswith(DIFFERENCES)}
    assert all(value > 0 and math.isfinite(value) for value in told.values()), figures


@pytest.mark.parametrize("name", some(PLAYED))
def test_work_against_sink(name: str) -> None:
    skip_without_compiler(name)
    assert measure(Sink(), WORKS[name], WORKS[name].tiny)


@pytest.mark.parametrize("payload_bytes", [20, 1_000])
def test_payload_size_is_kept(payload_bytes: int) -> None:
    assert measure(MQKS, WORKS["acked"], Size(100, payload_bytes))


@pytest.mark.parametrize(
    "name", some(["stream", "confirm", "fanout", "latency", "fan_in", "talkers_100", "big_10k"])
)
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"none"}))
def test_wrong_delivery_is_noticed(name: str, fault: str) -> None:
    skip_without_compiler(name)
    with pytest.raises((Wrong, Stalled)):
        measure(Sink(fault), WORKS[name], WORKS[name].tiny)


@pytest.mark.slow
def test_sockets_alone(capsys: pytest.CaptureFixture[str]) -> None:
    skip_without_compiler("talkers_100")
    few = ["--connections", "10", "--count", "100", "--rounds", "1"]
    bare.main([*few, "--loops", "1", "2"])
    head, row, cpu = capsys.readouterr().out.splitlines()
    assert head.split("\t")[:4] == ["confirms per second", "bare", "bare, 2 loops", "mqks"]
    assert all(float(rate.replace(",", "")) > 0 for rate in row.split("\t")[1:])
    assert len(cpu.split("\t")) == len(row.split("\t"))


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


def test_ratio_to_nothing_is_not_told() -> None:
    runs = {("paging", "redis"): [{"wal": 0.0}], ("paging", "mqks"): [{"wal": 2.0}]}
    assert medians(runs, to="redis")["paging"]["wal"]["mqks"] == {"median": 2.0}


def test_serve_flags_reach_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--serve-flags=--memory-bytes 64MiB --no-uvloop", "--tiny"]
    file = tmp_path / "figures.json"
    main(["stream", "--servers", "mqks", *flags, "--json", str(file)])
    assert json.loads(file.read_text())["serve_flags"] == ["--memory-bytes", "64MiB", "--no-uvloop"]
    with pytest.raises(SystemExit, match="failed: stream mqks"):
        main(["stream", "--servers", "mqks", "--serve-flags=--frobnicate", "--tiny"])
    assert "--frobnicate" in capsys.readouterr().err


def test_another_python_runs_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/started\nexec {sys.executable} "$@"\n')
    python.chmod(0o700)
    main(["stream", "--servers", "mqks", "--python", str(python), "--tiny"])
    assert (tmp_path / "started").read_text().startswith("-m mqks serve ")
    assert capsys.readouterr().out.split("\n")[0].endswith(f"mqks  mqks {python}")


@pytest.mark.slow
@pytest.mark.skipif(RABBITMQ.missing() is not None, reason="RabbitMQ is not installed")
@pytest.mark.parametrize("name", ["acked", "backlog", "confirm", "fanout"])
def test_work_against_rabbitmq(name: str) -> None:
    assert measure(RABBITMQ, WORKS[name], WORKS[name].tiny)


@pytest.mark.slow
@pytest.mark.parametrize("work", ["acked", "confirm", "confirm_one"])
@pytest.mark.parametrize("server", ["mqks-postgres", "rabbitmq-cluster"])
def test_work_against_several_machines(server: str, work: str) -> None:
    if reason := SERVERS[server].missing():
        pytest.skip(reason)
    assert measure(SERVERS[server], WORKS[work], WORKS[work].tiny)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "waiting", "silent"),
    [
        ("mqks", 1_000, {"kill", "stop"}),
        ("mqks-postgres", 1_000, {"kill", "stop", "switch"}),
        ("rabbitmq-cluster", 0, {"kill", "stop"}),
    ],
)
def test_take_overs(server: str, waiting: int, silent: set[str]) -> None:
    if reason := SERVERS[server].missing():
        pytest.skip(reason)
    figures = takeovers.run(server, ["kill", "stop", "switch"], waiting)
    assert {fault for fault in figures if figures[fault]["silent_s"] > 0} == silent


@pytest.mark.slow
def test_a_message_lost_in_a_take_over_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Purging(takeovers.OneBroker):
        def heal(self) -> None:
            with self._connected() as client:
                client.purge(takeovers.PROBE)

    monkeypatch.setitem(takeovers.PLACES, "mqks", Purging)
    with pytest.raises(RuntimeError, match="has lost"):
        takeovers.run("mqks", ["kill"], 0)


@pytest.mark.slow
def test_confirms_beside_commits(capsys: pytest.CaptureFixture[str]) -> None:
    if reason := SERVERS["mqks-postgres"].missing():
        pytest.skip(reason)
    fenced.main(["--count", "20", "--rounds", "2"])
    _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows] == ["commit", "confirm"]


def rabbitmq_confirms(*frames: tuple[int, bool]) -> Confirmed:
    """A publisher of four messages that has got these confirms: number, and whether of all before
    as well."""
    here, there = socket.socketpair()
    with here, there:
        flow = Confirmed(here, expected=4)
        flow.open()
        there.sendall(b"".join(ACK.pack(1, 1, 13, BASIC_ACK, *frame, END) for frame in frames))
        flow.pull()
    return flow


@pytest.mark.parametrize(
    ("frames", "confirmed"),
    [
        ([(1, False), (2, False)], 2),
        ([(3, True)], 3),
        ([(4, False), (2, False)], 2),
        ([(4, False), (2, True), (3, False)], 4),
        ([(2, False), (3, True)], 3),
    ],
)
def test_rabbitmq_confirms_are_counted_in_any_order(
    frames: list[tuple[int, bool]], confirmed: int
) -> None:
    assert rabbitmq_confirms(*frames).replies == confirmed


def test_rabbitmq_confirm_given_twice_is_noticed() -> None:
    with pytest.raises(Wrong, match="message 2 was confirmed twice"):
        rabbitmq_confirms((2, True), (2, False))


def test_rabbitmq_refusal_is_noticed() -> None:
    raw = frame(METHOD, CHANNEL_CLOSE + b"\x01\x94\x09NOT_FOUND\0\0\0\0")
    with pytest.raises(Wrong, match="NOT_FOUND"):
        RABBITMQ.check_no_refusal(frame(BODY, b"payload") + raw)


def test_sizes_go_up_by_ten() -> None:
    assert sizes(10_000) == [100, 1_000, 10_000]
    assert sizes(1_000, steps=4) == [1, 10, 100, 1_000]


def test_costs_tell_medians_growth_and_what_each_takes() -> None:
    costs = Costs()
    for size, times in {10: [1e-6, 9e-6, 2e-6], 1_000: [3e-6]}.items():
        for seconds in times:
            costs.took("ack", size, seconds)
        costs.tell("resident", size, 5_000 + 2 * size, "bytes")
    assert costs.figures() == pytest.approx(
        {
            "ack_at_10_us": 2.0,
            "ack_at_1000_us": 3.0,
            "resident_at_10_bytes": 5_020,
            "resident_at_1000_bytes": 7_000,
            "ack_large_to_small": 1.5,
        }
    )
    assert costs.each_bytes() == 2


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with Running(MQKS, tmp_path) as running:
        yield running


def test_probe_notices_what_is_not_as_it_should_be(running: Running) -> None:
    with Talk(running.port) as talk:
        assert talk.ask(b"s subscribe --confirm probe probe") == b"s ok "
        talk.sock.sendall(b"m publish probe early\n")
        assert talk.ask(b"p ping x") == b"p ok x"
    with pytest.raises(Wrong, match="early"):
        probe(running.port, Costs(), 1)
    with pytest.raises(Wrong, match=r"len\(state\.queues\) is 1 instead of 2"):
        expect(running.port, b"len(state.queues)", 2)


def test_wal_reader_keeps_its_view(tmp_path: Path) -> None:
    file = tmp_path / "mqks.db"
    with closing(sqlite3.connect(file, isolation_level=None)) as writer:
        writer.execute("pragma journal_mode = wal")
        writer.execute("create table t(x)")
        with wal_reader.reader(file):
            writer.execute("create table u(x)")
        assert writer.execute("select count(*) from sqlite_schema").fetchone() == (2,)


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


def test_the_footprint_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    footprint.main(["--count", "1000"])
    figures = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert set(figures) == {
        "installed_bytes",
        "installed_without_dependencies_bytes",
        "empty_broker_bytes",
        "message_memory_bytes",
        "message_counted_bytes",
    }
    installed, own, empty = (int(figures[name].replace(",", "")) for name in list(figures)[:3])
    assert 2**20 < own < installed
    assert empty > 2**20
    assert int(figures["message_counted_bytes"]) > len(footprint.PAYLOAD)
