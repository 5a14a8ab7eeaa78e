"""A program that does not close its client: what it published is sent, and a warning says where the
client was made. The programs are real ones; each ends by itself."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from mqks import blocking
from tests.client.programs import ended
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import until

MADE = """
import asyncio, multiprocessing, os, sys, time
import mqks
close_s = float(os.environ.get("CLOSE_S", 60))
client = mqks.blocking.connect(options=mqks.Options(close_timeout_s=close_s))
"""
PUBLISHED = """
for n in range(10):
    client.publish("e", n)
"""
IN_A_FUNCTION = """
def published():
    client = mqks.blocking.connect()
    for n in range(10):
        client.publish("e", n)
"""
ASYNC = """
async def published():
    client = await mqks.connect().__aenter__()
    for n in range(10):
        await client.publish("e", n)
"""
CHILD = """
def child():
    client = mqks.blocking.connect()
    for n in range(10):
        client.publish("e", n)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join()
"""


ERRORS = ["-W", "error::ResourceWarning"]


def published(url: str) -> list[str]:
    with blocking.connect(url) as client:
        return [message.text for message in client.peek("q")]


def assert_published(url: str) -> None:
    """All ten; what was sent is handled a moment later."""
    until(lambda: published(url) == [str(n) for n in range(10)])


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (MADE + PUBLISHED, 0),
        (MADE + PUBLISHED + "sys.exit(3)", 3),
        (MADE + PUBLISHED + "raise ValueError", 1),
        (MADE + IN_A_FUNCTION + "published(); raise ValueError", 1),
        (MADE + PUBLISHED + "client.close()", 0),
    ],
)
def test_what_was_published_is_sent(tmp_path: Path, url: str, program: str, code: int) -> None:
    done = ended(tmp_path, url, program)
    assert done.returncode == code
    assert "lost" not in done.stderr
    assert "Warning" not in done.stderr
    assert_published(url)


@pytest.mark.parametrize(
    ("flags", "program", "line"),
    [
        (["-X", "dev"], MADE + PUBLISHED, "client = mqks.blocking.connect(options"),
        (ERRORS, MADE + PUBLISHED + "del client", "client = mqks.blocking.connect(options"),
        (ERRORS, MADE + IN_A_FUNCTION + "published()", "    client = mqks.blocking.connect()"),
        (["-X", "dev"], MADE + CHILD, "    client = mqks.blocking.connect()"),
        (ERRORS, MADE + ASYNC + "asyncio.run(published())", "    client = await mqks.connect()"),
    ],
)
def test_a_warning_says_where_it_was_made(
    tmp_path: Path, url: str, program: str, line: str, flags: list[str]
) -> None:
    done = ended(tmp_path, url, program, *flags)
    assert done.returncode == 0
    number = 1 + [each.startswith(line) for each in program.splitlines()].index(True)
    told = f"the client made at {tmp_path}/program.py:{number} was not closed"
    assert done.stderr.count(f"ResourceWarning: {told}") == 1
    assert "lost" not in done.stderr
    assert_published(url)


def test_a_closed_client_is_quiet(tmp_path: Path, url: str) -> None:
    program = """
import asyncio
import mqks

async def published():
    async with mqks.connect() as client, client.consume("q"):
        await client.publish("e", "x")

with mqks.blocking.connect() as client, client.consume("q"):
    client.publish("e", "x")
never_used = mqks.blocking.connect()
asyncio.run(published())
"""
    done = ended(tmp_path, url, program, "-X", "dev", "-W", "error")
    assert "Warning" not in done.stderr
    assert "not closed" not in done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_is_gone_is_not_waited_for_without_end(
    tmp_path: Path, db: Path, number: int
) -> None:
    with ServerProcess(db) as server:
        program = f"""
clients = [client, *(mqks.blocking.connect(options=client._options) for _ in range(9))]
for each in clients:
    each.publish("e", "confirmed", confirm=True)
os.kill({server.pid}, {number})
# What is written before the end of the connection is seen counts as sent.
while {number} == 9 and any(each._session.state.name == "UP" for each in clients):
    time.sleep(0.01)
for each in clients:
    each.publish("e", "not confirmed")
"""
        done = ended(tmp_path, server.url, MADE + program, CLOSE_S="0.2")
    assert done.returncode == 0
    lost = [line for line in done.stderr.splitlines() if "may be lost" in line]
    assert len(lost) == 10
    assert all("published messages may be lost, not sent in 0.2 s" in line for line in lost)
    assert sum(f"client made at {tmp_path}/program.py:5: " in line for line in lost) == 1
