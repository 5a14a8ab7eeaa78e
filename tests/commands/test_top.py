"""`mqks top`: what it shows on a real terminal and in a pipe, and how it leaves.

The one rule: the terminal is a pty, and what matters is what is on it in the end.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.commands.console import MQKS, Terminal
from tests.kit import forks
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S, until

TOP = [*MQKS, "top", "--interval", "0.2"]
ALTERNATE_ON, ALTERNATE_OFF = b"\x1b[?1049h", b"\x1b[?1049l"


@contextmanager
def top(server: ServerProcess, leave: bytes = b"q", columns: int = 80) -> Iterator[Terminal]:
    """It runs on a terminal, which it gives back as it was."""
    with Terminal(*TOP, "--url", server.url, columns=columns) as terminal:
        yield terminal
        terminal.press(leave)
        # It may not come so far while nobody takes what it shows.
        terminal.until(re.escape(ALTERNATE_OFF))
        assert terminal.process.wait(WAIT_S) == 0
        assert terminal.now == terminal.before


def published(server: ServerProcess, queue: bytes, count: int) -> None:
    with LineClient(server.address) as client:
        client.send(b"s subscribe %s %s\n" % (queue, queue))
        client.send(b"".join(b"m%d publish %s x\n" % (n, queue) for n in range(count - 1)))
        assert client.ask(b"m publish --confirm %s x" % queue) == b"m ok "


def looks(*arguments: str) -> list[Any]:
    """What `mqks top --json` prints, while it finds the server quick enough."""

    def found() -> list[Any] | None:
        code, out, err = forks.run([*TOP, "--json", *arguments])
        assert (code, err) == (0, b"")
        seen = [json.loads(line) for line in out.splitlines()]
        return seen if all(look["connected"] for look in seen) else None

    return until(found)


# --------------------------------------------------------------------------------- a terminal


@pytest.mark.parametrize("leave", [b"q", b"Q", b"\x03"], ids=["q", "Q", "Ctrl-C"])
def test_it_shows_the_server_and_gives_the_terminal_back(
    server: ServerProcess, leave: bytes
) -> None:
    published(server, b"mails", 12345)
    with top(server, leave) as terminal:
        shown = terminal.until(rb"mails +12,345 +\S+ +0 +0\.0 +0\.0 +0")
        assert ALTERNATE_ON in shown
        assert re.search(rb"\x1b\[[\d;]+mno consumer", shown), "states have colours here"
        assert b"12,345 ready" in shown
        assert terminal.now != terminal.before, "keys are not echoed meanwhile"
        terminal.press(b"x")
        terminal.until(rb"mails")


def test_a_narrow_terminal_gets_fewer_columns(server: ServerProcess) -> None:
    published(server, b"mails", 12345)
    with top(server, columns=40) as terminal:
        shown = terminal.until(rb"mails +12,345 +0\.0 +0\.0")
        assert b"consumers" not in shown.rsplit(b"ready", 1)[1]
        assert b"acked" in shown


def test_it_gives_the_terminal_back_when_it_is_terminated(server: ServerProcess) -> None:
    with Terminal(*TOP, "--url", server.url) as terminal:
        terminal.until(rb"connections")
        terminal.process.send_signal(signal.SIGTERM)
        terminal.until(re.escape(ALTERNATE_OFF))
        assert terminal.process.wait(WAIT_S) == 128 + signal.SIGTERM
        assert terminal.now == terminal.before


@pytest.mark.slow
def test_it_outlives_the_server(server: ServerProcess) -> None:
    published(server, b"mails", 3)
    with top(server) as terminal:
        terminal.until(rb"mails +3 ")
        server.kill()
        terminal.until(rb"not connected")
        server.start()
        terminal.until(rb"mails +3 ")
        server.kill()
        terminal.until(rb"not connected")


def test_names_do_not_steer_the_terminal(server: ServerProcess) -> None:
    published(server, b"\x1b[2J[red]", 1)
    with top(server) as terminal:
        assert b"\x1b[2J[red]" not in terminal.until(re.escape(rb"\x1b[2J[red]"))


# -------------------------------------------------------------------------------------- a pipe


def test_json_tells_one_object_for_each_look(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    first, second = looks("--url", server.url, "--count", "2")
    assert first["totals"]["messages_ready"] == first["journal"]["messages"] == 5
    assert first["rates_per_s"]["received"] is None, "there is nothing yet to compare with"
    assert second["rates_per_s"]["received"] == 0
    [queue] = second["queues"]
    told = [queue[key] for key in ("name", "ready", "in_per_s", "out_per_s")]
    assert told == ["mails", 5, 0, 0]


def test_how_far_an_archive_is(server: ServerProcess) -> None:
    def archived(count: int) -> list[Any]:
        [queue] = looks("--url", server.url, "--count", f"{count}")[-1]["queues"]
        return [queue[key] for key in ("archived_seq", "archive_lag", "archived_per_s")]

    published(server, b"mails", 5)
    assert archived(1)[:2] == [None, None]
    with LineClient(server.address) as client:
        assert client.ask(b"r range --archived=3 mails").startswith(b"r ok ")
        assert archived(2) == [3, 3, 0]
        [told] = client.stats("queues")
        assert (told["archive_state"], told["archive_commit_age_s"]) == ("running", None)
        assert client.ask(b"r range --archived=5 mails").startswith(b"r ok ")
        first, later = (client.stats("queue mails") for _ in range(2))
    ages = [[row[f"archive_{of}_age_s"] for of in ("told", "commit")] for row in (first, later)]
    assert 0 <= ages[0][0] == ages[0][1] <= ages[1][0] == ages[1][1]
    _, out, _ = forks.run([*MQKS, "inspect", "archives", "--url", server.url])
    assert re.match(
        rb"QUEUE +STATE +LAG +ARCHIVED_SEQ +TOLD +COMMIT\nmails +running +1 +5 +\S+ +\S+\n",
        out,
        re.IGNORECASE,
    )
    with top(server) as terminal:
        terminal.until(rb"archived/s")


def test_rates_are_what_happened_between_two_looks(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    with (
        subprocess.Popen([*TOP, "--json", "--url", server.url], stdout=subprocess.PIPE) as process,
        LineClient(server.address) as consumer,
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
    with LineClient(server.address) as client:
        client.send(b"".join(b"s subscribe q%04d e%d\n" % (n, n) for n in range(2_500)))
        assert client.ask(b"m publish --confirm e2499 x") == b"m ok "
    [seen] = looks("--url", server.url, "--count", "1", "--rows", "10000")
    assert len(seen["queues"]) == 2_500
    assert seen["queues"][0]["name"] == "q2499"


def test_a_pipe_without_json_gets_plain_text(server: ServerProcess) -> None:
    published(server, b"mails", 5)
    code, out, _ = forks.run([*TOP, "--url", server.url, "--count", "1"])
    assert (code, b"\x1b" in out) == (0, False)
    assert re.search(rb"^no consumer +mails +5 ", out, re.M)
