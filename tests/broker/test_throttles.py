"""Limits of deliveries, beside a model of what clients hold.

The one rule: a limit is never exceeded, and nobody with room waits for a message that no limit
holds back.
"""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.order import keyed, limited
from mqks.limits import STEP_RULED
from tests.broker.test_keys import SMALL_STEPS
from tests.kit.bare import ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import Bucket, Holders, Rate, as_test

ORDERS = "--reset", "--fair=key", "--ordered=key"


class Throttled(Holders):
    """Messages are named `{key}{number}`."""

    small = SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.most: int | None = None
        self.bucket = Bucket()
        self.key_most: int | None = None
        self.key_buckets = {key: Bucket() for key in "abc"}

    def end(self) -> None:
        self.set_limit(None)
        self.set_rate(None)
        self.set_key_rate(None)
        self.take_all()

    def queue_of(self, message: str) -> str:
        return "q"

    def consume_all(self) -> None:
        self.consume("a", 5)

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
        queue = self.queue("q")
        assert queue.unacked + queue.leased == len(self.held)
        idle = [each for each in queue.ring if each.room() > 0]
        may_more = self.most is None or len(self.held) < self.most
        may_more = may_more and not self.bucket.is_empty
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
        return may_more and not self.key_buckets[key].is_empty

    def look(self) -> None:
        for bucket in self.bucket, *self.key_buckets.values():
            bucket.pass_us(self.lab.now_us - self.at_us)
        self.at_us = self.lab.now_us
        for message in self.came():
            assert self.most is None or len(self.held) <= self.most, "too many are held"
            self.bucket.take()
            key = message[0]
            assert self.key_most is None or self.of_key(key) <= self.key_most, "of one key"
            self.key_buckets[key].take()

    @rule(most=st.sampled_from([None, 1, 2, 3, 7]))
    def set_limit(self, most: int | None) -> None:
        if hasattr(self, "lab"):
            self.rest()
        self.most = most
        self.lab.send("p", f"s set_queue q --concurrency={most or ''}".encode())
        self.rest()

    @rule(rate=st.sampled_from([None, (1, 1), (2, 3), (50, 5), (1, 7)]))
    def set_rate(self, rate: Rate) -> None:
        self._set_rate("rate", rate)
        self.bucket.change(rate)
        self.rest()

    def _set_rate(self, name: str, rate: Rate) -> None:
        self.rest()
        text = "" if rate is None else f"{rate[0]}/s,{rate[1]}"
        self.lab.send("p", f"s set_queue q --{name}={text}".encode())

    @rule(most=st.sampled_from([1, 2, 3]))
    def set_key_limit(self, most: int) -> None:
        if self.key_most is not None:
            self.rest()
            self.key_most = most
            self.lab.send("p", f"s set_queue q --concurrency-per-key={most}".encode())
            self.rest()

    @rule(rate=st.sampled_from([None, (1, 1), (2, 3), (50, 2)]))
    def set_key_rate(self, rate: Rate) -> None:
        self._set_rate("rate-per-key", rate)
        if rate != self.key_buckets["a"].rate:
            self.key_buckets = {key: Bucket(rate) for key in "abc"}
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
        self.receive_some("q", limit)

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        self.gone(who)

    def fill(self) -> None:
        for bucket in self.bucket, *self.key_buckets.values():
            bucket.fill()


TestThrottled = as_test(Throttled, 0.5)


@pytest.mark.parametrize("limit", [b"--concurrency=1000", b"--limit=x,concurrency=1000"])
def test_a_thousand_that_end_in_one_commit_make_room_at_once(limit: bytes) -> None:
    world = bare()
    ask(world, b"s set_queue q " + limit + b"\nt subscribe q e")
    ask(world, b"\n".join(b"m%d publish e x" % n for n in range(2500)))
    world.send("c", b"c consume q --manual-ack\n")
    queue = world.broker.queues[b"q"]
    for told in (1000, 1500), (1000, 500), (500, 0):
        assert (queue.unacked, queue.ready) == told
        world.send(
            "c",
            b"".join(b"a ack c %b\n" % each for each in [*world.broker.consumers[b"c"].unacked]),
        )


