"""Clients that play with queues of their own, beside the crowd, and what they have in common.

The one rule: a scene ends when the life ends, and not before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.plan import LifePlan
from tests.chaos.wire import Gone, Life, Wire


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
            await self.play()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        except Gone:
            if not life.ending:
                raise Violation(f"the {self.name} was left") from None

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

    def _id(self, kind: str) -> bytes:
        self._count += 1
        return f"{kind}-{self.name}-{self._count}".encode()

    async def _ask(self, wire: Wire, line: bytes, name: bytes = b"") -> list[bytes]:
        """An answer ends with a line that has no attributes."""
        told, done = list[bytes](), list[bool]()

        def take(word: bytes, rest: bytes) -> bool:
            if word != b"ok":
                raise Violation(f"an error for {line!r}")
            told.append(rest)
            if b"event=" not in rest:
                done.append(True)
            return bool(done)

        name = name or self._id("a")
        wire.ask(name, take)
        wire.send(b"%b %b\n" % (name, line))
        await wire.until(lambda: done)
        return told[:-1]

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
