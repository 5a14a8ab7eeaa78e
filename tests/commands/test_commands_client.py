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
import time
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from typing import IO, Any, cast

import pytest

from mqks import ConsumerReplaced, blocking
from mqks.commands import main
from mqks.protocol.requests import Backoff
from mqks.settings import load
from tests.commands.console import MQKS, Console, Terminal
from tests.kit.line_client import LineClient
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


def test_messages_there_and_back(shell: Console) -> None:
    shell.play(r"""
        $ mqks subscribe q e
        $ mqks publish e 'hello  world ' --id mine --mandatory
        mine
        $ mqks consume q --count 1 --json
        {"id": "mine", "event": "e", "retry": 0, "data": "hello  world "}
        $ mqks eval "len(state.queues['q'])"
        0
        $ mqks publish e first --id once --once --json
        {"id": "once", "confirmed": true}
        $ mqks publish e again --id once --once
        once
        $ printf 'a\n\nb' | mqks publish e - --no-confirm --id-prefix p
        3 sent
        $ mqks consume q --count 4 --json
        {"id": "once", … "data": "first"}
        {"id": "p-1", … "data": "a"}
        {"id": "p-2", … "data": ""}
        {"id": "p-3", … "data": "b"}
        $ printf 'a\nb\n' | mqks publish e - --once --id-prefix file --mandatory
        2 confirmed
        $ printf 'a\nb\nc\n' | mqks publish e - --once --id-prefix file --json
        {"messages": 3, "confirmed": true}
        $ mqks consume q --count 3
        a
        b
        c
        $ mqks consume q --timeout 0.2
        """)


def test_a_message_for_one_queue(shell: Console) -> None:
    """Whatever is bound to its event."""
    shell.play(r"""
        $ mqks subscribe orders e
        $ mqks subscribe audit e
        $ mqks publish e one --to orders --id a
        a
        $ printf 'two\nthree\n' | mqks publish e - --to orders
        2 confirmed
        $ mqks peek orders
        one
        two
        three
        $ mqks peek audit
        $ mqks publish e four --to ordrs
        mqks: there is no queue ordrs; did you mean orders?
        [65]
        """)


def test_what_is_due_first_is_shown(shell: Console) -> None:
    shell.subscribe()
    for data, delay in (("later", "2h"), ("sooner", "1h"), ("last", "3h")):
        assert shell("publish", "e", data, "--delay", delay)[0] == 0
    assert shell("peek", "q", "--soonest", "--limit", "2") == (0, b"sooner\nlater\n", b"")


def test_a_unique_message(shell: Console) -> None:
    shell.subscribe()
    words = "publish", "e", "data", "--unique"
    assert shell(*words, "a b,on=replace", "--id", "m1") == (0, b"m1\n", b"")
    assert shell(*words, "a b", "--id", "m2") == (0, b"m2 is a duplicate of m1\n", b"")
    replaces = *words, "a b,on=replace,for=1h,until=acked"
    assert shell(*replaces, "--id", "m3") == (0, b"m3 replaced m1\n", b"")
    code, told, _ = shell(*words, "a b", "--id", "m4", "--json")
    assert (code, json.loads(told)["duplicate_of"]) == (0, "m3")
    assert shell(*words, "k,for=ever")[0] == 65
    code, told, _ = shell("inspect", "messages", "q", "--json")
    assert [json.loads(row)["unique"] for row in told.splitlines()] == [
        "a%20b,until=acked,for=3600"
    ]


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
        "publish e x --once",
        "publish e - --once --id x",
        "publish e x --id-prefix x",
        "publish e x --mandatory --no-confirm",
        "publish e x --timeout nan",
        "publish",
        "publish e",
        "publish e x --file y",
        "consume q --out x --json",
        "consume q --count 1 --auto-ack",
        "consume q --timeout 0",
        "requeue c",
        "requeue c m --all",
        "subscribe q",
        "trim q x",
        "publish e x --at noon",
        "publish e x --meta k",
        "publish e x --meta k=1 --meta k=2",
        "consume q --prefetch 1 --auto-ack",
        "consume q --meta",
        "cancel q",
        "promote q m --all",
        "frobnicate",
        "serve --frobnicate",
        "serve --port",
        "inspect error",
    ],
)
def test_what_makes_no_sense_ends_with_64(words: str) -> None:
    assert main(words.split()) == 64


