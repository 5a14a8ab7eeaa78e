"""Everything the protocol has, by many clients, on servers that are killed; and the checker itself.

`python -m tests.chaos 1000` does it at length; `TEST_SEED=n` in the environment repeats a run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mqks.client.messages import DeadLetter, PeekedMessage
from tests.chaos.__main__ import main as run_chaos
from tests.chaos.checker import (
    Checker,
    Consumer,
    Found,
    Link,
    Queue,
    Request,
    Row,
    Violation,
    payload,
)
from tests.chaos.forge import Ledger, Smith, result
from tests.chaos.hermit import Hermit
from tests.chaos.plan import plan
from tests.chaos.play import Chaos, chaos
from tests.chaos.renting import Leases
from tests.chaos.server import check_log
from tests.chaos.ward import QUEUE, Book, Holder
from tests.seeds import printed_seed


@pytest.mark.parametrize(
    ("lives", "texts"),
    [
        (2, False),
        pytest.param(12, False, marks=pytest.mark.slow),
        pytest.param(12, True, marks=pytest.mark.slow),
    ],
    ids=["few", "many", "all texts in files"],
)
def test_lives_of_servers(tmp_path: Path, lives: int, texts: bool) -> None:
    figures = chaos(tmp_path, printed_seed(), lives, seconds=20, texts=texts)
    assert figures.counts["published"]


def test_a_seed_gives_the_same_lives() -> None:
    assert [plan(7, n) for n in range(50)] == [plan(7, n) for n in range(50)]
    assert plan(7, 1) != plan(8, 1)


# ---------------------------------------------------------------- the checker can fail


class Story:
    """A queue `q`, bound to `e`, as clients see it; the checker is told, and no server is there."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.queue = Queue(b"q", [(frozenset([b"e"]), self.checker.start)])
        self.checker.queues[b"q"] = self.queue
        self.alice, self.bob = self.checker.connect(b"alice"), self.checker.connect(b"bob")

    def publish(self, name: bytes, *, confirmed: bool = True, by: Link | None = None) -> Request:
        request = self.checker.publish(by or self.alice, name, b"e")
        if confirmed:
            self.checker.confirmed(request)
        return request

    def consume(self, *, manual: bool = True, by: Link | None = None) -> Consumer:
        link = by or self.bob
        consumer = self.checker.consume(link, b"c-" + link.name, self.queue, manual=manual)
        self.checker.confirmed(consumer.request)
        return consumer

    def delivered(self, consumer: Consumer, name: bytes, retry: int = 0) -> None:
        self.checker.delivered(consumer, name, b"e", retry, payload(name))

    def ack(self, consumer: Consumer, name: bytes, *, confirmed: bool = True) -> None:
        request = self.checker.ack(consumer.link, consumer, name)
        if confirmed:
            self.checker.confirmed(request)

    def purge(self, count: int) -> None:
        request = self.checker.remove(self.alice, self.queue)
        self.checker.removed(self.queue, request, 1 << 62, count)

    def read(self, *rows: Row, end: int) -> None:
        request = self.checker.send(self.alice)
        self.checker.seen(self.queue, request, rows)
        names = {row.name for row in rows}
        self.checker.seen_all(self.queue, request, 1, end, names)

    def restart(self, *rows: Row, events: bytes = b"e", stopped: bool = False) -> None:
        end = max([row.number + 1 for row in rows], default=self.queue.next)
        found = Found(b"epoch", end, frozenset(events.split()), list(rows))
        self.checker.restarted({b"q": found}, stopped=stopped)
        self.alice, self.bob = self.checker.connect(b"alice"), self.checker.connect(b"bob")


def row(number: int, name: bytes, retry: int = 0, attempt: int = 0) -> Row:
    return Row(number, name, b"e", retry, payload(name, attempt))


def kept(story: Story) -> None:
    """What was confirmed is there, and what was not may be."""
    story.publish(b"m1")
    story.publish(b"m2", confirmed=False)
    story.restart(row(1, b"m1"))
    story.publish(b"m3", confirmed=False)
    story.restart(row(1, b"m1"), row(2, b"m3"))


def settled(story: Story) -> None:
    story.publish(b"m1")
    story.publish(b"m2")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.delivered(consumer, b"m2")
    story.ack(consumer, b"m1")
    story.ack(consumer, b"m2", confirmed=False)
    story.restart(row(2, b"m2", 1))


