"""Limits that queues have in common, beside a model of what clients hold.

The one rule: a limit is never exceeded, nobody with room waits for a message that no limit holds
back, and each queue has its turns.
"""

from math import inf

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.throttle import common
from tests.broker.test_keys import SMALL_STEPS
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import Bucket, Holders, Rate, as_test

QUEUES = "abc"


class Limit:
    """What queues state of it, and what is left of its burst."""

    def __init__(self) -> None:
        self.stated: dict[str, tuple[int | None, Rate]] = {}
        self.bucket = Bucket()

    @property
    def most(self) -> int | None:
        return min((most for most, _ in self.stated.values() if most), default=None)

    def state(self, queue: str, most: int | None, rate: Rate) -> None:
        self.stated[queue] = most, rate
        self.changed()

    def leave(self, queue: str) -> None:
        del self.stated[queue]
        self.changed()

    def changed(self) -> None:
        self.bucket.change(min((rate for _, rate in self.stated.values() if rate), default=None))


class Common(Holders):
    """Messages are named `{queue}{number}`, consumers `{queue}-{n}`."""

    small = SMALL_STEPS | {common: {"STEP_MESSAGES": 1}}

    def __init__(self) -> None:
        super().__init__()
        self.limits: dict[str, Limit] = {}
        self.of: dict[str, str] = {}
        """Queue → the name of its limit."""
        self.paused: set[str] = set()

    def end(self) -> None:
        for queue in QUEUES:
            self.set_limit(queue, None, None, None)
            self.pause(queue, False)
        self.take_all()
        assert not self.lab.broker.shared.limits

    def queue_of(self, message: str) -> str:
        return message[0]

    def consume_all(self) -> None:
        for queue in QUEUES:
            self.consume(queue, 1, 5)

    @initialize(memory=st.sampled_from([0, 300, 1 << 20]), calls=st.sampled_from([0, 2, 10]))
    def start(self, memory: int, calls: int) -> None:
        self.lab = Lab(memory, calls)
        for queue in QUEUES:
            self.lab.do("p", f"s subscribe {queue} {queue}".encode())
        self.lab.do("p", b"s set_queue b --ordered=key", b"s set_queue c --concurrency=2")
        for queue in QUEUES:
            self.set_limit(queue, "x", 2, None)
        self.consume_all()

    def rest(self) -> None:
        self.lab.rest()
        self.look()
        self.lab.check()
        for name in QUEUES:
            queue = self.queue(name)
            assert queue.unacked + queue.leased == self.held_by(name)
            idle = [each for each in queue.ring if each.room() > 0]
            waits = any(message[0] == name for message in self.waiting)
            if idle and waits and name not in self.paused:
                assert not self.may(name), f"{idle} wait for nothing"
                assert queue.held_back
                assert queue.held_back.by in ("limit", "concurrency")

    def held_by(self, *queues: str) -> int:
        return sum(message[0] in queues for message in self.held)

    def may(self, queue: str) -> bool:
        if queue == "c" and self.held_by(queue) >= 2:
            return False
        if queue not in self.of:
            return True
        limit = self.limits[self.of[queue]]
        may_more = limit.most is None or self.held_by(*limit.stated) < limit.most
        return may_more and not limit.bucket.is_empty

    def look(self) -> None:
        for limit in self.limits.values():
            limit.bucket.pass_us(self.lab.now_us - self.at_us)
        self.at_us = self.lab.now_us
        for message in self.came():
            assert message[0] not in self.paused
            if message[0] in self.of:
                limit = self.limits[self.of[message[0]]]
                most = limit.most
                assert most is None or self.held_by(*limit.stated) <= most, "too many are held"
                limit.bucket.take()

    @rule(
        queue=st.sampled_from(QUEUES),
        name=st.sampled_from(["x", "x", "y", None]),
        most=st.sampled_from([None, 1, 2, 3, 7]),
        rate=st.sampled_from([None, (1, 1), (2, 3), (50, 5)]),
    )
    def set_limit(self, queue: str, name: str | None, most: int | None, rate: Rate) -> None:
        self.rest()
        text, old = name or "", self.of.pop(queue, None)
        if name is not None:
            self.of[queue] = name
            self.limits.setdefault(name, Limit()).state(queue, most, rate)
            text += f",concurrency={most}" if most else ""
            text += f",rate={rate[0]}/s,{rate[1]}" if rate else ""
        if old not in (None, name):
            self.limits[old].leave(queue)
        self.lab.send("p", f"s set_queue {queue} --limit={text}".encode())
        self.rest()

    @rule(queue=st.sampled_from(QUEUES), paused=st.booleans())
    def pause(self, queue: str, paused: bool) -> None:
        self.rest()
        (self.paused.add if paused else self.paused.discard)(queue)
        text = "yes" if paused else ""
        self.lab.send("p", f"s set_queue {queue} --paused={text}".encode())
        self.rest()

    @rule(queues=st.lists(st.sampled_from(QUEUES), min_size=1, max_size=6))
    def publish(self, queues: list[str]) -> None:
        new = [f"{queue}{next(self.ids)}" for queue in queues]
        self.waiting.update(new)
        self.lab.send("p", *(f"{each} publish --key=k{each} {each[0]} x".encode() for each in new))
        self.rest()

    @rule(queue=st.sampled_from(QUEUES), number=st.integers(1, 2), prefetch=st.integers(1, 5))
    def consume(self, queue: str, number: int, prefetch: int) -> None:
        who = f"{queue}-{number}"
        if who.encode() not in self.lab.broker.consumers:
            self.lab.send(who, f"{who} consume {queue} --manual-ack --prefetch={prefetch}".encode())
        self.rest()

    @rule(queue=st.sampled_from(QUEUES), limit=st.integers(1, 5))
    def receive(self, queue: str, limit: int) -> None:
        self.receive_some(queue, limit)

    @rule(queue=st.sampled_from(QUEUES), number=st.integers(1, 2))
    def leave(self, queue: str, number: int) -> None:
        self.gone(f"{queue}-{number}")

    def fill(self) -> None:
        for limit in self.limits.values():
            limit.bucket.fill()


