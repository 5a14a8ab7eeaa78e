"""Bindings, more and more, spread over a hundred queues: memory of each, the start after kill -9,
and what operations on one of these queues, through one of its bindings, cost."""

from benchmarks.process import Running
from benchmarks.scale import expect, probe, send_all, sizes, warmed_up
from benchmarks.work import Figures, Size, Work
from benchmarks.works.scale_queues import restart

QUEUES = 100


def run(running: Running, size: Size) -> Figures:
    there = 0
    costs = warmed_up(running.port, size)
    for count in sizes(size.count):
        new = range(there, count)
        lines = []
        for queue in range(min(QUEUES, count)):
            events = b" ".join(b"event%d" % n for n in new if n % QUEUES == queue)
            if queue >= there:
                lines.append(b"s subscribe queue%d %b\n" % (queue, events))
            elif events:
                lines.append(b"r rebind queue%d --add %b\n" % (queue, events))
        send_all(running.port, lines)
        there = count
        restart(running, costs, count)
        expect(running.port, b"len(state.queues_by_events)", count + 1)
        probe(running.port, costs, count, queue=b"queue0", event=b"event0")
    return costs.figures() | {"binding_each_bytes": costs.each_bytes()}


WORK = Work("cost against bindings", run, Size(100_000), Size(100), mqks_only=True)