# ---------------------------------------------------------------------------------- many lines


def test_a_hundred_thousand_lines_through_and_through(shell: Console, tmp_path: Path) -> None:
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
    assert shell.ready() == 0


def test_lines_are_published_as_they_come(shell: Console) -> None:
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


@pytest.mark.parametrize(
    ("stdin", "fault"),
    [
        (b"a\nb\nc\td\ne\n", b"line 3 has a tab"),
        (b"a\nb\nc\r\r\n", b"line 3 ends with a carriage return"),
        (b"a\nb\n" + b"x" * 2_000_000, b"line 3 is longer than"),
    ],
)
def test_a_line_that_cannot_be_sent_is_told_by_its_number(
    shell: Console, stdin: bytes, fault: bytes
) -> None:
    shell.subscribe()

    code, out, err = shell("publish", "e", "-", stdin=stdin)

    assert (code, out) == (65, b"")
    assert err.startswith(b"mqks: " + fault)
    assert err.count(b"\n") == 1
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
        assert process.stdout is not None
        assert [process.stdout.readline().rstrip(b"\n") for _ in lines] == lines
        process.kill()

    assert shell.ready() == 0


def test_consume_creates_no_queue_unless_told_to(shell: Console) -> None:
    shell.play("""
        $ mqks consume ordrs --timeout 5
        mqks: there is no queue ordrs; --create creates it
        [65]
        $ mqks consume ordrs order.new --timeout 5
        mqks: there is no queue ordrs; --create creates it
        [65]
        $ mqks consume ordrs --add-mask 'order.*' --timeout 5
        mqks: there is no queue ordrs; --create creates it
        [65]
        $ mqks eval '[len(state.queues), len(state.events_by_queues)]'
        [0, 0]
        $ mqks consume orders order.new --create --timeout 0.1
        $ mqks consume ordrs order.new
        mqks: … did you mean orders?…
        [65]
        $ mqks eval "len(state.queues['orders'])"
        0
        """)


def test_naming_events_adds_bindings_and_replace_replaces(shell: Console) -> None:
    for command, bindings, code in (
        ("subscribe q e1", "e1", 0),
        ("subscribe q e2 --add-mask a.*", "a.* e1 e2", 0),
        ("consume q --timeout 0.1 e3", "a.* e1 e2 e3", 0),
        ("rebind q e4", "a.* e1 e2 e3 e4", 0),
        ("consume q --timeout 0.1", "a.* e1 e2 e3 e4", 0),
        ("consume q --timeout 0.1 e5 --replace --add e6", "e5 e6", 0),
        ("subscribe q e7 --replace", "e7", 0),
        ("rebind q e8 --replace", "e8", 0),
        ("rebind q", "e8", 64),
        ("consume q --replace", "e8", 65),
        ("rebind q --replace --yes", "", 0),
    ):
        ended, out, err = shell(*command.split())
        assert (ended, out, bool(err)) == (code, b"", bool(code)), command
        rows = shell.rows("inspect", "bindings")
        assert sorted(row["event"] or row["mask"] for row in rows) == bindings.split()


def test_events_rule_and_add(shell: Console) -> None:
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
def test_signals_end_it_cleanly(shell: Console, number: signal.Signals, code: int) -> None:
    fill(shell, 1)
    with shell.start("consume", "q") as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)

    assert (process.returncode, out, err) == (code, b"", b"")
    assert shell.ready() == 0, "what was written is acked"


def test_a_signal_ends_it_although_nobody_reads(shell: Console) -> None:
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


def test_a_reader_that_goes_ends_it_quietly(shell: Console) -> None:
    lines = fill(shell, 50_000)
    with shell.start("consume", "q", bufsize=0) as process:
        assert process.stdout is not None
        assert process.stdout.read(10) == lines[0][:10]
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""
        assert process.wait(WAIT_S) == 1

    until(lambda: is_unused(shell.url))
    left = {int(line.split()[0]) for line in shell.rest()}
    assert left == {*range(len(lines))}, "what was not read is still there"


