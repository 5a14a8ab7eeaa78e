"""Idle connections, more and more: memory of each, and what operations on another one cost.

The memory is that of the process; the kernel's buffers come on top.
"""

from contextlib import ExitStack

from benchmarks.process import Running
from benchmarks.scale import expect, many, probe, sizes, warmed_up
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size) -> Figures:
    port = running.port
    there = 0
    costs = warmed_up(port, size)
    with ExitStack() as stack:
        for count in sizes(size.count):
            stack.enter_context(many(port, count - there))
            there = count
            costs.tell("resident", count, running.resident_bytes(), "bytes")
            expect(port, b"len(state.socks_by_clients)", count + 1)
            probe(port, costs, count)
    return costs.figures() | {"connection_each_bytes": costs.each_bytes()}


WORK = Work("cost against idle connections", run, Size(10_000), Size(100), mqks_only=True)
