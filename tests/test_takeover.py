"""The checker of take-overs must be able to fail, and so must the brokers without a safeguard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

import pytest

from tests.postgres import installations
from tests.takeover.checker import (
    SHOWN_MAX,
    Accompanied,
    Alone,
    Confirmed,
    Continued,
    Delivered,
    Drained,
    Ended,
    Event,
    Opened,
    Refused,
    Row,
    Sent,
    Served,
    Stopped,
    faults,
    payload,
)

OLD, NEW = 1, 2
"""Brokers; the new one has the epoch 2."""
A, B, C = 1, 2, 3
"""Connections: to the old one, to the old one, to the new one."""
M, N = b"p.1", b"p.2"


class Story:
    """Events of a history, one after the other."""

    def __init__(self) -> None:
        self.history: list[Event] = [Served(OLD, 1), Opened(A, OLD), Opened(B, OLD), Opened(C, NEW)]
        self._requests = count(1)
        self._rows = count(1)

    def add(self, *events: Event) -> None:
        self.history += events

    def publish(self, message: bytes, link: int = A, *, confirmed: bool = True) -> None:
        self.add(Sent(link, message, "publish", message))
        if confirmed:
            self.add(Confirmed(link, message))

    def deliver(self, message: bytes, link: int = B, retry: int = 0) -> None:
        self.add(Delivered(link, message, payload(message), retry))

    def settle(
        self, message: bytes, link: int = B, action: str = "ack", *, confirmed: bool = True
    ) -> None:
        request = b"r%d" % next(self._requests)
        self.add(Sent(link, request, action, message))
        if confirmed:
            self.add(Confirmed(link, request))

    def read(self, *messages: bytes, reader: int = 0) -> None:
        for message in messages:
            self.add(Row(reader, b"e", next(self._rows), message, payload(message)))

    def take_over(self) -> None:
        self.add(Served(NEW, 2))


def all_is_well(story: Story) -> None:
    story.publish(M)
    story.publish(N, confirmed=False)
    story.deliver(M)
    story.settle(M)
    story.add(Stopped(OLD))
    story.publish(b"p.3", confirmed=False)
    story.take_over()
    story.publish(N, C)
    story.publish(b"q.1", C)
    story.deliver(N, C)
    story.settle(N, C, "reject")
    story.deliver(b"q.1", C)
    story.settle(b"q.1", C)
    story.deliver(N, C, retry=1)
    story.settle(N, C)
    story.read(M, N, b"q.1")
    story.add(Drained())


def lost_by_the_queue(story: Story) -> None:
    story.publish(M)
    story.read(M)
    story.add(Drained())


def lost_after_its_delivery(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.read(M)
    story.add(Ended(B), Drained())


def lost_by_the_log(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.settle(M)
    story.add(Drained())


def delivered_to_two(story: Story) -> None:
    story.publish(M)
    story.deliver(M, A)
    story.deliver(M, B, retry=1)


def delivered_to_one_twice(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.deliver(M, retry=1)


def rejected_and_delivered_twice(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.settle(M, action="reject")
    story.deliver(M, retry=1)
    story.deliver(M, retry=1)


def again_without_retry(story: Story) -> None:
    story.publish(M)
    story.deliver(M, A)
    story.add(Ended(A))
    story.deliver(M, B)


def out_of_order(story: Story) -> None:
    story.publish(M)
    story.publish(N)
    story.deliver(N)
    story.deliver(M)


def back_after_its_ack(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.settle(M)
    story.add(Ended(B))
    story.deliver(M, A, retry=1)


def back_after_a_take_over(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.settle(M)
    story.take_over()
    story.deliver(M, C)


def never_published(story: Story) -> None:
    story.deliver(M)


def changed(story: Story) -> None:
    story.publish(M)
    story.add(Delivered(B, M, b"other"))


def read_twice(story: Story) -> None:
    story.publish(M)
    story.read(M, M)


def read_backwards(story: Story) -> None:
    story.publish(M)
    story.publish(N)
    story.add(Row(0, b"e", 2, M, payload(M)), Row(0, b"e", 1, N, payload(N)))


def read_out_of_order(story: Story) -> None:
    story.publish(M)
    story.publish(N)
    story.read(N, M)


def read_under_two_epochs(story: Story) -> None:
    story.publish(M)
    story.publish(N)
    story.read(M)
    story.add(Row(0, b"f", 2, N, payload(N)))


def read_as_another_one(story: Story) -> None:
    story.publish(M)
    story.publish(N)
    story.add(Row(0, b"e", 1, M, payload(M)), Row(1, b"e", 1, N, payload(N)))


def confirmed_by_an_old_owner(story: Story) -> None:
    story.take_over()
    story.publish(M)


def confirmed_by_an_owner_that_goes_on(story: Story) -> None:
    story.add(Stopped(OLD))
    story.publish(M, confirmed=False)
    story.take_over()
    story.add(Continued(OLD), Confirmed(A, M))


def ack_confirmed_by_an_old_owner(story: Story) -> None:
    story.publish(M)
    story.deliver(M)
    story.take_over()
    story.settle(M)


def confirmed_while_it_is_stopped(story: Story) -> None:
    story.add(Stopped(OLD))
    story.publish(M)


def confirmed_without_a_standby(story: Story) -> None:
    story.add(Alone())
    story.publish(M)


def late_confirms_of_what_was_durable(story: Story) -> None:
    story.publish(M, confirmed=False)
    story.add(Alone())
    story.take_over()
    story.add(Confirmed(A, M))
    story.publish(N, C, confirmed=False)
    story.add(Accompanied(), Confirmed(C, N))


def refused_and_published_again(story: Story) -> None:
    story.publish(M, confirmed=False)
    story.publish(b"p.0", confirmed=False)
    story.add(Refused(A, b"p.0"), Ended(A))
    story.publish(N, B)
    story.publish(M, B)
    story.read(N, M)
    story.deliver(N)
    story.deliver(M)


def an_old_owner_delivers_what_is_gone(story: Story) -> None:
    story.publish(M)
    story.take_over()
    story.deliver(M, C)
    story.settle(M, C)
    story.deliver(M, A)


@pytest.mark.parametrize(
    "story",
    [
        *(all_is_well, late_confirms_of_what_was_durable, refused_and_published_again),
        an_old_owner_delivers_what_is_gone,
    ],
)
def test_what_may_happen_is_no_fault(story: Callable[[Story], None]) -> None:
    told = Story()
    story(told)
    assert faults(told.history) == []


@pytest.mark.parametrize(
    ("story", "what"),
    [
        (lost_by_the_queue, "is lost from the queue"),
        (lost_after_its_delivery, "is lost from the queue"),
        (lost_by_the_log, "is lost from the log"),
        (delivered_to_two, "broker 1 has delivered it twice"),
        (delivered_to_one_twice, "broker 1 has delivered it twice"),
        (rejected_and_delivered_twice, "broker 1 has delivered it twice"),
        (again_without_retry, "again without retry"),
        (out_of_order, "delivered after 2"),
        (back_after_its_ack, "its ack confirmed in 1"),
        (back_after_a_take_over, "delivered in epoch 2, and its ack confirmed in 1"),
        (never_published, "nobody has published it"),
        (changed, "it has the data b'other'"),
        (read_twice, "the log has it twice"),
        (read_backwards, "number 1 after 2"),
        (read_out_of_order, "read after 2"),
        (read_under_two_epochs, "the log has the epochs"),
        (read_as_another_one, "it has number 1, as p.1 had"),
        (confirmed_by_an_old_owner, "of epoch 1, which got it when epoch 2 served"),
        (confirmed_by_an_owner_that_goes_on, "of epoch 1, which got it when epoch 2 served"),
        (ack_confirmed_by_an_old_owner, "its ack was confirmed by broker 1 of epoch 1"),
        (confirmed_while_it_is_stopped, "which was stopped"),
        (confirmed_without_a_standby, "without a standby"),
    ],
)
def test_a_fault_is_found(story: Callable[[Story], None], what: str) -> None:
    told = Story()
    story(told)
    [found] = faults(told.history)
    assert what in found


def test_a_long_list_of_faults_ends() -> None:
    story = Story()
    for number in range(2 * SHOWN_MAX):
        story.deliver(b"p.%d" % number)
    assert faults(story.history)[SHOWN_MAX:] == [f"{SHOWN_MAX} more"]


# ------------------------------------------------------------------------------- real servers


needs_postgres = pytest.mark.skipif(not installations(), reason="PostgreSQL is not installed")


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize(
    ("scene", "safeguard", "what"),
    [
        ("suspended", "condition", "of epoch 1, which got it when epoch 2 served"),
        ("canceled", "warnings", "it was confirmed, and is lost from the queue"),
        ("terminated", "beat", "it was confirmed, and is lost from the queue"),
        ("unnamed", "look", "was confirmed by broker 1 without a standby"),
    ],
)
@pytest.mark.parametrize("is_safe", [True, False], ids=["safe", "without"])
def test_each_safeguard_is_needed(scene: str, safeguard: str, what: str, is_safe: bool) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover import scenes

    found = faults(scenes.play(getattr(scenes, scene), "" if is_safe else safeguard))
    if is_safe:
        assert found == []
    else:
        assert what in "\n".join(found)


@pytest.mark.slow
@needs_postgres
def test_a_primary_that_lacks_confirmed_messages_is_noticed() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover import scenes

    [queue, log] = faults(scenes.play(scenes.promoted, databases=3))
    assert queue == "p.1: it was confirmed, and is lost from the queue"
    assert log == "p.1: it was confirmed, and is lost from the log"


@pytest.mark.slow
@needs_postgres
def test_an_owner_whose_segments_were_merged_meanwhile_confirms_nothing() -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover import scenes

    assert faults(scenes.play(scenes.merged)) == []


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("seconds", [2])
def test_an_open_transaction_does_not_slow_commits_down(seconds: float) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover import scenes

    paces: list[scenes.Pace] = []
    scene = partial(scenes.held_open, seconds=seconds, tell=paces.append)
    assert faults(scenes.play(scene)) == []
    pages = paces[-1].table_bytes / 8192
    assert pages > 15, "no version of the row was kept"
    assert paces[-1].pages_read < pages / 2


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("seconds", [60])
def test_nothing_is_lost_under_faults(seconds: int) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover.play import Play

    play = Play(16)
    play.run(seconds)
    assert faults(play.history) == []
    assert any(isinstance(event, Drained) for event in play.history)


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("splits", [False, True], ids=["databases", "clients too"])
def test_nothing_is_lost_when_a_cable_is_cut(splits: bool) -> None:
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    from tests.takeover import namespaces

    try:
        history = namespaces.play(splits=splits)
    except namespaces.NamespacesMissing as missing:
        pytest.skip(str(missing))
    assert faults(history) == []