def returned(story: Story) -> None:
    story.publish(b"m1")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.checker.ends(consumer, story.bob)
    story.checker.ended(consumer, seen=True)
    story.delivered(story.consume(by=story.alice), b"m1", 1)


def rejected(story: Story) -> None:
    story.publish(b"m1")
    story.publish(b"m2")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.checker.confirmed(story.checker.reject(story.bob, consumer, b"m1"))
    story.restart(row(2, b"m2"), row(3, b"m1", 1))


def rebound(story: Story) -> None:
    request = story.checker.reshape(story.alice, story.queue, frozenset([b"f"]))
    story.checker.confirmed(request)
    story.restart(events=b"f")


def dropped(story: Story) -> None:
    story.publish(b"m1")
    story.publish(b"m2", confirmed=False)
    story.purge(2)
    story.restart()


def once(story: Story) -> None:
    first = story.checker.publish(story.alice, b"m1", b"e", once=1)
    story.checker.confirmed(first)
    again = story.checker.publish(story.alice, b"m1", b"e", once=2)
    story.checker.confirmed(again)
    story.restart(row(1, b"m1", attempt=1))


@pytest.mark.parametrize("story", [kept, settled, returned, rejected, rebound, dropped, once])
def test_what_holds_is_no_violation(story: Callable[[Story], None]) -> None:
    story(Story())


def lost(story: Story) -> None:
    story.publish(b"m1")
    story.restart()


def lost_before_a_later_one(story: Story) -> None:
    story.publish(b"m1", confirmed=False)
    story.publish(b"m2", confirmed=False)
    story.restart(row(1, b"m2"))


def lost_in_a_stop(story: Story) -> None:
    story.publish(b"m1", confirmed=False)
    story.checker.answered(story.checker.send(story.alice))
    story.restart(stopped=True)


def lost_by_a_reader(story: Story) -> None:
    story.publish(b"m1")
    story.read(end=2)


def doubled(story: Story) -> None:
    story.publish(b"m1")
    story.restart(row(1, b"m1"), row(2, b"m1"))


def delivered_to_two(story: Story) -> None:
    story.publish(b"m1")
    story.delivered(story.consume(), b"m1")
    story.delivered(story.consume(by=story.alice), b"m1")


def delivered_twice(story: Story) -> None:
    story.publish(b"m1")
    consumer = story.consume(manual=False)
    story.delivered(consumer, b"m1")
    story.delivered(consumer, b"m1")


def never_published(story: Story) -> None:
    story.delivered(story.consume(), b"m1")


def changed(story: Story) -> None:
    story.publish(b"m1")
    story.checker.delivered(story.consume(), b"m1", b"e", 0, b"other data")


def reordered(story: Story) -> None:
    story.publish(b"m1")
    story.publish(b"m2")
    story.restart(row(1, b"m2"), row(2, b"m1"))


def delivered_out_of_order(story: Story) -> None:
    story.publish(b"m1", by=story.alice)
    story.publish(b"m2", by=story.bob)
    consumer = story.consume()
    story.delivered(consumer, b"m2")
    story.delivered(consumer, b"m1")


def back_after_a_confirmed_ack(story: Story) -> None:
    story.publish(b"m1")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.ack(consumer, b"m1")
    story.restart(row(1, b"m1", 1))


def back_within_a_life(story: Story) -> None:
    story.publish(b"m1")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.ack(consumer, b"m1")
    story.delivered(consumer, b"m1", 1)


def back_after_two_restarts(story: Story) -> None:
    story.publish(b"m1", confirmed=False)
    story.restart()
    story.restart(row(1, b"m1"))


def back_after_a_purge(story: Story) -> None:
    story.publish(b"m1")
    story.purge(1)
    story.restart(row(1, b"m1"))


def purged_too_few(story: Story) -> None:
    story.publish(b"m1")
    story.purge(0)


def purged_too_many(story: Story) -> None:
    story.publish(b"m1")
    story.purge(2)


def retry_without_a_return(story: Story) -> None:
    story.publish(b"m1")
    story.delivered(story.consume(), b"m1", 1)


def no_retry_after_a_return(story: Story) -> None:
    story.publish(b"m1")
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.checker.ends(consumer, story.bob)
    story.checker.ended(consumer, seen=True)
    story.delivered(story.consume(by=story.alice), b"m1")


