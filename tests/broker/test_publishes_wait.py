"""Publishes to a queue whose pause lets them wait: each is placed when that ends, in the order of
its connection, or gets its error."""

from collections.abc import Callable

import pytest

from mqks.broker.spine.clients.outbox import Slow
from mqks.settings import QueueTable
from mqks.users import Permissions
from tests.kit.lab import Lab

MIB = 1 << 20


def paused(memory_bytes: int = MIB, calls_a_turn: int = 0) -> Lab:
    """The publishes of q, to which the event e goes, wait; those of other, with e and f, do not."""
    lab = Lab(memory_bytes, calls_a_turn)
    lab.do("o", b"s subscribe q e", b"s subscribe other e f", b"p pause q --publishes=wait")
    return lab


def ids(lab: Lab, name: bytes) -> list[bytes]:
    return [line.split(b" ")[0] for line in lab.lines(name)]


def reason(lab: Lab) -> str:
    return lab.broker.last_errors[-1].reason


@pytest.mark.parametrize(
    "end", [b"r resume q", b"r pause q --deliveries", b"r set_queue q --publishes-paused="]
)
@pytest.mark.parametrize("memory_bytes", [0, MIB])
def test_a_publish_waits_with_all_that_its_connection_sends_after_it(
    memory_bytes: int, end: bytes
) -> None:
    lab = paused(memory_bytes)
    lab.do(
        "a", b"m0 publish --confirm f x", b"m1 publish --confirm e x", b"m2 publish --confirm f x",
        b"m3 publish --confirm --to=q f x", b"g help --confirm ping",
    )  # fmt: skip
    lab.do("a", b"m4 publish --confirm --priority=2 e x")
    assert lab.ends() == [b"m0 ok"]
    lab.check()
    assert (ids(lab, b"q"), ids(lab, b"other")) == ([], [b"m0"])
    lab.do("b", b"m5 publish --confirm f x")
    assert lab.ends() == [b"m5 ok"]

    lab.do("o", end)

    assert {*lab.ends()} == {b"m1 ok", b"m2 ok", b"m3 ok", b"m4 ok", b"g ok"}
    assert ids(lab, b"q") == [b"m1", b"m3", b"m4"]
    assert ids(lab, b"other") == [b"m0", b"m5", b"m1", b"m2", b"m4"]
    lab.check()


def test_nothing_runs_while_a_thousand_wait() -> None:
    lab = paused()
    for number in range(1000):
        lab.do(f"a{number}", b"m%d publish --confirm e x" % number)
    assert not lab.broker.has_work
    lab.wait(2)  # The audit has a timer of its own.
    assert not lab.broker.has_work
    assert len(lab.broker.schedule) == 0

    lab.do("o", b"r resume q")

    assert lab.ends() == [b"m%d ok" % number for number in range(1000)]
    assert ids(lab, b"q") == [b"m%d" % number for number in range(1000)]
    lab.check()


@pytest.mark.parametrize("calls_a_turn", [0, 1])
def test_a_burst_waits_in_its_order(calls_a_turn: int) -> None:
    lab = paused(calls_a_turn=calls_a_turn)
    flags = [b"", b"--once ", b"--mandatory ", b"--key=k ", b"--to=q ", b"--ttl=60 "]
    lines = [b"m%d publish %be x" % (n, flags[n % len(flags)]) for n in range(5_000)]
    lab.do("a", b"l publish --confirm e " + b"x" * (MIB - 100), *lines)
    assert ids(lab, b"q") == []

    lab.do("o", b"r resume q")

    assert lab.ends() == [b"l ok"]
    assert ids(lab, b"q") == [b"l", *(b"m%d" % n for n in range(5_000))]
    lab.check()


def test_who_gets_no_turn_between_two_pauses_waits_on() -> None:
    lab = paused()
    lab.do("a", b"m1 publish --confirm e x")
    lab.do("o", b"r resume q", b"p pause q --publishes=wait")
    assert lab.ends() == []
    lab.do("o", b"p pause other --publishes=wait", b"r resume q")
    assert lab.ends() == []
    lab.do("o", b"r resume other")
    assert lab.ends() == [b"m1 ok"]
    assert ids(lab, b"q") == ids(lab, b"other") == [b"m1"]


