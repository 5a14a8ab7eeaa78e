"""One publisher, one queue, one consumer that need not ack, measured from the first byte published
until the last message has arrived."""

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size, manual_ack: bool = False) -> Figures:
    running.declare(manual_ack=manual_ack)
    reports = together(
        running,
        part(consume, size.messages, manual_ack=manual_ack),
        part(publish, size.messages),
    )
    return {"messages_per_s": rate(size.count, reports), "load_cores": busiest(reports)}


WORK = Work("1 publisher, 1 queue, 1 consumer, auto-ack", run, Size(300_000), Size(500))
