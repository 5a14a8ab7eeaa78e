"""What is due at a time: in its order, once, however the clocks go, and in little memory."""

import heapq
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.schedule import RINGS_MAX, WALL_LOOK_S, Alarm, Schedule
from mqks.broker.spine.base.turns import Turns
from tests.kit.memory import allocated

MILLION = 1_000_000
ENTRY_BYTES_MAX = 150
"""So that a million take less than 150 MB."""
YEAR_US = 365 * 86_400 * MILLION


class Clocks:
    def __init__(self) -> None:
        self.s = 100.0
        self.us = 50 * YEAR_US
        self.schedule = Schedule(lambda: self.s, lambda: self.us)
        self.done: list[int] = []

    def run(self) -> list[int]:
        """What is due now."""
        self.done = []
        while self.schedule.run_next():
            pass
        return self.done

    def act(self, key: int = 0) -> None:
        self.done.append(key)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("after"), st.integers(0, 50)),
            st.tuples(st.just("cancel"), st.integers(0, 200)),
            st.tuples(st.just("pass"), st.integers(0, 20)),
        ),
        max_size=200,
    )
)
def test_as_a_heap_of_pairs(steps: list[tuple[str, int]]) -> None:
    clocks = Clocks()
    model: list[tuple[float, int]] = []
    entries: dict[int, int] = {}
    for key, (step, number) in enumerate(steps):
        if step == "after":
            entries[key] = clocks.schedule.after(number, partial(clocks.act, key))
            heapq.heappush(model, (clocks.s + number, key))
        elif step == "cancel" and number in entries:
            clocks.schedule.cancel(entries.pop(number))
            model = [each for each in model if each[1] != number]
            heapq.heapify(model)
        elif step == "pass":
            clocks.s += number
            due = []
            while model and model[0][0] <= clocks.s:
                due.append(heapq.heappop(model)[1])
            told = clocks.run()
            assert sorted(told) == sorted(due)
            for each in told:
                del entries[each]
        assert len(clocks.schedule) == len(model)
        assert clocks.schedule.next_s() == (model[0][0] if model else None)


def test_a_point_of_time_is_met_by_the_wall_clock() -> None:
    clocks = Clocks()
    clocks.schedule.at(clocks.us + 3600 * MILLION, partial(clocks.act, 1))
    clocks.s += 7200.0
    assert clocks.run() == []
    assert clocks.schedule.next_s() == clocks.s + WALL_LOOK_S
    clocks.us += 3600 * MILLION - 1
    assert clocks.run() == []
    clocks.us -= YEAR_US
    assert clocks.run() == []
    clocks.us += 2 * YEAR_US
    assert clocks.schedule.next_s() == clocks.s
    assert clocks.run() == [1]
    assert clocks.schedule.next_s() is None


def test_what_entries_take_in_memory() -> None:
    clocks, count = Clocks(), 20_000
    act = clocks.act
    with allocated() as memory:
        for number in range(count):
            clocks.schedule.at(clocks.us + number * 7_919 % MILLION, act)
    assert memory.bytes < count * ENTRY_BYTES_MAX


def test_what_is_cancelled_is_let_go() -> None:
    clocks = Clocks()
    for _ in range(100):
        entries = [clocks.schedule.after(1000.0, clocks.act) for _ in range(100)]
        for entry in entries:
            clocks.schedule.cancel(entry)
    assert len(clocks.schedule) == 0
    assert len(clocks.schedule._delays.heap) < 1000
    assert len(clocks.schedule._delays.acts) < 1000


class Taker:
    """Waits for `wanted` bytes at a time, and holds them."""

    def __init__(self, budget: Budget, wanted: int, order: list[int]) -> None:
        self.budget, self.wanted, self.order = budget, wanted, order

    def take(self) -> None:
        if self.budget.is_short:
            self.budget.wait(self, self.take)
        else:
            self.budget.take(self.wanted)
            self.order.append(self.wanted)


def test_a_budget_wakes_who_waits_in_their_order() -> None:
    turns = Turns(lambda: 0.0)
    budget, order = Budget(10, turns), list[int]()
    for wanted in (10, 3, 4, 5, 6):
        Taker(budget, wanted, order).take()
    assert order == [10]
    budget.give_back(0)
    assert order == [10]
    budget.give_back(8)
    assert order == [10, 3, 4, 5]
    assert len(budget.waiters) == 1
    late = Taker(budget, 1, order)
    late.take()
    assert order[-1] == 5
    budget.set(0)
    assert order == [10, 3, 4, 5, 6, 1]
    assert budget.waiters == []


def test_who_is_woken_late_is_woken_in_a_later_turn() -> None:
    """As many as there may be: each turn takes its time, and the next one goes on."""
    ticks = iter(range(10_000))
    turns = Turns(lambda: float(next(ticks)))
    turns.chunk_s = 3.0
    budget, order = Budget(1, turns), list[int]()
    budget.take(1)
    for number in range(20):
        budget.wait(number, lambda number=number: order.append(number))  # type: ignore[misc]
    turns.begin()
    budget.give_back(1)
    assert 0 < len(order) < 20
    for _ in range(20):
        turns.begin()
        turns.go_on()
    assert order == list(range(20))


def test_many_that_were_cancelled_keep_nothing_from_being_done() -> None:
    clocks = Clocks()
    entries = [clocks.schedule.after(1.0 + number / 1e4, clocks.act) for number in range(5000)]
    clocks.schedule.after(5.0, partial(clocks.act, 7))
    clocks.schedule.after(100.0, partial(clocks.act, 8))
    for _ in range(5100):
        clocks.schedule.after(200.0, partial(clocks.act, 9))
    for entry in entries:
        clocks.schedule.cancel(entry)
    clocks.s += 10.0
    for _ in range(10):
        due_s = clocks.schedule.next_s()
        assert due_s is not None
        if clocks.run():
            break
    assert clocks.done == [7]
    assert len(clocks.schedule) == 5101


@pytest.mark.parametrize("dated", [False, True])
def test_an_alarm_that_does_nothing_rests(dated: bool) -> None:
    clocks = Clocks()
    begin_us = clocks.us if dated else round(clocks.s * MILLION)
    rings = []

    def ring() -> bool:
        rings.append(clocks.s)
        alarm.set(due_us)
        return has_effect

    def ring_until(seconds: float) -> int:
        clocks.s += seconds
        clocks.us += round(seconds * MILLION)
        rings.clear()
        for _ in range(100):
            clocks.schedule.run_next()
        return len(rings)

    alarm = Alarm(clocks.schedule, ring, dated=dated, what="a test")
    due_us, has_effect = begin_us + MILLION, False
    alarm.set(due_us)
    assert ring_until(1.0) == RINGS_MAX + 1
    assert clocks.schedule.repeats > 0
    assert ring_until(0.9) == 0
    assert ring_until(0.1) == 1
    # It is an alarm as before after something came of it, and at a later moment.
    has_effect = True
    assert ring_until(1.0) == 1
    assert ring_until(1.0) == 100
    has_effect, due_us = False, due_us + 10 * MILLION
    repeats = clocks.schedule.repeats
    assert ring_until(0.0) == 1
    assert clocks.schedule.repeats == repeats
    assert ring_until(10.0) == RINGS_MAX + 1
