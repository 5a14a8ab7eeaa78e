"""A hundred publishers on one event, one queue, one consumer, auto-ack. All publishers are one load
program; the order of each one's messages is checked."""

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size) -> Figures:
    running.declare()
    reports = together(running, part(consume, size.shared), part(publish, size.shared))
    return {"messages_per_s": rate(size.shared.total, reports), "load_cores": busiest(reports)}


WORK = Work(
    "fan-in: many publishers, 1 consumer", run, Size(300_000, peers=100), Size(500, peers=5)
)
