"""The commands that talk to a server, from outside: real processes, pipes and terminals.

The one rule: what is waited for can be seen, and each wait has a limit.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import pty
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

import pytest

from mqks import blocking
from mqks.commands import main
from mqks.protocol.requests import Backoff
from mqks.settings import load
from tests.kit import forks
from tests.kit.proxy import Peer
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

MQKS = [sys.executable, "-m", "mqks"]


class Shell:
    """Runs commands against one server."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url = url
        self.directory = directory
        self.environ = {**os.environ, "MQKS_URL": url, "TERM": "xterm", "COLUMNS": "80"}

    def start(self, *words: object, **streams: Any) -> subprocess.Popen[bytes]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **streams}
        return subprocess.Popen(
            [*MQKS, *map(str, words)], env=self.environ, cwd=self.directory, **streams
        )

    def __call__(self, *words: object, stdin: bytes = b"") -> tuple[int, bytes, bytes]:
        return forks.run([*MQKS, *map(str, words)], stdin, self.environ, self.directory)

    def ready(self, queue: str) -> int:
        with blocking.connect(self.url) as client:
            return int(client.evaluate(f"len(state.queues['{queue}'])"))

    def subscribe(self) -> None:
        with blocking.connect(self.url) as client:
            client.subscribe("q", ["e"])

    def rest(self, queue: str) -> list[bytes]:
        """The data of all that waits there, taken away."""
        count = self.ready(queue)
        with blocking.connect(self.url) as client, client.consume(queue, auto_ack=True) as consumer:
            return [consumer.receive(WAIT_S).data for _ in range(count)]

    def is_unused(self) -> bool:
        """Whether the server knows of no consumer any more, and has back what they held."""
        ready = "sum(len(waiting) for waiting in state.queues.values())"
        unsettled = "state.queued - state.consumed"
        with blocking.connect(self.url) as client:
            held = client.evaluate(f"[len(state.queues_by_consumer_ids), {unsettled} - {ready}]")
        return held == "[0, 0]"


@pytest.fixture
def shell(server: ServerProcess, tmp_path: Path) -> Shell:
    directory = tmp_path / "elsewhere"
    directory.mkdir()
    return Shell(server.url, directory)


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    """A command in this process."""
    code = main(list(map(str, words)))
    out, err = capsys.readouterr()
    return code, out, err


# --------------------------------------------------------------------------------- one message


def test_publish_and_consume_one(shell: Shell) -> None:
    assert shell("subscribe", "q", "e") == (0, b"", b"")
    code, out, err = shell("publish", "e", "hello  world ")
    assert (code, err) == (0, b"")

    code, line, err = shell("consume", "q", "--count", 1, "--json")

    assert (code, err) == (0, b"")
    told = {"id": out.decode().strip(), "event": "e", "retry": 0, "data": "hello  world "}
    assert json.loads(line) == told
    assert shell.ready("q") == 0


def test_publish_as_json_with_an_id_of_ones_own(shell: Shell) -> None:
    for _ in range(2):
        code, out, _ = shell("publish", "e", "", "--id", "mine", "--once", "--json")
        assert (code, json.loads(out)) == (0, {"id": "mine", "confirmed": True})


def test_one_message_once(shell: Shell) -> None:
    shell.subscribe()

    for data in ("first", "again"):
        assert shell("publish", "e", data, "--id", "mine", "--once")[0] == 0

    assert shell.rest("q") == [b"first"]


def test_a_file_goes_there_and_back(shell: Shell) -> None:
    shell.subscribe()
    sent = [bytes(range(256)) * 100, b"", b"text\n"]
    for number, data in enumerate(sent):
        (shell.directory / f"{number}.bin").write_bytes(data)
        words = "--id", f"../{number}", "--key", "k", "--priority", "-3"
        assert shell("publish", "e", "--file", f"{number}.bin", *words)[0] == 0

    code, told, _ = shell("peek", "q", "--json")
    assert (code, [json.loads(line)["key"] for line in told.splitlines()]) == (0, ["k"] * 3)
    code, told, _ = shell("consume", "q", "--count", "3", "--out", "there/deep")

    assert code == 0
    names = told.decode().splitlines()
    assert names == [f"there/deep/{number + 1:06}-..%2F{number}" for number in range(3)]
    assert [(shell.directory / name).read_bytes() for name in names] == sent
    assert shell.ready("q") == 0
    shell("publish", "e", "a\tb\n", "--id", "../0")
    code, told, _ = shell("consume", "q", "--count", "1", "--out", "there/deep")
    assert (shell.directory / told.decode().strip()).read_bytes() == b"a\tb\n"
    assert (shell.directory / names[0]).read_bytes() == sent[0]
    assert shell("publish", "e", "--file", "not-there.bin")[0] != 0