def no_retry_after_a_crash(story: Story) -> None:
    story.publish(b"m1")
    story.delivered(story.consume(), b"m1")
    story.publish(b"m2")
    story.restart(row(1, b"m1"), row(2, b"m2"))


def rejected_and_not_moved(story: Story) -> None:
    story.publish(b"m1")
    story.restart(row(1, b"m1"))
    consumer = story.consume()
    story.delivered(consumer, b"m1")
    story.checker.confirmed(story.checker.reject(story.bob, consumer, b"m1"))
    story.restart(row(1, b"m1", 1))


def another_number(story: Story) -> None:
    story.publish(b"m1")
    story.restart(row(1, b"m1"))
    story.restart(row(2, b"m1"))


def a_number_twice(story: Story) -> None:
    story.publish(b"m1")
    story.read(row(1, b"m1"), end=2)
    story.purge(1)
    story.publish(b"m2")
    story.read(row(1, b"m2"), end=2)


def another_epoch(story: Story) -> None:
    story.restart()
    story.checker.told_range(story.queue, b"another", 1, 1, 1)


def binding_lost(story: Story) -> None:
    rebound(story)
    story.restart(events=b"e")


def binding_unconfirmed_after_a_confirmed_one(story: Story) -> None:
    story.checker.reshape(story.alice, story.queue, frozenset([b"f"]))
    story.restart(events=b"g")


def once_twice(story: Story) -> None:
    first = story.checker.publish(story.alice, b"m1", b"e", once=1)
    story.checker.confirmed(first)
    story.checker.publish(story.alice, b"m1", b"e", once=2)
    story.restart(row(1, b"m1", attempt=2))


def refused_and_there(story: Story) -> None:
    story.checker.refused(story.publish(b"m1", confirmed=False))
    story.restart(row(1, b"m1"))


@pytest.mark.parametrize(
    "story",
    [
        *(lost, lost_before_a_later_one, lost_in_a_stop, lost_by_a_reader, doubled),
        *(delivered_to_two, delivered_twice, never_published, changed, reordered),
        *(delivered_out_of_order, back_after_a_confirmed_ack, back_within_a_life),
        *(back_after_two_restarts, back_after_a_purge, purged_too_few, purged_too_many),
        *(retry_without_a_return, no_retry_after_a_return, no_retry_after_a_crash),
        *(rejected_and_not_moved, another_number, a_number_twice, another_epoch, binding_lost),
        *(binding_unconfirmed_after_a_confirmed_one, once_twice, refused_and_there),
    ],
)
def test_a_violation_is_found(story: Callable[[Story], None]) -> None:
    with pytest.raises(Violation):
        story(Story())


def test_a_hermit_finds_what_is_missing() -> None:
    hermit = Hermit("h")
    hermit.base.consume("k1", "c", "h.q1", ["h.e1"], [], None, True, False)
    hermit.base.publish("m1", "h.e1", "data", ["h.q1"])
    there = Found(b"epoch", 2, frozenset([b"h.e1"]), [Row(1, b"m1", b"h.e1", 1, b"data")])
    rules: dict[str, str | None] = {"h.q1": None}
    bound = {"h.q1": {"h.e1"}}
    hermit.restarted({b"h.q1": there}, rules, bound, stopped=False)
    there.rows.clear()
    with pytest.raises(Violation):
        hermit.restarted({b"h.q1": there}, rules, bound, stopped=False)


class WardStory:
    """A message in the ward; the book is told, and no server is there."""

    def __init__(self) -> None:
        self.book = Book()
        self.alice, self.bob = Holder(b"alice", 1), Holder(b"bob", 1)
        self.publish(b"m1")

    def publish(self, name: bytes, *, delay_s: float = 0, ttl_s: float = 0) -> None:
        self.book.published(name, 100.0, delay_s, ttl_s)
        self.book.confirmed(name)

    def deliver(self, holder: Holder, name: bytes = b"m1", *, now: float = 100.0) -> None:
        self.book.delivered(holder, name, payload(name), now)

    def restart(
        self,
        *,
        stopped: bool = False,
        letters: tuple[PeekedMessage, ...] = (),
        **rows: PeekedMessage,
    ) -> None:
        """What is found: `ready` and `scheduled`, at most one each, and letters."""
        places = {place: [rows[place]] if place in rows else [] for place in ("ready", "scheduled")}
        self.book.compare({**places, "dead": [*letters]}, stopped=stopped)


