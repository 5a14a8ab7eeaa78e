"""The circuit breaker of a queue, beside a model that counts.

The one rule: after so many rejects in a row one message is delivered in a time, and the first ack
ends that.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker.test_throttles import asked
from tests.kit.lab import Lab

OPEN = b'"held_by": "breaker"'
CLOSED = b'"held_by": null'


def lab_with(*flags: str, messages: int = 0) -> Lab:
    lab = Lab(1 << 24)
    lab.do("p", b"s set_queue q " + " ".join(flags).encode(), b"s subscribe q e")
    lab.do("p", *(b"m%d publish e x" % number for number in range(messages)))
    return lab


def delivered(lab: Lab, consumer: bytes = b"c") -> list[bytes]:
    """The ids of the messages that have come since."""
    start = consumer + b" ok m"
    ids = [line.split(b" ")[2] for line in lab.replies if line.startswith(start)]
    lab.replies.clear()
    return ids


STEPS = st.lists(
    st.sampled_from(("publish", "ack", "reject", "release", "wait")), min_size=20, max_size=60
)


@given(STEPS, st.integers(1, 3))
def test_trials_come_one_by_one_until_an_ack(steps: list[str], most: int) -> None:
    lab = lab_with(f"--breaker={most},10")
    lab.do("c", b"c consume q --manual-ack --prefetch=2")
    ready, held, rejects, now_s = 0, list[bytes](), 0, 0
    trial_s: int | None = None
    for number, step in enumerate(steps):
        if step == "publish":
            ready += 1
            lab.do("p", b"m%d publish e x" % number)
        elif step == "wait":
            now_s += 4
            lab.wait(4)
        elif held:
            lab.do("c", b"a %b c %b" % (step.encode(), held.pop(0)))
            ready += step != "ack"
            if step == "ack":
                rejects, trial_s = 0, None
            elif step == "reject":
                rejects += 1
                if rejects >= most and trial_s is None:
                    trial_s = now_s + 10
        expected = min(ready, 2 - len(held))
        if trial_s is not None:
            expected = min(expected, int(now_s >= trial_s))
            if expected:
                trial_s = now_s + 10
        came = delivered(lab)
        assert len(came) == expected
        ready -= expected
        held += came
        lab.check()


def test_a_trial_that_is_acked_lets_all_others_follow() -> None:
    lab = lab_with("--breaker=3,60", messages=10)
    lab.do("c", b"c consume q --manual-ack --prefetch=4")
    first = delivered(lab)
    lab.do("c", *(b"j reject c " + message for message in first[:3]))
    assert delivered(lab) == []
    assert OPEN in asked(lab)
    lab.wait(30)
    lab.do("c", b"j reject c " + first[3])
    lab.wait(29)
    assert delivered(lab) == []
    lab.wait(1)
    (trial,) = delivered(lab)
    lab.do("c", b"j reject c " + trial)
    lab.wait(59)
    assert delivered(lab) == []
    lab.wait(1)
    (trial,) = delivered(lab)
    lab.do("c", b"a ack c " + trial)
    assert len(delivered(lab)) == 4
    assert CLOSED in asked(lab)


def test_a_trial_that_is_lost_is_followed_by_another() -> None:
    lab = lab_with("--breaker=1,60", messages=2)
    lab.do("c", b"c consume q --manual-ack")
    lab.do("c", b"j reject c m0")
    lab.replies.clear()
    lab.do("d", b"d consume q --manual-ack")
    lab.wait(60)
    assert len(delivered(lab, b"c")) == 1
    lab.end("c")
    assert OPEN in asked(lab)
    assert delivered(lab, b"d") == []
    lab.wait(60)
    assert len(delivered(lab, b"d")) == 1


@pytest.mark.parametrize("how", ["release c m0", "delete_consumer c", "reject --dead c m0"])
def test_what_did_not_fail_does_not_count(how: str) -> None:
    lab = lab_with("--breaker=1,60", messages=2)
    lab.do("c", b"c consume q --manual-ack --prefetch=1")
    lab.do("c", b"x " + how.encode())
    assert OPEN not in asked(lab)


def test_leases_are_trials_too() -> None:
    lab = lab_with("--breaker=1,60", messages=3)
    lab.do("r", b"r receive q --lease=5")
    lease = lab.replies[-2].split(b"lease=")[1].split(b" ")[0].split(b",")[0]
    lab.do("r", b"l lease q %b --reject" % lease)
    assert OPEN in asked(lab)
    lab.wait(60)
    lab.replies.clear()
    lab.do("r", b"r receive q --lease=5 --limit=3")
    assert len(delivered(lab, b"r")) == 1


def test_a_delivery_without_manual_ack_counts_as_its_ack() -> None:
    lab = lab_with("--breaker=1,60", messages=20)
    lab.do("c", b"c consume q --manual-ack --prefetch=1", b"j reject c m0", b"x delete_consumer c")
    lab.do("d", b"d consume q")
    assert delivered(lab, b"d") == []
    lab.wait(60)
    assert len(delivered(lab, b"d")) == 20


def test_a_clock_that_is_set_changes_nothing() -> None:
    lab = lab_with("--breaker=1,60", messages=2)
    lab.do("c", b"c consume q --manual-ack", b"j reject c m0")
    lab.replies.clear()
    lab.wall_ahead_us -= 3_600_000_000
    lab.wait(59)
    assert delivered(lab) == []
    lab.wait(1)
    assert len(delivered(lab)) == 1


def test_a_burst_of_rejects_opens_it_once() -> None:
    lab = lab_with("--breaker=5,60", messages=20_000)
    lab.do("c", b"c consume q --manual-ack")
    assert len(delivered(lab)) == 20_000
    lab.do("c", *(b"j%d reject --confirm c m%d" % (number, number) for number in range(20_000)))
    assert delivered(lab) == []
    lab.wait(600)
    lab.do("p", b"s set_queue q --breaker=")
    assert len(delivered(lab)) == 20_000
    lab.check()


def test_a_queue_without_it_has_no_part_of_it() -> None:
    lab = lab_with("--breaker=1,60", messages=1)
    lab.do("c", b"c consume q --manual-ack", b"j reject c m0")
    queue = lab.broker.queues[b"q"]
    timers = len(lab.broker.schedule)
    lab.do("p", b"s set_queue q --breaker=")
    assert queue.throttle is None
    assert not queue.tracers
    assert len(lab.broker.schedule) < timers
    lab.do("p", b"s set_queue q --breaker=1,60", b"d delete_queue q")
    assert not queue.tracers
    lab.check()


def test_a_trace_leaves_it_where_it_is() -> None:
    lab = lab_with("--breaker=1,60", messages=2)
    lab.do("p", b"t trace q", b"t trace --off")
    lab.do("c", b"c consume q --manual-ack --prefetch=1", b"j reject c m0")
    assert OPEN in asked(lab)
