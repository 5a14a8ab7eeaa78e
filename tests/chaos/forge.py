"""A queue in order by key, whose workers ack and publish what follows in one transaction.

`Ledger` decides, without IO: an order is in the queue or its two results are there, never both or
neither, and messages of one key come in order to one worker at a time. `Forge` plays. The results
have priorities: after each start they are drained, and must come by priority, then by arrival.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tests.chaos.checker import Violation
from tests.chaos.scene import Scene
from tests.chaos.wire import Life, Wire

RAW, MADE = QUEUES = b"forge.raw", b"forge.made"
KEYS, ORDERS_MAX, WORKERS = 6, 150, 3
PARTS = b"ab"


@dataclass(slots=True, eq=False)
class Smith:
    """A consumer with manual ack."""

    name: bytes
    left: bool = False


@dataclass(slots=True, eq=False)
class Order:
    key: int
    place: int
    """Among those of its key."""
    sure: bool = False
    """It is durable."""
    smith: Smith | None = None
    returning: bytes = b""
    """The reject or release of it that was not confirmed."""
    sent: bool = False
    """Its commit."""
    done: bool = False
    """That was confirmed."""


@dataclass(slots=True)
class Ledger:
    """Lives longer than the servers."""

    orders: dict[bytes, Order] = field(default_factory=dict)
    places: Counter[int] = field(default_factory=Counter)
    steps: int = 0
    """Confirmed ones."""

    def _order(self, name: bytes) -> Order:
        if name not in self.orders:
            raise Violation(f"{name!r} was never there, or is done since an earlier life")
        return self.orders[name]

    def published(self, name: bytes, key: int) -> None:
        self.places[key] += 1
        self.orders[name] = Order(key, self.places[key])

    def confirmed(self, name: bytes) -> None:
        self._order(name).sure = True

    def delivered(self, smith: Smith, name: bytes) -> None:
        if smith.left:
            return
        order = self._order(name)
        if order.done:
            raise Violation(f"{name!r} is back")
        other = order.smith
        if other is not None and not (order.returning or other.left):
            raise Violation(f"{name!r} is given to {smith.name!r}, {other.name!r} has it")
        for earlier, each in self.orders.items():
            is_before = each.key == order.key and each.place < order.place and not each.sent
            if is_before and each.smith is not smith:
                raise Violation(f"{name!r} comes before {earlier!r}, which has its key")
        order.smith, order.returning, order.sent = smith, b"", False

    @property
    def waiting(self) -> int:
        return sum(not each.done for each in self.orders.values())

    def returned(self, name: bytes, step: bytes) -> None:
        """A reject or release was confirmed."""
        order = self._order(name)
        if order.returning == step:
            order.smith, order.returning = None, b""

    def committed(self, name: bytes) -> None:
        self._order(name).done = True
        self.steps += 1

    def left(self, smith: Smith) -> None:
        """Its connection ends."""
        smith.left = True
        for order in self.orders.values():
            if order.smith is smith:
                order.smith, order.returning = None, b""

    def compare(self, raw: list[bytes], made: list[bytes]) -> None:
        """All that is there after a start."""
        if twice := [name for name, count in Counter(raw + made).items() if count > 1]:
            raise Violation(f"{twice} are there twice")
        there, results = {*raw}, {*made}
        for name in there:
            self._order(name)
        for name, order in self.orders.items():
            count = sum(result(name, part) in results for part in PARTS)
            is_there = name in there
            if count == 1 or (count and (is_there or not order.sent)):
                raise Violation(f"{name!r} is there: {is_there}, and {count} of its results")
            if order.done and not count:
                raise Violation(f"what {name!r} has made is lost")
            if order.sure and not (is_there or count):
                raise Violation(f"{name!r} is lost")
        self.orders = {name: self.orders[name] for name in raw}
        for order in self.orders.values():
            order.sure, order.smith, order.returning, order.sent = True, None, b"", False


def result(name: bytes, part: int) -> bytes:
    return b"%b-%c" % (name, part)


class Forge(Scene):
    name = "forge"

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()

    # -- after a start

    async def restarted(self, life: Life) -> None:
        wire = await Wire.open(life, "forge-look")
        raw, made = [await self._peek(wire, queue) for queue in QUEUES]
        self.ledger.compare([each.id.encode() for each in raw], [each.id.encode() for each in made])
        if made:
            order = sorted(made, key=lambda each: (-each.priority, each.seq))
            await self._drain(wire, [each.id.encode() for each in order])
        await wire.close()

    async def _drain(self, wire: Wire, expected: list[bytes]) -> None:
        came, name = list[bytes](), self._id("d")

        def take(_: bytes, word: bytes, rest: bytes) -> None:
            came.append(rest.split(b" ", 1)[0])
            wire.send(b"a ack %b %b\n" % (name, came[-1]))

        wire.on_line = take
        await self._ask(wire, b"consume --confirm %b --manual-ack" % MADE, name)
        await wire.until(lambda: len(came) >= len(expected))
        if came != expected:
            raise Violation(f"{came[:20]} came by priority, and not {expected[:20]}")
        await self._ask(wire, b"ack --confirm %b --all" % name)
        if left := await self._peek(wire, MADE):
            raise Violation(f"{MADE!r} was drained, and has {left[:20]}")

    # -- a life

    async def play(self) -> None:
        wire = await Wire.open(self._life, "forge-publish")
        for line in (
            b"set_queue --confirm %b --ordered=key" % RAW,
            b"subscribe --confirm %b forge.order" % RAW,
            b"subscribe --confirm %b forge.result" % MADE,
        ):
            await self._ask(wire, line)
        publish = partial(self._publish, wire, b"forge.order", KEYS, ORDERS_MAX, self.ledger)
        await self._together(publish, *[self._work] * WORKERS)

    async def _work(self) -> None:
        """One connection and consumer after the other."""
        rng = self._rng
        while True:
            wire = await Wire.open(self._life, "forge-work")
            smith, held = Smith(self._id("c")), list[bytes]()

            def came(name: bytes, word: bytes, rest: bytes, smith=smith, held=held) -> None:  # type: ignore[no-untyped-def]
                if name != smith.name or word != b"ok":
                    raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:100]!r}")
                order = rest.split(b" ", 1)[0]
                self.ledger.delivered(smith, order)
                held.append(order)

            wire.on_line = came
            prefetch = rng.choice([1, 3, 20])
            line = b"consume --confirm %b --manual-ack --prefetch=%d" % (RAW, prefetch)
            await self._ask(wire, line, smith.name)
            for _ in range(rng.randrange(5, 60)):
                await self._ask(wire, b"ping x")
                lines = [self._line(wire, smith, each) for each in held if rng.random() < 0.9]
                held.clear()
                wire.send(b"".join(lines))
                await asyncio.sleep(0)
            self.ledger.left(smith)
            await self._leave(wire, breaks=self._breaks())

    def _line(self, wire: Wire, smith: Smith, name: bytes) -> bytes:
        """What is done with an order."""
        order, what, step = self.ledger.orders[name], self._rng.random(), self._id("t")
        if what < 0.2:
            action = b"reject" if what < 0.1 else b"release"
            order.returning = step
            wire.ask(step, self._doing(name, partial(self.ledger.returned, name, step)))
            return b"%b %b --confirm %b %b\n" % (step, action, smith.name, name)
        begun = b"%b begin\n%b ack %b %b\n" % (step, step, smith.name, name)
        for part in PARTS:
            priority = self._rng.randrange(-3, 4)
            words = result(name, part), priority
            begun += b"%b publish --priority=%d forge.result x\n" % words
        if what < 0.3:  # It stays held.
            return begun + b"%b rollback\n" % step
        order.sent = True
        wire.ask(step, self._doing(name, partial(self.ledger.committed, name)))
        return begun + b"%b commit --confirm\n" % step
