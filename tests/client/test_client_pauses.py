"""Clients whose process is stopped for a while, as by a shell, a debugger or the lid of a laptop.
They are on uvloop, which has a clock of its own; the simulation stops the others.

The one rule: the peer answers at once or never, and what it sees is the verdict.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from tests.client.programs import environment
from tests.kit.proxy import Peer
from tests.kit.waiting import WAIT_S, until

KEEP_ALIVE_S = 1.0
BEGIN = f"""
import asyncio, sys
import mqks, uvloop

options = mqks.Options(keep_alive_s={KEEP_ALIVE_S}, close_timeout_s=0.1)

async def main():
    async with mqks.connect(options=options):
        await asyncio.to_thread(sys.stdin.read)

async def publish():
    async with mqks.connect(options=options) as client:
        await client.publish("e", "x", confirm=True, timeout_s=1)
"""


class Answering:
    """Answers the greeting; a ping when it `may_answer`, and those before."""

    def __init__(self) -> None:
        self.pings = 0
        self.greetings = 0
        self.may_answer = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            if line.endswith(b"hello\n"):
                self.greetings += 1
            else:
                self.pings += 1
                await self.may_answer.wait()
            writer.write(line.split(b" ")[0] + b" ok \n")


def stopped(process: subprocess.Popen[bytes]) -> None:
    """Stop it for longer than a ping and its answer may take."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(2.5 * KEEP_ALIVE_S)
    process.send_signal(signal.SIGCONT)


def answered_in_a_pause(process: subprocess.Popen[bytes], peer: Peer, answering: Answering) -> None:
    process.send_signal(signal.SIGSTOP)
    peer._portal.call(answering.may_answer.set)
    stopped(process)


@pytest.mark.slow
def test_a_pause_costs_no_connection_and_hides_no_dead_server() -> None:
    answering = Answering()
    with Peer(answering.serve) as peer:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + "uvloop.run(main())"],
            env=environment(peer.url),
            stdin=subprocess.PIPE,
        )
        try:
            until(lambda: answering.greetings)
            stopped(process)
            until(lambda: answering.pings or peer.accepted > 1)
            answered_in_a_pause(process, peer, answering)
            until(lambda: answering.pings > 1 or peer.accepted > 1)
            assert (answering.greetings, peer.accepted) == (1, 1)

            peer._portal.call(answering.may_answer.clear)
            until(lambda: answering.pings > 2)
            stopped(process)
            until(lambda: peer.accepted > 1)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_an_answer_that_came_in_a_pause_was_in_time() -> None:
    answering = Answering()
    with Peer(answering.serve) as peer:
        process = subprocess.Popen(
            [sys.executable, "-c", BEGIN + "uvloop.run(publish())"], env=environment(peer.url)
        )
        try:
            until(lambda: answering.pings)  # The publish, which waits for its answer.
            answered_in_a_pause(process, peer, answering)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
