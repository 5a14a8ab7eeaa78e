"""`python -m benchmarks.features`: priorities, keys, limits and transactions, beside RabbitMQ.

The works take turns in each round. Told are the median of the rounds, and the median of the ratios
to what a work stands beside within one round, with the least and the greatest. RabbitMQ has
priorities by a queue's `x-max-priority`, order by key by an exchange of the plugin for consistent
hashing with a queue for each consumer, and transactions by `tx.select`. Transactions (an ack and
three publishes) stand beside Redis, too, where MULTI does an XACK and three XADD, synced. `cpu_us`
is the processor time of the broker for a message or a transaction, with filling the queue.

The one rule: what has come is checked, each message and its order, when the clock has stopped.
"""

import argparse
import select
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

from benchmarks.flow import ROOM_BYTES, Flow, ask, run
from benchmarks.messages import Wrong
from benchmarks.process import Running
from benchmarks.servers import SERVERS
from benchmarks.servers import rabbitmq as amqp
from benchmarks.servers.redis import command

LEVELS, MANY_LEVELS, KEYS, CONSUMERS = 10, 200, 10_000, 8
MADE = 3
"""Messages that a transaction publishes."""
QUEUES = count()

Figures = dict[str, float]


def clocked(flow: Flow) -> float:
    began = time.monotonic()
    run(flow)
    return time.monotonic() - began


def stepped(
    sock: socket.socket,
    steps: list[bytes],
    ahead: int,
    mark: bytes = b"\n",
    room_bytes: int = ROOM_BYTES,
) -> Flow:
    """Steps of one width, each with one reply."""
    flow = partial(Flow, sock, b"".join(steps), width=len(steps[0]), expected=len(steps))
    return flow(ahead=ahead, mark=mark, room_bytes=room_bytes)


def filled(sock: socket.socket, queue: bytes, lines: list[bytes]) -> float:
    """Publish these messages, all confirmed with the last; return the seconds."""
    ask(sock, b"s subscribe --confirm %b %b\n" % (queue, queue))
    end = b"end ping x\n"
    return clocked(Flow(sock, b"".join(lines) + end, width=1, until=b"end ok x\n"))


Take = Callable[[int, bytes], tuple[list[bytes], bytes, bytes]]
"""From the number of a consumer and what it has got: messages, their acks, and the rest."""


def drained(socks: list[socket.socket], take: Take, total: int) -> list[bytes]:
    """Take all messages and ack each; return them as they came."""
    told, tails = list[bytes](), dict.fromkeys(socks, b"")
    numbers = {sock: number for number, sock in enumerate(socks)}
    while len(told) < total:
        ready, _, _ = select.select(socks, [], [], 60)
        if not ready:
            raise Wrong(f"{total - len(told)} messages did not come")
        for sock in ready:
            chunk = tails[sock] + sock.recv(1 << 18)
            messages, acks, tails[sock] = take(numbers[sock], chunk)
            told += messages
            sock.sendall(acks)
    return told


def _drained(port: int, queue: bytes, total: int, consumers: int) -> tuple[float, list[bytes]]:
    """Of MQKS: the seconds, too."""

    def take(number: int, chunk: bytes) -> tuple[list[bytes], bytes, bytes]:
        *lines, tail = chunk.split(b"\n")
        acks = [b"a ack c%d %b\n" % (number, line.split(b" ", 3)[2]) for line in lines]
        return lines, b"".join(acks), tail

    with ExitStack() as stack:
        server = SERVERS["mqks"]
        socks = [stack.enter_context(server.connect(port)) for _ in range(consumers)]
        began = time.monotonic()
        for number, sock in enumerate(socks):
            sock.sendall(b"c%d consume %b --manual-ack --prefetch=100\n" % (number, queue))
        told = drained(socks, take, total)
        for sock in socks:
            ask(sock, b"p ping x\n")
        return time.monotonic() - began, told


def _line(number: int, flags: bytes, queue: bytes) -> bytes:
    return b"m%08d publish%b %b %b\n" % (number, flags, queue, b"x" * 100)


def _numbers(lines: list[bytes]) -> list[int]:
    return [int(line.split(b" ", 3)[2][1:]) for line in lines]


def _check_priorities(numbers: list[int], total: int, levels: int) -> None:
    if numbers != sorted(range(total), key=lambda n: (-(n % levels), n)):
        raise Wrong("each message must come once, by priority, then by arrival")


