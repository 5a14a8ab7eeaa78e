"""Queues that are ordered by key or fair to keys, beside a plain model of what clients see.

The one rule of an ordered queue: nobody gets a message while an earlier one of its key is with
another consumer, or was rejected and waits; and no consumer with room waits for a free key.
"""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.order import keyed
from mqks.broker.spine.base import turns
from mqks.broker.spine.queue import blocks, lane
from mqks.limits import STEP_RULED
from tests.kit.bare import ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import Holders, as_test

SMALL_STEPS = {
    blocks: {"BLOCK": 6, "SHORT": 2, "DELIVERY_BYTES": 60},
    keyed: {"STEP_MESSAGES": 3, "FREE_ENOUGH": 2, "FETCHED_MAX": 2, "STALE_MAX": 2},
    lane: {"STEP_BODIES": 3, "SCARCE_BYTES": 100},
    turns: {"STEP_BODIES": 3},
}


class Ordered(Holders):
    """Messages are named `{key}{number}`."""

    small = SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.due_us: dict[str, int] = {}
        """Of those that were rejected and wait."""

    def end(self) -> None:
        self.take_all()
        assert not self.queue("q").ready

    @initialize(memory=st.sampled_from([0, 300, 1 << 20]), calls=st.sampled_from([0, 2, 10]))
    def start(self, memory: int, calls: int) -> None:
        self.lab = Lab(memory, calls)
        self.lab.send("p", b"s set_queue q --ordered=key", b"s subscribe q e")
        self.rest()

    def queue_of(self, message: str) -> str:
        return "q"

    def consume_all(self) -> None:
        self.consume("a", 5)

    def fill(self) -> None: ...

    def rest(self) -> None:
        self.lab.rest()
        self.look()
        self.lab.check()
        blocked = {message[0] for message in (*self.held, *self.due_us)}
        free = [message for message in self.waiting if message[0] not in blocked]
        idle = [each for each in self.queue("q").ring if each.room() > 0]
        assert not (free and idle), f"{free} are free, and a consumer has room"

    def look(self) -> None:
        for message in self.came():
            assert message not in self.due_us
            holders = {self.held[each] for each in self.held if each[0] == message[0]}
            assert len(holders) == 1, f"{holders} hold a key"
            of_key = [each for each in self.waiting if each[0] == message[0]]
            passed = [each for each in of_key if int(each[1:]) < int(message[1:])]
            assert not passed, f"{message} passes {passed}"

    @rule(
        texts=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
        size=st.sampled_from([1, 40]),
    )
    def publish(self, texts: list[str], size: int) -> None:
        for key in texts:
            message = f"{key}{next(self.ids)}"
            self.waiting.add(message)
            self.lab.rest()
            self.lab.send("p", f"{message} publish --key={key} e {'x' * size}".encode())
        self.rest()

    @rule(who=st.sampled_from("abc"), prefetch=st.integers(1, 3))
    def consume(self, who: str, prefetch: int) -> None:
        if who.encode() not in self.lab.broker.consumers:
            self.lab.send(who, f"{who} consume q --manual-ack --prefetch={prefetch}".encode())
        self.rest()

    @rule(which=st.integers(0, 9), what=st.sampled_from(["ack", "reject --delay=10"]))
    def settle_otherwise(self, which: int, what: str) -> None:
        self.settle(which, what)

    def settle_one(self, message: str, what: str) -> None:
        if "--delay" in what:
            self.due_us[message] = self.lab.now_us + 10_000_000
        super().settle_one(message, what)

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        self.gone(who)

    @rule(seconds=st.sampled_from([1, 11]))
    def tick(self, seconds: float) -> None:
        now_us = self.lab.now_us + round(seconds * 1_000_000)
        self.due_us = {each: due_us for each, due_us in self.due_us.items() if due_us > now_us}
        super().tick(seconds)

    @rule(seconds=st.sampled_from([-3600, 3600]))
    def set_clock(self, seconds: int) -> None:
        if not self.due_us:
            super().set_clock(seconds)


TestOrdered = as_test(Ordered)


