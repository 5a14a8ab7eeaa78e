"""What goes out to consumers, what comes back, and when: what a story cannot tell.

The one rule: time is measured only where nothing may happen too early.
"""

from __future__ import annotations

import re
import time

import pytest

from mqks.broker.features.death import fates
from mqks.broker.features.time.times import timed
from mqks.limits import GONE_MIN
from mqks.testing import Broker
from mqks.users import User
from tests.kit.bare import BareWorld, ask
from tests.kit.line_client import LineClient


def client(broker: Broker) -> LineClient:
    return LineClient(("127.0.0.1", broker.port))


def ok(client: LineClient, request: bytes) -> bytes:
    """What the confirm of a request tells."""
    action, _, rest = request.partition(b" ")
    answer = client.ask(b"r %b --confirm %b" % (action, rest))
    assert answer.startswith(b"r ok "), (request, answer)
    return answer.removeprefix(b"r ok ")


def test_nothing_comes_early(mqks_broker: Broker) -> None:
    """The server's clocks are those of this process."""
    with client(mqks_broker) as publisher, client(mqks_broker) as consumer:
        consumer.send(b"c consume --confirm q e --manual-ack\n")
        assert consumer.line() == b"c ok "

        began_s = time.monotonic()
        ok(publisher, b"publish --delay=0.2 e a")
        assert consumer.line() == b"c ok r event=e a"
        assert time.monotonic() - began_s >= 0.2
        ok(publisher, b"ack c r")

        at_s = time.time() + 0.2
        ok(publisher, b"publish --at=%.6f e b" % at_s)
        assert consumer.line() == b"c ok r event=e b"
        assert time.time() >= at_s

        began_s = time.monotonic()
        ok(publisher, b"reject c r --delay=0.2")
        assert consumer.line() == b"c ok r event=e,retry=1 b"
        assert time.monotonic() - began_s >= 0.2

        ok(publisher, b"ack c r")
        ok(publisher, b"set_queue q --ack-timeout=0.3")
        began_s = time.monotonic()
        ok(publisher, b"publish e c")
        assert consumer.line() == b"c ok r event=e c"
        assert consumer.line() == b"c ok r event=e,retry=1 c"
        assert time.monotonic() - began_s >= 0.3


def lines(world: BareWorld, name: str) -> list[bytes]:
    return world.received(name).splitlines()


def told(world: BareWorld, request: bytes) -> list[bytes]:
    world.send("bob", request + b"\n")
    return lines(world, "bob")


@pytest.fixture
def world() -> BareWorld:
    """With a consumer `c` of alice's for the queue `q`, which is bound to `e`."""
    world = BareWorld()
    world.send("alice", b"c consume q e --manual-ack\n")
    return world


def test_the_backoff_doubles_up_to_its_limit(world: BareWorld) -> None:
    told(world, b"s set_queue q --backoff=1,8")
    told(world, b"m1 publish e a")
    for rejects, wait_s in enumerate((1, 2, 4, 8, 8, 8), 1):
        assert len(lines(world, "alice")) == 1
        assert told(world, b"r reject c m1") == []
        world.advance(wait_s * (1 - fates.JITTER) - 0.001)
        assert lines(world, "alice") == [], rejects
        world.advance(wait_s * 2 * fates.JITTER + 0.002)
    assert lines(world, "alice") == [b"c ok m1 event=e,retry=6 a"]


def test_losses_after_the_first_back_off_in_the_same_way(world: BareWorld) -> None:
    told(world, b"s set_queue q --backoff=1,8")
    told(world, b"m1 publish e a\nm2 publish e b")
    for losses, wait_s in enumerate((0, 1, 2, 4, 8, 8, 8), 1):
        world.disconnect("alice")
        world.send("alice", b"c consume q --manual-ack --prefetch=2\n")
        if wait_s:
            world.advance(wait_s * (1 - fates.JITTER) - 0.001)
            assert lines(world, "alice") == [], losses
            world.advance(wait_s * 2 * fates.JITTER + 0.002)
        assert sorted(lines(world, "alice")) == [
            b"c ok m1 event=e,retry=%d a" % losses,
            b"c ok m2 event=e,retry=%d b" % losses,
        ]


def test_what_failed_together_does_not_come_back_together(world: BareWorld) -> None:
    count = 200
    told(world, b"s set_queue q --backoff=100")
    told(world, b"\n".join(b"m%d publish e x" % each for each in range(count)))
    told(world, b"r reject c --all")
    lines(world, "alice")
    came = []
    for _ in range(22):
        world.advance(1)
        came.append(len(lines(world, "alice")))
    world.advance(78)
    came.append(len(lines(world, "alice")))
    for _ in range(11):
        world.advance(1)
        came.append(len(lines(world, "alice")))
    assert sum(came) == count
    assert max(came[-11:]) < count / 2


@pytest.mark.slow
def test_what_was_promoted_leaves_nothing_behind(world: BareWorld) -> None:
    count = 3 * GONE_MIN
    told(world, b"\n".join(b"m%d publish --delay=1e6 e x" % each for each in range(count)))
    told(world, b"\n".join(b"p promote q m%d" % each for each in range(count)))
    assert len(lines(world, "alice")) == count
    times = timed(world.broker.queues[b"q"])
    assert times is not None
    assert not times.delays.is_untidy


def test_a_letter_tells_when_it_was_published_and_when_it_died(mqks_broker: Broker) -> None:
    with client(mqks_broker) as some:
        ok(some, b"set_queue q --retries=2 --dead-letters=dead")
        ok(some, b"subscribe q e")
        before_s = time.time()
        ok(some, b"publish e a")
        published_s = time.time()
        some.send(b"c consume q --manual-ack\n")
        assert some.line() == b"c ok r event=e a"
        some.send(b"x reject c r\n")
        assert some.line() == b"c ok r event=e,retry=1 a"
        rejected_s = time.time()
        ok(some, b"reject c r")
        some.send(b"d consume dead --meta\n")
        letter = some.line()
        died_s = time.time()
        found = re.search(rb"&published=(\d+\.\d{3})&died=(\d+\.\d{3}) ", letter)
        assert found, letter
        assert before_s - 0.001 <= float(found[1]) <= published_s
        assert rejected_s - 0.001 <= float(found[2]) <= died_s


def test_who_may_consume_one_queue_redrives_only_what_died_there() -> None:
    """Both have the same dead-letter queue."""
    world = BareWorld()
    for queue in (b"mine", b"other"):
        told(world, b"s set_queue %b --retries=1 --dead-letters=mine.dead" % queue)
        told(world, b"c consume %b --add %b --manual-ack" % (queue, queue))
        told(world, b"m publish %b x\nr reject c m\nd delete_consumer c" % queue)
    permissions = User("worker", "", "", consume=["mine", "mine.*"]).permissions()
    world.broker.access.grant(world.connection("worker"), permissions)

    assert ask(world, b"r redrive --confirm mine.dead", "worker") == b"r ok 1\n"
    assert world.broker.queues[b"mine"].ready == 1
    assert ask(world, b"r redrive --confirm mine.dead --to=mine", "worker") == b"r ok 1\n"


def test_a_consumer_that_may_not_go_on_is_no_loss(world: BareWorld) -> None:
    told(world, b"s set_queue q --losses=1 --dead-letters=dead\nm publish e a")
    assert lines(world, "alice") == [b"c ok m event=e a"]
    world.broker.access.grant(world.connection("alice"), User("alice", "", "").permissions())
    assert told(world, b"d consume q --manual-ack") == [b"d ok m event=e,retry=1 a"]
