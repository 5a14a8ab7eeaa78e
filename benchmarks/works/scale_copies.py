"""One event bound to more and more queues, each with a consumer: what each delivered copy costs.

The consumers share a few connections, so that no copy waits for a reader.
"""

from benchmarks.process import Running
from benchmarks.scale import (
    BLOCK,
    DELIVERY,
    PAYLOAD,
    ROUNDS,
    Costs,
    Talk,
    exchange,
    expect,
    many,
    send_all,
    sizes,
)
from benchmarks.work import Figures, Size, Work

CONNECTIONS = 10
COPIES = 20
"""In one round, times the operations in a block."""


def run(running: Running, size: Size) -> Figures:
    costs = Costs(min(BLOCK, size.count))
    port = running.port
    there = 0
    with many(port, CONNECTIONS) as talks, Talk(port) as publisher:
        for count in sizes(size.count):
            new = range(there, count)
            send_all(port, [b"s subscribe queue%d e\n" % n for n in new])
            for at, talk in enumerate(talks):
                mine = [n for n in new if n % CONNECTIONS == at]
                asked = b"".join(b"c%d consume --confirm queue%d\n" % (n, n) for n in mine)
                exchange([talk.flow(asked, [b"c%d ok \n" % n for n in mine])])
            there = count
            for _ in range(ROUNDS):
                costs.took("copy", count, publish(publisher, talks, count, costs.block * COPIES))
            expect(port, b"len(state.queues)", count)
    return costs.figures()


def publish(publisher: Talk, talks: list[Talk], queues: int, copies: int) -> float:
    """Publishes until about so many copies are delivered; gives the seconds of one."""
    messages = range(max(1, copies // queues))
    flows = [publisher.each([b"%d publish e %b\n" % (n, PAYLOAD) for n in messages], [])]
    for at, talk in enumerate(talks):
        mine = range(at, queues, CONNECTIONS)
        given = [DELIVERY % (b"c%d" % queue, n, b"e") for n in messages for queue in mine]
        flows.append(talk.flow(b"", given))
    return exchange(flows) / (len(messages) * queues)


WORK = Work(
    "cost of a copy against queues on one event", run, Size(10_000), Size(100), mqks_only=True
)
