"""What became of a message: each step is noted, within a limit, and only while it is traced."""

import gc
import json
import re
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from mqks.broker.features.trace.traces import Traces
from mqks.commands import main
from mqks.limits import TRACES_MAX
from tests.kit.lab import Lab
from tests.kit.line_client import LineClient
from tests.kit.memory import allocated
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

HELD = b"c consume q --manual-ack"
DROPS = b"s set_queue q --messages-max=1 --overflow=drop"
Steps = list[tuple[Any, ...]]


def page(server: ServerProcess, path: str) -> str:
    until(lambda: "address=http://" in server.log)
    [url] = re.findall(r"address=(http://\S+)", server.log)
    with urlopen(url + path) as answer:
        return str(answer.read().decode())


def test_commands_and_page_tell_the_steps(
    db: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ServerProcess(db, "--http-port", "0", "--page", "full") as server:
        host, port = server.address
        monkeypatch.setenv("MQKS_URL", f"mqks://{host}:{port}")
        with LineClient(server.address) as client:
            assert main(["trace", "e.*", "--for", "1h"]) == 0
            assert client.ask(b"s subscribe --confirm q e.new") == b"s ok "
            assert client.ask(b"<m> publish --confirm e.new x") == b"<m> ok "
        assert main(["inspect", "message", "<m>"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"published .*event=e.new connection=127.0.0.1:\d+", shown)
        assert main(["inspect", "traces", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["name"] == "e.*"
        shown = page(server, "/message?id=%3Cm%3E")
        assert "What became of message &lt;m&gt;" in shown
        assert shown.index(">published</td>") < shown.index(">joined</td>")
        assert "/message?id=%3Cm%3E" in page(server, "/queue?name=q")
        assert "<code>e.*</code> for 60 min more" in page(server, "/message")
        assert main(["trace", "--off"]) == 0
        assert "No steps: it was not traced." in page(server, "/message?id=%3Cm%3E")


def steps(lab: Lab, message_id: str, *keys: str) -> Steps:
    return [
        (row["what"], row["queue"], *(row.get(key) for key in keys))
        for row in lab.stats(f"message {message_id}")
    ]


def words(lab: Lab, message_id: str) -> list[str]:
    return [what for what, _ in steps(lab, message_id)]


@pytest.mark.parametrize("traced", ["e", "*", "q", "m1"])
def test_a_message_from_its_publish_to_its_ack(traced: str) -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"n set_name shop", b"s subscribe q e", b"t trace --confirm " + traced.encode())
    lab.do("a", b"c consume q --manual-ack", b"m1 publish e secret", b"k ack c m1")
    found = lab.stats("message m1")
    assert [(row["what"], row["queue"], row["seq"]) for row in found] == [
        ("published", None, None),
        ("joined", "q", 1),
        ("delivered", "q", 1),
        ("acked", "q", 1),
    ]
    assert (found[0]["client"], found[0]["event"]) == ("shop", "e")
    assert found[2]["consumer"] == "c"
    assert "secret" not in repr(lab.broker.traces.steps)
    lab.check()


def test_what_is_given_back_dies_and_moves() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"t trace m", b"s set_queue q --retries=2 --dead-letters=dead --backoff=5")
    lab.do(
        "a", b"c consume q e --manual-ack", b"m publish e x", b"r reject c m --reason=no%20stock"
    )
    lab.wait(6)
    lab.do("a", b"r release c m", b"r reject c m --reason=again", b"v move dead other")
    told = steps(lab, "m", "reason", "to")
    assert [(what, queue) for what, queue, *_ in told] == [
        ("published", None),
        *(("joined", "q"), ("delivered", "q"), ("rejected", "q"), ("scheduled", "q")),
        *(("joined", "q"), ("delivered", "q"), ("released", "q")),
        *(("delivered", "q"), ("rejected", "q"), ("dead", "q"), ("moved", "q"), ("joined", "dead")),
        *(("moved", "dead"), ("joined", "other")),
    ]
    assert ("rejected", "q", "no%20stock", None) in told
    assert ("dead", "q", "rejects", None) in told
    assert told[-2] == ("moved", "dead", None, "other")


@pytest.mark.parametrize(
    ("before", "lines", "then"),
    [
        (b"", [b"p purge q"], ["joined", "purged"]),
        (b"", [b"p purge q --id=m"], ["joined", "purged"]),
        (b"", [b"p trim q 9"], ["joined", "trimmed"]),
        (b"", [b"b begin", b"p trim q 9", b"k commit"], ["joined", "trimmed"]),
        (b"", [b"d delete_queue q"], ["joined", "deleted"]),
        (b"--ttl=5 ", [], ["joined", "dead"]),
        (b"--delay=5 ", [], ["scheduled", "joined"]),
        (b"--delay=50 ", [b"p cancel q m"], ["scheduled", "cancelled"]),
        (b"--delay=50 ", [b"p cancel q --all"], ["scheduled", "cancelled"]),
        (b"--delay=50 ", [b"p promote q m"], ["scheduled", "joined"]),
        (b"", [b"c consume q"], ["joined", "consumed"]),
        (b"", [b"r receive q", b"d delete_queue q"], ["joined", "received", "deleted"]),
        (b"", [HELD, b"d delete_consumer c"], ["joined", "delivered", "returned"]),
        (b"", [HELD, b"k ack c --all"], ["joined", "delivered", "acked"]),
        (b"", [DROPS, b"n publish e x"], ["joined", "dead"]),
    ],
)  # fmt: skip
def test_each_end(before: bytes, lines: list[bytes], then: list[str]) -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"t trace e", b"m publish " + before + b"e x")
    for line in [*lines] if b"b begin" not in lines else []:
        lab.do("a", line)
    if b"b begin" in lines:
        lab.do("a", *lines)
    lab.wait(6)
    assert words(lab, "m") == ["published", *then]
    lab.check()


def test_a_lost_consumer_and_a_lease() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"t trace q")
    lab.do("gone", b"c consume q --manual-ack")
    lab.do("a", b"m publish e x")
    lab.end("gone")
    lab.rest()
    lab.do("a", b"r receive q")
    lease = next(line for line in lab.replies if b"lease=" in line).split(b"lease=")[1].split()[0]
    lab.do("a", b"k lease q --ack " + lease)
    assert words(lab, "m") == ["published", "joined", "delivered", "lost", "received", "acked"]


