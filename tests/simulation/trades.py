"""Who comes to a broker for some minutes in hours or days: publishers, consumers and receivers of a
queue, and what each of its messages may do meanwhile.

The one rule: when a message may come, and when it must, is reckoned here from the terms that it was
published with and from what was done with it. It is exact as long as the server runs and no clock
is set; over a restart by as much as clocks were wrong.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Final, NoReturn
from zlib import crc32

from tests.simulation.loop import Violation

if TYPE_CHECKING:
    from tests.simulation.long import Long

HOUR_S, DAY_S = 3600.0, 86400.0
RESTS_S: Final = 4 * HOUR_S, 12 * HOUR_S, 2 * DAY_S
"""Between two visits, about."""
SIZES: Final = 1, 1, 5, 20, 100
DELAYS_S: Final = None, None, 600.0, 5 * HOUR_S, DAY_S, 7 * DAY_S
TTLS_S: Final = None, None, 1800.0, 6 * HOUR_S, 3 * DAY_S
KEEPS_S: Final = None, None, HOUR_S, DAY_S, 7 * DAY_S
LEASES_S: Final = 60.0, HOUR_S, 9 * HOUR_S
STAYS_S: Final = 0.0, 0.0, 300.0, 4 * HOUR_S
ONCE_S: Final = 600.0, 6 * HOUR_S, 3 * DAY_S
UNUSED_S: Final = HOUR_S, DAY_S, 5 * DAY_S
QUIET_S: Final = 30.0
"""Nothing more comes after so long."""
EXACT_S: Final = 0.1
WRONG_S: Final = 60.0
"""A time from before a restart, or of a wall clock that was set, is wrong by less than that."""
HELD_MAX: Final = 5
FINER: Final = 4096
"""The TTL of a queue is exact to such a part of it."""


@dataclass(slots=True, eq=False)
class Item:
    """A message in a queue. Times are monotonic seconds."""

    id: str
    number: int
    """Of those of its queue that have no delay; 0 with one."""
    keep_s: float | None
    troubles: int
    """Of the world, when it was told when it comes."""
    early_s: float
    late_s: float
    """It comes after the first, and must have come some time after the second."""
    ttl_s: float
    ends_early_s: float = 0.0
    ends_late_s: float = 0.0
    """Between these it dies if it waits."""
    came: int = 0
    rejects_least: int = 0
    rejects: int = 0
    losses: int = 0
    """At the most."""
    is_done: bool = False
    is_certain: bool = True
    """Whether what was done with it last has arrived."""
    done_s: float = inf
    first_troubles: int = 0
    """When it was published, and with it its end was told."""

    def __post_init__(self) -> None:
        self.first_troubles = self.troubles
        self.ends_early_s, self.ends_late_s = self.early_s + self.ttl_s, self.late_s + self.ttl_s


async def until_quiet(messages: Any, quiet_s: float) -> AsyncIterator[Any]:
    """Until nothing more has come for so long."""
    with suppress(TimeoutError):
        while True:
            yield await messages.receive(quiet_s)


@dataclass(slots=True)
class Visit:
    troubles: int
    breaks: int
    touched: dict[str, Item] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    """What is neither acked nor rejected, and since when."""


class Visitor:
    """Who comes, and rests for long."""

    def __init__(self, world: "Long", name: str) -> None:
        self.world, self.name = world, name
        self.rng = random.Random(f"{name} {world.seed}")

    @property
    def now_s(self) -> float:
        return self.world.clock.monotonic_s

    async def visits(self) -> AsyncIterator[None]:
        while await self.world.rest(self.rng.expovariate(1 / self.rng.choice(RESTS_S))):
            yield


class Trade(Visitor):
    """A queue, and who comes to it."""

    def __init__(self, world: "Long", name: str) -> None:
        super().__init__(world, name)
        rng = self.rng
        self.dead = f"{name}-dead" if rng.random() < 0.6 else None
        self.ttl_s = rng.choice((None, None, 12 * HOUR_S, 10 * DAY_S))
        self.backoff = rng.choice((None, (60.0, 2 * HOUR_S), (HOUR_S, 2 * DAY_S)))
        self.ack_timeout_s = rng.choice((600.0, 2 * HOUR_S))
        self.items: dict[str, Item] = {}
        self.published = self.delivered = self.deaths = 0
        self._numbers = 0
        self._newest = 0
        """The last one without a delay that has come."""
        self._bursts = 0
        self._visits = asyncio.Lock()

    def violate(self, item: Item | str, what: str) -> NoReturn:
        raise Violation(f"queue {self.name}: {what}: {item}, now {self.now_s:.3f}")

    async def set_up(self, client: Any) -> None:
        await client.subscribe(self.name, [self.name])
        if self.dead:
            await client.subscribe(self.dead, [self.dead])
        policy = {"ttl_s": self.ttl_s, "backoff": self.backoff, "dead_letter_queue": self.dead}
        chosen = {name: each for name, each in policy.items() if each is not None}
        await client.set_queue(self.name, ack_timeout_s=self.ack_timeout_s, **chosen)

    # -- who comes

    async def publish(self) -> None:
        async for _ in self.visits():
            async with self.world.client() as client:
                await self._publish(client, self.rng.choice(SIZES))
                await self._ask_results(client)

    async def _publish(self, client: Any, size: int) -> None:
        rng, world = self.rng, self.world
        delay_s, ttl_s, keep_s = map(rng.choice, (DELAYS_S, TTLS_S, KEEPS_S))
        self._bursts += 1
        prefix, troubles, start_s = f"{self.name}-{self._bursts}", world.troubles, self.now_s
        terms: dict[str, Any] = {"ttl_s": ttl_s, "keep_result_s": keep_s, "delay_s": delay_s}
        if delay_s and rng.random() < 0.5:
            terms["at"], terms["delay_s"] = world.clock.wall() + delay_s, None
        many = [(self.name, "x" * rng.choice((1, 1, 3000)))] * size
        world.note("publish", prefix, size, terms)
        least_s, early_s = min(ttl_s or inf, self.ttl_s or inf), start_s + (delay_s or 0.0)
        items = []
        for number in range(1, size + 1):
            self._numbers += not delay_s
            order = 0 if delay_s else self._numbers
            # A consumer may have it before it is confirmed.
            item = Item(f"{prefix}-{number}", order, keep_s, troubles, early_s, inf, least_s)
            self.items[item.id] = item
            items.append(item)
        await client.publish_many(many, id_prefix=prefix, once_s=HOUR_S, **terms)
        late_s = self.now_s + (delay_s or 0.0)
        for item in items:
            item.ends_late_s = late_s + least_s
            if not item.came:
                item.late_s = late_s
        self.published += size

    async def take(self) -> None:
        async for _ in self.visits():
            await self.visit()

    async def visit(self, *, wants_all: bool = False) -> None:
        """Take what is there; `wants_all`: and keep nothing."""
        async with self._visits:
            if wants_all or self.rng.random() < 0.7:
                await self._consume(wants_all=wants_all)
            else:
                await self._receive()
            if self.dead:
                await self._take_dead()
            self._judge_deaths()

    @asynccontextmanager
    async def _visit(self) -> AsyncIterator[Visit]:
        world = self.world
        visit = Visit(world.troubles, world.breaks)
        yield visit
        if world.breaks != visit.breaks:
            for item in visit.touched.values():
                self._forget(item)

    def _forget(self, item: Item) -> None:
        """The server has ended: what was sent last may not have arrived, or counts as nothing."""
        item.is_certain = False
        # A lease may be longer than an ack timeout.
        item.early_s, item.late_s = -inf, max(item.late_s, self.now_s + self._longest_s())
        item.rejects_least, item.troubles = 0, -1

    def _longest_s(self) -> float:
        return self.ack_timeout_s + 1.1 * (self.backoff[1] if self.backoff else 0.0)

    async def _consume(self, *, wants_all: bool) -> None:
        rng, world = self.rng, self.world
        stays_s = 0.0 if wants_all else rng.choice(STAYS_S)
        world.note("consume", self.name, stays_s)
        async with self._visit() as visit:
            async with world.client() as client, client.consume(self.name) as messages:
                await self._work(messages, visit, QUIET_S, wants_all=wants_all)
                self._judge_rest(visit)
                leaves_s = self.now_s + stays_s
                while self.now_s < leaves_s - 1:
                    await self._work(messages, visit, leaves_s - self.now_s, wants_all=False)
                left_s = self.now_s
            for id_, since_s in visit.held.items():
                if since_s + self.ack_timeout_s > left_s:
                    item = self.items[id_]
                    self._lost(item, left_s, again=0)
                    if since_s + self.ack_timeout_s < self.now_s + QUIET_S:
                        item.late_s += self._longest_s()  # Whether it left or was late is open.

    async def _work(self, messages: Any, visit: Visit, quiet_s: float, *, wants_all: bool) -> None:
        rng = self.rng
        async for message in until_quiet(messages, quiet_s):
            item = self._came(message.id, message.retry, visit)
            what = 0.0 if wants_all else rng.random()
            if what > 0.95 and len(visit.held) < HELD_MAX:
                visit.held[item.id] = self.now_s
                self._lost(item, self.now_s + self.ack_timeout_s)
            elif what > 0.9:
                message.reject()
                item.rejects_least += 1
                item.rejects += 1
                least_s = self._backoff_s(item, item.rejects_least)
                wait_s = self._backoff_s(item, item.rejects)
                if item.rejects_least < item.rejects:
                    least_s, wait_s = 0.8 * least_s, 1.3 * wait_s  # Both have jitter.
                self._comes_again(item, self.now_s + least_s, self.now_s + wait_s)
            else:
                message.ack()
                self._done(item)

    async def _receive(self) -> None:
        rng, world = self.rng, self.world
        world.note("receive", self.name)
        async with self._visit() as visit, world.client() as client:
            while True:
                lease_s, asked_s = rng.choice(LEASES_S), self.now_s
                some = await client.receive(self.name, limit=20, lease_s=lease_s, wait_s=1)
                if not some:
                    break
                for each in some:
                    item = self._came(each.id, each.retry, visit)
                    if rng.random() < 0.8:
                        is_there = await client.ack_lease(self.name, each.lease)
                        if not is_there and world.breaks == visit.breaks:
                            self.violate(item, "its lease is not known")
                        self._done(item)
                    else:
                        visit.held[item.id] = self.now_s
                        self._comes_again(item, asked_s + lease_s, self.now_s + lease_s)
            self._judge_rest(visit)

    async def _take_dead(self) -> None:
        how = {"meta": True}
        async with self.world.client() as client, client.consume(self.dead, **how) as messages:
            async for message in until_quiet(messages, QUIET_S):
                self._died(message)
                message.ack()

    # -- what it may do

    def _tolerance_s(self, troubles: int) -> float:
        return EXACT_S if troubles == self.world.troubles else WRONG_S

    def _came(self, id_: str, retry: int, visit: Visit) -> Item:
        item = self.items.get(id_)
        if item is None:
            self.violate(id_, "nobody has published it, or it is over")
        may_s = self._tolerance_s(item.troubles)
        if id_ in visit.touched and self.world.breaks != visit.breaks:
            self._forget(item)
        if item.is_done and item.is_certain:
            self.violate(item, "it was acked, and comes again")
        if self.now_s < item.early_s - may_s:
            self.violate(item, "it comes early")
        if self.now_s > self._ends_s(item) + self._tolerance_s(item.first_troubles):
            self.violate(item, "its TTL was over")
        if not item.came and item.number and not retry:
            if item.number < self._newest:
                self.violate(item, f"number {self._newest} came before it")
            self._newest = item.number
        self.world.note("came", id_, retry)
        item.came += 1
        self.delivered += 1
        item.is_done, item.is_certain = False, True
        visit.touched[id_] = item
        visit.held.pop(id_, None)
        return item

    def _ends_s(self, item: Item) -> float:
        """It has died by then. What is due while there is no server joins its queue afterwards."""
        if item.ttl_s == inf:
            return inf
        joins_s = self.world.served_s(item.ends_late_s - item.ttl_s)
        return self.world.served_s(joins_s + item.ttl_s * (1 + 1 / FINER))

    def _done(self, item: Item) -> None:
        item.is_done, item.done_s = True, self.now_s
        item.troubles = self.world.troubles

    def _lost(self, item: Item, lost_s: float, again: int = 1) -> None:
        """It is, at this time."""
        item.losses += again
        self._comes_again(item, lost_s, lost_s + 1.1 * self._longest_backoff_s(item.losses - 1))

    def _comes_again(self, item: Item, early_s: float, late_s: float) -> None:
        item.early_s, item.late_s = early_s, late_s
        item.troubles = self.world.troubles

    def _longest_backoff_s(self, count: int) -> float:
        if not (self.backoff and count > 0):
            return 0.0
        first_s, most_s = self.backoff
        return float(min(first_s * 2 ** (count - 1), most_s))

    def _backoff_s(self, item: Item, count: int) -> float:
        """After so many rejects, as docs/protocol.md has it."""
        jitter = 2 * crc32(f"{count} {item.id}".encode()) / 2**32 - 1
        return self._longest_backoff_s(count) * (1 + 0.1 * jitter)

    def _judge_rest(self, visit: Visit) -> None:
        """All that was due when this visit began to wait has come."""
        since_s = self.now_s - QUIET_S
        for item in self.items.values():
            if item.is_done or not item.is_certain or item.id in visit.held:
                continue
            is_due = item.late_s + self._tolerance_s(item.troubles) + EXACT_S < since_s
            if is_due and self.now_s < item.ends_early_s - self._tolerance_s(item.first_troubles):
                self.violate(item, "it is due, and does not come")

    def _died(self, message: Any) -> None:
        item, letter = self.items.get(message.id), message.dead_letter
        if item is None or letter is None:
            self.violate(message.id, "nobody has published it, or it is over, and it is dead")
        if item.is_done and item.is_certain:
            self.violate(item, "it was acked, and is dead")
        if letter.reason != "ttl":
            self.violate(item, f"it is dead for {letter.reason}")
        may_s = max(self._tolerance_s(item.troubles), self._tolerance_s(item.first_troubles))
        died_s = letter.died - self.world.clock.ahead_s
        late_s = max(self._ends_s(item), self.world.served_s(item.late_s)) + may_s
        if died_s < item.ends_early_s - may_s:
            self.violate(item, f"it has died early, at {died_s:.3f}")
        if died_s > late_s and item.is_certain:
            self.violate(item, f"it has died late, at {died_s:.3f}")
        self.deaths += 1
        del self.items[item.id]

    def _judge_deaths(self) -> None:
        """What is dead has been in the queue of dead letters. What is over is forgotten."""
        for item in [*self.items.values()]:
            late_s = max(self._ends_s(item), self.world.served_s(item.late_s)) + WRONG_S
            if not item.is_done and self.now_s > late_s + 2 * QUIET_S and item.ttl_s < inf:
                if self.dead and item.is_certain:
                    self.violate(item, "its TTL is over, and it is nowhere")
                del self.items[item.id]
            elif item.is_done and self.now_s > item.done_s + 2 * (item.keep_s or HOUR_S):
                del self.items[item.id]

    async def _ask_results(self, client: Any) -> None:
        kept = [item for item in self.items.values() if item.keep_s is not None and item.is_certain]
        for item in self.rng.sample(kept, min(3, len(kept))):
            # A consumer that has it changes that meanwhile.
            if self._visits.locked():
                return
            told = (await client.job(item.id).state()).state
            if self._visits.locked() or not item.is_certain:
                return
            self.world.note("result", item.id, told)
            self._judge_result(item, told)

    def _judge_result(self, item: Item, told: str) -> None:
        assert item.keep_s is not None
        may_s, now_s = self._tolerance_s(item.troubles), self.now_s
        over_s = item.done_s + item.keep_s
        wanted = {"waiting", "running", "dead", "none"}
        if item.is_done:
            wanted = {"done", "none"}
            if now_s < over_s - may_s:
                wanted = {"done"}
            elif now_s > over_s + may_s:
                wanted = {"none"}
        elif now_s < item.ends_early_s - self._tolerance_s(item.first_troubles):
            wanted = {"waiting", "running"}
        if told not in wanted:
            self.violate(item, f"its result is {told}, and not {wanted}")


class Once(Visitor):
    """Publishes the same ids again and again: each exists once in its time."""

    queue = "once"

    def __init__(self, world: "Long") -> None:
        super().__init__(world, "once")
        self.known: dict[str, tuple[float, float, int]] = {}
        """When each was accepted last, for how long it counts, and the troubles before."""
        self.wanted = Counter[str]()
        """How often each is in the queue."""
        self.sent = 0

    async def publish(self) -> None:
        async for _ in self.visits():
            async with self.world.client() as client:
                for _ in range(self.rng.choice(SIZES[:-1])):
                    await self._send(client)
                await self._judge(client)

    async def _send(self, client: Any) -> None:
        rng, world = self.rng, self.world
        id_, for_s = f"once-{rng.randrange(30)}", rng.choice(ONCE_S)
        accepted_s, counts_s, troubles = self.known.get(id_, (-inf, 0.0, 0))
        before_s, breaks = self.now_s, world.breaks
        if troubles != world.troubles and abs(before_s - accepted_s - counts_s) < WRONG_S:
            return  # Whether it is remembered depends on the clock.
        if breaks != world.breaks:
            return
        # It is resent after a break: those of 600 s and more outlast it.
        await client.publish(self.queue, "x", id=id_, once_s=for_s, confirm=True)
        self.sent += 1
        if before_s - accepted_s < counts_s:
            return
        self.known[id_] = before_s, for_s, world.troubles
        self.wanted[id_] += 1

    async def _judge(self, client: Any) -> None:
        found = Counter(row.id for row in await client.peek(self.queue, limit=100_000))
        if found != self.wanted:
            differing = {(id_, self.known[id_]) for id_, _ in found.items() ^ self.wanted.items()}
            told = [(id_, found.get(id_), self.wanted.get(id_), each) for id_, each in differing]
            raise Violation(f"published once, there, wanted, known: {sorted(told)[:5]}")
        await client.purge(self.queue)
        self.wanted.clear()


class Unused(Visitor):
    """Queues that are deleted when they are unused."""

    def __init__(self, world: "Long") -> None:
        super().__init__(world, "unused")
        self.left: dict[str, tuple[float, float]] = {}
        """When each is deleted, and after how long."""
        self.deleted = 0
        self._count = 0

    async def come(self) -> None:
        rng = self.rng
        async for _ in self.visits():
            async with self.world.client() as client:
                await self.judge(client)
                if self.left and rng.random() < 0.5:
                    name = rng.choice([*self.left])
                else:
                    self._count += 1
                    name = f"unused-{self._count}"
                for_s = rng.choice(UNUSED_S)
                if self._is_near(name):
                    continue
                async with client.consume(name, [name], delete_when_unused=for_s) as messages:
                    self.left.pop(name, None)
                    await client.publish(name, "x", confirm=True)
                    await messages.receive()
                    await asyncio.sleep(rng.choice(STAYS_S))
                self.left[name] = self.now_s + for_s, for_s

    def _is_near(self, name: str) -> bool:
        """Its end is: whether it is still there is open."""
        due_s, _ = self.left.get(name, (inf, 0.0))
        return abs(due_s - self.now_s) < WRONG_S

    def begin_life(self, ended_s: float) -> None:
        """A start of the server begins the time anew of those that were there at its end."""
        for name, (due_s, for_s) in [*self.left.items()]:
            if abs(due_s - ended_s) < WRONG_S:
                del self.left[name]
            elif due_s > ended_s:
                self.left[name] = self.now_s + for_s, for_s

    async def judge(self, client: Any) -> None:
        now_s, breaks = self.now_s, self.world.breaks
        there = {row["name"] for row in await client.stats("queues")}
        if breaks != self.world.breaks:
            return
        for name, (due_s, for_s) in [*self.left.items()]:
            if name in there and now_s > due_s + EXACT_S + 1:
                raise Violation(f"{name} is there {now_s - due_s:.1f} s after its {for_s:.0f} s")
            if name not in there:
                if now_s < due_s - EXACT_S - 1:
                    told = f"{name} is gone {due_s - now_s:.1f} s before its {for_s:.0f} s"
                    raise Violation(told)
                self.deleted += 1
                del self.left[name]
