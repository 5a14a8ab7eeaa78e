"""Queues with policies: retries, losses, backoff, delays, ttl, prefetch, and dead letters.

`Book` decides, without IO: what may be where, and how soon. A message is in one of the places
`ready`, `scheduled`, `aside` and `dead` from its confirm until it was asked to go; a crash may
take back only what was not confirmed. `Ward` plays: it publishes, takes, rejects, releases, loses,
redrives, promotes, moves and cancels. The one rule: where timing leaves two answers, both hold.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from mqks.client.messages import DeadLetter, PeekedMessage
from tests.chaos import scene
from tests.chaos.checker import Violation, payload
from tests.chaos.scene import Item, Scene, doing, ids
from tests.chaos.wire import Life, Wire

QUEUE, ASIDE, DEAD = QUEUES = b"ward", b"ward.aside", b"ward.dead"
"""Messages are moved aside and back; only the other two have consumers."""
EVENT = b"ward.new"
RETRIES, LOSSES, BACKOFF_S, BACKOFF_MAX_S = 3, 3, 0.05, 0.2
POLICY = b"--retries=%d --losses=%d --backoff=%g,%g" % (RETRIES, LOSSES, BACKOFF_S, BACKOFF_MAX_S)
PLACES = {"scheduled": QUEUE + b" --scheduled", "ready": QUEUE, "aside": ASIDE, "dead": DEAD}
"""In the order in which messages go on by themselves, so that none is missed."""
JITTER = 0.1
CLOCK_S = 0.002
"""By so much the wall clock, which tells when, and the one that only grows may differ meanwhile."""
DELAYS_S = 0, 0, 0, 0, 0.02, 0.2, 2
TTLS_S = 0, 0, 0, 0, 0, 0, 0.05, 0.5, 3
MESSAGES_MAX = 300


@dataclass(slots=True, eq=False)
class Holder:
    """A consumer with manual ack."""

    name: bytes
    prefetch: int
    held: set[bytes] = field(default_factory=set)
    unproved: list[bytes] = field(default_factory=list)
    """Rejected or released, and not known to be carried out."""
    leaving: bool = False
    queue: bytes = b""
    lines: list[bytes] = field(default_factory=list)
    """What was decided, and not sent."""


@dataclass(slots=True, eq=False)
class Patient(Item):
    sent: float = 0
    ttl_s: float = 0
    due: float = 0
    """It is not delivered before this time of the wall clock."""
    due_sure: float = 0
    """The same after a crash."""
    received: bool = False
    """Nothing less than a crash loses it."""
    rejects: int = 0
    losses: int = 0
    killed: bool = False
    """It was rejected as dead."""
    holder: Holder | None = None


class Book(scene.Book[Patient]):
    def __init__(self) -> None:
        super().__init__()
        self.unread = 0
        """Connections that were broken: what they had been given, nobody has read."""
        self._stopped = False
        """The server before, cleanly."""
        self.hurrying = 0
        """Requests under way after which nothing has to wait."""

    # -- what is sent, and answered

    def published(self, name: bytes, now: float, delay_s: float = 0, ttl_s: float = 0) -> None:
        due = now + delay_s if delay_s and not self.hurrying else 0
        self.items[name] = Patient(sent=now, ttl_s=ttl_s, due=due, due_sure=due)

    def refused(self, name: bytes) -> None:
        if self.items[name].holder is not None:
            raise Violation(f"{name!r} is refused, and was delivered")
        del self.items[name]

    def received(self, names: Iterable[bytes]) -> None:
        for name in names:
            if name in self.items:
                self.items[name].received = True

    def delivered(
        self, holder: Holder, name: bytes, data: bytes, now: float, *, dead: bool = False
    ) -> None:
        """`dead`: as a dead letter, which waits for nothing."""
        if data != payload(name):
            raise Violation(f"{name!r} was not published so")
        if holder.leaving:  # Others may have had it since, and been read sooner.
            self.items[name].losses += 1
            return
        patient = self.comes(name)
        if not dead and now < patient.due - CLOCK_S:
            raise Violation(f"{name!r} comes {patient.due - now:.3f} s early")
        if patient.holder is not None:
            raise Violation(f"{name!r} is given to {holder.name!r}, {patient.holder.name!r} has it")
        patient.due = patient.due_sure = 0
        patient.holder = holder
        holder.held.add(name)
        if holder.prefetch and len(holder.held) > holder.prefetch:
            raise Violation(f"{holder.name!r} has {len(holder.held)}, more than it may")

    def _taken_from(self, holder: Holder, name: bytes) -> Patient:
        holder.held.remove(name)
        patient = self.items[name]
        patient.holder = None
        return patient

    def acked(self, holder: Holder, name: bytes) -> None:
        self._taken_from(holder, name).asked.add(b"done")

    def rejected(
        self, holder: Holder, name: bytes, now: float, delay_s: float = 0, *, dead: bool = False
    ) -> None:
        patient = self._taken_from(holder, name)
        holder.unproved.append(name)
        patient.killed |= dead
        if dead:
            return
        patient.rejects += 1
        if not self.hurrying:
            patient.due = now + (delay_s or BACKOFF_S * (1 - JITTER))

    def released(self, holder: Holder, name: bytes, now: float, delay_s: float = 0) -> None:
        patient = self._taken_from(holder, name)
        holder.unproved.append(name)
        if delay_s and not self.hurrying:
            patient.due = now + delay_s

    def settled(self, name: bytes, action: bytes, due: float) -> None:
        """The confirm of an ack, reject or release; `due` is what was due when it was sent."""
        if action == b"ack":
            self.items[name].ended = b"done"
        elif name in self.items and self.items[name].due == due:
            self.items[name].due_sure = due

    def left(self, holder: Holder, *, unread: bool) -> None:
        """Its connection ends; `unread`: at once, so that nobody reads what is on its way."""
        holder.leaving = True
        if unread:
            self.unread += 1
            for name in holder.unproved:
                if name in self.items:
                    self.items[name].due = 0
        for name in [*holder.held]:
            self._taken_from(holder, name).losses += 1

    def hurries(self) -> None:
        """A promote or redrive is sent: nothing has to wait until it is answered."""
        self.hurrying += 1
        self._nothing_is_due_later()

    def hurried(self) -> None:
        self.hurrying -= 1
        self._nothing_is_due_later()

    def _nothing_is_due_later(self) -> None:
        for patient in self.items.values():
            patient.due = patient.due_sure = 0

    def cancelled(self, name: bytes, count: int) -> None:
        if count or name in self.items:  # Its publish may have been refused meanwhile.
            self.items[name].asked.discard(b"cancelled")
            if count:
                self.items[name].ended = b"cancelled"

    # -- what is there

    def letter(self, name: bytes, letter: DeadLetter) -> None:
        patient = self.items[name]
        possible = {
            "rejects": patient.rejects >= RETRIES,
            "losses": patient.losses + self.unread >= LOSSES,
            "dead": patient.killed,
            "ttl": bool(patient.ttl_s) and letter.died >= patient.sent + patient.ttl_s - CLOCK_S,
        }
        if letter.queue.encode() not in (QUEUE, ASIDE) or not possible.get(letter.reason):
            raise Violation(f"{name!r} cannot have died so: {letter} of {patient}")

    def is_due(self, item: Patient) -> bool:
        is_sure = item.sure or (self._stopped and item.received)
        return is_sure and not (item.asked or item.ended)

    def compare(self, places: dict[str, list[PeekedMessage]], *, stopped: bool) -> None:
        """All that there is after a start, when nothing is under way; `stopped`: cleanly."""
        self._stopped = stopped
        self.look(chain.from_iterable(map(ids, places.values())))
        for row in places["dead"]:
            if row.dead_letter is None or row.data != payload(row.id.encode()):
                raise Violation(f"{row} is not a letter as it was published")
            self.letter(row.id.encode(), row.dead_letter)

    def begin_again(self, places: dict[str, list[PeekedMessage]]) -> None:
        """What is there is all that there is, and it is sure."""
        for patient in self.keep({*chain.from_iterable(map(ids, places.values()))}):
            patient.holder, patient.due = None, patient.due_sure
        self.hurrying = 0


class Ward(Scene):
    name = "ward"
    queues = QUEUES

    def __init__(self) -> None:
        super().__init__()
        self.book = Book()

    async def restarted(self, life: Life, *, stopped: bool) -> None:
        def compare(*found: list[PeekedMessage]) -> None:
            self.book.compare(dict(zip(PLACES, found, strict=True)), stopped=stopped)

        found = await self._places(life, [*PLACES.values()], compare)
        self.book.begin_again(dict(zip(PLACES, found, strict=True)))

    async def play(self) -> None:
        wire = await self._open(
            "nurse",
            b"set_queue --confirm %b %b --dead-letters=%b" % (QUEUE, POLICY, DEAD),
            b"subscribe --confirm %b %b" % (QUEUE, EVENT),
            b"set_queue --confirm %b --dead-letters=%b" % (ASIDE, DEAD),
            b"set_queue --confirm %b" % DEAD,
        )
        works = [partial(self._treat, queue) for queue in (QUEUE, QUEUE, QUEUE, DEAD)]
        await self._together(partial(self._nurse, wire), self._publish_any, *works)

    async def _publish_any(self) -> None:
        rng, book = self._rng, self.book
        wire = await self._open("publish")
        while True:
            names, lines = list[bytes](), list[bytes]()
            for _ in range(rng.choice([1, 1, 5, 30])):
                name = self._id("m")
                delay_s, ttl_s = rng.choice(DELAYS_S), rng.choice(TTLS_S)
                confirm = rng.random() < 0.5
                book.published(name, time.time(), delay_s, ttl_s)
                wire.ask(name, partial(self._told_of_publish, name, confirm))
                flags = b"--confirm " * confirm
                flags += b"--delay=%g " % delay_s if delay_s else b""
                flags += b"--ttl=%g " % ttl_s if ttl_s else b""
                lines.append(b"%s publish %s%s %s\n" % (name, flags, EVENT, payload(name)))
                names.append(name)
            wire.send(b"".join(lines))
            if rng.random() < 0.5:
                await self._ask(wire, b"ping x")
                book.received(names)
            await self._rest(wire, MESSAGES_MAX, book)

    def _told_of_publish(self, name: bytes, confirm: bool, word: bytes, rest: bytes) -> bool:
        if word == b"error" and self._plan.errors:
            self.book.refused(name)
        elif word != b"ok" or rest or not confirm:
            raise Violation(f"{name!r}: {word!r} {rest[:100]!r}")
        else:
            self.book.confirmed(name)
        return True

    async def _treat(self, queue: bytes) -> None:
        """One connection and consumer after the other."""
        while True:
            wire = await self._open(f"work-{queue.decode()}")
            holder = Holder(self._id("c"), self._rng.choice([1, 3, 20]), queue=queue)
            lines = holder.lines
            wire.on_line = partial(self._comes, wire, holder)
            line = b"consume --confirm %b --manual-ack --prefetch=%d --meta"
            await self._ask(wire, line % (queue, holder.prefetch), holder.name)
            sent = 0
            for _ in range(self._rng.randrange(5, 100)):
                await self._ask(wire, b"ping x")
                del holder.unproved[:sent]
                if not lines and len(holder.held) >= holder.prefetch:
                    break
                wire.send(b"".join(lines))
                lines.clear()
                sent = len(holder.unproved)  # What comes while it sleeps is not among them.
                await asyncio.sleep(self._rng.choice([0, 0, 0, 0.005]))
            # What was decided and not sent happens now, so that nothing is held that was settled.
            wire.send(b"".join(lines))
            breaks = self._breaks()
            self.book.left(holder, unread=breaks)
            await self._leave(wire, breaks=breaks)

    def _comes(self, wire: Wire, holder: Holder, name: bytes, word: bytes, rest: bytes) -> None:
        if name != holder.name or word != b"ok":
            raise Violation(f"nobody asked for it: {name!r} {word!r} {rest[:200]!r}")
        message, attributes, data = rest.split(b" ", 2)
        book, rng, now = self.book, self._rng, time.time()
        is_letter = holder.queue == DEAD
        book.delivered(holder, message, data, now, dead=is_letter)
        meta = attributes.rpartition(b",meta=")[2]
        if is_letter != meta.startswith(b"reason="):
            raise Violation(f"{message!r} of {holder.queue!r} has the attributes {meta!r}")
        if holder.leaving:
            return
        what = rng.random()
        delay_s = rng.choice([0.02, 0.1, 2])
        if is_letter:
            what *= 0.6  # Letters are acked, and few of them kept.
        if 0.45 <= what < 0.6:
            return
        is_dead, waits = 0.84 <= what < 0.9, 0.78 <= what < 0.84 or what >= 0.95
        flag = b" --dead" if is_dead else b" --delay=%g" % delay_s if waits else b""
        delay_s *= waits
        if what < 0.45:
            action = b"ack"
            book.acked(holder, message)
        elif what < 0.9:
            action = b"reject"
            book.rejected(holder, message, now, delay_s, dead=is_dead)
        else:
            action = b"release"
            book.released(holder, message, now, delay_s)
        request, confirm = self._id("s"), rng.random() < 0.4
        if confirm:
            settled = partial(book.settled, message, action, book.items[message].due)
            wire.ask(request, doing(message, settled))
        words = b" --confirm" * confirm, holder.name, message, flag
        holder.lines.append(b"%s %s%s %s %s%s\n" % (request, action, *words))

    async def _nurse(self, wire: Wire) -> None:
        """Lets dead letters live again, and what is scheduled join its queue or go."""
        rng, book = self._rng, self.book
        hastes = b"redrive --confirm " + DEAD, b"promote --confirm %b --all" % QUEUE
        moves = [b"move --confirm %b %b" % way for way in ((QUEUE, ASIDE), (ASIDE, QUEUE))]
        while True:
            await asyncio.sleep(rng.uniform(0, 0.15))
            what = rng.random()
            if what < 0.4:
                await self._cancel(wire)
            elif what < 0.6:
                line = b"%b --limit=%d" % (rng.choice(moves), rng.choice([1, 10, 1000]))
                await self._ask(wire, line)
            else:
                book.hurries()
                await self._ask(wire, rng.choice(hastes))
                book.hurried()

    async def _cancel(self, wire: Wire) -> None:
        """One of those that wait for their time, if it still does."""
        now, patients = time.time(), self.book.items
        waiting = [name for name, each in patients.items() if each.due > now and not each.ended]
        if not waiting:
            return
        name = self._rng.choice(waiting)
        self.book.asks(name, b"cancelled")
        count = await self._answer(wire, b"cancel --confirm %b %b" % (QUEUE, name))
        self.book.cancelled(name, int(count))