def test_who_has_published_though_all_come_in_one_turn() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e")
    lab.do("a", b"t trace e")
    connections = [lab.broker.connect(f"10.0.0.{n}", local=True) for n in range(3)]
    lab.broker.turns.begin()
    for n, connection in enumerate(connections):
        lab.intake.add(connection, b"m%d publish e x\nk%d publish --once e x\n" % (n, n))
    lab.intake.finish()
    lab.rest()
    for kind in "mk":
        for n in range(3):
            [first, _] = lab.stats(f"message {kind}{n}")
            assert first["connection"] == f"10.0.0.{n}"


def test_a_tick_is_published_by_nobody() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"t trace e", b"s subscribe q e", b"b schedule beat --every=5 publish e x")
    lab.wait(6)
    [step] = [each for each in lab.broker.traces.steps if each.what == "published"]
    assert step.message_id.startswith(b"beat:")
    assert step.told == {"event": "e"}


def test_a_transaction_is_published_by_its_connection() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"t trace e", b"s subscribe q e")
    lab.do("b", b"b begin", b"m publish e x", b"k commit")
    [first, joined] = lab.stats("message m")
    assert (first["connection"], joined["what"]) == ("b", "joined")


def test_while_nothing_is_traced_no_queue_has_a_tracer() -> None:
    lab = Lab(1 << 24)

    def tracers() -> set[bool]:
        lab.do("a", b"s subscribe new e", b"d delete_queue new", b"s subscribe q e")
        told = {bool(queue.tracers) for queue in lab.broker.queues.values()}
        return told | {lab.broker.publishing.tracer is not None}

    assert tracers() == {False}
    lab.do("a", b"t trace e --for=10")
    assert tracers() == {True}
    lab.wall_ahead_us -= 3600 * 1_000_000
    lab.wait(9)
    assert tracers() == {True}
    lab.wait(2)
    assert tracers() == {False}
    lab.do("a", b"m publish e x")
    assert words(lab, "m") == []
    lab.do("a", b"t trace e", b"t trace f --for=9", b"t trace e --off", b"t trace --off")
    assert tracers() == {False}
    assert len(lab.broker.schedule) == 0 or lab.broker.audit.is_counting


def test_a_message_that_waited_before_the_trace() -> None:
    lab = Lab()
    lab.do("a", b"s subscribe q e", b"m publish e x", b"t trace e", b"c consume q --manual-ack")
    lab.do("a", b"k ack c m")
    assert words(lab, "m") == ["delivered", "acked"]


def test_refused_and_listed() -> None:
    lab = Lab()
    for n in range(TRACES_MAX):
        lab.do("a", b"t trace --confirm n%02d --for=60" % n)
    lab.replies.clear()
    lab.do("a", b"u trace --confirm one-more", b"u trace --confirm n00 --for=90")
    lab.do("a", b"u trace")
    lab.do("a", b"u trace x --for=0", b"u trace x --for=86401", b"u trace x --for=1 --off")
    assert [line.split()[1] for line in lab.replies] == [b"error", b"ok"] + [b"error"] * 4
    rows = lab.stats("traces")
    assert [row["name"] for row in rows] == [f"n{n:02}" for n in range(TRACES_MAX)]
    assert rows[0]["left_s"] == 90
    assert rows[0]["connection"] == "a"
    assert lab.stats("traces --after=n13")[0]["name"] == "n14"
    assert lab.broker.limits_reached["traces_max"] == 1
    lab.crash()
    assert lab.stats("traces") == []


def test_the_oldest_steps_make_room() -> None:
    lab = Lab(1 << 24)
    traces = lab.broker.traces
    traces._bytes_max = 100_000
    lab.do("a", b"s subscribe q e", b"t trace e")
    for n in range(0, 1000, 100):
        lab.do("a", *[b"m%d publish e x" % each for each in range(n, n + 100)])
    assert traces.bytes == sum(step.size for step in traces.steps) <= 100_000
    assert words(lab, "m0") == []
    assert words(lab, "m999") == ["published", "joined"]
    known = {step.id for last in traces._last.values() for step in last.values()}
    assert known <= {step.id for step in traces.steps}
    lab.do("a", b"p purge q", b"t trace --off")
    assert traces.bytes == 0
    assert not traces._last


@pytest.mark.parametrize("together", [1, 100])
def test_steps_take_no_more_than_they_count(together: int) -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"t trace e")
    lab.do("a", *[b"w%d publish e x" % n for n in range(2000)])
    lab.do("a", b"p purge q", b"t trace --off", b"t trace e")
    traces: Traces = lab.broker.traces
    lines = [b"message-%06d publish e x" % n for n in range(500)]
    gc.collect()
    with allocated() as memory:
        for start in range(0, len(lines), together):
            lab.do("a", *lines[start : start + together], b"p purge q")
        gc.collect()
    assert len(traces.steps) == 1_500
    assert 0.5 * traces.bytes < memory.bytes < traces.bytes