def test_a_reader_that_is_not_there_ends_anything_quietly(shell: Console) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    shell.environ["PYTHONUNBUFFERED"] = ""  # What is buffered is written at the very end.

    with os.fdopen(writer, "wb") as gone:
        for words in ("eval 1", "export", "inspect stats", "ping", "top --json", "serve --help"):
            with shell.start(*words.split(), stdout=gone) as process:
                assert process.communicate(timeout=WAIT_S)[1] == b""
            assert process.returncode == 1


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


def test_requeue_gives_messages_back(shell: Console) -> None:
    with (
        blocking.connect(shell.url) as client,
        client.consume("q", ["e"]) as consumer,
    ):
        for name in ("a", "b", "c"):
            client.publish("e", name, id=name)
        first, *_ = [consumer.receive(WAIT_S) for _ in range(3)]
        consumer_id = first.consumer_id.decode()

        assert shell("requeue", consumer_id, "b", "--pause", 0) == (0, b"", b"")
        again = consumer.receive(WAIT_S)
        assert (again.id, again.retry) == ("b", 1)
        told = json.loads(shell("requeue", consumer_id, "--all", "--pause", 0, "--json")[1])
        assert told == {"consumer": consumer_id, "messages": None}
        assert sorted(consumer.receive(WAIT_S).id for _ in range(3)) == ["a", "b", "c"]


def test_what_is_requeued_goes_to_others(shell: Console, server: ServerProcess) -> None:
    with LineClient(server.address) as stuck, LineClient(server.address) as other:
        assert stuck.ask(b"c consume --confirm q e --manual-ack") == b"c ok "
        stuck.send(b"m publish e x\n")
        assert stuck.line() == b"c ok m event=e x"
        assert shell("requeue", "c", "--all") == (0, b"", b"")
        other.send(b"d consume --confirm q --manual-ack\n")
        assert [other.line() for _ in range(2)] == [b"d ok ", b"d ok m event=e,retry=1 x"]
        assert stuck.ask(b"p ping x") == b"p ok x"


def test_a_consumer_is_ended_and_its_client_told(shell: Console) -> None:
    with (
        blocking.connect(shell.url) as client,
        client.consume("q", ["e"]) as stuck,
        client.consume("q") as other,
    ):
        client.publish("e", "x", confirm=True)
        got = stuck.receive(WAIT_S)
        assert shell("delete-consumer", got.consumer_id.decode()) == (0, b"", b"")
        with pytest.raises(ConsumerReplaced, match="has ended this consumer"):
            stuck.receive(WAIT_S)
        assert other.receive(WAIT_S).retry == 1
        code, _, told = shell("delete-consumer", got.consumer_id.decode())
        assert (code, b"there is no consumer" in told) == (65, True)


def test_connections_are_closed(shell: Console, server: ServerProcess) -> None:
    with ExitStack() as stack:
        are_closed(shell, server, [stack.enter_context(LineClient(server.address)) for _ in "abc"])


def are_closed(shell: Console, server: ServerProcess, clients: list[LineClient]) -> None:
    for name, client in enumerate(clients):
        queue = b"q" if name else b"other"
        assert client.ask(b"c%d consume --confirm %b e" % (name, queue)) == b"c%d ok " % name
    shell.play("""
        $ mqks close --queue q
        2 connections closed
        $ mqks close 999
        mqks: there is no connection 999
        [65]
        $ mqks close --user nobody
        0 connections closed
        """)
    for client in clients[1:]:
        assert client.line().startswith(b"- error ")
    until(lambda: len(clients[0].stats("connections")) == 1)
    [row] = clients[0].stats("connections")
    assert json.loads(shell("close", row["id"], "--json")[1]) == {"closed": [row["id"]]}
    assert clients[0].line().startswith(b"- error ")
    with LineClient(server.address) as client:
        reasons = [row["reason"] for row in client.stats("errors")]
        assert all("closed by 127.0.0.1" in reason for reason in reasons)
        actions = [row["action"] for row in client.stats("audit")]
        assert actions[-3:] == ["close_connection"] * 3


