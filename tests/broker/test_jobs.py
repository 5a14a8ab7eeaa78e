"""Jobs: what has become of a message is durable with its end, told once, and bounded."""

import json
import random
from pathlib import Path

import pytest

from mqks.broker.features.jobs import results
from mqks.broker.features.jobs.progress import AllProgress
from mqks.limits import PROGRESS_MAX, RECEIVES_WAITING_MAX
from mqks.users import Permissions
from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.line_client import LineClient
from tests.kit.marks import slow
from tests.kit.server_process import ServerProcess

KEPT = b"publish --keep-result=60 e x"


def world_with_a_queue(**settings: object) -> BareWorld:
    world = bare(**settings)
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    assert ask(world, b"c consume --confirm q --manual-ack --cancellable", "c") == b"c ok \n"
    return world


def told(world: BareWorld, message_id: bytes) -> bytes:
    return ask(world, b"r result " + message_id).removeprefix(b"r ok ").rstrip(b"\n")


def step(world: BareWorld, line: bytes, name: str = "k") -> None:
    """A line, whose commit is still to come."""
    world.intake.receive(world.connection(name), line + b"\n")
    while world.broker.has_work and not world.broker.go_on():
        pass
    world.hear()


STATES = {"waiting", "done", "dead", "cancelled"}


@pytest.mark.parametrize("seed", [*range(12), *slow(*range(12, 40))])
def test_an_end_and_its_row_are_in_one_commit(seed: int) -> None:
    chance, world, count = random.Random(seed), bare(), 0
    for line in (b"s set_queue q --retries=2 --dead-letters=dead", b"b rebind q e"):
        world.send("k", line + b"\n")
    step(world, b"c consume q --manual-ack", "c")
    ids = [b"m%d" % number for number in range(6)]
    ends = [b"ack c %b", b"ack c %b --result=d", b"reject c %b", b"reject c %b --delay=1"]
    ends += [b"release c %b", b"cancel_job q %b", b"cancel q %b", b"move q other --id=%b"]
    ends += [b"move other q --id=%b", b"promote q %b", b"reject c %b --dead", b"purge q --id=%b"]
    for _ in range(150):
        message_id = chance.choice(ids)
        match chance.choice(["publish", "later", *["end"] * 4, *TURNS]):
            case "publish":
                step(world, message_id + b" " + KEPT)
            case "later":
                step(world, message_id + b" publish --keep-result=60 --delay=1 e x")
            case "end":
                count += 1
                step(world, b"x%d %b" % (count, chance.choice(ends) % message_id))
            case "time":
                world.now_us += 500_000
                world.broker.schedule.run_due(world.broker.turns)
            case "crash":
                _check_disk(world)
                was_full, world._connections = bool(world.broker.unwritable), {}
                world.crash()
                states = {found.state for found in world.broker.results.rows.values()}
                assert states <= STATES | ({"gone"} if was_full else set())
                step(world, b"c consume q --manual-ack", "c")
            case what:
                getattr(world, what)()
        world.fetch()
        world.answer(1 << 30)
        check(world.broker)


TURNS = "commit", "take", "land", "fail", "fill", "make_room", "time", "crash"


def _check_disk(world: BareWorld) -> None:
    """What waits by its row is there; what has ended is not, unless the disk was full."""
    if world.broker.unwritable:
        return
    for row, _ in world.disk.results.values():
        said = json.loads(row)
        if said["state"] == "waiting":
            assert said["number"] in world.disk.queues[said["queue_id"]].lines


def test_an_end_is_told_when_it_is_durable() -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\n" % KEPT)
    step(world, b"a ack c m1 --result=x", "c")
    world.take()
    for line in (b"r1 result m1", b"r2 result m1 --wait=9", b"x cancel_job --confirm q m1"):
        step(world, line)
        assert world.received("k") in (b"", b"c ok m1 event=e x\n")
    world.fail()
    world.hear()
    assert world.received("k") == b""
    world.commit()
    world.hear()
    replies = sorted(world.received("k").splitlines())
    assert replies == [b"r1 ok done q x", b"r2 ok done q x", b"x ok none"]
    check(world.broker)


def test_a_cancel_waits_for_what_is_on_its_way_back() -> None:
    world = world_with_a_queue()
    world.send("k", b"".join(b"m%d %b\n" % (number, KEPT) for number in range(3000)))
    world.broker.turns.chunk_s = -1.0  # Each turn does one step.
    world.broker.turns.begin()
    world.broker.disconnect(world.connection("c"))
    assert world.broker.queues[b"q"].returning
    world.intake.receive(world.connection("k"), b"x cancel_job --confirm q m2999\n")
    world._settle()
    assert world.received("k") == b"x ok cancelled\n"
    assert told(world, b"m2999") == b"cancelled q"
    assert world.broker.queues[b"q"].ready == 2999


