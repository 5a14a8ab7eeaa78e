"""Everything the protocol has, by many clients, on servers that are killed; and the checker itself.

`python -m tests.chaos 1000` does it at length; `TEST_SEED=n` in the environment repeats a run.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self

import pytest

from mqks.client.messages import DeadLetter, PeekedMessage
from tests.chaos.__main__ import lives as lives_of
from tests.chaos.__main__ import main as run_chaos
from tests.chaos.checker import (
    Checker,
    Consumer,
    Found,
    Queue,
    Request,
    Row,
    Violation,
    payload,
)
from tests.chaos.desk import JOBS, Bundles, Jobs, Keys
from tests.chaos.forge import Ledger, Smith, result
from tests.chaos.plan import LifePlan
from tests.chaos.play import Chaos
from tests.chaos.renting import Leases
from tests.chaos.server import check_log
from tests.chaos.ward import QUEUE, Book, Holder
from tests.kit.marks import slow
from tests.kit.seeds import printed_seed


@pytest.mark.parametrize(
    ("lives", "texts"),
    [(2, False), *slow((15, False), (15, True))],
    ids=["few", "many", "all texts in files"],
)
def test_lives_of_servers(tmp_path: Path, lives: int, texts: bool) -> None:
    played = lives_of(tmp_path, printed_seed(), lives, seconds=20, texts=texts)
    figures = asyncio.run(played)
    assert figures.counts["published"]


def test_a_seed_gives_the_same_lives() -> None:
    first, again = ([vars(LifePlan(7, n)) for n in range(50)] for _ in range(2))
    assert first == again
    assert first[1] != vars(LifePlan(8, 1))


# ---------------------------------------------------------------- the checker can fail


class Story:
    """A queue `q`, bound to `e`, as clients see it; the checker is told, and no server is there."""

    def __init__(self) -> None:
        self.checker = Checker()
        self.queue = Queue(b"q", [(frozenset([b"e"]), self.checker.start)])
        self.checker.queues[b"q"] = self.queue
        self._connect()

    def _connect(self) -> None:
        self.links = {name: self.checker.connect(name) for name in (b"alice", b"bob")}
        self.alice = self.links[b"alice"]
        self.consumers: dict[bytes, Consumer] = {}

    def _told(self, request: Request, confirmed: bool) -> Self:
        if confirmed:
            self.checker.confirmed(request)
        return self

    def publish(
        self, name: bytes, *, confirmed: bool = True, by: bytes = b"alice", once: int | None = None
    ) -> Self:
        self.last = self.checker.publish(self.links[by], name, b"e", once=once)
        return self._told(self.last, confirmed)

    def refused(self) -> Self:
        self.checker.refused(self.last)
        return self

    def consume(self, by: bytes = b"bob", *, manual: bool = True) -> Self:
        consumer = self.checker.consume(self.links[by], b"c-" + by, self.queue, manual=manual)
        self.consumers[by] = consumer
        return self._told(consumer.request, confirmed=True)

    def deliver(self, name: bytes, retry: int = 0, by: bytes = b"bob", data: bytes = b"") -> Self:
        if by not in self.consumers:
            self.consume(by)
        self.checker.delivered(self.consumers[by], name, b"e", retry, data or payload(name))
        return self

    def ack(self, name: bytes, *, confirmed: bool = True) -> Self:
        consumer = self.consumers[b"bob"]
        return self._told(self.checker.ack(consumer.link, consumer, name), confirmed)

    def reject(self, name: bytes) -> Self:
        consumer = self.consumers[b"bob"]
        return self._told(self.checker.reject(consumer.link, consumer, name), confirmed=True)

    def leave(self) -> Self:
        consumer = self.consumers.pop(b"bob")
        self.checker.ends(consumer, consumer.link)
        self.checker.ended(consumer, seen=True)
        return self

    def rebind(self, event: bytes, *, confirmed: bool = True) -> Self:
        request = self.checker.reshape(self.alice, self.queue, frozenset([event]))
        return self._told(request, confirmed)

    def purge(self, count: int) -> Self:
        request = self.checker.remove(self.alice, self.queue)
        self.checker.removed(self.queue, request, 1 << 62, count)
        return self

    def ask(self) -> Self:
        self.checker.answered(self.checker.send(self.alice))
        return self

    def range(self, epoch: bytes) -> Self:
        self.checker.told_range(self.queue, epoch, 1, 1, 1)
        return self

    def read(self, *rows: Row, end: int) -> Self:
        request = self.checker.send(self.alice)
        self.checker.seen(self.queue, request, rows)
        self.checker.seen_all(self.queue, request, 1, end, {row.name for row in rows})
        return self

    def restart(self, *rows: Row, event: bytes = b"e", stopped: bool = False) -> Self:
        end = max([row.number + 1 for row in rows], default=self.queue.next)
        found = Found(b"epoch", end, frozenset([event]), list(rows))
        self.checker.restarted({b"q": found}, stopped=stopped)
        self._connect()
        return self


def row(number: int, name: bytes, retry: int = 0, attempt: int = 0) -> Row:
    return Row(number, name, b"e", retry, payload(name, attempt))


A, B, ALICE = b"m1", b"m2", b"alice"

HOLDS: dict[str, Callable[[Story], object]] = {
    # What was confirmed is there, and what was not may be.
    "kept": lambda s: (
        s.publish(A).publish(B, confirmed=False).restart(row(1, A))
        .publish(b"m3", confirmed=False).restart(row(1, A), row(2, b"m3"))
    ),
    "settled": lambda s: (
        s.publish(A).publish(B).deliver(A).deliver(B).ack(A).ack(B, confirmed=False)
        .restart(row(2, B, 1))
    ),
    "returned": lambda s: s.publish(A).deliver(A).leave().deliver(A, 1, ALICE),
    "rejected": lambda s: (
        s.publish(A).publish(B).deliver(A).reject(A).restart(row(2, B), row(3, A, 1))
    ),
    "rebound": lambda s: s.rebind(b"f").restart(event=b"f"),
    "dropped": lambda s: s.publish(A).publish(B, confirmed=False).purge(2).restart(),
    "once": lambda s: s.publish(A, once=1).publish(A, once=2).restart(row(1, A, attempt=1)),
}  # fmt: skip

VIOLATIONS: dict[str, Callable[[Story], object]] = {
    "lost": lambda s: s.publish(A).restart(),
    "lost before a later one": lambda s: (
        s.publish(A, confirmed=False).publish(B, confirmed=False).restart(row(1, B))
    ),
    "lost in a stop": lambda s: s.publish(A, confirmed=False).ask().restart(stopped=True),
    "lost by a reader": lambda s: s.publish(A).read(end=2),
    "doubled": lambda s: s.publish(A).restart(row(1, A), row(2, A)),
    "delivered to two": lambda s: s.publish(A).deliver(A).deliver(A, by=ALICE),
    "delivered twice": lambda s: s.publish(A).consume(manual=False).deliver(A).deliver(A),
    "never published": lambda s: s.deliver(A),
    "changed": lambda s: s.publish(A).deliver(A, data=b"other data"),
    "reordered": lambda s: s.publish(A).publish(B).restart(row(1, B), row(2, A)),
    "delivered out of order": lambda s: s.publish(A).publish(B, by=b"bob").deliver(B).deliver(A),
    "back after a confirmed ack": lambda s: s.publish(A).deliver(A).ack(A).restart(row(1, A, 1)),
    "back within a life": lambda s: s.publish(A).deliver(A).ack(A).deliver(A, 1),
    "back after two restarts": lambda s: s.publish(A, confirmed=False).restart().restart(row(1, A)),
    "back after a purge": lambda s: s.publish(A).purge(1).restart(row(1, A)),
    "purged too few": lambda s: s.publish(A).purge(0),
    "purged too many": lambda s: s.publish(A).purge(2),
    "retry without a return": lambda s: s.publish(A).deliver(A, 1),
    "no retry after a return": lambda s: s.publish(A).deliver(A).leave().deliver(A, by=ALICE),
    "no retry after a crash": lambda s: (
        s.publish(A).deliver(A).publish(B).restart(row(1, A), row(2, B))
    ),
    "rejected and not moved": lambda s: (
        s.publish(A).restart(row(1, A)).deliver(A).reject(A).restart(row(1, A, 1))
    ),
    "another number": lambda s: s.publish(A).restart(row(1, A)).restart(row(2, A)),
    "a number twice": lambda s: (
        s.publish(A).read(row(1, A), end=2).purge(1).publish(B).read(row(1, B), end=2)
    ),
    "another epoch": lambda s: s.restart().range(b"another"),
    "binding lost": lambda s: s.rebind(b"f").restart(event=b"f").restart(event=b"e"),
    "binding unconfirmed after a confirmed one": lambda s: s.rebind(b"f", confirmed=False).restart(
        event=b"g"
    ),
    "once twice": lambda s: (
        s.publish(A, once=1).publish(A, once=2, confirmed=False).restart(row(1, A, attempt=2))
    ),
    "refused and there": lambda s: s.publish(A, confirmed=False).refused().restart(row(1, A)),
}


class WardStory:
    """A message in the ward; the book is told, and no server is there."""

    def __init__(self) -> None:
        self.book = Book()
        self.holders = {name: Holder(name, 1) for name in (b"alice", b"bob")}
        self.publish(A)

    def publish(
        self, name: bytes, *, delay_s: float = 0, ttl_s: float = 0, confirmed: bool = True
    ) -> Self:
        self.book.published(name, 100.0, delay_s, ttl_s)
        if confirmed:
            self.book.confirmed(name)
        else:
            self.book.received([name])
        return self

    def refused(self) -> Self:
        self.book.refused(A)
        return self

    def deliver(self, by: bytes = ALICE, name: bytes = A, *, now: float = 100.0) -> Self:
        self.book.delivered(self.holders[by], name, payload(name), now)
        return self

    def reject(self, by: bytes = ALICE, now: float = 100.0, *, dead: bool = False) -> Self:
        self.book.rejected(self.holders[by], A, now, dead=dead)
        return self

    def leave(self) -> Self:
        self.book.left(self.holders[ALICE], unread=False)
        return self

    def ack(self, by: bytes = ALICE) -> Self:
        self.book.acked(self.holders[by], A)
        return self

    def settled(self) -> Self:
        self.book.settled(A, b"ack", 0)
        return self

    def hurry(self) -> Self:
        self.book.hurries()
        self.book.hurried()
        return self

    def cancel(self, count: int) -> Self:
        self.book.cancelled(A, count)
        return self

    def begin_again(self, **rows: PeekedMessage) -> Self:
        self.book.begin_again(self._places(rows))
        return self

    def restart(
        self, *letters: PeekedMessage, stopped: bool = False, **rows: PeekedMessage
    ) -> Self:
        """What is found: `ready` and `scheduled`, at most one each, and letters."""
        self.book.compare(self._places(rows) | {"dead": [*letters]}, stopped=stopped)
        return self

    def _places(self, rows: dict[str, PeekedMessage]) -> dict[str, list[PeekedMessage]]:
        return {
            place: [rows[place]] if place in rows else []
            for place in ("ready", "scheduled", "dead")
        }


def found(name: bytes = A, reason: str = "", died: float = 200.0) -> PeekedMessage:
    """As a reader sees it; with a reason, as a dead letter."""
    letter = DeadLetter(reason, QUEUE.decode(), 1, 100.0, died) if reason else None
    return PeekedMessage(1, 100.0, name.decode(), "ward.new", payload(name), 0, {}, letter, None)


DEAD = found(A, "dead")

HOLDS_IN_THE_WARD: dict[str, Callable[[WardStory], object]] = {
    "lives": lambda s: (
        s.restart(ready=found()).deliver().reject().restart(scheduled=found())
        .deliver(b"bob", now=100.1).reject(b"bob", 100.1, dead=True).restart(DEAD)
        .hurry().deliver().leave().deliver(b"bob").ack(b"bob")
        .restart().restart(ready=found()).settled().restart()
    ),
    "a crash may lose it": lambda s: s.publish(B, confirmed=False).restart(ready=found()),
}  # fmt: skip

VIOLATIONS_IN_THE_WARD: dict[str, Callable[[WardStory], object]] = {
    "loses": lambda s: s.restart(),
    "loses in a stop": lambda s: (
        s.publish(B, confirmed=False).restart(ready=found(), stopped=True)
    ),
    "loses a rejected": lambda s: s.deliver().reject(dead=True).restart(),
    "doubles": lambda s: s.deliver().reject(dead=True).restart(DEAD, ready=found()),
    "scheduled and ready": lambda s: s.restart(ready=found(), scheduled=found()),
    "brings back": lambda s: s.deliver().ack().settled().restart(ready=found()),
    "brings back a cancelled one": lambda s: s.cancel(1).restart(scheduled=found()),
    "loses what was not cancelled": lambda s: s.cancel(0).restart(),
    "early": lambda s: s.publish(B, delay_s=2).deliver(ALICE, B, now=101.9),
    "early after a restart": lambda s: (
        s.publish(B, delay_s=2).begin_again(ready=found(), scheduled=found(B))
        .deliver(ALICE, B, now=101.9)
    ),
    "does not back off": lambda s: s.deliver().reject().deliver(now=100.04),
    "gives to two": lambda s: s.deliver().deliver(b"bob"),
    "gives too much": lambda s: s.publish(B).deliver().deliver(ALICE, B),
    "kills too soon": lambda s: (
        s.deliver().reject().deliver(now=101.0).reject(now=101.0).restart(found(A, "rejects"))
    ),
    "counts a loss too many": lambda s: s.deliver().leave().restart(found(A, "losses")),
    "kills what has no ttl": lambda s: s.restart(found(A, "ttl")),
    "ends a ttl early": lambda s: (
        s.refused().publish(B, ttl_s=10).restart(found(B, "ttl", died=109.0))
    ),
    "has no letter": lambda s: s.restart(found()),
}  # fmt: skip


class ForgeStory:
    """Two orders of one key, and two workers; one order is certainly there."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.smiths = {name: Smith(name) for name in (b"ann", b"ben")}
        for name in (b"o1", b"o2"):
            self.ledger.published(name, 1)
        self.ledger.confirmed(b"o1")
        self.deliver(b"o1")

    def deliver(self, name: bytes, to: bytes = b"ann") -> Self:
        self.ledger.delivered(self.smiths[to], name)
        return self

    def returning(self, name: bytes) -> Self:
        self.ledger.orders[name].returning = b"r1"
        return self

    def returned(self, name: bytes) -> Self:
        self.ledger.returned(name, b"r1")
        return self

    def leave(self) -> Self:
        self.ledger.left(self.smiths[b"ann"])
        return self

    def commit(self, name: bytes = b"o1", *, confirmed: bool = True) -> Self:
        self.ledger.orders[name].sent = True
        if confirmed:
            self.ledger.committed(name)
        return self

    def compare(self, orders: list[bytes], results: list[bytes]) -> Self:
        self.ledger.compare(orders, results)
        return self


