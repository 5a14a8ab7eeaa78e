"""Clients that play with queues of their own, beside the crowd, and what they have in common.

The one rule: a scene ends when the life ends, and not before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.plan import LifePlan
from tests.chaos.wire import Gone, Life, Wire

SETTLES_S = 20.0
"""Only a fault takes longer until all that is due after a start is in its place."""


class Book(Protocol):
    """What may be in a queue in order by key."""

    @property
    def waiting(self) -> int: ...

    def published(self, name: bytes, key: int) -> None: ...

    def confirmed(self, name: bytes) -> None: ...


class Scene:
    """Plays one life after the other."""

    name: str

    def __init__(self) -> None:
        self._life: Life
        self._plan: LifePlan
        self._rng: random.Random
        self._count = 0

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
        self, life: Life, places: list[bytes], compare: Callable[..., None]
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

    async def _leave(self, wire: Wire, *, breaks: bool) -> None:
        (wire.break_off if breaks else wire.finish)()
        await wire.until_closed()
        if self._life.ending:
            raise Gone

    def _breaks(self) -> bool:
        return self._plan.breaks and self._rng.random() < 0.5

    async def _publish(
        self, wire: Wire, event: bytes, keys: int, waiting_max: int, book: Book
    ) -> None:
        rng = self._rng
        while True:
            lines = list[bytes]()
            for _ in range(rng.choice([1, 5, 40])):
                name, key = self._id("m"), rng.randrange(keys)
                book.published(name, key)

                def confirmed(name: bytes = name) -> None:
                    book.confirmed(name)

                wire.ask(name, self._doing(name, confirmed))
                lines.append(b"%b publish --confirm --key=k%d %b x\n" % (name, key, event))
            wire.send(b"".join(lines))
            await asyncio.sleep(rng.uniform(0, 0.02))
            while book.waiting > waiting_max:
                await self._ask(wire, b"ping x")
                await asyncio.sleep(0.01)

    def _id(self, kind: str) -> bytes:
        self._count += 1
        return f"{kind}-{self.name}-{self._count}".encode()

    async def _ask(self, wire: Wire, line: bytes, name: bytes = b"") -> list[bytes]:
        """The lines before the last, which has no attributes."""
        name = name or self._id("a")
        return (await wire.answer(name, line, lambda rest: b"event=" not in rest))[:-1]

    async def _peek(self, wire: Wire, what: bytes) -> list[PeekedMessage]:
        rows: list[PeekedMessage] = []
        while True:
            after = rows[-1].seq if rows else 0
            told = await self._ask(wire, b"peek %b --after=%d --limit=1000" % (what, after))
            if not told:
                return rows
            rows += map(PeekedMessage.parse, told)

    @staticmethod
    def _doing(name: bytes, done: Callable[[], None]) -> Callable[[bytes, bytes], bool]:
        """Told of a confirm."""

        def told(word: bytes, rest: bytes) -> bool:
            if word != b"ok" or rest:
                raise Violation(f"{name!r}: {word!r} {rest[:100]!r}")
            done()
            return True

        return told
