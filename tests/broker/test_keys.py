"""Queues that are ordered by key or fair to keys, beside a plain model of what clients see.

The one rule of an ordered queue: nobody gets a message while an earlier one of its key is with
another consumer, or was rejected and waits; and no consumer with room waits for a free key.
"""

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from mqks.broker.features.order import keyed
from mqks.broker.spine.base import turns
from mqks.broker.spine.queue import blocks, lane
from mqks.limits import STEP_RULED
from tests.kit.bare import ask, bare
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.small_steps import SmallSteps

SMALL_STEPS = {
    blocks: {"BLOCK": 6, "SHORT": 2, "DELIVERY_BYTES": 60},
    keyed: {"STEP_MESSAGES": 3, "FREE_ENOUGH": 2, "FETCHED_MAX": 2, "STALE_MAX": 2},
    lane: {"STEP_BODIES": 3, "SCARCE_BYTES": 100},
    turns: {"STEP_BODIES": 3},
}

ANSWERS = ["ack", "ack", "ack", "reject", "release", "reject --delay=10"]


class Ordered(SmallSteps):
    """Messages are named `{key}{number}`; the model knows of each where it is."""

    small = SMALL_STEPS

    def __init__(self) -> None:
        super().__init__()
        self.ids = count(1)
        self.waiting: dict[str, list[str]] = {}
        self.held: dict[str, str] = {}
        """Message → its consumer."""
        self.put_off: dict[str, int] = {}
        """Message → when it is due."""
        self.heard = 0

    def end(self) -> None:
        self.rest()
        for _ in range(200):
            if not self.held and not self.put_off and not any(self.waiting.values()):
                break
            self.consume("a", 5)
            self.tick(20)
            for message in [*self.held]:
                self.settle_one(message, "ack")
        assert not any(self.waiting.values()), "a message is never delivered"
        assert not self.lab.broker.queues[b"q"].ready

    @initialize(memory=st.sampled_from([0, 300, 1 << 20]), calls=st.sampled_from([0, 2, 10]))
    def start(self, memory: int, calls: int) -> None:
        self.lab = Lab(memory, calls)
        self.lab.send("p", b"s set_queue q --ordered=key", b"s subscribe q e")
        self.rest()

    def rest(self) -> None:
        self.lab.rest()
        self.look()
        self.lab.check()
        free = [key for key, some in self.waiting.items() if some and not self.blocked(key)]
        idle = [each for each in self.lab.broker.queues[b"q"].ring if each.room() > 0]
        assert not (free and idle), f"{free} are free, and a consumer has room"

    def of_key(self, messages: Any, key: str) -> set[str]:
        return {message for message in messages if message[0] == key}

    def blocked(self, key: str) -> bool:
        return bool(self.of_key(self.held, key) or self.of_key(self.put_off, key))

    def look(self) -> None:
        for line in self.lab.replies[self.heard :]:
            words = line.decode().split(" ")
            if len(words) > 3 and words[3].startswith("event="):
                self.delivered(words[0], words[2])
        self.heard = len(self.lab.replies)

    def delivered(self, consumer: str, message: str) -> None:
        key = message[0]
        assert message not in self.put_off
        assert message not in self.held
        assert message in self.waiting[key], f"{message} is delivered twice"
        holders = {self.held[each] for each in self.of_key(self.held, key)}
        assert holders <= {consumer}, f"{message} goes to {consumer}, but {holders} hold its key"
        late = {
            each
            for each in self.of_key(self.put_off, key)
            if self.number(each) < self.number(message)
        }
        assert not late, f"{message} passes {late}"
        assert message == self.waiting[key][0], f"{message} passes {self.waiting[key][0]}"
        self.waiting[key].remove(message)
        self.held[message] = consumer

    @staticmethod
    def number(message: str) -> int:
        return int(message[1:])

    def back(self, message: str) -> None:
        """It is ready again, in its old place."""
        self.held.pop(message, None)
        some = self.waiting[message[0]]
        some.append(message)
        some.sort(key=self.number)

    @rule(
        texts=st.lists(st.sampled_from("abc"), min_size=1, max_size=6),
        size=st.sampled_from([1, 40]),
    )
    def publish(self, texts: list[str], size: int) -> None:
        for key in texts:
            message = f"{key}{next(self.ids)}"
            self.waiting.setdefault(key, []).append(message)
            self.lab.rest()
            self.lab.send("p", f"{message} publish --key={key} e {'x' * size}".encode())
        self.look()

    @rule(who=st.sampled_from("abc"), prefetch=st.integers(1, 3))
    def consume(self, who: str, prefetch: int) -> None:
        if f"{who}".encode() in self.lab.broker.consumers:
            return
        self.rest()
        self.lab.send(who, f"{who} consume q --manual-ack --prefetch={prefetch}".encode())
        self.rest()

    @rule(
        which=st.integers(0, 9),
        what=st.sampled_from(["ack", "ack", "ack", "reject", "release", "reject --delay=10"]),
    )
    def settle(self, which: int, what: str) -> None:
        if self.held:
            self.settle_one(sorted(self.held)[which % len(self.held)], what)

    def settle_one(self, message: str, what: str) -> None:
        self.rest()
        if message not in self.held:
            return
        action, _, flag = what.partition(" ")
        consumer = self.held.pop(message)
        if action != "ack":
            self.back(message)
        if flag:
            self.put_off[message] = self.lab.now_us + 10_000_000
            self.waiting[message[0]].remove(message)
        self.lab.send("p", f"s {action} {consumer} {message} {flag}".strip().encode())
        self.rest()

    @rule(who=st.sampled_from("abc"))
    def leave(self, who: str) -> None:
        self.rest()
        for message in [each for each, holder in self.held.items() if holder == who]:
            self.back(message)
        self.lab.end(who)
        self.rest()

    @rule(seconds=st.sampled_from([1, 11]))
    def tick(self, seconds: int) -> None:
        self.rest()
        now_us = self.lab.now_us + seconds * 1_000_000
        for message in [each for each, due_us in self.put_off.items() if due_us <= now_us]:
            del self.put_off[message]
            self.back(message)
        self.lab.tick(seconds)
        self.rest()

    @rule()
    def crash(self) -> None:
        self.rest()
        for message in [*self.held]:
            self.back(message)
        self.lab.crash()
        self.heard = 0
        self.rest()


Ordered.TestCase.settings = settings(
    max_examples=settings().max_examples,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestOrdered = Ordered.TestCase


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
