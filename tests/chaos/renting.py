"""A queue in order by key whose messages are leased, by whom and to whom does not matter.

`Leases` decides, without IO: a message is given once until its lease ends, over restarts, too;
one that was acked does not come back; and none comes before an earlier one of its key. `Renting`
plays: whoever knows a lease acks, extends or rejects it, from any connection, also in a later life.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.scene import Scene
from tests.chaos.wire import Life, Wire

QUEUE = b"rented"
KEYS, JOBS_MAX, RECEIVERS = 8, 150, 3
CLOCK_S = 0.005
"""By so much two looks at the clock may differ."""
LEASES_S = 0.05, 0.3, 0.3, 2, 30


@dataclass(slots=True, eq=False)
class Job:
    key: int
    place: int
    """Among those of its key."""
    sure: bool = False
    """It is durable."""
    lease: bytes = b""
    """The last one that is known."""
    until: float = 0
    """Nobody gets it before this time."""
    asked: bytes = b""
    """The request that ends its lease, or changes it, and was not answered."""
    acked: bool = False
    """That was an ack."""
    gone: bool = False
    """That was confirmed."""


@dataclass(slots=True)
class Leases:
    """Lives longer than the servers."""

    jobs: dict[bytes, Job] = field(default_factory=dict)
    places: Counter[int] = field(default_factory=Counter)
    given_count: int = 0

    def _job(self, name: bytes) -> Job:
        if name not in self.jobs:
            raise Violation(f"{name!r} was never there, or is gone since an earlier life")
        return self.jobs[name]

    def published(self, name: bytes, key: int) -> None:
        self.places[key] += 1
        self.jobs[name] = Job(key, self.places[key])

    def confirmed(self, name: bytes) -> None:
        self._job(name).sure = True

    def given(self, names: dict[bytes, bytes], until: float, now: float) -> None:
        """The answer of a receive: names and leases, which end then at the earliest."""
        for name, lease in names.items():
            job = self._job(name)
            if _deliveries(lease) < _deliveries(job.lease):
                continue  # It has ended, and others read their answer sooner.
            if job.gone:
                raise Violation(f"{name!r} is back")
            if now < job.until - CLOCK_S and not job.asked:
                raise Violation(f"{name!r} is given twice, {job.until - now:.3f} s early")
            for earlier, each in self.jobs.items():
                is_before = each.key == job.key and each.place < job.place and not each.acked
                if is_before and earlier not in names:
                    raise Violation(f"{name!r} comes before {earlier!r}, which has its key")
            job.lease, job.until, job.asked, job.acked = lease, until, b"", False
            self.given_count += 1

    @property
    def waiting(self) -> int:
        return sum(not each.gone for each in self.jobs.values())

    def asks(self, name: bytes, step: bytes, *, ack: bool = False) -> None:
        job = self._job(name)
        job.asked, job.acked = step, ack

    def answered(self, name: bytes, step: bytes, count: int, until: float, now: float) -> None:
        """An ack, reject or extension was confirmed; the lease ends then at the earliest."""
        job = self.jobs.get(name)
        if job is None or job.asked != step:  # It was given again meanwhile.
            return
        if not count:
            if now < job.until - CLOCK_S:
                raise Violation(f"the lease of {name!r} was over {job.until - now:.3f} s early")
            job.asked, job.acked = b"", False
            return
        job.gone, job.until, job.asked = job.acked, until, b""

    def compare(self, leased: list[bytes], ready: list[bytes], now: float) -> None:
        """All that is there after a start; the leased ones were looked at first."""
        if twice := [name for name, count in Counter(leased + ready).items() if count > 1]:
            raise Violation(f"{twice} are there twice")
        for name in leased + ready:
            if self._job(name).gone:
                raise Violation(f"{name!r} is back")
        for name in ready:
            if now < self.jobs[name].until - CLOCK_S and not self.jobs[name].asked:
                raise Violation(f"{name!r} is ready, and its lease has not ended")
        there = {*leased, *ready}
        for name, job in self.jobs.items():
            if job.sure and not job.acked and name not in there:
                raise Violation(f"{name!r} is lost")

    def begin_again(self, there: list[bytes]) -> None:
        self.jobs = {name: self.jobs[name] for name in there}
        for job in self.jobs.values():
            if job.asked:
                job.until = 0
            job.sure, job.asked, job.acked = True, b"", False


def _deliveries(lease: bytes) -> int:
    return int(lease.rpartition(b".")[2] or 0)


class Renting(Scene):
    name = "renting"

    def __init__(self) -> None:
        super().__init__()
        self.book = Leases()

    async def restarted(self, life: Life) -> None:
        """Leases end meanwhile."""

        def compare(*places: list[PeekedMessage]) -> None:
            leased, ready = [[each.id.encode() for each in place] for place in places]
            self.book.compare(leased, ready, time.time())

        leased, ready = await self._places(life, [QUEUE + b" --scheduled", QUEUE], compare)
        self.book.begin_again([each.id.encode() for each in leased + ready])

    async def play(self) -> None:
        wire = await Wire.open(self._life, "renting-publish")
        await self._ask(wire, b"set_queue --confirm %b --ordered=key" % QUEUE)
        await self._ask(wire, b"subscribe --confirm %b rented.job" % QUEUE)
        publish = partial(self._publish, wire, b"rented.job", KEYS, JOBS_MAX, self.book)
        await self._together(publish, *[self._receive] * RECEIVERS)

    async def _receive(self) -> None:
        """One connection after the other."""
        rng = self._rng
        while True:
            wire = await Wire.open(self._life, "renting-receive")
            for _ in range(rng.randrange(5, 60)):
                lease_s, sent = rng.choice(LEASES_S), time.time()
                words = QUEUE, rng.choice([1, 3, 10]), lease_s, rng.choice([0, 0.05])
                line = b"receive %b --limit=%d --lease=%g --wait=%g" % words
                self._given(await self._ask(wire, line), sent + lease_s)
                # Whoever knows a lease may end it.
                known = [name for name, job in self.book.jobs.items() if self._may_ask(job)]
                some = [name for name in known if rng.random() < 0.5]
                wire.send(b"".join([self._line(wire, name) for name in some]))
            await self._leave(wire, breaks=self._breaks())

    @staticmethod
    def _may_ask(job: Job) -> bool:
        return bool(job.lease) and not (job.asked or job.gone)

    def _given(self, told: list[bytes], until: float) -> None:
        names = dict[bytes, bytes]()
        for rest in told:
            name, attributes, _ = rest.split(b" ", 2)
            names[name] = attributes.rpartition(b",lease=")[2]
        self.book.given(names, until, time.time())

    def _line(self, wire: Wire, name: bytes) -> bytes:
        """What is done with a lease."""
        rng, job, step, now = self._rng, self.book.jobs[name], self._id("l"), time.time()
        what, until = rng.random(), 0.0
        if what < 0.6:
            flags = b"--ack"
        elif what < 0.8:
            flags = b"--reject"
        else:
            for_s = rng.choice([0, 0.1, 5])
            flags, until = b"--for=%g" % for_s, now + for_s if for_s else 0
        self.book.asks(name, step, ack=what < 0.6)

        def told(word: bytes, rest: bytes) -> bool:
            if word != b"ok" or rest not in (b"0", b"1"):
                raise Violation(f"{step!r}: {word!r} {rest[:100]!r}")
            self.book.answered(name, step, int(rest), until, time.time())
            return True

        wire.ask(step, told)
        return b"%b lease --confirm %b %b %b\n" % (step, QUEUE, job.lease, flags)
