"""One publisher with 1,000 messages in flight, each confirmed alone, into a queue nobody consumes
yet. What was confirmed is fetched and checked after the clock has stopped."""

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work

IN_FLIGHT = 1_000


def run(running: Running, size: Size) -> Figures:
    running.declare()
    reports = together(running, part(publish, size.messages, window=IN_FLIGHT))
    together(running, part(consume, size.messages))
    return {"confirms_per_s": rate(size.count, reports), "load_cores": busiest(reports)}


WORK = Work("confirms, 1,000 in flight", run, Size(300_000), Size(2_500))
