"""A paused queue delivers nothing, or takes nothing, and goes on as if there had been no pause."""

import pytest

from mqks.settings import QueueTable
from tests.kit.lab import Lab

KEYED = b"s set_queue q --ordered=key"


def got(lab: Lab) -> list[bytes]:
    """Ids of what was delivered since the last look."""
    ids = [line.split(b" ")[2] for line in lab.replies if line.startswith(b"c ok m")]
    lab.replies.clear()
    return ids


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_priorities_are_those_from_before_the_pause(memory_bytes: int) -> None:
    lab = Lab(memory_bytes)
    lab.do("a", b"s subscribe q e", b"m1 publish e x", b"m2 publish --priority=5 e x")
    lab.do("a", b"s set_queue q --paused=yes", b"c consume q --manual-ack")
    lab.do("a", b"m3 publish --priority=9 e x", b"m4 publish e x", b"r receive q")
    lab.check()
    assert lab.replies[-1] == b"r ok --end"
    assert got(lab) == []

    lab.do("a", b"s set_queue q --paused=")

    assert got(lab) == [b"m3", b"m2", b"m1", b"m4"]
    lab.check()


def test_keys_are_held_back_over_a_pause() -> None:
    lab = Lab(1 << 24)
    lab.do("a", KEYED, b"c consume q e --manual-ack --prefetch=1")
    lab.do("a", *[b"m%d publish --key=k e x" % number for number in range(3)])
    lab.do("a", b"s set_queue q --paused=yes", b"r reject --delay=1 c m0")
    assert got(lab) == [b"m0"]
    lab.do("a", b"s set_queue q --paused=no")
    assert got(lab) == []
    lab.do("a", b"s set_queue q --paused=yes")
    lab.wait(1.1)
    assert got(lab) == []

    lab.do("a", b"s set_queue q --paused=no")
    for number in range(3):
        lab.do("a", b"a ack c m%d" % number)

    assert got(lab) == [b"m0", b"m1", b"m2"]
    lab.check()


def test_rules_that_change_in_a_pause_count_after_it() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s set_queue q --paused=yes", b"c consume q e --manual-ack")
    lab.do("a", KEYED, *[b"m%d publish --key=k%d e x" % (n, n % 2) for n in range(4)])
    lab.do("z", b"z consume q --manual-ack")
    lab.do("a", b"s set_queue q --paused=no")

    assert got(lab) == [b"m0", b"m2"]
    lab.check()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_a_pause_outlives_a_crash(memory_bytes: int) -> None:
    lab = Lab(memory_bytes)
    lab.do("a", b"s set_queue q --paused=yes", b"s subscribe q e", b"m1 publish e x")
    lab.do("a", b"m2 publish --priority=5 e x")
    lab.crash()
    lab.do("a", b"c consume q --manual-ack", b"m3 publish --confirm e x")
    assert got(lab) == []

    lab.do("a", b"s set_queue q --paused=no")

    assert got(lab) == [b"m2", b"m1", b"m3"]
    lab.check()


def test_limits_count_in_a_pause() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s set_queue q --paused=yes --messages-max=2 --overflow=drop")
    lab.do("a", b"c consume q e --manual-ack", *[b"m%d publish e x" % n for n in range(4)])
    lab.do("a", b"s set_queue q --paused=no")

    assert got(lab) == [b"m2", b"m3"]


def ends(lab: Lab) -> list[bytes]:
    """The first two words of the replies since the last look."""
    told = [b" ".join(line.split(b" ")[:2]) for line in lab.replies]
    lab.replies.clear()
    return told


@pytest.mark.parametrize("set_back_s", [0, 3600, -3600])
def test_a_pause_for_a_time_ends_whatever_the_clock_is_set_to(set_back_s: int) -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"c consume q e --manual-ack", b"p pause q --for=10", b"m0 publish --confirm e x")
    assert ends(lab) == [b"m0 error"]
    lab.wall_ahead_us -= set_back_s * 1_000_000
    lab.wait(9)
    lab.do("a", b"m1 publish --confirm e x")
    assert ends(lab) == [b"m1 error"]
    lab.wait(1.1)
    lab.do("a", b"m2 publish --confirm e x")
    assert ends(lab) == [b"c ok", b"m2 ok"]
    assert lab.broker.queues[b"q"].policy.paused_until_s is None
    lab.check()


