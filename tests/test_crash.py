"""A server under load is killed with SIGKILL again and again, always on the same database.

The clients keep their own record, and only that decides what was lost, doubled or out of order.
`TEST_SEED=n` in the environment repeats the choices of a run.
"""

from __future__ import annotations

import itertools
import random
import sqlite3
import threading
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.line_client import LineClient
from tests.seeds import printed_seed
from tests.server_process import ServerProcess
from tests.waiting import until

LOAD_SECONDS = (0.2, 0.8)
BURST = 20
"""Messages a publisher sends before it waits for the answers."""
MESSAGES_PER_LIFE = 1_500
"""What one publisher sends in one life at most."""

WAL_BYTES_MAX = 32 * 1024 * 1024
"""At any death."""
DRAINED_SEGMENTS_MAX = 16
DRAINED_FILE_BYTES_MAX = 4 * 1024 * 1024

QUEUES = {b"left": {b"a"}, b"right": {b"b"}, b"both": {b"a", b"b"}}
COMPETING = {b"right"}
"""Queues with two consumers: first deliveries are in order for each of them only."""


def payload(message: bytes) -> bytes:
    """The data of a message, known from its id."""
    return message + b" " + b"x" * (zlib.crc32(message) % 300)


# ------------------------------------------------------------------------------- the record


@dataclass(frozen=True, slots=True, order=True)
class Seen:
    """Something a consumer saw or did. `stamp` orders what all of them did."""

    stamp: int
    what: str  # "delivered", "acks" (sent, unconfirmed or not yet), "acked" (confirmed), "rejects"
    queue: bytes
    consumer: bytes
    message: bytes
    retry: int = 0


@dataclass(slots=True)
class Record:
    """All that the clients know, over all lives."""

    sent: dict[bytes, bytes] = field(default_factory=dict)  # message to event
    confirmed: set[bytes] = field(default_factory=set)
    acked: set[tuple[bytes, bytes]] = field(default_factory=set)  # (queue, message), confirmed
    done: set[tuple[bytes, bytes]] = field(default_factory=set)  # an ack was sent at least
    retried: int = 0
    newest: dict[tuple[bytes, bytes], int] = field(default_factory=dict)
    seen: set[tuple[bytes, bytes]] = field(default_factory=set)

    def take(self, life: list[Seen]) -> None:
        """Checks one life of the server against all before it, and adds it."""
        gone: set[tuple[bytes, bytes]] = set()
        retries: dict[tuple[bytes, bytes], int] = {}
        newest: dict[tuple[bytes, bytes], int] = {}
        for event in sorted(life):
            copy = event.queue, event.message
            if event.what == "delivered":
                assert self.sent.get(event.message) in QUEUES[event.queue], f"never sent: {event}"
                assert copy not in self.acked, f"came back after a confirmed ack: {event}"
                assert copy not in gone, f"came back after an ack in the same life: {event}"
                assert event.retry > retries.get(copy, -1), f"retry did not rise: {event}"
                retries[copy] = event.retry
                self.retried += event.retry > 0
                if event.retry == 0:
                    _in_order(newest, event.consumer, event)
                if copy not in self.seen and event.queue not in COMPETING:
                    _in_order(self.newest, event.queue, event)
                self.seen.add(copy)
            elif event.what == "acks":
                gone.add(copy)
                self.done.add(copy)
            elif event.what == "acked":
                self.acked.add(copy)

    def lost(self) -> set[tuple[bytes, bytes]]:
        """Confirmed messages that no consumer has come to ack, by queue."""
        return {
            (queue, message)
            for message in self.confirmed
            for queue, events in QUEUES.items()
            if self.sent[message] in events
        } - self.done


def _in_order(newest: dict[tuple[bytes, bytes], int], stream: bytes, event: Seen) -> None:
    publisher, number = event.message.split(b"-")
    last = newest.get((stream, publisher), -1)
    assert int(number) > last, f"out of order: {event} after number {last}"
    newest[stream, publisher] = int(number)


# ------------------------------------------------------------------------------ the clients


