"""Schedules: each tick is published once, whatever is killed, and only by whom it may be."""

import json
import random
from datetime import UTC, datetime
from typing import Any

import pytest

from mqks.broker.spine.base.schedule import RINGS_MAX
from mqks.errors import BadRequest
from mqks.server.cron import next_tick
from tests.kit.bare import BareWorld, ask, bare

SECOND_US = 1_000_000
STEPS = "commit", "take", "land", "fail", "fill", "make_room", "crash", "late"


def scheduled(flags: bytes, **settings: Any) -> BareWorld:
    """The queue `q`, and the schedule `a` that publishes to it."""
    world = bare(**settings)
    assert ask(world, b"s subscribe --confirm q e") == b"s ok \n"
    assert ask(world, b"t schedule --confirm a %b publish e x" % flags) == b"t ok \n"
    return world


def due(world: BareWorld, after_s: int = 0) -> None:
    world.now_us += after_s * SECOND_US
    world.broker.schedule.run_due(world.broker.turns)
    while world.broker.has_work:
        world.broker.go_on()


def on_disk(world: BareWorld) -> tuple[list[int], int]:
    """The times of the ticks whose messages were written, and that of the next one."""
    [queue] = world.disk.queues.values()
    ids = [line.partition(b" ")[0].rpartition(b":")[2] for line in queue.lines.values()]
    [row] = world.disk.schedules.values()
    return sorted(map(int, ids)), json.loads(row)["next_us"] // SECOND_US


@pytest.mark.parametrize("seed", range(20))
def test_a_tick_and_the_next_time_are_in_one_commit(seed: int) -> None:
    chance, world = random.Random(seed), scheduled(b"--every=1 --missed=one")
    for _ in range(100):
        due(world, 1)
        match chance.choice(STEPS):
            case "late":
                world.now_us += chance.randrange(30) * SECOND_US
            case "crash":
                ticks, next_s = on_disk(world)
                assert len(ticks) == len(set(ticks))
                assert all(tick < next_s for tick in ticks)
                world.crash()
                world.broker.start_timers()
                due(world)
                world.commit()
                # What was not written is not left out.
                assert next_s * SECOND_US > world.now_us or next_s in on_disk(world)[0]
            case what:
                getattr(world, what)()
    ticks, _ = on_disk(world)
    assert len(ticks) == len(set(ticks)) > 9


@pytest.mark.parametrize(("rule", "count"), [(b"skip", 6), (b"one", 1)])
def test_missed_ticks(rule: bytes, count: int) -> None:
    """Those of the last minute are late, and were not missed."""
    world = scheduled(b"--every=10 --missed=" + rule)
    for seconds, published in (3600, count), (10, count + 1):
        due(world, seconds)
        world.commit()
        assert len(on_disk(world)[0]) == published


def test_jitter_is_the_same_after_a_crash() -> None:
    world, late = scheduled(b"--every=100 --jitter=50"), 0
    while not on_disk(world)[0]:
        world.now_us += SECOND_US
        late += 1
        world.crash()
        world.broker.start_timers()
        due(world)
        world.commit()
    assert 100 <= late <= 151


def test_a_full_queue_delays_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    world = scheduled(b"--every=30", queue_messages_max=1)
    assert ask(world, b"m publish --confirm e x") == b"m ok \n"
    failed: list[tuple[bytes, str]] = []
    monkeypatch.setattr(world.broker.notices, "tick_failed", lambda *what: failed.append(what))
    for seconds in (30, 1, 1):
        due(world, seconds)
        assert b'"error": "queue_messages_max is 1, and' in ask(world, b"l schedules")
    [(name, reason)] = failed
    assert (name, reason[:21]) == (b"a", "queue_messages_max is")
    assert len(world.broker.queues[b"q"].lane.blocks) == 1
    assert ask(world, b"p purge --confirm q") == b"p ok 1\n"
    due(world, 1)
    world.commit()
    assert len(on_disk(world)[0]) == 1
    assert b'"error": null' in ask(world, b"l schedules")