@pytest.mark.parametrize("away_s", [1, 60])
def test_a_pause_for_a_time_ends_after_a_crash(away_s: int) -> None:
    lab = Lab()
    lab.do("a", b"s subscribe q e", b"p pause --confirm q --for=10")
    lab.now_us += away_s * 1_000_000
    lab.crash()
    lab.rest()
    lab.do("a", b"m1 publish --confirm e x")
    assert ends(lab) == [b"m1 error" if away_s < 10 else b"m1 ok"]
    lab.wait(10)
    lab.do("a", b"m2 publish --confirm e x")
    assert ends(lab) == [b"m2 ok"]
    lab.crash()
    assert lab.broker.queues[b"q"].rules.pause is None


def test_a_pause_replaces_the_one_before_and_its_end() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"c consume q e --manual-ack", b"p pause q --publishes --for=5")
    lab.do("a", b"p pause q --deliveries", b"m1 publish --confirm e x")
    assert ends(lab) == [b"m1 ok"]
    lab.wait(20)
    assert ends(lab) == []
    lab.do("a", b"r resume q")
    assert ends(lab) == [b"c ok"]


def test_publishes_of_one_chunk_are_refused_from_the_pause_on() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"s subscribe other e")
    lab.do(
        "a", b"m1 publish --confirm e x", b"p pause q --publishes", b"m2 publish --confirm e x",
        b"r resume q", b"m3 publish --confirm e x",
    )  # fmt: skip
    assert sorted(ends(lab)) == [b"m1 ok", b"m2 error", b"m3 ok"]
    assert [lab.broker.queues[name].ready for name in (b"q", b"other")] == [2, 2]
    lab.check()


def test_a_transaction_with_a_publish_to_a_paused_queue_is_refused_as_a_whole() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"s subscribe other f", b"p pause q --publishes")
    lab.do("a", b"b begin", b"m1 publish f x", b"m2 publish e x", b"k commit --confirm")
    assert b"k error" in ends(lab)
    assert lab.broker.queues[b"other"].ready == 0


def test_what_moves_without_a_publish_joins_a_paused_queue() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s set_queue q --dead-letters=dead", b"c consume q e --manual-ack")
    lab.do("a", b"s subscribe dead late", b"m1 publish e x", b"m2 publish --delay=5 late x")
    lab.do("a", b"p pause dead --publishes", b"r reject --dead c m1")
    lab.wait(6)
    assert lab.broker.queues[b"dead"].ready == 2
    lab.do("a", b"s subscribe r g", b"m3 publish g x", b"v move r dead")
    assert lab.broker.queues[b"dead"].ready == 3
    lab.check()


def test_a_queue_that_drops_the_oldest_is_paused_too() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s set_queue q --messages-max=1 --overflow=drop", b"s subscribe q e")
    lab.do("a", b"p pause q --publishes", b"m1 publish --confirm e x")
    assert ends(lab) == [b"m1 error"]


def test_a_deleted_queue_leaves_no_end_of_its_pause() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"p pause q --for=1000", b"d delete_queue q")
    lab.wait(2)  # The audit has a timer of its own.
    assert len(lab.broker.schedule) == 0


def test_resume_ends_a_pause_of_the_settings() -> None:
    lab = Lab(1 << 24)
    lab.broker.policies.reload([QueueTable("q", {"paused": True, "publishes_paused": True})])
    lab.do("a", b"c consume q e", b"m1 publish --confirm e x", b"r resume q")
    lab.do("a", b"m2 publish --confirm e x")
    assert ends(lab) == [b"m1 error", b"c ok", b"m2 ok"]