@pytest.mark.parametrize("limit", [b"--concurrency=1", b"--limit=x,concurrency=1"])
def test_what_is_acked_on_its_way_to_the_disk_makes_room_before_the_commit(limit: bytes) -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q " + limit, b"s subscribe q e")
    lab.do("c", b"c consume q --manual-ack")
    lab.send("p", b"m1 publish --confirm e x", b"m2 publish --confirm e x")
    lab.take()
    lab.send("c", b"a ack --confirm c m1")
    lab.work()
    assert lab.replies[-1] == b"c ok m2 event=e x"
    lab.land()
    lab.rest()
    lab.check()


@pytest.mark.parametrize("flags", [b"", b" --priority=3", b" --key=k"])
@pytest.mark.parametrize("limit", [b"--rate=1000/s --ordered=key", b"--limit=x,rate=1000/s"])
def test_a_burst_of_publishes_leaves_at_the_rate(flags: bytes, limit: bytes) -> None:
    lab = Lab(1 << 24)
    lab.do("p", b"s set_queue q " + limit, b"s subscribe q e", b"c consume q")
    lab.do("p", *(b"m%d publish%b e x" % (n, flags) for n in range(3_000)))
    assert len(lab.delivered()) == 100
    lab.wall_ahead_us -= 3_600_000_000
    for _ in range(10):
        lab.wait(0.1)
        assert len(lab.delivered()) == 100
    assert lab.stats("queue q")["held_by"] == ("rate" if b"--rate" in limit else "limit")
    lab.do("p", b"s set_queue q --rate= --limit=")
    assert lab.broker.queues[b"q"].ready == 0
    assert lab.stats("queue q")["held_by"] is None


def test_stats_tell_when_the_next_message_may_be_delivered() -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --rate=1/h", b"c consume q e")
    lab.do("p", b"m1 publish e x", b"m2 publish e x")
    assert len(lab.delivered()) == 1
    until_s = (lab.wall_us + 3_600_000_000) / 1e6
    told = lab.stats("queue q")
    assert (told["held_by"], told["held_until_s"]) == ("rate", round(until_s, 1))
    lab.wait(3599)
    assert len(lab.delivered()) == 0
    lab.wait(1)
    assert len(lab.delivered()) == 1
    assert lab.stats("queue q")["held_by"] is None


def test_a_deleted_queue_has_no_timer() -> None:
    lab = Lab(1 << 20)
    lab.do("p", b"s set_queue q --rate=1/h", b"c consume q e", b"m1 publish e x", b"m2 publish e x")
    lab.check()
    lab.do("p", b"d delete_queue q")
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
    told = [len(lab.delivered())]
    assert lab.stats("queue q")["held_by"] == "rate_per_key"
    for _ in range(2):
        lab.wait(3600)
        told.append(len(lab.delivered()))
    assert told == [4, 4, 2]
    lab.check()


def test_many_keys_that_wake_at_once_take_turns() -> None:
    count = 3000
    lab = Lab(1 << 24)
    lab.do("p", *KEYED, b"c consume q")
    lab.do("p", *(b"m%d publish --key=k%d e x" % (n, n % count) for n in range(2 * count)))
    assert len(lab.delivered()) == count
    lab.broker.turns.chunk_s = -1.0  # Each turn is over as it begins.
    lab.now_us += 3_600_000_000
    steps: list[int] = []
    while sum(steps) < count:
        lab.broker.schedule.run_due(lab.broker.turns)
        lab.broker.go_on()
        lab.hear()
        steps.append(len(lab.delivered()))
        assert len(steps) < count
    assert max(steps) <= 4 * STEP_RULED
