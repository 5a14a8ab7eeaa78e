"""Scheduled messages searched by id, in queues of many."""

import random

import pytest

from mqks.broker.features.time import delays
from mqks.broker.features.time.delays import SEARCHES_MAX
from mqks.broker.features.time.times import timed
from tests.kit.bare import BareWorld, ask
from tests.kit.compiled import patches_modules


@patches_modules
def test_after_some_searches_not_all_messages_are_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delays, "STEP_BODIES", 64)
    world, count = BareWorld(), 3000
    ask(world, b"s subscribe q e")
    ask(world, b"\n".join(b"m%d publish --delay=60 e x" % number for number in range(count)))
    searched = timed(world.broker.queues[b"q"]).delays
    steps = [len([*searched.search(b"m%d" % number)]) for number in range(SEARCHES_MAX + 3)]
    assert min(steps[:SEARCHES_MAX]) > count // 64
    assert max(steps[-2:]) <= 2


def test_what_is_found_is_what_is_scheduled_with_the_id() -> None:
    """Whatever comes, is due, comes back and is taken, and however often an id is used."""
    chance, world = random.Random(5), BareWorld()
    ask(world, b"s subscribe q e")
    scheduled: dict[int, list[int]] = {}
    for step in range(600):
        number, due_s = chance.randrange(40), chance.randrange(1, 4000)
        match chance.randrange(4):
            case 0 | 1:
                copies = chance.choice([1, 1, 200])
                line = b"m%d publish --delay=%d e x" % (number, due_s)
                ask(world, b"\n".join([line] * copies))
                scheduled.setdefault(number, []).extend([step] * copies)
            case 2:
                verb = chance.choice([b"cancel", b"promote"])
                told = ask(world, b"x %b --confirm q m%d" % (verb, number))
                assert told == b"x ok %d\n" % len(scheduled.pop(number, ()))
            case 3:
                if chance.randrange(40) == 0:
                    everything = sum(map(len, scheduled.values()))
                    assert ask(world, b"x cancel --confirm q --all") == b"x ok %d\n" % everything
                    scheduled.clear()
    assert world.broker.queues[b"q"].scheduled == sum(map(len, scheduled.values()))