def test_lines_that_no_queue_gets_are_refused(shell: Console) -> None:
    code, out, err = shell("publish", "nobody", "-", stdin=b"a\nb\n")
    assert (code, out) == (65, b"")
    assert b"the server refused line 1, 0 others are confirmed" in err
    assert shell("publish", "nobody", "-", "--no-mandatory", stdin=b"a\nb\n")[1] == b"2 confirmed\n"


# --------------------------------------------------------------------------------------- queues


def test_the_life_of_a_queue(shell: Console) -> None:
    shell.play("""
        $ mqks subscribe q a.1 a.2 b
        $ mqks rebind q --remove b --remove-mask 'a.*' --add c --add d
        $ mqks publish a.1 0 --id m0
        mqks: …no queue is bound to 'a.1'…
        [65]
        $ mqks publish a.1 0 --id m0 --no-mandatory
        m0
        $ mqks publish b 1 --id m1 --no-confirm
        m1
        $ mqks publish c 2 --id m2
        m2
        $ mqks publish d 3 --id m3
        m3
        $ mqks publish d 4 --id m4
        m4
        $ mqks peek q
        2
        3
        4
        $ mqks trim q 2
        1 message trimmed
        $ mqks peek q
        3
        4
        $ mqks purge q
        2 messages purged
        $ mqks purge q --json
        {"queue": "q", "purged": 0}
        $ mqks trim q 2 --json
        {"queue": "q", "seq": 2, "trimmed": 0}
        $ mqks peek q
        $ mqks rebind q --replace --yes
        $ mqks publish d x --mandatory
        mqks: …no queue is bound to 'd'
        [65]
        $ mqks delete-queue q --when-unused 1000
        $ mqks eval 'sorted(state.queues)'
        ["q"]
        $ mqks delete-queue q
        $ mqks eval 'sorted(state.queues)'
        []
        """)


def test_scheduled_messages_and_dead_letters(shell: Console) -> None:
    shell.play("""
        $ mqks set-queue q --create --retries 1 --dead-letters dead
        the queue dead did not exist: it was created
        $ mqks subscribe q e f.a
        $ mqks publish e 1 --id m1 --delay 3600
        m1
        $ mqks publish e 2 --id m2 --at 2200-01-31T09:00+01:00 --meta 'k=v=1,&'
        m2
        $ mqks publish f.a 3 --id m3 --at 7200000000 --ttl 0.5 --meta a=
        m3
        $ mqks publish f.a 4 --id m4 --delay 0
        m4
        $ mqks inspect messages q --scheduled --json
        … "id": "m1", …
        … "id": "m2", … "due": "2200-01-31T08:00:00.000000+00:00"…
        … "id": "m3", …
        $ mqks inspect messages q --scheduled --after 4503599627370496 --limit 1 --json
        … "id": "m2", …
        $ mqks inspect messages q --json
        … "id": "m4", …
        … "id": "m1", …
        … "id": "m2", …
        … "id": "m3", …
        $ mqks cancel q m1 --yes
        1 message cancelled
        $ mqks promote q m2 nowhere
        1 message promoted
        $ mqks purge q --scheduled
        3 messages purged
        $ mqks cancel q --all
        0 messages cancelled
        $ mqks publish e 1 --id m1 --meta 'k=v=1,&' --meta a=
        m1
        $ mqks publish f.a 2 --id m2
        m2
        """)
    with blocking.connect(shell.url) as client, client.consume("q") as consumer:
        for _ in range(2):
            consumer.receive(WAIT_S).reject()
    shell.play("""
        $ mqks peek dead
        1
        2
        $ mqks redrive dead --event 'f.*' --limit 5
        1 message redriven
        $ mqks move q other --event f.a
        1 message moved
        $ mqks redrive dead --to other
        1 message redriven
        $ mqks peek other
        2
        1
        """)


