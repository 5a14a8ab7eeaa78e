"""Players who share queues: publishers, workers, takers, readers, and one who changes bindings.

The one rule: everything that is sent is told to the checker first, and whatever comes, at once.
"""

from __future__ import annotations

import asyncio
import random
import struct
import zlib
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import (
    Checker,
    Consumer,
    Copy,
    Link,
    Queue,
    Request,
    Row,
    Shape,
    Violation,
    payload,
)
from tests.chaos.plan import LifePlan
from tests.chaos.wire import Gone, Life, Wire

FIXED = {
    b"work": [b"w", b"every"],
    b"solo": [b"s", b"every"],
    b"auto": [b"a", b"o"],
    b"log": [b"l", b"every", b"o"],
    b"mix": [b"m", b"w"],
}
"""Queues whose bindings stay."""
FLUX = b"flux"
FLUX_EVENTS = [b"f1", b"f.x.2", b"f.y.2"]
Answer = tuple[list[Row], int]
"""Rows, and the number that follows."""
_RUN = struct.Struct("<4q")


class Player:
    """`play` is what one connection of it does; it comes again and again."""

    def __init__(self, life: Life, plan: LifePlan, name: str) -> None:
        self.life, self.plan, self.name = life, plan, name
        self.rng = random.Random(f"{plan.seed} {plan.number} {name}")
        self.checker: Checker = life.checker
        self.consumers: dict[bytes, Consumer] = {}
        self.coming: dict[bytes, Consumer] = {}
        """Those whose confirm has not come."""
        self.replaced: list[Consumer] = []
        """Those whose id another connection has taken, and that said so."""
        self.wire: Wire
        self._count = 0

    async def run(self) -> None:
        while not self.life.ending:
            try:
                await self._connect()
                await self.play()
            except Gone:
                if not (self.life.ending or self.wire.leaving):
                    raise Violation(f"{self.name} was left") from None

    async def _connect(self) -> None:
        self.consumers, self.coming = {}, {}
        self.wire = await Wire.open(self.life, self.name)
        self.wire.on_line = self.came

    async def play(self) -> None:
        raise NotImplementedError

    def id(self, kind: str) -> bytes:
        self._count += 1
        return f"{kind}-{self.name}-{self.plan.number}-{self._count}".encode()

    # -- asking

    def watch(
        self, request: Request, then: Callable[[bytes], None], wire: Wire | None = None
    ) -> None:
        """One reply to the request of this name is due; an error is one where the plan makes
        them."""
        name = request.name

        def told(word: bytes, rest: bytes) -> bool:
            if word == b"ok":
                then(rest)
            elif self.plan.errors:
                self.checker.refused(request, maybe=self.plan.full)
            else:
                raise Violation(f"an error for {name!r}")
            return True

        (wire or self.wire).ask(name, told)

    def expect(self, request: Request, wire: Wire | None = None, *, confirm: bool = True) -> None:
        """A confirm; without, a reply is an error."""
        if confirm:
            self.watch(request, partial(self._confirm, request), wire)
        elif self.plan.errors:
            self.watch(request, partial(self._no_reply, request.name), wire)

    def _confirm(self, request: Request, rest: bytes) -> None:
        if rest:
            raise Violation(f"the confirm of {request.name!r} has {rest!r}")
        self.checker.confirmed(request)

    def order(
        self, request: Request, action: bytes, rest: bytes, confirm: bool, wire: Wire | None = None
    ) -> bytes:
        """The line of a request; its confirm goes to the checker."""
        request.name = self.id("r")
        self.expect(request, wire, confirm=confirm)
        return b"%s %s %s%s\n" % (request.name, action, b"--confirm " * confirm, rest)

    def publish(
        self, kind: str, event: bytes, flags: bytes = b"", *, confirm: bool = True
    ) -> tuple[Request, bytes]:
        """The request of a message with a new id, and its line."""
        name = self.id(kind)
        request = self.checker.publish(self.wire.link, name, event)
        self.expect(request, confirm=confirm)
        flags = b"--confirm " * confirm + flags
        return request, b"%s publish %s%s %s\n" % (name, flags, event, payload(name))

    @staticmethod
    def _no_reply(name: bytes, rest: bytes) -> None:
        raise Violation(f"nobody asked for a reply to {name!r}: {rest[:100]!r}")

    async def sync(self) -> None:
        """What was sent before is carried out."""
        name, request = self.id("p"), self.checker.send(self.wire.link)
        data = b"x" * self.rng.randrange(20)
        answered = partial(self.checker.answered, request)
        told = await self.wire.exchange(name, b"%s ping %s\n" % (name, data), then=answered)
        if told != [(b"ok", data)]:
            raise Violation(f"{name!r}: {told} instead of {data!r}")

    async def confirmed(self, *requests: Request) -> None:
        """Their replies have come."""
        asked = self.wire.asked
        await self.wire.until(lambda: not any(each.name in asked for each in requests))

    # -- consuming

    async def consume(self, name: bytes, queue: bytes, *, manual: bool) -> None:
        """With a confirm; one of the same name, on any connection, is replaced.

        What two connections send at once, a server may read in either order: one claims after the
        other.
        """
        claiming = self.checker.claiming
        while name in claiming:
            await asyncio.sleep(0.002)
            self.wire.check()
        claiming.add(name)
        its = self.checker.queues[queue]
        consumer = self.checker.consume(self.wire.link, name, its, manual=manual)
        request = consumer.request
        self.coming[name] = consumer

        def told(word: bytes, rest: bytes) -> bool:
            if word == b"error":
                if self._is_replaced(name):
                    return False
                if not self.plan.full:
                    raise Violation(f"an error for {name!r}")
                self.checker.refused(request, maybe=True)
                self.coming.pop(name, None)
                self.checker.ends(consumer)
                self.checker.ended(consumer, seen=False)
                return True
            if rest:
                self.came(name, word, rest)
                return False
            self.checker.confirmed(request)
            old = self.consumers.get(name)
            if old is not None and old.ending and old.link is self.wire.link:
                self.checker.ended(old, seen=True)
            self.consumers[name] = self.coming.pop(name)
            return True

        self.wire.ask(name, told)
        flag = b" --manual-ack" if manual else b""
        self.wire.send(b"%s consume --confirm %s%s\n" % (name, queue, flag))
        await self.wire.until(lambda: name not in self.coming)
        claiming.remove(name)

    def came(self, name: bytes, word: bytes, rest: bytes) -> None:
        """A line that is no reply."""
        consumer, is_update = self.consumers.get(name), rest.startswith(b"--update ")
        if word == b"error" and self._is_replaced(name):
            return
        if word == b"ok" and is_update:
            self._updated(consumer or self.coming[name], rest)
            return
        if word != b"ok" or consumer is None:
            raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:200]!r}")
        message, properties, data = rest.split(b" ", 2)
        event, _, retry = properties.removeprefix(b"event=").partition(b",retry=")
        copy = self.checker.delivered(consumer, message, event, int(retry or 0), data)
        if copy.holder is consumer:
            self.given(consumer, copy, int(retry or 0))

    def given(self, consumer: Consumer, copy: Copy, retry: int) -> None:
        """A message has been delivered."""

    def ack(self, consumer: Consumer, copy: Copy) -> None:
        request = self.checker.ack(self.wire.link, consumer, copy.name)
        rest = b"%s %s" % (consumer.name, copy.name)
        self.wire.later.append(self.order(request, b"ack", rest, confirm=True))

    async def delete(self, consumer: Consumer) -> None:
        request = self.checker.send(self.wire.link)
        self.checker.ends(consumer, self.wire.link)
        self.wire.send(self.order(request, b"delete_consumer", consumer.name, confirm=True))
        await self.confirmed(request)
        self.checker.ended(consumer, seen=request.confirmed)

    def _is_replaced(self, name: bytes) -> bool:
        """Whether an error says that another connection has taken this id. It says so once."""
        consumer = self.consumers.get(name)
        if consumer is None or not consumer.broken or consumer in self.replaced:
            return False
        self.replaced.append(consumer)
        return True

    def _updated(self, consumer: Consumer, rest: bytes) -> None:
        words = rest.split(b" ")[1:]
        queue = consumer.queue
        if consumer.manual and words.pop() != b"--manual-ack":
            raise Violation(f"an update without --manual-ack for {consumer.name!r}: {rest!r}")
        shapes = [shape or frozenset() for shape, _ in queue.shapes]
        if words[0] != queue.name or words[1:] != sorted(words[1:]):
            raise Violation(f"an odd update for {consumer.name!r}: {rest!r}")
        if frozenset(words[1:]) not in shapes:
            raise Violation(f"{queue.name!r} was never bound so: {rest!r}")

    # -- leaving

    async def leave(self) -> None:
        if self.plan.breaks and self.rng.random() < 0.3:
            await self.break_off()
        else:
            await self.finish()

    async def finish(self) -> None:
        """What is still due comes before the server closes its side."""
        self.wire.send()
        self._end(self.wire.link)
        self.wire.finish()
        await self.wire.until_closed()
        if self.life.ending:
            raise Gone
        if self.wire.asked and not self.plan.errors:
            raise Violation(f"{self.name} did not get what was due: {list(self.wire.asked)[:9]}")
        for consumer in self._own():
            self.checker.ended(consumer, seen=True)
        raise Gone

    async def break_off(self) -> None:
        self._end(None)
        self.wire.break_off()
        self.broke()
        for consumer in self._own():
            self.checker.ended(consumer, seen=False)
        await self.wire.until_closed()
        raise Gone

    def _own(self) -> list[Consumer]:
        return [*self.consumers.values(), *self.coming.values()]

    def broke(self) -> None:
        """What was on its way may still come, and mean a consumer of that name."""

    def _end(self, by: Link | None) -> None:
        for consumer in self._own():
            if not consumer.ending:
                self.checker.ends(consumer, by)

    async def rest(self) -> None:
        """A moment, in which something happens all the same."""
        await self.sync()
        await asyncio.sleep(0.002)


