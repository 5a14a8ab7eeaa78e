"""The circuit breaker of a queue, beside a model that counts.

The one rule: after so many rejects in a row one message is delivered in a time, and the first ack
ends that.
"""

from hypothesis import given
from hypothesis import strategies as st

from tests.kit.lab import Lab


def lab_with(*flags: str, messages: int = 0) -> Lab:
    lab = Lab(1 << 24)
    lab.do("p", b"s set_queue q " + " ".join(flags).encode(), b"s subscribe q e")
    lab.do("p", *(b"m%d publish e x" % number for number in range(messages)))
    return lab


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
        came = lab.delivered(b"c")
        assert len(came) == expected
        ready -= expected
        held += came
        lab.check()


def test_a_burst_of_rejects_opens_it_once() -> None:
    lab = lab_with("--breaker=5,60", messages=3_000)
    lab.do("c", b"c consume q --manual-ack")
    assert len(lab.delivered(b"c")) == 3_000
    lab.do("c", *(b"j%d reject --confirm c m%d" % (number, number) for number in range(3_000)))
    assert lab.delivered(b"c") == []
    lab.wait(600)
    lab.do("p", b"s set_queue q --breaker=")
    assert len(lab.delivered(b"c")) == 3_000
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
    assert lab.stats("queue q")["held_by"] == "breaker"
