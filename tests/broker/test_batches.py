"""Batches: what follows one is published once and never early, whatever is killed or races."""

import json
import random
from typing import Any

import pytest

from mqks.broker.spine.log.pending import Need
from mqks.limits import BATCH_ENDS_MAX
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.marks import slow
from tests.kit.memory import allocated

SECOND_US = 1_000_000
DROPS = b"p purge q0", b"v move q1 q0 --limit=1", b"v cancel q0 --all", b"r redrive dead"


def told(world: BareWorld, name: bytes = b"b", by: str = "look") -> dict[str, Any]:
    return json.loads(ask(world, b"t batch " + name, by).removeprefix(b"t ok "))  # type: ignore[no-any-return]


def ends(world: BareWorld, queue: bytes = b"end") -> list[bytes]:
    """The ids of what has followed, as the journal has it."""
    lines = world.disk.queues[world.broker.queues[queue].id].lines.values()
    return sorted(line.partition(b" ")[0] for line in lines)


def world_of(queues: int = 1, **settings: Any) -> BareWorld:
    world = bare(**settings)
    for number in range(queues):
        assert ask(world, b"s subscribe --confirm q%d e" % number) == b"s ok \n"
    assert ask(world, b"s subscribe --confirm end done") == b"s ok \n"
    return world


@pytest.mark.parametrize("first", [0, *slow(10, 20, 30)])
def test_what_follows_comes_once_and_never_early(first: int) -> None:
    assert sum(map(play, range(first, first + 10))) > 20


def play(seed: int) -> int:
    """How many batches there were."""
    chance = random.Random(seed)
    world = world_of(2)
    world.send("k", b"q set_queue q0 --retries=2 --dead-letters=dead\n")
    opened = 0
    for _ in range(400):
        line = b""
        match chance.randrange(22):
            case 0 | 1:
                opened += world.broker.batches.found(b"b") is None
                line = b"o open_batch b publish done %d" % opened
            case 2 | 3:
                flag = chance.choice([b"", b" --delay=1", b" --ttl=9", b" --key=k"])
                line = b"m%d publish --batch=b%b e x" % (chance.randrange(99), flag)
            case 5 | 4:
                line = b"x close_batch b"
            case 6:
                manual = chance.choice([b" --manual-ack", b" --manual-ack --prefetch=1", b""])
                one, other = chance.randrange(2), chance.randrange(2)
                line = b"c%d consume q%d" % (one, other) + manual
            case 7 | 8 | 15 | 16 | 17:
                line = b"a ack c%d --all" % chance.randrange(2)
            case 9:
                line = b"r reject c%d --all" % chance.randrange(2)
            case 10:
                line = chance.choice(DROPS)
            case 11:
                world.now_us += SECOND_US
                world.broker.schedule.run_due(world.broker.turns)
            case 12:
                world.take()
                world.fail()
            case 13:
                world.fill()
                world.make_room()
            case 14:
                world.crash()
                world._connections.clear()
            case 20 | 21:
                opened += world.broker.batches.found(b"b") is None
                steps = [
                    b"o open_batch b publish done %d" % opened,
                    b"m%d publish --batch=b e x" % chance.randrange(99),
                    b"x close_batch b",
                    b"m%d publish --batch=b e x" % chance.randrange(99),
                    b"a ack c0 m%d" % chance.randrange(99),  # Mostly nobody holds it.
                ]
                steps = steps[: chance.randrange(2, 6)]
                line = b"\n".join([b"t begin", *steps, b"t commit"])
        if line:
            world.intake.receive(world.connection("k"), line + b"\n")
        if chance.randrange(3) == 0:
            world.take()
        if chance.randrange(3) == 0:
            world.land()
        world.read()
        world.answer(9)
        world.broker.go_on()
        queues = [queue for queue in world.broker.queues.values() if queue.name != b"end"]
        for batch in world.broker.batches.rows.values():
            number = batch.row.number
            assert batch.living == sum(queue.lane.members.get(number, 0) for queue in queues)
            assert batch.living == sum(
                mark.batch == number for queue in queues for mark in queue.lane.marks.values()
            )
            assert batch.row.total - batch.living - batch.row.dead >= 0
        rows = {json.loads(row)["then"] for row in world.disk.batches.values()}
        end = next(each for each in world.disk.states if world.disk.states[each].name == b"end")
        lines = [line.split(b" ")[2] for line in world.disk.queues[end].lines.values()]
        assert len(lines) == len({*lines})
        # Never together with its row, nor without: in one commit one is there and the other gone.
        assert not {b"done " + line for line in lines} & {row.encode() for row in rows}
        # Of batches that the journal does not have no message is alive.
        open_ones = {json.loads(row)["number"] for row in world.disk.batches.values()} | {0}
        for change in world.disk.queues.values():
            living = {mark.batch for n, mark in change.marks.items() if n in change.lines}
            assert not living & ({*range(1, 99)} - open_ones)
    return opened