class Publisher(Player):
    """Bursts of any size, in any pieces, with and without confirms, and with ids once only."""

    EVENTS = (b"w", b"w", b"s", b"a", b"l", b"m", b"every", b"nowhere", *FLUX_EVENTS)
    FLAGS = (b"--meta=a=b ", b"--ttl=1e6 ", b"--ttl=1e6 --meta=a=b ", b"--meta=a=b --ttl=1e6 ")
    """Those that change nothing of what is told."""

    def __init__(self, life: Life, plan: LifePlan, name: str, again: dict[bytes, int]) -> None:
        super().__init__(life, plan, name)
        self.again = again
        """Ids published once that no confirm has come for → attempts; kept over lives."""

    async def play(self) -> None:
        rng = self.rng
        await self._once_more()
        for _ in range(rng.randrange(5, 60)):
            while self._backlog() > self.plan.backlog:
                await self.rest()
            kind = rng.random()
            if kind < 0.1:  # Some of them twice in the same write.
                names = [self.id("o") for _ in range(rng.choice([1, 1, 5, 40]))]
                self.again |= dict.fromkeys(names, 0)
                await self._send_once(names)
            elif kind < 0.13 and self.plan.big:
                await self._burst(1, kind="big")
            elif kind < 0.16:
                await self._mandatory()
            elif kind < 0.18:
                await self._flood(rng.choice([2500, 5000, 20_000]))
            else:
                await self._burst(rng.choice([1, 1, 2, 5, 20, 50, 100, rng.choice([200, 1000])]))
            if rng.random() < 0.2:
                await self.sync()
        if rng.random() < 0.3:
            self.wire.send(self._lines(rng.choice([1, 5, 50]))[0])
            await self.leave()
        if rng.random() < 0.3:
            # A half line is none.
            self.wire.send(b"%s publish l %s" % (self.id("m"), b"half"))
        await self.leave()

    def _backlog(self) -> int:
        return max(queue.waiting for queue in self.checker.queues.values())

    def _lines(self, count: int, *, kind: str = "m") -> tuple[bytes, list[Request]]:
        rng, lines, awaited = self.rng, [], []
        confirms, event = rng.choice([0.0, 0.5, 1.0]), rng.choice(self.EVENTS)
        for _ in range(count):
            event = rng.choice(self.EVENTS) if rng.random() < 0.5 else event
            confirm = rng.random() < confirms
            request, line = self.publish(kind, event, confirm=confirm)
            awaited += [request] * confirm
            lines.append(line)
        return b"".join(lines), awaited

    async def _burst(self, count: int, *, kind: str = "m") -> None:
        data, awaited = self._lines(count, kind=kind)
        way = self.rng.random()
        if way < 0.1:
            await self.wire.send_in_pieces(data, self.rng, self.rng.choice([1, 3, 10]))
        elif way < 0.12 and len(data) < 300:
            await self.wire.send_in_pieces(data, self.rng, len(data))
        else:
            self.wire.send(data)
        if self.rng.random() < 0.8:
            await self.confirmed(*awaited)

    async def _flood(self, count: int) -> None:
        """Lines so short that thousands are read at once, all confirmed. Most go nowhere, so that
        not all that follows is to take them out again."""
        rng, flags = self.rng, self.rng.choice(self.FLAGS)
        events = (
            rng.choice(self.EVENTS) if rng.random() < 0.05 else b"nowhere" for _ in range(count)
        )
        sent = [self.publish("tiny", event, flags) for event in events]
        self.wire.send(b"".join(line for _, line in sent))
        awaited = [request for request, _ in sent]
        await self.confirmed(awaited[-1])  # Of so many, looked for once.
        await self.confirmed(*awaited)

    async def _once_more(self) -> None:
        """Those whose confirm has not come, in this life or in one before."""
        names = list(self.again)[:200]
        if names:
            await self._send_once(names)

    async def _send_once(self, names: list[bytes]) -> None:
        lines, requests = [], []
        for name in names:
            attempt = self.again[name] = self.again[name] + 1
            request = self.checker.publish(self.wire.link, name, b"o", once=attempt)
            requests.append(request)
            self.watch(request, partial(self._once_confirmed, request))
            lines.append(b"%s publish --confirm --once o %s\n" % (name, payload(name, attempt)))
        self.wire.send(b"".join(lines))
        await self.confirmed(*requests)
        if self.rng.random() < 0.3:
            # A confirmed one, again: it is confirmed, and nothing else.
            self.again |= {name: 7 for name in names[:5] if name not in self.again}
            await self._once_more()

    def _once_confirmed(self, request: Request, _: bytes) -> None:
        self.checker.confirmed(request)
        self.again.pop(request.name, None)

    async def _mandatory(self) -> None:
        """To nowhere it is an error; of what is bound, a confirm."""
        name, request = self.id("r"), self.checker.send(self.wire.link)
        line = b"%s publish --confirm --mandatory nowhere x\n" % name
        [(word, _)] = await self.wire.exchange(
            name, line, then=partial(self.checker.refused, request)
        )
        if word != b"error":
            raise Violation(f"{name!r} went somewhere")


