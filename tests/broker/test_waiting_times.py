"""Messages that wait for a time, step by step: what becomes of them, and what is counted."""

import random
from itertools import count

import pytest

from mqks.broker.features.time import delays
from mqks.broker.features.time.times import timed
from mqks.broker.requests.queues import drop
from mqks.broker.spine.base.schedule import RINGS_MAX
from mqks.limits import NEAR_BYTES_MAX, STEP_BYTES, STEP_MESSAGES
from mqks.protocol.meta import split_dead_letter
from mqks.protocol.replies import parts
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab
from tests.kit.marks import slow


def lab_with(policy: bytes, memory_bytes: int = 0) -> Lab:
    lab = Lab(memory_bytes)
    lab.do("a", b"s set_queue q " + policy, b"s subscribe q e")
    return lab


def ready(lab: Lab) -> dict[bytes, int]:
    return {name: queue.ready for name, queue in lab.broker.queues.items()}


@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
@pytest.mark.parametrize("dead_letters", [b"", b" --dead-letters=d"])
def test_more_than_one_step_of_messages_expire_at_once(
    memory_bytes: int, dead_letters: bytes
) -> None:
    lab = lab_with(b"--ttl=1" + dead_letters, memory_bytes)
    lab.do("a", *(b"m%d publish e x" % number for number in range(3000)))
    lab.wait(1.5)
    lab.check()
    assert ready(lab) == {b"q": 0, **({b"d": 3000} if dead_letters else {})}


@pytest.mark.parametrize("flag", [b"--delay=2", b"--at=1790001002"])
def test_lengths_of_scheduled_messages_never_fall_below_zero(flag: bytes) -> None:
    lab = lab_with(b"--bytes-max=100")
    lab.do("a", *(b"m%d publish %b e %b" % (n, flag, b"x" * n * n) for n in range(8)))
    lab.crash()
    lab.do("a", b"x cancel q m0", b"x cancel q m7")
    lab.check()
    lab.wait(3)
    lab.check()


@pytest.mark.parametrize(
    "line", [b"move --confirm q r", b"redrive --confirm d", b"promote --confirm q --all"]
)
def test_a_disk_that_fills_up_meanwhile_gives_no_new_places(line: bytes) -> None:
    lab = Lab(calls_a_turn=1)
    lab.do("a", b"s set_queue q --dead-letters=d", b"s set_queue d", b"s subscribe q e")
    lab.send("a", *(b"m%d publish e x" % number for number in range(5)))
    lab.do("b", b"c consume q --manual-ack")
    lab.do("a", b"k reject c --all --dead", b"x delete_consumer c")
    lab.send("a", *(b"m%d publish e x" % number for number in range(5, 9)))
    lab.do("a", *(b"m%d publish --delay=50 e x" % number for number in range(9, 12)))
    lab.replies.clear()
    before = [*map(dict.copy, (queue.lines for queue in lab.disk.queues.values()))]
    lab.send("a", b"y " + line)
    lab.fill()
    lab.rest()
    assert [reply[:8] for reply in lab.replies] == [b"y error "]
    assert [queue.lines for queue in lab.disk.queues.values()][:2] == before
    lab.make_room()
    lab.rest()
    lab.check()
    assert [queue.lines for queue in lab.disk.queues.values()] != before


@pytest.mark.slow
def test_messages_on_disk_that_die_at_different_times_are_purged_in_steps() -> None:
    lab = lab_with(b"")
    lab.do("a", *(b"m%d publish --ttl=%d e x" % (n, 1000 + n % 7) for n in range(40_000)))
    assert lab.broker.queues[b"q"].lane.blocks.memory_bytes == 0
    assert len([*drop(lab.broker, b"q", None)]) > 2
    lab.rest()
    lab.check()
    assert ready(lab) == {b"q": 0}


@pytest.mark.parametrize("flag", [b"--delay=3", b"--at=1790001004"])
def test_what_is_due_in_memory_waits_for_what_was_due_before_on_disk(flag: bytes) -> None:
    lab = lab_with(b"")
    lab.do("a", b"m1 publish --%b e x" % (b"delay=4" if b"delay" in flag else flag[2:]))
    lab.crash()
    lab.tick(1)
    lab.send("a", b"m2 publish %b e x" % flag)
    lab.tick(6)
    lab.commit()
    due_s = lab.broker.schedule.next_s()
    assert due_s is None or due_s > lab.now_us / 1e6, "it looks again and again"
    assert ready(lab) == {b"q": 0}
    lab.rest()
    assert [line[:2] for line in lab.lines(b"q")] == [b"m1", b"m2"]


