"""The commands that talk to a server, from outside: real processes, pipes and terminals.

The one rule: what is waited for can be seen, and each wait has a limit.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import IO

import pytest

from mqks import blocking
from mqks.commands import main
from tests.commands.console import MQKS, Console, Terminal
from tests.kit.proxy import Peer
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until


def is_unused(url: str) -> bool:
    """Whether the server knows of no consumer any more, and has back what they held."""
    ready = "sum(len(waiting) for waiting in state.queues.values())"
    unsettled = "state.queued - state.consumed"
    with blocking.connect(url) as client:
        held = client.evaluate(f"[len(state.queues_by_consumer_ids), {unsettled} - {ready}]")
    return held == "[0, 0]"


# --------------------------------------------------------------------------------- one message


def test_a_file_goes_there_and_back(shell: Console) -> None:
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
    assert shell.ready() == 0
    shell("publish", "e", "a\tb\n", "--id", "../0")
    code, told, _ = shell("consume", "q", "--count", "1", "--out", "there/deep")
    assert (shell.directory / told.decode().strip()).read_bytes() == b"a\tb\n"
    assert (shell.directory / names[0]).read_bytes() == sent[0]
    assert shell("publish", "e", "--file", "not-there.bin")[0] != 0


@pytest.mark.parametrize(
    "words",
    [
        *("publish e x --once", "publish e - --once --id x", "publish e x --id-prefix x"),
        *("publish e x --mandatory --no-confirm", "publish e x --timeout nan", "publish"),
        *("publish e", "publish e x --file y", "consume q --out x --json"),
        *("consume q --count 1 --auto-ack", "consume q --timeout 0", "requeue c"),
        *("requeue c m --all", "subscribe q", "trim q x", "publish e x --at noon"),
        *("publish e x --meta k", "publish e x --meta k=1 --meta k=2"),
        *("consume q --prefetch 1 --auto-ack", "consume q --meta", "cancel q", "promote q m --all"),
        *("frobnicate", "serve --frobnicate", "serve --port", "inspect error"),
    ],
)
def test_what_makes_no_sense_ends_with_64(words: str) -> None:
    assert main(words.split()) == 64


# ---------------------------------------------------------------------------------- many lines


def test_many_lines_through_and_through(shell: Console, tmp_path: Path) -> None:
    lines = b"".join(b"%d and some more\n" % number for number in range(30_000))
    given, got = tmp_path / "given", tmp_path / "got"
    given.write_bytes(lines)
    shell.subscribe()

    with given.open("rb") as stdin, shell.start("publish", "e", "-", stdin=stdin) as publish:
        assert publish.communicate() == (b"30000 confirmed\n", b"")
    words = "consume", "q", "--count", 30_000, "--prefetch", 0
    with got.open("wb") as out, shell.start(*words, stdout=out) as consume:
        assert consume.communicate() == (b"", b"")
    assert (publish.returncode, consume.returncode) == (0, 0)
    assert got.read_bytes() == lines
    assert shell.ready() == 0


def test_lines_are_published_as_they_come(shell: Console) -> None:
    shell.subscribe()
    with (
        shell.start("publish", "e", "-") as publish,
        shell.start("consume", "q") as consume,
    ):
        for line in (b"one\n", b"two\n"):
            publish.stdin.write(line)
            assert consume.stdout.readline() == line
        publish.stdin.close()
        consume.send_signal(signal.SIGTERM)


def test_a_count_takes_what_it_prints(shell: Console) -> None:
    """Others are not delivered: that would count, and they would die of it."""
    shell.subscribe()
    shell("set-queue", "q", "--deliveries", 2)
    shell("publish", "e", "-", stdin=b"\n".join(b"%d" % n for n in range(30)))
    printed = [shell("consume", "q", "--count", count)[1] for count in (1, 1, 1, 12, 1)]
    assert b"".join(printed).split() == [b"%d" % n for n in range(16)]
    rows = shell.rows("inspect", "messages", "q")
    assert [row["retry"] for row in rows] == [0] * 14


def test_bytes_pass_untouched(shell: Console) -> None:
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


def test_a_line_that_is_too_long_is_told_by_its_number(shell: Console) -> None:
    shell.subscribe()
    code, out, err = shell("publish", "e", "-", stdin=b"a\nb\n" + b"x" * 2_000_000)
    assert (code, out, err.count(b"\n")) == (65, b"", 1)
    assert err.startswith(b"mqks: line 3 is longer than")
    assert shell.rest() == [b"a", b"b"]


ERROR_ID = "6741f3c2a90be4d5c8123456"


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A server that does not like bananas."""
    while line := await reader.readline():
        request_id = line.split(b" ")[0]
        status = b"error " + ERROR_ID.encode() if b"banana" in line else b"ok "
        writer.write(request_id + b" " + status + b"\n")