def forbid(lab: Lab) -> None:
    lab.connections["a"].permissions = Permissions()
    lab.do("o", b"r resume q")


ENDS: dict[str, Callable[[Lab], object]] = {
    "it goes": lambda lab: lab.connections["a"].rest(Slow.END),
    "it is closed": lambda lab: lab.do("o", b"x close_connection 2"),
    "the server drains": lambda lab: lab.do("o", b"x drain --timeout=0.1"),
    "they are refused": lambda lab: lab.do("o", b"x pause q --publishes"),
    "nothing is added": lambda lab: lab.do("o", b"x read_only on", b"r resume q"),
    "it may not": forbid,
}


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("lines", [[b"m1 publish --confirm e x"], [b"b begin", b"m1 publish e x"]])
def test_who_may_wait_no_longer_gets_its_error(how: str, lines: list[bytes]) -> None:
    lab = paused()
    is_commit = len(lines) > 1
    lab.do("a", *lines, *([b"k commit --confirm"] if is_commit else []))
    assert lab.ends() == []

    ENDS[how](lab)
    lab.rest()

    assert ({b"m1 error", b"k error"} if is_commit else {b"m1 error"}) <= {*lab.ends()}
    lab.do("o", b"r resume q")
    assert ids(lab, b"q") == ids(lab, b"other") == []
    connection = lab.connections["a"]
    assert (connection.unconfirmed, connection.waiting_bytes) == (0, 0)
    assert not lab.broker.flow.kept_bytes
    lab.check()


def test_who_shares_its_connection_does_not_wait() -> None:
    lab = paused()
    lab.do("a", b"g help ping")
    lab.connections["a"].can_wait = False
    lab.replies.clear()
    lab.do("a", b"m1 publish --confirm e x", b"m2 publish --confirm f x")
    assert lab.ends() == [b"m1 error", b"m2 ok"]


def test_there_is_a_limit_for_what_waits() -> None:
    lab = paused()
    most = lab.broker.settings.unhandled_bytes_max // 2
    lab.do("a", b"m1 publish --confirm e " + b"x" * 1000)
    held = lab.connections["a"].left_bytes
    assert 3000 <= held <= 5000
    lab.broker.flow.unhandled_bytes = most - held  # As the server counts it.
    lab.do("b", b"m2 publish --confirm e " + b"x" * 1000)
    assert lab.ends() == []
    lab.broker.flow.unhandled_bytes = most - held + 1
    lab.do("c", b"m3 publish --confirm e " + b"x" * 1000)
    assert lab.ends() == [b"m3 error"]
    assert "unhandled_bytes_max" in reason(lab)
    assert lab.broker.limits_reached["unhandled_bytes_max"] == 1
    lab.do("o", b"r resume q")
    assert lab.ends() == [b"m1 ok", b"m2 ok"]
    assert lab.connections["a"].left_bytes == 0


def test_the_settings_may_let_publishes_wait() -> None:
    lab = Lab(MIB)
    lab.broker.policies.reload([QueueTable("q", {"publishes_paused": "wait"})])
    lab.do("o", b"s subscribe q e")
    lab.do("a", b"m1 publish --confirm e x")
    assert lab.broker.queues[b"q"].rules.pause == "publishes wait"
    lab.broker.policies.reload([])
    lab.rest()
    assert lab.ends() == [b"m1 ok"]


def test_schedules_do_not_wait() -> None:
    lab = paused()
    lab.do("o", b"t schedule --confirm beat --every=60 publish e x")
    lab.wait(61)
    assert "paused" in lab.broker.schedules.errors[b"beat"]
    lab.do("o", b"t schedule --run beat")
    assert lab.ends() == [b"t ok", b"t error"]
    lab.do("o", b"r resume q")
    lab.wait(10)
    assert lab.broker.queues[b"q"].ready == 1
