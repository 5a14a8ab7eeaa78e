"""Limits that queues have in common, beside a model of what clients hold.

The one rule: a limit is never exceeded, nobody with room waits for a message that no limit holds
back, and each queue has its turns.
"""

from fractions import Fraction
from math import inf

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.throttle import common
from tests.broker.test_keys import SMALL_STEPS
from tests.kit.bare import ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import Holders

QUEUES = "abc"
RATES = None, (1, 1), (2, 3), (50, 5)


class Limit:
    """What queues state of it, and what is left of its burst."""

    def __init__(self) -> None:
        self.stated: dict[str, tuple[int | None, tuple[int, int] | None]] = {}
        self.tokens = Fraction(0)

    @property
    def most(self) -> int | None:
        return min((most for most, _ in self.stated.values() if most), default=None)

    @property
    def rate(self) -> tuple[int, int] | None:
        return min((rate for _, rate in self.stated.values() if rate), default=None)

    def state(self, queue: str, most: int | None, rate: tuple[int, int] | None) -> None:
        before = self.rate
        self.stated[queue] = most, rate
        self.changed(before)

    def leave(self, queue: str) -> None:
        before = self.rate
        del self.stated[queue]
        self.changed(before)

    def changed(self, before: tuple[int, int] | None) -> None:
        rate = self.rate
        if rate is not None and rate != before:
            self.tokens = Fraction(rate[1] if before is None else min(rate[1], int(self.tokens)))

    def restart(self) -> None:
        self.tokens = Fraction(self.rate[1] if self.rate else 0)

    def pass_us(self, passed_us: int) -> None:
        if self.rate is not None:
            per_s, burst = self.rate
            self.tokens = min(Fraction(burst), self.tokens + Fraction(passed_us * per_s, 1_000_000))


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
        for _ in range(300):
            if not (self.held or self.waiting):
                break
            for queue in QUEUES:
                self.consume(queue, 1, 5)
            self.tick(20)
            for message in [*self.held]:
                self.settle_one(message, "ack")
        assert not self.waiting, "a message is never delivered"
        assert not self.lab.broker.shared.limits

    @initialize(memory=st.sampled_from([0, 300, 1 << 20]), calls=st.sampled_from([0, 2, 10]))
    def start(self, memory: int, calls: int) -> None:
        self.lab = Lab(memory, calls)
        for queue in QUEUES:
            self.lab.do("p", f"s subscribe {queue} {queue}".encode())
        self.lab.do("p", b"s set_queue b --ordered=key", b"s set_queue c --concurrency=2")
        for queue in QUEUES:
            self.set_limit(queue, "x", 2, None)
            self.consume(queue, 1, 5)

    def queue(self, name: str):  # type: ignore[no-untyped-def]
        return self.lab.broker.queues[name.encode()]

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
        return may_more and (limit.rate is None or limit.tokens >= 1)

    def look(self) -> None:
        for limit in self.limits.values():
            limit.pass_us(self.lab.now_us - self.at_us)
        self.at_us = self.lab.now_us
        for message in self.came():
            assert message[0] not in self.paused
            if message[0] in self.of:
                limit = self.limits[self.of[message[0]]]
                most = limit.most
                assert most is None or self.held_by(*limit.stated) <= most, "too many are held"
                limit.tokens -= 1
                assert limit.rate is None or limit.tokens >= 0, "too many are delivered"

    @rule(
        queue=st.sampled_from(QUEUES),
        name=st.sampled_from(["x", "x", "y", None]),
        most=st.sampled_from([None, 1, 2, 3, 7]),
        rate=st.sampled_from(RATES),
    )
    def set_limit(
        self, queue: str, name: str | None, most: int | None, rate: tuple[int, int] | None
    ) -> None:
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

    @rule(seconds=st.sampled_from([-3600, 3600]))
    def set_clock(self, seconds: int) -> None:
        if not self.held:
            self.lab.wall_ahead_us += seconds * 1_000_000
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
        self.lab.send("p", f"r receive {queue} --limit={limit} --lease=10".encode())
        self.rest()
        self.tick(1)

    def settle_one(self, message: str, what: str) -> None:
        queue, holder = message[0], self.held[message]
        if what == "ack":
            del self.held[message]
        else:
            self.back(message)
        if "." in holder:
            how = "ack" if what == "ack" else "reject"
            self.lab.send("p", f"s lease {queue} {holder} --{how}".encode())
        else:
            self.lab.send("p", f"s {what} {holder} {message}".encode())
        self.rest()

    @rule(queue=st.sampled_from(QUEUES), number=st.integers(1, 2))
    def leave(self, queue: str, number: int) -> None:
        who = f"{queue}-{number}"
        for message in [each for each, holder in self.held.items() if holder == who]:
            self.back(message)
        self.lab.end(who)
        self.rest()

    @rule(seconds=st.sampled_from([0.02, 0.5, 1, 11]))
    def tick(self, seconds: float) -> None:
        self.lab.now_us += round(seconds * 1_000_000)
        for message, holder in [*self.held.items()]:
            number = holder.split(".")[1] if "." in holder else ""
            mark = self.queue(message[0]).lane.marks.get(int(number)) if number else None
            if mark is not None and 0 < mark.due_us <= self.lab.wall_us:
                self.back(message)
        self.rest()

    @rule()
    def crash(self) -> None:
        for message, holder in [*self.held.items()]:
            if "." not in holder:
                self.back(message)
        self.lab.crash()
        self.heard = 0
        for limit in self.limits.values():
            limit.restart()
        self.rest()


