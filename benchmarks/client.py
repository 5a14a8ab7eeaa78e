"""`python -m benchmarks.client`: how fast the clients are, against a program of bare sockets.

Publisher and consumer share one process and one connection each, the durable broker has its own.
The program of bare sockets sends one request and awaits one reply, then the next: each publish
and each ack with its confirm, which is a commit; its pings are what no disk holds up. The runs take
turns, and medians are told, with their ratio to the bare program's.

The one rule: every message is looked at when the clock has stopped, so a lost, doubled, swapped or
damaged one fails the run.
"""

import argparse
import socket
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import anyio

import mqks
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers import SERVERS

QUEUE, EVENT = "q0", "e"
AsyncTake = Callable[[mqks.AsyncConsumer, list[bytes], int], Awaitable[None]]
BlockingTake = Callable[[mqks.BlockingConsumer, list[bytes], int], None]
BARE_SCALE = 20
"""The bare program gets so many times fewer messages, and so do calls that wait for a confirm and
consumers that hold few messages."""
PREFETCHES = 1, 10, 100
"""Otherwise they hold as many messages as the server allows."""

Figures = dict[str, float]
"""Messages per second, by what was done."""


class Watch:
    """What a program does, timed; `figures` tells how many messages a second that was."""

    def __init__(self, program: str) -> None:
        self.figures: Figures = {}
        self._program = program

    @contextmanager
    def __call__(self, name: str, count: int) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.figures[f"{self._program} {name}"] = count / (time.perf_counter() - began)


def payloads(count: int) -> list[bytes]:
    messages = Messages(count)
    return messages.each(messages.payload)


def check(count: int, got: list[bytes]) -> None:
    Messages(count).check(got)