@patches_modules
def test_so_many_messages_are_known_and_the_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "KEYED_MAX", 4)
    lab = Lab(1 << 20)
    lab.send("p", b"s set_queue q --ordered=key", b"s subscribe q e")
    lab.send("p", *(b"m%d publish --key=a e x" % n for n in range(6)), b"m6 publish --key=b e x")
    lab.send("a", b"a consume q --manual-ack --prefetch=1")
    lab.do("b", b"b consume q --manual-ack --prefetch=1")
    assert lab.replies[-1] == b"a ok m0 event=e x"
    lab.do("p", b"s ack a m0", b"r stats queue q")
    assert b'"keys": 1, "keys_held": 1' in b"".join(lab.replies)
    assert b"b ok m6 event=e x" not in lab.replies
    for n in range(1, 6):
        lab.do("p", b"s ack a m%d" % n, b"s ack b m%d" % n)
    assert b"b ok m6 event=e x" in lab.replies
    lab.check()


def test_a_purge_forgets_the_keys() -> None:
    lab = Lab(1 << 20)
    lab.send("p", b"s set_queue q --ordered=key", b"s subscribe q e")
    lab.send("a", b"a consume q --manual-ack --prefetch=1")
    for n in range(5_000):
        lab.send("p", b"m%d publish --key=k%d e x" % (n, n % 7))
    lab.rest()
    lab.do("p", b"s purge --confirm q")
    lab.do("p", b"m publish --key=k1 e x", b"s ack a m0")
    assert lab.replies[-1] == b"a ok m event=e x"
    known = lab.broker.queues[b"q"].order
    assert isinstance(known, keyed.Keyed)
    assert known.known == 0
    lab.check()


def test_messages_of_a_key_return_in_any_order() -> None:
    """What a consumer holds are the first ones that are left, whatever came back before."""
    chance, world, prefetch = random.Random(7), bare(), 40
    ask(world, b"s set_queue q --ordered=key\nt subscribe q e")
    ask(world, b"\n".join(b"m%d publish --key=k e x" % number for number in range(600)))
    world.send("c", b"c consume q --manual-ack --prefetch=%d\n" % prefetch)
    left = [*range(600)]
    while left:
        held = left[:prefetch]
        assert {number for number, _, _ in world.broker.consumers[b"c"].held()} == {
            number + 1 for number in held
        }
        acked = chance.sample(held, min(len(held), 12))
        rejected = [number for number in held if number not in acked and chance.random() < 0.5]
        chance.shuffle(rejected)
        world.send("c", b"".join(b"r reject c m%d\n" % number for number in rejected))
        world.send("c", b"".join(b"a ack c m%d\n" % number for number in acked))
        left = [number for number in left if number not in acked]


@pytest.mark.parametrize("how", [b"one by one", b"all"])
def test_rejects_of_a_queue_with_rules_take_turns(how: bytes) -> None:
    """A turn is over as soon as something is returned."""
    world, messages = bare(), 1000
    ask(world, b"s set_queue q --ordered=key\nt subscribe q e")
    ask(world, b"\n".join(b"m%d publish --key=k e x" % number for number in range(messages)))
    world.send("c", b"c consume q --manual-ack\n")
    queue, turns, connection = world.broker.queues[b"q"], world.broker.turns, world.connection("c")
    assert queue.unacked == messages
    turns.clock, turns.chunk_s = lambda: float(queue.ready), 0.5
    queue.returning += 1  # Nothing is delivered meanwhile.
    lines = b"".join(b"r reject c m%d\n" % number for number in range(messages))
    world.intake.receive(connection, b"r reject c --all\n" if how == b"all" else lines)
    steps = [queue.ready]
    while queue.ready < messages:
        world.broker.go_on()
        world.intake.receive(connection, b"")
        steps.append(queue.ready - sum(steps))
    assert max(steps) <= 4 * STEP_RULED
    queue.returning -= 1


def test_deliveries_by_key_take_turns() -> None:
    world, messages = bare(), 1000
    ask(world, b"s set_queue q --ordered=key\nt subscribe q e")
    ask(world, b"\n".join(b"m%d publish --key=k e x" % number for number in range(messages)))
    world.broker.turns.chunk_s = -1.0
    queue = world.broker.queues[b"q"]
    world.intake.receive(world.connection("c"), b"c consume q --manual-ack\n")
    steps = [queue.unacked]
    while queue.ready:
        world.broker.go_on()
        steps.append(queue.unacked - sum(steps))
    assert max(steps) <= 2 * STEP_RULED