Common.TestCase.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestCommon = Common.TestCase


def told(lab: Lab) -> list[bytes]:
    """Ids of the messages that were delivered since."""
    ids = [line.split(b" ")[2] for line in lab.replies if b" event=" in line]
    lab.replies.clear()
    return ids


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
        (message,) = told(lab)
        order.append(message)
        lab.do(message[:1].decode(), b"s ack c%b %b" % (message[:1], message))
    assert order == b"a0 a1 b0 a2 b1 a3 b2 a4 a5 a6".split()


def test_queues_share_a_burst_that_is_left_at_once() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", "b", "c", limit="x,rate=10/s,30")
    lab.do("p", *(b"a%d publish a x" % n for n in range(500)))
    lab.do("p", *(b"%b%d publish %b x" % (who, n, who) for who in (b"b", b"c") for n in range(500)))
    assert len(told(lab)) == 30
    counts = dict.fromkeys(b"abc", 0)
    lab.wait(3)
    for message in told(lab):
        counts[message[0]] += 1
    assert [*counts.values()] == [10, 10, 10]


def test_of_different_values_the_lowest_count_until_they_are_gone() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", limit="x,concurrency=5,rate=100/s,3")
    common_queues(lab, "b", limit="x,concurrency=2,rate=100/s,50")
    common_queues(lab, "c", limit="x")

    def limit() -> bytes:
        lab.do("p", b"r stats limits")
        return lab.replies.pop()

    row = b'"name": "x", "queues": %d, "concurrency": %b, "rate": %b, "held": 0, "waiting": 0'
    assert row % (3, b"2", b'"100/s,3"') in limit()
    lab.do("p", b"s set_queue b --limit=x,rate=1000/h,50")
    assert row % (3, b"5", b'"1000/h,50"') in limit()
    lab.do("p", b"s delete_queue b")
    assert row % (2, b"5", b'"100/s,3"') in limit()
    lab.do("p", b"s delete_queue a")
    assert row % (1, b"null", b"null") in limit()
    lab.do("p", b"s delete_queue c")
    assert limit() == b"r ok []"
    lab.check()


def test_what_returns_after_a_delay_still_counts() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", "b", limit="x,concurrency=3")
    lab.do("p", *(b"a%d publish a x" % n for n in range(3)))
    lab.do("p", *(b"b%d publish b x" % n for n in range(3)))
    told(lab)
    lab.do("a", b"s release ca a0 --delay=10", b"s ack ca a1")
    assert told(lab) == [b"b0"]
    lab.do("p", b"s promote a a0")
    assert told(lab) == [b"b1"]
    lab.do("b", b"s ack cb b0")
    assert told(lab) == [b"a0"]
    lab.check()


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
    assert told(lab) == b"ma mb mc md me".split()
    lab.do("e", b"s ack ce me")
    assert told(lab) == [b"mf"]


