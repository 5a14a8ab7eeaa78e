"""Ten queues get every message; each has one consumer, auto-ack. All ten are one load program."""

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work

QUEUES = 10


def run(running: Running, size: Size) -> Figures:
    running.declare(queues=QUEUES)
    reports = together(
        running,
        part(consume, size.messages, queues=QUEUES),
        part(publish, size.messages),
    )
    deliveries = rate(size.count * QUEUES, reports)
    return {"deliveries_per_s": deliveries, "load_cores": busiest(reports)}


WORK = Work("fan-out: 10 queues on one event, 10 consumers", run, Size(100_000), Size(200))
