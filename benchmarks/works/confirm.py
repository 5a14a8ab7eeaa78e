"""One publisher with 1,000 or 10,000 messages in flight, each confirmed alone, into a queue nobody
consumes yet. What was confirmed is fetched and checked after the clock has stopped."""

from functools import partial

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size, in_flight: int) -> Figures:
    running.declare()
    reports = together(running, part(publish, size.messages, window=in_flight))
    together(running, part(consume, size.messages))
    return {"confirms_per_s": rate(size.count, reports), "load_cores": busiest(reports)}


def _work(in_flight: int) -> Work:
    title = f"confirms, {in_flight:,} in flight"
    return Work(title, partial(run, in_flight=in_flight), Size(300_000), Size(2_500))


WORK = _work(1_000)
WORKS = {"confirm_10k": _work(10_000)}