def test_queues_are_paused_by_a_mask(shell: Console, server: ServerProcess) -> None:
    shell.play("""
        $ mqks subscribe orders.new e
        $ mqks subscribe orders.old e
        $ mqks subscribe other e
        $ mqks pause 'orders.*' --deliveries
        orders.new
        orders.old
        $ mqks pause other
        $ mqks resume 'o*'
        other
        """)
    code, _, error = shell("pause", "none.*")
    assert (code, error) == (65, b"mqks: no queue matches none.*\n")
    paused = {row["name"]: row["paused"] for row in shell.rows("inspect", "queues")}
    assert paused == {"orders.new": "deliveries", "orders.old": "deliveries", "other": None}
    shell.play("""
        $ mqks pause other --publishes
        $ mqks pause --publishes 'orders.*' wait
        orders.new
        orders.old
        """)
    paused = {row["name"]: row["paused"] for row in shell.rows("inspect", "queues")}
    assert {*paused.values()} == {"publishes", "publishes wait"}
    assert b"paused: publishes wait" in shell("inspect", "queues")[1]
    assert shell("pause", "other", "wait")[0] == 64


def test_schedules(shell: Console, server: ServerProcess, db: Path) -> None:
    zone = "--tz Europe/Berlin --missed one --jitter 5"
    shell.play(f"""
        $ mqks subscribe q e
        $ mqks schedule add report '0 3 * * *' e 'two  words' {zone} --meta k=v
        $ mqks schedule add beat e x --every 5m --ttl 9 --pause
        $ mqks schedule list
        …
        report 0 3 * * * Europe/Berlin e no …:00:00 - …
        """)
    beat, report = shell.rows("schedule", "list")
    assert (beat["every_s"], beat["paused"], beat["publish"]) == (300.0, True, "--ttl=9 e x")
    told = [report[key] for key in ("cron", "tz", "missed", "publish")]
    assert told == ["0 3 * * *", "Europe/Berlin", "one", "--meta=k=v e two  words"]
    assert shell.rows("inspect", "schedules") == [beat, report]

    shell.play("""
        $ mqks schedule run beat
        $ mqks inspect messages q --data --json
        … "id": "beat:…", … "data": "x"…
        $ mqks schedule resume beat
        $ mqks schedule pause report
        """)
    assert [row["paused"] for row in shell.rows("inspect", "schedules")] == [False, True]
    shell("schedule", "add", "u", "e", "x", "--every", "1h", "--unique", "k 1,on=replace")
    told = [shell.rows("schedule", "list")[2]["publish"]]
    for _ in range(2):
        shell("schedule", "run", "u")
        told.append(shell.rows("schedule", "list")[2]["last_queues"])
    assert told == ["--unique=k%201,on=replace e x", 1, 1]
    shell("schedule", "remove", "u", "--yes")
    shell.play("""
        $ mqks schedule remove report --yes
        $ mqks schedule remove beet
        mqks: …there is no schedule beet; did you mean beat?
        [65]
        $ mqks schedule run beet
        mqks: … there is no schedule 'beet'
        [65]
        $ mqks schedule add s e x --every 5 --unique k,until=acked,for=1h,on=replace
        $ mqks schedule remove s --yes
        $ mqks schedule add s e x --every 5 --unique k,x
        mqks: unique: 'k,x' is not KEY…
        [65]
        $ mqks schedule add s '61 * * * *' e x
        mqks: … is not a cron expression…
        [65]
        $ mqks schedule add s e x
        …give "CRON" EVENT DATA…
        [64]
        $ mqks schedule add s '* * * * *' e x --every 5
        …give "CRON" EVENT DATA…
        [64]
        $ mqks schedule add s e x --every '5 weeks'
        …is not a number of seconds…
        [64]
        $ mqks schedule add s e x --every nan
        …is not a number of seconds…
        [64]
        """)
    assert [row["name"] for row in shell.rows("schedule", "list")] == ["beat"]
    server.kill()
    del shell.environ["MQKS_URL"]
    assert [row["name"] for row in shell.rows("inspect", "schedules", "--db", db)] == ["beat"]