def last_queues(world: BareWorld) -> object:
    """How many queues have got the last message, as it is told."""
    return json.loads(ask(world, b"l schedules").split(b" ok ")[1])[0]["last_queues"]


def test_schedules_tell_how_many_queues_got_the_last_message() -> None:
    world = scheduled(b"--every=1")
    assert last_queues(world) is None
    for line, count in (
        (b"s subscribe --confirm r e", 2),
        (b"d delete_queue --confirm q", 1),
        (b"d delete_queue --confirm r", 0),
    ):
        assert b" ok " in ask(world, line)
        due(world, 1)
        assert last_queues(world) == count
    assert ask(world, b"t schedule --confirm a --every=1 publish e y") == b"t ok \n"
    assert last_queues(world) is None


def test_a_duplicate_is_in_no_queue() -> None:
    """Only where none of its key waits, or its place is taken."""
    world = bare()
    for name in (b"q", b"r"):
        assert ask(world, b"s subscribe --confirm %b e" % name) == b"s ok \n"
    told = []
    for flags in (b"k", b"k,on=replace"):
        line = b"t schedule --confirm a --every=9 publish --unique=%b e x" % flags
        assert ask(world, line) == b"t ok \n"
        for queue in (b"none", b"none", b"q"):
            ask(world, b"p purge --confirm " + queue)
            assert ask(world, b"r schedule --confirm a --run") == b"r ok \n"
            told.append(last_queues(world))
    assert told == [2, 0, 1, 2, 2, 2]


def test_thousands_of_schedules_are_refused() -> None:
    world = bare()
    lines = [b"t%d schedule a%d --every=9 publish e x" % (n, n) for n in range(1001)]
    world.send("k", b"\n".join(lines) + b"\n")
    assert len(world.broker.schedules.rows) == 1000
    assert world.broker.limits_reached["schedules_max"] == 1


def test_long_lines_are_refused() -> None:
    world = bare()
    many, pieces = b",".join([b"*/1"] * 100), b"* " * 100
    for words in (many + b" * * * *", pieces, b"--every=9 --tz=" + b"x" * 257):
        world.send("k", b"t schedule a %b publish e x\n" % words)
    world.send("k", b"t schedule a --every=9 publish e " + b"x" * 65536 + b"\n")
    assert not world.broker.schedules.rows
    assert world.received("k").count(b"t error ") == 4


def test_cron_expressions_are_checked() -> None:
    march = 1_774_656_000 * SECOND_US  # 2026-03-28 00:00 UTC
    for cron, zone in (
        *(("* * *", "UTC"), ("* * * * * *", "UTC"), ("0 0 30 2 *", "UTC")),
        *(("* * * * *", "../etc/passwd"), ("*/5 2 * * 0", "Mars/Olympus")),
        # The last Sunday of March, when this hour is left out.
        ("* 2 * 3 0L", "Europe/Berlin"),
    ):
        with pytest.raises(BadRequest):
            next_tick(cron, zone, march)