class Worker(Player):
    """Consumes with manual ack; what it does with a message follows from the message.

    With `shared`, others use the same consumer id: it only acks then, since a late request of one
    of them may mean another's consumer.
    """

    def __init__(
        self, life: Life, plan: LifePlan, name: str, queue: bytes, shared: bytes | None = None
    ) -> None:
        super().__init__(life, plan, name)
        self.queue = queue
        self._id = shared or f"c-{name}".encode()
        self._name = self._id
        self._shared = shared is not None
        self._aide: Wire | None = None
        """Another connection, over which it settles some of its messages."""
        self._aide_rests = False
        self._left = 0

    def broke(self) -> None:
        if not self._shared:
            self._id = self._name + b"-%d" % self._count

    async def play(self) -> None:
        rng = self.rng
        if self._aide is None and not self._shared and rng.random() < 0.3:
            self._aide = await Wire.open(self.life, self.name + "-aide")
        await self._begin()
        self._left = rng.choice([5, 50, 400, 2000])
        while True:
            self._aide_rests = False
            consumer = self.consumers[self._id]
            await self.wire.until(partial(self._is_due, consumer))
            await asyncio.sleep(0)
            self.wire.send()
            if self._aide is not None and self._aide.later:
                self._aide.send()
            if consumer.ending:
                await self.leave()
            if self._left > 0:
                continue
            await self._sync_aide()
            self._left = rng.choice([5, 50, 400, 2000])
            what = rng.random()
            if not self._shared:
                await self._settle_all(consumer)
            if what < 0.2:
                await self.consume(self._id, self.queue, manual=True)
            elif what < 0.35 and not self._shared:
                await self.delete(consumer)
                await self._begin()
            else:
                await self.leave()

    def _is_due(self, consumer: Consumer) -> bool:
        return bool(self.wire.later) or self._left <= 0 or consumer.ending

    async def _sync_aide(self) -> None:
        """What it has sent means the consumer that is there, and not the next of its name."""
        self._aide_rests = True
        if self._aide is None:
            return
        answered = partial(self.checker.answered, self.checker.send(self._aide.link))
        await self._aide.exchange(b"p", b"p ping\n", then=answered)

    def _ending(self, *, rejects: bool) -> tuple[Callable[..., Request], bytes]:
        return (self.checker.reject, b"reject") if rejects else (self.checker.ack, b"ack")

    async def _settle_all(self, consumer: Consumer) -> None:
        what = self.rng.random()
        if what > 0.5:
            return
        do, action = self._ending(rejects=what < 0.1)
        confirm = self.rng.random() < 0.5
        request = do(self.wire.link, consumer, None)
        self.wire.send(self.order(request, action, consumer.name + b" --all", confirm=confirm))
        if confirm:
            await self.confirmed(request)

    async def _begin(self) -> None:
        await self.consume(self._id, self.queue, manual=True)
        if self._id not in self.consumers:
            await self.leave()

    def given(self, consumer: Consumer, copy: Copy, retry: int) -> None:
        self._left -= 1
        chance = zlib.crc32(b"%d %s %d" % (self.plan.seed, copy.name, retry)) % 1000
        if chance < 15:
            return
        do, action = self._ending(rejects=chance < 100 and retry < 5 and not self._shared)
        rest = b"%s %s" % (consumer.name, copy.name)
        wire = self.wire
        if self._aide is not None and not self._aide_rests and chance % 10 == 0:
            wire = self._aide
        request = do(wire.link, consumer, copy.name)
        wire.later.append(self.order(request, action, rest, confirm=chance % 3 == 0, wire=wire))


