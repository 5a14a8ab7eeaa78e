"""As `stream`, but every message has a ttl of its own, which none outlives."""

from benchmarks.process import Running
from benchmarks.servers.base import Wish
from benchmarks.work import Figures, Size, Work
from benchmarks.works import stream

TTL_S = 600


def run(running: Running, size: Size) -> Figures:
    running.server = running.server.wished(Wish(ttl_s=TTL_S))
    return stream.run(running, size)


WORK = Work(
    "1 publisher, 1 queue, 1 consumer, each message with a ttl", run, Size(300_000), Size(500)
)