@patches_modules
@pytest.mark.parametrize("seed", [*range(10), *slow(*range(10, 30))])
def test_what_depends_on_the_wall_clock_follows_it(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delays do not. In between all join in the order of their times, once and never early."""
    monkeypatch.setattr(delays, "NEAR_MAX", 3)
    monkeypatch.setattr(delays, "STEP_MESSAGES", 2)
    chance, lab = random.Random(seed), lab_with(b"")
    lab.send("b", b"c consume q")
    after_us, at_us = dict[bytes, int](), dict[bytes, int]()

    def told() -> None:
        """What a look has brought, after a change of the wall clock or none."""
        lab.rest()
        due_us = after_us | {each: at - lab.wall_ahead_us for each, at in at_us.items()}
        due = sorted(
            (each for each in due_us if due_us[each] <= lab.now_us),
            key=lambda each: (due_us[each], int(each[1:])),
        )
        ids = [line.split(b" ")[2] for line in lab.replies if b" event=" in line]
        assert ids == due
        for each in due:
            after_us.pop(each, None)
            at_us.pop(each, None)
        lab.replies.clear()
        lab.check()

    lab.rest()
    lab.replies.clear()
    for number in range(60):
        wait_us = chance.choice([500_000, 1_000_000, 1_500_000, 3_000_000, 7_000_000])
        if chance.random() < 0.5:
            after_us[b"m%d" % number] = lab.now_us + wait_us
            lab.send("a", b"m%d publish --delay=%.1f e x" % (number, wait_us / 1e6))
        else:
            at = at_us[b"m%d" % number] = lab.wall_us + wait_us
            lab.send("a", b"m%d publish --at=%d.%06d e x" % (number, *divmod(at, 1_000_000)))
        match chance.choice(["tick", "tick", "set", "cancel", "none"]):
            case "tick":
                lab.tick(0.5)
            case "set":
                lab.wall_ahead_us += chance.choice([-2_000_000, -700_000, 1_200_000, 4_000_000])
                lab.tick(1)
            case "cancel" if at_us:
                gone = chance.choice([*at_us])
                del at_us[gone]
                lab.send("a", b"k cancel q " + gone)
        told()
    assert lab.broker.queues[b"q"].scheduled == len(after_us | at_us)
    for _ in range(20):
        lab.tick(0.5)
        told()
    assert not lab.broker.queues[b"q"].scheduled


@pytest.mark.slow
def test_very_many_follow_the_wall_clock_in_steps() -> None:
    lab = lab_with(b"")
    lab.tick(1)  # The audit has counted its second.
    at = lab.wall_us // 1_000_000 + 100
    lab.send("b", b"d publish --delay=50 e x")
    lab.send("a", *(b"m%d publish --at=%d e x" % (n, at) for n in range(20_000)))
    lab.rest()
    lab.wall_ahead_us += 70_000_000
    lab.broker.turns.chunk_s = -1.0  # Each turn is one step.
    lab.tick(1)
    times = timed(lab.broker.queues[b"q"])
    assert times is not None
    assert times.delays.is_moving
    assert len(turns_until_replies(lab)) > 10
    lab.check()
    lab.tick(28.9)
    lab.rest()
    assert ready(lab) == {b"q": 0}
    lab.tick(0.1)
    lab.rest()
    assert ready(lab) == {b"q": 20_000}


LONG = b"x" * 400_000


def lab_of_long(count: int, flag: bytes = b"") -> Lab:
    lab = lab_with(b"")
    for number in range(count):
        lab.do("a", b"m%d publish %be %b" % (number, flag, LONG))
    return lab


def fetched_bytes(lab: Lab) -> int:
    return sum(len(line) for _, lines in lab.fetched for line in lines.values())


def unwritten_bytes(lab: Lab) -> int:
    lanes = [queue.lane for queue in lab.broker.queues.values()]
    runs = [run.lines for lane in lanes for run in lane.unwritten_runs]
    return sum(
        len(line) for lines in (*runs, *(lane.unwritten for lane in lanes)) for line in lines
    )


def read_one(lab: Lab) -> None:
    """As the server does."""
    shared = lab.broker.shared
    shared.wanted.fetches, left = shared.wanted.fetches[:1], shared.wanted.fetches[1:]
    lab.read()
    shared.wanted.fetches = left


def rest_in_little_memory(lab: Lab, bytes_max: int = 4 * STEP_BYTES) -> None:
    """As `Lab.rest`, with a slow disk."""
    for step in range(2000):
        if lab.is_at_rest:
            return
        lab.broker.schedule.run_due(lab.broker.turns)
        lab.work()
        read_one(lab)
        assert fetched_bytes(lab) <= 2 * STEP_BYTES
        lab.answer()
        assert unwritten_bytes(lab) <= bytes_max
        assert lab.broker.shared.memory.used <= bytes_max
        if step % 3 == 2:
            lab.commit()
    raise AssertionError("it never comes to rest")


def test_long_messages_that_are_due_together_take_little_memory() -> None:
    lab = lab_of_long(150, b"--delay=60 ")
    lab.tick(59)
    rest_in_little_memory(lab, NEAR_BYTES_MAX + STEP_BYTES)
    lab.tick(1)
    rest_in_little_memory(lab, NEAR_BYTES_MAX + 6 * STEP_BYTES)
    lab.check()
    assert ready(lab) == {b"q": 150}


@pytest.mark.parametrize(
    "line", [b"move q r", b"set_queue q --dead-letters=r --messages-max=1 --overflow=drop"]
)
def test_long_messages_that_move_take_little_memory(line: bytes) -> None:
    lab = lab_of_long(60)
    lab.send("a", b"k " + line)
    rest_in_little_memory(lab)
    lab.check()
    assert sum(ready(lab).values()) == 60
    assert ready(lab)[b"q"] <= 1


@pytest.mark.parametrize("action", [b"cancel", b"promote"])
def test_long_messages_of_one_id_are_looked_for_in_little_memory(action: bytes) -> None:
    lab = lab_with(b"")
    for _ in range(60):
        lab.do("a", b"m publish --delay=60 e " + LONG)
    lab.send("a", b"k %b --confirm q m" % action)
    rest_in_little_memory(lab)
    lab.check()
    assert lab.replies[-1] == b"k ok 60"


def test_a_clock_that_is_set_back_before_a_commit_loses_no_body() -> None:
    lab = lab_with(b"")
    lab.send("a", b"m publish --at=%d e x" % (lab.wall_us // 1_000_000 + 1))
    lab.tick(0)
    lab.wall_ahead_us -= 20_000_000
    lab.rest()
    lab.wait(25)
    lab.check()
    assert ready(lab) == {b"q": 1}


def test_nothing_more_moves_to_a_full_disk() -> None:
    lab = lab_of_long(60)
    lab.send("a", b"k move --confirm q r")
    lab.read()
    lab.answer()
    lab.fill()
    lab.rest()
    assert lab.replies[-1].startswith(b"k error ")
    assert 0 < ready(lab)[b"r"] < 60
    lab.make_room()
    lab.rest()
    lab.check()
    assert sum(ready(lab).values()) == 60


class QuickLab(Lab):
    """The time goes on whenever somebody looks at it."""

    @property
    def wall_us(self) -> int:
        self.now_us += 700
        return self.now_us + self.wall_ahead_us


def test_nothing_dies_before_it_was_published() -> None:
    lab = QuickLab()
    lab.do("a", b"s set_queue q --retries=0 --dead-letters=d", b"c consume q e --manual-ack")
    for number in range(10):
        lab.send("a", b"m%d publish e x" % number, b"r reject c m%d" % number)
    lab.rest()
    letters = [parts(line) for line in lab.lines(b"d")]
    deaths = [*filter(None, (split_dead_letter(each.meta)[1] for each in letters))]
    assert len(deaths) == 10
    for letter, (*_, published, died, _) in zip(letters, deaths, strict=True):
        assert int(letter.published) // 1000 <= int(died.replace(b".", b""))
        assert float(published) <= float(died)


class Jumpy(Lab):
    """Its wall clock goes to and fro by less than a millisecond."""

    reads = 0

    @property
    def wall_us(self) -> int:
        self.reads += 1
        return super().wall_us + self.reads * 7919 % 500


def test_one_delay_keeps_the_order_whatever_the_wall_clock_does() -> None:
    lab = Jumpy(1 << 24)
    lab.send("a", b"s subscribe q e f")
    for number in range(50):
        lab.send("a", b"m%d publish --delay=2 %b x" % (number, b"ef"[number % 2 :][:1]))
        lab.tick(0.0001)
    lab.rest()
    lab.send("b", b"c consume q")
    lab.wait(3)
    told = [line.split(b" ")[2] for line in lab.replies if line.startswith(b"c ok m")]
    assert told == [b"m%d" % number for number in range(50)]


def turns_until_replies(lab: Lab) -> list[int]:
    """The number of replies after each turn, which is one step."""
    lab.broker.turns.clock = count().__next__
    turns = list[int]()
    while not lab.is_at_rest:
        lab.work()
        lab.read()
        lab.answer()
        lab.commit()
        turns.append(len(lab.replies))
    return turns


def test_who_chooses_from_what_a_consumer_holds_waits_for_the_others() -> None:
    """Each has a copy of that."""
    lab = lab_with(b"")
    lab.send("a", *(b"m%d publish e x" % number for number in range(5000)))
    lab.do("a", b"c consume q --manual-ack")
    lab.replies.clear()
    lab.broker.turns.chunk_s = -1.0
    for number in range(20):
        lab.send(f"c{number}", b"k%d reject --confirm c --all --id=none" % number)
    turns = turns_until_replies(lab)
    assert sorted(lab.replies) == sorted(b"k%d ok 0" % number for number in range(20))
    first = next(turn for turn, replies in enumerate(turns) if replies)
    assert first < len(turns) / 2, "they are answered one after the other"


def test_who_looks_for_scheduled_messages_of_one_queue_waits_for_the_others_there() -> None:
    """Each holds a list of all that is scheduled in that queue; other queues have their own."""
    lab = lab_with(b"")
    lab.send("a", b"s subscribe r f", b"m publish --delay=60 f x")
    lab.do("a", *(b"m%d publish --delay=60 e x" % number for number in range(2000)))
    lab.broker.turns.chunk_s = -1.0
    for number in range(20):
        lab.send(f"c{number}", b"k%d cancel --confirm q m%d" % (number, number))
    lab.send("d", b"other cancel --confirm r m")
    lab.replies.clear()
    turns = turns_until_replies(lab)
    assert b"other ok 1" in lab.replies[:2]
    expected = [b"other ok 1", *(b"k%d ok 1" % number for number in range(20))]
    assert sorted(lab.replies) == sorted(expected)
    first = next(turn for turn, replies in enumerate(turns) if replies > 1)
    assert first < len(turns) / 2, "they are answered one after the other"
    times = timed(lab.broker.queues[b"q"])
    assert times is not None
    assert len(times.delays) == 1980


@pytest.mark.slow
def test_bodies_of_very_many_scheduled_messages_are_let_go_in_steps() -> None:
    lab = lab_with(b"")
    lab.send("a", *(b"m%d publish --delay=60 e x" % number for number in range(20_000)))
    times = timed(lab.broker.queues[b"q"])
    assert times is not None
    lab.broker.turns.chunk_s = -1.0  # Each turn is one step.
    lab.broker.turns.clock = count().__next__
    lab.take()
    lab.land()
    assert len(times.delays.bodies) > 10_000
    lab.do("b", b"k cancel q m7")
    lab.do("b", b"k cancel q m8")  # The first one may have been done before the last lines.
    lab.check()
    assert not times.delays.bodies
    assert len(times.delays) == 19_998


@pytest.mark.slow
def test_what_overflows_from_queue_to_queue_comes_to_its_end() -> None:
    lab, count = Lab(), 500
    policy = b"--messages-max=1 --overflow=drop --dead-letters=q%d"
    lines = [b"s set_queue q%d " % number + policy % (number + 1) for number in range(count)]
    lab.do("a", *lines, b"s subscribe q0 e")
    lab.do("a", b"m1 publish e x", b"m2 publish e x", b"m3 publish e x")
    lab.check()
    there = {name: number for name, number in ready(lab).items() if number}
    assert there == {b"q0": 1, b"q1": 1, b"q2": 1}
    lab.do("a", *(b"n%d publish e x" % number for number in range(count)))
    assert ready(lab)[b"q%d" % count] == 3


def test_many_that_are_due_at_one_moment_are_done_at_once() -> None:
    """More than any alarm does in a few turns, which is no reason for it to rest."""
    lab = Lab(1 << 30)
    most = (RINGS_MAX + 3) * STEP_MESSAGES
    lab.do("a", b"s subscribe late e", b"s subscribe short f")
    lab.do("a", b"c consume short --manual-ack --prefetch=%d" % most)
    lab.send("a", *(b"m%d publish --delay=9 e x" % n for n in range(most)))
    lab.send("a", *(b"m%d publish --ttl=9 f x" % n for n in range(most)))
    lab.rest()
    assert lab.broker.queues[b"late"].scheduled == lab.broker.queues[b"short"].unacked == most
    lab.wait(9.1)
    assert lab.broker.queues[b"late"].ready == most
    lab.end("a")
    lab.rest()
    assert lab.broker.queues[b"short"].ready == 0
    lab.check()
