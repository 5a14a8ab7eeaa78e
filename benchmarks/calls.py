"""`python -m benchmarks.calls`: what one call of a client costs, against a program of bare sockets.

One call is in flight at a time. All programs talk to the same server and take turns within each
round, each over connections of its own:

- ping: a round trip without a commit
- publish: one message with a confirm
- receive: from the publish of a message, by another bare socket, until the consumer has it
- ack: with `prefetch=1`, from the ack of a message until the next one has arrived

A figure is the median over the rounds of the p50 (p99) of a round, in microseconds; `adds` is the
median of the differences to the bare program's p50 in the same round.

The one rule: every reply and message is checked when the clock has stopped.
"""

import argparse
import statistics
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import anyio

import mqks
from benchmarks.client import Bare, check, payloads
from benchmarks.process import Running
from benchmarks.servers import SERVERS

QUEUE, EVENT = "q0", "e"
WARM_UP = 20
"""The first calls of a connection are not timed."""

Seconds = list[float]
"""Of each call."""


class Publisher:
    """Publishes single messages over a bare socket, without a confirm."""

    def __init__(self, port: int) -> None:
        self._bare = Bare(port)
        self.close = self._bare.close

    def publish(self, payload: bytes) -> None:
        self._bare.send(b"m publish e " + payload)


def fill(port: int, data: list[bytes]) -> None:
    with mqks.connect_blocking(url(port)) as client:
        client.publish_many((EVENT, payload) for payload in data)


def empty(port: int, data: list[bytes]) -> None:
    """The queue must contain just these messages; consume them."""
    got: list[bytes] = []
    consumer = Bare(port)
    consumer.ask(b"c consume --confirm q0", b"c ok ")
    while len(got) < len(data):
        got.append(consumer.delivery().split(b" ", 4)[4])
    consumer.close()
    check(len(data), got)
    with mqks.connect_blocking(url(port)) as client:
        if left := client.purge(QUEUE):
            raise RuntimeError(f"{left} messages too many")


def url(port: int) -> str:
    return f"mqks://127.0.0.1:{port}"


def bare(work: str, port: int, data: list[bytes]) -> Seconds:
    bare, seconds = Bare(port), Seconds()
    got: list[bytes] = []
    try:
        match work:
            case "ping":
                for payload in data:
                    began = perf_counter()
                    bare.ask(b"m ping " + payload, b"m ok " + payload)
                    seconds.append(perf_counter() - began)
                return seconds
            case "publish":
                for payload in data:
                    began = perf_counter()
                    bare.ask(b"m publish --confirm e " + payload, b"m ok ")
                    seconds.append(perf_counter() - began)
                return seconds
            case "receive":
                publisher = Publisher(port)
                bare.ask(b"c consume --confirm q0", b"c ok ")
                for payload in data:
                    began = perf_counter()
                    publisher.publish(payload)
                    got.append(bare.delivery().split(b" ", 4)[4])
                    seconds.append(perf_counter() - began)
                publisher.close()
            case _:
                bare.ask(b"c consume --confirm q0 --manual-ack --prefetch=1", b"c ok ")
                words = bare.delivery().split(b" ", 4)
                got.append(words[4])
                for _ in data[1:]:
                    began = perf_counter()
                    bare.send(b"a ack c " + words[2])
                    words = bare.delivery().split(b" ", 4)
                    seconds.append(perf_counter() - began)
                    got.append(words[4])
                bare.ask(b"a ack --confirm c " + words[2], b"a ok ")
    finally:
        bare.close()
    check(len(data), got)
    return seconds


def blocking(work: str, port: int, data: list[bytes]) -> Seconds:
    seconds, got = Seconds(), list[bytes]()
    with mqks.connect_blocking(url(port)) as client:
        match work:
            case "ping":
                for payload in data:
                    text = payload.decode()
                    began = perf_counter()
                    answer = client.ping(text)
                    seconds.append(perf_counter() - began)
                    got.append(answer.encode())
            case "publish":
                for payload in data:
                    began = perf_counter()
                    client.publish(EVENT, payload, confirm=True)
                    seconds.append(perf_counter() - began)
                return seconds
            case "receive":
                publisher = Publisher(port)
                with client.consume(QUEUE, auto_ack=True) as consumer:
                    for payload in data:
                        began = perf_counter()
                        publisher.publish(payload)
                        message = consumer.receive(60)
                        seconds.append(perf_counter() - began)
                        got.append(message.data)
                publisher.close()
            case _:
                with client.consume(QUEUE, prefetch=1) as consumer:
                    message = consumer.receive(60)
                    got.append(message.data)
                    for _ in data[1:]:
                        began = perf_counter()
                        message.ack()
                        message = consumer.receive(60)
                        seconds.append(perf_counter() - began)
                        got.append(message.data)
                    message.ack()
    check(len(data), got)
    return seconds


