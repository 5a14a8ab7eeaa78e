"""A paused queue delivers nothing, or takes nothing, and goes on as if there had been no pause."""

import pytest

from mqks.settings import QueueTable
from tests.kit.lab import Lab


@pytest.mark.parametrize("crashes", [False, True])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_priorities_are_those_from_before_the_pause(memory_bytes: int, crashes: bool) -> None:
    lab = Lab(memory_bytes)
    lab.do("a", b"s subscribe q e", b"m1 publish e x", b"m2 publish --priority=5 e x")
    lab.do("a", b"s set_queue q --paused=yes")
    if crashes:
        lab.crash()
    lab.do("a", b"c consume q --manual-ack")
    lab.do("a", b"m3 publish --priority=9 e x", b"m4 publish e x", b"r receive q")
    lab.check()
    assert lab.replies[-1] == b"r ok --end"
    assert lab.delivered() == []

    lab.do("a", b"s set_queue q --paused=")

    assert lab.delivered() == [b"m3", b"m2", b"m1", b"m4"]
    lab.check()


@pytest.mark.parametrize("away_s", [1, 60])
def test_a_pause_for_a_time_ends_after_a_crash(away_s: int) -> None:
    lab = Lab()
    lab.do("a", b"s subscribe q e", b"p pause --confirm q --for=10")
    lab.now_us += away_s * 1_000_000
    lab.crash()
    lab.rest()
    lab.do("a", b"m1 publish --confirm e x")
    assert lab.ends() == [b"m1 error" if away_s < 10 else b"m1 ok"]
    lab.wait(10)
    lab.do("a", b"m2 publish --confirm e x")
    assert lab.ends() == [b"m2 ok"]
    lab.crash()
    assert lab.broker.queues[b"q"].rules.pause is None


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
    assert lab.ends() == [b"m1 error", b"c ok", b"m2 ok"]
