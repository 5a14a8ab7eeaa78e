"""The wall clock is set while a timer runs, which takes no notice, and while the server is down."""

import pytest

from tests.kit.lab import Lab

HOUR_S = 3600
SECOND_US = 1_000_000
SETTLED = "c consume q e --manual-ack"
TIMERS = {
    # What is asked for before the clock is set, and after " then ".
    "a delay": "s subscribe q e, m publish --delay=2 e x",
    "a TTL": "s subscribe q e, m publish --ttl=2 e x",
    "a TTL after a delay": "s subscribe q e, m publish --delay=1 --ttl=2 e x",
    "that of the queue": "s set_queue q --ttl=2, s subscribe q e, m publish e x",
    "and after a delay": "s set_queue q --ttl=2, s subscribe q e, m publish --delay=1 e x",
    "a TTL and a reject": (
        f"{SETTLED}, m publish --ttl=2 e x then r reject c m, d delete_consumer c"
    ),
    "a TTL and a release": (
        f"{SETTLED}, m publish --ttl=2 e x then r release c m, d delete_consumer c"
    ),
    "a TTL and a delayed reject": (
        f"{SETTLED}, m publish --ttl=3 e x, r reject --delay=1 c m, d delete_consumer c"
    ),
    "that of the queue and a delayed reject": (
        f"s set_queue q --ttl=3, {SETTLED}, m publish e x, r reject --delay=1 c m, "
        "d delete_consumer c"
    ),
    "that of the queue and two rejects": (
        f"s set_queue q --ttl=2, {SETTLED}, m publish e x, "
        "r reject c m then r reject c m, d delete_consumer c"
    ),
    "a TTL and a delayed release": (
        f"{SETTLED}, m publish --ttl=3 e x, r release --delay=1 c m, d delete_consumer c"
    ),
    "a TTL and a move": "s subscribe q e, s subscribe z f, m publish --ttl=2 e x then v move q z",
    "a backoff": (
        f"s set_queue q --backoff=2,10, {SETTLED}, m publish e x, r reject c m, d delete_consumer c"
    ),
    "a lease": "s subscribe q e, m publish e x, r receive q --lease=2",
    "a lease and a TTL": "s subscribe q e, m publish --ttl=3 e x, r receive q --lease=1",
    "an ack timeout": f"{SETTLED} --ack-timeout=2 --prefetch=1, m publish e x",
    "a receive that waits": "s subscribe q e, r receive q --wait=2 --lease=5",
    "a pause": "s subscribe q e, m publish e x, p pause q --for=2, c consume q --manual-ack",
    "a publish that waits, and a delay behind it": (
        "s subscribe q e, p pause q --publishes=wait --for=2, m publish --confirm e x, "
        "n publish --delay=1 e x"
    ),
    "a breaker": (
        f"s set_queue q --breaker=1,2, {SETTLED} --prefetch=1, m publish e x, n publish e x, "
        "r reject c m"
    ),
    "a delete rule": "s subscribe q e, d delete_queue q --when-unused=2",
}


def told(timer: str, set_s: int) -> list[object]:
    """What clients are told, and how many messages there are, in each tenth of a second."""
    before, _, after = timer.encode().partition(b" then ")
    lab = Lab(1 << 24)
    lab.do("a", *before.split(b", "))
    lab.wall_ahead_us += set_s * SECOND_US
    lab.wait(0.5)
    lab.do("a", *filter(None, after.split(b", ")))
    states = list[object]()
    for _ in range(40):
        counts = {n: (q.ready, q.scheduled, q.unacked) for n, q in lab.broker.queues.items()}
        states.append((counts, [*lab.replies]))
        lab.wait(0.1)
    lab.check()
    return states


@pytest.mark.parametrize("timer", TIMERS.values(), ids=TIMERS)
def test_timers_take_no_notice(timer: str) -> None:
    right = told(timer, 0)
    assert b" error " not in repr(right).encode()
    assert right[0] != right[-1], "it has no effect"
    assert told(timer, HOUR_S) == told(timer, -HOUR_S) == right


@pytest.mark.parametrize("wait", [b"publish --delay=10", b"publish --at=1790001010"])
def test_what_waits_is_due_when_a_clock_that_was_wrong_at_the_start_is_put_right(
    wait: bytes,
) -> None:
    lab = Lab(1 << 24)
    lab.do("a", b"s subscribe q e", b"m " + wait + b" e x")
    lab.wall_ahead_us -= 50 * 365 * 24 * HOUR_S * SECOND_US
    lab.crash()
    lab.broker.start_timers()
    lab.wait(9.8)
    lab.wall_ahead_us += 50 * 365 * 24 * HOUR_S * SECOND_US
    lab.rest()
    assert lab.broker.queues[b"q"].scheduled == 1
    lab.wait(1.3)
    assert lab.broker.queues[b"q"].ready == 1
    lab.check()
