"""Talkers who send whatever the table of requests allows, one by one and in bursts, to a server of
the simulated world that is killed, stopped and started again.

The one rule: they want nothing. What is judged is what holds whatever is sent: each reply has an
asker and each confirm comes once, the invariants of the broker hold between any two steps, nothing
spins, and when all have left nothing is held any more.
"""

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from tests.simulation.grammar import (
    QUEUES,
    VALUES,
    Usage,
    is_allowed,
    of_clients,
    of_transactions,
    usages,
)
from tests.simulation.host import Host
from tests.simulation.loop import NOBODY, Process, Violation
from tests.simulation.world import PORT, URL, World, mqks

if TYPE_CHECKING:
    from mqks.broker.spine.log.pending import Pending
    from tests.fuzz.peer import Peer

TALKERS: Final = 12
RESTS_S: Final = 0.001, 0.1, 5.0, 600.0
BURSTS: Final = 3, 3, 50, 50, 1000, 1000, 1000, 20_000
DRAWN_MAX: Final = 100
"""So many lines of a burst differ in more than their id."""
DRAWS: Final = 30
"""Of a line that the table allows."""
NAMED: Final = 1, 2, 5, 5
"""So many queues are named in a talk."""
WRONG: Final = 0.05
"""Share of draws that may be wrong."""
LINE_BYTES: Final = 1024 * 1024
LEFT_S: Final = 40 * 86400.0
"""A receive waits for no longer, so that a connection whose client has no more to send ends."""
WRITTEN_S: Final = 1.0
"""What is pending while the server runs is written within this time."""
IDLE_S: Final = 3600.0
IDLE_TURNS_MAX: Final = 20_000
"""A server that nobody asks for anything takes no more turns in this time."""
USERS_EVERY: Final = 4
"""In one of so many seeds everybody has to log in, and limits are low."""
TOKENS: Final = {"u": "token", "admin": "token-of-admin"}
LOW: Final = {
    "auth_timeout_s": 5.0,
    "batches_max": 2,
    "bindings_per_queue_max": 3,
    "connections_per_address_max": 10,
    "consumers_per_connection_max": 1,
    "name_bytes_max": 64,
    "once_ids_max": 10,
    "queues_max": 4,
    "results_max": 5,
    "tails_max": 1,
    "unauthenticated_max": 2,
}
LOOKS_S: Final = 3.0
_BODY: Final = re.compile(rb"\S+ ok --read epoch=\S+ runs=\d+ rows=\d+ next=\d+ bytes=(\d+)")
_ANSWER: Final = re.compile(rb"\S+ (?:ok --end|error .*)")
"""Of receive."""
_LEASE: Final = re.compile(rb",lease=([^ ,]+)")
_EPOCH: Final = re.compile(rb"epoch=(\S+)")
_MESSAGE: Final = re.compile(rb"(\S+) ok (\S+) event=")


class Wire(asyncio.Protocol):
    """A connection that keeps books of what is due."""

    def __init__(self, peer: "Peer", chance: "Talker") -> None:
        self.peer = peer
        self._chance = chance
        self._data = b""
        self.receives = set[bytes]()
        """Those without an answer."""
        self.closed = asyncio.Event()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        data, start, lines = self._data + data, 0, list[bytes]()
        while (end := data.find(b"\n", start)) >= 0:
            line = data[start:end]
            body = _BODY.fullmatch(line)
            size = int(body[1]) if body else 0
            if len(data) < end + 1 + size:
                break
            lines.append(line)
            start = end + 1 + size
        self._data = data[start:]
        if lines:
            # A server that drains lets nobody in, and says so: it has no request.
            replies = [line for line in lines if not line.startswith(b"- error ")]
            if replies:
                self.peer.received(b"\n".join(replies) + b"\n")
            # No line of a talker lacks its id: another one has closed the connection.
            self.peer.expelled |= any(line.startswith(b"- error ") for line in lines)
            self._chance.learn(lines)
            if self.receives:
                self.receives.difference_update(
                    line.partition(b" ")[0] for line in lines if _ANSWER.fullmatch(line)
                )

    def connection_lost(self, failure: Exception | None) -> None:
        self.closed.set()


