"""`python -m benchmarks.bare`: what sockets alone cost, with many connections.

A program with uvloop reads the requests of all connections, and once per turn of its loop writes
them to a file, syncs it and answers: a broker without queues. MQKS and Redis take turns with it at
the same load, one confirmed publish in flight on each connection.

The one rule: the load program checks each reply.
"""

import argparse
import asyncio
import os
import socket
import statistics
import sys
import tempfile
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


def serve(port: int, file: Path) -> None:
    loop = uvloop.new_event_loop()
    waiting: list[tuple[asyncio.Transport, bytes]] = []
    blocks = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    os.pwrite(blocks, bytes(BLOCKS_BYTES), 0)
    os.fsync(blocks)

    def answer() -> None:
        os.pwrite(blocks, b"".join(line for _, line in waiting)[:BLOCKS_BYTES], 0)
        os.fdatasync(blocks)
        for transport, line in waiting:
            transport.write(line.partition(b" ")[0] + b" ok \n")
        waiting.clear()

    class Requests(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport = cast(asyncio.Transport, transport)

        def data_received(self, data: bytes) -> None:
            if not waiting:
                loop.call_soon(answer)
            waiting.extend((self._transport, line) for line in data.splitlines())

    loop.run_until_complete(loop.create_server(Requests, "127.0.0.1", port, backlog=4096))
    loop.run_forever()


class Bare(Mqks):
    def __init__(self) -> None:
        super().__init__("bare")

    def command(self, directory: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.bare", "--serve", str(port), str(directory)]

    def listening(self, log: Path, port: int) -> int | None:
        return port

    def answers(self, sock: socket.socket) -> bool:
        return ask(sock, b"p ping\n") == b"p ok \n"


PEERS: dict[str, Server] = {
    "bare": Bare(),
    "mqks": SERVERS["mqks"],
    "redis-always": SERVERS["redis-always"],
}


def confirms_per_s(peer: Server, connections: int, count: int) -> float:
    size = Size(count, 100, connections)
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bare-") as name,
        Running(peer, Path(name)) as running,
    ):
        running.declare()
        return rate(size.shared.total, together(running, part(talk, size.shared, window=1)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, nargs="+", default=[100, 1_000])
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        serve(int(options.serve[0]), Path(options.serve[1]) / "written")
        return
    peers = {name: peer for name, peer in PEERS.items() if not peer.missing()}
    print("confirms per second", *peers, sep="\t")
    for connections in options.connections:
        rates: dict[str, list[float]] = {name: [] for name in peers}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                rates[name].append(confirms_per_s(peer, connections, options.count))
        middles = (f"{statistics.median(each):,.0f}" for each in rates.values())
        print(f"{connections} connections", *middles, sep="\t", flush=True)


if __name__ == "__main__":
    main()