class Taker(Player):
    """Consumes without acks, and stops reading now and then."""

    async def play(self) -> None:
        self._left: int = self.rng.choice([5, 50, 400, 2000])
        await self.consume(f"c-{self.name}".encode(), b"auto", manual=False)
        while self._left > 0:
            await self.wire.until(partial(self._has_taken, self._left))
            if self.rng.random() < 0.02:
                self.wire.pause()
                await asyncio.sleep(self.rng.uniform(0.01, 0.2))
                self.wire.resume()
        await self.leave()

    def given(self, consumer: Consumer, copy: Copy, retry: int) -> None:
        self._left -= 1

    def _has_taken(self, before: int) -> bool:
        return self._left < before


class Reader(Player):
    """Reads the log by numbers, trims what it has, and purges now and then."""

    async def play(self) -> None:
        queue = self.checker.queues[b"log"]
        position = 1
        for _ in range(self.rng.randrange(3, 20)):
            first, start = self.checker.send(self.wire.link), self.rng.choice([1, position])
            read = self._peek if self.rng.random() < 0.3 else self._read
            position = await self._read_all(queue, first, start, read)
            what = self.rng.random()
            if what < 0.3:
                await self._trim(queue, position - self.rng.randrange(400))
            elif what < 0.4:
                await self._remove(queue, b"purge", b"log", 1 << 62)
            elif what < 0.5:
                await self._remove(self.checker.queues[b"mix"], b"purge", b"mix", 1 << 62)
            await self.rest()
        await self.leave()

    async def _read_all(
        self, queue: Queue, first: Request, start: int, read: Callable[..., Awaitable[Answer]]
    ) -> int:
        names, position = set[bytes](), start
        while True:
            rows, after = await read(queue, position)
            names |= {row.name for row in rows}
            if not rows:
                self.checker.seen_all(queue, first, start, max(after, position), names)
                return max(after, position)
            position = after

    async def _answer(
        self, line: bytes, end: Callable[[bytes], bool]
    ) -> tuple[Request, list[bytes]]:
        name, request = self.id("r"), self.checker.send(self.wire.link)
        answered = partial(self.checker.answered, request)
        told = await self.wire.exchange(name, b"%s %s\n" % (name, line), end, answered)
        if told[-1][0] != b"ok":
            raise Violation(f"an error for {line!r}")
        return request, [rest for _, rest in told]

    async def _peek(self, queue: Queue, position: int) -> Answer:
        limit = self.rng.choice([1, 10, 100, 1000, 1000])
        line = b"peek %s --after=%d --limit=%d" % (queue.name, position - 1, limit)
        request, told = await self._answer(line, lambda rest: rest == b"--end")
        rows = [peeked(rest) for rest in told[:-1]]
        self._check_rows(queue, request, rows, position, limit)
        return rows, rows[-1].number + 1 if rows else position

    async def _read(self, queue: Queue, position: int) -> Answer:
        limit = self.rng.choice([1, 50, 1000, 100_000, 100_000])
        line = b"read %s --from=%d --limit=%d" % (queue.name, position, limit)
        least = queue.next
        request, [answer] = await self._answer(line, lambda rest: True)
        epoch, after, rows = columns(answer)
        self.checker.told_range(queue, epoch, 1, after, 1 if rows else least)
        self._check_rows(queue, request, rows, position, limit)
        if rows and rows[-1].number >= after:
            raise Violation(f"number {rows[-1].number} is not below {after}")
        return rows, after

    def _check_rows(
        self, queue: Queue, request: Request, rows: list[Row], position: int, limit: int
    ) -> None:
        self.checker.seen(queue, request, rows)
        if len(rows) > limit or (rows and rows[0].number < position):
            raise Violation(f"{len(rows)} of {limit} from {position}, first {rows[0].number}")

    async def _trim(self, queue: Queue, end: int) -> None:
        least = queue.next
        _, [told] = await self._answer(b"range %s --at=1" % queue.name, lambda rest: True)
        words = dict(word.split(b"=") for word in told.split(b" "))
        first, after = int(words[b"first"]), int(words[b"next"])
        if int(words[b"at"]) != first:
            raise Violation(f"not all is later than 1970: {told!r}")
        self.checker.told_range(queue, words[b"epoch"], first, after, least)
        end = max(end, 1)
        rest = b"%s %d --epoch=%s" % (queue.name, end, words[b"epoch"])
        await self._remove(queue, b"trim", rest, end)

    async def _remove(self, queue: Queue, action: bytes, rest: bytes, end: int) -> None:
        request = self.checker.remove(self.wire.link, queue, end)
        if self.rng.random() < 0.3:
            self.wire.send(self.order(request, action, rest, confirm=False))
            await self.sync()
            return
        request.name = self.id("r")
        self.watch(request, lambda told: self.checker.removed(queue, request, end, int(told)))
        self.wire.send(b"%s %s --confirm %s\n" % (request.name, action, rest))
        await self.confirmed(request)


