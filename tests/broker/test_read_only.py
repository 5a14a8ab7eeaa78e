"""A read-only server refuses what adds something, whatever form it comes in, and nothing else."""

import pytest

from mqks.protocol.requests import ACTIONS
from tests.fuzz.invariants import check
from tests.kit.bare import BareWorld
from tests.kit.lab import Lab

BEFORE = (
    *(b"s subscribe q e", b"d set_queue q --dead-letters=dead", b"r subscribe r f"),
    *(b"m1 publish e x", b"m2 publish --delay=9 e x", b"h schedule beat --every=5 publish e x"),
    b"c consume q --manual-ack --prefetch=1",
)
ADDS = (
    *(b"publish e x", b"publish --once e x", b"publish --to=q e x", b"publish --ttl=9 e x"),
    *(b"publish --delay=9 e x", b"publish --escaped e x", b"publish nowhere x"),
    *(b"subscribe q g", b"subscribe new e", b"subscribe q --add-mask g.*", b"rebind q --add g"),
    *(b"consume new", b"consume q e g", b"set_queue q --ttl=9", b"set_queue new"),
    *(b"move q r", b"redrive dead", b"schedule other --every=5 publish e x"),
    *(b"schedule beat --run", b"schedule beat --pause", b"rename r other"),
    *(b"open_batch night", b"close_batch night"),
)
QUEUED = 2
"""Messages from before."""
GOES_ON = (
    *(b"subscribe q e", b"rebind r --remove f", b"consume q e", b"consume r"),
    *(b"reject c m1", b"release c --all", b"ack c m1", b"touch c --all", b"receive r"),
    *(b"promote q m2", b"cancel q m2", b"pause q", b"resume q", b"purge q", b"trim q 1"),
    *(b"peek q", b"unschedule beat", b"delete_queue r", b"begin", b"tail e", b"trace e", b"stats"),
    *(b"progress c m1 5", b"cancel_job q m2"),
)


def read_only() -> Lab:
    lab = Lab(1 << 24)
    lab.do("a", *BEFORE, b"o read_only on")
    lab.replies.clear()
    assert lab.broker.shared.counters.queued == QUEUED
    return lab


@pytest.mark.parametrize("request_", ADDS)
@pytest.mark.parametrize("confirm", [b"", b" --confirm"])
def test_what_adds_something_is_refused_and_changes_nothing(
    request_: bytes, confirm: bytes
) -> None:
    lab = read_only()
    queues, rows = {*lab.broker.queues}, {**lab.broker.schedules.rows}
    bindings, policy = lab.broker.bindings.count(b"q"), lab.broker.queues[b"q"].policy
    action, _, rest = request_.partition(b" ")
    lab.do("b", b"x %b%b %b" % (action, confirm, rest))
    [told] = lab.replies
    assert told.startswith(b"x error ")
    assert lab.broker.last_errors[-1].reason.startswith("the server is read-only")
    assert ({*lab.broker.queues}, lab.broker.schedules.rows) == (queues, rows)
    assert lab.broker.bindings.count(b"q") == bindings
    assert lab.broker.queues[b"q"].policy == policy
    assert lab.broker.shared.counters.queued == QUEUED
    lab.check()


@pytest.mark.parametrize("request_", GOES_ON)
def test_all_else_goes_on(request_: bytes) -> None:
    lab = read_only()
    lab.do("b", b"x " + request_)
    assert not any(told.startswith(b"x error ") for told in lab.replies)
    lab.check()


def test_every_action_that_is_not_of_the_connection_was_considered() -> None:
    tried = {each.split()[0] for each in (*ADDS, *GOES_ON)}
    assert ACTIONS.keys() - tried == {
        *(b"set_prefetch", b"commit", b"rollback", b"lease", b"range", b"read", b"schedules"),
        *(b"delete_consumer", b"help", b"auth", b"set_name", b"close_connection", b"ping"),
        *(b"drain", b"read_only", b"reload", b"_eval", b"batch", b"batches", b"result"),
    }


def test_what_was_begun_before_is_refused_at_the_commit() -> None:
    lab = Lab(1 << 24)
    lab.do("a", *BEFORE, b"ack c m1")
    for line in (b"m9 publish e x", b"m9 publish --ttl=5 e x", b"v move q r"):
        lab.do("a", b"o read_only off", b"t begin", line)
        lab.send("b", b"o read_only on")
        lab.take()
        lab.replies.clear()
        lab.do("a", b"t commit --confirm")
        assert [told.split()[1] for told in lab.replies] == [b"error", b"error"], line
        lab.check()


def test_ticks_wait_until_it_ends() -> None:
    lab = read_only()
    lab.wait(6)
    assert b"beat" in lab.broker.schedules.errors
    assert lab.broker.shared.counters.queued == QUEUED
    lab.do("a", b"o read_only off")
    lab.wait(2)
    assert lab.broker.schedules.errors == {}
    assert lab.broker.shared.counters.queued == QUEUED + 1


def test_a_burst_is_refused_line_by_line() -> None:
    lab = read_only()
    lines = b"\n".join(b"m%d publish e x" % number for number in range(3_000))
    lab.do("b", lines, b"p ping x", b"m publish e " + b"x" * (1 << 20))
    assert len(lab.replies) == 3_002
    assert lab.broker.shared.counters.queued == QUEUED
    check(lab.broker)


def test_a_server_starts_as_the_setting_says() -> None:
    world = BareWorld(read_only=True)
    world.send("a", b"s subscribe q e\nm publish e x\n")
    assert world.broker.queues == {}
    world.send("a", b"o read_only off\ns subscribe q e\nm publish e x\n")
    assert world.broker.queues[b"q"].ready == 1


def test_it_counts_from_its_line_on_within_a_chunk_and_a_turn() -> None:
    world = BareWorld()
    world.send("a", b"s subscribe q e\n")
    world.send_together(
        [
            ("a", b"m1 publish e x\nm2 publish e x\n"),
            ("b", b"m3 publish e x\no read_only on\nm4 publish e x\n"),
            ("a", b"m5 publish e x\nm6 publish e x\n"),
        ]
    )
    assert world.broker.queues[b"q"].ready == 3