def test_a_line_that_the_server_refuses_is_told_by_its_number(tmp_path: Path) -> None:
    with Peer(refuse) as peer:
        code, out, err = Console(tmp_path, peer.url)("publish", "e", "-", stdin=b"a\nbanana\nc\n")
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
        code, out, err = Console(tmp_path, peer.url)(*words, "--timeout", 0.2, stdin=b"a\n")
    assert (code, out, err) == (
        75,
        b"",
        b"mqks: no reply before the timeout; whether the request was executed is unknown\n",
    )


# ------------------------------------------------------------------------------------ consuming


def fill(shell: Console, count: int) -> list[bytes]:
    """Messages of a hundred bytes in q."""
    lines = [b"%d %b" % (number, b"x" * 100) for number in range(count)]
    with blocking.connect(shell.url) as client:
        client.subscribe("q", ["e"])
        client.publish_many([("e", line) for line in lines])
    return lines


def test_count_leaves_the_rest_in_the_queue(shell: Console) -> None:
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


def test_auto_ack(shell: Console) -> None:
    lines = fill(shell, 1000)
    with shell.start("consume", "q", "--auto-ack") as process:
        assert [process.stdout.readline().rstrip(b"\n") for _ in lines] == lines
        process.kill()
    assert shell.ready() == 0


def test_events_rule_and_add(shell: Console) -> None:
    consume = ("consume", "q", "e1", "--add", "e2", "--add", "e3", "--create")
    rule = ("--delete-queue-when-unused", 0)
    with shell.start(*consume, *rule) as process, blocking.connect(shell.url) as client:
        until(lambda: client.evaluate("sorted(state.queues)") == '["q"]')
        for event in ("e1", "e2", "e3", "e4"):
            client.publish(event, event, confirm=True)
        assert [process.stdout.readline() for _ in range(3)] == [b"e1\n", b"e2\n", b"e3\n"]
        process.send_signal(signal.SIGINT)
        process.wait(WAIT_S)
        assert client.evaluate("sorted(state.queues)") == "[]"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_it_cleanly(shell: Console, number: signal.Signals, code: int) -> None:
    fill(shell, 1)
    with shell.start("consume", "q") as process:
        assert process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err) == (code, b"", b"")
    assert shell.ready() == 0, "what was written is acked"


def test_a_signal_ends_it_although_nobody_reads(shell: Console) -> None:
    fill(shell, 5_000)
    with shell.start("consume", "q") as process:
        assert process.stdout.read(10)
        out = process.stdout
        until(lambda: unread(out) > 1000)  # It is full: the command is stuck.
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 143
        assert process.stderr.read() == b""


def unread(pipe: IO[bytes]) -> int:
    """Bytes that wait in a pipe."""
    (count,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"    "))
    return int(count)


def test_a_reader_that_goes_ends_it_quietly(shell: Console) -> None:
    lines = fill(shell, 5_000)
    with shell.start("consume", "q") as process:
        assert process.stdout.read(10) == lines[0][:10]
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 1
    until(lambda: is_unused(shell.url))
    left = {int(line.split()[0]) for line in shell.rest()}
    assert left == {*range(len(lines))}, "what was not read is still there"


@pytest.mark.slow
def test_a_reader_that_is_not_there_ends_anything_quietly(shell: Console) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    # What is buffered is written at the very end.
    environment = os.environ | shell.environ | {"PYTHONUNBUFFERED": ""}
    with os.fdopen(writer, "wb") as gone:
        for words in ("eval 1", "export", "top --json", "serve --help"):
            command = [*MQKS, *words.split()]
            done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, env=environment)
            assert (done.returncode, done.stderr) == (1, b""), words


def test_head_ends_it_although_no_more_messages_come(shell: Console) -> None:
    fill(shell, 1)
    command = f"{sys.executable} -m mqks consume q | head -1"
    done = subprocess.run(
        command, shell=True, env=shell.environ, capture_output=True, timeout=WAIT_S
    )
    assert done.stdout.startswith(b"0 xxx")
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_server_that_restarts_is_found_again(shell: Console, server: ServerProcess) -> None:
    shell.subscribe()
    with shell.start("consume", "q", "--count", 2) as process:
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


def test_a_client_takes_durations_as_commands_do(shell: Console) -> None:
    with blocking.connect(shell.url) as client:
        client.set_queue("q", ttl_s="1h30m")  # type: ignore[arg-type]
        assert client.stats("queue", "q")["policy"]["ttl_s"]["value"] == 5400


