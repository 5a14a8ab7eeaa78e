"""Messages with priorities: the order of their deliveries, over crashes, from disk, in any order of
steps."""

import random
import re
from collections import Counter
from itertools import permutations

import pytest

from mqks.broker.features.order import ranked
from mqks.broker.spine.queue.order import Fifo
from mqks.protocol.replies import priority_of
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.called import counted_calls
from tests.kit.lab import Lab


def publish(lab: Lab, *priorities: int, first: int = 1) -> None:
    for number, priority in enumerate(priorities, first):
        flag = b" --priority=%d" % priority if priority else b""
        lab.send("a", b"m%d publish%b e d" % (number, flag))


def opened(memory: int = 1 << 20) -> Lab:
    lab = Lab(memory)
    lab.send("a", b"s subscribe q e")
    return lab


def drained(lab: Lab, who: str = "z", flags: bytes = b"") -> list[int]:
    """Numbers in the ids of the messages that a new consumer gets."""
    lab.replies.clear()
    lab.do(who, b"%b consume q --manual-ack%b" % (who.encode(), flags))
    lab.check()
    told = [line.split(b" ") for line in lab.replies]
    return [int(words[2][1:]) for words in told if words[0] == who.encode()]


def by_priority(priorities: list[int]) -> list[int]:
    return sorted(range(1, len(priorities) + 1), key=lambda each: (-priorities[each - 1], each))


@pytest.mark.parametrize("memory", [0, 20_000, 1 << 20])
def test_many_levels_in_any_order_with_crashes(
    monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    monkeypatch.setattr(ranked, "STEP_MESSAGES", 16)
    random.seed(1)
    lab, priorities = opened(memory), list[int]()
    for _ in range(4):
        some = [random.randint(-128, 127) for _ in range(200)]
        publish(lab, *some, first=len(priorities) + 1)
        priorities += some
        lab.rest()
        lab.check()
    lab.crash()
    first = drained(lab, "y", b" --prefetch=300")
    order = by_priority(priorities)
    assert first == order[:300]
    lab.do("y", *[b"x ack y m%d" % each for each in first[:100]])
    lab.check()
    lab.crash()
    assert drained(lab) == order[100:]


FLAGS = (
    *(b"--priority=5", b"--priority=0", b"--key=k%2C", b"--meta=a=1&b=%2C", b"--escaped"),
    *(b"--mandatory", b"--ttl=60", b"--once", b"--meta==", b"--priority=999", b"--key=k"),
)


def test_gathered_messages_are_those_that_are_parsed_singly() -> None:
    """Behind other flags, `--confirm` is parsed singly."""
    lines = [
        (b" ".join(some), event, data)
        for some in [*permutations(FLAGS, 1), *permutations(FLAGS, 2)]
        for event, data in ((b"e", b"x"), (b"e", rb"a\n"), (b"e", rb"a\x"), (b"nowhere", b"x"))
    ]
    told = []
    for confirm in (b"publish --confirm %b", b"publish %b --confirm"):
        world = bare()
        ask(world, b"s subscribe q e")
        chunk = [b"m%d " % n + confirm % flags for n, (flags, _, _) in enumerate(lines)]
        sent = [b"%b %b %b" % (each, *line[1:]) for each, line in zip(chunk, lines, strict=True)]
        confirms = re.sub(rb"error \w+", b"error", ask(world, b"\n".join(sent)))
        told.append((sorted(confirms.splitlines()), ask(world, b"c consume q --meta")))
    assert told[0] == told[1]
    assert b"escaped=1,priority=5" in told[0][1]


def test_numbers_of_what_has_left_go() -> None:
    world = bare()
    ask(world, b"s subscribe q e")
    queue = world.broker.queues[b"q"]
    ready, levels = queue.lane.blocks, ranked.Ranked(queue)
    stuck, line = b"m event=e d", b"m event=e d\t\t\t,priority=-5"
    assert (priority_of(stuck), priority_of(line)) == (0, -5)
    number = 1
    for _ in range(200):
        ready.append(number, [stuck, *[line] * 200])
        levels.joined(number, [stuck, *[line] * 200])
        for each in range(number + 1, number + 201):
            ready.pop(each)
        number += 201
    assert sum(levels.counts().values()) <= 2 * ready.count + 2 * 1024
    first_ones = [1 + 201 * each for each in range(10)]
    assert levels.lowest(10) == first_ones


def calls(world: BareWorld, number: int) -> Counter[str]:
    """What was called to publish, deliver, and ack some messages, alone and from a backlog."""
    with counted_calls() as called:
        world.send("k", b"m%d publish e x\n" % number)
        world.send("c", b"a ack c m%d\nd delete_consumer c\n" % number)
        world.send("k", b"".join(b"n%d publish e x\n" % each for each in range(100)))
        world.send("c", b"c consume q --manual-ack\na ack c --all\n")
    return called


@pytest.mark.parametrize("how", ["acked", "purged"])
def test_a_queue_whose_priorities_have_left_costs_no_more_than_one_that_never_had_any(
    how: str,
) -> None:
    counts = []
    for flag in (b"--key=k", b"--priority=5"):
        world = BareWorld()
        world.send("c", b"s subscribe q e\n")
        for number in range(20):
            world.send("k", b"p%d publish %b e x\n" % (number, flag))
        assert isinstance(world.broker.queues[b"q"].order, ranked.Ranked) == (b"pri" in flag)
        if how == "acked":
            world.send("c", b"c consume q --manual-ack\na ack c --all\n")
        else:
            world.send("c", b"p purge q\nc consume q --manual-ack\n")
        for number in range(100):
            world.send("k", b"p%d publish e x\n" % number)
        world.send("c", b"a ack c --all\n")
        counts.append(calls(world, 1))
    assert counts[0] == counts[1]


def test_levels_go_with_a_part_of_the_backlog_behind_the_last_priority() -> None:
    lab = opened()
    publish(lab, *[0] * 300, 5)
    queue = lab.broker.queues[b"q"]
    lab.do("c", b"c consume q --manual-ack --prefetch=1")
    assert lab.replies == [b"c ok m301 event=e d"]
    assert isinstance(queue.order, ranked.Ranked)

    for number in (301, *range(1, 71)):
        lab.do("c", b"a ack c m%d" % number)
    assert isinstance(queue.order, Fifo)
    lab.do("a", b"t stats queue q")
    assert b'"priorities": {"0": 229}' in lab.replies[-1]
    publish(lab, 3, first=302)
    lab.do("c", b"a ack c m71")
    assert lab.replies[-1].startswith(b"c ok m302 ")


def test_what_a_consumer_holds_while_the_levels_go_returns_with_its_priority() -> None:
    lab = opened()
    lab.do("y", b"y consume q --manual-ack --prefetch=3")
    publish(lab, 1, 2, *[0] * 300)
    for number in range(3, 100):
        lab.do("y", b"a ack y m%d" % number)
    lab.rest()
    assert isinstance(lab.broker.queues[b"q"].order, Fifo)
    lab.end("y")
    lab.rest()
    assert drained(lab) == [2, 1, *range(100, 303)]