def test_the_last_ack_is_no_small_commit() -> None:
    """Those on the spot have no rows, and what follows would come again after a crash."""
    world = world_of()
    ask(world, b"o open_batch --confirm b publish done x")
    ask(world, b"m0 publish --batch=b e 0")
    ask(world, b"x close_batch b")
    ask(world, b"c consume q0 --manual-ack", "c")
    world.intake.receive(world.connection("k"), b"a ack --confirm c m0\n")
    assert world.broker.pending.need is Need.WRITE_MUCH


def test_a_thousand_that_end_in_one_commit() -> None:
    world = world_of()
    many = 4 * BATCH_ENDS_MAX
    lines = [b"o open_batch b%d publish done %d\n" % (n, n) for n in range(many)]
    lines += [b"m%d publish --batch=b%d e x\nx close_batch b%d\n" % (n, n, n) for n in range(many)]
    world.send("k", b"".join(lines))
    ask(world, b"c consume q0 --manual-ack", "c")
    world.intake.receive(world.connection("k"), b"a ack --confirm c --all\n")
    while world.connection("k").works:
        world.broker.go_on()
    # The turn has no time for more than must be.
    world.broker.turns.end_s = 0.0
    world.take()
    world.land()
    written = len(ends(world))
    assert BATCH_ENDS_MAX <= written < many
    world.crash()
    world.connect("k")
    ask(world, b"p ping x")
    assert ends(world) == sorted(b"b%d:end" % n for n in range(many))
    assert not world.disk.batches


def test_a_thousand_acks_that_end_in_one_commit() -> None:
    world = world_of(3)
    ask(world, b"o open_batch --confirm b publish done x")
    world.send("k", b"".join(b"m%d publish --batch=b e x\n" % n for n in range(1000)))
    assert (told(world)["total"], told(world)["waiting"]) == (3000, 3000)
    for number in range(3):
        ask(world, b"c%d consume q%d --manual-ack" % (number, number), f"c{number}")
    assert told(world)["running"] == 3000
    ask(world, b"x close_batch b")
    world.send("k", b"".join(b"a ack c%d --all\n" % number for number in range(2)))
    assert (told(world)["done"], ends(world)) == (2000, [])
    world.send("k", b"a ack c2 --all\n")
    assert ends(world) == [b"b:end"]


def test_a_transaction_that_opens_and_closes_while_the_disk_is_slow() -> None:
    world = world_of()
    ask(world, b"o open_batch --confirm b publish done 1")
    ask(world, b"m0 publish --batch=b e 0")
    ask(world, b"c consume q0 --manual-ack", "c")
    world.intake.receive(world.connection("k"), b"a ack c m0\n")
    world.take()
    # Of two that want to close it with a message, the second one comes too late.
    for number, name in enumerate(("k0", "k1"), 1):
        line = b"t begin\nm%d publish --batch=b e x\nx close_batch b\nt commit\n" % number
        world.intake.receive(world.connection(name), line.replace(b"x close", b"y close"))
    world.intake.receive(world.connection("k2"), b"t begin\no open_batch b\nt commit\n")
    world.land()
    assert told(world)["total"] == 3
    assert (world.broker.batches.rows[b"b"].row.closed, ends(world)) == (True, [])
    world.intake.receive(world.connection("k"), b"a ack c m1\na ack c m2\n")
    world.take()
    world.fail()
    world.take()
    world.land()
    assert ends(world) == [b"b:end"]