def _check_keys(numbers: list[int], total: int, *, ordered: bool) -> None:
    if sorted(numbers) != [*range(total)]:
        raise Wrong("each message must come once")
    last = dict[int, int]()
    for number in numbers:
        if ordered and last.get(number % KEYS, -1) > number:
            raise Wrong("messages of one key must come in order")
        last[number % KEYS] = number


def queued(
    port: int, total: int, flags: Callable[[int], bytes], consumers: int, policy: bytes = b""
) -> tuple[Figures, list[int]]:
    """Messages with these flags, published and then consumed."""
    queue = b"q%d" % next(QUEUES)
    with closing(SERVERS["mqks"].connect(port)) as sock:
        if policy:
            ask(sock, b"s set_queue --confirm %b %b\n" % (queue, policy))
        fill_s = filled(sock, queue, [_line(n, flags(n), queue) for n in range(total)])
        drain_s, lines = _drained(port, queue, total, consumers)
    return {"in_per_s": total / fill_s, "out_per_s": total / drain_s}, _numbers(lines)


def priorities(port: int, total: int, levels: int) -> Figures:
    def flags(n: int) -> bytes:
        return b" --priority=%d" % (n % levels - levels // 2) if levels > 1 else b""

    figures, numbers = queued(port, total, flags, 1)
    _check_priorities(numbers, total, levels)
    return figures


def keys(port: int, total: int, policy: bytes = b"") -> Figures:
    def flags(n: int) -> bytes:
        return b" --key=k%d" % (n % KEYS) if b"key" in policy else b""

    figures, numbers = queued(port, total, flags, CONSUMERS, policy)
    _check_keys(numbers, total, ordered=b"--ordered" in policy)
    return figures


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
        flow = stepped(sock, steps, window)
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
        room = total * 300 + 4096
        flow = stepped(sock, steps, window, b"*4\r\n:1\r\n", room)
        seconds = clocked(flow)
        if ask(sock, command(b"XLEN", made), b"\r\n").splitlines()[-1] != b":%d" % (total * MADE):
            raise Wrong("each transaction must publish all its messages")
    return {"per_s": total / seconds}


# -- RabbitMQ

TX_SELECT, TX_COMMIT, TX_COMMIT_OK = b"\0\x5a\0\x0a", b"\0\x5a\0\x14", b"\0\x5a\0\x15"
PERSISTENT = 2
DELIVERY = b"\0\x3c\0\x3c"


def declared(sock: socket.socket, queue: bytes, table: bytes = b"") -> int:
    """The number of messages in the queue."""
    size = struct.pack(">I", len(table))
    told = amqp.call(
        sock, amqp.QUEUE_DECLARE + b"\0\0" + amqp.word(queue) + amqp.DURABLE + size + table
    )
    count: int = struct.unpack_from(">I", told, 5 + told[4])[0]
    return count


def consumed(sock: socket.socket, queue: bytes) -> None:
    names = amqp.word(queue) + amqp.word(b"c")
    amqp.call(sock, amqp.CONSUME + b"\0\0" + names + b"\0" + amqp.NO_TABLE)


def sent(exchange: bytes, key: bytes, data: bytes, priority: int = 0) -> bytes:
    """The three frames of a publish."""
    names = amqp.word(exchange) + amqp.word(key)
    head = struct.pack(">HHQHBB", 60, 0, len(data), 0x1800, PERSISTENT, priority)
    return (
        amqp.frame(amqp.METHOD, amqp.PUBLISH + b"\0\0" + names + b"\0")
        + amqp.frame(amqp.HEADER, head)
        + amqp.frame(amqp.BODY, data)
    )


def acked(tag: int) -> bytes:
    return amqp.ACK.pack(amqp.METHOD, 1, 13, amqp.BASIC_ACK, tag, False, amqp.END)


def rabbit_filled(sock: socket.socket, publishes: list[bytes]) -> float:
    amqp.call(sock, amqp.CONFIRM_SELECT + b"\0")
    room = amqp.ACK.size * len(publishes) + 4096
    flow = amqp.Confirmed(sock, b"".join(publishes), expected=len(publishes), room_bytes=room)
    flow.open()
    return clocked(flow)


def rabbit_take(number: int, chunk: bytes) -> tuple[list[bytes], bytes, bytes]:
    messages, acks, at, whole = list[bytes](), list[bytes](), 0, 0
    while at + amqp.HEAD.size <= len(chunk):
        kind, _, size = amqp.HEAD.unpack_from(chunk, at)
        at += amqp.HEAD.size
        if (end := at + size + 1) > len(chunk):
            break
        if kind == amqp.METHOD and chunk.startswith(DELIVERY, at):
            tag_at = at + 5 + chunk[at + 4]
            acks.append(acked(int.from_bytes(chunk[tag_at : tag_at + 8], "big")))
        elif kind == amqp.BODY:
            messages.append(chunk[at : end - 1])
            whole = end
        at = end
    # A delivery is three frames: the last may be under way.
    return messages, b"".join(acks[: len(messages)]), chunk[whole:]


def rabbit_drained(port: int, queues: list[bytes], total: int) -> tuple[float, list[int]]:
    with ExitStack() as stack:
        socks = [stack.enter_context(SERVERS["rabbitmq"].connect(port)) for _ in queues]
        began = time.monotonic()
        for sock, queue in zip(socks, queues, strict=True):
            amqp.call(sock, amqp.QOS + struct.pack(">IHB", 0, 100, 0))
            consumed(sock, queue)
        told = drained(socks, rabbit_take, total)
        for sock in socks:
            amqp.call(sock, amqp.QOS + struct.pack(">IHB", 0, 0, 0))  # Behind the last ack.
        return time.monotonic() - began, [int(data[:8]) for data in told]


def rabbit_data(number: int) -> bytes:
    return b"%08d" % number + b"x" * 92


def rabbit_priorities(port: int, total: int, levels: int) -> Figures:
    queue = b"q%d" % next(QUEUES)
    with closing(SERVERS["rabbitmq"].connect(port)) as sock:
        highest = amqp.word(b"x-max-priority") + b"I" + struct.pack(">i", levels - 1)
        declared(sock, queue, highest if levels > 1 else b"")
        lines = [sent(b"", queue, rabbit_data(n), n % levels) for n in range(total)]
        fill_s = rabbit_filled(sock, lines)
    drain_s, numbers = rabbit_drained(port, [queue], total)
    _check_priorities(numbers, total, levels)
    return {"in_per_s": total / fill_s, "out_per_s": total / drain_s}


def rabbit_keys(port: int, total: int) -> Figures:
    queues = [b"q%d" % next(QUEUES) for _ in range(CONSUMERS)]
    with closing(SERVERS["rabbitmq"].connect(port)) as sock:
        exchange = b"keys%d" % next(QUEUES)
        names = amqp.word(exchange) + amqp.word(b"x-consistent-hash") + amqp.DURABLE + amqp.NO_TABLE
        amqp.call(sock, amqp.EXCHANGE_DECLARE + b"\0\0" + names)
        for queue in queues:
            declared(sock, queue)
            bound = amqp.word(queue) + amqp.word(exchange) + amqp.word(b"10")
            amqp.call(sock, amqp.QUEUE_BIND + b"\0\0" + bound + b"\0" + amqp.NO_TABLE)
        lines = [sent(exchange, b"k%d" % (n % KEYS), rabbit_data(n)) for n in range(total)]
        fill_s = rabbit_filled(sock, lines)
    drain_s, numbers = rabbit_drained(port, queues, total)
    _check_keys(numbers, total, ordered=True)
    return {"in_per_s": total / fill_s, "out_per_s": total / drain_s}


def rabbit_transactions(port: int, total: int) -> Figures:
    """One in flight: a channel that is given a second commit meanwhile closes the connection."""
    queue, made = b"q%d" % next(QUEUES), b"made%d" % next(QUEUES)
    connect = SERVERS["rabbitmq"].connect
    with closing(connect(port)) as filler, closing(connect(port)) as sock:
        for name in (queue, made):
            declared(filler, name)
        rabbit_filled(filler, [sent(b"", queue, rabbit_data(n)) for n in range(total)])
        amqp.call(sock, TX_SELECT)
        consumed(sock, queue)
        end = b"x" * 92 + amqp.END
        run(Flow(sock, mark=end, expected=total, room_bytes=total * 250 + 4096))
        publishes = sent(b"", made, b"x" * 100) * MADE
        commit = amqp.frame(amqp.METHOD, TX_COMMIT)
        steps = [acked(tag) + publishes + commit for tag in range(1, total + 1)]
        mark = amqp.frame(amqp.METHOD, TX_COMMIT_OK)
        room = len(mark) * total + 4096
        flow = stepped(sock, steps, 1, mark, room)
        seconds = clocked(flow)
        if flow.received != mark * total:
            raise Wrong("each commit must be confirmed once")
        if declared(sock, made) != total * MADE:
            raise Wrong("each transaction must publish all its messages")
    return {"per_s": total / seconds}


class Work(NamedTuple):
    name: str
    server: str
    total: int
    """The number of its messages or transactions."""
    run: Callable[[int, int], Figures]
    """By the port of the server and that number."""
    beside: tuple[str, ...] = ()
    """Works of which the ratios are told; they come before it."""


def works(total: int) -> Iterator[Work]:
    ours, rabbit, redis = "mqks", "rabbitmq", "redis-always"
    few, some = max(total // 50, 10), max(total // 5, 10)
    plain, plains = "plain, 1 consumer", f"plain, {CONSUMERS} consumers"
    ranked, keyed = f"RabbitMQ, {LEVELS} priorities", f"RabbitMQ, {KEYS:,} keys"
    yield Work("RabbitMQ, plain", rabbit, total, lambda p, n: rabbit_priorities(p, n, 1))
    yield Work(ranked, rabbit, total, lambda p, n: rabbit_priorities(p, n, LEVELS))
    yield Work(plain, ours, total, lambda p, n: priorities(p, n, 1), ("RabbitMQ, plain",))
    for levels, beside in (LEVELS, (plain, ranked)), (MANY_LEVELS, (plain,)):
        run = partial(priorities, levels=levels)
        yield Work(f"{levels} priorities", ours, total, run, beside)
    yield Work(keyed, rabbit, total, rabbit_keys)
    yield Work(plains, ours, total, keys)
    own, limited = f"{KEYS:,} keys", partial(keys, policy=b"--concurrency-per-key=1")
    yield Work(own, ours, total, partial(keys, policy=b"--ordered=key"), (plains, keyed))
    yield Work(f"{KEYS:,} keys, 1 unacked each", ours, total, limited, (own,))
    paced = partial(keys, policy=b"--rate-per-key=1000/s,1000")
    yield Work(f"{KEYS:,} keys, each at a rate", ours, total, paced, (own,))
    for name, policy in ("a rate", b"--rate=10000000/s"), ("a concurrency", b"--concurrency=10000"):
        yield Work(f"{name} far above", ours, total, partial(keys, policy=policy), (plains,))
    yield Work("RabbitMQ tx, 1 in flight", rabbit, few, rabbit_transactions)
    for window, number in (1, few), (100, some):
        others = [f"Redis MULTI, {window} in flight"]
        yield Work(others[0], redis, number, partial(multis, window=window))
        others += ["RabbitMQ tx, 1 in flight"] * (window == 1)
        run = partial(transactions, window=window)
        yield Work(f"transactions, {window} in flight", ours, number, run, tuple(others))


def measure(total: int, others: Mapping[str, Running]) -> dict[tuple[str, str], float]:
    """Each figure of one round, by work and name."""
    told = dict[tuple[str, str], float]()
    with tempfile.TemporaryDirectory() as directory:
        for work in works(total):
            if SERVERS[work.server].missing():
                continue
            if (running := others.get(work.server)) is not None:
                found = work.run(running.port, work.total)
            else:
                place = Path(directory, str(len(told)))
                place.mkdir()
                with Running(SERVERS[work.server], place) as running:
                    before_s = running.cpu_s
                    found = work.run(running.port, work.total)
                    found["cpu_us"] = (running.cpu_s - before_s) / work.total * 1e6
            told |= {(work.name, figure): value for figure, value in found.items()}
    return told


def rounds(total: int, runs: int, most_s: float) -> Iterator[dict[tuple[str, str], float]]:
    """So many rounds, or as many as fit in this time. The other servers run through all of them:
    RabbitMQ takes seconds to start."""
    began = time.monotonic()
    with ExitStack() as stack:
        others = dict[str, Running]()
        for name in "rabbitmq", "redis-always":
            if not SERVERS[name].missing():
                place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                others[name] = stack.enter_context(Running(SERVERS[name], place))
        for done in range(1, runs + 1):
            yield measure(total, others)
            if (time.monotonic() - began) * (done + 1) / done > most_s:
                return


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=350.0, help="no more rounds than fit")
    options = parser.parse_args(arguments)
    runs = [*rounds(options.count, options.runs, options.seconds)]
    beside = {work.name: work.beside for work in works(options.count)}
    print(f"{len(runs)} rounds")
    for name, figure in runs[0]:
        print(f"{name:30} {figure:10} {statistics.median(r[name, figure] for r in runs):12,.1f}")
        for other in beside[name]:
            # A processor time of a few messages may be too short for its clock.
            if all(r.get((other, figure)) for r in runs):
                ratios = sorted(r[name, figure] / r[other, figure] for r in runs)
                middle = statistics.median(ratios)
                print(f"{'':8}{middle:8.2f} of {other} ({ratios[0]:.2f} to {ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