MADE = [result(b"o1", part) for part in b"ab"]

HOLDS_IN_THE_FORGE: dict[str, Callable[[ForgeStory], object]] = {
    "lives": lambda s: (
        s.deliver(b"o2").returning(b"o2")
        .deliver(b"o2")  # Before its confirm, which is none of this one.
        .returned(b"o2").commit().commit(b"o2", confirmed=False).leave()
        .deliver(b"o2", b"ben").commit(b"o2", confirmed=False).compare([b"o2"], MADE)
        .deliver(b"o2", b"ben")
    )
}  # fmt: skip

VIOLATIONS_IN_THE_FORGE: dict[str, Callable[[ForgeStory], object]] = {
    "gives to two": lambda s: s.deliver(b"o1", b"ben"),
    "breaks the order": lambda s: s.deliver(b"o2", b"ben"),
    "goes on after a reject": lambda s: s.returning(b"o1").returned(b"o1").deliver(b"o2"),
    "brings back": lambda s: s.commit().deliver(b"o1"),
    "loses": lambda s: s.compare([], []),
    "acks alone": lambda s: s.commit(confirmed=False).compare([], []),
    "publishes alone": lambda s: s.commit(confirmed=False).compare([b"o1"], MADE),
    "does a half": lambda s: s.commit(confirmed=False).compare([], MADE[:1]),
    "does it twice": lambda s: s.commit(confirmed=False).compare([], MADE * 2),
    "does what was rolled back": lambda s: s.compare([], MADE),
    "forgets a commit": lambda s: s.commit().compare([b"o1"], []),
}


