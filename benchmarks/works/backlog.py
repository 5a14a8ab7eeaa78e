"""Messages are published while nobody consumes, the server is killed by SIGKILL and started again,
and a consumer drains them with acks."""

import signal

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size) -> Figures:
    running.declare(manual_ack=True)
    published = together(running, part(publish, size.messages))
    running.end(signal.SIGKILL)
    ready_s = running.start()
    drained = together(running, part(consume, size.messages, manual_ack=True, waiting=True))
    return {
        "in_per_s": rate(size.count, published),
        "ready_s": ready_s,
        "out_per_s": rate(size.count, drained),
        "load_cores": busiest(published + drained),
    }


WORK = Work("backlog: published, kill -9, restart, drained", run, Size(1_000_000), Size(500))
