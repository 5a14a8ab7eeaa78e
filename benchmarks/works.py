"""The works: what a load is made of, its sizes, and the figures it gives.

The one rule: a figure's name ends with its unit, and a work either gives all its figures or raises.
What a server confirmed is fetched and checked after the clock has stopped.
"""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import talk
from benchmarks.flow import run as finish
from benchmarks.load import (
    Gate,
    Report,
    busiest,
    clock,
    clocked,
    consume,
    part,
    percentiles_us,
    publish,
    rate,
    together,
)
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers.base import Server

Figures = dict[str, float]
QUEUES = 10
PER_SECOND = 1_000


@dataclass(frozen=True, slots=True)
class Size:
    """How many messages, how large, and (where a work has many publishers) from how many."""

    count: int
    payload_bytes: int = 100
    peers: int = 1

    def scaled(self, scale: float) -> "Size":
        """The same with fewer messages, but no fewer than a thousand or all."""
        return replace(self, count=max(int(self.count * scale), min(self.count, 1_000)))

    @property
    def messages(self) -> Messages:
        """All messages, divided among the publishers."""
        return Messages(self.count // self.peers, self.payload_bytes, range(self.peers))


@dataclass(frozen=True, slots=True)
class Work:
    """A load, told in one line, its run against a fresh server, and its two sizes."""

    title: str
    run: Callable[[Running, Size], Figures]
    full: Size
    tiny: Size


def stream(running: Running, size: Size, manual_ack: bool = False) -> Figures:
    """From the first byte published until the last message has arrived, or its ack was taken."""
    running.declare(manual_ack=manual_ack)
    reports = together(
        running,
        part(consume, size.messages, manual_ack=manual_ack),
        part(publish, size.messages),
    )
    return {"messages_per_s": rate(size.count, reports), "load_cores": busiest(reports)}


def confirm(running: Running, size: Size, in_flight: int) -> Figures:
    """Each message is confirmed alone, into a queue that nobody consumes yet."""
    running.declare()
    reports = together(running, part(publish, size.messages, window=in_flight))
    together(running, part(consume, size.messages))
    return {"confirms_per_s": rate(size.count, reports), "load_cores": busiest(reports)}


def confirm_one(running: Running, size: Size) -> Figures:
    """The time from each publish to its confirm."""
    running.declare()
    [report] = together(running, part(ask_each, size.messages))
    together(running, part(consume, size.messages))
    return percentiles_us(report.times)


def ask_each(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Publishes one by one, each after the confirm of the one before."""
    flow = server.publisher(server.connect(port), messages, window=1)
    times = []
    gate()
    with clocked() as report:
        for n in range(messages.count):
            began = clock()
            flow.push()
            while flow.replies <= n:
                flow.pull()
            times.append(clock() - began)
    report.times = times
    server.check_confirms(flow.received, messages, 1)
    return report


def backlog(running: Running, size: Size) -> Figures:
    """Published while nobody consumes; the server is killed and started again, and drained."""
    running.declare(manual_ack=True)
    published = together(running, part(publish, size.messages))
    running.end(signal.SIGKILL)
    ready_s = running.start()
    drained = together(running, part(consume, size.messages, manual_ack=True, waiting=True))
    return {
        "in_per_s": rate(size.count, published),
        "ready_s": ready_s,
        "out_per_s": rate(size.count, drained),
        "load_cores": busiest(published + drained),
    }


def fanout(running: Running, size: Size) -> Figures:
    """Ten queues get every message. Their consumers are one load program."""
    running.declare(queues=QUEUES)
    reports = together(
        running,
        part(consume, size.messages, queues=QUEUES),
        part(publish, size.messages),
    )
    deliveries = rate(size.count * QUEUES, reports)
    return {"deliveries_per_s": deliveries, "load_cores": busiest(reports)}


def latency(running: Running, size: Size) -> Figures:
    """The time from each publish to its arrival at the consumer."""
    running.declare()
    arrived, sent = together(running, part(arrive, size.messages), part(pace, size.messages))
    return percentiles_us([b - a for a, b in zip(sent.times, arrived.times, strict=True)])


def pace(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Publishes a message each millisecond, and tells when it did."""
    flow = server.publisher(server.connect(port), messages)
    times = []
    gate()
    with clocked() as report:
        for n in range(messages.count):
            wait_s = report.began + n / PER_SECOND - clock()
            if wait_s > 0:
                time.sleep(wait_s)
            times.append(clock())
            flow.ahead = n + 1  # Answers, if any, are read in the end.
            flow.allow()
            flow.push()
        finish(flow)
    report.times = times
    return report


def arrive(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Tells when each message arrived."""
    flow = server.consumer(server.connect(port), messages)
    times: list[float] = []
    flow.open()
    gate()
    with clocked() as report:
        flow.push()
        while not flow.done:
            flow.pull()
            now = clock()
            times.extend([now] * (flow.replies - len(times)))
            flow.push()
    report.times = times
    messages.check(server.payloads(flow.received, messages.payload_bytes))
    return report


def talkers(running: Running, size: Size, in_flight: int) -> Figures:
    """Confirmed publishes of many connections, or large ones of one, by a program in C."""
    if reason := talk.missing():
        raise RuntimeError(reason)
    running.declare()
    before = running.written_bytes()
    [report] = together(running, part(talk.talk, size.messages, window=in_flight))
    written = running.written_bytes() - before
    together(running, part(consume, size.messages))
    per_s = rate(size.messages.total, [report])
    return {
        "confirms_per_s": per_s,
        "megabytes_per_s": per_s * size.payload_bytes / 1e6,
        "written_bytes_per_published_byte": written / size.messages.total / size.payload_bytes,
        **percentiles_us(report.times),
        "load_cores": busiest([report]),
    }


def _confirm(in_flight: int) -> Work:
    title = f"1 publisher, {in_flight:,} confirms in flight"
    return Work(title, partial(confirm, in_flight=in_flight), Size(300_000), Size(2_500))


def _talkers(connections: int, in_flight: int, payload_bytes: int, count: int) -> Work:
    few = min(connections, 10)
    return Work(
        f"{connections:,} connections, {in_flight} confirms in flight, {payload_bytes:,} bytes",
        partial(talkers, in_flight=in_flight),
        Size(count, payload_bytes, connections),
        Size(4 * few, payload_bytes, few),
    )


WORKS = {
    "stream": Work("1 publisher, 1 consumer, auto-ack", stream, Size(300_000), Size(500)),
    "acked": Work(
        "1 publisher, 1 consumer, each message acked alone",
        partial(stream, manual_ack=True),
        Size(300_000),
        Size(500),
    ),
    "confirm": _confirm(1_000),
    "confirm_10k": _confirm(10_000),
    "confirm_one": Work("1 publisher, one confirm in flight", confirm_one, Size(5_000), Size(50)),
    "backlog": Work("published, kill -9, restart, drained", backlog, Size(1_000_000), Size(500)),
    "fanout": Work("10 queues on one event, 10 consumers", fanout, Size(100_000), Size(200)),
    "latency": Work(
        "publish to delivery at 1,000 messages a second", latency, Size(5_000), Size(50)
    ),
    "talkers_100": _talkers(100, 1, 100, 100_000),
    "talkers_1000": _talkers(1_000, 1, 100, 100_000),
    "talkers_10k": _talkers(50, 1, 10_000, 20_000),
    "big_10k": _talkers(1, 50, 10_000, 20_000),
    "big_100k": _talkers(1, 16, 100_000, 3_000),
    "big_900k": _talkers(1, 4, 900_000, 300),
}