class Owner(Player):
    """Has a queue whose bindings change, which comes and goes, and which it consumes itself."""

    is_unsure = False
    """It broke off: a server that did not read from it just then has lost what it sent last."""

    def broke(self) -> None:
        self.is_unsure = True

    async def play(self) -> None:
        rng, queue = self.rng, self.checker.queues[FLUX]
        for _ in range(rng.randrange(5, 40)):
            what = rng.random()
            exists = queue.shapes[-1][0] is not None
            if not exists or self.is_unsure or what < 0.1:
                self.is_unsure = False
                events = frozenset(rng.sample(FLUX_EVENTS, rng.randrange(1, 4)))
                await self._reshape(queue, events, b"subscribe", b" ".join(events))
            elif what < 0.4:
                await self._rebind(queue)
            elif what < 0.46:
                await self._reshape(queue, None, b"delete_queue", b"")
            elif what < 0.8:
                await self._publish_some(rng.choice([1, 10, 60]))
            else:
                await self._work(queue)
        await self.leave()

    async def _reshape(
        self, queue: Queue, shape: Shape, action: bytes, rest: bytes, *, confirm: bool = False
    ) -> None:
        request = self.checker.reshape(self.wire.link, queue, shape)
        confirm = confirm or self.rng.random() < 0.6
        line = self.order(request, action, b"%s %s" % (queue.name, rest), confirm=confirm)
        self.wire.send(line if rest else line.replace(b" \n", b"\n"))
        if confirm:
            await self.confirmed(request)

    async def set_up(self) -> None:
        """The queues that stay, on an empty database."""
        await self._connect()
        for name, events in FIXED.items():
            how = frozenset(events), b"subscribe", b" ".join(events)
            await self._reshape(self.checker.queues[name], *how, confirm=True)
        with suppress(Gone):
            await self.finish()

    async def _rebind(self, queue: Queue) -> None:
        now = queue.shapes[-1][0]
        assert now is not None
        event = self.rng.choice(FLUX_EVENTS)
        what = self.rng.random()
        if what < 0.4:
            shape, rest = now | {event}, b"--add " + event
        elif what < 0.7:
            shape, rest = now - {event}, b"--remove " + event
        elif what < 0.9:
            shape, rest = frozenset(e for e in now if b"." not in e), b"--remove-mask f.*.2"
        else:
            shape, rest = frozenset(FLUX_EVENTS), b" ".join(FLUX_EVENTS)
        await self._reshape(queue, shape, b"rebind", rest)

    async def _publish_some(self, count: int) -> None:
        sent = [self.publish("m", self.rng.choice(FLUX_EVENTS)) for _ in range(count)]
        self.wire.send(b"".join(line for _, line in sent))

    async def _work(self, queue: Queue) -> None:
        """Takes what there is, then goes on without a consumer."""
        name = f"c-{self.name}".encode()
        await self.consume(name, queue.name, manual=True)
        if name not in self.consumers:
            return
        for _ in range(self.rng.randrange(4)):
            await self.sync()
        await self.delete(self.consumers[name])

    def given(self, consumer: Consumer, copy: Copy, retry: int) -> None:
        self.ack(consumer, copy)


