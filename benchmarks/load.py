"""Load programs: each a process of its own, all let go at once.

The one rule: the clock is one for all processes (the system's monotonic one), and everything that
can be done before it starts or after it has stopped is done there.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.flow import Flow, run
from benchmarks.messages import Messages
from benchmarks.process import Running
from benchmarks.servers.base import Server

PATIENCE_S = 600.0

clock = time.monotonic


@dataclass(slots=True)
class Report:
    """What a load program tells: seconds of the clock, and those of each message."""

    began: float
    ended: float
    cpu_s: float
    times: list[float] = field(default_factory=list)

    @property
    def took(self) -> float:
        return self.ended - self.began


@contextmanager
def clocked() -> Iterator[Report]:
    """Measures what is done inside."""
    cpu_s = time.process_time()
    report = Report(clock(), 0.0, 0.0)
    yield report
    report.ended = clock()
    report.cpu_s = time.process_time() - cpu_s


Gate = Callable[[], None]
"""Called by a load program when it is prepared; returns when all the others are as well."""

Role = Callable[..., Report]
"""A top-level function of a server, its port, a gate and further arguments."""


def play(line: "Connection[Any, Any]", role: Role, *arguments: object, **options: object) -> None:
    """What runs in a load program's process."""

    def gate() -> None:
        line.send(None)
        line.recv()

    try:
        line.send(role(*arguments[:2], gate, *arguments[2:], **options))
    except Exception as error:  # Whatever it was, the work must hear of it.
        line.send(error)


def part(role: Role, *arguments: object, **options: object) -> tuple[Role, Any, Any]:
    """A role with its arguments, for `together`."""
    return role, arguments, options


def together(running: Running, *parts: tuple[Role, Any, Any]) -> list[Report]:
    """Runs the parts, each in its process, all let go once all are prepared.

    Raises what a load program raised: `Stalled`, `Wrong`.
    """
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    try:
        for role, arguments, options in parts:
            here, there = context.Pipe()
            arguments = (there, role, running.server, running.port, *arguments)
            process = context.Process(target=play, args=arguments, kwargs=options, daemon=True)
            process.start()
            there.close()
            lines.append(here)
            processes.append(process)
        for line in lines:
            hear(line)
        for line in lines:
            line.send(None)
        return [hear(line) for line in lines]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def hear(line: "Connection[Any, Any]") -> Any:
    """The next word of a load program; raises it when it is an error."""
    if not line.poll(PATIENCE_S):
        raise TimeoutError(f"a load program says nothing for {PATIENCE_S} seconds")
    word = line.recv()
    if isinstance(word, Exception):
        raise word
    return word


# The roles most works are made of


def publish(
    server: Server, port: int, gate: Gate, messages: Messages, window: int | None = None
) -> Report:
    """Publishes over one connection, until the last message is confirmed."""
    flow = server.publisher(server.connect(port), messages, window)
    gate()
    with clocked() as report:
        run(flow)
    server.check_confirms(flow.received, messages, window)
    return report


def consume(
    server: Server,
    port: int,
    gate: Gate,
    messages: Messages,
    queues: int = 1,
    manual_ack: bool = False,
    waiting: bool = False,
) -> Report:
    """One consumer per queue, each getting all messages.

    When the messages are `waiting` already, subscribing is part of what is clocked.
    """
    flows = [
        server.consumer(server.connect(port), messages, queue, manual_ack)
        for queue in range(queues)
    ]
    if not waiting:
        open_all(flows)
    gate()
    with clocked() as report:
        if waiting:
            open_all(flows)
        run(*flows)
    for flow in flows:
        server.check_no_refusal(flow.received)
        messages.check(server.payloads(flow.received, messages.payload_bytes))
    return report


def open_all(flows: Sequence[Flow]) -> None:
    for flow in flows:
        flow.open()


# Figures


def percentile(times: Sequence[float], percent: float) -> float:
    """The smallest of the times that so many percent are not above."""
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def percentiles_us(times: Sequence[float]) -> dict[str, float]:
    """Median and 99th percentile of times in seconds, told in microseconds."""
    return {"p50_us": percentile(times, 50) * 1e6, "p99_us": percentile(times, 99) * 1e6}


def rate(count: int, reports: Sequence[Report]) -> float:
    """Per second, from the first beginning to the last end."""
    began = min(report.began for report in reports)
    return count / (max(report.ended for report in reports) - began)


def busiest(reports: Sequence[Report]) -> float:
    """How much of a core the busiest load program used: one over it is its ceiling."""
    return max(report.cpu_s / report.took for report in reports)
