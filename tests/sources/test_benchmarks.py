"""The load programs: every work gives its figures against MQKS, and notices a peer that errs.

The one rule: nothing here looks at how long something took.
"""

import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import pytest

import mqks
from benchmarks import budget, client, features, footprint, process, talk
from benchmarks.flow import Stalled
from benchmarks.messages import Messages, Wrong
from benchmarks.process import Running
from benchmarks.run import arguments, main, measure, measure_all, medians
from benchmarks.servers import SERVERS
from benchmarks.servers.base import TALKERS
from benchmarks.servers.mqks import Mqks
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
from benchmarks.works import WORKS, Size
from tests.kit.forks import Forked

ROOT = Path(__file__).parents[2]
MQKS, RABBITMQ = SERVERS["mqks"], SERVERS["rabbitmq"]
QUICK = "stream", "confirm", "talkers_100"
PLAYED = *QUICK, "fanout", "latency", "big_10k"


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


def skip_without_compiler(name: str) -> None:
    if name in TALKERS and (reason := talk.missing()):
        pytest.skip(reason)


@pytest.mark.parametrize("name", some(WORKS))
def test_work_against_mqks(name: str) -> None:
    skip_without_compiler(name)
    figures = measure(MQKS, WORKS[name], WORKS[name].tiny)
    assert figures
    figures.pop("server_cpu_s", None)  # It is counted in hundredths of a second.
    assert all(value > 0 and math.isfinite(value) for value in figures.values()), figures


@pytest.mark.parametrize("name", some(PLAYED))
def test_work_against_sink(name: str) -> None:
    """Where nothing is wrong, nothing is noticed."""
    skip_without_compiler(name)
    assert measure(Sink(), WORKS[name], WORKS[name].tiny)


@pytest.mark.parametrize("payload_bytes", [20, 1_000])
def test_payload_size_is_kept(payload_bytes: int) -> None:
    assert measure(MQKS, WORKS["acked"], Size(100, payload_bytes))


@pytest.mark.parametrize("name", some(PLAYED))
@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"none"}))
def test_wrong_delivery_is_noticed(name: str, fault: str) -> None:
    skip_without_compiler(name)
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


def test_ratio_to_nothing_is_not_told() -> None:
    runs = {("stream", "redis"): [{"cpu": 0.0}], ("stream", "mqks"): [{"cpu": 2.0}]}
    assert medians(runs, to="redis")["stream"]["cpu"]["mqks"] == {"median": 2.0}


def test_serve_flags_reach_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--serve-flags=--memory-bytes 64MiB --no-uvloop", "--tiny"]
    file = tmp_path / "figures.json"
    main(["stream", "--servers", "mqks", *flags, "--json", str(file)])
    assert json.loads(file.read_text())["serve_flags"] == ["--memory-bytes", "64MiB", "--no-uvloop"]
    with pytest.raises(SystemExit, match="failed: stream mqks"):
        main(["stream", "--servers", "mqks", "--serve-flags=--frobnicate", "--tiny"])
    assert "--frobnicate" in capsys.readouterr().err


@pytest.fixture
def installs(tmp_path: Path) -> Path:
    """An environment with an mqks of its own, of version 9, and all that is installed here."""
    venv.create(tmp_path / "other", symlinks=True)
    [site] = (tmp_path / "other").glob("lib/python*/site-packages")
    shutil.copytree(Path(mqks.__file__).parent, site / "mqks")
    shutil.copytree(ROOT / "migrations", site / "mqks/migrations", dirs_exist_ok=True)
    (site / "mqks/version.py").write_text('__version__ = "9"\n')
    (site / "here.pth").write_text("\n".join(path for path in sys.path if path))
    return tmp_path / "other"