class Life:
    """One life of the server as its clients see it: it ends when the connections do."""

    def __init__(self, server: ServerProcess, record: Record, stamps: itertools.count[int]) -> None:
        self.server = server
        self.record = record
        self.stamps = stamps
        self.ending = threading.Event()
        self.acked = 0
        """Confirmed acks, about: several threads count."""

    def publish(
        self, name: bytes, numbers: itertools.count[int], events: list[bytes], *, confirm: bool
    ) -> None:
        """Bursts of messages; without `confirm` a ping sets the pace."""
        try:
            with LineClient(self.server.address) as client:
                for _ in range(0, MESSAGES_PER_LIFE, BURST):
                    lines = []
                    for number in itertools.islice(numbers, BURST):
                        message = b"%s-%d" % (name, number)
                        event = events[number % len(events)]
                        self.record.sent[message] = event
                        flag = b"--confirm " if confirm else b""
                        lines.append(
                            b"%s publish %s%s %s\n" % (message, flag, event, payload(message))
                        )
                    client.send(b"".join(lines) + (b"" if confirm else b"p ping\n"))
                    for _reply in lines if confirm else [b"p"]:
                        message, ok, rest = client.line().split(b" ")
                        assert (ok, rest) == (b"ok", b"")
                        if confirm:
                            self.record.confirmed.add(message)
        except (EOFError, ConnectionError):
            assert self.ending.is_set(), "the server left its publishers"

    def consume(
        self, queue: bytes, name: bytes, rng: random.Random, habits: dict[str, float]
    ) -> list[Seen]:
        """Consumes until the server dies, and deals with each message by one of these habits."""
        seen: list[Seen] = []
        try:
            with LineClient(self.server.address) as client:
                client.send(b"%s consume %s --manual-ack\n" % (name, queue))
                while True:
                    answers = []
                    for line in client.lines():
                        event = self._read(line, queue, name)
                        seen.append(event)
                        if event.what == "delivered":
                            [habit] = rng.choices(list(habits), list(habits.values()))
                            answers.append(self._answer(event, habit, seen))
                        else:
                            self.acked += 1
                    client.send(b"".join(answers))
        except (EOFError, ConnectionError):
            assert self.ending.is_set(), "the server left its consumers"
        return seen

    def drain(self, queue: bytes, sentinel: bytes) -> list[Seen]:
        """Acks everything, each ack confirmed, up to and with the sentinel."""
        seen: list[Seen] = []
        drained: set[bytes] = set()
        name = b"drain-" + queue
        awaited = 1
        with LineClient(self.server.address) as client:
            client.send(b"%s consume %s --manual-ack\n" % (name, queue))
            while awaited:
                answers = []
                for line in client.lines():
                    event = self._read(line, queue, name)
                    seen.append(event)
                    if event.what == "delivered":
                        assert event.message not in drained, f"came twice: {event}"
                        drained.add(event.message)
                        answers.append(self._answer(event, "ack --confirm", seen))
                        awaited += event.message != sentinel
                    else:
                        awaited -= 1
                client.send(b"".join(answers))
        return seen

    def _read(self, line: bytes, queue: bytes, consumer: bytes) -> Seen:
        head, ok, rest = line.split(b" ", 2)
        assert ok == b"ok", line
        if head != consumer:
            assert (head[:4], rest) == (b"ack:", b""), line
            return Seen(next(self.stamps), "acked", queue, consumer, head[4:])
        message, properties, data = rest.split(b" ", 2)
        assert data == payload(message), line
        event, _, retry = properties.partition(b",")
        assert event == b"event=" + self.record.sent.get(message, b"?"), line
        return Seen(
            next(self.stamps),
            "delivered",
            queue,
            consumer,
            message,
            int(retry.removeprefix(b"retry=") or 0),
        )

    def _answer(self, event: Seen, habit: str, seen: list[Seen]) -> bytes:
        if habit == "leave":
            return b""
        action, _, flag = habit.partition(" ")
        what = f"{action}s"
        seen.append(Seen(next(self.stamps), what, event.queue, event.consumer, event.message))
        arguments = b"%s %s" % (event.consumer, event.message)
        words = [b"ack:" + event.message, action.encode(), flag.encode(), arguments]
        return b" ".join(word for word in words if word) + b"\n"


# -------------------------------------------------------------------- what each life is asked


def check_unacked_returns(server: ServerProcess, life: int) -> None:
    """A message delivered and not acked, long before the crash, has retry=1 after it."""
    with LineClient(server.address) as consumer, LineClient(server.address) as publisher:
        confirm = b"probe ok "
        if life == 0:
            assert consumer.ask(b"probe consume --confirm probes probe --manual-ack") == confirm
        else:
            consumer.send(b"probe consume --confirm probes --manual-ack\n")
            old = b"probe-%d" % (life - 1)
            assert consumer.line() == confirm
            assert consumer.line() == b"probe ok %s event=probe,retry=1 data" % old
            assert consumer.ask(b"a ack --confirm probe %s" % old) == b"a ok "
        new = b"probe-%d" % life
        assert publisher.ask(b"%s publish --confirm probe data" % new) == new + b" ok "
        assert consumer.line() == b"probe ok %s event=probe data" % new
        # The delivery above was before this commit, and this commit is before the crash.
        assert publisher.ask(b"later publish --confirm later data") == b"later ok "


def check_subscriptions(
    server: ServerProcess, model: set[bytes], life: int, rng: random.Random
) -> None:
    """Subscriptions are those that were confirmed in all lives before; changes them."""
    with LineClient(server.address) as client:
        new = b"topic.%02d" % life
        model.add(new)
        told = client.ask(b"s consume --confirm subscriptions --add %s" % new)
        assert told == b"s ok --update subscriptions " + b" ".join(sorted(model))
        assert client.line() == b"s ok "
        if old := rng.choice([b"", *sorted(model)]):
            model.remove(old)
            client.send(b"r rebind --confirm subscriptions --remove %s\n" % old)
            told = b" ".join([b"s ok --update subscriptions", *sorted(model)])
            assert client.line() == told
            assert client.line() == b"r ok "


