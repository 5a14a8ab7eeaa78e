"""`python -m benchmarks.features`: priorities, order by key and transactions, against plain queues.

Each work runs in turns with what it is compared with, on the same broker; medians of the runs are
told, and their ratio. Transactions (an ack and three publishes, synced) stand beside Redis, where
MULTI does an XACK and three XADD, synced as well.

The one rule: what has come is checked, each message and its order, when the clock has stopped.
"""

import argparse
import select
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path

from benchmarks.flow import Flow, ask, run
from benchmarks.messages import Wrong
from benchmarks.process import Running
from benchmarks.servers import SERVERS
from benchmarks.servers.redis import command

LEVELS, KEYS, CONSUMERS = 10, 10_000, 8
MADE = 3
"""Messages that a transaction publishes."""
QUEUES = count()

Figures = dict[str, float]


def clocked(flow: Flow) -> float:
    began = time.monotonic()
    run(flow)
    return time.monotonic() - began


def filled(sock: socket.socket, queue: bytes, lines: list[bytes]) -> float:
    """Publish these messages, all confirmed with the last; return the seconds."""
    ask(sock, b"s subscribe --confirm %b %b\n" % (queue, queue))
    end = b"end ping x\n"
    return clocked(Flow(sock, b"".join(lines) + end, width=1, until=b"end ok x\n"))


def drained(port: int, queue: bytes, total: int, consumers: int = 1) -> tuple[float, list[bytes]]:
    """Take all messages and ack each; return the seconds and the deliveries as they came."""
    socks = [SERVERS["mqks"].connect(port) for _ in range(consumers)]
    told, tails, left = list[bytes](), dict.fromkeys(socks, b""), total
    began = time.monotonic()
    names = {sock: b"c%d" % number for number, sock in enumerate(socks)}
    for sock, name in names.items():
        sock.sendall(b"%b consume %b --manual-ack --prefetch=100\n" % (name, queue))
    try:
        while left:
            ready, _, _ = select.select(socks, [], [], 60)
            if not ready:
                raise Wrong(f"{left} messages did not come")
            for sock in ready:
                *lines, tails[sock] = (tails[sock] + sock.recv(1 << 18)).split(b"\n")
                told += lines
                left -= len(lines)
                acks = [b"a ack %b %b\n" % (names[sock], line.split(b" ", 3)[2]) for line in lines]
                sock.sendall(b"".join(acks))
        for sock in socks:
            ask(sock, b"p ping x\n")
        return time.monotonic() - began, told
    finally:
        for sock in socks:
            sock.close()


def _line(number: int, flags: bytes, queue: bytes) -> bytes:
    return b"m%08d publish%b %b %b\n" % (number, flags, queue, b"x" * 100)


def _numbers(told: list[bytes], total: int) -> list[int]:
    numbers = [int(line.split(b" ", 3)[2][1:]) for line in told]
    if sorted(numbers) != [*range(total)]:
        raise Wrong("each message must come once")
    return numbers


def priorities(port: int, total: int, levels: int) -> Figures:
    queue = b"q%d" % next(QUEUES)
    flags = [b" --priority=%d" % (n % levels) if levels > 1 else b"" for n in range(total)]
    with closing(SERVERS["mqks"].connect(port)) as sock:
        fill_s = filled(sock, queue, [_line(n, flags[n], queue) for n in range(total)])
        drain_s, told = drained(port, queue, total)
    if _numbers(told, total) != sorted(range(total), key=lambda n: (-(n % levels), n)):
        raise Wrong("messages must come by priority, then by arrival")
    return {"in_per_s": total / fill_s, "out_per_s": total / drain_s}


def keys(port: int, total: int, ordered: bool) -> Figures:
    queue = b"q%d" % next(QUEUES)
    flags = [b" --key=k%d" % (n % KEYS) if ordered else b"" for n in range(total)]
    with closing(SERVERS["mqks"].connect(port)) as sock:
        if ordered:
            ask(sock, b"s set_queue --confirm %b --ordered=key\n" % queue)
        fill_s = filled(sock, queue, [_line(n, flags[n], queue) for n in range(total)])
        drain_s, told = drained(port, queue, total, CONSUMERS)
    last = dict[int, int]()
    for number in _numbers(told, total):
        if ordered and last.get(number % KEYS, -1) > number:
            raise Wrong("messages of one key must come in order")
        last[number % KEYS] = number
    return {"in_per_s": total / fill_s, "out_per_s": total / drain_s}


