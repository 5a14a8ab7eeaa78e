"""Cost against size: what one operation costs while there is more and more that it does not touch.

The one rule: operations go in blocks over one connection, so that the round trip is shared by many;
but each has a ping behind it, so that the server cannot gather them and has to do each by itself.
The median of the blocks is told, and what came back is checked after each. The ping is part of what
is told, and so is this side's share: what counts is how a figure grows, not what it is.
"""

import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field

from benchmarks.flow import CHUNK_BYTES, Flow, ask, connect, run
from benchmarks.load import clock
from benchmarks.messages import Wrong
from benchmarks.work import Figures, Size

BLOCK = 1_000
ROUNDS = 15
PEERS = 50
"""Connections that come and go at once."""
PAYLOAD = b"x" * 100
PING, PONG = b"p ping x\n", b"p ok x\n"
SYNC, SYNCED = b"s ping --confirm x\n", [b"s ok x\n", b"s ok \n"]
DELIVERY = b"%b ok %d event=%b " + PAYLOAD + b"\n"
REJECTED = DELIVERY.replace(b"=%b ", b"=%b,retry=1 ")


def sizes(largest: int, steps: int = 3) -> list[int]:
    """The largest, a tenth of it, and so on; the smallest first."""
    return sorted({max(1, largest // 10**step) for step in range(steps)})


@dataclass(slots=True)
class Costs:
    """Seconds of each operation at each size, and other figures at each size; `block` operations
    go at once."""

    block: int = BLOCK
    times: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    others: dict[tuple[str, int], tuple[float, str]] = field(default_factory=dict)

    def took(self, operation: str, size: int, seconds: float) -> None:
        self.times.setdefault((operation, size), []).append(seconds)

    def tell(self, name: str, size: int, value: float, unit: str) -> None:
        self.others[name, size] = value, unit

    def figures(self) -> Figures:
        """Each at each size; of operations also how many times more the largest size costs."""
        told: Figures = {}
        medians = {key: statistics.median(times) * 1e6 for key, times in self.times.items()}
        values = {key: (value, "us") for key, value in medians.items()} | self.others
        for (name, size), (value, unit) in values.items():
            told[f"{name}_at_{size}_{unit}"] = value
        for name in dict.fromkeys(name for name, _ in medians):
            at = sorted(size for other, size in medians if other == name)
            told[f"{name}_large_to_small"] = medians[name, at[-1]] / medians[name, at[0]]
        return told

    def each_bytes(self) -> float:
        """Resident memory for each one more, from the smallest size to the largest."""
        at = sorted(size for name, size in self.others if name == "resident")
        rest = self.others["resident", at[-1]][0] - self.others["resident", at[0]][0]
        return rest / max(1, at[-1] - at[0])


def exchange(requests: Sequence[tuple[Flow, list[bytes]]]) -> float:
    """Drives flows until each has its answers; gives the seconds. Raises `Wrong`.

    Deliveries to a consumer must come in their order; what else comes, when it does.
    """
    took = timed([flow for flow, _ in requests])
    for flow, expected in requests:
        found = answers(flow)
        if sorted(found) != sorted(expected) or by_consumer(found) != by_consumer(expected):
            odd = [line for line in found if line not in expected]
            raise Wrong(f"{len(found)} answers instead of {len(expected)}, such as {odd[:3]}")
    return took


def timed(flows: Sequence[Flow]) -> float:
    """Drives flows until each has its answers; gives the seconds."""
    began = clock()
    run(*flows)
    return clock() - began


def answers(flow: Flow) -> list[bytes]:
    """The lines that have come."""
    return bytes(flow.room[: flow.filled]).splitlines(keepends=True)


def deliveries(lines: list[bytes]) -> list[bytes]:
    return [line for line in lines if b" event=" in line]


def by_consumer(lines: list[bytes]) -> dict[bytes, list[bytes]]:
    """Deliveries in their order. Between queues there is none: two lines that come in one chunk are
    published together, queue by queue."""
    found: dict[bytes, list[bytes]] = {}
    for line in deliveries(lines):
        found.setdefault(line.partition(b" ")[0], []).append(line)
    return found


class Talk:
    """One connection over which blocks go; when its context ends, the server knows it has gone."""

    def __init__(self, port: int) -> None:
        self.sock = connect(port)

    def flow(self, requests: bytes, expected: list[bytes]) -> tuple[Flow, list[bytes]]:
        """Requests, and the lines that are to come."""
        room_bytes = sum(map(len, expected)) + (1 << 19)
        flow = Flow(self.sock, requests, expected=len(expected), room_bytes=room_bytes)
        return flow, expected

    def each(self, operations: list[bytes], expected: list[bytes]) -> tuple[Flow, list[bytes]]:
        """Operations to be done each by itself, the last one until all are durable."""
        requests = b"".join([line + PING for line in operations]) + SYNC
        return self.flow(requests, [*expected, *[PONG] * len(operations), *SYNCED])

    def block(self, operations: list[bytes], expected: list[bytes]) -> float:
        """Does them; gives the seconds of one."""
        return exchange([self.each(operations, expected)]) / len(operations)

    def ask(self, line: bytes) -> bytes:
        return ask(self.sock, line + b"\n").removesuffix(b"\n")

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self.sock, suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)
            while self.sock.recv(CHUNK_BYTES):
                pass


def state(port: int, expression: bytes) -> int:
    """A number out of the running server."""
    with Talk(port) as talk:
        return int(talk.ask(b"v _eval " + expression).removeprefix(b"v ok "))


def expect(port: int, expression: bytes, number: int) -> None:
    """Raises `Wrong` when the server does not have that many."""
    if (found := state(port, expression)) != number:
        raise Wrong(f"{expression.decode()} is {found} instead of {number}")


def send_all(port: int, lines: Sequence[bytes]) -> None:
    """Sends requests without answers, until all of them are durable."""
    with Talk(port) as talk:
        exchange([talk.flow(b"".join(lines) + SYNC, SYNCED)])


def probe(
    port: int, costs: Costs, size: int, *, queue: bytes = b"probe", event: bytes = b"probe"
) -> None:
    """What publish and deliver, reject and deliver again, ack, ping, consume and disconnect cost
    on one queue that has nothing to do with what there are `size` of."""
    send_all(port, [] if queue != b"probe" else [b"s subscribe probe probe\n"])
    numbers = range(1, costs.block + 1)
    publishes = [b"%d publish %b %b\n" % (n, event, PAYLOAD) for n in numbers]
    delivered = [DELIVERY % (b"c", n, event) for n in numbers]
    rejects = [b"r reject c %d\n" % n for n in numbers]
    acks = [b"a ack c %d\n" % n for n in numbers]
    again = [REJECTED % (b"c", n, event) for n in numbers]
    with Talk(port) as talk:
        talk.ask(b"c consume --confirm %b --manual-ack" % queue)
        for _ in range(ROUNDS):
            costs.took("ping", size, talk.block([PING] * costs.block, [PONG] * costs.block))
            costs.took("publish", size, talk.block(publishes, delivered))
            costs.took("reject", size, talk.block(rejects, again))
            costs.took("ack", size, talk.block(acks, []))
    for _ in range(ROUNDS):
        come_and_go(port, costs, size, queue)
    expect(port, b"len(state.queues['%b'])" % queue, 0)


def come_and_go(port: int, costs: Costs, size: int, queue: bytes) -> None:
    """What it costs to consume, and to disconnect, told for each of some that do so at once."""
    with ExitStack() as stack:
        talks = stack.enter_context(many(port, PEERS))
        flows = [
            talk.flow(b"t%d consume --confirm %b --manual-ack\n" % (n, queue), [b"t%d ok \n" % n])
            for n, talk in enumerate(talks)
        ]
        costs.took("consume", size, exchange(flows) / PEERS)
        began = clock()
        for talk in talks:
            talk.sock.shutdown(socket.SHUT_WR)
        for talk in talks:
            if rest := talk.sock.recv(1):
                raise Wrong(f"{rest!r} came instead of the end")
        costs.took("disconnect", size, (clock() - began) / PEERS)


def warmed_up(port: int, size: Size) -> Costs:
    """Costs to be measured of a server that has taken what memory any load makes it take."""
    costs = Costs(min(BLOCK, size.count))
    probe(port, Costs(costs.block), 0)
    return costs


@contextmanager
def many(port: int, count: int) -> Iterator[list[Talk]]:
    """So many connections, each known to the server."""
    with ExitStack() as stack:
        talks = [stack.enter_context(Talk(port)) for _ in range(count)]
        for talk in talks:
            talk.ask(b"p ping x")
        yield talks