def segments(db: Path) -> int:
    connection = sqlite3.connect(f"file:{db}?mode=ro", uri=True)
    try:
        return int(connection.execute("select count(*) from segment").fetchone()[0])
    finally:
        connection.close()


def wal_bytes(db: Path) -> int:
    wal = db.with_name(db.name + "-wal")
    return wal.stat().st_size if wal.exists() else 0


# ---------------------------------------------------------------------------------- the test


@pytest.mark.parametrize("lives", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_nothing_confirmed_is_lost_in_crashes(tmp_path: Path, lives: int) -> None:
    rng = random.Random(printed_seed())
    db = tmp_path / "mqks.db"
    record = Record()
    stamps = itertools.count()
    topics: set[bytes] = set()
    publishers: dict[bytes, tuple[itertools.count[int], list[bytes], bool]] = {
        b"careful": (itertools.count(), [b"a"], True),
        b"mixed": (itertools.count(), [b"a", b"b", b"b"], True),
        b"careless": (itertools.count(), [b"b"], False),
    }
    consumers: dict[bytes, tuple[bytes, dict[str, float]]] = {
        b"left-1": (b"left", {"ack --confirm": 98, "leave": 2}),
        b"right-1": (b"right", {"ack": 80, "reject": 17, "leave": 3}),
        b"right-2": (b"right", {"ack": 50, "ack --confirm": 40, "reject": 10}),
        b"both-1": (b"both", {"ack": 60, "ack --confirm": 30, "reject": 8, "leave": 2}),
    }

    for number in range(lives):
        with (
            ServerProcess(db) as server,
            ThreadPoolExecutor(len(publishers) + len(consumers)) as pool,
        ):
            if number == 0:
                with LineClient(server.address) as client:
                    for queue, events in [*QUEUES.items(), (b"later", {b"later"})]:
                        line = b"s subscribe --confirm %s %s" % (queue, b" ".join(sorted(events)))
                        assert client.ask(line) == b"s ok "
            life = Life(server, record, stamps)
            tasks: list[Future[None]] = [
                pool.submit(life.publish, name, numbers, events, confirm=confirm)
                for name, (numbers, events, confirm) in publishers.items()
            ]
            watched: list[Future[list[Seen]]] = [
                pool.submit(life.consume, queue, name, random.Random(rng.random()), habits)
                for name, (queue, habits) in consumers.items()
            ]
            try:
                check_unacked_returns(server, number)
                check_subscriptions(server, topics, number, rng)
                least = (number + 1) * BURST
                until(lambda: life.acked >= BURST and len(record.confirmed) >= least)  # noqa: B023
                time.sleep(rng.uniform(*LOAD_SECONDS))  # So as to die anywhere.
                assert server.is_running, "the server died of its own"
            finally:
                life.ending.set()
                server.kill()
            for task in tasks:
                task.result()
            record.take([event for task in watched for event in task.result()])
            assert wal_bytes(db) <= WAL_BYTES_MAX

    assert len(record.confirmed) >= lives * BURST, "hardly any load"
    assert len(record.acked) >= lives * BURST, "hardly any acks"
    assert record.retried > lives, "the crashes returned nothing"

    # Everything is drained, and stays so after one more crash.
    with ServerProcess(db) as server:
        drain(server, record, stamps, first=0)
        with LineClient(server.address) as client:
            assert client.ask(b"d1 delete_queue --confirm probes") == b"d1 ok "
            assert client.ask(b"d2 delete_queue --confirm later") == b"d2 ok "
    assert not record.lost()
    with ServerProcess(db) as server:
        seen = drain(server, record, stamps, first=2)
        assert {event.message for event in seen} == {b"end-2", b"end-3"}

        until(lambda: segments(db) <= DRAINED_SEGMENTS_MAX, "what nobody needs is not given back")
        assert server.stop() == 0
    assert db.stat().st_size <= DRAINED_FILE_BYTES_MAX
    assert wal_bytes(db) <= DRAINED_FILE_BYTES_MAX


def drain(
    server: ServerProcess, record: Record, stamps: itertools.count[int], *, first: int
) -> list[Seen]:
    """Empties all queues, up to the messages `end-{first}` and `end-{first + 1}` published now."""
    ends = {b"a": b"end-%d" % first, b"b": b"end-%d" % (first + 1)}
    with LineClient(server.address) as client:
        for event, message in ends.items():
            record.sent[message] = event
            line = b"%s publish --confirm %s %s" % (message, event, payload(message))
            assert client.ask(line) == message + b" ok "
            record.confirmed.add(message)
    life = Life(server, record, stamps)
    seen = [event for queue, es in QUEUES.items() for event in life.drain(queue, ends[max(es)])]
    record.take(seen)
    return seen