def found(name: bytes, reason: str = "", died: float = 200.0) -> PeekedMessage:
    """As a reader sees it; with a reason, as a dead letter."""
    letter = DeadLetter(reason, QUEUE.decode(), 1, 100.0, died) if reason else None
    return PeekedMessage(1, 100.0, name.decode(), "ward.new", payload(name), 0, {}, letter, None)


def ward_lives(ward: WardStory) -> None:
    ward.restart(ready=found(b"m1"))
    ward.deliver(ward.alice)
    ward.book.rejected(ward.alice, b"m1", 100.0)
    ward.restart(scheduled=found(b"m1"))
    ward.deliver(ward.bob, now=100.1)
    ward.book.rejected(ward.bob, b"m1", 100.1, dead=True)
    ward.restart(letters=(found(b"m1", "dead"),))
    ward.book.hurries()
    ward.book.hurried()
    ward.deliver(ward.alice)
    ward.book.left(ward.alice, unread=False)
    ward.deliver(ward.bob)
    ward.book.acked(ward.bob, b"m1")
    ward.restart()
    ward.restart(ready=found(b"m1"))
    ward.book.settled(b"m1", b"ack", 0)
    ward.restart()


def ward_loses(ward: WardStory) -> None:
    ward.restart()


def ward_loses_in_a_stop(ward: WardStory) -> None:
    ward.book.published(b"m2", 100.0)
    ward.book.received([b"m2"])
    ward.restart(ready=found(b"m1"))  # A crash may.
    ward.restart(ready=found(b"m1"), stopped=True)


