"""Unique messages, jobs whose results are kept, and batches, while the server is killed.

Three books decide, without IO. `Keys`: of each unique key one message waits. `Jobs`: a result, or a
cancel, that was confirmed is there afterwards, and what has ended does not come back. `Bundles`:
what follows a batch is there once, not before each of its messages is acked, and not never. `Desk`
plays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.scene import Book, Item, Known, M, Scene, doing, each_once, ids, told
from tests.chaos.wire import Life, Wire

SYNCS, JOBS, ROWS, ENDS = QUEUES = b"desk.syncs", b"desk.jobs", b"desk.rows", b"desk.ends"
Rows = list[PeekedMessage]
KEYS, WAITING_MAX, WORKERS = 8, 60, 2
LASTING_KEYS = 4
"""Those below this number are held until their message is acked, others until its delivery."""


@dataclass(slots=True, eq=False)
class Sync(Item):
    key: int = 0
    replaces: bool = False
    rivals: list[bytes] = field(default_factory=list)
    """Others of its key that may have been there when it was sent."""
    answered: bool = False


class AckedBook(Book[M]):
    def delivered(self, name: bytes) -> None:
        self.comes(name).asked.discard(b"done")

    def acked(self, name: bytes) -> None:
        self.items[name].ended = b"done"


class Keys(AckedBook[Sync]):
    def __init__(self) -> None:
        super().__init__()
        self.goes_on: dict[bytes, Callable[[], bool]] = {}
        """Whether the connection of its ack does, with which an ack may be lost."""

    def _of(self, key: int) -> dict[bytes, Sync]:
        return {name: each for name, each in self.items.items() if each.key == key}

    def published(self, name: bytes, key: int, *, replaces: bool = False) -> None:
        rivals = [other for other, each in self._of(key).items() if not each.ended]
        self.items[name] = Sync(key=key, replaces=replaces, rivals=rivals)

    def told(self, name: bytes, answer: bytes) -> None:
        sync, (word, _, other) = self.items[name], answer.partition(b" ")
        sync.answered = True
        if word not in (b"", b"duplicate", b"replaced"):
            raise Violation(f"{name!r} is told {answer!r}")
        if other and other not in sync.rivals:
            raise Violation(f"{name!r} is told {answer!r}, which was not there")
        if word == b"replaced":
            if not sync.replaces or (self.items[other].asked and self.goes_on[other]()):
                raise Violation(f"{name!r} has replaced {other!r}")
            self.items[other].ended = word
        elif not word and sync.key < LASTING_KEYS:
            for rival in sync.rivals:
                if self.is_due(self.items[rival]):
                    raise Violation(f"{name!r} is beside {rival!r}, which has its key")
        sync.sure, sync.ended = word != b"duplicate", word if word == b"duplicate" else b""

    def is_due(self, item: Sync) -> bool:
        rivals = self._of(item.key).values()
        may_be_replaced = any(each.replaces and not each.answered for each in rivals)
        return super().is_due(item) and not may_be_replaced

    def compare(self, there: dict[bytes, int]) -> None:
        """All that is there after a start, and its retries."""
        held = Counter[int]()
        for name in self.look(there):
            key = self.items[name].key
            held[key] += key < LASTING_KEYS or not there[name]
        if twice := [key for key, count in held.items() if count > 1]:
            raise Violation(f"of the keys {twice} several messages wait: {there}")

    def begin_again(self, there: Iterable[bytes]) -> None:
        for sync in self.keep(there):
            sync.replaces, sync.rivals, sync.answered = False, [], True


class Jobs(AckedBook[Item]):
    def published(self, name: bytes) -> None:
        self.items[name] = Item()

    def cancelled(self, name: bytes, answer: bytes) -> None:
        if answer == b"cancelled":
            self.comes(name).ended = answer
        elif answer in (b"held", b"none"):
            self.items[name].asked.discard(b"cancelled")
        else:
            raise Violation(f"the cancel of {name!r} is told {answer!r}")

    def compare(self, told: dict[bytes, bytes]) -> None:
        """What `result` tells of each after a start."""
        for name, job in self.items.items():
            state, _, rest = told[name].partition(b" ")
            is_open = state == b"waiting" or (state == b"none" and not job.sure)
            if state != job.ended if job.ended else not (is_open or state in job.asked):
                raise Violation(f"{name!r} was {[job.ended, *job.asked]}, and is {told[name]!r}")
            if state == b"done" and rest != JOBS + b" " + name:
                raise Violation(f"the result of {name!r} is {rest!r}")

    def begin_again(self, told: dict[bytes, bytes]) -> None:
        self.keep([name for name in self.items if told[name].startswith(b"waiting")])


@dataclass(slots=True, eq=False)
class Bundle:
    members: list[bytes]
    together: bool
    """It was opened, filled and closed in one transaction."""
    closing: bool = False
    closed: bool = False
    """That was confirmed."""


class Bundles(AckedBook[Item]):
    """With those that have ended. Its items are the members."""

    def __init__(self) -> None:
        super().__init__()
        self.bundles = Known[Bundle]()
        self.ended = set[bytes]()

    def opened(self, name: bytes, count: int, *, together: bool = False) -> list[bytes]:
        members = [b"%b/%d" % (name, number) for number in range(count)]
        self.bundles[name] = Bundle(members, together, closing=together)
        self.items.update({member: Item() for member in members})
        return members

    def closed(self, name: bytes) -> None:
        bundle = self.bundles[name]
        bundle.closed = True
        for member in bundle.members if bundle.together else ():
            self.confirmed(member)

    def compare(self, rows: list[bytes], ends: list[bytes]) -> None:
        """All that is there after a start; `ends` were looked at first."""
        there, ended = self.look(rows), {each.removesuffix(b":end") for each in each_once(ends)}
        if lost := self.ended - ended:
            raise Violation(f"what has followed {lost} is lost")
        for name in ended - self.bundles.keys():
            raise Violation(f"{name!r} has ended, and never was")
        for name, bundle in self.bundles.items():
            left, mine = there & {*bundle.members}, {*bundle.members}
            unasked = {each for each in mine if not self.items[each].asked}
            is_due = any(self.items[each].sure for each in unasked)
            if name in ended and (left or not bundle.closing or is_due):
                raise Violation(f"{name!r} has ended early: {bundle}, {left}")
            if bundle.closed and not left and name not in ended:
                raise Violation(f"{name!r} has not ended")
            if bundle.together and left not in (set(), mine) and unasked - left:
                raise Violation(f"a transaction has done a half: {left} of {mine}")

    def begin_again(self, rows: list[bytes], ends: list[bytes]) -> None:
        self.ended = {each.removesuffix(b":end") for each in ends}
        for member, item in self.items.items():
            # What is not there now never comes.
            item.sure, item.ended = member in rows, b"" if member in rows else b"gone"
            item.asked = {item.ended} if item.ended else set()


class Desk(Scene):
    name = "desk"
    queues = QUEUES

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.jobs, self.bundles = Keys(), Jobs(), Bundles()
        self.books: dict[bytes, AckedBook[Any]] = {
            SYNCS: self.keys,
            JOBS: self.jobs,
            ROWS: self.bundles,
        }

    @property
    def counts(self) -> dict[str, int]:
        return {"batches": len(self.bundles.ended)}

    async def restarted(self, life: Life, *, stopped: bool) -> None:
        def compare(ends: Rows, rows: Rows, syncs: Rows) -> None:
            self.keys.compare({each.id.encode(): each.retry for each in syncs})
            self.bundles.compare(ids(rows), ids(ends))

        ends, rows, syncs = await self._places(life, [ENDS, ROWS, SYNCS], compare)
        self.keys.begin_again(ids(syncs))
        self.bundles.begin_again(ids(rows), ids(ends))
        wire = await self._open("results")
        found = {name: await self._answer(wire, b"result " + name) for name in self.jobs.items}
        self.jobs.compare(found)
        self.jobs.begin_again(found)
        await wire.close()

    async def play(self) -> None:
        bound = zip(QUEUES, (b"sync", b"job", b"row", b"end"), strict=True)
        lines = [b"subscribe --confirm %b desk.%b" % each for each in bound]
        wire = await self._open("publish", *lines)
        for name, bundle in self.bundles.bundles.items():
            if not (bundle.closed or name in self.bundles.ended):
                bundle.closing = True
                bundle.closed = await self._answer(wire, b"close_batch --confirm " + name) == b"1"
        work = partial(self._work, [*self.books])
        await self._together(partial(self._publish_all, wire), *[work] * WORKERS)

    async def _publish_all(self, wire: Wire) -> None:
        rng, kinds = self._rng, (self._sync, self._job, self._bundle, self._cancel)
        while True:
            lines = [rng.choice(kinds)(wire) for _ in range(rng.choice([1, 5, 20]))]
            wire.send(b"".join(lines))
            await self._rest(wire, WAITING_MAX, *self.books.values())

    def _sync(self, wire: Wire) -> bytes:
        name, key, replaces = self._id("u"), self._rng.randrange(KEYS), self._rng.random() < 0.4
        self.keys.published(name, key, replaces=replaces)
        wire.ask(name, told(name, partial(self.keys.told, name)))
        words = b",until=acked" if key < LASTING_KEYS else b""
        words += b",on=replace" if replaces else b""
        return b"%b publish --confirm --unique=k%d%b desk.sync x\n" % (name, key, words)

    def _job(self, wire: Wire) -> bytes:
        name = self._id("j")
        self.jobs.published(name)
        wire.ask(name, doing(name, partial(self.jobs.confirmed, name)))
        return b"%b publish --confirm --keep-result=900 desk.job x\n" % name

    def _cancel(self, wire: Wire) -> bytes:
        left = [name for name, job in self.jobs.items.items() if not (job.ended or job.asked)]
        if not left:
            return b""
        name, step = self._rng.choice(left), self._id("x")
        self.jobs.asks(name, b"cancelled")
        wire.ask(step, told(step, partial(self.jobs.cancelled, name)))
        return b"%b cancel_job --confirm %b %b\n" % (step, JOBS, name)

    def _bundle(self, wire: Wire) -> bytes:
        """A batch: opened, filled and closed, often in one transaction, or left open."""
        rng, name, step = self._rng, self._id("b"), self._id("t")
        together = rng.random() < 0.5
        members = self.bundles.opened(name, rng.randrange(4), together=together)
        lines = [b"%b open_batch %b publish desk.end %b\n" % (step, name, name)]
        for member in members:
            if not together:
                wire.ask(member, doing(member, partial(self.bundles.confirmed, member)))
            confirm = b"" if together else b"--confirm "
            lines.append(b"%b publish %b--batch=%b desk.row x\n" % (member, confirm, name))
        if together:
            wire.ask(step, doing(step, partial(self.bundles.closed, name)))
            close = b"%b close_batch %b\n%b commit --confirm\n" % (step, name, step)
            return b"".join([step + b" begin\n", *lines, close])
        if rng.random() < 0.8:
            self.bundles.bundles[name].closing = True
            wire.ask(step, told(step, lambda rest: self.bundles.closed(name)))
            lines.append(b"%b close_batch --confirm %b\n" % (step, name))
        return b"".join(lines)

    def delivered(self, consumer: bytes, queue: bytes, message: bytes) -> None:
        self.books[queue].delivered(message)

    def settle(self, wire: Wire, consumer: bytes, queue: bytes, message: bytes) -> bytes:
        if self._rng.random() < 0.15:
            return b"- reject %b %b\n" % (consumer, message)
        step, book = self._id("s"), self.books[queue]
        result = b" --result=" + message if queue == JOBS else b""
        book.asks(message)
        self.keys.goes_on[message] = lambda: not (wire.closed or wire.leaving)
        wire.ask(step, doing(step, partial(book.acked, message)))
        return b"%b ack --confirm %b %b%b\n" % (step, consumer, message, result)