@pytest.mark.parametrize(
    "words",
    [
        ["publish", "e", "x", "--once"],
        ["publish", "e", "-", "--once", "--id", "x"],
        ["publish", "e", "x", "--id-prefix", "x"],
        ["publish", "e", "x", "--mandatory", "--no-confirm"],
        ["publish", "e", "x", "--timeout", "nan"],
        ["publish"],
        ["publish", "e"],
        ["publish", "e", "x", "--file", "y"],
        ["consume", "q", "--out", "x", "--json"],
        ["consume", "q", "--count", "1", "--auto-ack"],
        ["consume", "q", "--timeout", "0"],
        ["requeue", "c"],
        ["requeue", "c", "m", "--all"],
        ["subscribe", "q"],
        ["trim", "q", "x"],
        ["publish", "e", "x", "--at", "noon"],
        ["publish", "e", "x", "--meta", "k"],
        ["publish", "e", "x", "--meta", "k=1", "--meta", "k=2"],
        ["consume", "q", "--prefetch", "1", "--auto-ack"],
        ["consume", "q", "--meta"],
        ["cancel", "q"],
        ["promote", "q", "m", "--all"],
    ],
    ids=" ".join,
)
def test_what_makes_no_sense_ends_with_64(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    assert run(capsys, *words)[0] == 64


# ---------------------------------------------------------------------------------- many lines


def test_a_hundred_thousand_lines_through_and_through(shell: Shell, tmp_path: Path) -> None:
    lines = b"".join(b"%d and some more\n" % number for number in range(100_000))
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(lines)
    shell.subscribe()

    with given.open("rb") as stdin, shell.start("publish", "e", "-", stdin=stdin) as publish:
        assert [*publish.communicate(timeout=WAIT_S)] == [b"100000 confirmed\n", b""]
    with got.open("wb") as out:
        consume = shell.start("consume", "q", "--count", 100_000, "--prefetch", 0, stdout=out)
        assert consume.communicate(timeout=WAIT_S)[1] == b""

    assert (publish.returncode, consume.returncode) == (0, 0)
    assert got.read_bytes() == lines
    assert shell.ready("q") == 0


def test_lines_without_a_confirm(shell: Shell) -> None:
    shell.subscribe()

    told = shell("publish", "e", "-", "--no-confirm", "--id-prefix", "p", stdin=b"a\n\nb")

    assert told == (0, b"3 sent\n", b"")
    _, out, _ = shell("consume", "q", "--count", 3, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [(line["id"], line["data"]) for line in found] == [
        ("p-1", "a"),
        ("p-2", ""),
        ("p-3", "b"),
    ]


def test_a_repeated_run_adds_only_what_is_missing(shell: Shell) -> None:
    shell.subscribe()
    publish = ("publish", "e", "-", "--once", "--id-prefix", "file")

    assert shell(*publish, stdin=b"a\nb\n")[1] == b"2 confirmed\n"
    assert shell(*publish, "--json", stdin=b"a\nb\nc\n")[1] == (
        b'{"messages": 3, "confirmed": true}\n'
    )

    assert shell.rest("q") == [b"a", b"b", b"c"]


def test_lines_are_published_as_they_come(shell: Shell) -> None:
    shell.subscribe()
    with (
        shell.start("publish", "e", "-", stdin=subprocess.PIPE) as publish,
        shell.start("consume", "q") as consume,
    ):
        assert publish.stdin is not None
        assert consume.stdout is not None
        for line in (b"one\n", b"two\n"):
            publish.stdin.write(line)
            publish.stdin.flush()
            assert consume.stdout.readline() == line
        consume.send_signal(signal.SIGTERM)


def test_bytes_pass_untouched(shell: Shell) -> None:
    shell.subscribe()
    lines = [bytes(b for b in range(256) if b not in b"\t\n\r"), b"\r in it", b"\xff\xfe", b"\x00"]

    assert shell("publish", "e", "-", stdin=b"\r\n".join(lines))[0] == 0
    assert shell("publish", "e", "-", stdin=b"\n".join(lines))[0] == 0

    assert shell("consume", "q", "--count", 4)[1] == b"\n".join(lines) + b"\n"
    _, out, _ = shell("consume", "q", "--count", 4, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert base64.b64decode(found[2]["data_base64"]) == lines[2]
    assert "data" not in found[2]
    assert (found[1]["data"], found[3]["data"]) == ("\r in it", "\x00")


@pytest.mark.parametrize(
    ("stdin", "fault"),
    [
        (b"a\nb\nc\td\ne\n", b"line 3 has a tab"),
        (b"a\nb\nc\r\r\n", b"line 3 ends with a carriage return"),
        (b"a\nb\n" + b"x" * 2_000_000, b"line 3 is longer than"),
    ],
)
def test_a_line_that_cannot_be_sent_is_told_by_its_number(
    shell: Shell, stdin: bytes, fault: bytes
) -> None:
    shell.subscribe()

    code, out, err = shell("publish", "e", "-", stdin=stdin)

    assert (code, out) == (65, b"")
    assert err.startswith(b"mqks: " + fault)
    assert err.count(b"\n") == 1
    assert shell.rest("q") == [b"a", b"b"]


ERROR_ID = "6741f3c2a90be4d5c8123456"


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that does not like bananas."""
    while line := await reader.readline():
        request_id = line.split(b" ")[0]
        status = b"error " + ERROR_ID.encode() if b"banana" in line else b"ok "
        writer.write(request_id + b" " + status + b"\n")


def test_a_line_that_the_server_refuses_is_told_by_its_number(tmp_path: Path) -> None:
    with Peer(refuse) as peer:
        code, out, err = Shell(peer.url, tmp_path)("publish", "e", "-", stdin=b"a\nbanana\nc\n")

    assert (code, out) == (65, b"")
    assert err.decode() == (
        f"mqks: the server refused line 2, 2 others are confirmed; error {ERROR_ID}; "
        f"see on the server's machine: mqks inspect error {ERROR_ID} --db FILE\n"
    )


async def stay_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that greets, and confirms nothing."""
    while line := await reader.readline():
        if b" ping hello" in line:
            writer.write(line.split(b" ")[0] + b" ok hello\n")


@pytest.mark.parametrize("words", [["publish", "e", "x"], ["publish", "e", "-"], ["purge", "q"]])
def test_no_answer_in_time_ends_with_75(tmp_path: Path, words: list[str]) -> None:
    with Peer(stay_silent) as peer:
        code, out, err = Shell(peer.url, tmp_path)(*words, "--timeout", 0.2, stdin=b"a\n")

    assert (code, out, err) == (
        75,
        b"",
        b"mqks: no reply before the timeout; whether the request was executed is unknown\n",
    )


# ------------------------------------------------------------------------------------ consuming


def fill(shell: Shell, count: int) -> list[bytes]:
    """Messages of a hundred bytes in q."""
    lines = [b"%d %b" % (number, b"x" * 100) for number in range(count)]
    with blocking.connect(shell.url) as client:
        client.subscribe("q", ["e"])
        client.publish_many([("e", line) for line in lines])
    return lines


def test_count_leaves_the_rest_in_the_queue(shell: Shell) -> None:
    lines = fill(shell, 1000)

    code, out, err = shell("consume", "q", "--count", 3)

    assert (code, out.splitlines(), err) == (0, lines[:3], b"")
    del lines[:3]
    for timeout_s in (1, 8, 50):  # On a busy machine a message may take so long.
        count = len(lines) + 1
        code, out, err = shell("consume", "q", "--count", count, "--timeout", timeout_s)
        taken = out.splitlines()
        assert (code, taken) == (75, lines[: len(taken)])
        del lines[: len(taken)]
        if not lines:
            break
    assert lines == []
    assert err == b"mqks: no message for %d s, 1 of %d are missing\n" % (timeout_s, count)


def test_auto_ack(shell: Shell) -> None:
    lines = fill(shell, 1000)

    with shell.start("consume", "q", "--auto-ack") as process:
        assert process.stdout is not None
        assert [process.stdout.readline().rstrip(b"\n") for _ in lines] == lines
        process.kill()

    assert shell.ready("q") == 0


def test_it_ends_when_nothing_comes(shell: Shell) -> None:
    shell.subscribe()
    assert shell("consume", "q", "--timeout", 0.2) == (0, b"", b"")


def test_consume_creates_no_queue_unless_told_to(shell: Shell) -> None:
    for words in (["ordrs"], ["ordrs", "order.new"], ["ordrs", "--add-mask", "order.*"]):
        code, out, err = shell("consume", *words, "--timeout", 5)
        assert (code, out) == (65, b"")
        assert err == b"mqks: there is no queue ordrs; --create creates it\n"
    with blocking.connect(shell.url) as client:
        assert client.evaluate("[len(state.queues), len(state.events_by_queues)]") == "[0, 0]"
    assert shell("consume", "orders", "order.new", "--create", "--timeout", 0.1) == (0, b"", b"")
    assert b"did you mean orders?" in shell("consume", "ordrs", "order.new")[2].lower()
    assert shell.ready("orders") == 0


def bindings(shell: Shell) -> list[str]:
    code, out, err = shell("inspect", "bindings", "--json")
    assert (code, err) == (0, b"")
    return sorted(row["event"] or row["mask"] for row in map(json.loads, out.splitlines()))


def test_naming_events_adds_bindings_and_replace_replaces(shell: Shell) -> None:
    consume = ("consume", "q", "--timeout", 0.1)
    assert shell("subscribe", "q", "e1") == (0, b"", b"")
    assert shell("subscribe", "q", "e2", "--add-mask", "a.*") == (0, b"", b"")
    assert shell(*consume, "e3") == (0, b"", b"")
    assert shell("rebind", "q", "e4") == (0, b"", b"")
    assert bindings(shell) == ["a.*", "e1", "e2", "e3", "e4"]
    assert shell(*consume) == (0, b"", b"")
    assert bindings(shell) == ["a.*", "e1", "e2", "e3", "e4"]
    assert shell(*consume, "e5", "--replace", "--add", "e6") == (0, b"", b"")
    assert bindings(shell) == ["e5", "e6"]
    assert shell("subscribe", "q", "e7", "--replace") == (0, b"", b"")
    assert bindings(shell) == ["e7"]
    assert shell("rebind", "q", "e8", "--replace") == (0, b"", b"")
    assert bindings(shell) == ["e8"]
    assert shell("rebind", "q")[0] == 64
    assert shell(*consume, "--replace")[0] == 65
    assert bindings(shell) == ["e8"]
    assert shell("rebind", "q", "--replace", "--yes") == (0, b"", b"")
    assert bindings(shell) == []


def test_events_rule_and_add(shell: Shell) -> None:
    consume = ("consume", "q", "e1", "--add", "e2", "--add", "e3", "--create")
    rule = ("--delete-queue-when-unused", 0)

    with shell.start(*consume, *rule) as process, blocking.connect(shell.url) as client:
        until(lambda: client.evaluate("sorted(state.queues)") == '["q"]')
        for event in ("e1", "e2", "e3", "e4"):
            client.publish(event, event, confirm=True)
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in range(3)] == [b"e1\n", b"e2\n", b"e3\n"]
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)

        assert client.evaluate("sorted(state.queues)") == "[]"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_cleanly(shell: Shell, number: signal.Signals, code: int) -> None:
    fill(shell, 1)
    with shell.start("consume", "q") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)

    assert (process.returncode, out, err) == (code, b"", b"")
    assert shell.ready("q") == 0, "what was written is acked"


