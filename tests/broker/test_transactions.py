"""Transactions: what the stories cannot tell of `begin`, `commit` and `rollback`."""

import random
import re
from itertools import chain, count
from pathlib import Path

import pytest

from mqks.broker.spine.log.full_disk import take_settled
from mqks.broker.spine.log.pending import Batch
from mqks.limits import (
    BATCH_COPIES_MAX,
    ESCAPED_STEP_BYTES,
    TRANSACTION_BYTES_MAX,
    TRANSACTION_COPIES_MAX,
    TRANSACTION_LINES_MAX,
    TRANSACTIONS_BYTES_MAX,
)
from mqks.testing import BrokerProcess
from tests.kit import following
from tests.kit.bare import BareWorld, ask, bare
from tests.kit.called import counted_calls
from tests.kit.lab import Lab
from tests.kit.marks import slow

ERROR = re.compile(rb"(\S+) error [0-9a-f]{24}\n")


def holding(count: int = 1, **settings: object) -> BareWorld:
    """A consumer `c` of the queue `in` that holds m0, m1, …; the queue `out` gets the event `e`."""
    world = bare(**settings)
    assert ask(world, b"s subscribe --confirm out e") == b"s ok \n"
    lines = ask(world, b"c consume --confirm in i --manual-ack")
    assert lines == b"c ok \n"
    sent = b"".join(b"m%d publish i %d\n" % (number, number) for number in range(count))
    assert ask(world, sent[:-1]).count(b"\n") == count
    return world


def calls_of_moves(queues: int) -> int:
    """Of a commit with fifty moves, where there are so many queues."""
    world = bare()
    world.send("k", b"".join(b"s%d subscribe q%d e\n" % (n, n) for n in range(queues)))
    moves = b"".join(b"m%d move q%d q9 --id=x\n" % (n, n % 9) for n in range(50))
    world.send("k", b"b begin\n" + moves)
    with counted_calls() as calls:
        world.send("k", b"c commit --confirm\n")
    assert b"c ok \n" in world.received("k")
    return calls.total()


def test_moves_look_at_their_own_queues_only() -> None:
    assert calls_of_moves(1000) < calls_of_moves(10) + 100


def lengths(world: BareWorld) -> bytes:
    return ask(world, b"ev _eval [len(q) for q in state.queues.values()]")


def written(batch: Batch) -> tuple[int, int]:
    """How many messages, and how many settled ones, a batch writes."""
    changes = batch.entry.changes
    runs = sum(len(run.lines) for change in changes for run in change.runs)
    gone = chain.from_iterable([*change.acks, *change.moved] for change in changes)
    return runs, sum(count for _, count in gone)


def transaction(world: BareWorld, lines: bytes) -> None:
    """Commit it, and let nothing be written."""
    world.intake.receive(world.connection("k"), b"b begin\n" + lines + b"\nt commit\n")
    assert not world.connection("k").overrun


def test_commits_are_confirmed_in_order_wherever_a_turn_ends() -> None:
    for calls in range(1, 40):
        world = holding()
        ticks = count()
        world.broker.turns.clock = lambda ticks=ticks: float(next(ticks))  # type: ignore[misc]
        world.broker.turns.chunk_s = float(calls)
        some = [b"b begin\nx publish e %d\nt%d commit --confirm\n" % (n, n) for n in range(9)]
        told = ask(world, b"".join(some)[:-1])
        assert told == b"".join(b"t%d ok \n" % number for number in range(9))