def test_attributes_are_told_as_json(shell: Console) -> None:
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
def test_a_name_is_one_word(shell: Console, words: list[str]) -> None:
    code, out, err = shell(*words)

    assert (code, out) == (65, b"")
    assert b" is not a valid name: " in err


# ------------------------------------------------------------------------------ no server, errors


@pytest.mark.parametrize(
    "words",
    [
        "ping",
        "eval 1",
        "publish e x",
        "publish e -",
        "consume q",
        "requeue c --all",
        "subscribe q e",
        "rebind q e",
        "purge q --yes",
        "trim q 1 --yes",
        "delete-queue q --yes",
        "top --count 1",
        "inspect queues",
        "inspect errors",
        "bench stream",
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


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://x", "the URL must start with mqks://, mqkss:// or mqks+unix://, as in mqks://"),
        ("mqks://a:1,b:2", "b:2 after the comma in the URL is no URL"),
        ("mqks://me:secret@a:1,b:2", "b:2 after the comma in the URL is no URL"),
        ("mqks://a:1,", "the URL has a comma after a:1 that no URL follows"),
        ("mqks://a:1,mqks://b:2,", "URL 2 of the list has a comma after b:2 that no URL follows"),
        ("mqks://a:1,mqks://b:x", "URL 2 of the list is invalid, or its port is not a number"),
    ],
)
def test_a_wrong_url_ends_with_78(url: str, why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ping", "--url", url]) == 78
    out, err = capsys.readouterr()
    assert (out, err.startswith(f"mqks: {why}"), "secret" in err) == ("", True, False)


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


def test_a_refusal_tells_the_reason_that_the_server_tells(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "small.db", "--queues-max", "1") as broker:
        Console(tmp_path, broker.url).play(r"""
            $ mqks subscribe q e
            $ mqks publish f x --mandatory
            mqks: the server refused the request, …: no queue is bound to 'f'
            [65]
            $ printf 'x\n' | mqks publish f - --mandatory
            mqks: the server refused line 1, …: no queue is bound to 'f'
            [65]
            $ mqks consume other --create
            mqks: the server refused the consumer, …: the limit of 1 queues is reached (queues_max)
            [65]
            $ mqks subscribe other e
            mqks: the server refused the request, …: the limit of 1 queues is reached (queues_max)
            [65]
            $ mqks eval nobody
            mqks: the server refused the request, …: unknown or not allowed: nobody
            [65]
            """)


# ------------------------------------------------------------------------------------- terminals


def test_a_terminal_sees_how_far_it_is(shell: Console, tmp_path: Path) -> None:
    shell.subscribe()
    (tmp_path / "given").write_bytes(b"some line\n" * 100_000)
    command = *MQKS, "publish", "e", "-", "--url", shell.url

    with (
        (tmp_path / "given").open() as given,
        Terminal(*command, stdin=given.fileno()) as terminal,
    ):
        assert terminal.end() == 0
    assert re.search(rb"publishing.*%.*100000 confirmed", terminal.seen, re.S)


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


def test_drain_tells_by_its_exit_code_whether_all_was_acked(
    shell: Console, server: ServerProcess
) -> None:
    with LineClient(server.address) as worker:
        worker.send(b"c consume mail e --manual-ack\nm publish e x\n")
        assert worker.line() == b"c ok m event=e x"
        shell.play(r"""
            $ mqks drain --timeout 0
            connection…user…client…consumer…queue…unacked
            …c…mail…1
            mqks: 1 message still held after 0 s
            [75]
        """)
        code, out, _ = shell("drain", "--timeout", "0", "--json")
        assert (code, json.loads(out)["holders"][0]["queue"]) == (75, "mail")
        assert worker.ask(b"a ack --confirm c m") == b"a ok "
        shell.play("""
            $ mqks drain
            $ mqks drain --timeout 0
        """)
        code, _, err = shell("ping")
        assert (code, b"refused by the server: the server drains" in err) == (69, True)
        shell.play("""
            $ mqks drain --off
            $ mqks ping
            … answered in …
        """)