# ------------------------------------------------------------------------------ no server, errors


@pytest.mark.parametrize(
    "words",
    [
        *("ping", "eval 1", "publish e x", "publish e -", "consume q", "requeue c --all"),
        *("subscribe q e", "rebind q e", "purge q --yes", "trim q 1 --yes", "delete-queue q --yes"),
        *("top --count 1", "inspect queues", "inspect errors", "bench stream"),
    ],
)
def test_without_a_server_it_ends_with_69_at_once(
    capsys: pytest.CaptureFixture[str], words: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # Taken, but nobody listens.
        port = taken.getsockname()[1]
        code = main([*words.split(), "--url", f"mqks://127.0.0.1:{port}"])
    # Had it tried again, it would say for how long.
    assert code == 69
    assert capsys.readouterr() == ("", f"mqks: no server at 127.0.0.1:{port}: Connection refused\n")


def test_a_server_that_never_answers_is_waited_for_as_long_as_asked(alone: Console) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        alone.play(
            """
            $ mqks ping --url mqks://ADDRESS --timeout 0.2
            mqks: no server at ADDRESS: not connected within 0.2 s: no answer yet
            [69]
            """,
            ADDRESS=f"127.0.0.1:{silent.getsockname()[1]}",
        )


def test_ping(shell: Console) -> None:
    address = shell.url.removeprefix("mqks://")
    for url in (shell.url, f"mqks://127.0.0.1:1,{shell.url}"):
        assert shell.out("ping", "--url", url).startswith(f"{address} answered in ")
        [found] = shell.rows("ping", "--url", url)
        assert found["server"] == address
        assert 0 < found["ms"] < 60_000


def test_ping_follows_the_settings(shell: Console, tmp_path: Path) -> None:
    port = shell.url.rpartition(":")[2]
    console = Console(tmp_path, MQKS_PORT=port, MQKS_HOST="0.0.0.0", MQKS_INSECURE="true")
    assert console.out("ping").startswith(f"127.0.0.1:{port} answered in ")
    (tmp_path / "mqks.toml").write_text(f"port = {port}\n")
    assert Console(tmp_path).out("ping").startswith(f"127.0.0.1:{port} answered in ")
    assert Console(tmp_path).out("publish", "e", "x", "--no-mandatory").endswith("\n")


def test_a_refusal_tells_the_reason_where_the_database_is_at_hand(shell: Console, db: Path) -> None:
    # Who is not let in is told nothing.
    shell.environ |= {"MQKS_URL": shell.url.replace("//", "//no-such-token@"), "MQKS_DB": "none.db"}
    shell.play("""
        $ mqks ping
        mqks: the server refused the credentials, error …; see on the server's machine: …
        [65]
        """)
    shell.environ["MQKS_DB"] = str(db)
    shell.play("""
        $ mqks ping
        mqks: …: wrong credentials
        [65]
        """)


# ------------------------------------------------------------------------------------- terminals


def test_a_terminal_sees_how_far_it_is(shell: Console, tmp_path: Path) -> None:
    shell.subscribe()
    (tmp_path / "given").write_bytes(b"some line\n" * 20_000)
    command = *MQKS, "publish", "e", "-", "--url", shell.url
    with (tmp_path / "given").open() as given, Terminal(*command, stdin=given.fileno()) as terminal:
        assert terminal.end() == 0
    assert re.search(rb"publishing.*%.*20000 confirmed", terminal.seen, re.S)


def test_a_terminal_gets_control_characters_escaped(shell: Console) -> None:
    shell.subscribe()
    shell("publish", "e", "a\x1b[2Jb")
    with Terminal(*MQKS, "consume", "q", "--count", "1", "--url", shell.url) as terminal:
        assert terminal.end() == 0
    assert b"a\\x1b[2Jb" in terminal.seen


@pytest.mark.parametrize(("answer", "code", "left"), [(b"n\n", 1, 3), (b"y\n", 0, 0)])
@pytest.mark.parametrize("words", [("purge", "q"), ("trim", "q", "1000000")])
def test_a_terminal_is_asked(
    shell: Console, answer: bytes, code: int, left: int, words: tuple[str, ...]
) -> None:
    fill(shell, 3)
    with Terminal(*MQKS, *words, "--url", shell.url) as terminal:
        terminal.until(b"Drop all ready messages of q")
        terminal.press(answer)
        assert terminal.end() == code
    assert b"Traceback" not in terminal.seen
    assert shell.ready() == left
