"""What each step of a message's way costs, in nanoseconds a message: `python -m benchmarks.budget`.

The broker and the journal's encoding are driven directly, without sockets or disk. Every figure is
the least of several rounds: what the code costs, not what the machine was doing beside it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter_ns

from mqks.broker.broker import Broker
from mqks.broker.connection import Connection, Slow
from mqks.broker.intake import Intake
from mqks.journal.segment import Lines, Section, checksum, decode, encode
from mqks.protocol.lines import LineSplitter
from mqks.settings import Settings

COUNT = 2000
"""Messages in one chunk: 256 KiB of 100-byte messages."""
ROUNDS = 15
PAYLOAD = b"x" * 100


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
        self.broker.committed(self.broker.pending.take())

    def flush(self) -> int:
        """Take what would be sent; return how many lines that is."""
        lines = b"".join(self.connection.outbox).count(b"\n")
        self.connection.outbox.clear()
        self.broker.shared.outboxes.used -= self.connection.outbox_bytes
        self.connection.outbox_bytes = 0
        self.connection.touched = False
        self.broker.shared.touched = []
        self.connection.resume(Slow.OUTBOX)
        return lines


def least(measure: Callable[[], int]) -> float:
    """Nanoseconds a message; `measure` returns the nanoseconds of one round."""
    return min(measure() for _ in range(ROUNDS)) / COUNT


def timed(run: Callable[[], object]) -> int:
    start = perf_counter_ns()
    run()
    return perf_counter_ns() - start


def chunk(template: bytes) -> bytes:
    return b"".join(template % number for number in range(COUNT))


def budget() -> dict[str, float]:
    """Step → nanoseconds a message."""
    publishes = chunk(b"m%d publish e " + PAYLOAD + b"\n")
    confirmed = chunk(b"m%d publish --confirm e " + PAYLOAD + b"\n")
    acks = chunk(b"a ack c m%d\n")
    figures = {}

    splitter = LineSplitter(2**20)
    figures["chunk to lines"] = least(lambda: timed(lambda: splitter.feed(publishes)))

    nowhere = Bench()
    figures["publish, to no queue"] = least(lambda: timed(lambda: nowhere.receive(publishes)))

    auto = Bench(b"c consume q e")

    def deliver() -> int:
        spent = timed(lambda: auto.receive(publishes))
        assert auto.flush() == COUNT
        return spent

    figures["publish and deliver, auto-ack"] = least(deliver)

    def into_queue(data: bytes) -> Callable[[], int]:
        def measure() -> int:
            bench = Bench(b"s subscribe q e")
            return timed(lambda: bench.receive(data))

        return measure

    figures["publish into a queue"] = least(into_queue(publishes))
    figures["publish --confirm into a queue"] = least(into_queue(confirmed))

    def mixed() -> int:
        bench = Bench(*(b"s subscribe q%d e%d" % (each, each) for each in range(10)))
        data = b"".join(
            b"m%d publish e%d %b\n" % (number, number % 10, PAYLOAD) for number in range(COUNT)
        )
        spent = timed(lambda: bench.receive(data))
        assert {queue.ready for queue in bench.broker.queues.values()} == {COUNT // 10}
        return spent

    figures["ten events, mixed, into ten queues"] = least(mixed)

    def journal() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(confirmed)

        def write() -> None:
            changes = bench.broker.pending.take().entry.changes
            head, texts = encode(
                [
                    Section(
                        change.lane_id,
                        change.next_seq,
                        change.cursor,
                        [Lines(run.first, 0, run.lines) for run in change.runs],
                        change.acks,
                        [],
                    )
                    for change in changes
                ]
            )
            checksum(1, b"".join([head, *texts]))

        return timed(write)

    figures["encode a segment, with its checksum"] = least(journal)

    def confirm() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(confirmed)
        batch = bench.broker.pending.take()
        spent = timed(lambda: bench.broker.committed(batch))
        assert bench.flush() == COUNT
        return spent

    figures["confirm"] = least(confirm)

    manual = Bench(b"c consume q e --manual-ack")
    spent_on_acks = []

    def deliver_and_ack() -> int:
        spent = timed(lambda: manual.receive(publishes))
        assert manual.flush() == COUNT
        spent_on_acks.append(timed(lambda: manual.receive(acks)))
        manual.commit()
        assert not manual.broker.consumers[b"c"].unacked
        return spent

    figures["publish and deliver, manual ack"] = least(deliver_and_ack)
    figures["ack"] = min(spent_on_acks) / COUNT

    fan = Bench(*(b"c%d consume q%d e" % (number, number) for number in range(10)))

    def fan_out() -> int:
        got = 0
        start = perf_counter_ns()
        fan.receive(publishes)
        while got < 10 * COUNT:
            got += fan.flush()
        spent = perf_counter_ns() - start
        fan.commit()
        return spent // 10

    figures["fan-out to ten, a delivery"] = least(fan_out)

    def backlog() -> int:
        bench = Bench(b"s subscribe q e")
        bench.receive(publishes)
        bench.commit()
        got = 0
        start = perf_counter_ns()
        bench.receive(b"c consume q\n")
        while got < COUNT:
            got += bench.flush()
        return perf_counter_ns() - start

    figures["deliver from a backlog, auto-ack"] = least(backlog)

    lines = [b"m%d event=e " % number + PAYLOAD for number in range(COUNT)]
    head, texts = encode([Section(1, COUNT + 1, 1, [Lines(1, 0, lines)], [], [])])
    body = b"".join([head, *texts])

    def page() -> int:
        def read() -> None:
            for section in decode(body):
                for run in section.runs:
                    assert len(run.lines(body)) == COUNT

        return timed(read)

    figures["read a page back"] = least(page)
    return figures


def main() -> None:
    gc.freeze()
    gc.set_threshold(10_000, 10, 1000)
    for step, nanoseconds in budget().items():
        print(f"{step:40}{nanoseconds:6.0f} ns")


if __name__ == "__main__":
    main()
