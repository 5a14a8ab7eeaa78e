"""`python -m benchmarks.bare`: what sockets alone cost, with many connections.

A program with uvloop reads the requests of all connections, and once per turn of its loop writes
them to a file, syncs it and answers: a broker without queues. MQKS and Redis take turns with it at
the same load, one confirmed publish in flight on each connection. With several loops, connections
are spread over threads, and one more thread writes and syncs for all.

The one rule: the load program checks each reply.
"""

import argparse
import asyncio
import os
import socket
import statistics
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import uvloop

from benchmarks.flow import ask
from benchmarks.load import part, rate, together
from benchmarks.process import Running
from benchmarks.servers import SERVERS
from benchmarks.servers.base import Server
from benchmarks.servers.mqks import Mqks
from benchmarks.talk import talk
from benchmarks.work import Size

BLOCKS_BYTES = 4 * 1024 * 1024
"""Written over and over, as SQLite does with its WAL."""


Waiting = list[tuple[asyncio.Transport, bytes]]


class Loop:
    """An event loop with its connections; `tell` is called in each turn that has requests."""

    def __init__(self, port: int, tell: Callable[[], object]) -> None:
        self.loop = uvloop.new_event_loop()
        self._port = port
        self._tell = tell
        self._told = False
        self._waiting: Waiting = []

    def run(self) -> None:
        loop, receive = self.loop, self._receive

        class Requests(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self._transport = cast(asyncio.Transport, transport)

            def data_received(self, data: bytes) -> None:
                receive([(self._transport, line) for line in data.splitlines()])

        server = loop.create_server(
            Requests, "127.0.0.1", self._port, backlog=4096, reuse_port=True
        )
        loop.run_until_complete(server)
        loop.run_forever()

    def _receive(self, requests: Waiting) -> None:
        self._waiting += requests
        if not self._told:
            self._told = True
            self.loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        self._told = False
        self._tell()

    def take(self) -> Waiting:
        """May be called by another thread than the loop's: each of its two steps is atomic."""
        taken = self._waiting[:]
        del self._waiting[: len(taken)]
        return taken


def answer(taken: Waiting) -> None:
    for transport, line in taken:
        transport.write(line.partition(b" ")[0] + b" ok \n")


def serve(port: int, file: Path, count: int) -> None:
    """One loop commits itself; several are on a thread each, and one more thread commits."""
    blocks = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(blocks, bytes(BLOCKS_BYTES), 0)
    os.fsync(blocks)

    def commit(taken: Iterable[Waiting]) -> None:
        lines = b"".join(line for requests in taken for _, line in requests)
        os.pwrite(blocks, lines[:BLOCKS_BYTES], 0)
        os.fdatasync(blocks)

    if count == 1:

        def end_turn() -> None:
            taken = alone.take()
            commit([taken])
            answer(taken)

        alone = Loop(port, end_turn)
        alone.run()
        return
    wake = threading.Event()
    loops = [Loop(port, wake.set) for _ in range(count)]
    for each in loops:
        threading.Thread(target=each.run).start()
    while wake.wait():
        wake.clear()
        taken = [each.take() for each in loops]
        commit(taken)
        for each, requests in zip(loops, taken, strict=True):
            if requests:
                each.loop.call_soon_threadsafe(answer, requests)


class Bare(Mqks):
    def __init__(self, loops: int) -> None:
        super().__init__("bare" if loops == 1 else f"bare, {loops} loops")
        self.loops = loops

    def command(self, directory: Path, port: int) -> list[str]:
        serve = ["--serve", str(port), str(directory), str(self.loops)]
        return [self.program, "-m", "benchmarks.bare", *serve]

    def listening(self, log: Path, port: int) -> int | None:
        return port

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, b"p ping\n") == b"p ok \n"


def measure(peer: Server, connections: int, count: int) -> tuple[float, float]:
    """Confirms per second, and µs of the server's processor time for each."""
    size = Size(count, 100, connections).shared
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bare-") as name,
        Running(peer, Path(name)) as running,
    ):
        running.declare()
        before_s = running.cpu_s()
        reports = together(running, part(talk, size, window=1))
        return rate(size.total, reports), (running.cpu_s() - before_s) / size.total * 1e6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[100, 1_000])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--loops", type=int, nargs="+", default=[1], help="of the bare program")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="PATH",
        help="also measure both run by this Python, which has their dependencies; may be repeated",
    )
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        port, directory, loops = options.serve
        serve(int(port), Path(directory) / "written", int(loops))
        return
    ours = [*map(Bare, options.loops), Mqks()]
    others = [each.run_by(python) for python in options.python for each in ours]
    servers: list[Server] = [*ours, *others, SERVERS["redis-always"]]
    peers = {peer.name: peer for peer in servers if not peer.missing()}
    print("confirms per second", *peers, sep="\t")
    for connections in options.connections:
        runs: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                runs[name].append(measure(peer, connections, options.count))
        rates = (statistics.median(per_s for per_s, _ in each) for each in runs.values())
        print(f"{connections} connections", *(f"{each:,.0f}" for each in rates), sep="\t")
        cpu_us = (statistics.median(us for _, us in each) for each in runs.values())
        print("… CPU, µs", *(f"{each:.1f}" for each in cpu_us), sep="\t", flush=True)


if __name__ == "__main__":
    main()