class RentingStory:
    """Two jobs of one key and one of another; the first is leased from 10 to 20."""

    def __init__(self) -> None:
        self.book = Leases()
        for name, key in ((b"j1", 1), (b"j2", 1), (b"j3", 2)):
            self.book.published(name, key)
        self.book.confirmed(b"j1")
        self.give(b"j1", 10)

    def give(self, name: bytes, at: int, until: int = 0, *, now: float = 0) -> Self:
        self.book.given({name: b"e.1.%d" % at}, until or at + 10, now or at)
        return self

    def end(self, name: bytes, now: float, count: int = 1, *, ack: bool = True) -> Self:
        self.book.asks(name, b"l1", ack=ack)
        self.book.answered(name, b"l1", count, 0, now)
        return self

    def compare(self, ready: list[bytes], leased: list[bytes], now: float) -> Self:
        self.book.compare(ready, leased, now)
        return self


HOLDS_OF_LEASES: dict[str, Callable[[RentingStory], object]] = {
    "lives": lambda s: (
        s.give(b"j3", 11).compare([b"j1", b"j3"], [b"j2"], 12).give(b"j1", 21)
        .give(b"j1", 12, 22, now=21.5)  # Read late.
        .end(b"j1", 22, ack=False).give(b"j1", 23).end(b"j1", 24).give(b"j2", 25)
        .end(b"j3", 40, 0).compare([b"j2"], [b"j3"], 41).book.begin_again([b"j2", b"j3"])
    )
}  # fmt: skip

