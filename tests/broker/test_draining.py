"""A server that drains delivers nothing, and tells who still holds what, and until when."""

import json
from typing import Any

import pytest

from mqks.limits import DRAIN_HOLDERS_MAX, DRAINS_WAITING_MAX
from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld
from tests.kit.lab import Lab


def answers(lab: Lab) -> list[dict[str, Any]]:
    """What drains were answered since the last look."""
    found = [json.loads(line[5:]) for line in lab.replies if line.startswith(b"d ok {")]
    lab.replies.clear()
    return found


def held(lab: Lab) -> None:
    """A queue of five messages, of which a consumer holds two."""
    lab.do("a", b"c consume q e --manual-ack --prefetch=2")
    lab.do("b", *[b"m%d publish e x" % number for number in range(5)])
    lab.replies.clear()


def test_what_is_acked_is_durable_before_the_answer() -> None:
    lab = Lab(1 << 24)
    held(lab)
    lab.send("d", b"d drain")
    lab.send("a", b"a ack c m0", b"a ack c m1")
    lab.tick(1)
    lab.work()
    assert answers(lab) == []
    lab.rest()
    lab.crash()
    assert lab.broker.queues[b"q"].ready == 3


def test_after_the_time_the_holders_are_told() -> None:
    lab = Lab(1 << 24)
    held(lab)
    lab.wall_ahead_us -= 3600_000_000
    lab.do("d", b"d drain --timeout=5")
    lab.wait(4.5)
    assert answers(lab) == []
    lab.wall_ahead_us -= 3600_000_000
    lab.wait(1)
    [told] = answers(lab)
    assert (told["draining"], told["unacked"], told["consumers"]) == (True, 2, 1)
    [holder] = told["holders"]
    assert (holder["consumer"], holder["queue"], holder["unacked"]) == ("c", "q", 2)


def test_two_drains_and_an_end_race_with_a_commit_between_them() -> None:
    lab = Lab(1 << 24)
    held(lab)
    lab.send("d", b"d drain")
    lab.take()
    lab.send("e", b"d drain --timeout=9")
    lab.send("f", b"f drain --off")
    lab.land()
    lab.wait(1)
    assert [told["draining"] for told in answers(lab)] == [False, False]
    lab.do("a", b"a ack c m0")
    assert lab.replies[-1].startswith(b"c ok m2")
    lab.check()


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_all_orders_go_on_as_if_nothing_had_been(memory_bytes: int) -> None:
    lab = Lab(memory_bytes)
    lab.do("a", b"s subscribe q e", b"c consume q --manual-ack", b"k set_queue k --ordered=key")
    lab.do("a", b"k subscribe k f", b"k consume k --manual-ack", b"l set_queue q --ttl=60")
    lab.do("d", b"d drain")
    lab.do("b", *[b"m%d publish --priority=%d e x" % (n, n) for n in range(3)])
    lab.do("b", *[b"k%d publish --key=%d f x" % (n, n % 2) for n in range(4)], b"p publish e y")
    assert [line for line in lab.replies if b" event=" in line] == []
    lab.do("d", b"e drain --off")
    got = [line.split()[2] for line in lab.replies if b" event=" in line]
    assert sorted(got[:4]) == [b"m0", b"m1", b"m2", b"p"]
    assert got[:2] == [b"m2", b"m1"]
    assert sorted(got[4:]) == [b"k0", b"k1", b"k2", b"k3"]
    lab.check()


def test_no_more_holders_are_named_than_the_limit() -> None:
    lab = Lab(1 << 24)
    count = DRAIN_HOLDERS_MAX + 7
    name = b"n" * 240
    lab.do("a", *[b"%b%d consume %b e --manual-ack" % (name, n, name) for n in range(count)])
    lab.do("b", *[b"m%d publish e x" % n for n in range(count)])
    lab.replies.clear()
    lab.do("d", b"d drain --timeout=0")
    [told] = answers(lab)
    assert (told["unacked"], told["consumers"]) == (count, count)
    assert len(told["holders"]) == DRAIN_HOLDERS_MAX


def test_a_burst_owes_few_answers() -> None:
    lab = Lab(1 << 24)
    held(lab)
    lab.do("d", *[b"d drain"] * 20_000)
    assert len(lab.replies) == 20_000 - DRAINS_WAITING_MAX
    assert lab.connections["d"].unconfirmed == DRAINS_WAITING_MAX
    lab.wait(31)
    assert len(answers(lab)) == DRAINS_WAITING_MAX
    lab.do("d", b"d drain --timeout=0")
    assert len(answers(lab)) == 1
    check(lab.broker)


def test_a_guest_may_operate_the_server_only() -> None:
    world = BareWorld()
    world.send("k", b"s subscribe --confirm q e\nd drain --timeout=0\n")
    broker = world.broker
    guest = broker.connect("guest", local=True, guest=True)
    world.intake.receive(guest, b"s stats journal\nc close_connection 99\nd drain --timeout=0\n")
    assert not guest.expelled
    for line in (
        *(b"p ping x", b"m publish e x", b"c consume q"),
        *(b"r receive q", b"k peek q", b"u subscribe q f"),
    ):
        guest = broker.connect("guest", local=True, guest=True)
        world.intake.receive(guest, b"s stats journal\n" + line + b"\np ping again\n")
        told = b"".join(guest.outbox)
        assert guest.expelled, line
        assert told.splitlines()[-1].endswith(b" the server drains: it lets nobody in"), told
    guest = broker.connect("guest", local=True, guest=True)
    world.intake.receive(guest, b"d drain --off\nm publish --confirm e x\n")
    assert not guest.expelled
    assert broker.queues[b"q"].ready == 1
