"""Masks, more and more, bound to two queues, honest ones and such as are meant to cost; the worst
have to be tried on each new event, one by one. What it costs to bind and to remove one more mask of
such a queue, to publish an event that is known, and to publish one that is new."""

from benchmarks.process import Running
from benchmarks.scale import PAYLOAD, ROUNDS, Costs, Talk, expect, send_all
from benchmarks.work import Figures, Size, Work

KINDS = {
    "honest": b"job.%d.*",
    "deep": b"*.*.*.*.%d.*",
    "stars": b"*a*%d*.*b*.*c*",
    "worst": b"*a*%djob*.b",
}
NEW = 20
"""New events in a block: each may have to be tried on all masks."""
LINE_MASKS = 1000


def run(running: Running, size: Size) -> Figures:
    costs = Costs(min(1000, size.count))
    for kind, mask in KINDS.items():
        there = 0
        for count in (size.count // 10_000 or 1, size.count // 100 or 2, size.count):
            for queue in (b"one", b"two"):
                mine = range(there + (queue == b"two"), count, 2)
                masks = [mask % number for number in mine]
                lines = [
                    b"r subscribe %b --add-mask %b\n"
                    % (queue, b" ".join(masks[start : start + LINE_MASKS]))
                    for start in range(0, len(masks), LINE_MASKS)
                ]
                send_all(running.port, lines)
            there = count + count % 2
            _probe(running.port, costs, kind, mask, count)
        send_all(running.port, [b"d delete_queue one\n", b"d delete_queue two\n"])
    expect(running.port, b"len(state.masks_by_queues)", 0)
    return costs.figures()


def _probe(port: int, costs: Costs, kind: str, mask: bytes, size: int) -> None:
    numbers = range(10_000_000, 10_000_000 + costs.block)
    more = [mask % number for number in numbers]
    adds = [b"r rebind one --add-mask %b\n" % each for each in more]
    removes = [b"r rebind one --remove-mask %b\n" % each for each in more]
    known = [b"m publish nobody.wants.this %b\n" % PAYLOAD] * costs.block
    made_up = iter(range(1 << 30))
    with Talk(port) as talk:
        for _ in range(ROUNDS):
            costs.took(f"bind_{kind}", size, talk.block(adds, []))
            costs.took(f"remove_{kind}", size, talk.block(removes, []))
            costs.took(f"publish_known_{kind}", size, talk.block(known, []))
            new = [b"m publish job.x%d.y.z %b\n" % (next(made_up), PAYLOAD) for _ in range(NEW)]
            costs.took(f"publish_new_{kind}", size, talk.block(new, []))


WORK = Work("cost against masks", run, Size(90_000), Size(100), mqks_only=True)