def test_limits() -> None:
    world = holding()
    publish = b"x publish e 1\n"
    assert ask(world, b"b begin\n" + publish * TRANSACTION_LINES_MAX + b"t commit --confirm") == (
        b"t ok \n"
    )
    replies = ask(world, b"b begin\n" + publish * (TRANSACTION_LINES_MAX + 1) + b"t commit")
    assert ERROR.findall(replies) == [b"x", b"t"]
    long = b"x publish e " + b"1" * (TRANSACTION_BYTES_MAX // 8) + b"\n"
    replies = ask(world, b"b begin\n" + long * 8 + b"t commit")
    assert ERROR.findall(replies) == [b"x", b"t"]
    assert lengths(world) == b"ev ok [%d, 0]\n" % TRANSACTION_LINES_MAX


def test_limit_of_all_connections() -> None:
    world = bare()
    long = b"x publish e " + b"1" * (TRANSACTION_BYTES_MAX // 8) + b"\n"
    count = TRANSACTIONS_BYTES_MAX // (7 * TRANSACTION_BYTES_MAX // 8)
    for number in range(count):
        world.connect(f"n{number}")
        world.send(f"n{number}", b"b begin\n" + long * 7)
    world.send("last", b"b begin\n" + long * 7 + b"t commit\n")
    assert b"t" in ERROR.findall(world.received("last"))
    for number in range(count):
        world.disconnect(f"n{number}")
    assert not world.broker.flow.kept_bytes
    assert ask(world, b"b begin\n" + long * 7 + b"t commit --confirm") == b"t ok \n"


def test_limit_of_copies() -> None:
    world = bare()
    queues = TRANSACTION_COPIES_MAX // 8
    for number in range(queues):
        ask(world, b"s subscribe q%d e" % number)
    publish = b"x publish e 1\n"
    assert ask(world, b"b begin\n" + publish * 8 + b"t commit --confirm") == b"t ok \n"
    assert ERROR.findall(ask(world, b"b begin\n" + publish * 9 + b"t commit")) == [b"x", b"t"]


def test_limit_of_trims() -> None:
    world, half = bare(), TRANSACTION_COPIES_MAX // 2
    for name in (b"in", b"out"):
        ask(world, b"s subscribe %b %b" % (name, name))
    ask(world, b"m publish in 1\n" * (half + 1) + b"m publish out 1\n" * half)
    trims = b"b begin\nr trim in %d\nx trim --confirm out 9999\nt commit --confirm"
    assert ERROR.findall(ask(world, trims % (half + 2))) == [b"x", b"t"]
    assert lengths(world) == b"ev ok [%d, %d]\n" % (half + 1, half)
    assert ask(world, trims % (half + 1)) == b"t ok \nx ok %d\n" % half
    assert lengths(world) == b"ev ok [1, 0]\n"


def test_limits_of_moves() -> None:
    world, count = bare(), TRANSACTION_COPIES_MAX
    ask(world, b"s subscribe far f")
    ask(world, b"m publish f 1\n" * count + b"l publish f last")
    move = b"b begin\nx publish --to=far f 1\nv move --confirm far near%b\nt commit --confirm"
    assert ERROR.findall(ask(world, move % b"")) == [b"v", b"t"]
    assert ERROR.findall(ask(world, move % b" --limit=%d" % count)) == [b"x", b"t"]
    assert lengths(world) == b"ev ok [%d]\n" % (count + 1)
    replies = ask(world, move % b" --limit=%d" % (count - 1))
    assert replies == b"t ok \nv ok %d\n" % (count - 1)
    assert lengths(world) == b"ev ok [3, %d]\n" % (count - 1)
    ask(world, b"".join(b"m publish f %d%b\n" % (n, b"1" * 1_000_000) for n in range(9)))
    long = b"b begin\nv move far near --limit=%d\nw move far more\nt commit --confirm"
    assert ERROR.findall(ask(world, long % 6)) == [b"w", b"t"]
    assert ERROR.findall(ask(world, long % 12)) == [b"v", b"t"]


def test_of_two_that_move_the_same_each_message_goes_once() -> None:
    world = bare()
    ask(world, b"s subscribe far f\n" + b"m publish f 1\n" * 5)
    both = b"b begin\nv move --confirm far near\nw move --confirm far near\nt commit --confirm"
    assert ask(world, both) == b"t ok \nv ok 5\nw ok 0\n"
    transaction(world, b"v move near far --limit=3")
    world.intake.receive(world.connection("l"), b"b begin\nv move near far\nt commit\n")
    world.write(world.broker.pending.take())
    assert lengths(world) == b"ev ok [5, 0]\n"


@pytest.mark.parametrize(
    "settled", [b"ack c m0", b"reject c m0", b"reject c m0 --dead", b"trim in 9", b"move in out"]
)
def test_it_is_written_in_one_piece(settled: bytes) -> None:
    """Even behind so many messages that they are written in pieces."""
    world = holding()
    if settled.startswith((b"trim", b"move")):
        ask(world, b"d delete_consumer --confirm c")
    pending = world.broker.pending
    for number in range(3):
        ask(world, b"s subscribe big%d big%d" % (number, number))
    for number in range(3):
        line = b"y publish big%d 1\n" % number
        world.intake.receive(world.connection("k"), line * (BATCH_COPIES_MAX * 2 // 3))
        while world.connection("k").overrun:
            world.intake.receive(world.connection("k"), b"")
    transaction(world, b"a " + settled + b"\nx publish e 1")
    runs, gone = written(pending.take())
    assert runs > BATCH_COPIES_MAX
    assert gone == 1
    assert not pending.has_changes


def test_on_a_full_disk_a_trim_waits_for_its_messages() -> None:
    world = holding(0)
    ask(world, b"d delete_consumer --confirm c\nm publish i 1\nm publish i 2")
    pending = world.broker.pending
    transaction(world, b"r trim in 9\nx publish e 1")
    assert written(take_settled(pending)) == (0, 0)
    assert written(pending.take()) == (1, 2)


def test_on_a_full_disk_nothing_of_it_is_written_before_its_messages() -> None:
    world = holding(3)
    pending = world.broker.pending
    lines = b"a ack c m0\nr reject c m1\nl release c m2"
    transaction(world, lines + b"\nx publish e 1")
    settled = take_settled(pending)
    assert written(settled) == (0, 0)
    assert not any(change.marks for change in settled.entry.changes)
    batch = pending.take()
    assert written(batch) == (2, 2)
    [marks] = [change.marks for change in batch.entry.changes if change.marks]
    assert len(marks) == 2
    # Without messages, too, it is all or nothing, and not confirmed.
    world = holding(2)
    transaction(world, b"r reject c m0\nl release c m1")
    assert world.broker.pending.take().has_messages


def test_long_escaped_data() -> None:
    """They are checked in turns."""
    world = holding(line_bytes_max=TRANSACTION_BYTES_MAX)
    data = rb"\n" * ESCAPED_STEP_BYTES
    lines = b"b begin\na ack c m0\nx publish --escaped e %b\nt commit --confirm"
    assert ERROR.findall(ask(world, lines % (data + rb"\x"))) == [b"x", b"t"]
    assert lengths(world) == b"ev ok [0, 0]\n"
    assert ask(world, lines % data) == b"t ok \n"
    assert lengths(world) == b"ev ok [1, 0]\n"
    assert not world.broker.flow.kept_bytes


def test_publishes_of_a_commit_are_those_of_single_lines() -> None:
    """Whatever flags and queues follow each other."""
    flags = [b"", b"", b"--key=k ", b"--priority=2 ", b"--meta=a=b --ttl=9 ", b"--ttl=9 "]
    flags += [b"--ttl=8 ", b"--delay=5 ", b"--delay=6 ", b"--delay=7 --ttl=2 "]
    flags += [b"--delay=5 --ttl=1 ", b"--once ", b"--to=one "]
    chosen = random.Random(1).choices([(flag, event) for flag in flags for event in b"ab"], k=300)
    sent = [b"m%d publish %b%c x\n" % (at, flag, event) for at, (flag, event) in enumerate(chosen)]
    for later_s in 0, 5.5, 8.5, 10:
        found = list[bytes]()
        for lines in ([b"b begin\n", *sent, b"t commit\n"], sent):
            world = bare()
            ask(world, b"s subscribe one a\ns subscribe one b\ns subscribe two b")
            for line in lines:
                world.send("k", line)
            world.advance(later_s)
            told = ask(world, b"c consume one --meta\nd consume two --meta")
            world.advance(10)
            found.append(told + world.received("k"))
        assert found[0] == found[1]
        assert found[0].count(b"\n") > 150


def test_messages_of_a_commit_come_and_go_each_at_its_time_after_a_crash_too() -> None:
    lab = Lab(1 << 20)
    lab.send("a", b"s subscribe one e", b"s subscribe two e", b"b begin")
    flags = [b"--ttl=%d" % each for each in (9, 5, 7, 7, 3, 8)]
    flags += [b"--delay=%d" % each for each in (5, 4, 7, 5)]
    flags.append(b"--at=%d" % (lab.wall_us // 1_000_000 + 3))
    for at, flag in enumerate(flags):
        lab.send("a", b"m%d publish %b e x" % (at, flag))
    lab.do("a", b"t commit --confirm")
    lab.crash()
    lab.wait(6)
    for queue in b"one", b"two":
        lab.replies.clear()
        lab.do("z", b"c%b consume %b" % (queue, queue))
        ids = [line.split(b" ")[2] for line in lab.replies if b" event=" in line]
        assert ids == [b"m0", b"m2", b"m3", b"m5", b"m10", b"m7", b"m6", b"m9"]


def test_two_race_while_one_is_written() -> None:
    world = holding()
    pending = world.broker.pending
    transaction(world, b"a ack c m0\nx publish e 1")
    first = pending.take()
    world.intake.receive(world.connection("l"), b"b begin\na ack c m0\nx publish e 2\nt commit\n")
    assert not pending.take().entry.changes
    assert written(first) == (1, 1)
    assert lengths(world) == b"ev ok [1, 0]\n"


FLAGS = b"--confirm --mandatory --ttl=9 --meta=a=b"


@pytest.mark.parametrize(
    "lines",
    [
        b"b begin --confirm\nx publish %b e 1\nt commit --confirm" % FLAGS,
        b"b begin\nx publish --once e 1\nt commit",
        b"b begin\na ack c gone\nt commit",
        b"b begin\nx publish e 1\nt rollback --confirm",
        b"b begin\nv move in out --where=a=b --older=1\nr redrive in\nt commit",
        b"b begin\nb begin\nt commit",
        b"t commit\nt rollback",
        b"b begin\n" + b"x publish --once e 1\n" * TRANSACTION_LINES_MAX + b"t commit",
    ],
)
def test_5_000_lines_take_many_turns(lines: bytes) -> None:
    """The time of a step is that of one transaction at most, whatever number of them has come."""
    world = holding()
    turns, connection = world.broker.turns, world.connection("k")
    ticks = iter(range(10**9))
    turns.clock, turns.chunk_s = (lambda: next(ticks)), 256.0
    count = 5_000 // (lines.count(b"\n") + 1)
    world.intake.receive(connection, (lines + b"\n") * count)
    calls = 1
    while connection.overrun:
        world.write(world.broker.pending.take())
        world.broker.go_on()
        world.intake.receive(connection, b"")
        calls += 1
    assert connection.transaction is None
    assert calls > 5_000 // 1024


def test_a_megabyte_of_its_own_words() -> None:
    world = holding()
    for word in (b"begin ", b"commit ", b"rollback "):
        assert ERROR.fullmatch(ask(world, b"r " + word * (1_000_000 // len(word))))
    assert ask(world, b"p ping x") == b"p ok x\n"


@pytest.mark.parametrize("round_", [0, *slow(1, 2)])
def test_kill(tmp_path: Path, round_: int) -> None:
    """Whatever has been committed when it is killed: as many messages are gone as there are thrice
    in the other queue, and all that were confirmed."""
    with BrokerProcess(tmp_path / "mqks.db") as broker:
        confirms = random.Random(round_).randrange(1, 500)
        following.follow(broker.address, confirms)
        broker.kill()
        broker.start()
        following.check(broker.address, confirms)
