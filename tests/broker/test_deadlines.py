"""Ack timeouts of very many messages, and of those that come again."""

from __future__ import annotations

from mqks.broker.features.time.deadlines import STALE_MIN, Deadlines
from mqks.broker.requests.returning import touch
from mqks.broker.spine.clients.consumer import Consumer
from mqks.limits import STEP_MESSAGES
from tests.kit.bare import BareWorld
from tests.kit.called import lines_of

COUNT = 20_000


def holding(count: int, timeout_s: int = 100) -> BareWorld:
    """A consumer that holds so many messages."""
    world = BareWorld()
    world.send("c", b"s subscribe q e\ns set_queue q --ack-timeout=%d\n" % timeout_s)
    world.send("c", b"".join(b"m%d publish e x\n" % number for number in range(count)))
    world.send("c", b"c consume q --manual-ack\n")
    return world


def test_touching_all_costs_the_same_whatever_was_touched_before() -> None:
    world = holding(COUNT)
    world.advance(50)
    for number in range(COUNT):
        touch(world.broker, b"c", b"m%d" % number)
        world.now_us += 100
    world.advance(60)
    other = world.connection("other")
    assert lines_of(lambda: world.intake.receive(other, b"t touch c --all\n")) < 1000
    world.advance(99)
    assert world.broker.consumers[b"c"].unacked_count == COUNT
    world.send("other", b"d delete_consumer --confirm c\n")
    assert world.broker.queues[b"q"].ready == COUNT


def test_no_step_returns_more_than_a_thousand_that_are_late() -> None:
    world = holding(COUNT)
    consumer: Consumer = world.broker.consumers[b"c"]
    world.broker.queues[b"q"].returning += 1  # Nothing is delivered again.
    world.now_us += 101_000_000
    held = COUNT
    while world.broker.schedule.run_next():
        assert held - consumer.unacked_count <= STEP_MESSAGES
        held = consumer.unacked_count
    assert held == 0


def test_a_lease_that_changes_very_often_takes_no_memory() -> None:
    world = holding(10)
    consumer = world.broker.consumers[b"c"]
    for number in range(COUNT // 2):
        world.send("other", b"t touch c m1 --for=%d\nt touch c --all\n" % (COUNT - number))
    world.advance(1)
    assert isinstance(consumer.deadlines, Deadlines)
    assert consumer.deadlines._count <= 2 * STALE_MIN
    world.send("other", b"t touch c m1 --for=2\n")
    world.received("c")
    world.advance(1.9)
    assert world.received("c") == b""
    world.advance(0.2)
    assert world.received("c") == b"c ok m1 event=e,retry=1 x\n"
    world.advance(96)
    assert world.received("c") == b""
    world.advance(3)
    assert world.received("c").count(b"retry=1") == 9


def test_leases_are_tidied_while_all_are_touched() -> None:
    world = holding(COUNT, timeout_s=5)
    consumer = world.broker.consumers[b"c"]
    for _ in range(4):
        world.send("other", b"t touch c --all --for=1\nt touch c --all\n")
        world.advance(1)
    assert consumer.unacked_count == COUNT
    world.advance(3.9)
    assert b"retry=1" not in world.received("c")
    world.advance(0.2)
    assert world.received("c").count(b"retry=1") == COUNT
