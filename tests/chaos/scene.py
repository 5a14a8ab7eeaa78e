"""Clients that play with queues of their own, beside the crowd, and what they have in common.

The one rule: a scene ends when the life ends, and not before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.plan import LifePlan
from tests.chaos.wire import Gone, Life, Told, Wire

SETTLES_S = 20.0
"""Only a fault takes longer until all that is due after a start is in its place."""
T = TypeVar("T")


class Known(dict[bytes, T]):
    """Messages by their names: no others may come."""

    def __missing__(self, name: bytes) -> T:
        raise Violation(f"{name!r} was never there, or is gone since an earlier life")


@dataclass(slots=True, eq=False)
class Item:
    sure: bool = False
    """It is durable."""
    asked: set[bytes] = field(default_factory=set)
    """How it may have ended."""
    ended: bytes = b""
    """How it certainly has."""


M = TypeVar("M", bound=Item)


class Book(Generic[M]):
    """What is in a queue, as it was told. Lives longer than the servers.

    What was confirmed is there until it was asked to end, and never again once that was confirmed.
    """

    def __init__(self) -> None:
        self.items = Known[M]()

    @property
    def waiting(self) -> int:
        return sum(not each.ended for each in self.items.values())

    def confirmed(self, name: bytes) -> None:
        self.items[name].sure = True

    def comes(self, name: bytes) -> M:
        """It is delivered, or found."""
        item = self.items[name]
        if item.ended:
            raise Violation(f"{name!r} is back, and was {item.ended!r}")
        return item

    def asks(self, name: bytes, end: bytes = b"done") -> None:
        self.items[name].asked.add(end)

    def is_due(self, item: M) -> bool:
        """Whether it must be there."""
        return item.sure and not (item.asked or item.ended)

    def look(self, names: Iterable[bytes]) -> set[bytes]:
        """All that is there after a start. Raises Violation."""
        there = each_once(names)
        for name in there:
            self.comes(name)
        for name, item in self.items.items():
            if name not in there and self.is_due(item):
                raise Violation(f"{name!r} is lost: {item}")
        return there

    def keep(self, names: Iterable[bytes]) -> Iterable[M]:
        """These are all that there is, and they are sure."""
        kept = {name: self.items[name] for name in names}
        self.items.clear()
        self.items.update(kept)
        for item in kept.values():
            item.sure, item.asked = True, set()
        return kept.values()


@dataclass(slots=True, eq=False)
class Keyed(Item):
    key: int = 0
    place: int = 0
    """Among those of its key."""


K = TypeVar("K", bound=Keyed)


class KeyedBook(Book[K]):
    """Of a queue in order by key."""

    def __init__(self, kind: type[K]) -> None:
        super().__init__()
        self._kind = kind
        self._places = 0

    def published(self, name: bytes, key: int) -> None:
        self._places += 1
        self.items[name] = self._kind(key=key, place=self._places)

    def comes_in_order(self, name: bytes, has_passed: Callable[[bytes, K], bool]) -> K:
        """All earlier ones of its key must have passed."""
        item = self.comes(name)
        for earlier, each in self.items.items():
            is_before = each.key == item.key and each.place < item.place
            if is_before and not has_passed(earlier, each):
                raise Violation(f"{name!r} comes before {earlier!r}, which has its key")
        return item


class Scene:
    """Plays one life after the other."""

    name: str
    queues: Sequence[bytes]

    def __init__(self) -> None:
        self._life: Life
        self._plan: LifePlan
        self._rng: random.Random
        self._count = 0

    @property
    def counts(self) -> dict[str, int]:
        """What has happened in all lives."""
        return {}

    async def restarted(self, life: Life, *, stopped: bool) -> None:
        """Compare what there is after a start. Raises Violation."""
        raise NotImplementedError

    async def play(self) -> None:
        """One life, to its end."""
        raise NotImplementedError

    async def run(self, life: Life, plan: LifePlan) -> None:
        self._life, self._plan = life, plan
        self._rng = random.Random(f"{plan.seed} {plan.number} {self.name}")
        try:
            await self._until_gone(self.play)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _together(self, *plays: Callable[[], Awaitable[None]]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for play in plays:
                tasks.create_task(self._until_gone(play))

    async def _until_gone(self, play: Callable[[], Awaitable[None]]) -> None:
        try:
            await play()
        except Gone:
            if not self._life.ending:
                raise Violation(f"the {self.name} was left") from None

    async def _places(
        self, life: Life, places: Iterable[bytes], compare: Callable[..., None]
    ) -> list[list[PeekedMessage]]:
        """Look where everything is; what is due goes on meanwhile, but not for long."""
        self._life = life
        wire = await Wire.open(life, f"{self.name}-look")
        limit = time.monotonic() + SETTLES_S
        while True:
            await wire.answer(self._id("a"), b"ping --confirm x", lambda rest: not rest)
            found = [await self._peek(wire, place) for place in places]
            try:
                compare(*found)
                break
            except Violation:
                if time.monotonic() > limit:
                    raise
                await asyncio.sleep(0.05)
        await wire.close()
        return found

    # -- a connection

    async def _open(self, what: str, *lines: bytes) -> Wire:
        """With these requests, each confirmed."""
        wire = await Wire.open(self._life, f"{self.name}-{what}")
        for line in lines:
            await self._ask(wire, line)
        return wire

    async def _leave(self, wire: Wire, *, breaks: bool) -> None:
        (wire.break_off if breaks else wire.finish)()
        await wire.until_closed()
        if self._life.ending:
            raise Gone

    def _breaks(self) -> bool:
        return self._plan.breaks and self._rng.random() < 0.5

    async def _publish(
        self, wire: Wire, event: bytes, keys: int, waiting_max: int, book: KeyedBook[Any]
    ) -> None:
        rng = self._rng
        while True:
            lines = list[bytes]()
            for _ in range(rng.choice([1, 5, 40])):
                name, key = self._id("m"), rng.randrange(keys)
                book.published(name, key)
                wire.ask(name, doing(name, partial(book.confirmed, name)))
                lines.append(b"%b publish --confirm --key=k%d %b x\n" % (name, key, event))
            wire.send(b"".join(lines))
            await self._rest(wire, waiting_max, book)

    async def _rest(self, wire: Wire, waiting_max: int, *books: Book[Any]) -> None:
        """Who publishes does, for as long as too much waits."""
        await asyncio.sleep(self._rng.uniform(0, 0.02))
        while max(book.waiting for book in books) > waiting_max:
            await self._ask(wire, b"ping x")
            await asyncio.sleep(0.01)

    async def _work(self, queues: Sequence[bytes]) -> None:
        """One connection with its consumers of these queues after the other."""
        while True:
            wire = await self._open("work")
            consumers, held = {self._id("c"): queue for queue in queues}, list[list[bytes]]()
            wire.on_line = partial(self._came, consumers, held)
            for consumer, queue in consumers.items():
                words = queue, self._rng.choice([1, 3, 20])
                line = b"consume --confirm %b --manual-ack --prefetch=%d" % words
                await self._ask(wire, line, consumer)
            for _ in range(self._rng.randrange(5, 60)):
                await self._ask(wire, b"ping x")
                lines = [self.settle(wire, *each) for each in held if self._rng.random() < 0.9]
                held.clear()
                wire.send(b"".join(lines))
                await asyncio.sleep(0)
            for consumer in consumers:
                self.left(consumer)
            await self._leave(wire, breaks=self._breaks())

    def _came(
        self,
        consumers: dict[bytes, bytes],
        held: list[list[bytes]],
        name: bytes,
        word: bytes,
        rest: bytes,
    ) -> None:
        if name not in consumers or word != b"ok":
            raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:100]!r}")
        held.append([name, consumers[name], rest.split(b" ", 1)[0]])
        self.delivered(*held[-1])

    def delivered(self, consumer: bytes, queue: bytes, message: bytes) -> None:
        """To one of those who work."""

    def settle(self, wire: Wire, consumer: bytes, queue: bytes, message: bytes) -> bytes:
        """The lines by which they do it."""
        raise NotImplementedError

    def left(self, consumer: bytes) -> None:
        """Its connection ends."""

    # -- requests

    def _id(self, kind: str) -> bytes:
        self._count += 1
        return f"{kind}-{self.name}-{self._count}".encode()

    async def _ask(self, wire: Wire, line: bytes, name: bytes = b"") -> list[bytes]:
        """The lines before the last, which has no attributes."""
        name = name or self._id("a")
        return (await wire.answer(name, line, lambda rest: b"event=" not in rest))[:-1]

    async def _answer(self, wire: Wire, line: bytes) -> bytes:
        return (await wire.answer(self._id("a"), line))[0]

    async def _peek(self, wire: Wire, what: bytes) -> list[PeekedMessage]:
        rows: list[PeekedMessage] = []
        while True:
            after = rows[-1].seq if rows else 0
            told = await self._ask(wire, b"peek %b --after=%d --limit=1000" % (what, after))
            if not told:
                return rows
            rows += map(PeekedMessage.parse, told)


def told(name: bytes, then: Callable[[bytes], object]) -> Told:
    def take(word: bytes, rest: bytes) -> bool:
        if word != b"ok":
            raise Violation(f"{name!r}: {word!r} {rest[:100]!r}")
        then(rest)
        return True

    return take


def doing(name: bytes, done: Callable[[], None]) -> Told:
    """When a request is confirmed that tells nothing."""

    def then(rest: bytes) -> None:
        if rest:
            raise Violation(f"{name!r}: {rest[:100]!r}")
        done()

    return told(name, then)


def ids(rows: Iterable[PeekedMessage]) -> list[bytes]:
    return [each.id.encode() for each in rows]


def each_once(names: Iterable[bytes]) -> set[bytes]:
    """Raise Violation where one of them is there twice."""
    counts = Counter([*names])  # Of a mapping it would take the values.
    if twice := [name for name, count in counts.items() if count > 1]:
        raise Violation(f"{twice} are there twice")
    return {*counts}