VIOLATIONS_OF_LEASES: dict[str, Callable[[RentingStory], object]] = {
    "gives twice": lambda s: s.give(b"j1", 19),
    "breaks the order": lambda s: s.give(b"j2", 21),
    "goes on after a reject": lambda s: s.end(b"j1", 11, ack=False).give(b"j2", 12),
    "brings back": lambda s: s.end(b"j1", 11).give(b"j1", 30),
    "ends a lease": lambda s: s.end(b"j1", 11, 0),
    "forgets a lease": lambda s: s.compare([], [b"j1"], 11),
    "forgets an ack": lambda s: s.end(b"j1", 11).compare([], [b"j1"], 30),
    "loses": lambda s: s.compare([], [b"j2", b"j3"], 30),
    "doubles": lambda s: s.compare([b"j1"], [b"j1"], 30),
}


class DeskStory:
    """A message of key 1 that is there, a job that waits, and a batch of two, which is closed."""

    def __init__(self) -> None:
        self.keys, self.jobs, self.bundles = Keys(), Jobs(), Bundles()
        self.sync(b"u1").jobs.published(b"j1")
        self.jobs.confirmed(b"j1")
        self.bundle(b"b1")
        for member in (b"b1/0", b"b1/1"):
            self.bundles.confirmed(member)

    def sync(self, name: bytes, told: bytes | None = b"", *, replaces: bool = False) -> Self:
        self.keys.published(name, 1, replaces=replaces)
        if told is not None:
            self.keys.told(name, told)
        return self

    def bundle(self, name: bytes, *, together: bool = False, closed: bool = True) -> Self:
        self.bundles.opened(name, 2, together=together)
        self.bundles.bundles[name].closing = True
        if closed:
            self.bundles.closed(name)
        return self

    def ack(self, name: bytes, *, confirmed: bool = True) -> Self:
        book = {b"u": self.keys, b"j": self.jobs, b"b": self.bundles}[name[:1]]
        for do in (book.delivered, book.asks, *([book.acked] if confirmed else [])):  # type: ignore[attr-defined]
            do(name)
        return self

    def cancel(self, told: bytes) -> Self:
        self.jobs.asks(b"j1", b"cancelled")
        self.jobs.cancelled(b"j1", told)
        return self

    def syncs(self, **there: int) -> Self:
        self.keys.compare({name.encode(): retry for name, retry in there.items()})
        return self

    def result(self, told: bytes) -> Self:
        self.jobs.compare({b"j1": told})
        return self

    def begin_again(self, ends: tuple[bytes, ...]) -> Self:
        self.bundles.begin_again([], [*ends])
        return self

    def rows(self, *rows: bytes, ends: tuple[bytes, ...] = ()) -> Self:
        self.bundles.compare([*rows], [*ends])
        return self