class Repeated:
    """A schedule of each day at half past two in Berlin. On 25 October 2026 clocks show two o'clock
    at midnight UTC, and again at one."""

    def __init__(self, at: str, missed: bytes = b"skip", **settings: Any) -> None:
        self.world = bare(**settings)
        self.go_on(at)
        self.ask(b"s subscribe --confirm q e")
        self.line = b"t schedule --confirm daily 30 2 * * * --tz=Europe/Berlin --missed=" + missed

    def go_on(self, at: str) -> None:
        """At a time of this day, or with the day before it."""
        at = at if "T" in at else "25T" + at
        self.world.now_us = round(datetime.fromisoformat(f"2026-10-{at}Z").timestamp()) * SECOND_US
        self.work()

    def work(self) -> None:
        """Whatever is due, but not without end."""
        for _ in range(30):
            self.world.broker.turns.end_s = 0.0
            self.world.broker.schedule.run_next()
            self.world.broker.go_on()
            self.world.commit()

    def ask(self, line: bytes) -> None:
        connection = self.world.connection("k")
        self.world.intake.receive(connection, line + b"\n")
        self.work()
        self.world.hear()
        assert b" error " not in self.world.received("k")

    def take(self, step: str) -> None:
        """What is asked for, or the time until which it goes on."""
        match step:
            case "add":
                self.ask(self.line + b" publish e x")
            case "pause" | "resume":
                self.ask(b"t schedule daily --" + step.encode())
            case "fill":
                self.ask(b"m publish e x")
            case "purge":
                self.ask(b"p purge q")
            case "down":
                self.world.now_us += 2460 * SECOND_US
            case "restart":
                self.world.crash()
                self.world.broker.start_timers()
                self.work()
            case at:
                self.go_on(at)

    def ticks(self) -> list[str]:
        """When those that were published were due, and the next one is."""
        published, next_s = on_disk(self.world)
        assert self.world.broker.schedule.repeats == 0
        return [f"{datetime.fromtimestamp(s, UTC):%dT%H:%M}" for s in (*published, next_s)]


@pytest.mark.parametrize(
    ("steps", "ticks"),
    [
        ("01:10 add 01:50", "26T01:30"),
        ("24T12:00 add pause 01:10 resume 01:50", "26T01:30"),
        ("00:10 add 00:30", "25T00:30 26T01:30"),
        ("00:10 add 00:30 00:40", "25T00:30 26T01:30"),
        ("00:10 add 00:30 00:40 01:10", "25T00:30 26T01:30"),
        ("00:10 add 00:30 00:40 01:10 01:30 01:40", "25T00:30 26T01:30"),
        # To ten past one while it is down.
        ("24T12:00 add 00:29 down restart 01:30 restart", "26T01:30"),
        ("24T12:00 one add 00:29 down restart 01:30 restart", "25T00:30 26T01:30"),
        # The clock is set back.
        ("00:10 add 00:30 26T01:30", "25T00:30 26T01:30 27T01:30"),
        ("00:10 add 00:30 26T01:30 01:10 restart 01:40", "25T00:30 26T01:30 26T01:30"),
        # It becomes possible in that hour.
        ("00:10 full add fill 00:30 01:10 purge 01:12", "26T01:30"),
        ("00:10 one full add fill 00:30 01:10 purge 01:12", "25T00:30 26T01:30"),
    ],
)
def test_ticks_about_a_repeated_hour(steps: str, ticks: str) -> None:
    """`one`: a missed tick is made up for; `full`: the queue takes one message."""
    at, *others = steps.split()
    missed, most = b"one" if "one" in others else b"skip", 1 if "full" in others else 1000
    each = Repeated(at, missed, queue_messages_max=most)
    for step in others:
        if step not in ("one", "full"):
            each.take(step)
    assert each.ticks() == ticks.split()


def test_a_tick_that_is_not_later_does_not_flood_its_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    each, repeated = Repeated("00:10"), list[str]()
    each.take("add")
    monkeypatch.setattr(each.world.broker.notices, "timer_repeats", repeated.append)
    wrong_us = each.world.now_us + 1200 * SECOND_US
    monkeypatch.setattr(each.world.broker.schedules, "_next_tick", lambda *_: wrong_us)
    each.go_on("00:30")
    before = len(on_disk(each.world)[0])
    assert before <= RINGS_MAX + 1
    for _ in range(3):
        each.world.now_us += SECOND_US
        each.work()
    assert len(on_disk(each.world)[0]) == before + 3
    assert {*repeated} == {"schedule 'daily'"}
    assert json.loads(ask(each.world, b"s stats")[5:])["timer_repeats"] == len(repeated) > 3
