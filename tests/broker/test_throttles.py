"""Limits of deliveries, beside a model of what clients hold.

The one rule: a limit is never exceeded, and nobody with room waits for a message that no limit
holds back.
"""

from fractions import Fraction

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.order import keyed, limited
from mqks.limits import STEP_RULED
from tests.broker.test_keys import SMALL_STEPS
from tests.kit.bare import ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import Holders

ORDERS = "--reset", "--fair=key", "--ordered=key"


class Throttled(Holders):
    """Messages are named `{key}{number}`."""

    small = SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.most: int | None = None
        self.rate: tuple[int, int] | None = None
        """Deliveries a second, and the burst."""
        self.tokens = Fraction(0)
        self.key_most: int | None = None
        self.key_rate: tuple[int, int] | None = None
        self.key_tokens = dict.fromkeys("abc", Fraction(0))

    def end(self) -> None:
        self.set_limit(None)
        self.set_rate(None)
        self.set_key_rate(None)
        for _ in range(300):
            if not (self.held or self.waiting):
                break
            self.consume("a", 5)
            self.tick(20)
            for message in [*self.held]:
                self.settle_one(message, "ack")
        assert not self.waiting, "a message is never delivered"

    @initialize(
        memory=st.sampled_from([0, 300, 1 << 20]),
        calls=st.sampled_from([0, 2, 10]),
        order=st.sampled_from(ORDERS),
        key_most=st.sampled_from([None, 1, 2]),
    )
    def start(self, memory: int, calls: int, order: str, key_most: int | None) -> None:
        self.lab, self.order = Lab(memory, calls), order
        self.lab.send("p", f"s set_queue q {order}".encode(), b"s subscribe q e")
        self.lab.rest()
        if key_most:
            self.key_most = 1
            self.set_key_limit(key_most)
        self.rest()

    def rest(self) -> None:
        self.lab.rest()
        self.look()
        self.lab.check()
        queue = self.lab.broker.queues[b"q"]
        assert queue.unacked + queue.leased == len(self.held)
        idle = [each for each in queue.ring if each.room() > 0]
        may_more = self.most is None or len(self.held) < self.most
        may_more = may_more and (self.rate is None or self.tokens >= 1)
        free = {message for message in self.waiting if self.may(message[0])}
        assert not (free and idle and may_more), f"{idle} wait for nothing"
        # Without a consumer, keys are not looked at; in order, the order itself holds some back.
        if idle and self.waiting and self.order != "--ordered=key":
            assert queue.held_back

    def of_key(self, key: str) -> int:
        return sum(message[0] == key for message in self.held)

    def may(self, key: str) -> bool:
        """Whether a message of this key may be delivered. In order, not while another one is."""
        most = 1 if self.order == "--ordered=key" else self.key_most
        may_more = most is None or self.of_key(key) < most
        return may_more and (self.key_rate is None or self.key_tokens[key] >= 1)

    def look(self) -> None:
        if self.rate is not None:
            per_s, burst = self.rate
            passed = Fraction((self.lab.now_us - self.at_us) * per_s, 1_000_000)
            self.tokens = min(Fraction(burst), self.tokens + passed)
        if self.key_rate is not None:
            per_s, burst = self.key_rate
            passed = Fraction((self.lab.now_us - self.at_us) * per_s, 1_000_000)
            for key, tokens in self.key_tokens.items():
                self.key_tokens[key] = min(Fraction(burst), tokens + passed)
        self.at_us = self.lab.now_us
        for message in self.came():
            assert self.most is None or len(self.held) <= self.most, "too many are held"
            self.tokens -= 1
            assert self.rate is None or self.tokens >= 0, "too many are delivered"
            key = message[0]
            assert self.key_most is None or self.of_key(key) <= self.key_most, "of one key"
            self.key_tokens[key] -= 1
            assert self.key_rate is None or self.key_tokens[key] >= 0, "too often of one key"

    @rule(most=st.sampled_from([None, 1, 2, 3, 7]))
    def set_limit(self, most: int | None) -> None:
        if hasattr(self, "lab"):
            self.rest()
        self.most = most
        self.lab.send("p", f"s set_queue q --concurrency={most or ''}".encode())
        self.rest()

    @rule(rate=st.sampled_from([None, (1, 1), (2, 3), (50, 5), (1, 7)]))
    def set_rate(self, rate: tuple[int, int] | None) -> None:
        self.rest()
        text = "" if rate is None else f"{rate[0]}/s,{rate[1]}"
        self.lab.send("p", f"s set_queue q --rate={text}".encode())
        if rate is not None:
            left = rate[1] if self.rate is None else int(self.tokens)
            self.tokens = Fraction(self.tokens if rate == self.rate else min(rate[1], left))
        self.rate = rate
        self.rest()

    @rule(most=st.sampled_from([1, 2, 3]))
    def set_key_limit(self, most: int) -> None:
        if self.key_most is not None:
            self.rest()
            self.key_most = most
            self.lab.send("p", f"s set_queue q --concurrency-per-key={most}".encode())
            self.rest()

    @rule(rate=st.sampled_from([None, (1, 1), (2, 3), (50, 2)]))
    def set_key_rate(self, rate: tuple[int, int] | None) -> None:
        self.rest()
        text = "" if rate is None else f"{rate[0]}/s,{rate[1]}"
        self.lab.send("p", f"s set_queue q --rate-per-key={text}".encode())
        if rate is not None and rate != self.key_rate:
            self.key_tokens = dict.fromkeys("abc", Fraction(rate[1]))
        self.key_rate = rate
        self.rest()

    @rule(seconds=st.sampled_from([-3600, 3600]))
    def set_clock(self, seconds: int) -> None:
        # What is held tells its age by the wall clock, and leases go by it after a start.
        if not self.held:
            self.lab.wall_ahead_us += seconds * 1_000_000
        self.rest()

    @rule(keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
    def publish(self, keys: list[str]) -> None:
        for key in keys:
            message = f"{key}{next(self.ids)}"
            self.waiting.add(message)
            self.lab.send("p", f"{message} publish --key={key} e x".encode())
            self.look()
        self.rest()

    @rule(who=st.sampled_from("abc"), prefetch=st.integers(1, 5))
    def consume(self, who: str, prefetch: int) -> None:
        if who.encode() not in self.lab.broker.consumers:
            self.lab.send(who, f"{who} consume q --manual-ack --prefetch={prefetch}".encode())
        self.rest()

    @rule(limit=st.integers(1, 5))
    def receive(self, limit: int) -> None:
        self.lab.send("p", f"r receive q --limit={limit} --lease=10".encode())
        self.rest()
        self.tick(1)

    def settle_one(self, message: str, what: str) -> None:
        holder = self.held[message]
        if what == "ack":
            del self.held[message]
        else:
            self.back(message)
        if len(holder) > 1:
            self.lab.send(
                "p", f"s lease q {holder} --{'ack' if what == 'ack' else 'reject'}".encode()
            )
        else:
            self.lab.send("p", f"s {what} {holder} {message}".encode())
        self.rest()

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        for message in [each for each, holder in self.held.items() if holder == who]:
            self.back(message)
        self.lab.end(who)
        self.rest()

    @rule(seconds=st.sampled_from([0.02, 0.5, 1, 11]))
    def tick(self, seconds: float) -> None:
        self.lab.now_us += round(seconds * 1_000_000)
        queue = self.lab.broker.queues[b"q"]
        due = {
            str(n) for n, mark in queue.lane.marks.items() if 0 < mark.due_us <= self.lab.wall_us
        }
        for message, holder in [*self.held.items()]:
            if len(holder) > 1 and holder.split(".")[1] in due:
                self.back(message)
        self.rest()

    @rule()
    def crash(self) -> None:
        for message, holder in [*self.held.items()]:
            if len(holder) == 1:
                self.back(message)
        self.lab.crash()
        self.heard = 0
        if self.rate is not None:
            self.tokens = Fraction(self.rate[1])
        if self.key_rate is not None:
            self.key_tokens = dict.fromkeys("abc", Fraction(self.key_rate[1]))
        self.rest()


Throttled.TestCase.settings = settings(
    max_examples=settings().max_examples // 2,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestThrottled = Throttled.TestCase


def test_a_thousand_that_end_in_one_commit_make_room_at_once() -> None:
    world = bare()
    ask(world, b"s set_queue q --concurrency=1000\nt subscribe q e")
    ask(world, b"\n".join(b"m%d publish e x" % n for n in range(2500)))
    world.send("c", b"c consume q --manual-ack\n")
    queue = world.broker.queues[b"q"]
    for told in (1000, 1500), (1000, 500), (500, 0):
        assert (queue.unacked, queue.ready) == told
        world.send(
            "c",
            b"".join(b"a ack c %b\n" % each for each in [*world.broker.consumers[b"c"].unacked]),
        )


def test_what_is_acked_on_its_way_to_the_disk_makes_room_before_the_commit() -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --concurrency=1", b"s subscribe q e")
    lab.do("c", b"c consume q --manual-ack")
    lab.send("p", b"m1 publish --confirm e x", b"m2 publish --confirm e x")
    lab.take()
    lab.send("c", b"a ack --confirm c m1")
    lab.work()
    assert lab.replies[-1] == b"c ok m2 event=e x"
    lab.land()
    lab.rest()
    lab.check()


def test_consumers_without_manual_ack_hold_nothing() -> None:
    world = bare()
    ask(world, b"s set_queue q --concurrency=2\nt subscribe q e")
    world.send("c", b"c consume q\n")
    ask(world, b"\n".join(b"m%d publish e x" % n for n in range(100)))
    assert world.broker.queues[b"q"].ready == 0


def delivered(lab: Lab) -> int:
    told = sum(line.startswith(b"c ok m") for line in lab.replies)
    lab.replies.clear()
    return told


@pytest.mark.parametrize("flags", [b"", b" --priority=3", b" --key=k"])
def test_a_burst_of_publishes_leaves_at_the_rate(flags: bytes) -> None:
    lab = Lab(1 << 24)
    lab.do("p", b"s set_queue q --rate=1000/s --ordered=key", b"s subscribe q e", b"c consume q")
    lab.do("p", *(b"m%d publish%b e x" % (n, flags) for n in range(20_000)))
    assert delivered(lab) == 100
    lab.wall_ahead_us -= 3_600_000_000
    for _ in range(10):
        lab.wait(0.1)
        assert delivered(lab) == 100
    assert b'"held_by": "rate"' in asked(lab)
    lab.do("p", b"s set_queue q --rate=")
    assert lab.broker.queues[b"q"].ready == 0
    assert b'"held_by": null' in asked(lab)


def asked(lab: Lab) -> bytes:
    lab.do("p", b"r stats queue q")
    return lab.replies.pop()


def test_stats_tell_when_the_next_message_may_be_delivered() -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --rate=1/h", b"c consume q e")
    lab.do("p", b"m1 publish e x", b"m2 publish e x")
    assert delivered(lab) == 1
    until_s = (lab.wall_us + 3_600_000_000) / 1e6
    assert b'"held_by": "rate", "held_until_s": %.1f' % until_s in asked(lab)
    lab.wait(3599)
    assert delivered(lab) == 0
    lab.wait(1)
    assert delivered(lab) == 1
    assert b'"held_by": null' in asked(lab)


def test_a_deleted_queue_has_no_timer() -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --rate=1/h", b"c consume q e", b"m1 publish e x", b"m2 publish e x")
    lab.check()
    lab.do("p", b"d delete_queue q")
    lab.check()


@pytest.mark.parametrize("order", [b"", b" --ordered=key"])
def test_a_key_that_has_its_turn_keeps_a_lower_limit(order: bytes) -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --concurrency-per-key=2" + order, b"c consume q e --manual-ack")
    lab.do("p", *(b"m%d publish --key=k e x" % n for n in range(3)), b"s pause q --deliveries")
    lab.do("p", b"a ack c m0", b"s set_queue q --concurrency-per-key=1", b"s resume q")
    assert delivered(lab) == 2
    lab.do("p", b"a ack c m1")
    assert delivered(lab) == 1
    lab.check()


KEYED = b"s set_queue q --rate-per-key=1/h", b"s subscribe q e"


@patches_modules
def test_so_many_keys_have_buckets_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "PACED_KEYS_MAX", 4)
    monkeypatch.setattr(keyed, "FREE_ENOUGH", 1)
    for module in keyed, limited:
        monkeypatch.setattr(module, "STEP_MESSAGES", 1)
    lab = Lab(1 << 20)
    lab.do("p", *KEYED, b"c consume q")
    lab.do("p", *(b"m%d publish --key=k%d e x" % (n, n) for n in range(10)))
    told = [delivered(lab)]
    assert b'"held_by": "rate_per_key"' in asked(lab)
    for _ in range(2):
        lab.wait(3600)
        told.append(delivered(lab))
    assert told == [4, 4, 2]
    lab.check()


def test_many_keys_that_wake_at_once_take_turns() -> None:
    count = 3000
    lab = Lab(1 << 24)
    lab.do("p", *KEYED, b"c consume q")
    lab.do("p", *(b"m%d publish --key=k%d e x" % (n, n % count) for n in range(2 * count)))
    assert delivered(lab) == count
    lab.broker.turns.chunk_s = -1.0  # Each turn is over as it begins.
    lab.now_us += 3_600_000_000
    steps: list[int] = []
    while sum(steps) < count:
        lab.broker.schedule.run_due(lab.broker.turns)
        lab.broker.go_on()
        lab.hear()
        steps.append(delivered(lab))
        assert len(steps) < count
    assert max(steps) <= 4 * STEP_RULED
