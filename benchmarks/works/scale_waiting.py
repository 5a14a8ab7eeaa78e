"""More and more messages wait in one queue: what operations on another queue cost."""

from benchmarks.load import part, together
from benchmarks.process import Running
from benchmarks.scale import expect, probe, sizes, warmed_up
from benchmarks.work import Figures, Size, Work
from benchmarks.works.paging import publish_blocks


def run(running: Running, size: Size) -> Figures:
    running.declare()
    there = 0
    costs = warmed_up(running.port, size)
    for count in sizes(size.count):
        together(running, part(publish_blocks, size.messages.part(there, count - there)))
        there = count
        costs.tell("resident", count, running.resident_bytes(), "bytes")
        probe(running.port, costs, count)
        expect(running.port, b"len(state.queues['q0'])", count)
    return costs.figures() | {"message_each_bytes": costs.each_bytes()}


WORK = Work("cost against messages waiting", run, Size(1_000_000), Size(100), mqks_only=True)
