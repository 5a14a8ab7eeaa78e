"""More and more consumers of one queue: what one publish and one ack cost, and one more consumer's
coming and going.

The consumers are all on one connection, the limit of which is 10,000.
"""

from collections import Counter

from benchmarks.messages import Wrong
from benchmarks.process import Running
from benchmarks.scale import (
    DELIVERY,
    PAYLOAD,
    ROUNDS,
    Costs,
    Talk,
    answers,
    come_and_go,
    deliveries,
    exchange,
    expect,
    send_all,
    sizes,
    timed,
    warmed_up,
)
from benchmarks.work import Figures, Size, Work


def run(running: Running, size: Size) -> Figures:
    there = 0
    costs = warmed_up(running.port, size)
    send_all(running.port, [b"s subscribe queue e\n"])
    with Talk(running.port) as talk:
        for count in sizes(size.count, steps=4):
            new = range(there, count)
            lines = [b"c%d consume --confirm queue --manual-ack\n" % n for n in new]
            exchange([talk.flow(b"".join(lines), [b"c%d ok \n" % n for n in new])])
            there = count
            costs.tell("resident", count, running.resident_bytes(), "bytes")
            for _ in range(ROUNDS):
                taken = publish(talk, costs, count)
                costs.took("ack", count, talk.block([b"a ack %b\n" % each for each in taken], []))
            for _ in range(ROUNDS):
                come_and_go(running.port, costs, count, b"queue")
            expect(running.port, b"len(state.queues['queue'])", 0)
    return costs.figures() | {"consumer_each_bytes": costs.each_bytes()}


def publish(talk: Talk, costs: Costs, consumers: int) -> list[bytes]:
    """Publishes a block; gives who got what, as an ack tells it. All must have had their turn."""
    publishes = [b"%d publish e %b\n" % (n, PAYLOAD) for n in range(costs.block)]
    like = [DELIVERY % (b"c%d" % consumers, n, b"e") for n in range(costs.block)]
    flow, _ = talk.each(publishes, like)
    costs.took("publish", consumers, timed([flow]) / costs.block)
    delivered = deliveries(answers(flow))
    taken = [line.split(b" ", 3)[:3:2] for line in delivered]
    shares = Counter(consumer for consumer, _ in taken)
    right = [DELIVERY % (consumer, n, b"e") for n, (consumer, _) in enumerate(taken)]
    least, most = min(shares.values()), max(shares.values())
    even = len(shares) == min(costs.block, consumers) and most - least <= 1
    if delivered != right or len(right) != costs.block or not even:
        raise Wrong(f"{len(delivered)} deliveries to {len(shares)} consumers")
    return [b" ".join(each) for each in taken]


WORK = Work("cost against consumers of one queue", run, Size(10_000), Size(100), mqks_only=True)
