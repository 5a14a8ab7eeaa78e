"""`mqks top`: what it shows on a real terminal and in a pipe, and how it leaves.

The one rule: the terminal is a pty, and what matters is what is on it in the end.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from typing import Any, Self

import pytest

from mqks.commands import main
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

TOP = [sys.executable, "-m", "mqks", "top", "--interval", "0.2"]
# Makes standard input the terminal of its session, so that a Ctrl-C typed there is a SIGINT.
OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


class Terminal:
    """A command on a terminal of its own, of 24 lines."""

    def __init__(self, *command: str, columns: int = 80) -> None:
        self._ours, theirs = os.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._theirs = theirs
        self.before = termios.tcgetattr(theirs)
        self.seen = b""
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWN_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"},
            start_new_session=True,
        )

    @property
    def now(self) -> list[object]:
        """How the terminal is set."""
        return termios.tcgetattr(self._theirs)

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, pattern: bytes) -> bytes:
        """Read until this has come; what came from here on."""
        start = len(self.seen)
        limit_s = time.monotonic() + WAIT_S
        while not re.search(pattern, self.seen[start:], re.DOTALL):
            left_s = limit_s - time.monotonic()
            assert left_s > 0, f"there is no {pattern!r} in {self.seen[start:]!r}"
            if select.select([self._ours], [], [], left_s)[0]:
                self.seen += os.read(self._ours, 65536)
        return self.seen[start:]

    def end(self) -> int:
        """Read until the command gives the terminal back, as it may not come so far while nobody
        takes what it shows; its exit code."""
        self.until(re.escape(ALTERNATE_OFF))
        return self.process.wait(WAIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        os.close(self._ours)
        os.close(self._theirs)


def published(server: ServerProcess, queue: bytes, count: int) -> None:
    with LineClient(("127.0.0.1", server.port)) as client:
        client.send(b"s subscribe %s %s\n" % (queue, queue))
        client.send(b"".join(b"m%d publish %s x\n" % (n, queue) for n in range(count - 1)))
        assert client.ask(b"m publish --confirm %s x" % queue) == b"m ok "


def looks(*arguments: str) -> list[Any]:
    """What `mqks top --json` prints, while it finds the server quick enough."""

    def found() -> list[Any] | None:
        done = subprocess.run(
            [*TOP, "--json", *arguments], capture_output=True, text=True, timeout=WAIT_S, check=True
        )
        assert done.stderr == ""
        seen = [json.loads(line) for line in done.stdout.splitlines()]
        return seen if all(look["connected"] for look in seen) else None

    return until(found)


# --------------------------------------------------------------------------------- a terminal


@pytest.mark.parametrize("leave", [b"q", b"Q", b"\x03"], ids=["q", "Q", "Ctrl-C"])
def test_it_shows_the_server_and_gives_the_terminal_back(
    server: ServerProcess, leave: bytes
) -> None:
    published(server, b"mails", 12345)
    with Terminal(*TOP, "--url", server.url) as terminal:
        shown = terminal.until(rb"mails +12,345 +0 +0 +0 +0\.0 +0\.0")
        assert ALTERNATE_ON in shown
        assert b"12,345 ready" in shown
        assert terminal.now != terminal.before, "keys are not echoed meanwhile"
        terminal.press(b"x")
        terminal.until(rb"mails")

        terminal.press(leave)
        assert terminal.end() == 0
        assert terminal.now == terminal.before


def test_a_narrow_terminal_gets_fewer_columns(server: ServerProcess) -> None:
    published(server, b"mails", 12345)
    with Terminal(*TOP, "--url", server.url, columns=40) as terminal:
        shown = terminal.until(rb"mails +12,345 +0 +0\.0 +0\.0")
        assert b"consumers" not in shown.rsplit(b"queue", 1)[1]
        assert b"acknowledged" in shown
        terminal.press(b"q")
        assert terminal.end() == 0


def test_it_gives_the_terminal_back_when_it_is_terminated(server: ServerProcess) -> None:
    with Terminal(*TOP, "--url", server.url) as terminal:
        terminal.until(rb"connections")
        terminal.process.send_signal(signal.SIGTERM)

        assert terminal.end() == 128 + signal.SIGTERM
        assert terminal.now == terminal.before


@pytest.mark.slow
def test_it_outlives_the_server(server: ServerProcess) -> None:
    published(server, b"mails", 3)
    with Terminal(*TOP, "--url", server.url) as terminal:
        terminal.until(rb"mails +3 ")
        server.kill()
        terminal.until(rb"not connected")
        server.start()
        terminal.until(rb"mails +3 ")
        server.kill()
        terminal.until(rb"not connected")

        terminal.press(b"q")
        assert terminal.end() == 0
        assert terminal.now == terminal.before


def test_names_do_not_steer_the_terminal(server: ServerProcess) -> None:
    with LineClient(("127.0.0.1", server.port)) as client:
        assert client.ask(b"s subscribe --confirm evil\x1b[2J[red] e") == b"s ok "
    with Terminal(*TOP, "--url", server.url) as terminal:
        assert b"\x1b[2J[red]" not in terminal.until(re.escape(rb"evil\x1b[2J[red]"))
        terminal.press(b"q")
        assert terminal.end() == 0


# -------------------------------------------------------------------------------------- a pipe


def test_json_tells_one_object_for_each_look(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    first, second = looks("--url", server.url, "--count", "2")

    assert first["connected"] is second["connected"] is True
    assert first["totals"]["messages_ready"] == 5
    assert first["rates_per_s"]["received"] is None, "there is nothing yet to compare with"
    assert second["rates_per_s"]["received"] == 0
    assert first["journal"]["messages"] == 5
    [queue] = second["queues"]
    assert {key: queue[key] for key in ("name", "ready", "in_per_s", "out_per_s")} == {
        "name": "mails",
        "ready": 5,
        "in_per_s": 0,
        "out_per_s": 0,
    }


def test_how_far_an_archive_is(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    [earlier] = looks("--url", server.url, "--count", "1")
    assert (earlier["queues"][0]["archive_lag"], earlier["queues"][0]["archived_seq"]) == (
        None,
    ) * 2
    with LineClient(("127.0.0.1", server.port)) as client:
        assert client.ask(b"r range --archived=3 mails").startswith(b"r ok ")
    *_, later = looks("--url", server.url, "--count", "2")
    [queue] = later["queues"]
    assert {key: queue[key] for key in ("archived_seq", "archive_lag", "archived_per_s")} == {
        "archived_seq": 3,
        "archive_lag": 3,
        "archived_per_s": 0,
    }
    with Terminal(*TOP, "--url", server.url) as terminal:
        terminal.until(rb"archived/s")
        terminal.press(b"q")
        assert terminal.end() == 0


def test_rates_are_what_happened_between_two_looks(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    with (
        subprocess.Popen([*TOP, "--json", "--url", server.url], stdout=subprocess.PIPE) as process,
        LineClient(("127.0.0.1", server.port)) as consumer,
    ):
        assert process.stdout is not None
        try:
            earlier_s = json.loads(process.stdout.readline())["totals"]["uptime_s"]
            consumer.send(b"c consume mails\n")
            assert [consumer.line()[:5] for _ in range(5)] == [b"c ok "] * 5
            published(server, b"mails", 7)
            assert [consumer.line()[:5] for _ in range(7)] == [b"c ok "] * 7
            received = came = gone = 0.0
            while gone < 11.5:
                seen = json.loads(process.stdout.readline())
                [queue] = seen["queues"]
                passed_s = seen["totals"]["uptime_s"] - earlier_s
                received += seen["rates_per_s"]["received"] * passed_s
                came += queue["in_per_s"] * passed_s
                gone += queue["out_per_s"] * passed_s
                earlier_s = seen["totals"]["uptime_s"]
        finally:
            process.kill()
    assert (round(received), round(came), round(gone)) == (7, 7, 12)


def test_queues_come_in_the_order_asked_for_and_no_more_than_asked(server: ServerProcess) -> None:
    for name, count in ((b"a", 2), (b"b", 9), (b"c", 5)):
        published(server, name, count)

    def names(*arguments: str) -> list[str]:
        [seen] = looks("--url", server.url, "--count", "1", *arguments)
        return [queue["name"] for queue in seen["queues"]]

    assert names() == ["b", "c", "a"]
    assert names("--sort", "name") == ["a", "b", "c"]
    assert names("--rows", "1") == ["b"]


def test_more_queues_than_a_page_are_all_looked_at(server: ServerProcess) -> None:
    with LineClient(("127.0.0.1", server.port)) as client:
        client.send(b"".join(b"s subscribe q%04d e%d\n" % (n, n) for n in range(2_500)))
        assert client.ask(b"m publish --confirm e2499 x") == b"m ok "

    [seen] = looks("--url", server.url, "--count", "1", "--rows", "10000")

    assert len(seen["queues"]) == 2_500
    assert seen["queues"][0]["name"] == "q2499"


def test_a_pipe_without_json_gets_plain_text(server: ServerProcess) -> None:
    published(server, b"mails", 5)

    done = subprocess.run(
        [*TOP, "--url", server.url, "--count", "1"], capture_output=True, text=True, check=True
    )

    assert "\x1b" not in done.stdout
    assert re.search(r"^mails +5 +0 +0 ", done.stdout, re.M)


def test_a_reader_that_has_gone_is_no_drama(server: ServerProcess) -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with os.fdopen(writer, "wb") as gone:
        done = subprocess.run(
            [*TOP, "--json", "--url", server.url],
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=WAIT_S,
        )

    assert (done.returncode, done.stderr) == (1, b"")


def test_a_server_that_is_not_there_ends_it_with_69(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", "mqks://127.0.0.1:1", "--count", "1"]) == 69
    assert capsys.readouterr().err.startswith("mqks: ")