def test_a_cancel_of_messages_that_nobody_watches() -> None:
    world = bare()
    ask(world, b"s subscribe q e")
    world.send("k", b"".join(b"m%d publish e x\n" % (number % 100) for number in range(1000)))
    world.send("k", b"m7 publish --delay=9 e x\n")
    assert ask(world, b"x cancel_job --confirm q m7") == b"x ok cancelled\n"
    assert (world.broker.queues[b"q"].ready, world.broker.queues[b"q"].scheduled) == (990, 0)
    assert ask(world, b"x cancel_job --confirm q m7") == b"x ok none\n"
    audit = [record.action for record in world.broker.audit.last]
    assert audit.count("cancel_job") == 1


def test_a_thousand_ends_in_one_commit_are_told_and_forgotten_in_steps() -> None:
    world = world_with_a_queue()
    ids = [b"m%d" % number for number in range(2000)]
    world.send("k", b"".join(b"%b %b\n" % (each, KEPT) for each in ids))
    world.send("k", b"".join(b"%b result %b --wait=9\n" % (each, each) for each in ids))
    world.received("k")
    world.broker.turns.chunk_s = -1.0
    world.send("c", b"a ack c --all\n")
    assert sorted(world.received("k").splitlines()) == sorted(b"%b ok done q" % i for i in ids)
    assert not world.broker.flow.receivers
    world.advance(59)
    assert told(world, b"m1") == b"done q"
    world.advance(1)
    assert told(world, b"m1") == b"none"
    world.advance(results.BUCKET_US / 1e6)
    assert (world.broker.results.rows, world.broker.results.bytes) == ({}, 0)
    assert world.disk.results == {}
    assert world.broker.schedule.repeats == 0
    check(world.broker)


def test_a_clock_that_is_set_back_keeps_results_longer() -> None:
    class SetClock(BareWorld):
        set_us = 0

        @property
        def wall_us(self) -> int:
            return self.now_us + self.set_us

    world = SetClock()
    world.now_us = 10**13
    ask(world, b"s subscribe q e")
    world.send("k", b"m1 %b\nx cancel_job q m1\n" % KEPT)
    world.set_us = -3600 * 10**6
    world.advance(100)
    assert told(world, b"m1") == b"cancelled q"
    world._connections.clear()
    world.crash()
    assert told(world, b"m1") == b"cancelled q"
    world.advance(3600)
    assert told(world, b"m1") == b"none"
    world.advance(20)
    assert world.broker.results.rows == {}


def test_waiters_are_bounded_and_leave_with_their_connection() -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\n" % KEPT)
    world.send("w", b"r result m1 --wait=9\n" * 3)
    assert (world.broker.flow.receivers, len(world.broker.results.waiters)) == (3, 1)
    world.disconnect("w")
    assert (world.broker.flow.receivers, world.broker.results.waiters) == (0, {})
    world.broker.flow.receivers = RECEIVES_WAITING_MAX
    assert ask(world, b"r result m1 --wait=9").startswith(b"r error")
    assert ask(world, b"r result m1") == b"r ok running q\n"
    assert world.broker.limits_reached["receives_waiting_max"] == 1


def test_a_client_that_does_not_read_is_told_little() -> None:
    world = world_with_a_queue(delivery_pause_bytes=200_000)
    data = b"x" * 60_000
    world.send("k", b"".join(b"m%d %b\n" % (number, KEPT) for number in range(100)))
    world.received("k")
    slow = world.connection("slow")
    for number in range(100):
        world.send("slow", b"r%d result m%d --wait=60\n" % (number, number))
    before, world.hear = world.hear, list  # type: ignore[method-assign]
    for number in range(100):
        world.intake.receive(world.connection("c"), b"a ack c m%d --result=%b\n" % (number, data))
        world.commit()
    while not world.broker.go_on() and world.broker.turns:
        pass
    assert slow.outbox_bytes < 300_000
    world.hear = before  # type: ignore[method-assign]
    world.advance(0)
    assert world.received("slow").count(b" ok done q x") == 100
    check(world.broker)


def test_a_consumer_that_does_not_read_is_not_told() -> None:
    world = world_with_a_queue(delivery_pause_bytes=100)
    world.send("k", b"m1 publish e x\n")
    connection = world.connection("c")
    connection.rest(2)
    world.intake.receive(world.connection("k"), b"x cancel_job --confirm q m1\n" * 1000)
    world.commit()
    world.hear()
    assert set(world.received("k").splitlines()) == {b"x ok held"}
    assert connection.outbox_bytes == 0