class Drainer(Player):
    """Takes everything out of a queue, in the order of its numbers, each once."""

    def __init__(self, life: Life, plan: LifePlan, queue: Queue) -> None:
        super().__init__(life, plan, "drain-" + queue.name.decode())
        self.queue = queue
        self.names: list[bytes] = []

    async def run(self) -> None:
        copies = self.queue.copies.values()
        due = [each.name for each in sorted(copies, key=lambda copy: copy.number or 0)]
        await self._connect()
        await self.consume(b"c-" + self.name.encode(), self.queue.name, manual=True)

        def has_all() -> bool:
            return len(self.names) >= len(due) and not self.wire.asked

        while not has_all():
            self.wire.send()
            await self.wire.until(lambda: self.wire.later or has_all())
        await self.sync()
        if self.names != due:
            raise Violation(f"{self.queue.name!r} gave {self.names}, and had {due}")
        with suppress(Gone):
            await self.finish()

    def given(self, consumer: Consumer, copy: Copy, retry: int) -> None:
        self.names.append(copy.name)
        self.ack(consumer, copy)


def peeked(rest: bytes) -> Row:
    found = PeekedMessage.parse(rest)
    if found.time < 1_500_000_000:
        raise Violation(f"it came before 2017: {rest[:100]!r}")
    return Row(found.seq, found.id.encode(), found.event.encode(), found.retry, found.data)


def columns(answer: bytes) -> tuple[bytes, int, list[Row]]:
    """Epoch, next and rows of an answer to read."""
    header, _, body = answer.partition(b"\n")
    words = dict(word.split(b"=", 1) for word in header.split(b" ")[1:])
    runs = [_RUN.unpack_from(body, _RUN.size * n) for n in range(int(words[b"runs"]))]
    rows: list[Row] = []
    start = _RUN.size * len(runs)
    for first, total, _, size in runs:
        lines = body[start : start + size].split(b"\n")
        start += size
        if lines.pop() or len(lines) != total:
            raise Violation(f"a run of {total} has {len(lines)} lines")
        for number, line in enumerate(lines, first):
            message, event, data = line.split(b" ", 2)
            rows.append(Row(number, message, event.removeprefix(b"event="), None, data))
    if start != len(body) or len(rows) != int(words[b"rows"]):
        raise Violation(f"an odd answer: {header!r}")
    return words[b"epoch"], int(words[b"next"]), rows
