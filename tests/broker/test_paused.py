"""A queue that is paused delivers nothing, and then goes on as if there had been no pause."""

import pytest

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