def test_two_acks_with_a_commit_between_them_make_room_for_two() -> None:
    lab = Lab(1 << 20)
    common_queues(lab, "a", "b", limit="x,concurrency=2")
    lab.do("p", *(b"%b%d publish %b x" % (who, n, who) for n in range(3) for who in (b"a", b"b")))
    first = told(lab)
    assert first == [b"a0", b"a1"]
    lab.send("a", b"s ack --confirm ca a0")
    lab.take()
    lab.send("a", b"s ack --confirm ca a1")
    lab.work()
    assert sorted(told(lab)) == [b"a2", b"b0"]
    lab.land()
    lab.rest()
    lab.check()


def test_a_thousand_acks_in_one_commit_make_room_for_a_thousand() -> None:
    world = bare()
    for queue in b"a", b"b":
        ask(world, b"s set_queue %b --limit=x,concurrency=1000\nt subscribe %b e" % (queue, queue))
        world.send("c", b"c%b consume %b --manual-ack\n" % (queue, queue))
    ask(world, b"\n".join(b"m%d publish e x" % n for n in range(2000)))
    a, b = (world.broker.queues[name] for name in (b"a", b"b"))
    left = a.ready + b.ready
    while left:
        assert a.unacked + b.unacked == 1000
        for name in b"ca", b"cb":
            held = [*world.broker.consumers[name].unacked]
            world.send("c", b"".join(b"s ack %b %b\n" % (name, each) for each in held))
        assert left - (a.ready + b.ready) >= min(left, 1000)
        left = a.ready + b.ready


def test_consumers_without_manual_ack_hold_nothing() -> None:
    world = bare()
    ask(world, b"s set_queue q --limit=x,concurrency=2\nt subscribe q e")
    world.send("c", b"c consume q\n")
    ask(world, b"\n".join(b"m%d publish e x" % n for n in range(100)))
    assert world.broker.queues[b"q"].ready == 0


@pytest.mark.parametrize("flags", [b"", b" --priority=3", b" --key=k"])
def test_a_burst_of_publishes_leaves_at_the_rate(flags: bytes) -> None:
    lab = Lab(1 << 24)
    for queue in b"a", b"b":
        lab.do("p", b"s set_queue %b --limit=x,rate=1000/s" % queue, b"s subscribe %b e" % queue)
        lab.do("c", b"c%b consume %b" % (queue, queue))
    lab.do("p", *(b"m%d publish%b e x" % (n, flags) for n in range(10_000)))
    assert len(told(lab)) == 100
    lab.wall_ahead_us -= 3_600_000_000
    for _ in range(5):
        lab.wait(0.1)
        assert len(told(lab)) == 100
    lab.do("p", b"r stats queue b")
    assert b'"held_by": "limit", "held_until_s": 1' in lab.replies.pop()
    for queue in b"a", b"b":
        lab.do("p", b"s set_queue %b --limit=" % queue)
    assert not any(queue.ready for queue in lab.broker.queues.values())
    lab.check()


def test_a_thousand_queues_with_one_limit_are_served_in_short_steps() -> None:
    lab, count = Lab(1 << 24), 1000
    for n in range(count):
        lab.send("p", b"s set_queue q%d --limit=x,concurrency=1,rate=%d/s" % (n, n + 1))
        lab.rest()
    lab.do("p", b"s consume q0 e", b"s set_queue q0 --limit=x,rate=1000/s,1000")
    for n in range(1, count):
        lab.do("p", b"c%d consume q%d e" % (n, n))
    lab.replies.clear()
    lab.do("p", b"m publish e x")
    lab.broker.turns.chunk_s = -1.0  # Each turn is over as it begins.
    delivered = len(told(lab))
    while delivered < count:
        lab.now_us += 10_000_000
        lab.broker.schedule.run_due(lab.broker.turns)
        lab.broker.go_on()
        lab.hear()
        step = len(told(lab))
        assert step <= 2
        delivered += step
    lab.do("p", *(b"s delete_queue q%d" % n for n in range(count)))
    assert not lab.broker.shared.limits