@pytest.mark.slow
def test_each_column_is_of_the_mqks_that_its_python_has(
    installs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    python = installs / "bin/python"
    words = ["stream", "--servers", "mqks,sink", "--python", str(python), "--tiny"]
    main([*words, "--json", str(tmp_path / "figures.json")])
    head, *_, own, others = capsys.readouterr().out.splitlines()
    assert head.split()[2:] == ["mqks", "sink", "mqks", str(python)]
    told = json.loads((tmp_path / "figures.json").read_text())["mqks"]
    assert own == f"mqks is {told.pop('mqks')}"
    assert own.startswith(f"mqks is {mqks.__version__} ")
    assert [f"{name} is {which}" for name, which in told.items()] == [others]
    assert re.fullmatch(rf"mqks {python} is 9( \(compiled\))? of {installs}/lib/\S+/mqks", others)
    with Running(Mqks().run_by(str(python)), tmp_path) as running:
        assert running.answers(running.port)
    assert " event=starting version=9 " in (tmp_path / "log.1").read_text()


def test_a_python_without_mqks_is_refused(tmp_path: Path) -> None:
    venv.create(tmp_path, symlinks=True)
    with pytest.raises(SystemExit, match="No module named 'mqks'"):
        main(["stream", "--python", str(tmp_path / "bin/python"), "--tiny"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("server", "name"),
    [
        *(("rabbitmq", name) for name in ("acked", "backlog", "confirm", "fanout")),
        *(("mqks-postgres", name) for name in ("acked", "confirm_one", "confirm_10k")),
    ],
)
def test_work_against_another_server(server: str, name: str) -> None:
    if reason := SERVERS[server].missing():
        pytest.skip(reason)
    assert measure(SERVERS[server], WORKS[name], WORKS[name].tiny)


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


@pytest.mark.slow
def test_the_footprint_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    footprint.main(["--count", "1000"])
    rows = (line.split() for line in capsys.readouterr().out.splitlines())
    figures = {name: float(figure.replace(",", "")) for name, figure in rows}
    assert 2**20 < figures["installed_without_dependencies_bytes"] < figures["installed_bytes"]
    assert figures["empty_broker_bytes"] > 2**20
    assert figures["message_counted_bytes"] > 100
    assert 0 < figures["connection_bytes"] < figures["tls_connection_bytes"]
    others = {"message_memory_bytes", "full_broker_bytes", "disk_bytes", "message_disk_bytes"}
    assert others < figures.keys()
    assert len(figures) == 10


PAGES = [ROOT / "README.md", *(ROOT / "docs").glob("[!n]*.md")]


def test_the_pages_name_commands_that_exist() -> None:
    named = [
        command
        for page in PAGES
        for command in re.findall(
            r"python -m benchmarks(\S*\b)((?:(?: |\\\n +)[^`#\n\\]*)*)", page.read_text()
        )
    ]
    assert len(named) > 10
    for module, rest in named:
        assert importlib.util.find_spec(f"benchmarks{module}"), module
        if not module:
            arguments(shlex.split(rest.replace("\\\n", " ")))


def test_the_budget_has_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ROUNDS", 1)
    assert all(figure > 0 for figure in budget.budget().values())


@pytest.mark.slow
def test_features_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    features.main(["--count", "500", "--runs", "1"])
    told = capsys.readouterr().out
    assert "transactions, 1 in flight" in told
    assert "of plain, 8 consumers" in told


def test_the_clients_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    client.main(["--count", "300", "--runs", "1"])
    rows = [line[:30].rstrip(" 0123456789,.") for line in capsys.readouterr().out.splitlines()[1:]]
    works = "publish", "publish, confirmed", "consume", "publish_many", "batches", "end to end"
    both = {f"{skin} {work}" for skin in ("async", "blocking") for work in (*works, "prefetch")}
    assert set(rows) == {"bare ping", "bare publish", "bare consume"} | both


@pytest.mark.parametrize("fault", sorted(FAULTS.keys() - {"none"}))
def test_what_a_client_gets_wrong_is_noticed(fault: str) -> None:
    with pytest.raises(Wrong):
        client.check(10, FAULTS[fault](client.payloads(10), 5))


@pytest.mark.slow
@pytest.mark.parametrize("library", ["celery", "dramatiq", "huey", "taskiq"])
def test_a_round_of_a_library(library: str) -> None:
    pytest.importorskip(library)
    words = library, "--count", "20", "--rounds", "1", "--server", "mqks"
    command = [sys.executable, "-m", "benchmarks.tasks", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row = done.stdout.splitlines()[-1]
    assert row.startswith(f"| {library} | MQKS | ")
    assert "not within" not in row


def test_a_library_without_a_server_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    if importlib.util.find_spec("huey") is None:
        pytest.skip("the extra huey is not installed")
    words = "huey", "--rounds", "0", "--server", "rabbitmq"
    subprocess.run([sys.executable, "-m", "benchmarks.tasks", *words], check=True)
    assert "without huey on RabbitMQ: huey has no storage" in capfd.readouterr().out
    wrong = subprocess.run([sys.executable, "-m", "benchmarks.tasks", "rq"], check=False)
    assert wrong.returncode == 2
