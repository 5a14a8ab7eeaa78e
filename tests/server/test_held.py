"""What holds the event loop is counted and told; a server that was stopped did not hold it."""

import re
import time
from pathlib import Path

from mqks.limits import LOOP_HELD_LINES_MAX
from tests.kit.fixtures import served
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

# Long for one step, whatever the machine: adding up in one call, and all that leads there.
COSTLY = b"e _eval sum(range(190000))\n"

LINES = re.compile(r" action=purge line_bytes=2\d lines=\d{3,}( |$)")


def counts(client: LineClient) -> tuple[int, int]:
    told = client.stats()
    return told["loop_held"], told["loop_late"]


def held_lines(server: ServerProcess) -> list[str]:
    return [line for line in server.log.splitlines() if "event=loop_held" in line]


def test_what_holds_the_loop_is_counted_and_told(tmp_path: Path) -> None:
    with served(tmp_path / "mqks.db", "--loop-held-s", "0.005") as (server, client):
        began_s = time.monotonic()

        def is_often_told() -> bool:
            client.ask(COSTLY.strip())
            is_told = any("evaluate/expression.py:" in line for line in held_lines(server))
            return is_told and counts(client)[0] > 2 * LOOP_HELD_LINES_MAX

        until(is_often_told)
        held, late = counts(client)
        [told, *_] = (line for line in held_lines(server) if "evaluate/expression.py:" in line)
        assert f" connection=127.0.0.1:{client.port} " in told
        assert f" action=_eval line_bytes={len(COSTLY) - 1} " in told
        assert held <= late
        minutes = 1 + (time.monotonic() - began_s) // 60
        assert len(held_lines(server)) <= LOOP_HELD_LINES_MAX * minutes
        assert server.stop() == 0


def test_many_lines_that_hold_the_loop_are_told(tmp_path: Path) -> None:
    burst = b"".join(b"x%d purge none --limit=1\n" % number for number in range(5000))
    with served(tmp_path / "mqks.db", "--loop-held-s", "0.005") as (server, client):

        def is_told() -> bool:
            client.send(burst)
            client.ask(b"p ping")
            return any(LINES.search(line) for line in held_lines(server))

        until(is_told)
        assert server.stop() == 0


def test_a_stopped_process_has_not_held_its_loop(server: ServerProcess, client: LineClient) -> None:
    client.ask(b"p ping")
    held, _ = counts(client)
    for _ in range(3):
        with server.paused():
            time.sleep(0.25)
        client.ask(b"p ping")
    time.sleep(0.1)
    assert counts(client)[0] == held
    assert server.stop() == 0


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with served(tmp_path / "mqks.db", "--loop-held-s", "0") as (server, client):
        client.ask(COSTLY.strip())
        assert counts(client) == (0, 0)
        assert server.stop() == 0
