"""Publishes with the same flag gather in groups: that must not show but in speed."""

import pytest

from tests.kit.lab import Lab

FLAGS = [b"--ttl=5", b"--delay=2", b"--at=1790001002"]
TRAITS = [b"--escaped", b"--key=a", b"--escaped --key=b", b"--key=c --escaped"]


def lab_of(*lines: bytes) -> Lab:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e f", *lines)
    return lab


def published(*flags: bytes) -> list[bytes]:
    """Messages m0, m1, …, one with each of the flags."""
    return [
        b"m%d publish %b%b x" % (number, flag + b" " if flag else b"", b"ef"[number % 2 :][:1])
        for number, flag in enumerate(flags)
    ]


@pytest.mark.parametrize("flag", FLAGS)
@pytest.mark.parametrize("consume", [b"c consume q", b"c consume q --manual-ack"])
def test_order_of_one_flag_and_two_events(flag: bytes, consume: bytes) -> None:
    lab = lab_of(consume)
    lab.do("a", *published(*[flag] * 50))
    lab.wait(3)
    lab.check()
    assert lab.delivered(b"c") == [b"m%d" % number for number in range(50)]


@pytest.mark.parametrize("is_crash", [False, True])
@pytest.mark.parametrize("consume", [b"c consume q", b"c consume q --manual-ack"])
def test_messages_with_traits_gather_with_plain_ones(consume: bytes, is_crash: bool) -> None:
    lab = lab_of()
    flags = [b"", *TRAITS, b"--ttl=5", b"", *TRAITS[::-1], b"--key=d --ttl=5", b""]
    lab.do("a", *published(*flags))
    if is_crash:
        lab.crash()
        lab.rest()
    lab.do("b", consume)
    lab.check()
    told = [line for line in lab.replies if line.startswith(b"c ok m")]
    assert told == [
        b"c ok m%d event=%b%b x"
        % (number, b"ef"[number % 2 :][:1], b",escaped=1" if b"--escaped" in flag else b"")
        for number, flag in enumerate(flags)
    ]


@pytest.mark.parametrize(
    "flags",
    [
        *(b"--key=", b"--key", b"--key=a,b", b"--priority=128", b"--priority=+1", b"--escaped=1"),
        *(b"--key=a --key=b", b"--escaped --escaped", b"--key=a --no", b"--escaped e \\x y"),
        *(b"--ttl=", b"--ttl=-1", b"--ttl=x", b"--delay=1 --at=2", b"--ttl=1 --ttl=1"),
        b"--ttl=1 --no",
    ],
)
@pytest.mark.parametrize("others", [b"--escaped --key=a", b"--ttl=5"])
def test_what_is_wrong_with_one_is_told_of_it_alone(flags: bytes, others: bytes) -> None:
    lab = lab_of()
    flagged = b"m%d publish " + others + b" e x"
    lab.do("a", flagged % 1, b"m2 publish %b e x" % flags, flagged % 3)
    assert [line[:8] for line in lab.replies if line.startswith(b"m")] == [b"m2 error"]
    assert lab.broker.queues[b"q"].ready == 2


@pytest.mark.parametrize("is_crash", [False, True])
def test_each_has_the_time_of_its_flag(is_crash: bool) -> None:
    lab = lab_of()
    lab.do("a", *published(b"--ttl=2", b"--ttl=9", b"--delay=4", b"--ttl=2", b"", b"--delay=8"))
    if is_crash:
        lab.crash()
        lab.rest()
    lab.wait(5)
    lab.check()
    lab.do("b", b"c consume q")
    assert lab.delivered(b"c") == [b"m1", b"m4", b"m2"]


def test_two_consumers_of_which_one_acks() -> None:
    lab = lab_of(b"c consume q", b"d consume q --manual-ack")
    lab.do("a", *published(*[b"--ttl=2"] * 10))
    lab.check()
    lab.end("a")
    lab.rest()
    lab.wait(3)
    lab.check()
    queue = lab.broker.queues[b"q"]
    assert queue.ready == 0
    assert not queue.lane.marks
