"""Queues, more and more, each with a binding of its own: memory of each, the start after kill -9,
and what operations on another queue cost."""

import signal

from benchmarks.process import Running
from benchmarks.scale import Costs, expect, probe, send_all, sizes, warmed_up
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size) -> Figures:
    there = 0
    costs = warmed_up(running.port, size)
    for count in sizes(size.count):
        lines = [b"s subscribe queue%d event%d\n" % (n, n) for n in range(there, count)]
        send_all(running.port, lines)
        there = count
        restart(running, costs, count)
        expect(running.port, b"len(state.queues)", count + 1)
        expect(running.port, b"len(state.queues_by_events)", count + 1)
        probe(running.port, costs, count)
    return costs.figures() | {"queue_each_bytes": costs.each_bytes()}


def restart(running: Running, costs: Costs, count: int) -> None:
    """Kills the server and starts it again: how long that takes, and its memory then."""
    running.end(signal.SIGKILL)
    costs.tell("ready", count, running.start(), "s")
    costs.tell("resident", count, running.resident_bytes(), "bytes")


WORK = Work("cost against queues", run, Size(10_000), Size(100), mqks_only=True)