@pytest.mark.parametrize(
    "line",
    [
        b"p progress c m1 1 " + b"y" * 1_000_000,
        b"x cancel_job q m1 --reason=" + b"y" * 1_000_000,
        b"x cancel_job q " + b"y " * 500_000,
        b"r result " + b"m1 " * 300_000,
        b"r result m1 " + b"--wait=1 " * 100_000,
        b"a ack c m1 --result=" + b"y" * 1_000_000,
    ],
)
def test_long_lines_are_errors(line: bytes) -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\n" % KEPT)
    world.received("c")
    assert b" error " in ask(world, line)
    assert told(world, b"m1") == b"running q"
    assert ask(world, b"a ack --confirm c m1") == b"a ok \n"


def test_a_full_disk_refuses_results_and_not_acks() -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\nm2 %b\n" % (KEPT, KEPT))
    world.fill()
    step(world, b"a ack --confirm c m1 --result=x")
    assert world.received("k").startswith(b"a error")
    step(world, b"a ack --confirm c m2")
    world.commit()
    world.hear()
    assert world.received("k") == b"a ok \n"
    step(world, b"r result m2")
    assert world.received("k") == b""
    world.make_room()
    world.hear()
    assert world.received("k") == b"r ok done q\n"


def test_results_have_a_limit_in_bytes() -> None:
    size = results.RESULT_BYTES + 3
    world = world_with_a_queue(results_bytes_max=2 * size + 1)
    for message_id, ends in ((b"m1", b"ok \n"), (b"m2", b"ok \n"), (b"m3", b"error ")):
        line = b"%b publish --confirm --keep-result=60 e x" % message_id
        assert b" " + ends in ask(world, line)
    assert b" error " in ask(world, b"a ack --confirm c m1 --result=xx")
    assert ask(world, b"a ack --confirm c m1 --result=x") == b"a ok \n"
    assert world.broker.results.bytes == 2 * size + 1
    reached = world.broker.limits_reached["results_bytes_max"]
    assert reached == 2


def test_a_result_is_for_who_may_publish_the_message() -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\n" % KEPT)
    world.connection("u").permissions = Permissions(publish=["f"])
    assert ask(world, b"r result m1", "u").startswith(b"r error")
    assert ask(world, b"r result m2", "u") == b"r ok none\n"


def test_progress_is_of_one_delivery_and_bounded() -> None:
    world = world_with_a_queue()
    world.send("k", b"m1 %b\n" % KEPT)
    world.send("c", b"p progress c m1 40 half\n")
    rows = json.loads(ask(world, b"x stats unacked").removeprefix(b"x ok "))
    assert [(row["progress"], row["progress_text"]) for row in rows] == [(40, "half")]
    world.advance(1)
    world.send("c", b"l release c m1\n")
    assert told(world, b"m1") == b"running q"
    progress, consumer = AllProgress(), world.broker.consumers[b"c"]
    for number in range(PROGRESS_MAX + 5):
        consumer.unacked[b"m1"] = number, b"m1 event=e x", 1
        progress.tell(consumer, b"m1", 1, b"")
    assert len(progress) == PROGRESS_MAX
    consumer.unacked[b"m1"] = 1, b"m1 event=e x", 1
    assert progress.of(consumer, b"m1", 1) is None


BURST = 4_000


@pytest.mark.parametrize(
    "form",
    [
        *(b"publish --confirm --keep-result=60 e x", b"ack --confirm c h%d --result=x"),
        *slow(b"cancel_job --confirm q h%d", b"result h%d", b"progress --confirm c h%d 4 x"),
    ],
)
def test_a_burst_is_answered_once(form: bytes, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "mqks.db", "--prefetch-max", "100000") as server,
        LineClient(server.address) as other,
        LineClient(server.address) as client,
    ):
        assert other.ask(b"s subscribe --confirm q e") == b"s ok "
        held = b"".join(b"h%d publish --keep-result=60 e x\n" % number for number in range(1000))
        other.send(held)
        assert other.ask(b"x ping x") == b"x ok x"
        numbers = form.count(b"%d")
        lines = (b"r%d %b\n" % (n, form % ((n % 1000,) * numbers)) for n in range(BURST))
        client.send(b"".join(lines))
        client.close_sending_side()
        replies = client.rest()
    told = sorted(line.split(b" ")[0] for line in replies)
    assert told == sorted(b"r%d" % n for n in range(BURST))
    assert not [line for line in replies if line.split(b" ")[1] == b"error"]