def transactions(port: int, total: int, window: int) -> Figures:
    queue, made = b"q%d" % next(QUEUES), b"made%d" % next(QUEUES)
    with closing(SERVERS["mqks"].connect(port)) as sock:
        ask(sock, b"s subscribe --confirm %b %b\n" % (made, made))
        filled(sock, queue, [_line(n, b"", queue) for n in range(total)])
        sock.sendall(b"c consume %b --manual-ack --prefetch=%d\n" % (queue, total))
        room = total * 160 + 4096
        run(Flow(sock, mark=b"\n", expected=total, room_bytes=room))
        steps = []
        for n in range(total):
            publishes = [b"n%08d%d publish %b %b\n" % (n, k, made, b"x" * 100) for k in range(MADE)]
            step = [b"b begin\na ack c m%08d\n" % n, *publishes, b"t%08d commit --confirm\n" % n]
            steps.append(b"".join(step))
        flow = Flow(sock, b"".join(steps), width=len(steps[0]), ahead=window, expected=total)
        seconds = clocked(flow)
        if flow.received != b"".join(b"t%08d ok \n" % n for n in range(total)):
            raise Wrong("each commit must be confirmed once")
        if b" next=%d\n" % (total * MADE + 1) not in ask(sock, b"r range %b\n" % made):
            raise Wrong("each transaction must publish all its messages")
    return {"per_s": total / seconds}


def multis(port: int, total: int, window: int) -> Figures:
    """The same of Redis, by a server that syncs each write."""
    one, made = b"s%d" % next(QUEUES), b"made%d" % next(QUEUES)
    with closing(SERVERS["redis-always"].connect(port)) as sock:
        ask(sock, command(b"XGROUP", b"CREATE", one, b"g", b"0", b"MKSTREAM"), b"\r\n")
        adds = [command(b"XADD", one, b"1-%08d" % n, b"d", b"x" * 100) for n in range(1, total + 1)]
        run(Flow(sock, b"".join(adds), width=len(adds[0]), mark=b"\r\n", marks=2, expected=total))
        read = command(
            *(b"XREADGROUP", b"GROUP", b"g", b"c", b"COUNT", b"%d" % total),
            *(b"STREAMS", one, b">"),
        )
        room = total * 200 + 4096
        end = command(b"PING")
        run(Flow(sock, read + end, width=1, until=b"+PONG\r\n", room_bytes=room))
        steps = []
        for n in range(1, total + 1):
            publish = command(b"XADD", made, b"*", b"d", b"x" * 100)
            ack = command(b"XACK", one, b"g", b"1-%08d" % n)
            steps.append(command(b"MULTI") + ack + publish * MADE + command(b"EXEC"))
        flow = Flow(
            sock,
            b"".join(steps),
            width=len(steps[0]),
            ahead=window,
            mark=b"*4\r\n:1\r\n",
            expected=total,
            room_bytes=total * 300 + 4096,
        )
        seconds = clocked(flow)
        if ask(sock, command(b"XLEN", made), b"\r\n").splitlines()[-1] != b":%d" % (total * MADE):
            raise Wrong("each transaction must publish all its messages")
    return {"per_s": total / seconds}


def works(total: int) -> Iterator[tuple[str, str, Callable[[int], Figures]]]:
    """Name, server and run of each work; what it is compared with comes before it."""
    yield "plain, 1 consumer", "mqks", lambda port: priorities(port, total, 1)
    yield f"{LEVELS} priorities", "mqks", lambda port: priorities(port, total, LEVELS)
    yield f"plain, {CONSUMERS} consumers", "mqks", lambda port: keys(port, total, False)
    yield f"{KEYS:,} keys in order", "mqks", lambda port: keys(port, total, True)
    few = max(total // 50, 10)
    yield "Redis MULTI, 1 in flight", "redis-always", lambda port: multis(port, few, 1)
    yield "transactions, 1 in flight", "mqks", lambda port: transactions(port, few, 1)
    some = max(total // 5, 10)
    yield "Redis MULTI, 100 in flight", "redis-always", lambda port: multis(port, some, 100)
    yield "transactions, 100 in flight", "mqks", lambda port: transactions(port, some, 100)


def measure(total: int) -> dict[tuple[str, str], float]:
    """Each figure of one run, by work and name."""
    told = dict[tuple[str, str], float]()
    with tempfile.TemporaryDirectory() as directory:
        for name, server, work in works(total):
            if SERVERS[server].missing():
                continue
            place = Path(directory, str(len(told)))
            place.mkdir()
            with Running(SERVERS[server], place) as running:
                for figure, value in work(running.port).items():
                    told[name, figure] = value
    return told


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    runs = [measure(options.count) for _ in range(options.runs)]
    for name, figure in runs[0]:
        print(f"{name:30} {figure:10} {statistics.median(r[name, figure] for r in runs):12,.0f}")


if __name__ == "__main__":
    main()