ROWS, ENDED = (b"b1/0", b"b1/1"), (b"b1:end",)
RESULT = b"done %b j1" % JOBS

HOLDS_AT_THE_DESK: dict[str, Callable[[DeskStory], object]] = {
    "keys": lambda s: (
        s.syncs(u1=0).sync(b"u2", b"duplicate u1").syncs(u1=1)
        .sync(b"u3", b"replaced u1", replaces=True).syncs(u3=0)
        .sync(b"u4", None, replaces=True).syncs(u4=0).syncs(u3=0).syncs()
        .ack(b"u3", confirmed=False).sync(b"u5").syncs(u5=0)
    ),
    "jobs": lambda s: (
        s.result(b"waiting q").cancel(b"held").result(b"waiting q")
        .ack(b"j1", confirmed=False).result(b"waiting q").result(RESULT)
        .ack(b"j1").result(RESULT)
    ),
    "batches": lambda s: (
        s.rows(*ROWS).ack(ROWS[0]).rows(ROWS[1]).ack(ROWS[1], confirmed=False).rows(ROWS[1])
        .rows(ends=ENDED).bundle(b"b2", together=True, closed=False).rows(ends=ENDED)
        .rows(b"b2/0", b"b2/1", ends=ENDED)
    ),
}  # fmt: skip

