"""Unique messages, jobs whose results are kept, and batches, while the server is killed.

Three books decide, without IO. `Keys`: of each unique key one message waits. `Jobs`: a result, or a
cancel, that was confirmed is there afterwards, and what has ended does not come back. `Bundles`:
what follows a batch is there once, not before each of its messages is acked, and not never. `Desk`
plays.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.scene import Scene
from tests.chaos.wire import Life, Wire

SYNCS, JOBS, ROWS, ENDS = QUEUES = b"desk.syncs", b"desk.jobs", b"desk.rows", b"desk.ends"
KEYS, WAITING_MAX, WORKERS = 8, 60, 2
LASTING_KEYS = 4
"""Those below this number are held until their message is acked, others until its delivery."""


class Book(Protocol):
    """Of messages that are acked."""

    def delivered(self, name: bytes) -> None: ...
    def asks(self, name: bytes) -> None: ...
    def acked(self, name: bytes) -> None: ...


@dataclass(slots=True, eq=False)
class Sync:
    key: int
    replaces: bool
    rivals: list[bytes]
    """Others of its key that may have been there when it was sent."""
    sure: bool = False
    """It is durable."""
    answered: bool = False
    asked: bool = False
    """Its ack."""
    gone: bool = False
    """Certainly: it was acked, replaced, or dropped."""


@dataclass(slots=True)
class Keys:
    messages: dict[bytes, Sync] = field(default_factory=dict)
    goes_on: dict[bytes, Callable[[], bool]] = field(default_factory=dict)
    """Whether the connection of its ack does, with which an ack may be lost."""

    def _of(self, key: int) -> dict[bytes, Sync]:
        return {name: each for name, each in self.messages.items() if each.key == key}

    def _sync(self, name: bytes) -> Sync:
        if name not in self.messages:
            raise Violation(f"{name!r} was never there, or is gone since an earlier life")
        return self.messages[name]

    @property
    def waiting(self) -> int:
        return sum(not each.gone for each in self.messages.values())

    def published(self, name: bytes, key: int, *, replaces: bool = False) -> None:
        rivals = [other for other, each in self._of(key).items() if not each.gone]
        self.messages[name] = Sync(key, replaces, rivals)

    def told(self, name: bytes, answer: bytes) -> None:
        """The confirm of its publish."""
        sync, (word, _, other) = self._sync(name), answer.partition(b" ")
        sync.answered = True
        if word not in (b"", b"duplicate", b"replaced"):
            raise Violation(f"{name!r} is told {answer!r}")
        if other and other not in sync.rivals:
            raise Violation(f"{name!r} is told {answer!r}, which was not there")
        if word == b"replaced":
            if not sync.replaces or (self.messages[other].asked and self.goes_on[other]()):
                raise Violation(f"{name!r} has replaced {other!r}")
            self.messages[other].gone = True
        elif not word and sync.key < LASTING_KEYS:
            for rival in sync.rivals:
                each = self.messages[rival]
                if each.sure and not (each.asked or each.gone or self._may_be_replaced(each)):
                    raise Violation(f"{name!r} is beside {rival!r}, which has its key")
        sync.sure, sync.gone = word != b"duplicate", word == b"duplicate"

    def _may_be_replaced(self, sync: Sync) -> bool:
        others = self._of(sync.key).values()
        return any(each.replaces and not each.answered for each in others)

    def delivered(self, name: bytes) -> None:
        sync = self._sync(name)
        if sync.gone:
            raise Violation(f"{name!r} is back")
        sync.asked = False

    def asks(self, name: bytes) -> None:
        self._sync(name).asked = True

    def acked(self, name: bytes) -> None:
        self._sync(name).gone = True

    def compare(self, there: dict[bytes, int]) -> None:
        """All that is there after a start, and its retries."""
        held = Counter[int]()
        for name, retry in there.items():
            sync = self._sync(name)
            if sync.gone:
                raise Violation(f"{name!r} is back")
            held[sync.key] += sync.key < LASTING_KEYS or not retry
        if twice := [key for key, count in held.items() if count > 1]:
            raise Violation(f"of the keys {twice} several messages wait: {there}")
        for name, sync in self.messages.items():
            is_due = sync.sure and not (sync.gone or sync.asked or self._may_be_replaced(sync))
            if is_due and name not in there:
                raise Violation(f"{name!r} is lost")

    def begin_again(self, there: dict[bytes, int]) -> None:
        keys = {name: self.messages[name].key for name in there}
        self.messages = {
            name: Sync(key, False, [], sure=True, answered=True) for name, key in keys.items()
        }


@dataclass(slots=True, eq=False)
class Job:
    sure: bool = False
    asked: set[bytes] = field(default_factory=set)
    """How it may have ended."""
    ended: bytes = b""
    """How it certainly has."""


@dataclass(slots=True)
class Jobs:
    jobs: dict[bytes, Job] = field(default_factory=dict)

    def _job(self, name: bytes) -> Job:
        if name not in self.jobs:
            raise Violation(f"{name!r} was never there, or has ended in an earlier life")
        return self.jobs[name]

    @property
    def waiting(self) -> int:
        return sum(not each.ended for each in self.jobs.values())

    def published(self, name: bytes) -> None:
        self.jobs[name] = Job()

    def confirmed(self, name: bytes) -> None:
        self._job(name).sure = True

    def delivered(self, name: bytes) -> None:
        job = self._job(name)
        if job.ended:
            raise Violation(f"{name!r} is back, and was {job.ended!r}")
        job.asked.discard(b"done")

    def asks(self, name: bytes, end: bytes = b"done") -> None:
        self._job(name).asked.add(end)

    def acked(self, name: bytes) -> None:
        self._job(name).ended = b"done"

    def cancelled(self, name: bytes, answer: bytes) -> None:
        """The confirm of a cancel."""
        job = self._job(name)
        if answer == b"cancelled":
            if job.ended:
                raise Violation(f"{name!r} is cancelled, and was {job.ended!r}")
            job.ended = answer
        elif answer in (b"held", b"none"):
            job.asked.discard(b"cancelled")
        else:
            raise Violation(f"the cancel of {name!r} is told {answer!r}")

    def compare(self, told: dict[bytes, bytes]) -> None:
        """What `result` tells of each after a start."""
        for name, job in self.jobs.items():
            state, _, rest = told[name].partition(b" ")
            is_open = state == b"waiting" or (state == b"none" and not job.sure)
            if state != job.ended if job.ended else not (is_open or state in job.asked):
                raise Violation(f"{name!r} was {[job.ended, *job.asked]}, and is {told[name]!r}")
            if state == b"done" and rest != JOBS + b" " + name:
                raise Violation(f"the result of {name!r} is {rest!r}")

    def begin_again(self, told: dict[bytes, bytes]) -> None:
        left = [name for name in self.jobs if told[name].startswith(b"waiting")]
        self.jobs = {name: Job(sure=True) for name in left}


@dataclass(slots=True, eq=False)
class Bundle:
    members: list[bytes]
    together: bool
    """It was opened, filled and closed in one transaction."""
    sure: set[bytes] = field(default_factory=set)
    asked: set[bytes] = field(default_factory=set)
    """Members whose ack was sent."""
    gone: set[bytes] = field(default_factory=set)
    closing: bool = False
    closed: bool = False
    """That was confirmed."""


@dataclass(slots=True)
class Bundles:
    """Lives longer than the servers, with those that have ended."""

    bundles: dict[bytes, Bundle] = field(default_factory=dict)
    ended: set[bytes] = field(default_factory=set)

    def of(self, member: bytes) -> Bundle:
        name = member.partition(b"/")[0]
        if name not in self.bundles:
            raise Violation(f"{member!r} was never there")
        return self.bundles[name]

    @property
    def waiting(self) -> int:
        bundles = self.bundles.values()
        return sum(len(each.members) - len(each.gone) for each in bundles)

    def opened(self, name: bytes, count: int, *, together: bool = False) -> list[bytes]:
        members = [b"%b/%d" % (name, number) for number in range(count)]
        self.bundles[name] = Bundle(members, together, closing=together)
        return members

    def confirmed(self, member: bytes) -> None:
        self.of(member).sure.add(member)

    def closed(self, name: bytes) -> None:
        bundle = self.bundles[name]
        bundle.closed = True
        if bundle.together:
            bundle.sure |= {*bundle.members}

    def delivered(self, member: bytes) -> None:
        bundle = self.of(member)
        if member in bundle.gone:
            raise Violation(f"{member!r} is back")
        bundle.asked.discard(member)

    def asks(self, member: bytes) -> None:
        self.of(member).asked.add(member)

    def acked(self, member: bytes) -> None:
        self.of(member).gone.add(member)

    def compare(self, rows: list[bytes], ends: list[bytes]) -> None:
        """All that is there after a start; `ends` were looked at first."""
        if twice := [name for name, count in Counter(rows + ends).items() if count > 1]:
            raise Violation(f"{twice} are there twice")
        there, ended = {*rows}, {each.removesuffix(b":end") for each in ends}
        for member in rows:
            if member in self.of(member).gone:
                raise Violation(f"{member!r} is back")
        if lost := self.ended - ended:
            raise Violation(f"what has followed {lost} is lost")
        for name in ended - self.bundles.keys():
            raise Violation(f"{name!r} has ended, and never was")
        for name, bundle in self.bundles.items():
            left, mine = there & {*bundle.members}, {*bundle.members}
            if name in ended and (left or not bundle.closing or bundle.sure - bundle.asked):
                raise Violation(f"{name!r} has ended early: {bundle}, {left}")
            if bundle.closed and not left and name not in ended:
                raise Violation(f"{name!r} has not ended")
            if lost := bundle.sure - bundle.asked - left:
                raise Violation(f"{lost} are lost")
            if bundle.together and left not in (set(), mine) and mine - left - bundle.asked:
                raise Violation(f"a transaction has done a half: {left} of {mine}")

    def begin_again(self, rows: list[bytes], ends: list[bytes]) -> None:
        self.ended = {each.removesuffix(b":end") for each in ends}
        for bundle in self.bundles.values():
            # What is not there now never comes.
            bundle.sure = {*bundle.members} & {*rows}
            bundle.gone = {*bundle.members} - bundle.sure
            bundle.asked = {*bundle.gone}


class Desk(Scene):
    name = "desk"

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.jobs, self.bundles = Keys(), Jobs(), Bundles()

    async def restarted(self, life: Life) -> None:
        def compare(*places: list[PeekedMessage]) -> None:
            ends, rows, _ = [[each.id.encode() for each in place] for place in places]
            self.keys.compare({each.id.encode(): each.retry for each in places[2]})
            self.bundles.compare(rows, ends)

        ends, rows, syncs = await self._places(life, [ENDS, ROWS, SYNCS], compare)
        self.keys.begin_again({each.id.encode(): each.retry for each in syncs})
        names = [[each.id.encode() for each in place] for place in (rows, ends)]
        self.bundles.begin_again(*names)
        wire = await Wire.open(life, "desk-results")
        told = {name: await self._answer(wire, b"result " + name) for name in self.jobs.jobs}
        self.jobs.compare(told)
        self.jobs.begin_again(told)
        await wire.close()

    async def _answer(self, wire: Wire, line: bytes) -> bytes:
        return (await wire.answer(self._id("a"), line))[0]

    async def play(self) -> None:
        wire = await Wire.open(self._life, "desk-publish")
        for queue, event in zip(QUEUES, (b"sync", b"job", b"row", b"end"), strict=True):
            await self._ask(wire, b"subscribe --confirm %b desk.%b" % (queue, event))
        for name, bundle in self.bundles.bundles.items():
            if not (bundle.closed or name in self.bundles.ended):
                bundle.closing = True
                bundle.closed = await self._answer(wire, b"close_batch --confirm " + name) == b"1"
        await self._together(partial(self._publish_all, wire), *[self._work] * WORKERS)

    async def _publish_all(self, wire: Wire) -> None:
        rng, books = self._rng, (self.keys, self.jobs, self.bundles)
        kinds: list[Callable[[Wire], bytes]] = [self._sync, self._job, self._bundle, self._cancel]
        while True:
            lines = [rng.choice(kinds)(wire) for _ in range(rng.choice([1, 5, 20]))]
            wire.send(b"".join(lines))
            await asyncio.sleep(rng.uniform(0, 0.02))
            while max(book.waiting for book in books) > WAITING_MAX:
                await self._ask(wire, b"ping x")
                await asyncio.sleep(0.01)

    @staticmethod
    def _told(name: bytes, then: Callable[[bytes], object]) -> Callable[[bytes, bytes], bool]:
        def told(word: bytes, rest: bytes) -> bool:
            if word != b"ok":
                raise Violation(f"{name!r}: {word!r} {rest[:100]!r}")
            then(rest)
            return True

        return told

    def _sync(self, wire: Wire) -> bytes:
        name, key, replaces = self._id("u"), self._rng.randrange(KEYS), self._rng.random() < 0.4
        self.keys.published(name, key, replaces=replaces)
        wire.ask(name, self._told(name, partial(self.keys.told, name)))
        words = b",until=acked" if key < LASTING_KEYS else b""
        words += b",on=replace" if replaces else b""
        return b"%b publish --confirm --unique=k%d%b desk.sync x\n" % (name, key, words)

    def _job(self, wire: Wire) -> bytes:
        name = self._id("j")
        self.jobs.published(name)
        wire.ask(name, self._doing(name, partial(self.jobs.confirmed, name)))
        return b"%b publish --confirm --keep-result=900 desk.job x\n" % name

    def _cancel(self, wire: Wire) -> bytes:
        left = [name for name, job in self.jobs.jobs.items() if not (job.ended or job.asked)]
        if not left:
            return b""
        name, step = self._rng.choice(left), self._id("x")
        self.jobs.asks(name, b"cancelled")
        wire.ask(step, self._told(step, partial(self.jobs.cancelled, name)))
        return b"%b cancel_job --confirm %b %b\n" % (step, JOBS, name)

    def _bundle(self, wire: Wire) -> bytes:
        """A batch: opened, filled and closed, often in one transaction, or left open."""
        rng, name, step = self._rng, self._id("b"), self._id("t")
        together = rng.random() < 0.5
        members = self.bundles.opened(name, rng.randrange(4), together=together)
        lines = [b"%b open_batch %b publish desk.end %b\n" % (step, name, name)]
        for member in members:
            if not together:
                wire.ask(member, self._doing(member, partial(self.bundles.confirmed, member)))
            confirm = b"" if together else b"--confirm "
            lines.append(b"%b publish %b--batch=%b desk.row x\n" % (member, confirm, name))
        if together:
            wire.ask(step, self._doing(step, partial(self.bundles.closed, name)))
            close = b"%b close_batch %b\n%b commit --confirm\n" % (step, name, step)
            return b"".join([step + b" begin\n", *lines, close])
        if rng.random() < 0.8:
            self.bundles.bundles[name].closing = True
            wire.ask(step, self._told(step, lambda rest: self.bundles.closed(name)))
            lines.append(b"%b close_batch --confirm %b\n" % (step, name))
        return b"".join(lines)

    async def _work(self) -> None:
        """One connection with its consumers after the other."""
        rng = self._rng
        while True:
            wire, held = await Wire.open(self._life, "desk-work"), list[tuple[bytes, bytes]]()
            queues: tuple[tuple[bytes, Book], ...] = (
                *((SYNCS, self.keys), (JOBS, self.jobs), (ROWS, self.bundles)),
            )
            books = {self._id("c"): (queue, book) for queue, book in queues}

            def came(name: bytes, word: bytes, rest: bytes, books=books, held=held) -> None:  # type: ignore[no-untyped-def]
                if name not in books or word != b"ok":
                    raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:100]!r}")
                message = rest.split(b" ", 1)[0]
                books[name][1].delivered(message)
                held.append((name, message))

            wire.on_line = came
            for consumer, (queue, _) in books.items():
                words = queue, rng.choice([1, 3, 20])
                line = b"consume --confirm %b --manual-ack --prefetch=%d" % words
                await self._ask(wire, line, consumer)
            for _ in range(rng.randrange(5, 60)):
                await self._ask(wire, b"ping x")
                lines = [
                    self._settle(wire, consumer, books[consumer][1], message)
                    for consumer, message in held
                    if rng.random() < 0.9
                ]
                held.clear()
                wire.send(b"".join(lines))
                await asyncio.sleep(0)
            await self._leave(wire, breaks=self._breaks())

    def _settle(self, wire: Wire, consumer: bytes, book: Book, message: bytes) -> bytes:
        if self._rng.random() < 0.15:
            return b"- reject %b %b\n" % (consumer, message)
        step, result = self._id("s"), b" --result=" + message if book is self.jobs else b""
        book.asks(message)
        self.keys.goes_on[message] = lambda: not (wire.closed or wire.leaving)
        wire.ask(step, self._doing(step, partial(book.acked, message)))
        return b"%b ack --confirm %b %b%b\n" % (step, consumer, message, result)
