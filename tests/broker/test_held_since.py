"""Since when consumers hold their messages, as `stats` returns it.

The one rule: it is the time of the delivery that is unacked, however often there were others.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld

START_S = 1000.0


def bare(**settings: Any) -> BareWorld:
    """A queue that `c` consumes, and `k` who publishes to it and asks."""
    world = BareWorld(**settings)
    world.send("c", b"c consume --confirm q e --manual-ack\n")
    return world


def publish(world: BareWorld, *ids: str) -> None:
    world.send("k", b"".join(b"%s publish e x\n" % each.encode() for each in ids))


def stats(world: BareWorld, what: bytes) -> list[dict[str, Any]]:
    world.received("k")
    world.send("k", b"s stats %b\n" % what)
    check(world.broker)
    rows: list[dict[str, Any]] = json.loads(world.received("k").removeprefix(b"s ok "))
    return rows


def held(world: BareWorld) -> list[tuple[str, float]]:
    """Id of each unacked message, and how many seconds after the start it was delivered."""
    rows = stats(world, b"unacked q")
    return [(row["id"], row["delivered_us"] / 1e6 - START_S) for row in rows]


def oldest(world: BareWorld, consumer: str = "c") -> float | None:
    found = {row["id"]: row["oldest_age_s"] for row in stats(world, b"consumers")}
    age_s: float | None = found[consumer]
    return age_s


@pytest.mark.parametrize("seed", range(2))
def test_each_delivery_is_held_since_it_was_made(seed: int) -> None:
    """Of one id the first ack settles the oldest; what is given back is delivered at once."""
    chance, world = Random(seed), bare()
    since_s: dict[str, list[float]] = {}
    for _ in range(250):
        some = chance.choice([*since_s, "none"])
        what = chance.choice(["publish", "publish", "ack", "release", "reject", "touch", "all"])
        if what == "publish":
            ids = [f"m{chance.randrange(20)}" for _ in range(chance.randrange(1, 4))]
            publish(world, *ids)
            for each in ids:
                since_s.setdefault(each, []).append(world.now_s - START_S)
        elif what == "touch":
            world.send("c", b"t touch c --all\n")
        elif what != "all":
            world.send("c", f"r {what} c {some}\n".encode())
            if some in since_s:
                del since_s[some][0]
                if what != "ack":
                    since_s[some].append(world.now_s - START_S)
                elif not since_s[some]:
                    del since_s[some]
        elif chance.randrange(9) == 0:
            world.send("c", b"a ack c --all\n")
            since_s.clear()
        expected = [(each, at_s) for each, times_s in since_s.items() for at_s in times_s]
        assert sorted(held(world)) == sorted(expected)
        begun_s = min((at_s for _, at_s in expected), default=None)
        assert oldest(world) == (None if begun_s is None else world.now_s - START_S - begun_s)
        world.advance(1.0)


def test_each_consumer_has_its_own_times() -> None:
    world = bare()
    publish(world, "a", "b")
    world.advance(1.0)
    world.send("d", b"d consume --confirm q --manual-ack\n")
    publish(world, "c", "d")
    world.advance(1.0)
    assert (oldest(world, "c"), oldest(world, "d")) == (2, 1)
    world.send("c", b"x delete_consumer c\n")
    assert held(world) == [("a", 2), ("b", 2), *held(world)[2:]]
    assert oldest(world, "d") == 1