def bare(port: int, count: int) -> Figures:
    count = max(count // BARE_SCALE, 1)
    watch, data = Watch("bare"), payloads(count)
    with closing(Bare(port)) as publisher:
        with watch("ping", count):
            for payload in data:
                publisher.ask(b"m ping " + payload, b"m ok " + payload)
        with watch("publish", count):
            for payload in data:
                publisher.ask(b"m publish --confirm e " + payload, b"m ok ")
    got: list[bytes] = []
    with closing(Bare(port)) as consumer, watch("consume", count):
        consumer.ask(b"c consume --confirm q0 --manual-ack", b"c ok ")
        while len(got) < count:
            words = consumer.delivery().split(b" ", 4)
            got.append(words[4])
            consumer.ask(b"a ack --confirm c " + words[2], b"a ok ")
    check(count, got)
    return watch.figures


class Bare:
    """A socket that asks one thing at a time."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._tail = b""
        self._replies: deque[bytes] = deque()
        self._deliveries: deque[bytes] = deque()
        self.close = self._socket.close

    def _receive(self) -> None:
        *lines, self._tail = (self._tail + self._socket.recv(256 * 1024)).split(b"\n")
        for line in lines:
            (self._deliveries if b" event=" in line else self._replies).append(line)

    def ask(self, request: bytes, answer: bytes) -> None:
        self._socket.sendall(request + b"\n")
        while not self._replies:
            self._receive()
        if (reply := self._replies.popleft()) != answer:
            raise RuntimeError(f"{request[:40]!r} was answered by {reply!r}")

    def delivery(self) -> bytes:
        while not self._deliveries:
            self._receive()
        return self._deliveries.popleft()


def async_client(port: int, count: int) -> Figures:
    return anyio.run(_async_client, port, count, backend_options={"use_uvloop": True})


async def _async_client(port: int, count: int) -> Figures:
    watch, data, few = Watch("async"), payloads(count), max(count // BARE_SCALE, 1)
    async with mqks.connect(f"mqks://127.0.0.1:{port}") as client:

        async def publish_many() -> None:
            await client.publish_many((EVENT, payload) for payload in data)

        async def consume(name: str, take: AsyncTake, count: int, prefetch: int = 0) -> None:
            got: list[bytes] = []
            # Leaving waits until the acks have arrived.
            with watch(name, count):
                async with client.consume(QUEUE, prefetch=prefetch) as consumer:
                    await take(consumer, got, count)
            check(count, got)

        async def end_to_end(consumer: mqks.AsyncConsumer, got: list[bytes], count: int) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_batches, consumer, got, count)
                await publish_many()

        with watch("publish", count):
            for payload in data:
                await client.publish(EVENT, payload)
            await client.ping()
        await consume("consume", _one_by_one, count)
        with watch("publish_many", count):
            await publish_many()
        await consume("batches", _batches, count)
        await consume("end to end", end_to_end, count)
        for prefetch in PREFETCHES:
            with watch("publish, confirmed", few):
                for payload in data[:few]:
                    await client.publish(EVENT, payload, confirm=True)
            await consume(f"prefetch {prefetch}", _one_by_one, few, prefetch)
    return watch.figures


async def _one_by_one(consumer: mqks.AsyncConsumer, got: list[bytes], count: int) -> None:
    async for message in consumer:
        got.append(message.data)
        message.ack()
        if len(got) == count:
            break


async def _batches(consumer: mqks.AsyncConsumer, got: list[bytes], count: int) -> None:
    async for batch in consumer.batches():
        got += [message.data for message in batch]
        consumer.ack(batch)
        if len(got) == count:
            break


def blocking_client(port: int, count: int) -> Figures:
    watch, data, few = Watch("blocking"), payloads(count), max(count // BARE_SCALE, 1)
    with mqks.blocking.connect(f"mqks://127.0.0.1:{port}") as client:

        def publish_many() -> None:
            client.publish_many((EVENT, payload) for payload in data)

        def consume(name: str, take: BlockingTake, count: int, prefetch: int = 0) -> None:
            got: list[bytes] = []
            with (
                watch(name, count),
                client.consume(QUEUE, prefetch=prefetch) as consumer,
            ):
                take(consumer, got, count)
            check(count, got)

        def end_to_end(consumer: mqks.BlockingConsumer, got: list[bytes], count: int) -> None:
            thread = threading.Thread(target=_batches_blocking, args=(consumer, got, count))
            thread.start()
            publish_many()
            thread.join()

        with watch("publish", count):
            for payload in data:
                client.publish(EVENT, payload)
            client.ping()
        consume("consume", _one_by_one_blocking, count)
        with watch("publish_many", count):
            publish_many()
        consume("batches", _batches_blocking, count)
        consume("end to end", end_to_end, count)
        for prefetch in PREFETCHES:
            with watch("publish, confirmed", few):
                for payload in data[:few]:
                    client.publish(EVENT, payload, confirm=True)
            consume(f"prefetch {prefetch}", _one_by_one_blocking, few, prefetch)
    return watch.figures


def _one_by_one_blocking(consumer: mqks.BlockingConsumer, got: list[bytes], count: int) -> None:
    for message in consumer:
        got.append(message.data)
        message.ack()
        if len(got) == count:
            break


def _batches_blocking(consumer: mqks.BlockingConsumer, got: list[bytes], count: int) -> None:
    for batch in consumer.batches():
        got += [message.data for message in batch]
        consumer.ack(batch)
        if len(got) == count:
            break


PROGRAMS: dict[str, Callable[[int, int], Figures]] = {
    "bare": bare,
    "async": async_client,
    "blocking": blocking_client,
}


def run(program: str, count: int) -> Figures:
    """One program against a fresh broker."""
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bench-") as directory,
        Running(SERVERS["mqks"], Path(directory)) as running,
    ):
        running.declare()
        return PROGRAMS[program](running.port, count)


def table(runs: list[Figures]) -> list[str]:
    """A line for each figure: its median, and the median of its ratios to the bare program's."""
    lines = []
    for name in runs[0]:
        program, what = name.split(" ", 1)
        rate = statistics.median(figures[name] for figures in runs)
        line = f"{name:22} {rate:12,.0f}"
        reference = f"bare {'publish' if what.startswith('publish') else 'consume'}"
        if program != "bare" and what != "end to end":
            ratio = statistics.median(figures[name] / figures[reference] for figures in runs)
            line += f" {ratio:8.1f}"
        lines.append(line)
    return lines


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args(arguments)
    runs = []
    for _ in range(options.runs):
        figures: Figures = {}
        for program in PROGRAMS:
            figures |= run(program, options.count)
        runs.append(figures)
    print(f"{'':22} {'messages/s':>12} {'to bare':>8}")
    print("\n".join(table(runs)))


if __name__ == "__main__":
    main()