def test_a_signal_ends_it_although_nobody_reads(shell: Shell) -> None:
    fill(shell, 50_000)
    with shell.start("consume", "q", bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(10)
        out = process.stdout
        until(lambda: unread(out) > 1000)  # It is full: the command is stuck.
        process.send_signal(signal.SIGTERM)

        assert process.wait(WAIT_S) == 143
        assert process.stderr is not None
        assert process.stderr.read() == b""


def unread(pipe: IO[bytes]) -> int:
    """Bytes that wait in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"    "))
    return int(count)


def test_killed_in_the_middle_nothing_is_acked_that_was_not_written(shell: Shell) -> None:
    lines = fill(shell, 50_000)
    with shell.start("consume", "q", bufsize=0) as process:
        assert process.stdout is not None
        written = b""
        while len(written) < 1_500_000:
            written += process.stdout.read(100_000)
        process.kill()
        written += process.stdout.readall()  # type: ignore[attr-defined]

    first = written[: written.rfind(b"\n")].split(b"\n")
    until(shell.is_unused)
    second = sorted(shell.rest("q"), key=lambda line: int(line.split()[0]))

    assert first == lines[: len(first)]
    assert second == lines[-len(second) :]
    assert len(second) < len(lines) <= len(first) + len(second), "some acked, none of them missing"


def test_a_reader_that_goes_ends_it_quietly(shell: Shell) -> None:
    lines = fill(shell, 50_000)
    with shell.start("consume", "q", bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(10) == lines[0][:10]
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 1

    until(shell.is_unused)
    left = {int(line.split()[0]) for line in shell.rest("q")}
    assert left == {*range(len(lines))}, "what was not read is still there"


def test_a_reader_that_is_not_there_ends_anything_quietly(shell: Shell) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shell.environ.pop("PYTHONUNBUFFERED", None)  # What is buffered is written at the very end.

    with os.fdopen(writer, "wb") as gone:
        for words in (["eval", "1"], ["export"], ["inspect", "stats"], ["ping"]):
            with shell.start(*words, stdout=gone) as process:
                assert process.communicate(timeout=WAIT_S)[1] == b""
            assert process.returncode == 1


def test_head_ends_it_although_no_more_messages_come(shell: Shell) -> None:
    fill(shell, 1)
    command = f"{sys.executable} -m mqks consume q | head -1"

    done = subprocess.run(
        command, shell=True, env=shell.environ, capture_output=True, timeout=WAIT_S
    )

    assert done.stdout.startswith(b"0 xxx")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_server_that_restarts_is_found_again(shell: Shell, server: ServerProcess) -> None:
    shell.subscribe()
    with shell.start("consume", "q", "--count", 2) as process:
        assert process.stdout is not None
        assert shell("publish", "e", "before")[0] == 0
        assert process.stdout.readline() == b"before\n"
        # Its ack leaves after the line: a stop before that brings the message back.
        held = "sum(len(m) for m in state.messages_by_consumer_ids.values())"
        until(lambda: shell("eval", held)[1] == b"0\n")
        server.stop()
        server.start()
        assert shell("publish", "e", "after")[0] == 0
        assert process.stdout.readline() == b"after\n"
        assert process.wait(WAIT_S) == 0


def test_requeue_gives_messages_back(shell: Shell) -> None:
    with (
        blocking.connect(shell.url) as client,
        client.consume("q", ["e"]) as consumer,
    ):
        for name in ("a", "b", "c"):
            client.publish("e", name, id=name)
        first, *_ = [consumer.receive(WAIT_S) for _ in range(3)]
        consumer_id = first.consumer_id.decode()

        assert shell("requeue", consumer_id, "b") == (0, b"", b"")
        again = consumer.receive(WAIT_S)
        assert (again.id, again.retry) == ("b", 1)
        told = json.loads(shell("requeue", consumer_id, "--all", "--json")[1])
        assert told == {"consumer": consumer_id, "messages": None}
        assert sorted(consumer.receive(WAIT_S).id for _ in range(3)) == ["a", "b", "c"]


# --------------------------------------------------------------------------------------- queues


def test_the_life_of_a_queue(
    server: ServerProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MQKS_URL", server.url)

    def done(*words: object, told: str = "") -> None:
        assert run(capsys, *words) == (0, told, "")

    def value(expression: str) -> Any:
        code, out, err = run(capsys, "eval", expression)
        assert (code, err) == (0, "")
        return json.loads(out)

    with blocking.connect(server.url) as client:
        done("subscribe", "q", "a.1", "a.2", "b")
        assert value("sorted(state.queues)") == ["q"]
        done("rebind", "q", "--remove", "b", "--remove-mask", "a.*", "--add", "c", "--add", "d")
        for number, event in enumerate(("a.1", "b", "c", "d", "d")):
            client.publish(event, f"{number}", confirm=True)
        assert value("len(state.queues['q'])") == 3
        found = list(client.request("range", "q").split())
        first = int(next(word for word in found if word.startswith("first="))[6:])
        done("trim", "q", first + 1, told="1 message trimmed\n")
        assert value("len(state.queues['q'])") == 2
        done("purge", "q", told="2 messages purged\n")
        done("purge", "q", "--json", told='{"queue": "q", "purged": 0}\n')
        seq = first + 1
        trimmed = {"queue": "q", "seq": seq, "trimmed": 0}
        done("trim", "q", seq, "--json", told=f"{json.dumps(trimmed)}\n")
        assert value("len(state.queues['q'])") == 0
        done("rebind", "q", "--replace", "--yes")
        client.publish("d", "x", confirm=True)
        assert value("len(state.queues['q'])") == 0
        done("delete-queue", "q", "--when-unused", 1000)
        assert value("sorted(state.queues)") == ["q"]
        done("delete-queue", "q")
        assert value("sorted(state.queues)") == []


def test_scheduled_messages_and_dead_letters(
    server: ServerProcess,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MQKS_URL", server.url)

    def told(*words: object) -> Any:
        code, out, err = run(capsys, *words)
        assert (code, err) == (0, "")
        return out

    def ids(*words: object) -> list[str]:
        rows = map(json.loads, told("inspect", "messages", *words, "--json").splitlines())
        return [row["id"] for row in rows]

    told("set-queue", "q", "--create", "--retries", 1, "--dead-letters", "dead")
    told("subscribe", "q", "e", "f.a")
    told("publish", "e", "1", "--id", "m1", "--delay", 3600)
    told("publish", "e", "2", "--id", "m2", "--at", "2200-01-31T09:00+01:00", "--meta", "k=v=1,&")
    told("publish", "f.a", "3", "--id", "m3", "--at", 7200000000, "--ttl", 0.5, "--meta", "a=")
    told("publish", "f.a", "4", "--id", "m4", "--delay", 0)
    assert (ids("q", "--scheduled"), ids("q")) == (["m1", "m2", "m3"], ["m1", "m2", "m3", "m4"])
    [row] = told(
        "inspect", "messages", "q", "--scheduled", "--after", 1, "--limit", 1, "--json"
    ).splitlines()
    assert json.loads(row)["due"] == "2200-01-31T08:00:00.000000+00:00"

    assert told("cancel", "q", "m1", "--yes") == "1 message cancelled\n"
    assert told("promote", "q", "m2", "nowhere") == "1 message promoted\n"
    assert told("purge", "q", "--scheduled") == "3 messages purged\n"
    assert told("cancel", "q", "--all") == "0 messages cancelled\n"

    told("publish", "e", "1", "--id", "m1", "--meta", "k=v=1,&", "--meta", "a=")
    told("publish", "f.a", "2", "--id", "m2")
    with blocking.connect(server.url) as client, client.consume("q") as consumer:
        for _ in range(2):
            consumer.receive(WAIT_S).reject()
    assert ids("dead") == ["m1", "m2"]
    assert told("redrive", "dead", "--event", "f.*", "--limit", 5) == "1 message redriven\n"
    assert told("move", "q", "other", "--event", "f.a") == "1 message moved\n"
    assert told("redrive", "dead", "--to", "other") == "1 message redriven\n"
    assert ids("other") == ["m2", "m1"]


def test_schedules(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MQKS_URL", server.url)

    def told(*words: object) -> str:
        code, out, err = run(capsys, *words)
        assert (code, err) == (0, "")
        return out

    def rows(*words: object) -> list[dict[str, Any]]:
        return list(map(json.loads, told(*words, "--json").splitlines()))

    told("subscribe", "q", "e")
    zone = "--tz", "Europe/Berlin", "--missed", "one", "--jitter", 5
    told("schedule", "add", "report", "0 3 * * *", "e", "two  words", *zone, "--meta", "k=v")
    told("schedule", "add", "beat", "e", "x", "--every", "5m", "--ttl", 9, "--pause")
    beat, report = rows("schedule", "list")
    assert (beat["every_s"], beat["paused"], beat["publish"]) == (300.0, True, "--ttl=9 e x")
    assert (report["cron"], report["tz"], report["missed"]) == (
        "0 3 * * *",
        "Europe/Berlin",
        "one",
    )
    assert report["publish"] == "--meta=k=v e two  words"
    assert rows("inspect", "schedules") == [beat, report]
    line = told("schedule", "list").splitlines()[2]
    assert re.match(
        r"report +0 3 \* \* \* Europe/Berlin +e +no +\d{4}-\d\d-\d\d 0[12]:00:00 +- ", line
    )

    told("schedule", "run", "beat")
    [message] = rows("inspect", "messages", "q", "--data")
    assert (message["id"].split(":")[0], message["data"]) == ("beat", "x")
    told("schedule", "resume", "beat")
    told("schedule", "pause", "report")
    assert [row["paused"] for row in rows("inspect", "schedules")] == [False, True]
    told("schedule", "remove", "report", "--yes")
    assert [row["name"] for row in rows("schedule", "list")] == ["beat"]

    wrong: list[tuple[tuple[object, ...], str]] = [
        (("remove", "beet"), "there is no schedule beet; did you mean beat?"),
        (("run", "beet"), "there is no schedule 'beet'"),
        (("add", "s", "61 * * * *", "e", "x"), "is not a cron expression"),
        (("add", "s", "e", "x"), 'give "CRON" EVENT DATA'),
        (("add", "s", "* * * * *", "e", "x", "--every", "5"), 'give "CRON" EVENT DATA'),
        (("add", "s", "e", "x", "--every", "5 weeks"), "is not a number of seconds"),
        (("add", "s", "e", "x", "--every", "nan"), "is not a number of seconds"),
    ]
    for words, reason in wrong:
        code, out, err = run(capsys, "schedule", *words)
        assert (code != 0, out) == (True, "")
        assert reason in " ".join(err.replace("│", "").split())
    assert [row["name"] for row in rows("schedule", "list")] == ["beat"]
    server.kill()
    monkeypatch.delenv("MQKS_URL")
    assert [row["name"] for row in rows("inspect", "schedules", "--db", tmp_path / "mqks.db")] == [
        "beat"
    ]


def test_attributes_are_told_as_json(shell: Shell) -> None:
    shell.subscribe()
    shell("publish", "e", "x", "--meta", "k=v=1,&", "--meta", "a=", "--id", "m")
    shell("publish", "e", "-", "--meta", "k=%", "--ttl", 3600, "--id-prefix", "l", stdin=b"y\nz\n")
    with blocking.connect(shell.url) as client:
        client.set_queue("q", dead_letter_queue="dead")
        with client.consume("q") as consumer:
            consumer.receive(WAIT_S).reject(dead=True)

    words = "--count", 2, "--prefetch", 1, "--meta", "--json"
    _, out, _ = shell("consume", "q", *words)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["id"] for row in rows] == ["l-1", "l-2"]
    assert all((row["meta"], row["dead_letter"]) == ({"k": "%"}, None) for row in rows)
    _, out, _ = shell("consume", "dead", "--count", 1, "--meta", "--json")
    row = json.loads(out)
    assert (row["meta"], row["data"]) == ({"k": "v=1,&", "a": ""}, "x")
    told, old = row["dead_letter"], row["letter"]
    assert told.keys() == {"reason", "queue", "tries", "published", "died", "why"}
    assert (told["reason"], told["queue"]) == ("dead", "q")
    for time_ in ("published", "died"):
        assert datetime.fromisoformat(told[time_]).timestamp() == pytest.approx(old[time_])
    assert old == told | {time_: old[time_] for time_ in ("published", "died")}


def test_durations_have_units_everywhere(shell: Any, tmp_path: Path) -> None:
    config = tmp_path / "mqks.toml"
    config.write_text('[[queue]]\nname = "x"\nttl = "1h30m"\nbackoff = "500ms,1.5m"\n')
    [table] = load({}, {}, config).queue_tables
    assert table.fields == {"ttl_s": 5400.0, "backoff": Backoff(0.5, 90.0)}
    shell("set-queue", "q", "--create", "--ttl", "2d", "--ack-timeout", "1m", "--backoff", "1s,1h")
    shell("subscribe", "q", "e")
    began = time.time()
    shell("publish", "e", "x", "--delay", "1h", "--ttl", "90")
    assert shell("purge", "q", "--older", "1d", "--yes")[0] == 0
    with blocking.connect(shell.url) as client:
        [row] = client.peek("q", scheduled=True)
        assert row.due is not None
        assert began + 3599 < row.due < time.time() + 3601
        policy = client.stats("queue", "q")["policy"]
        told = {name: policy[name]["value"] for name in ("ttl_s", "ack_timeout_s", "backoff")}
        assert told == {"ttl_s": 172800, "ack_timeout_s": 60, "backoff": [1, 3600]}
        client.set_queue("q", ttl_s=cast("Any", "1h"))
        assert client.stats("queue", "q")["policy"]["ttl_s"]["value"] == 3600
    for wrong in ("-1", "1y", "nan"):
        code, _, error = shell("publish", "e", "x", f"--delay={wrong}")
        assert (code, b"duration" in error) == (64, True)


@pytest.mark.parametrize(
    "words",
    [
        ["purge", "q e"],
        ["trim", "q 9", "9"],
        ["requeue", "c --all", "m"],
        ["requeue", "c", "m --all"],
        ["delete-queue", "q --when-unused"],
    ],
    ids=" ".join,
)
def test_a_name_is_one_word(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    code, out, err = run(capsys, *words, "--url", server.url)

    assert (code, out) == (65, "")
    assert " is not a valid name: " in err


# ------------------------------------------------------------------------------ no server, errors


@pytest.mark.parametrize(
    "words",
    [
        ["ping"],
        ["eval", "1"],
        ["publish", "e", "x"],
        ["publish", "e", "-"],
        ["consume", "q"],
        ["requeue", "c", "--all"],
        ["subscribe", "q", "e"],
        ["rebind", "q", "e"],
        ["purge", "q", "--yes"],
        ["trim", "q", "1", "--yes"],
        ["delete-queue", "q", "--yes"],
    ],
    ids=" ".join,
)
def test_without_a_server_it_ends_with_69_at_once(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Taken, but nobody listens.
        port = taken.getsockname()[1]

        told = run(capsys, *words, "--url", f"mqks://127.0.0.1:{port}")

    # Had it tried again, it would say for how long.
    assert told == (69, "", f"mqks: no server at 127.0.0.1:{port}: Connection refused\n")


@pytest.mark.parametrize("words", [["ping"], ["publish", "e", "x"], ["consume", "q"]])
def test_every_command_tells_of_no_server_alike(
    capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    url = ("--url", "mqks://127.0.0.1:1")
    expected = (69, "", "mqks: no server at 127.0.0.1:1: Connection refused\n")

    assert run(capsys, *words, *url) == expected
    assert run(capsys, "top", "--count", "1", *url) == expected
    assert run(capsys, "inspect", "queues", *url) == expected


def test_a_server_that_never_answers_is_waited_for_as_long_as_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]

        code, out, err = run(
            capsys, "ping", "--url", f"mqks://127.0.0.1:{port}", "--timeout", "0.2"
        )

    assert (code, out) == (69, "")
    assert (
        err == f"mqks: no server at 127.0.0.1:{port}: not connected within 0.2 s: no answer yet\n"
    )


def test_a_bad_url_ends_with_78(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "ping", "--url", "http://example.org")

    assert (code, out) == (78, "")
    assert (
        err
        == "mqks: the URL must start with mqks://, mqkss:// or mqks+unix://, as in mqks://localhost:25000\n"
    )


def test_ping(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    url = ("--url", server.url)
    address = server.url.removeprefix("mqks://")

    assert run(capsys, "ping", *url)[1].startswith(f"{address} answered in ")
    found = json.loads(run(capsys, "ping", *url, "--json")[1])
    assert found["server"] == address
    assert 0 < found["ms"] < 60_000
    several = ("--url", f"mqks://127.0.0.1:1,{server.url}")
    assert run(capsys, "ping", *several)[1].startswith(f"{address} answered in ")
    assert json.loads(run(capsys, "ping", *several, "--json")[1])["server"] == address


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mqks://a:1,b:2", "b:2 after the comma in the URL is no URL"),
        ("mqks://me:secret@a:1,b:2", "b:2 after the comma in the URL is no URL"),
        ("mqks://a:1,", "the URL has a comma after a:1 that no URL follows"),
        ("mqks://a:1,mqks://b:2,", "URL 2 of the list has a comma after b:2 that no URL follows"),
        ("mqks://a:1,mqks://b:x", "URL 2 of the list is invalid, or its port is not a number"),
    ],
)
def test_the_wrong_one_of_several_urls_is_named(
    url: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "ping", "--url", url)
    assert code == 78
    assert err.startswith(f"mqks: {why}")
    assert "secret" not in err


def test_a_refusal_tells_the_reason_where_the_database_is_at_hand(
    server: ServerProcess,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    [database] = tmp_path.glob("*.db")
    # Who is not let in is told nothing.
    refused = ("ping", "--url", server.url.replace("//", "//no-such-token@"))

    monkeypatch.setenv("MQKS_DB", str(tmp_path / "other.db"))
    code, _, err = run(capsys, *refused)
    assert code == 65
    error_id = err.split()[-3]
    assert err == (
        f"mqks: the server refused the credentials, error {error_id}; "
        f"see on the server's machine: mqks inspect error {error_id} --db FILE\n"
    )

    monkeypatch.setenv("MQKS_DB", str(database))
    code, _, err = run(capsys, *refused)
    assert code == 65
    assert err.endswith(": wrong credentials\n")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "what", "reason"),
    [
        (["publish", "f", "x", "--mandatory"], "the request", "no queue is bound to 'f'"),
        (["publish", "f", "-", "--mandatory"], "line 1", "no queue is bound to 'f'"),
        (
            ["consume", "other", "--create"],
            "the consumer",
            "the limit of 1 queues is reached (queues_max)",
        ),
        (
            ["subscribe", "other", "e"],
            "the request",
            "the limit of 1 queues is reached (queues_max)",
        ),
        (["eval", "nobody"], "the request", "unknown or not allowed: nobody"),
    ],
)
def test_a_refusal_tells_the_reason_that_the_server_tells(
    tmp_path: Path,
    words: list[str],
    what: str,
    reason: str,
) -> None:
    with ServerProcess(tmp_path / "small.db", "--queues-max", "1") as broker:
        shell = Shell(broker.url, tmp_path)
        shell.subscribe()

        code, out, err = shell(*words, stdin=b"x\n")

        assert (code, out) == (65, b"")
        assert err.decode().startswith(f"mqks: the server refused {what}, ")
        assert err.decode().endswith(f": {reason}\n")
        assert err.count(b"\n") == 1


def test_a_mandatory_message_that_a_queue_gets(shell: Shell) -> None:
    shell.subscribe()

    assert shell("publish", "e", "-", "--mandatory", stdin=b"x\n") == (0, b"1 confirmed\n", b"")
    assert shell("publish", "e", "y", "--mandatory", "--id", "m") == (0, b"m\n", b"")
    assert shell.ready("q") == 2


# ------------------------------------------------------------------------------------- terminals


@contextmanager
def terminal() -> Iterator[tuple[int, Callable[[], bytes]]]:
    """A terminal's descriptor, and what has been shown on it so far."""
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read() -> None:
        with suppress(OSError):  # Nobody has it open any more.
            while data := os.read(ours, 10_000):
                shown.append(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield theirs, lambda: b"".join(shown)
    finally:
        os.close(theirs)
        reader.join(WAIT_S)
        os.close(ours)


def test_a_terminal_sees_how_far_it_is(shell: Shell, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.write_bytes(b"some line\n" * 200_000)

    with terminal() as (stderr, shown), given.open("rb") as stdin:
        with shell.start("publish", "e", "-", stdin=stdin, stderr=stderr) as process:
            assert process.communicate(timeout=WAIT_S)[0] == b"200000 confirmed\n"
        until(lambda: b"publishing" in shown() and b"%" in shown())


def test_a_terminal_gets_control_characters_escaped(shell: Shell) -> None:
    shell.subscribe()
    shell("publish", "e", "a\x1b[2Jb")

    with terminal() as (stdout, shown):
        with shell.start("consume", "q", "--count", 1, stdout=stdout) as process:
            assert process.wait(WAIT_S) == 0
        until(lambda: b"a\\x1b[2Jb" in shown())


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 3), (b"y\n", 0, 0)])
@pytest.mark.parametrize("words", [("purge", "q"), ("trim", "q", 1_000_000)])
def test_a_terminal_is_asked(
    shell: Shell, answer: bytes, code: int, left: int, words: tuple[object, ...]
) -> None:
    fill(shell, 3)
    ours, theirs = pty.openpty()
    try:
        with shell.start(*words, stdin=theirs) as process:
            os.write(ours, answer)
            _, err = process.communicate(timeout=WAIT_S)
    finally:
        os.close(ours)
        os.close(theirs)

    assert process.returncode == code
    assert b"Drop all ready messages of q" in err
    assert b"Traceback" not in err
    assert shell.ready("q") == left
