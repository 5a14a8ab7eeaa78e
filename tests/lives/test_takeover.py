"""The checker of take-overs must be able to fail, and so must the brokers without a safeguard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import count
from typing import Self

import pytest

from tests.kit.postgres import installations
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

HAS_PSYCOPG = find_spec("psycopg") is not None
if HAS_PSYCOPG:
    from tests.takeover import namespaces, scenes
    from tests.takeover.play import Play

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

    def add(self, *events: Event) -> Self:
        self.history += events
        return self

    def publish(self, *messages: bytes, link: int = A, confirmed: bool = True) -> Self:
        for message in messages:
            self.add(Sent(link, message, "publish", message))
            if confirmed:
                self.add(Confirmed(link, message))
        return self

    def deliver(self, message: bytes, link: int = B, retry: int = 0) -> Self:
        return self.add(Delivered(link, message, payload(message), retry))

    def settle(self, message: bytes, link: int = B, action: str = "ack") -> Self:
        request = b"r%d" % next(self._requests)
        return self.add(Sent(link, request, action, message), Confirmed(link, request))

    def read(self, *messages: bytes) -> Self:
        return self.add(*(row(next(self._rows), each) for each in messages))

    def take_over(self) -> Self:
        return self.add(Served(NEW, 2))


def row(number: int, message: bytes, epoch: bytes = b"e", reader: int = 0) -> Row:
    return Row(reader, epoch, number, message, payload(message))


MAY_HAPPEN: dict[str, Callable[[Story], Story]] = {
    "all is well": lambda s: (
        s.publish(M).publish(N, confirmed=False).deliver(M).settle(M)
        .add(Stopped(OLD)).publish(b"p.3", confirmed=False).take_over()
        .publish(N, b"q.1", link=C).deliver(N, C).settle(N, C, "reject")
        .deliver(b"q.1", C).settle(b"q.1", C).deliver(N, C, retry=1).settle(N, C)
        .read(M, N, b"q.1").add(Drained())
    ),
    "late confirms of what was durable": lambda s: (
        s.publish(M, confirmed=False).add(Alone()).take_over().add(Confirmed(A, M))
        .publish(N, link=C, confirmed=False).add(Accompanied(), Confirmed(C, N))
    ),
    "refused and published again": lambda s: (
        s.publish(M, b"p.0", confirmed=False).add(Refused(A, b"p.0"), Ended(A))
        .publish(N, M, link=B).read(N, M).deliver(N).deliver(M)
    ),
    "an old owner delivers what is gone": lambda s: (
        s.publish(M).take_over().deliver(M, C).settle(M, C).deliver(M, A)
    ),
}  # fmt: skip

FAULTS: dict[str, tuple[Callable[[Story], Story], str]] = {
    "lost by the queue": (lambda s: s.publish(M).read(M).add(Drained()), "is lost from the queue"),
    "lost after its delivery": (
        lambda s: s.publish(M).deliver(M).read(M).add(Ended(B), Drained()),
        "is lost from the queue",
    ),
    "lost by the log": (
        lambda s: s.publish(M).deliver(M).settle(M).add(Drained()),
        "is lost from the log",
    ),
    "delivered to two": (
        lambda s: s.publish(M).deliver(M, A).deliver(M, B, retry=1),
        "broker 1 has delivered it twice",
    ),
    "delivered to one twice": (
        lambda s: s.publish(M).deliver(M).deliver(M, retry=1),
        "broker 1 has delivered it twice",
    ),
    "rejected and delivered twice": (
        lambda s: s.publish(M).deliver(M).settle(M, B, "reject").deliver(M, B, 1).deliver(M, B, 1),
        "broker 1 has delivered it twice",
    ),
    "again without retry": (
        lambda s: s.publish(M).deliver(M, A).add(Ended(A)).deliver(M, B),
        "again without retry",
    ),
    "out of order": (lambda s: s.publish(M, N).deliver(N).deliver(M), "delivered after 2"),
    "back after its ack": (
        lambda s: s.publish(M).deliver(M).settle(M).add(Ended(B)).deliver(M, A, retry=1),
        "its ack confirmed in 1",
    ),
    "back after a take-over": (
        lambda s: s.publish(M).deliver(M).settle(M).take_over().deliver(M, C),
        "delivered in epoch 2, and its ack confirmed in 1",
    ),
    "never published": (lambda s: s.deliver(M), "nobody has published it"),
    "changed": (lambda s: s.publish(M).add(Delivered(B, M, b"other")), "it has the data b'other'"),
    "read twice": (lambda s: s.publish(M).read(M, M), "the log has it twice"),
    "read backwards": (lambda s: s.publish(M, N).add(row(2, M), row(1, N)), "number 1 after 2"),
    "read out of order": (lambda s: s.publish(M, N).read(N, M), "read after 2"),
    "read under two epochs": (
        lambda s: s.publish(M, N).read(M).add(row(2, N, b"f")),
        "the log has the epochs",
    ),
    "read as another one": (
        lambda s: s.publish(M, N).add(row(1, M), row(1, N, reader=1)),
        "it has number 1, as p.1 had",
    ),
    "confirmed by an old owner": (
        lambda s: s.take_over().publish(M),
        "of epoch 1, which got it when epoch 2 served",
    ),
    "confirmed by an owner that goes on": (
        lambda s: s.add(
            Stopped(OLD), Sent(A, M, "publish", M), Served(NEW, 2), Continued(OLD), Confirmed(A, M)
        ),
        "of epoch 1, which got it when epoch 2 served",
    ),
    "ack confirmed by an old owner": (
        lambda s: s.publish(M).deliver(M).take_over().settle(M),
        "its ack was confirmed by broker 1 of epoch 1",
    ),
    "confirmed while it is stopped": (
        lambda s: s.add(Stopped(OLD)).publish(M),
        "which was stopped",
    ),
    "confirmed without a standby": (lambda s: s.add(Alone()).publish(M), "without a standby"),
}


@pytest.mark.parametrize("tell", MAY_HAPPEN.values(), ids=MAY_HAPPEN)
def test_what_may_happen_is_no_fault(tell: Callable[[Story], Story]) -> None:
    assert faults(tell(Story()).history) == []


@pytest.mark.parametrize(("tell", "what"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(tell: Callable[[Story], Story], what: str) -> None:
    [found] = faults(tell(Story()).history)
    assert what in found


def test_a_long_list_of_faults_ends() -> None:
    story = Story()
    for number in range(2 * SHOWN_MAX):
        story.deliver(b"p.%d" % number)
    assert faults(story.history)[SHOWN_MAX:] == [f"{SHOWN_MAX} more"]


# ------------------------------------------------------------------------------- real servers


needs_postgres = pytest.mark.skipif(
    not (HAS_PSYCOPG and installations()), reason="PostgreSQL or psycopg is not installed"
)


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
    found = faults(scenes.play(getattr(scenes, scene), "" if is_safe else safeguard))
    if is_safe:
        assert found == []
    else:
        assert what in "\n".join(found)


@pytest.mark.slow
@needs_postgres
def test_a_primary_that_lacks_confirmed_messages_is_noticed() -> None:
    [queue, log] = faults(scenes.play(scenes.promoted, databases=3))
    assert queue == "p.1: it was confirmed, and is lost from the queue"
    assert log == "p.1: it was confirmed, and is lost from the log"


@pytest.mark.slow
@needs_postgres
def test_an_owner_whose_segments_were_merged_meanwhile_confirms_nothing() -> None:
    assert faults(scenes.play(scenes.merged)) == []


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("seconds", [2])
def test_an_open_transaction_does_not_slow_commits_down(seconds: float) -> None:
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
    play = Play(16)
    play.run(seconds)
    assert faults(play.history) == []
    assert any(isinstance(event, Drained) for event in play.history)


@pytest.mark.slow
@needs_postgres
@pytest.mark.parametrize("splits", [False, True], ids=["databases", "clients too"])
def test_nothing_is_lost_when_a_cable_is_cut(splits: bool) -> None:
    try:
        history = namespaces.play(splits=splits)
    except namespaces.NamespacesMissing as missing:
        pytest.skip(str(missing))
    assert faults(history) == []
