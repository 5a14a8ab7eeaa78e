"""What each step of a message's way costs, in nanoseconds a message: `python -m benchmarks.budget`.

The broker and the journal's encoding are driven directly, without sockets or disk. Every figure is
the least of several rounds: what the code costs, not what the machine was doing beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.clients.outbox import Slow
from mqks.journal.segment import ArrivedRun, Section, checksum, encode
from mqks.journal.stored import decode
from mqks.protocol.lines import LineSplitter
from mqks.settings import Settings

COUNT = 2000
"""Messages in one chunk: 256 KiB of 100-byte messages."""
ROUNDS = 15
PAYLOAD = b"x" * 100

Round = Callable[[], int]
"""Takes COUNT messages through a step once; returns the nanoseconds."""


def chunk(template: bytes) -> bytes:
    return b"".join(template % number for number in range(COUNT))


PUBLISHES = chunk(b"m%d publish e " + PAYLOAD + b"\n")
CONFIRMED = chunk(b"m%d publish --confirm e " + PAYLOAD + b"\n")
EVENTS = [b"e%d" % number for number in range(10)]
MIXED = b"".join(b"m%d publish e%d %b\n" % (n, n % 10, PAYLOAD) for n in range(COUNT))
ACKS = chunk(b"a ack c m%d\n")


class Bench:
    """One broker with one connection."""

    def __init__(self, *lines: bytes) -> None:
        self.broker = Broker(
            Settings(),
            clock=lambda: 0.0,
            now_us=lambda: 0,
            new_error_id=lambda: ("0" * 24, 0),
            on_error=lambda record: False,
        )
        self.intake = Intake(self.broker)
        self.connection: Connection = self.broker.connect("budget", local=True)
        for line in lines:
            self.receive(line + b"\n")
        self.commit()
        self.flush()

    def receive(self, data: bytes) -> None:
        self.intake.receive(self.connection, data)

    def commit(self) -> None:
        self.broker.answers.committed(self.broker.pending.take())

    def flush(self) -> int:
        """Take what would be sent; return how many lines that is."""
        lines = b"".join(self.connection.outbox).count(b"\n")
        self.connection.outbox.clear()
        self.broker.shared.outboxes.used -= self.connection.outbox_bytes
        self.connection.outbox_bytes = 0
        self.connection.touched = False
        self.broker.flow.touched = []
        self.connection.resume(Slow.OUTBOX)
        return lines


def least(once: Round) -> float:
    """Nanoseconds a message."""
    return min(once() for _ in range(ROUNDS)) / COUNT


def timed(run: Callable[[], object]) -> int:
    start = perf_counter_ns()
    run()
    return perf_counter_ns() - start


def split() -> Round:
    splitter = LineSplitter(2**20)
    return lambda: timed(lambda: splitter.feed(PUBLISHES))


def publish_to_no_queue() -> Round:
    bench = Bench()
    return lambda: timed(lambda: bench.receive(PUBLISHES))


def deliver() -> Round:
    bench = Bench(b"c consume q e")

    def measure() -> int:
        spent = timed(lambda: bench.receive(PUBLISHES))
        assert bench.flush() == COUNT
        return spent

    return measure


def into_queues(data: bytes, *events: bytes) -> Round:
    """Each event has a queue."""

    def measure() -> int:
        bench = Bench(*(b"s subscribe %b %b" % (event, event) for event in events))
        spent = timed(lambda: bench.receive(data))
        assert {queue.ready for queue in bench.broker.queues.values()} == {COUNT // len(events)}
        return spent

    return measure


def journal() -> Round:
    def measure() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(CONFIRMED)
        return timed(lambda: write(bench))

    return measure


def write(bench: Bench) -> None:
    sections = [
        Section(
            change.lane_id,
            change.next_seq,
            change.cursor,
            [ArrivedRun(run.first, 0, run.lines) for run in change.runs],
            change.acks,
            [],
        )
        for change in bench.broker.pending.take().entry.changes
    ]
    head, texts = encode(sections)
    checksum(1, b"".join([head, *texts]))


def confirm() -> Round:
    def measure() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(CONFIRMED)
        batch = bench.broker.pending.take()
        spent = timed(lambda: bench.broker.answers.committed(batch))
        assert bench.flush() == COUNT
        return spent

    return measure


def deliver_and_ack(which: int) -> Round:
    bench = Bench(b"c consume q e --manual-ack")

    def measure() -> int:
        on_delivery = timed(lambda: bench.receive(PUBLISHES))
        assert bench.flush() == COUNT
        on_acks = timed(lambda: bench.receive(ACKS))
        bench.commit()
        assert not bench.broker.consumers[b"c"].unacked
        return (on_delivery, on_acks)[which]

    return measure


def fan_out() -> Round:
    bench = Bench(*(b"c%d consume q%d e" % (number, number) for number in range(10)))

    def measure() -> int:
        spent = timed(lambda: until(bench, 10 * COUNT, PUBLISHES))
        bench.commit()
        return spent // 10

    return measure


def backlog() -> Round:
    def measure() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(PUBLISHES)
        bench.commit()
        return timed(lambda: until(bench, COUNT, b"c consume q\n"))

    return measure


def until(bench: Bench, count: int, data: bytes) -> None:
    """Receive the data, and flush until so many lines have gone out."""
    bench.receive(data)
    while count > 0:
        count -= bench.flush()


def page() -> Round:
    lines = [b"m%d event=e " % number + PAYLOAD for number in range(COUNT)]
    head, texts = encode([Section(1, COUNT + 1, 1, [ArrivedRun(1, 0, lines)], [], [])])
    body = b"".join([head, *texts])

    def read() -> None:
        for section in decode(body):
            for run in section.runs:
                assert len(run.lines(body)) == COUNT

    return lambda: timed(read)


STEPS: dict[str, Callable[[], Round]] = {
    "chunk to lines": split,
    "publish, to no queue": publish_to_no_queue,
    "publish and deliver, auto-ack": deliver,
    "publish into a queue": partial(into_queues, PUBLISHES, b"e"),
    "publish --confirm into a queue": partial(into_queues, CONFIRMED, b"e"),
    "ten events, mixed, into ten queues": partial(into_queues, MIXED, *EVENTS),
    "encode a segment, with its checksum": journal,
    "confirm": confirm,
    "publish and deliver, manual ack": partial(deliver_and_ack, 0),
    "ack": partial(deliver_and_ack, 1),
    "fan-out to ten, a delivery": fan_out,
    "deliver from a backlog, auto-ack": backlog,
    "read a page back": page,
}
"""What makes the rounds of each."""


def budget() -> dict[str, float]:
    """Step → nanoseconds a message."""
    return {name: least(make()) for name, make in STEPS.items()}


def main() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 1000)
    for step, nanoseconds in budget().items():
        print(f"{step:40}{nanoseconds:6.0f} ns")


if __name__ == "__main__":
    main()
