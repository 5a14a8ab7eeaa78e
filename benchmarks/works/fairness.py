"""Many publishers, each with one message in flight, and as many consumers competing for one queue.

A publisher's share is what it had got confirmed when the first of them had all; a consumer's share
is what it was given in the end. One is perfect fairness; who got nothing counts as having got one.
Where consumers pull (Redis, NATS) they ask for batches of 1,000, so their shares tell little.
"""

from benchmarks.flow import pump
from benchmarks.load import (
    Gate,
    Report,
    clock,
    clocked,
    open_all,
    part,
    percentiles_us,
    rate,
    together,
)
from benchmarks.messages import Messages, Wrong, publisher_of
from benchmarks.process import Running
from benchmarks.servers.base import Server
from benchmarks.work import Figures, Size, Work

ROOM_BYTES = 1 << 19


def publish_all(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Tells how long each confirm took, and how far each publisher was when the first was done."""
    flows = [
        server.publisher(server.connect(port), messages.of(publisher), window=1)
        for publisher in messages.publishers
    ]
    times: list[float] = []
    counts: list[int] = []
    gate()
    with clocked() as report:
        sent = dict.fromkeys(flows, report.began)
        known = dict.fromkeys(flows, 0)
        for flow in pump(flows):
            if flow.replies == known[flow]:
                continue
            now = clock()
            times.append(now - sent[flow])
            sent[flow], known[flow] = now, flow.replies
            if flow.done and not counts:
                counts = [other.replies for other in flows]
    for publisher, flow in zip(messages.publishers, flows, strict=True):
        server.check_confirms(bytes(flow.room[: flow.filled]), messages.of(publisher), 1)
    report.times, report.counts = times, counts
    return report


def consume_all(server: Server, port: int, gate: Gate, messages: Messages) -> Report:
    """Tells how many messages each of the competing consumers was given."""
    flows = [
        server.consumer(server.connect(port), messages, number=number, room_bytes=ROOM_BYTES)
        for number in messages.publishers
    ]
    taken: dict[int, list[bytes]] = {number: [] for number in range(len(flows))}
    open_all(flows)
    gate()
    with clocked() as report:
        known = dict.fromkeys(flows, 0)
        missing = messages.total
        for flow in pump(flows):
            missing -= flow.replies - known[flow]
            known[flow] = flow.replies
            if not missing:
                break
            if flow.full:
                taken[flows.index(flow)].append(flow.take())
    report.counts = [flow.replies for flow in flows]
    given = []
    for number, flow in enumerate(flows):
        raw = b"".join([*taken[number], flow.take()])
        payloads = server.payloads(raw, messages.payload_bytes)
        if sorted(payloads) != sorted(payloads, key=publisher_of):
            raise Wrong(f"consumer {number} got a publisher's messages out of order")
        given += payloads
    messages.check(sorted(given))
    return report


def share(counts: list[int]) -> float:
    """How many times more than the least the most is."""
    return max(counts) / max(1, min(counts))


def run(running: Running, size: Size) -> Figures:
    running.declare()
    reports = together(running, part(consume_all, size.shared), part(publish_all, size.shared))
    consumed, published = reports
    return {
        "messages_per_s": rate(size.shared.total, reports),
        "publishers_max_to_min": share(published.counts),
        "consumers_max_to_min": share(consumed.counts),
        **percentiles_us(published.times),
    }


WORK = Work(
    "N publishers and N consumers at once",
    run,
    Size(50_000, peers=1_000),
    Size(200, peers=10),
)
