"""1,000 messages per second, the time from each publish to its arrival at the consumer."""

import time

from benchmarks.flow import run as finish
from benchmarks.load import Gate, Report, clock, clocked, part, percentiles_us, together
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers.base import Server
from benchmarks.work import Figures, Size, Work

PER_SECOND = 1_000


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
    raw = bytes(flow.room[: flow.filled])
    messages.check(server.payloads(raw, messages.payload_bytes))
    return report


def run(running: Running, size: Size) -> Figures:
    running.declare()
    arrived, sent = together(running, part(arrive, size.messages), part(pace, size.messages))
    return percentiles_us([b - a for a, b in zip(sent.times, arrived.times, strict=True)])


WORK = Work("publish to delivery at 1,000 messages per second", run, Size(5_000), Size(50))