VIOLATIONS_AT_THE_DESK: dict[str, Callable[[DeskStory], object]] = {
    "puts two of a key": lambda s: s.sync(b"u2"),
    "keeps two of a key": lambda s: s.sync(b"u2", None).syncs(u1=0, u2=0),
    "loses a unique one": lambda s: s.syncs(),
    "replaces what is gone": lambda s: (
        s.ack(b"u1").sync(b"u2", b"replaced u1", replaces=True)
    ),
    "replaces unasked": lambda s: s.sync(b"u2", b"replaced u1"),
    "brings back what was replaced": lambda s: (
        s.sync(b"u2", b"replaced u1", replaces=True).syncs(u1=0)
    ),
    "forgets a result": lambda s: s.ack(b"j1").result(b"none"),
    "forgets its end": lambda s: s.ack(b"j1").result(b"waiting q"),
    "has another result": lambda s: s.ack(b"j1").result(RESULT + b"2"),
    "has a result of none": lambda s: s.result(RESULT),
    "loses a job": lambda s: s.result(b"none"),
    "gives what was cancelled": lambda s: s.cancel(b"cancelled").ack(b"j1"),
    "cancels what was done": lambda s: s.ack(b"j1").cancel(b"cancelled"),
    "forgets a cancel": lambda s: s.cancel(b"cancelled").result(b"waiting q"),
    "ends early": lambda s: s.ack(ROWS[0]).rows(ROWS[1], ends=ENDED),
    "ends without acks": lambda s: s.ack(ROWS[0]).rows(ends=ENDED),
    "ends twice": lambda s: s.ack(ROWS[0]).ack(ROWS[1]).rows(ends=ENDED * 2),
    "never ends": lambda s: s.ack(ROWS[0]).ack(ROWS[1]).rows(),
    "loses a member": lambda s: s.rows(ROWS[0]),
    "brings back a member": lambda s: s.ack(ROWS[0]).rows(*ROWS),
    "does a half": lambda s: (
        s.bundle(b"b2", together=True, closed=False).rows(*ROWS, b"b2/0")
    ),
    "loses what follows": lambda s: (
        s.ack(ROWS[0]).ack(ROWS[1]).rows(ends=ENDED).begin_again(ENDED).rows()
    ),
}  # fmt: skip


TABLES: list[tuple[type, dict[str, Any], dict[str, Any]]] = [
    (Story, HOLDS, VIOLATIONS),
    (WardStory, HOLDS_IN_THE_WARD, VIOLATIONS_IN_THE_WARD),
    (ForgeStory, HOLDS_IN_THE_FORGE, VIOLATIONS_IN_THE_FORGE),
    (RentingStory, HOLDS_OF_LEASES, VIOLATIONS_OF_LEASES),
    (DeskStory, HOLDS_AT_THE_DESK, VIOLATIONS_AT_THE_DESK),
]


@pytest.mark.parametrize(
    ("kind", "tell", "told"),
    [
        pytest.param(kind, tell, told, id=f"{kind.__name__}: {name}")
        for kind, holds, violations in TABLES
        for told, table in ((nullcontext(), holds), (pytest.raises(Violation), violations))
        for name, tell in table.items()
    ],
)
def test_a_violation_is_found_and_what_holds_is_none(
    kind: type, tell: Callable[[Any], object], told: AbstractContextManager[Any]
) -> None:
    story = kind()
    with told:
        tell(story)


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
    async def live(self: Chaos, number: int) -> None:
        raise ExceptionGroup("tasks", [Violation("m17 is missing\nof 400 messages")])

    monkeypatch.setattr(Chaos, "live", live)
    with pytest.raises(ExceptionGroup):
        run_chaos(["3", "--seed", "5"])
    begun, violation, kept = capsys.readouterr().out.splitlines()
    assert begun.startswith("seed 5, in ")
    assert violation == "Violation: m17 is missing of 400 messages"
    assert kept.startswith("seed 5, life 0; kept: ")
    shutil.rmtree(kept.partition("kept: ")[2])
