"""A queue in order by key whose messages are leased, by whom and to whom does not matter.

`Leases` decides, without IO: a message is given once until its lease ends, over restarts, too;
one that was acked does not come back; and none comes before an earlier one of its key. `Renting`
plays: whoever knows a lease acks, extends or rejects it, from any connection, also in a later life.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial

from mqks.client.messages import PeekedMessage
from tests.chaos.checker import Violation
from tests.chaos.scene import Keyed, KeyedBook, Scene, ids, told
from tests.chaos.wire import Life, Wire

QUEUE = b"rented"
KEYS, JOBS_MAX, RECEIVERS = 8, 150, 3
CLOCK_S = 0.005
"""By so much two looks at the clock may differ."""
LEASES_S = 0.05, 0.3, 0.3, 2, 30


@dataclass(slots=True, eq=False)
class Job(Keyed):
    lease: bytes = b""
    """The last one that is known."""
    until: float = 0
    """Nobody gets it before this time."""
    step: bytes = b""
    """The request that ends its lease, or changes it, and was not answered."""


class Leases(KeyedBook[Job]):
    def __init__(self) -> None:
        super().__init__(Job)
        self.given_count = 0

    def given(self, names: dict[bytes, bytes], until: float, now: float) -> None:
        """The answer of a receive: names and leases, which end then at the earliest."""
        for name, lease in names.items():
            if _deliveries(lease) < _deliveries(self.items[name].lease):
                continue  # It has ended, and others read their answer sooner.
            job = self.comes_in_order(name, lambda other, each: bool(each.asked) or other in names)
            if now < job.until - CLOCK_S and not job.step:
                raise Violation(f"{name!r} is given twice, {job.until - now:.3f} s early")
            job.lease, job.until, job.step, job.asked = lease, until, b"", set()
            self.given_count += 1

    def asks(self, name: bytes, step: bytes = b"", *, ack: bool = False) -> None:
        job = self.items[name]
        job.step, job.asked = step, {b"done"} if ack else set()

    def answered(self, name: bytes, step: bytes, count: int, until: float, now: float) -> None:
        """An ack, reject or extension was confirmed; the lease ends then at the earliest."""
        job = self.items.get(name)
        if job is None or job.step != step:  # It was given again meanwhile.
            return
        if not count:
            if now < job.until - CLOCK_S:
                raise Violation(f"the lease of {name!r} was over {job.until - now:.3f} s early")
            job.step, job.asked = b"", set()
            return
        job.ended, job.until, job.step = b"done" if job.asked else b"", until, b""

    def compare(self, leased: list[bytes], ready: list[bytes], now: float) -> None:
        """All that is there after a start; the leased ones were looked at first."""
        self.look(leased + ready)
        for name in ready:
            if now < self.items[name].until - CLOCK_S and not self.items[name].step:
                raise Violation(f"{name!r} is ready, and its lease has not ended")

    def begin_again(self, there: list[bytes]) -> None:
        for job in self.keep(there):
            job.until, job.step = 0 if job.step else job.until, b""


def _deliveries(lease: bytes) -> int:
    return int(lease.rpartition(b".")[2] or 0)


class Renting(Scene):
    name = "renting"
    queues = (QUEUE,)

    def __init__(self) -> None:
        super().__init__()
        self.book = Leases()

    @property
    def counts(self) -> dict[str, int]:
        return {"leases": self.book.given_count}

    async def restarted(self, life: Life, *, stopped: bool) -> None:
        def compare(leased: list[PeekedMessage], ready: list[PeekedMessage]) -> None:
            self.book.compare(ids(leased), ids(ready), time.time())

        leased, ready = await self._places(life, [QUEUE + b" --scheduled", QUEUE], compare)
        self.book.begin_again(ids(leased + ready))

    async def play(self) -> None:
        wire = await self._open(
            "publish",
            b"set_queue --confirm %b --ordered=key" % QUEUE,
            b"subscribe --confirm %b rented.job" % QUEUE,
        )
        publish = partial(self._publish, wire, b"rented.job", KEYS, JOBS_MAX, self.book)
        await self._together(publish, *[self._receive] * RECEIVERS)

    async def _receive(self) -> None:
        rng = self._rng
        while True:
            wire = await self._open("receive")
            for _ in range(rng.randrange(5, 60)):
                lease_s, sent = rng.choice(LEASES_S), time.time()
                words = QUEUE, rng.choice([1, 3, 10]), lease_s, rng.choice([0, 0.05])
                line = b"receive %b --limit=%d --lease=%g --wait=%g" % words
                given = [each.split(b" ", 2) for each in await self._ask(wire, line)]
                leases = {name: about.rpartition(b",lease=")[2] for name, about, _ in given}
                self.book.given(leases, sent + lease_s, time.time())
                # Whoever knows a lease may end it.
                jobs = self.book.items.items()
                known = [name for name, job in jobs if job.lease and not (job.step or job.ended)]
                some = [name for name in known if rng.random() < 0.5]
                wire.send(b"".join([self._line(wire, name) for name in some]))
            await self._leave(wire, breaks=self._breaks())

    def _line(self, wire: Wire, name: bytes) -> bytes:
        rng, job, step, now = self._rng, self.book.items[name], self._id("l"), time.time()
        what, until = rng.random(), 0.0
        if what < 0.6:
            flags = b"--ack"
        elif what < 0.8:
            flags = b"--reject"
        else:
            for_s = rng.choice([0, 0.1, 5])
            flags, until = b"--for=%g" % for_s, now + for_s if for_s else 0
        self.book.asks(name, step, ack=what < 0.6)

        def answered(rest: bytes) -> None:
            if rest not in (b"0", b"1"):
                raise Violation(f"{step!r}: {rest[:100]!r}")
            self.book.answered(name, step, int(rest), until, time.time())

        wire.ask(step, told(step, answered))
        return b"%b lease --confirm %b %b %b\n" % (step, QUEUE, job.lease, flags)