class Talker:
    def __init__(self, world: "Talk", name: str) -> None:
        self.rng = world.rng
        self._world, self._name = world, name
        self.consumers = [f"c{number}-{name}" for number in range(3)]
        self.consumer = ""
        self.queues: Sequence[str] = QUEUES
        self.held: dict[str, list[str]] = {}
        self.messages: list[str] = []
        self.leases: list[str] = []
        self.epochs: list[str] = []
        self._count = 0
        self._is_vague = False
        self._usages: dict[str, Usage] = {}

    def learn(self, lines: list[bytes]) -> None:
        for line in lines[:20]:
            for known, pattern in (self.leases, _LEASE), (self.epochs, _EPOCH):
                if found := pattern.search(line):
                    self._keep(known, found[1])
            if found := _MESSAGE.match(line):
                self._keep(self.messages, found[2])
                self._keep(self.held.setdefault(found[1].decode(), []), found[2])

    @staticmethod
    def _keep(known: list[str], seen: bytes) -> None:
        known.append(seen.decode("utf-8", "replace"))
        del known[:-30]

    async def run(self) -> None:
        while self._world.has_faults:
            try:
                await self._connect()
            except OSError:
                await asyncio.sleep(self.rng.uniform(0.1, 5))
                continue
            await self._talk()

    async def _connect(self) -> None:
        from tests.fuzz.peer import Peer

        self._is_vague = False
        # What is done to the same few meets oftener.
        self.queues = self.rng.sample(QUEUES, self.rng.choice(NAMED))
        self.wire = Wire(Peer(cast(Any, None), keeps_books=True), self)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: self.wire, "127.0.0.1", PORT)
        if self._world.has_users:
            token = self.rng.choice([*TOKENS.values(), "wrong"])
            self._send(f"{self._named('auth')} auth {token}\n".encode())
        # Others may have drained the server, and nobody would do anything else any more.
        self._send(b"u drain --off\nv read_only off\n")
        if self.rng.random() < 0.7:  # What is drawn would seldom hold a message.
            queue, consumer = VALUES["queue"](self), self.rng.choice(self.consumers)
            prefetch = self.rng.choice((1, 10, 1000))
            self._send(f"s subscribe {queue} **\n".encode())
            self._send(f"{consumer} consume {queue} --manual-ack --prefetch={prefetch}\n".encode())

    async def _talk(self) -> None:
        rng, wire = self.rng, self.wire
        self._usages = rng.choice(self._world.usages)
        for _ in range(rng.randrange(2, 40)):
            self._send(self._drawn())
            if rng.random() < 0.05:
                wire.transport.pause_reading()
                await asyncio.sleep(rng.choice(RESTS_S[:3]))
                wire.transport.resume_reading()
            await asyncio.sleep(rng.expovariate(1 / rng.choice(RESTS_S)))
            if wire.closed.is_set() or not self._world.has_faults:
                break
        what = rng.random()
        if what < 0.2:
            self._send(b"half a line")
        if what < 0.5:
            wire.transport.abort()
        elif not wire.transport.is_closing():
            server = self._world.host.process
            if rng.random() < 0.5:
                self._send(f"{self._named('receive')} receive q1 --wait=20\n".encode())
            wire.transport.write_eof()
            await asyncio.wait_for(wire.closed.wait(), LEFT_S)
            if not server.dead and not wire.peer.expelled:
                self._world.settled += 1
                wire.peer.settle()
                # Of a transaction, or behind a login, some have none.
                if wire.receives and not (self._is_vague or self._world.host.stops):
                    raise Violation(f"no answer to the receives {sorted(wire.receives)[:5]}")
        self._world.talks += 1

    def _drawn(self) -> bytes:
        rng = self.rng
        what = rng.random()
        if what < 0.6:
            return self._line()
        if what < 0.87:
            return b"".join(self._line() for _ in range(rng.randrange(2, 30)))
        if what < 0.92:
            some = rng.sample([*self._world.in_transactions.items()], 2)
            kept = [self._line(*rng.choice(some)) for _ in range(rng.randrange(2, 10))]
            ends = (f"{self._named(end)} {end}\n".encode() for end in ("begin", "commit"))
            return next(ends) + b"".join(kept) + next(ends)
        if what < 0.99:
            usage, count = rng.choice([*self._usages.items()]), rng.choice(BURSTS)
            lines = [self._line(*usage).split(b" ", 1) for _ in range(min(count, DRAWN_MAX))]
            more = (rng.choice(lines) for _ in range(count - len(lines)))
            new = [[self._named(usage[0]).encode(), rest] for _, rest in more]
            return b"".join(map(b" ".join, lines + new))
        line, words = self._line()[:-1], b" ".join(self._line()[:-1] for _ in range(50))
        return line + b" " + (words * (LINE_BYTES // len(words)))[: LINE_BYTES - len(line)] + b"\n"

    def _line(self, action: str = "", usage: Usage | None = None) -> bytes:
        rng = self.rng
        if usage is None:
            action, usage = rng.choice([*self._usages.items()])
        words = [self._named(action), action]
        if rng.random() < 0.6:
            words.append("--confirm")
        for _ in range(DRAWS):
            self.consumer = ""
            line = " ".join([*words, usage.draw(self)]).encode()
            if rng.random() < WRONG or is_allowed(line):
                break
        return line + b"\n"

    def _named(self, action: str) -> str:
        """The id of a request."""
        if action == "consume":
            return self.rng.choice(self.consumers)
        self._count += 1
        return f"{self._name}{self._count}"

    def _send(self, data: bytes) -> None:
        if not self.wire.transport.is_closing():
            self.wire.peer.sent(data)
            # What is a request: there may be others in the data of a line.
            for line in data.split(b"\n"):
                name, _, rest = line.partition(b" ")
                if rest.startswith(b"receive "):
                    self.wire.receives.add(name)
                elif rest.startswith((b"begin", b"auth")):
                    self._is_vague = True
            self.wire.transport.write(data)


class Talk(World):
    """`messages` is the number of lives."""

    clients = TALKERS
    kinds = ("set_clock",)

    def __init__(self, seed: int, directory: Path, messages: int) -> None:
        super().__init__(seed, directory, messages)
        self.talks = self.settled = self.looks = 0
        self.has_users, self.users = not seed % USERS_EVERY, directory / "users"
        self._waits: tuple[object, float, int] = None, 0.0, 0
        """What was pending at the last look, since when, and at how many."""

    def __str__(self) -> str:
        return (
            f"{self.host.lives} lives, {self.talks} talks, {self.settled} settled, "
            f"{self.looks} looks, {self.sets} clocks set"
        )

    async def main(self) -> None:
        self.host = Host(self.network, self.directory / "talk", PORT, self.note)
        self.usages = usages(), usages(of_clients), usages(of_clients)
        """Of a talk."""
        self.in_transactions = usages(of_transactions)
        if self.has_users:
            self.write_users()
        await self.serve()
        self.loop.happen(LOOKS_S, self.look, NOBODY)
        processes = [Process(f"talker {number}") for number in range(self.clients)]
        talking = [
            each.spawn(Talker(self, f"t{number}-").run()) for number, each in enumerate(processes)
        ]
        await asyncio.gather(self.live(), self.set_clock(), *talking)
        await self.leave_nothing()

    def write_users(self) -> None:
        from mqks.users import User, hash_token
        from mqks.users_file import write

        user, admin = (partial(User, name, token=hash_token(TOKENS[name])) for name in TOKENS)
        limits: Any = {"publishes_per_s": 50, "connections_max": 3, "queues_max": 2}
        some = user(publish=["e*", "a.**"], consume=["q*"], read=["dead"], bind=["a.*"], **limits)
        write(self.users, [some, admin(publish=["**"], consume=["**"], bind=["**"], admin=True)])

    async def serve(self) -> None:
        rng = self.rng
        self.clock.step_s = rng.choice((0, 1e-6, 1e-4))
        await self.host.serve(
            memory_bytes=rng.choice((0, 4096, 200_000, 2**29)),
            batch_records_max=rng.choice((20, 1000, 16_384)),
            unacked_bytes_max=rng.choice((20_000, 20_000, 2**28)),
            wal_checkpoint_pages=rng.choice((1, 250)),
            errors_kept_max=rng.choice((0, 10, 1000)),
            eval="on",
            **({"auth": "always", "users": self.users, **LOW} if self.has_users else {}),
        )

    async def live(self) -> None:
        """One life after the other, and whoever stands still in it."""
        for _ in range(self.messages):
            await asyncio.sleep(self.rng.expovariate(1 / self.rng.choice((1.0, 60.0, 4000.0))))
            self.note("life", self.host.lives, self.talks, self.settled)
            if self.rng.random() < 0.3:
                await self.stop(self.host.process, self.rng.uniform(0, 60))
            else:
                await self.host.end(kill=self.rng.random() < 0.7)
                await self.serve()
        self.has_faults = False

    def look(self) -> None:
        """Between two steps of the loop, when none of the broker's methods runs."""
        from tests.fuzz.invariants import check

        broker = self.host.broker
        # What works have half done is not looked at.
        if not (self.host.process.dead or broker.has_work):
            self.looks += 1
            try:
                check(broker, set_clock=True)
                self._look_at_pending(broker.pending)
            except AssertionError as failure:
                self.loop.fail(failure)
        if self.has_faults:
            self.loop.happen(self.rng.expovariate(1 / LOOKS_S), self.look, NOBODY)

    def _look_at_pending(self, pending: "Pending") -> None:
        """It is another entry when this one is written; one may be emptied and filled again."""
        now_s = self.clock.monotonic_s
        entry, since_s, looks = self._waits
        if not pending or pending.entry is not entry:
            entry, since_s, looks = pending.entry if pending else None, now_s, 0
        self._waits = entry, since_s, looks + 1
        runs_s = self.host.process.runs_for_s(now_s)
        if entry is not None and looks > 1 and min(now_s - since_s, runs_s) > WRITTEN_S:
            raise Violation(f"{pending.records} records wait for a commit")

    async def leave_nothing(self) -> None:
        """When all have left, nothing is held for them, and the server rests."""
        # A server that drains lets in operators only, and a client is none.
        _, writer = await asyncio.open_connection("127.0.0.1", PORT)
        login = f"a auth {TOKENS['admin']}\n" if self.has_users else ""
        writer.write(f"{login}u drain --off\n".encode())
        await asyncio.sleep(1)
        writer.close()
        url = URL.replace("//", f"//{TOKENS['admin']}@") if self.has_users else URL
        async with mqks().connect(url) as client:
            for row in await client.schedules():
                await client.unschedule(row["name"])
            for row in await client.stats("queues"):
                await client.delete_queue(row["name"])
        await asyncio.sleep(IDLE_S)
        await self.host.leave_nothing(IDLE_S, IDLE_TURNS_MAX)