TestCommon = as_test(Common, 0.5)


def common_queues(lab: Lab, *names: str, limit: str) -> None:
    for name in names:
        lab.do("p", f"s set_queue {name} --limit={limit}".encode())
        lab.do(name, f"c{name} consume {name} {name} --manual-ack".encode())


def test_queues_take_turns_however_much_one_has() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", "b", limit="x,concurrency=1")
    lab.do("p", *(b"a%d publish a x" % n for n in range(100)))
    lab.do("p", *(b"b%d publish b x" % n for n in range(3)))
    order = []
    for _ in range(10):
        (message,) = lab.delivered()
        order.append(message)
        lab.do(message[:1].decode(), b"s ack c%b %b" % (message[:1], message))
    assert order == b"a0 a1 b0 a2 b1 a3 b2 a4 a5 a6".split()


def test_queues_share_a_burst_that_is_left_at_once() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", "b", "c", limit="x,rate=10/s,30")
    lab.do("p", *(b"a%d publish a x" % n for n in range(500)))
    lab.do("p", *(b"%b%d publish %b x" % (who, n, who) for who in (b"b", b"c") for n in range(500)))
    assert len(lab.delivered()) == 30
    counts = dict.fromkeys(b"abc", 0)
    lab.wait(3)
    for message in lab.delivered():
        counts[message[0]] += 1
    assert [*counts.values()] == [10, 10, 10]


def test_messages_that_are_on_their_way_back_still_count() -> None:
    lab, count = Lab(1 << 20), 3000
    common_queues(lab, "a", "b", limit=f"x,concurrency={count}")
    for who in b"a", b"b":
        lab.do("p", *(b"%b%d publish %b x" % (who, n, who) for n in range(count)))
    a, b = (lab.broker.queues[name] for name in (b"a", b"b"))
    assert a.unacked == count
    lab.broker.turns.chunk_s = -1.0  # Each turn is over as it begins.
    lab.broker.turns.begin()
    lab.send("a", b"s release ca --all --delay=60")
    assert a.returning
    while a.returning:
        assert not b.unacked
        lab.work()
    lab.broker.turns.chunk_s = inf
    lab.rest()
    assert a.leased == count
    assert not b.unacked
    lab.wait(60)
    assert a.unacked + b.unacked == count
    lab.check()


@patches_modules
def test_all_queues_are_counted_before_nothing_is_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(common, "STEP_MESSAGES", 1)
    lab = Lab(1 << 20)
    common_queues(lab, *"abcdef", limit="x,concurrency=5")
    for queue in b"abcdef":
        lab.do("p", b"m%c publish %c x" % (queue, queue))
    assert lab.delivered() == b"ma mb mc md me".split()
    lab.do("e", b"s ack ce me")
    assert lab.delivered() == [b"mf"]


def test_a_thousand_queues_with_one_limit_are_served_in_short_steps() -> None:
    lab, count = Lab(1 << 24), 300
    for n in range(count):
        lab.send("p", b"s set_queue q%d --limit=x,concurrency=1,rate=%d/s" % (n, n + 1))
        lab.rest()
    lab.do("p", b"s consume q0 e", b"s set_queue q0 --limit=x,rate=1000/s,1000")
    for n in range(1, count):
        lab.do("p", b"c%d consume q%d e" % (n, n))
    lab.replies.clear()
    lab.do("p", b"m publish e x")
    lab.broker.turns.chunk_s = -1.0  # Each turn is over as it begins.
    delivered = len(lab.delivered())
    while delivered < count:
        lab.now_us += 10_000_000
        lab.broker.schedule.run_due(lab.broker.turns)
        lab.broker.go_on()
        lab.hear()
        step = len(lab.delivered())
        assert step <= 2
        delivered += step
    lab.do("p", *(b"s delete_queue q%d" % n for n in range(count)))
    assert not lab.broker.shared.limits
