"""The wall clock is set while a timer runs, which takes no notice, and while the server is down."""

import pytest

from tests.kit.lab import Lab

HOUR_S = 3600
SECOND_US = 1_000_000
SETTLED = b"c consume q e --manual-ack"
TIMERS: dict[str, tuple[list[bytes], list[bytes]]] = {
    # What is asked for before the clock is set, and after.
    "a delay": ([b"s subscribe q e", b"m publish --delay=2 e x"], []),
    "a TTL": ([b"s subscribe q e", b"m publish --ttl=2 e x"], []),
    "a TTL after a delay": ([b"s subscribe q e", b"m publish --delay=1 --ttl=2 e x"], []),
    "that of the queue": ([b"s set_queue q --ttl=2", b"s subscribe q e", b"m publish e x"], []),
    "and after a delay": (
        [b"s set_queue q --ttl=2", b"s subscribe q e", b"m publish --delay=1 e x"],
        [],
    ),
    "a TTL and a reject": (
        [SETTLED, b"m publish --ttl=2 e x"],
        [b"r reject c m", b"d delete_consumer c"],
    ),
    "a TTL and a release": (
        [SETTLED, b"m publish --ttl=2 e x"],
        [b"r release c m", b"d delete_consumer c"],
    ),
    "a TTL and a delayed reject": (
        [SETTLED, b"m publish --ttl=3 e x", b"r reject --delay=1 c m", b"d delete_consumer c"],
        [],
    ),
    "that of the queue and a delayed reject": (
        [
            *(b"s set_queue q --ttl=3", SETTLED, b"m publish e x"),
            *(b"r reject --delay=1 c m", b"d delete_consumer c"),
        ],
        [],
    ),
    "that of the queue and two rejects": (
        [b"s set_queue q --ttl=2", SETTLED, b"m publish e x", b"r reject c m"],
        [b"r reject c m", b"d delete_consumer c"],
    ),
    "a TTL and a delayed release": (
        [SETTLED, b"m publish --ttl=3 e x", b"r release --delay=1 c m", b"d delete_consumer c"],
        [],
    ),
    "a TTL and a move": (
        [b"s subscribe q e", b"s subscribe z f", b"m publish --ttl=2 e x"],
        [b"v move q z"],
    ),
    "a backoff": (
        [
            *(b"s set_queue q --backoff=2,10", SETTLED, b"m publish e x"),
            *(b"r reject c m", b"d delete_consumer c"),
        ],
        [],
    ),
    "a lease": ([b"s subscribe q e", b"m publish e x", b"r receive q --lease=2"], []),
    "a lease and a TTL": (
        [b"s subscribe q e", b"m publish --ttl=3 e x", b"r receive q --lease=1"],
        [],
    ),
    "an ack timeout": ([SETTLED + b" --ack-timeout=2 --prefetch=1", b"m publish e x"], []),
    "a receive that waits": ([b"s subscribe q e", b"r receive q --wait=2 --lease=5"], []),
    "a delete rule": ([b"s subscribe q e", b"d delete_queue q --when-unused=2"], []),
}


def told(before: list[bytes], after: list[bytes], set_s: int) -> list[object]:
    """What clients are told, and how many messages there are, in each tenth of a second."""
    lab = Lab(1 << 24)
    lab.do("a", *before)
    lab.wall_ahead_us += set_s * SECOND_US
    lab.wait(0.5)
    lab.do("a", *after)
    states = list[object]()
    for _ in range(40):
        counts = {n: (q.ready, q.scheduled, q.unacked) for n, q in lab.broker.queues.items()}
        states.append((counts, [*lab.replies]))
        lab.wait(0.1)
    lab.check()
    return states


@pytest.mark.parametrize("timer", TIMERS)
def test_timers_take_no_notice(timer: str) -> None:
    right = told(*TIMERS[timer], 0)
    assert b" error " not in repr(right).encode()
    assert right[0] != right[-1], "it has no effect"
    assert told(*TIMERS[timer], HOUR_S) == told(*TIMERS[timer], -HOUR_S) == right


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
