"""Bodies in memory compared with a plain list and a plain dict."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.message import bodies
from mqks.broker.message.bodies import NO_BODY, Returned, Stretch
from tests.compiled import patches_modules

STEPS = st.lists(st.tuples(st.sampled_from("eettplbb"), st.integers(0, 6)), max_size=60)
CALLS = st.lists(st.tuples(st.sampled_from("aaaprf"), st.integers(1, 60)), max_size=80)


@given(STEPS)
def test_a_stretch_is_a_list(steps: list[tuple[str, int]]) -> None:
    stretch, plain = Stretch(), list[bytes]()
    for number, (step, count) in enumerate(steps):
        match step:
            case "e":
                lines = [b"%d %d" % (number, each) for each in range(count)]
                stretch.extend(lines)
                plain += lines
            case "t":
                assert stretch.take(count) == plain[:count]
                del plain[:count]
            case "p":
                taken = stretch.take(count)
                stretch.put_back(taken[1:])
                del plain[: 1 if taken else 0]
            case "l":
                start = max(0, len(plain) - count)
                assert stretch.take_last(count) == plain[start:]
                del plain[start:]
            case "b" if count < len(plain):
                assert stretch.blank(count) == len(plain[count])
                plain[count] = NO_BODY
        assert [*stretch] == plain
        assert [stretch[place] for place in range(len(plain))] == plain
        assert len(stretch) == len(plain)


@patches_modules
@given(CALLS)
def test_returned_messages_are_in_order(calls: list[tuple[str, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "BLOCK", 4)
        returned, plain = Returned(), dict[int, bytes]()
        for call, number in calls:
            match call:
                case "a" if number not in plain:
                    returned.add(number, b"%d" % number)
                    plain[number] = b"%d" % number
                case "p":
                    assert returned.pop(number) == plain.pop(number, None)
                case "f" if plain:
                    first = min(plain)
                    assert returned.pop_first() == (first, plain.pop(first))
            ordered = sorted(plain)
            assert [*returned] == sorted(plain.items())
            assert len(returned) == len(plain)
            assert (number in returned) == (number in plain)
            assert returned.get(number) == plain.get(number)
            assert returned.after(number, 5) == [each for each in ordered if each >= number][:5]
            below = [each for each in ordered if each < number]
            found = returned.before(number)
            assert bool(found) == bool(below)
            assert found == below[len(below) - len(found) :]


def fewest_ns(body: Callable[[int], object], first: int) -> int:
    """The CPU time of a hundred bodies, the least of some tries."""

    def once() -> int:
        start = time.thread_time_ns()
        for number in range(first, first + 100):
            body(number)
        return time.thread_time_ns() - start

    return min(once() for _ in range(20))


def test_a_body_in_the_middle_costs_as_much_as_the_first() -> None:
    stretch, returned = Stretch(), Returned()
    stretch.extend([b"m event=e x"] * 1_000_000)
    for number in range(100_000):
        returned.add(number, NO_BODY)
    for body, middle in ((stretch.__getitem__, 500_000), (returned.get, 50_000)):
        assert fewest_ns(body, middle) < 20 * fewest_ns(body, 0)