def ward_loses_a_rejected(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.book.rejected(ward.alice, b"m1", 100.0, dead=True)
    ward.restart()


def ward_doubles(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.book.rejected(ward.alice, b"m1", 100.0, dead=True)
    ward.restart(ready=found(b"m1"), letters=(found(b"m1", "dead"),))


def ward_has_it_scheduled_and_ready(ward: WardStory) -> None:
    ward.restart(ready=found(b"m1"), scheduled=found(b"m1"))


def ward_brings_back(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.book.acked(ward.alice, b"m1")
    ward.book.settled(b"m1", b"ack", 0)
    ward.restart(ready=found(b"m1"))


def ward_brings_back_a_cancelled_one(ward: WardStory) -> None:
    ward.book.cancelled(b"m1", 1)
    ward.restart(scheduled=found(b"m1"))


def ward_loses_what_was_not_cancelled(ward: WardStory) -> None:
    ward.book.cancelled(b"m1", 0)
    ward.restart()


def ward_is_early(ward: WardStory) -> None:
    ward.publish(b"m2", delay_s=2)
    ward.deliver(ward.alice, b"m2", now=101.9)


def ward_is_early_after_a_restart(ward: WardStory) -> None:
    ward.publish(b"m2", delay_s=2)
    ward.book.begin_again({"ready": [found(b"m1")], "scheduled": [found(b"m2")], "dead": []})
    ward.deliver(ward.alice, b"m2", now=101.9)


def ward_does_not_back_off(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.book.rejected(ward.alice, b"m1", 100.0)
    ward.deliver(ward.alice, now=100.04)


def ward_gives_to_two(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.deliver(ward.bob)


def ward_gives_too_much(ward: WardStory) -> None:
    ward.publish(b"m2")
    ward.deliver(ward.alice)
    ward.deliver(ward.alice, b"m2")


def ward_kills_too_soon(ward: WardStory) -> None:
    for now in (100.0, 101.0):
        ward.deliver(ward.alice, now=now)
        ward.book.rejected(ward.alice, b"m1", now)
    ward.restart(letters=(found(b"m1", "rejects"),))


def ward_counts_a_loss_too_many(ward: WardStory) -> None:
    ward.deliver(ward.alice)
    ward.book.left(ward.alice, unread=False)
    ward.restart(letters=(found(b"m1", "losses"),))


def ward_kills_what_has_no_ttl(ward: WardStory) -> None:
    ward.restart(letters=(found(b"m1", "ttl"),))


def ward_ends_a_ttl_early(ward: WardStory) -> None:
    ward.book.refused(b"m1")
    ward.publish(b"m2", ttl_s=10)
    ward.restart(letters=(found(b"m2", "ttl", died=109.0),))


def ward_has_no_letter(ward: WardStory) -> None:
    ward.restart(letters=(found(b"m1"),))


def test_what_holds_in_the_ward_is_no_violation() -> None:
    ward_lives(WardStory())


@pytest.mark.parametrize(
    "story",
    [
        *(ward_loses, ward_loses_in_a_stop, ward_loses_a_rejected, ward_doubles),
        *(ward_has_it_scheduled_and_ready, ward_brings_back, ward_brings_back_a_cancelled_one),
        *(ward_loses_what_was_not_cancelled, ward_is_early, ward_is_early_after_a_restart),
        *(ward_does_not_back_off, ward_gives_to_two, ward_gives_too_much, ward_kills_too_soon),
        *(ward_counts_a_loss_too_many, ward_kills_what_has_no_ttl, ward_ends_a_ttl_early),
        ward_has_no_letter,
    ],
)
def test_a_violation_in_the_ward_is_found(story: Callable[[WardStory], None]) -> None:
    with pytest.raises(Violation):
        story(WardStory())


class ForgeStory:
    """Two orders of one key, and two workers; one order is certainly there."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.ann, self.ben = Smith(b"ann"), Smith(b"ben")
        for name in (b"o1", b"o2"):
            self.ledger.published(name, 1)
        self.ledger.confirmed(b"o1")
        self.ledger.delivered(self.ann, b"o1")

    def commit(self, name: bytes = b"o1", *, confirmed: bool = True) -> None:
        self.ledger.orders[name].sent = True
        if confirmed:
            self.ledger.committed(name)


MADE = [result(b"o1", part) for part in b"ab"]


def forge_lives(story: ForgeStory) -> None:
    story.ledger.delivered(story.ann, b"o2")
    story.ledger.orders[b"o2"].returning = b"r1"
    story.ledger.delivered(story.ann, b"o2")  # Before its confirm, which is none of this one.
    story.ledger.returned(b"o2", b"r1")
    story.commit()
    story.commit(b"o2", confirmed=False)
    story.ledger.left(story.ann)
    story.ledger.delivered(story.ben, b"o2")
    story.commit(b"o2", confirmed=False)
    story.ledger.compare([b"o2"], MADE)
    story.ledger.delivered(story.ben, b"o2")


def forge_gives_to_two(story: ForgeStory) -> None:
    story.ledger.delivered(story.ben, b"o1")


def forge_breaks_the_order(story: ForgeStory) -> None:
    story.ledger.delivered(story.ben, b"o2")


def forge_goes_on_after_a_reject(story: ForgeStory) -> None:
    story.ledger.orders[b"o1"].returning = b"r1"
    story.ledger.returned(b"o1", b"r1")
    story.ledger.delivered(story.ann, b"o2")


def forge_brings_back(story: ForgeStory) -> None:
    story.commit()
    story.ledger.delivered(story.ann, b"o1")


def forge_loses(story: ForgeStory) -> None:
    story.ledger.compare([], [])


def forge_acks_alone(story: ForgeStory) -> None:
    story.commit(confirmed=False)
    story.ledger.compare([], [])


def forge_publishes_alone(story: ForgeStory) -> None:
    story.commit(confirmed=False)
    story.ledger.compare([b"o1"], MADE)


def forge_does_a_half(story: ForgeStory) -> None:
    story.commit(confirmed=False)
    story.ledger.compare([], MADE[:1])


def forge_does_it_twice(story: ForgeStory) -> None:
    story.commit(confirmed=False)
    story.ledger.compare([], MADE * 2)


def forge_does_what_was_rolled_back(story: ForgeStory) -> None:
    story.ledger.compare([], MADE)


def forge_forgets_a_commit(story: ForgeStory) -> None:
    story.commit()
    story.ledger.compare([b"o1"], [])


def test_what_holds_in_the_forge_is_no_violation() -> None:
    forge_lives(ForgeStory())


@pytest.mark.parametrize(
    "story",
    [
        *(forge_gives_to_two, forge_breaks_the_order, forge_goes_on_after_a_reject),
        *(forge_brings_back, forge_loses, forge_acks_alone, forge_publishes_alone),
        *(forge_does_a_half, forge_does_it_twice, forge_does_what_was_rolled_back),
        forge_forgets_a_commit,
    ],
)
def test_a_violation_in_the_forge_is_found(story: Callable[[ForgeStory], None]) -> None:
    with pytest.raises(Violation):
        story(ForgeStory())


class RentingStory:
    """Two jobs of one key and one of another; the first is leased from 10 to 20."""

    def __init__(self) -> None:
        self.book = Leases()
        for name, key in ((b"j1", 1), (b"j2", 1), (b"j3", 2)):
            self.book.published(name, key)
        self.book.confirmed(b"j1")
        self.given(b"j1", 10)

    def given(self, name: bytes, now: float) -> None:
        self.book.given({name: b"e.1.%d" % now}, now + 10, now)

    def end(self, name: bytes, now: float, count: int = 1, *, ack: bool = True) -> None:
        self.book.asks(name, b"l1", ack=ack)
        self.book.answered(name, b"l1", count, 0, now)


def renting_lives(story: RentingStory) -> None:
    story.given(b"j3", 11)
    story.book.compare([b"j1", b"j3"], [b"j2"], 12)
    story.given(b"j1", 21)
    story.book.given({b"j1": b"e.1.12"}, 22, 21.5)  # Read late.
    story.end(b"j1", 22, ack=False)
    story.given(b"j1", 23)
    story.end(b"j1", 24)
    story.given(b"j2", 25)
    story.end(b"j3", 40, 0)
    story.book.compare([b"j2"], [b"j3"], 41)
    story.book.begin_again([b"j2", b"j3"])


def renting_gives_twice(story: RentingStory) -> None:
    story.given(b"j1", 19)


def renting_breaks_the_order(story: RentingStory) -> None:
    story.given(b"j2", 21)


def renting_goes_on_after_a_reject(story: RentingStory) -> None:
    story.end(b"j1", 11, ack=False)
    story.given(b"j2", 12)


def renting_brings_back(story: RentingStory) -> None:
    story.end(b"j1", 11)
    story.given(b"j1", 30)


def renting_ends_a_lease(story: RentingStory) -> None:
    story.end(b"j1", 11, 0)


def renting_forgets_a_lease(story: RentingStory) -> None:
    story.book.compare([], [b"j1"], 11)


def renting_forgets_an_ack(story: RentingStory) -> None:
    story.end(b"j1", 11)
    story.book.compare([], [b"j1"], 30)


def renting_loses(story: RentingStory) -> None:
    story.book.compare([], [b"j2", b"j3"], 30)


def renting_doubles(story: RentingStory) -> None:
    story.book.compare([b"j1"], [b"j1"], 30)


def test_what_holds_of_leases_is_no_violation() -> None:
    renting_lives(RentingStory())


@pytest.mark.parametrize(
    "story",
    [
        *(renting_gives_twice, renting_breaks_the_order, renting_goes_on_after_a_reject),
        *(renting_brings_back, renting_ends_a_lease, renting_forgets_a_lease),
        *(renting_forgets_an_ack, renting_loses, renting_doubles),
    ],
)
def test_a_violation_of_leases_is_found(story: Callable[[RentingStory], None]) -> None:
    with pytest.raises(Violation):
        story(RentingStory())


@pytest.mark.parametrize(
    "line",
    [
        "Traceback (most recent call last):",
        "time=t level=error event=internal_error reason=r traceback=t",
        "mqks: messages of queue b'q' from 7 are missing",
        "time=t level=warning event=loop_held cpu_ms=1001",
    ],
)
def test_a_fault_in_the_log_is_found(line: str) -> None:
    with pytest.raises(Violation):
        check_log(f"time=t level=info event=starting\n{line}\n")


def test_a_violation_is_printed_as_a_line_before_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def live(self: Chaos, number: int) -> None:
        raise ExceptionGroup("tasks", [Violation("m17 is missing\nof 400 messages")])

    monkeypatch.setattr(Chaos, "live", live)
    with pytest.raises(ExceptionGroup):
        run_chaos(["3", "--seed", "5"])
    begun, violation, kept = capsys.readouterr().out.splitlines()
    assert begun.startswith("seed 5, in ")
    assert violation == "Violation: m17 is missing of 400 messages"
    assert kept.startswith("seed 5, life 0; kept: ")
    shutil.rmtree(kept.partition("kept: ")[2])
