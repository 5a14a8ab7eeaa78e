"""1,000 messages per second, the time from each publish to its arrival at the consumer; alone, or
while a hundred times as many go through another queue."""

import threading
import time

from benchmarks.flow import Flow, Stalled, ask
from benchmarks.flow import run as finish
from benchmarks.load import Gate, Report, clock, clocked, part, percentiles_us, together
from benchmarks.messages import Messages, Wrong
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


STREAM_PER_S = 100_000
STEP_S = 0.005


def stream(server: Server, port: int, gate: Gate, seconds: float) -> Report:
    """Publishes to another event at an even pace, and takes all of it from another queue."""
    out, back = server.connect(port), server.connect(port)
    greeting = b"c consume --confirm stream stream\n"
    if ask(back, greeting) != b"c ok \n":
        raise Stalled("the consumer of the stream was refused")
    line = b"m publish stream " + b"x" * 100 + b"\n"
    step = int(STREAM_PER_S * STEP_S)
    steps = int(seconds / STEP_S)
    received = Flow(back, mark=b"\n", expected=steps * step, room_bytes=steps * step * 140)
    reader = threading.Thread(target=finish, args=[received], daemon=True)
    reader.start()
    gate()
    with clocked() as report:
        for number in range(steps):
            wait_s = report.began + number * STEP_S - clock()
            if wait_s > 0:
                time.sleep(wait_s)
            out.sendall(line * step)
        reader.join()
    if not received.done:
        raise Wrong(f"the stream had {received.replies} of {received.expected} messages")
    return report


def run_beside(running: Running, size: Size) -> Figures:
    running.declare()
    arrived, sent, streamed = together(
        running,
        part(arrive, size.messages),
        part(pace, size.messages),
        part(stream, size.count / PER_SECOND),
    )
    times = [b - a for a, b in zip(sent.times, arrived.times, strict=True)]
    stream_per_s = STREAM_PER_S * size.count / PER_SECOND / streamed.took
    return percentiles_us(times) | {"stream_per_s": stream_per_s}


WORK = Work("publish to delivery at 1,000 messages per second", run, Size(5_000), Size(50))
WORKS = {
    "latency_beside": Work(
        "the same beside a stream of 100,000 per second",
        run_beside,
        Size(5_000),
        Size(50),
        mqks_only=True,
    )
}
