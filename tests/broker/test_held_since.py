"""Since when consumers hold their messages, as `stats` returns it.

The one rule: it is the time of the delivery that is unacked, however often there were others.
"""

from __future__ import annotations

import json
from typing import Any

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


def test_batches_and_what_is_acked_between_them() -> None:
    world = bare()
    assert oldest(world) is None
    publish(world, "a", "b")
    world.advance(1.0)
    publish(world, "c", "d")
    world.advance(1.0)
    publish(world, "e")
    world.advance(1.0)
    assert held(world) == [("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2)]
    assert oldest(world) == 3
    world.send("c", b"a ack c a\na ack c b\na ack c d\n")
    assert held(world) == [("c", 1), ("e", 2)]
    assert oldest(world) == 2
    world.send("c", b"a ack c --all\n")
    assert (held(world), oldest(world)) == ([], None)
    publish(world, "f")
    assert held(world) == [("f", 3)]


def test_a_message_that_is_delivered_again() -> None:
    world = bare()
    publish(world, "a", "b")
    world.advance(1.0)
    publish(world, "c")
    world.advance(1.0)
    world.send("c", b"r release c a\n")
    assert held(world) == [("a", 2), ("b", 0), ("c", 1)]
    # `touch` is no delivery.
    world.send("c", b"t touch c --all\n")
    world.send("c", b"a ack c b\na ack c c\n")
    world.advance(1.0)
    assert (held(world), oldest(world)) == ([("a", 2)], 1)


def test_several_deliveries_under_one_id() -> None:
    world = bare()
    for _ in range(3):
        publish(world, "a")
        world.advance(1.0)
    publish(world, "b")
    assert held(world) == [("a", 0), ("a", 1), ("a", 2), ("b", 3)]
    world.advance(1.0)
    for left in ([("a", 1), ("a", 2), ("b", 3)], [("a", 2), ("b", 3)], [("b", 3)]):
        world.send("c", b"a ack c a\n")
        assert held(world) == left
        assert oldest(world) == 4 - left[0][1]
    world.send("c", b"a ack c b\n")
    assert (held(world), oldest(world)) == ([], None)


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


def test_a_message_that_is_held_long_keeps_its_time() -> None:
    """Whatever is delivered again and again meanwhile."""
    world = bare()
    publish(world, "old")
    world.advance(1.0)
    for number in range(500):
        publish(world, f"m{number}")
        world.send("c", b"r reject c m%d\n" % number)
        world.send("c", b"a ack c m%d\n" % number)
    assert held(world) == [("old", 0)]


def test_deliveries_again_are_known_when_others_are_dropped() -> None:
    """Whichever delivery it is that drops them."""
    world = bare()
    publish(world, "old")
    for number in range(150):
        name = f"m{number}"
        publish(world, name)
        for _ in range(2):
            world.advance(1.0)
            world.send("c", b"r release c m%d\n" % number)
            assert held(world)[-1] == (name, world.now_s - START_S)
        world.send("c", b"a ack c m%d\n" % number)


def test_many_deliveries_one_by_one_are_all_known() -> None:
    """More than there are before settled ones are dropped."""
    world = bare()
    for number in range(300):
        publish(world, f"m{number:03}")
        world.advance(1.0)
    world.send("c", b"".join(b"a ack c m%03d\n" % number for number in range(300) if number % 7))
    for number in range(300, 700):
        publish(world, f"m{number:03}")
        world.send("c", b"a ack c m%03d\n" % number)
        world.advance(1.0)
    assert held(world) == [(f"m{number:03}", number) for number in range(0, 300, 7)]
    assert oldest(world) == 700
