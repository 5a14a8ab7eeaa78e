"""As `acked`, but the consumer holds 100 messages at most."""

from benchmarks.process import Running
from benchmarks.servers.base import Wish
from benchmarks.work import Figures, Size, Work
from benchmarks.works import stream

PREFETCH = 100


def run(running: Running, size: Size) -> Figures:
    running.server = running.server.wished(Wish(prefetch=PREFETCH))
    return stream.run(running, size, manual_ack=True)


WORK = Work(
    "1 publisher, 1 queue, 1 consumer, manual ack, prefetch 100", run, Size(300_000), Size(500)
)