async def asynchronous(work: str, port: int, data: list[bytes]) -> Seconds:
    seconds, got = Seconds(), list[bytes]()
    async with mqks.connect(url(port)) as client:
        match work:
            case "ping":
                for payload in data:
                    text = payload.decode()
                    began = perf_counter()
                    answer = await client.ping(text)
                    seconds.append(perf_counter() - began)
                    got.append(answer.encode())
            case "publish":
                for payload in data:
                    began = perf_counter()
                    await client.publish(EVENT, payload, confirm=True)
                    seconds.append(perf_counter() - began)
                return seconds
            case "receive":
                publisher = Publisher(port)
                async with client.consume(QUEUE, auto_ack=True) as consumer:
                    for payload in data:
                        began = perf_counter()
                        publisher.publish(payload)
                        message = await consumer.receive(60)
                        seconds.append(perf_counter() - began)
                        got.append(message.data)
                publisher.close()
            case _:
                async with client.consume(QUEUE, prefetch=1) as consumer:
                    message = await consumer.receive(60)
                    got.append(message.data)
                    for _ in data[1:]:
                        began = perf_counter()
                        message.ack()
                        message = await consumer.receive(60)
                        seconds.append(perf_counter() - began)
                        got.append(message.data)
                    message.ack()
    check(len(data), got)
    return seconds


def on_loop(backend: dict[str, Any], work: str, port: int, data: list[bytes]) -> Seconds:
    run: Callable[..., Awaitable[Seconds]] = asynchronous
    return anyio.run(run, work, port, data, **backend)


UVLOOP = {"backend_options": {"use_uvloop": True}}
PROGRAMS: dict[str, Callable[[str, int, list[bytes]], Seconds]] = {
    "bare": bare,
    "blocking": blocking,
    "async": partial(on_loop, {}),
    "async, uvloop": partial(on_loop, UVLOOP),
}
WORKS = "ping", "publish", "receive", "ack"


def call(program: str, work: str, port: int, count: int) -> Seconds:
    """One program's calls of one kind, checked."""
    data = payloads(count + WARM_UP)
    if work == "ack":
        fill(port, data)
    seconds = PROGRAMS[program](work, port, data)
    empty(port, data if work == "publish" else [])
    return seconds[WARM_UP:]


def percentile(seconds: Seconds, part: float) -> float:
    """In microseconds."""
    return sorted(seconds)[int(len(seconds) * part)] * 1e6


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="calls of a program in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--works", default=",".join(WORKS))
    parser.add_argument("--programs", default=",".join(PROGRAMS).replace(", ", " "))
    options = parser.parse_args(arguments)
    programs = ["bare", *(name for name in PROGRAMS if name != "bare")]
    chosen = options.programs.split(",")
    programs = [name for name in programs if name == "bare" or name.replace(", ", " ") in chosen]
    works = options.works.split(",")
    seconds: dict[tuple[str, str], list[Seconds]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mqks-bench-") as directory,
        Running(SERVERS["mqks"], Path(directory)) as running,
    ):
        running.declare()
        for turn in range(options.rounds):
            first = turn % len(programs)
            for work in works:
                for program in programs[first:] + programs[:first]:
                    seconds.setdefault((work, program), []).append(
                        call(program, work, running.port, options.count)
                    )
    print(f"{'µs':24} {'p50':>8} {'p99':>8} {'adds':>8}")
    for work in works:
        reference = [percentile(each, 0.5) for each in seconds[work, "bare"]]
        for program in programs:
            rounds = seconds[work, program]
            middles = [percentile(each, 0.5) for each in rounds]
            p50, p99 = (
                statistics.median(middles),
                statistics.median(percentile(each, 0.99) for each in rounds),
            )
            adds = statistics.median(a - b for a, b in zip(middles, reference, strict=True))
            added = "" if program == "bare" else f"{adds:8.0f}"
            print(f"{work + ', ' + program:24} {p50:8.0f} {p99:8.0f} {added}".rstrip())


if __name__ == "__main__":
    main()
