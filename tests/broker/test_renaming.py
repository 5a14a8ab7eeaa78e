"""A queue that is renamed is the same queue under another name, also after a crash."""

import pytest

from mqks.broker.spine.routing import bindings
from mqks.limits import RENAMED_QUEUES_MAX
from mqks.settings import QueueTable
from mqks.users import Permissions
from tests.kit.compiled import patches_modules
from tests.kit.lab import Lab


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 24])
def test_all_that_belongs_to_it_stays(memory_bytes: int, crash: bool) -> None:
    lab = Lab(memory_bytes)
    lab.do("a", b"s set_queue q --retries=3 --readers=a,b --labels=k=v", b"s subscribe q e")
    lab.do("a", b"s rebind q --add-mask o.*", b"c consume q --manual-ack --prefetch=1")
    lab.do("a", *[b"m%d publish e x" % n for n in range(3)], b"d publish --delay=9 e x")
    lab.do("a", b"r reject c m0")
    before = lab.stats("queue q")
    lab.replies.clear()
    lab.do("a", b"n rename --confirm q r")
    assert lab.ends() == [b"c ok", b"n ok"]
    if crash:
        lab.crash()
        lab.rest()
    after = lab.stats("queue r")
    same = ("policy", "events", "masks", "scheduled", "next_seq")
    assert [after[key] for key in same] == [before[key] for key in same]
    assert after["ready"] + after["unacked"] == 3
    assert [row["name"] for row in lab.stats("queues")] == ["r"]
    if crash:
        lab.do("a", b"c consume r --manual-ack --prefetch=1")
    lab.do("a", b"k ack c --all", b"m3 publish e x", b"m4 publish o.new x", b"k consume r")
    assert lab.broker.queues[b"r"].ready == 0
    lab.wait(10)
    assert lab.broker.queues[b"r"].scheduled == 0
    lab.check()


def test_what_names_it_names_it_anew() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s set_queue q --dead-letters=dead", b"s set_queue dead --dead-letters=dead")
    lab.do("a", b"t schedule t --every=5 publish --ttl=9 --to=dead e --to=dead x")
    lab.do(
        "a", b"u schedule u --every=5 publish --to=deader e x", b"n rename --confirm dead x.dead"
    )
    lab.crash()
    lab.rest()
    for name in (b"q", b"x.dead"):
        assert lab.broker.queues[name].policy.dead_letters == b"x.dead"
    schedules = lab.broker.schedules.rows
    assert schedules[b"t"].publish == "--ttl=9 --to=x.dead e --to=dead x"
    assert schedules[b"u"].publish == "--to=deader e x"
    lab.wait(6)
    assert lab.broker.queues[b"x.dead"].ready == 1
    lab.check()


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (b"s subscribe r f", b"there is a queue"),
        (b"s rebind r f", b"there are bindings"),
        (b"s delete_queue q", b"there is no queue"),
        (b"c consume q --delete-queue-when-unused", b"deleted when it is unused"),
        (b"s set_queue q --dead-letters=looped", b"form a cycle with a default"),
    ],
)
def test_refused_and_unchanged(before: bytes, why: bytes) -> None:
    lab = Lab(1 << 24)
    lab.broker.policies.reload([QueueTable("looped", {"dead_letters": b"r"})])
    lab.do("a", b"s subscribe q e", before)
    names, bound = [*lab.broker.queues], {**lab.broker.bindings.by_name}
    lab.replies.clear()
    lab.do("a", b"n rename --confirm q r")
    assert lab.ends() == [b"n error"]
    assert why.decode() in lab.broker.last_errors[-1].reason
    assert ([*lab.broker.queues], lab.broker.bindings.by_name) == (names, bound)
    lab.check()


def test_a_full_disk_refuses_it() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e")
    lab.fill()
    lab.do("a", b"n rename --confirm q r")
    assert (lab.ends(), [*lab.broker.queues]) == ([b"n error"], [b"q"])


def test_too_many_name_it() -> None:
    lab = Lab(1 << 24)
    for n in range(RENAMED_QUEUES_MAX + 1):
        lab.do("a", b"s set_queue q%d --dead-letters=dead" % n)
    lab.do("a", b"n rename --confirm dead x", b"d delete_queue q0", b"n rename --confirm dead y")
    assert lab.ends() == [b"n error", b"n ok"]
    assert {queue.policy.dead_letters for queue in lab.broker.queues.values()} == {None, b"y"}


def test_it_is_in_one_commit() -> None:
    lab = Lab(1 << 24)
    events = b" ".join(b"e%d" % n for n in range(5000))
    lab.do("a", b"s subscribe q " + events, b"s set_queue p --dead-letters=q")
    lab.do("a", b"t schedule t --every=5 publish --to=q e x")
    lab.send("a", b"n rename --confirm q r")
    while lab.broker.has_work:
        lab.work()
        lab.take()
        seen = {row.name for row in map(lab.broker.queues.get, lab.broker.queues) if row}
        assert seen in ({b"q", b"p"}, {b"r", b"p"})
    lab.take()
    lab.land()
    lab.crash()
    broker = lab.broker
    assert sorted(broker.queues) == [b"p", b"r"]
    assert (broker.bindings.count(b"q"), broker.bindings.count(b"r")) == (0, 5000)
    assert broker.queues[b"p"].policy.dead_letters == b"r"
    assert broker.schedules.rows[b"t"].publish == "--to=r e x"


@patches_modules
@pytest.mark.parametrize("calls_a_turn", [0, 2, 3, 7])
def test_races(calls_a_turn: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of requests, the second in the turns of the first, with a crash behind them."""
    monkeypatch.setattr(bindings, "STEP_NAMES", 40)
    events = b" ".join(b"e%d" % n for n in range(100))
    others = [
        b"o rename --confirm r q", b"o rename --confirm q s", b"o delete_queue --confirm q",
        b"o subscribe --confirm r f", b"o rebind --confirm q f", b"o rebind --confirm q --add g",
        b"o publish --confirm e1 x", b"o consume --confirm q", b"o set_queue --confirm q --ttl=9",
    ]  # fmt: skip
    for other in others:
        lab = Lab(1 << 24, calls_a_turn)
        lab.do("a", b"s subscribe q " + events)
        lab.send("a", b"n rename --confirm q r")
        lab.send("b", other)
        lab.rest()
        lab.check()
        before = {name: queue.id for name, queue in lab.broker.queues.items()}
        bound = {**lab.broker.bindings.by_name}
        lab.crash()
        assert {name: queue.id for name, queue in lab.broker.queues.items()} == before
        assert {k: {*v} for k, v in lab.broker.bindings.by_name.items()} == {
            k: {*v} for k, v in bound.items()
        }
        lab.rest()
        lab.check()


def test_consumers_that_may_not_see_the_new_name_end() -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e")
    lab.do("b", b"c consume q --manual-ack", b"m publish e x")
    lab.do("a", b"w consume r --manual-ack")
    lab.connections["b"].permissions = Permissions(consume=("q",))
    lab.do("a", b"d delete_queue r")
    lab.replies.clear()
    lab.do("a", b"n rename --confirm q r")
    assert b"c error" in lab.ends()
    assert [*lab.broker.consumers] == [b"w"]
    assert lab.broker.consumers[b"w"].unacked_count == 1
    lab.check()