def test_a_transaction_of_a_thousand_batches_is_refused_and_done() -> None:
    world = world_of(batches_max=500)
    lines = [b"o open_batch b%d publish done %d\n" % (n, n) for n in range(333)]
    lines += [b"m%d publish --batch=b%d e x\nx close_batch b%d\n" % (n, n, n) for n in range(333)]
    # After those there is no room: of the second one nothing is done.
    more = [b"o open_batch c%d\n" % n for n in range(333)]
    world.send("k", b"".join([b"t begin\n", *lines, b"t commit\nt begin\n", *more, b"t commit\n"]))
    batches = world.broker.batches
    assert (len(batches.rows), len(world.disk.batches)) == (333, 333)
    assert batches.bytes == sum(batch.size for batch in batches.rows.values())
    for _ in range(9):
        world.send("k", b"".join([b"t begin\n", *more, b"t commit\n"]))
    assert len(batches._expiries) < 3 * 333
    ask(world, b"c consume q0 --manual-ack", "c")
    ask(world, b"a ack --confirm c --all")
    assert ends(world) == sorted(b"b%d:end" % n for n in range(333))


def test_many_who_ask_for_a_batch_hold_no_copies_of_what_is_held() -> None:
    """Each of them looks at all that consumers hold."""
    world = world_of()
    world.send("k", b"o open_batch b\n")
    world.send("k", b"".join(b"m%d publish --batch=b e x\n" % n for n in range(5_000)))
    world.send("c", b"c consume q0 --manual-ack\n")
    world.broker.turns.chunk_s = -1.0  # Each turn is one step.
    with allocated() as memory:
        for name in map(str, range(200)):
            world.intake.receive(world.connection(name), b"l batch b\n")
        for _ in range(600):
            world.broker.go_on()
    assert memory.peak_bytes < 2_500_000
    for name in map(str, range(200)):
        world.send(name, b"")
        assert b'"running": 5000' in world.received(name)


def test_limits() -> None:
    world = world_of(batches_max=2, batches_bytes_max=64 * 1024)
    assert ask(world, b"o open_batch --confirm b1 publish done x") == b"o ok \n"
    reasons = list[str]()
    world.broker.refusals._on_error = lambda record: reasons.append(record.reason) or True  # type: ignore[func-returns-value]
    long = b"x" * 63 * 1024
    assert b" error " in ask(world, b"o open_batch --confirm b2 publish done " + long)
    assert ask(world, b"o open_batch --confirm b2") == b"o ok \n"
    assert b" error " in ask(world, b"o open_batch --confirm b2 --on-dead publish done " + long)
    assert b" error " in ask(world, b"o open_batch --confirm b3")
    assert len(world.disk.batches) == 2
    reached = world.broker.limits_reached
    assert (reached["batches_max"], reached["batches_bytes_max"]) == (1, 2)
    for name in (b"b1", b"b2"):
        assert ask(world, b"x close_batch --confirm %b --discard" % name) == b"x ok 1\n"
    assert (world.broker.batches.bytes, world.disk.batches) == (0, {})


def test_expiry() -> None:
    """A clock that is set back puts it off; a message of a batch that has expired counts for none
    that is opened later."""
    world = world_of(batch_expiry_s=3600)
    for name in (b"b", b"long --for=9000"):
        ask(world, b"o open_batch %b publish done x" % name)
    ask(world, b"m1 publish --batch=b e x")
    expired = list[bytes]()
    world.broker.notices.batch_expired = expired.append  # type: ignore[method-assign, assignment]
    world.advance(3599)
    world.now_us -= 3600 * SECOND_US
    world.advance(3600)
    assert not expired
    world.crash()
    world.broker.notices.batch_expired = expired.append  # type: ignore[method-assign, assignment]
    world.connect("k")
    world.advance(2)
    assert expired == [b"b"]
    assert ask(world, b"x close_batch --confirm b") == b"x ok 0\n"
    world.crash()
    world.connect("k")
    world.connect("look")
    ask(world, b"o open_batch b publish done y")
    ask(world, b"m2 publish --batch=b e x")
    ask(world, b"p purge q0 --limit=1")
    assert (told(world)["total"], told(world)["waiting"], told(world)["dead"]) == (1, 1, 0)


