"""What seldom meets, again and again: acks in time at a server that stands still, messages that are
due while the clock is set, moves of one transaction that want the same messages, an id of `--once`
that comes on two connections while its first message is still being routed, receives that together
take more than a connection may be promised, leases that are changed, acks on a full database.

The one rule: each round is one such meeting, on queues of its own.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from itertools import count, cycle
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.simulation.host import Host
from tests.simulation.loop import NOBODY, Violation
from tests.simulation.promises import Judge, Wire
from tests.simulation.world import HURRIED_S, PORT, World

if TYPE_CHECKING:
    from tests.simulation.network import Transport, Watch

ACKED: Final = 50
ACK_TIMEOUT_S: Final = 10.0
ACKS_S: Final = 1.0, 7.0
"""After its delivery a message is acked."""
FORGETS: Final = 0.2
"""So often it is not."""
STANDS_S: Final = 1.0, 12.0
PING_S: Final = 0.004
DUE: Final = 5000
DUE_S: Final = 0.5, 1.9
"""After so long are so many messages due: none waits on disk."""
MORE: Final = 500
MORE_S: Final = 0.001
"""So many more are published, so soon one after the other, when the clock is set."""
SETS_S: Final = -1.0, 1.0, 3.0, 3.0
SET_S: Final = 0.3, 0.9
SEQ_MAX: Final = 2**53
KILLED, KILLED_S = 0.3, 0.02
"""So often does the server die, and so soon after a transaction."""
TRANSACTIONS: Final = 10
REQUESTS: Final = 8
"""At most, in one of them."""
MOVED: Final = "m1", "m2", "m3"
RECEIVED: Final = 50
RECEIVED_BYTES: Final = 1000
LEASE_S: Final = 3.0
LEASES: Final = {"--for=0": 0.0, "--for=1": 1.0, "--for=30": 30.0}
ACK: Final = "--ack"
WIDE: Final = 1000
"""Queues of one event: more than get their copies in one step of work."""
TWICE: Final = 4
APART_S: Final = 0.003
LIMIT: Final = 1000
FILLED_BYTES: Final = 100_000
ANSWER_S: Final = 60.0
ROUND_S: Final = 900.0

Contents = dict[str, list[tuple[str, int]]]
"""Ids and numbers of the messages of each queue, in order; the number of one that has joined since
is SEQ_MAX."""


def ids_of(there: Contents) -> list[list[str]]:
    return [[id_ for id_, _ in rows] for rows in there.values()]


class Client:
    """Sends lines, and reads their answers."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    def send(self, lines: Iterable[str]) -> None:
        self._writer.write("".join(f"{line}\n" for line in lines).encode())

    async def line(self, wait_s: float = ANSWER_S) -> str:
        """Raises TimeoutError, and EOFError when the server is gone."""
        async with asyncio.timeout(wait_s):
            line = await self._reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line.decode()[:-1]

    async def ask(self, *lines: str) -> dict[str, str]:
        """The confirms, by id."""
        self.send(lines)
        waits = sum(" --confirm" in line for line in lines)
        told = [(await self.line()).partition(" ") for _ in range(waits)]
        return {name: answer for name, _, answer in told}

    async def rows(self, queue: str) -> list[tuple[str, int]]:
        """Ids and numbers of what is there, in order."""
        rows = list[tuple[str, int]]()
        self.send([f"p peek {queue} --limit={LIMIT}"])
        while (line := await self.line()) != "p ok --end":
            row = line.split(" ")
            rows.append((row[2], int(row[3].partition(",seq=")[2].partition(",")[0])))
        return rows


