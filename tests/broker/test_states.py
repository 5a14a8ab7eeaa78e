"""The table of a message's states: what is drawn of it, and what is decided by it."""

from itertools import product

import pytest

from mqks.broker.features.death.fates import fate
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.message.states import AFTER, DEATHS, Event, State
from mqks.broker.spine.queue.shared import REASONS
from mqks.protocol.requests import Backoff
from tools.states import PAGE, drawn


def test_the_picture_is_made_of_the_table() -> None:
    page = PAGE.read_text()
    assert drawn(page) == page, "run: python -m tools.states"


def test_every_event_leads_somewhere_and_every_state_is_left() -> None:
    assert {event for _, event in AFTER} == {*Event}
    assert {state for state, _ in AFTER} == {*State} == {*AFTER.values()}


def test_reasons_of_death_are_those_that_are_counted() -> None:
    assert {event.value for event in DEATHS} == {*REASONS}


RETURNS = {Event.REJECT, Event.KILL, Event.RELEASE, Event.LOSS, Event.END}
"""How a consumer gives back a message."""


@pytest.mark.parametrize("event", sorted(RETURNS, key=str))
def test_whatever_a_consumer_does_the_table_has_what_follows(event: Event) -> None:
    marks = Mark(), Mark(3, 2, 1, 1, True), Mark(9, 8, 4, 4)
    rules = (
        Policy(),
        Policy(retries=2, losses=2),
        Policy(backoff=Backoff(1, 60)),
        Policy(deliveries=3),
    )
    for mark, each, is_overdue, delay_us in product(marks, rules, (False, True), (0, 5)):
        found = fate(event, mark, each, b"m event=e x", 0, is_overdue=is_overdue, delay_us=delay_us)
        after = AFTER[State.UNACKED, found.event]
        assert (after is State.SCHEDULED) == (found.wait_us > 0)
        assert after is State.DEAD or not (is_overdue or event is Event.KILL)