def test_a_full_disk_keeps_the_end_until_there_is_room() -> None:
    world = world_of()
    ask(world, b"o open_batch --confirm b publish done x")
    ask(world, b"m1 publish --batch=b e x")
    ask(world, b"x close_batch b")
    ask(world, b"c consume q0 --manual-ack", "c")
    world.fill()
    world.intake.receive(world.connection("k"), b"a ack --confirm c m1\n")
    world.commit()
    assert world.disk.batches
    assert ends(world) == []
    world.crash()
    world.connect("k")
    ask(world, b"p ping x")
    assert ends(world) == [b"b:end"]


@pytest.mark.parametrize("drop", [b"purge q0", b"purge q0 --id=m1", b"cancel q0 --all", b"ttl"])
def test_what_is_dropped_on_a_full_disk_is_not_done(drop: bytes) -> None:
    """After a crash it is there again; otherwise it is dead."""
    world = world_of()
    ask(world, b"o open_batch --confirm b publish done x")
    flag = {b"cancel q0 --all": b" --delay=9", b"ttl": b" --ttl=9"}.get(drop, b"")
    ask(world, b"m1 publish --batch=b%b e x" % flag)

    def drop_it() -> None:
        world.fill()
        if drop == b"ttl":
            world.now_us += 10 * SECOND_US
        else:
            line = b"p " + drop.replace(b" ", b" --confirm ", 1) + b"\n"
            world.intake.receive(world.connection("k"), line)
        for _ in range(9):
            world.broker.schedule.run_due(world.broker.turns)
            world.fetch()
            world.answer(9)
            world.broker.go_on()
        # For somebody else what is settled is written.
        world.intake.receive(world.connection("other"), b"s subscribe --confirm r e\n")
        world.broker.go_on()
        world.commit()
        world.hear()
        assert world.received("other") == b"s ok \n"
        assert drop == b"ttl" or b"p error" in world.received("k")
        assert world.broker.batches.rows[b"b"].row.dead == 1

    drop_it()
    world.crash()
    world._connections.clear()
    row = told(world)
    if drop != b"ttl":  # It dies at the start.
        assert (row["waiting"], row["dead"]) == (1, 0)
        drop_it()
    world.make_room()
    world.crash()
    world._connections.clear()
    row = told(world)
    assert (row["waiting"], row["dead"], row["done"]) == (0, 1, 0)


def test_queues_without_batches_keep_no_marks() -> None:
    world = world_of()
    ask(world, b"o open_batch b publish done x")
    ask(world, b"m1 publish e x")
    assert not world.broker.queues[b"q0"].lane.marks
    ask(world, b"m2 publish --batch=b e x")
    ask(world, b"c consume q0 --manual-ack", "c")
    ask(world, b"a ack c m2")
    lane = world.broker.queues[b"q0"].lane
    assert (lane.marks, lane.members) == ({}, {})


def test_one_line_of_a_mebibyte() -> None:
    world = world_of(line_bytes_max=2 * 1024 * 1024)
    long = b"x" * 1024 * 1024
    assert b" error " in ask(world, b"o open_batch --confirm b publish done " + long)
    assert b" error " in ask(world, b"o open_batch --confirm " + long)
    assert b" error " in ask(world, b"x close_batch --confirm b " + long)
    assert b" error " in ask(world, b"m publish --confirm --batch=%b e x" % long)
    ask(world, b"o open_batch --confirm b publish done x")
    assert ask(world, b"m publish --confirm --batch=b e " + long) == b"m ok \n"
    assert told(world)["total"] == 1
