"""Receives that wait, and leases: many of them, clients that go, races with the disk."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import mqks
from mqks.broker.features.admission.once import OnceWindow
from mqks.limits import RECEIVES_WAITING_MAX
from tests.kit.bare import BareWorld
from tests.kit.lab import Lab
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess

SECOND_US = 1_000_000


def test_each_message_goes_to_one_of_those_that_wait() -> None:
    world = BareWorld()
    world.send("b", b"s subscribe q e\n")
    world.send("a", b"".join(b"r%d receive q --limit=10 --wait=60\n" % n for n in range(100)))
    world.send("b", b"".join(b"m%d publish e x\n" % n for n in range(50)))
    lines = world.received("a").splitlines()
    assert len(lines) == 100
    leases = {found[1] for line in lines if (found := re.search(rb"lease=(\S+)", line))}
    assert len(leases) == 50
    queue = world.broker.queues[b"q"]
    assert queue.scheduled == queue.leased == 50
    world.send("b", b"d publish --delay=100 e x\n")
    assert (queue.scheduled, queue.leased) == (51, 50)
    assert queue.lane.blocks.first is None
    world.advance(61)
    assert [line[-5:] for line in world.received("a").splitlines()] == [b"--end"] * 50
    assert not queue.ring
    assert not world.broker.flow.receivers
    assert queue.ready == 50  # Nobody acked them in 30 s.


def test_a_client_that_goes_takes_its_receives_along() -> None:
    world = BareWorld()
    world.send("b", b"s subscribe q e\n")
    world.send("a", b"".join(b"r%d receive q --wait=60\n" % n for n in range(3000)))
    assert world.broker.flow.receivers == 3000
    world.disconnect("a")
    assert not world.broker.queues[b"q"].ring
    assert not world.broker.flow.receivers
    world.send("b", b"m publish e x\n")
    assert world.broker.queues[b"q"].ready == 1


def test_no_more_than_so_many_wait() -> None:
    world = BareWorld()
    world.send("a", b"s subscribe q e\n")
    world.send("a", b"".join(b"r receive q --wait=60\n" for _ in range(RECEIVES_WAITING_MAX + 1)))
    assert world.received("a").startswith(b"r error ")
    assert world.broker.flow.receivers == RECEIVES_WAITING_MAX
    assert world.broker.limits_reached["receives_waiting_max"] == 1


def test_what_one_connection_has_taken_before_the_commit_is_bounded_in_bytes() -> None:
    world = BareWorld()
    world.send("b", b"s subscribe q e\n")
    for n in range(30):
        world.send("b", b"m%d publish e %b\n" % (n, b"x" * 1_000_000))
    world.send("a", b"".join(b"r%d receive q --limit=100 --wait=60\n" % n for n in range(40)))
    answers = world.received("a").split(b"--end\n")
    assert {each.count(b"lease=") for each in answers[:-1]} <= {1, 2}
    assert sum(each.count(b"lease=") for each in answers) == 30
    assert not world.connection("a").rests
    world.send("b", b"m publish e x\n")
    assert world.received("a").count(b"lease=") == 1  # Those that have to wait go on.


@pytest.mark.slow
@pytest.mark.anyio
async def test_of_messages_on_disk(tmp_path: Path) -> None:
    """They are read first; a reject with a delay keeps the message out of the next receive."""
    with ServerProcess(tmp_path / "db") as server:
        async with mqks.connect(server.url) as client:
            await client.subscribe("q", ["e"])
            await client.publish_many(("e", f"{n} {'x' * 10_000}") for n in range(200))
        server.kill()
        server.launch()
        async with mqks.connect(server.url) as client:
            seen = set[str]()
            while some := await client.receive("q", limit=100, lease_s=600):
                seen |= {each.text.split()[0] for each in some}
                first, *others = some  # As many as were read so far: perhaps one.
                assert first.lease
                assert await client.reject_lease("q", first.lease, delay_s=600)
                assert not await client.ack_lease("q", first.lease)
                for each in others:
                    assert await client.extend_lease("q", each.lease or "", 900)
                    assert await client.ack_lease("q", each.lease or "")
            assert len(seen) == 200
            told = await client.stats("queue", "q")
            assert told["ready"] == 0
            assert 0 < told["scheduled"] < 200


def test_what_was_told_to_one_is_not_told_to_another_after_a_kill(tmp_path: Path) -> None:
    with ServerProcess(tmp_path / "db") as server:
        with LineClient(server.address) as client:
            client.send(b"s subscribe q e\n")
            client.send(b"".join(b"m%d publish e x\n" % n for n in range(2000)))
            client.send(b"".join(b"r receive q --lease=600 --limit=7\n" for _ in range(100)))
            told: set[bytes] = set()
            while len(told) < 200:
                told |= {*re.findall(rb"ok (m\d+) ", client.line())}
        server.kill()
        server.launch()
        with LineClient(server.address) as client:
            client.send(b"r receive q --limit=100\n" * 20)
            again, ends = set[bytes](), 0
            while ends < 20:
                line = client.line()
                ends += line.endswith(b"--end")
                again |= {*re.findall(rb"ok (m\d+) ", line)}
        assert again
        assert not again & told


def test_an_id_may_count_for_a_time() -> None:
    world = BareWorld()
    world.send("a", b"s subscribe q e\n")

    def publish(once: bytes) -> int:
        world.send("a", b"m publish --to=q %b e x\nm publish %b e x\n" % (once, once))
        return world.broker.queues[b"q"].ready

    assert publish(b"--once=10") == 1
    world.advance(9)
    assert publish(b"--once=10") == publish(b"--once") == 1
    world.advance(2)
    assert publish(b"--once") == 2
    world.advance(1e6)
    assert publish(b"--once=10") == 2


def published_once(lab: Lab) -> int:
    """How often an id that counts for a minute is in its queue, after it was published again."""
    lab.do("a", b"s subscribe q e", b"m publish --to=q --once=60 e x")
    lab.commit()
    return lab.broker.queues[b"q"].ready


@pytest.mark.parametrize("set_s", [-3600, -60, 60, 3600])
def test_an_id_counts_for_its_time_whatever_the_clock_is_set_to(set_s: int) -> None:
    lab = Lab(memory_bytes=1_000_000)
    assert published_once(lab) == 1
    lab.wall_ahead_us += set_s * SECOND_US
    lab.now_us += 59 * SECOND_US
    assert published_once(lab) == 1
    lab.now_us += SECOND_US
    assert published_once(lab) == 2


@pytest.mark.parametrize("back_s", [10, 3600])
def test_a_restart_with_a_clock_set_back_begins_the_time_of_an_id_anew_at_most(back_s: int) -> None:
    lab = Lab(memory_bytes=1_000_000)
    assert published_once(lab) == 1
    lab.wall_ahead_us -= back_s * SECOND_US
    lab.now_us += 30 * SECOND_US
    lab.crash()
    lab.now_us += (min(30 + back_s, 60) - 1) * SECOND_US
    assert published_once(lab) == 1
    lab.now_us += SECOND_US
    assert published_once(lab) == 2


def test_a_restart_follows_the_clock() -> None:
    lab = Lab(memory_bytes=1_000_000)
    assert published_once(lab) == 1
    lab.wall_ahead_us += 59 * SECOND_US
    lab.crash()
    assert published_once(lab) == 1
    lab.wall_ahead_us += SECOND_US
    lab.crash()
    assert published_once(lab) == 2


def test_an_id_that_came_again_outlives_its_older_entry() -> None:
    now_us = 0
    first, second = (OnceWindow(3, lambda: now_us, lambda: now_us) for _ in range(2))
    kept = [first.add(b"a", 10)]
    now_us = 20 * SECOND_US
    kept += first.add(b"a", 10), first.add(b"b")
    second.restore(filter(None, kept))
    for window in (first, second):
        assert window.add(b"c") == b"c"
        now_us = 29 * SECOND_US
        assert window.knows(b"a")
        now_us = 30 * SECOND_US
        assert not window.knows(b"a")
        assert window.knows(b"b")
        now_us = 20 * SECOND_US


def test_a_lease_that_is_over_before_it_is_durable_is_not_told() -> None:
    lab = Lab(memory_bytes=1_000_000)
    lab.do("a", b"s subscribe q e", b"m1 publish e x", b"m2 publish e x")
    lab.replies.clear()
    lab.send("a", b"r receive q --limit=2 --lease=1")
    lab.take()  # The commit takes two seconds.
    lab.send("b", b"c consume q --manual-ack --prefetch=1")
    lab.wait(2)
    assert lab.replies == [b"c ok m1 event=e,retry=1 x", b"r ok --end"]


def test_what_nobody_was_told_is_ready_again() -> None:
    """The client goes while its lease is being written. With one delivery it would be dead."""
    lab = Lab(memory_bytes=1_000_000)
    lab.do("a", b"s subscribe q e", b"x set_queue q --deliveries=1", b"m publish e x")
    lab.send("b", b"r receive q")
    lab.take()
    lab.end("b")
    lab.rest()
    queue = lab.broker.queues[b"q"]
    assert (queue.ready, queue.leased, queue.dead) == (1, 0, 0)
    lab.do("a", b"r receive q")
    assert lab.replies[-2].startswith(b"r ok m event=e,seq=1")
