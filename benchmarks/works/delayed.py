"""Every message is delayed by about as long as it takes to publish all, or by more; a consumer
waits for them. In is counted until the last confirm, out from when the first one is due."""

from benchmarks.load import busiest, consume, part, publish, rate, together
from benchmarks.process import Running
from benchmarks.servers.base import Wish
from benchmarks.work import Figures, Size, Work

SLOWEST_PER_S, SLOWEST_SCALE = 20_000, 0.05
"""Servers publish about as fast, or faster, those with a smaller scale in proportion. Where one is
slower than that, the first go out while the last come in."""


def run(running: Running, size: Size) -> Figures:
    slowest_per_s = SLOWEST_PER_S * max(running.server.scale, SLOWEST_SCALE)
    delay_s = 1 + round(size.count / slowest_per_s)
    running.server = running.server.wished(Wish(delay_s=delay_s))
    running.declare()
    taken, published = together(running, part(consume, size.messages), part(publish, size.messages))
    due = published.began + delay_s
    return {
        "in_per_s": rate(size.count, [published]),
        "out_per_s": size.count / (taken.ended - due),
        "load_cores": busiest([published, taken]),
    }


WORK = Work("delayed messages, in and out", run, Size(1_000_000), Size(500))