class Rare(World):
    """`messages` is the number of rounds."""

    clients = 0
    kinds = ("ack_in_time", "become_due", "fill", "move", "publish_twice", "receive")

    def __init__(self, seed: int, directory: Path, messages: int) -> None:
        super().__init__(seed, directory, messages)
        self.is_hurried = True
        self.round = 0
        self._is_wide = False
        self._kill_at = b""
        """When the server has written this line."""

    def __str__(self) -> str:
        return f"{self.host.lives} lives, {self.stops} stops, {self.sets} clocks set, {self.judge}"

    async def main(self) -> None:
        self.judge = Judge(self.loop)
        self.host = Host(self.network, self.directory / "rare", PORT, self.note)
        self.network.watch = self.watch
        await self.serve()
        kinds = self.rng.sample(self.kinds, len(self.kinds))
        for number, kind in zip(range(self.messages), cycle(kinds), strict=False):
            self.round = number
            self.note("round", self.round, kind)
            async with asyncio.timeout(ROUND_S):
                await getattr(self, kind)()
        self.judge.judge_end()

    def watch(self, transport: "Transport") -> "Watch":
        watched = self.judge.watch(PORT, transport)
        return Teller(self) if isinstance(watched, Wire) else watched

    async def serve(self, **settings: object) -> None:
        rng = self.rng
        self.judge.begin_life()
        self.clock.step_s = rng.choice((0, 1e-5, 1e-4))
        await self.host.serve(
            memory_bytes=rng.choice((0, 4096, 2**29)),
            batch_records_max=rng.choice((20, 16_384)),
            delivery_pause_bytes=rng.choice((1, 10_000, 2**20)),
            **settings,
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()

    def told(self, line: bytes) -> None:
        """The server has written it."""
        if line == self._kill_at:
            self._kill_at = b""
            self.loop.happen(0, self.host.kill, NOBODY)

    # -- rounds

    async def ack_in_time(self) -> None:
        rng, names = self.rng, {f"a{self.round}-{number}" for number in range(ACKED)}
        self.clock.step_s = 0.0
        async with self.client() as one, self.client() as other:
            await one.ask("s subscribe --confirm acks acks")
            one.send(f"{name} publish acks x" for name in sorted(names))
            consumers = (one, f"c{self.round}-1"), (other, f"c{self.round}-2")
            acking = asyncio.gather(*(self.ack(*each, names) for each in consumers))
            stopping = asyncio.ensure_future(self.stop_servers())
            rest_s = rng.choice((PING_S, 10.0))
            while not acking.done():
                await asyncio.sleep(rest_s)
                other.send(["p ping"])
            stopping.cancel()
            self.host.process.go_on()
            acking.result()

    async def stop_servers(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(0, ACK_TIMEOUT_S))
            await self.stop(self.host.process, self.rng.uniform(*STANDS_S))

    async def ack(self, client: Client, consumer: str, left: set[str]) -> None:
        """Until nothing is left."""
        loop = asyncio.get_running_loop()
        options = f"--manual-ack --ack-timeout={ACK_TIMEOUT_S} --prefetch={ACKED // 2}"
        client.send([f"{consumer} consume acks {options}"])
        while left:
            with suppress(TimeoutError):
                name, told, *rest = (await client.line(ACK_TIMEOUT_S)).split(" ")
                if name == consumer:
                    if self.rng.random() > FORGETS:
                        ack = f"{rest[0]} ack --confirm {consumer} {rest[0]}"
                        loop.call_later(self.rng.uniform(*ACKS_S), client.send, [ack])
                elif told == "ok":
                    left.discard(name)

    async def become_due(self) -> None:
        rng, names = self.rng, (f"d{self.round}-{number}" for number in count())
        self.clock.step_s = 0.0

        def drawn() -> str:
            due_s = rng.uniform(*DUE_S)
            at = f"--at={self.clock.wall() + due_s:.6f}", f"--delay={due_s:.6f}"
            return f"{next(names)} publish --confirm {rng.choice(at)} due x"

        async def go_on() -> None:
            """The clock is set, and others publish."""
            await asyncio.sleep(rng.uniform(*SET_S))
            self.clock.step_s = HURRIED_S
            self.sets += 1
            self.clock.set(rng.choice(SETS_S))
            async with self.client() as other:
                for _ in range(MORE):
                    other.send([drawn()])
                    await asyncio.sleep(rng.uniform(0, MORE_S))

        async with self.client() as client:
            await client.ask("s subscribe --confirm due due")
            client.send([*(drawn() for _ in range(DUE)), f"c{self.round} consume due"])
            others = asyncio.ensure_future(go_on())
            for _ in range(2 * DUE + MORE):
                await client.line()
            await others

    async def fill(self) -> None:
        """The database is full: what is acked is gone, and makes room."""
        from tests.chaos.server import size_of_database

        names, text = (f"f{self.round}-{number}" for number in count()), RECEIVED_BYTES * "x"
        queue, consumer = f"f{self.round}", f"c{self.round}"
        self.host.kill()
        size = size_of_database(self.host.db)
        await self.serve(db_bytes_max=size + FILLED_BYTES)
        async with self.client() as client:
            options = f"--manual-ack --prefetch={LIMIT}"
            await client.ask(f"{consumer} consume --confirm {queue} full {options}")
            stored, answer = list[str](), "ok "
            while answer == "ok ":
                stored.append(next(names))
                client.send([f"{stored[-1]} publish --confirm full {text}"])
                while (line := await client.line()).startswith(consumer):
                    pass
                answer = line.partition(" ")[2]
            refused = stored.pop()
            acked = stored[: self.rng.randrange(len(stored))]
            acks = await client.ask(*(f"{n} ack --confirm {consumer} {n}" for n in acked))
            if {*acks.values()} - {"ok "}:
                raise Violation(f"acks are refused: {acks}")
        self.host.kill()
        await self.serve()
        async with self.client() as client:
            left = [id_ for id_, _ in await client.rows(queue) if id_ != refused]
            if left != stored[len(acked) :]:
                raise Violation(f"of {stored} {acked} were acked, and there are {left}")
            await client.ask(f"d delete_queue --confirm {queue}")

    async def move(self) -> None:
        rng, names = self.rng, (f"x{self.round}-{number}" for number in count())
        async with self.client() as client:
            for queue in MOVED:
                client.send([f"d delete_queue {queue}"])
                await client.ask(f"s subscribe --confirm {queue} {queue}")
        rows: Contents = {queue: [] for queue in MOVED}
        for _ in range(TRANSACTIONS):
            after: Contents = {queue: [*rows[queue]] for queue in MOVED}
            lines, expected = self.drawn(after, names)
            possible = [ids_of(after)]
            async with self.client() as client:
                if rng.random() < KILLED:
                    possible.append(ids_of(rows))
                    client.send(lines)
                    await asyncio.sleep(rng.uniform(0, KILLED_S))
                    self.host.kill()
                    await self.serve()
                elif (answers := await client.ask(*lines)) != expected:
                    raise Violation(f"{lines} were answered {answers}, and not {expected}")
            async with self.client() as client:
                rows = {queue: await client.rows(queue) for queue in MOVED}
            if ids_of(rows) not in possible:
                raise Violation(f"{lines} left {ids_of(rows)}, and not {possible}")

    def drawn(self, there: Contents, names: Iterator[str]) -> tuple[list[str], dict[str, str]]:
        """A transaction and its confirms; `there` becomes what it leaves."""
        rng, lines, confirms = self.rng, ["b begin"], {"e": "ok "}
        published = list[tuple[str, str]]()
        for number in range(rng.randrange(1, REQUESTS + 1)):
            queue, other = rng.sample(MOVED, 2)
            name, some = f"r{number}", there[queue]
            what = rng.choice(("publish", "move", "move", "trim"))
            if what == "publish":
                name = next(names)
                rest = f"{queue} x"
                confirms[name] = "ok "
                published.append((queue, name))
            elif what == "move":
                limit = rng.randrange(1, 6)
                rest = f"{queue} {other} --limit={limit}"
                confirms[name] = f"ok {len(some[:limit])}"
                there[queue] = some[limit:]
                there[other] += [(id_, SEQ_MAX) for id_, _ in some[:limit]]
            else:
                end = rng.choice([seq for _, seq in some if seq < SEQ_MAX] or [1])
                rest = f"{queue} {end}"
                there[queue] = [row for row in some if row[1] >= end]
                confirms[name] = f"ok {len(some) - len(there[queue])}"
            lines.append(f"{name} {what} --confirm {rest}")
        for queue, name in published:
            there[queue].append((name, SEQ_MAX))
        return [*lines, "e commit --confirm"], confirms

    async def receive(self) -> None:
        """Leases are ended, and changed once or twice: no message comes in one."""
        rng, clock, text = self.rng, self.clock, RECEIVED_BYTES * "x"
        ends_s = {f"l{self.round}-{number}": 0.0 for number in range(RECEIVED)}
        async with self.client() as client:
            await client.ask("s subscribe --confirm leased leased")
            await client.ask(*(f"{name} publish --confirm leased {text}" for name in ends_s))
            while ends_s:
                asked = [f"r{number}" for number in range(rng.randrange(1, 5))]
                limit, asked_s = rng.randrange(1, RECEIVED), clock.monotonic_s
                how = f"--limit={limit} --lease={LEASE_S} --wait={LEASE_S}"
                client.send(f"{name} receive leased {how}" for name in asked)
                changes = list[tuple[int, tuple[str, str, str]]]()
                while asked:
                    name, _, *row = (await client.line()).split(" ")
                    if row[0] == "--end":
                        asked.remove(name)
                        continue
                    if clock.monotonic_s < ends_s[row[0]]:
                        raise Violation(f"{row[0]} comes, and its lease ends at {ends_s[row[0]]}")
                    ends_s[row[0]] = asked_s + LEASE_S
                    lease = row[1].partition(",lease=")[2]
                    for flag in rng.choices((*LEASES, ACK), k=rng.randrange(3)):
                        changes.append((len(changes), (row[0], lease, flag)))
                asked_s = clock.monotonic_s
                confirms = await client.ask(
                    *(f"{n} lease --confirm leased {lease} {how}" for n, (_, lease, how) in changes)
                )
                for n, (id_, _, how) in changes:
                    if confirms[f"{n}"] == "ok 1":
                        if how == ACK:
                            del ends_s[id_]
                        else:
                            ends_s[id_] = asked_s + LEASES[how]

    async def publish_twice(self) -> None:
        rng = self.rng
        if not self._is_wide:
            self._is_wide = True
            async with self.client() as client:
                lines = [f"s{number} subscribe --confirm w{number} wide" for number in range(WIDE)]
                await client.ask(*lines)
        for number in range(TWICE):
            self.clock.step_s = HURRIED_S
            name = f"w{self.round}-{number}"
            line = f"{name} publish --confirm --once wide x"
            confirm = f"{name} ok "
            self._kill_at = confirm.encode()
            async with self.client() as first, self.client() as second:
                first.send([line])
                await asyncio.sleep(rng.uniform(0, APART_S))
                second.send([line])
                while self._kill_at:
                    await asyncio.sleep(0.001)
            await self.serve()
            async with self.client() as client:
                for queue in "w0", f"w{WIDE - 1}":
                    found = [id_ for id_, _ in await client.rows(queue)].count(name)
                    if found != 1:
                        raise Violation(f"{name} was confirmed, and is {found} times in {queue}")
                    await client.ask(f"p purge --confirm {queue}")


class Teller(Wire):
    """Shows what the server writes."""

    def __init__(self, world: Rare) -> None:
        super().__init__(world.judge)
        self._world = world

    def _tells(self, line: bytes) -> None:
        super()._tells(line)
        self._world.told(line)
