"""A queue in order by key, whose workers ack and publish what follows in one transaction.

`Ledger` decides, without IO: an order is in the queue or its two results are there, never both or
neither, and messages of one key come in order to one worker at a time. `Forge` plays. The results
have priorities: after each start they are drained, and must come by priority, then by arrival.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tests.chaos.checker import Violation
from tests.chaos.scene import Keyed, KeyedBook, Scene, doing, each_once, ids
from tests.chaos.wire import Life, Wire

RAW, MADE = b"forge.raw", b"forge.made"
KEYS, ORDERS_MAX, WORKERS = 6, 150, 3
PARTS = b"ab"


@dataclass(slots=True, eq=False)
class Smith:
    """A consumer with manual ack."""

    name: bytes
    left: bool = False


@dataclass(slots=True, eq=False)
class Work(Keyed):
    smith: Smith | None = None
    returning: bytes = b""
    """The reject or release of it that was not confirmed."""
    sent: bool = False
    """Its commit."""


class Ledger(KeyedBook[Work]):
    def __init__(self) -> None:
        super().__init__(Work)
        self.orders = self.items
        self.steps = 0
        """Confirmed ones."""

    def delivered(self, smith: Smith, name: bytes) -> None:
        if smith.left:
            return
        order = self.comes_in_order(name, lambda _, each: each.sent or each.smith is smith)
        if order.smith is not None and not order.returning:
            raise Violation(f"{name!r} is given to {smith.name!r}, {order.smith.name!r} has it")
        order.smith, order.returning, order.sent = smith, b"", False

    def returned(self, name: bytes, step: bytes) -> None:
        """A reject or release was confirmed."""
        order = self.orders[name]
        if order.returning == step:
            order.smith, order.returning = None, b""

    def committed(self, name: bytes) -> None:
        self.orders[name].ended = b"done"
        self.steps += 1

    def left(self, smith: Smith) -> None:
        smith.left = True
        for order in self.orders.values():
            if order.smith is smith:
                order.smith, order.returning = None, b""

    def compare(self, raw: list[bytes], made: list[bytes]) -> None:
        """All that is there after a start."""
        there = each_once(raw + made)
        for name, order in self.orders.items():
            count = sum(result(name, part) in there for part in PARTS)
            if count == 1 or (count and (name in there or not order.sent)):
                raise Violation(f"{name!r} is there: {name in there}, and {count} of its results")
            if order.ended and not count:
                raise Violation(f"what {name!r} has made is lost")
            if order.sure and not (name in there or count):
                raise Violation(f"{name!r} is lost")
        for order in self.keep(raw):
            order.smith, order.returning, order.sent = None, b"", False


def result(name: bytes, part: int) -> bytes:
    return b"%b-%c" % (name, part)


class Forge(Scene):
    name = "forge"
    queues = RAW, MADE

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self._smiths: dict[bytes, Smith] = {}

    @property
    def counts(self) -> dict[str, int]:
        return {"transactions": self.ledger.steps}

    async def restarted(self, life: Life, *, stopped: bool) -> None:
        self._life = life
        wire = await self._open("look")
        raw, made = [await self._peek(wire, queue) for queue in self.queues]
        self.ledger.compare(ids(raw), ids(made))
        if made:
            await self._drain(wire, ids(sorted(made, key=lambda each: (-each.priority, each.seq))))
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

    async def play(self) -> None:
        wire = await self._open(
            "publish",
            b"set_queue --confirm %b --ordered=key" % RAW,
            b"subscribe --confirm %b forge.order" % RAW,
            b"subscribe --confirm %b forge.result" % MADE,
        )
        publish = partial(self._publish, wire, b"forge.order", KEYS, ORDERS_MAX, self.ledger)
        await self._together(publish, *[partial(self._work, [RAW])] * WORKERS)

    def delivered(self, consumer: bytes, queue: bytes, message: bytes) -> None:
        self.ledger.delivered(self._smiths.setdefault(consumer, Smith(consumer)), message)

    def left(self, consumer: bytes) -> None:
        self.ledger.left(self._smiths.setdefault(consumer, Smith(consumer)))

    def settle(self, wire: Wire, consumer: bytes, queue: bytes, message: bytes) -> bytes:
        order, what, step = self.ledger.orders[message], self._rng.random(), self._id("t")
        if what < 0.2:
            action = b"reject" if what < 0.1 else b"release"
            order.returning = step
            wire.ask(step, doing(message, partial(self.ledger.returned, message, step)))
            return b"%b %b --confirm %b %b\n" % (step, action, consumer, message)
        begun = b"%b begin\n%b ack %b %b\n" % (step, step, consumer, message)
        for part in PARTS:
            words = result(message, part), self._rng.randrange(-3, 4)
            begun += b"%b publish --priority=%d forge.result x\n" % words
        if what < 0.3:  # It stays held.
            return begun + b"%b rollback\n" % step
        order.sent = True
        wire.ask(step, doing(message, partial(self.ledger.committed, message)))
        return begun + b"%b commit --confirm\n" % step
