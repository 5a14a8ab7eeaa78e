"""Two servers, of which one stands by, and their journal in PostgreSQL, which has a standby, too.

    python -m tests.simulation SEED --standby

The one rule: what is judged is what clients see, by the claim of the server that they see it from.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.simulation.host import Started, spawn_server
from tests.simulation.loop import NOBODY, PROCESS, Process, Violation, Work, put
from tests.simulation.world import PORT, World, mqks, nothing

SERVERS = 2
SUSPECT_S = 3.0
"""No claim is taken from an owner that has committed something in this time."""
ANSWER_S = 300.0
"""A publish is confirmed within this time, whatever happens meanwhile."""


class Place:
    """Where one server after the other runs."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lives = 0
        self.process = Process("nobody")
        self.stop = asyncio.Event()
        self.is_started = False


class WithStandby(World):
    url = ",".join(f"mqks://127.0.0.1:{PORT + number}" for number in range(SERVERS))
    queues = ("q",)
    kinds = (*World.kinds[:-3], "hand_over", "break_database")

    def install(self) -> None:
        import psycopg

        from tests.simulation.postgres import Cluster, Connection, ThreadConnection

        put({psycopg: {"AsyncConnection": Connection}})
        from mqks.journal.postgres.connection import PostgresConnection
        from tests.simulation.tables import Tables

        # What libpq would do with its socket.
        PostgresConnection.abort = Connection.abort  # type: ignore[assignment, method-assign]
        self.cluster = Connection.cluster = Cluster(Tables)
        put({psycopg: {"connect": partial(ThreadConnection, self.cluster)}})
        self.places: list[Place] = []
        self.stores: dict[Process, Any] = {}
        self.ends = Counter[str]()
        """How servers have ended, and what has happened to the database."""
        self.newest = 0
        """The highest claim that has served."""
        self.settled: dict[str, int] = {}
        """Messages whose ack was confirmed, and the claim of the server that did it."""
        self.slowest_s = 0.0

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {what}" for what, count in sorted(self.ends.items()))
        return f"{super().__str__()}, {self.newest} claims, slowest {self.slowest_s:.0f} s, {ends}"

    # -- servers

    async def serve(self) -> None:
        """Both at once."""
        self.places = [Place(number) for number in range(SERVERS)]
        for place in self.places:
            self.start(place)
        while not self.newest:
            await asyncio.sleep(0.1)

    def start(self, place: Place) -> None:
        from mqks.journal.default_store import open_store
        from mqks.settings import DatabaseUrl, Settings

        self.lives += 1
        place.lives += 1
        process = place.process = Process(f"server {place.number}.{place.lives}")
        place.stop, place.is_started = asyncio.Event(), False
        db, port = DatabaseUrl("postgresql://mqks@a,b/mqks"), PORT + place.number
        settings = Settings(db=db, port=port, page="off", loop_held_s=0)

        async def opened(*how: Any) -> Any:
            self.stores[process] = store = await open_store(*how)
            return store

        class Status(Started):
            def started(_, value: object = None) -> None:
                place.is_started = True
                self.newest = max(self.newest, self.claim_of(process))
                self.note(process.name, "serves", self.claim_of(process))
                self.judge_claims()

        how = {"open_store": opened, "task_status": Status()}
        task = spawn_server(process, settings, place.stop, **how)
        task.add_done_callback(partial(self.ended, place, process), context=NOBODY)

    def ended(self, place: Place, process: Process, task: asyncio.Task[None]) -> None:
        """By itself: its supervisor starts it again, as systemd would."""
        from mqks.errors import ClaimLost, DatabaseUnreachable, DiskFull, JournalFailed

        if process.dead or task.cancelled():
            return
        error = task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self.note(process.name, "ends", type(error).__name__)
        self.ends[f"ended by {type(error).__name__}"] += 1
        expected = [ClaimLost, DatabaseUnreachable, type(None)]
        if not place.is_started or place.stop.is_set():
            expected += [JournalFailed, DiskFull]  # It can't read, or not make its last commit.
        if type(error) not in expected:
            self.violated(f"{process.name} has ended: {error!r}")
        self.again(place, process)

    def again(self, place: Place, process: Process) -> None:
        self.network.kill(process)
        self.loop.call_later(self.rng.expovariate(1 / 2), self.start, place, context=NOBODY)

    def servers(self) -> list[Process]:
        return [place.process for place in self.places] * 4

    # -- judges

    def violated(self, what: str) -> None:
        self.note("violated:", what)
        self.loop.fail(Violation(what))

    def claim_of(self, process: Process) -> int:
        return int(self.stores[process].facts()["claim"])

    def server_of(self, client: Any) -> int | None:
        """The claim of the server that a client or consumer is connected to."""
        wire = client._connection._wire
        if wire is None:
            return None
        other = wire.transport.get_extra_info("socket").other.transport
        return None if other is None else self.claim_of(other.process)

    def judge_claims(self) -> None:
        if (after_s := self.cluster.shortest_s) < SUSPECT_S:
            self.violated(f"a claim was taken from an owner {after_s:.3f} s after its commit")

    def judge_confirm(self, name: str, what: str, newest: int, claim: int | None) -> None:
        """`newest` claim served before it was sent."""
        if claim is not None and claim < newest:
            told = f"is confirmed by claim {claim}, and {newest} served before"
            self.violated(f"{what} {name} {told}")

    def judge_delivery(self, name: str, claim: int | None) -> None:
        settled = self.settled.get(name)
        if settled is not None and claim is not None and claim >= settled:
            self.violated(f"{name} comes from claim {claim}, and its ack was confirmed before")

    # -- players

    # Queues are plain. A full disk is PostgreSQL's own. What has ended begins again by itself, and
    # blocking clients play with one server. What two servers tell has no order.
    set_up = outlive_full_disk = calm_down = is_calm = fill_disk = nothing

    def watch_server(self) -> None:
        pass

    def others(self) -> list[Process]:
        return []

    def visitors(self) -> list[Work]:
        return []

    def run_s(self) -> float:
        """For how long the present process has run, without what it was stopped."""
        now_s = self.clock.monotonic_s
        return now_s - PROCESS.get().stopped_s(now_s)

    async def publish(self, number: int) -> None:
        async with mqks().connect(self.url) as client:
            for each in range(self.messages):
                name = f"{number}-{each}"
                delay_s = self.rng.choice((None, None, 5.0, 600.0))
                newest, began_s = self.newest, self.run_s()
                how: dict[str, Any] = {"id": name, "confirm": True, "once": True}
                while True:
                    try:
                        await client.publish("e", name, delay_s=delay_s, timeout_s=1e6, **how)
                        break
                    except mqks().RequestFailed:  # There was no room for it.
                        self.note("refused", name)
                        await self.wait(2)
                took_s = self.run_s() - began_s
                self.slowest_s = max(self.slowest_s, took_s)
                if took_s > ANSWER_S:
                    self.violated(f"{name} was confirmed after {took_s:.0f} s")
                self.judge_confirm(name, "publish of", newest, self.server_of(client))
                self.confirmed[name] = "e"
                self.note("confirmed", name)
                await self.wait(20)

    async def consume(self, number: int) -> None:
        async with self.consuming("q", ["e"]) as messages:
            async for message in messages:
                self.note("got", number, message.text, message.retry)
                self.judge_delivery(message.text, self.server_of(messages))
                if self.rng.random() < 0.1:
                    message.reject()
                    continue
                await self.wait(0.5)
                await self.ack(messages, message)

    async def ack(self, messages: Any, message: Any) -> None:
        """Until it is confirmed, or the connection is lost."""
        from mqks.client.session import Call

        session, answered, newest = messages._session, asyncio.Event(), self.newest
        consumer_id, name = message.consumer_id, message.text

        def answer() -> None:
            answered.set()
            if session.consumer_id is consumer_id and not call.failed:
                claim = self.server_of(messages)
                self.judge_confirm(name, "ack of", newest, claim)
                self.note("acked", name)
                if name in self.settled:
                    self.violated(f"{name} was there twice")
                if claim is not None:
                    self.settled[name] = claim

        call = Call(answer)
        if session.consumer_id is consumer_id and session.is_up:
            self.acked["q"][name] += 1
            session.request(b"ack --confirm %b %b" % (consumer_id, message._id), call)
            await answered.wait()

    # -- faults

    def faults(self, consumers: list[Process], *others: Sequence[Process]) -> list[Work]:
        return [*super().faults(consumers, *others), self.hand_over(), self.break_database()]

    async def kill_servers(self) -> None:
        async for _ in self.now_and_then(60):
            place = self.rng.choice(self.places)
            if not place.process.dead:
                self.note("kill", place.process.name)
                self.again(place, place.process)

    async def hand_over(self) -> None:
        async for _ in self.now_and_then(200):
            place = self.rng.choice(self.places)
            self.note("SIGTERM", place.process.name)
            place.process.context.run(place.stop.set)

    async def break_database(self) -> None:
        kinds: list[Callable[[], Work]] = [
            *(self.cut_commit, self.cut_commit, self.cut_commit, self.crash, self.crash),
            *(self.split, self.cut_off, self.be_slow, self.be_full),
            *(self.lose_standby, self.lose_standby),
        ]
        async for _ in self.now_and_then(20):
            kind = self.rng.choice(kinds)
            self.note("database", kind.__name__)
            self.ends[kind.__name__] += 1
            await kind()

    async def trapped(self, happens: Callable[[Any, Any], object]) -> None:
        """It happens to the next commit, at some point of it."""
        from tests.simulation.postgres import PHASES

        phase = self.rng.choice(PHASES)
        gone = asyncio.Event()

        def happen(server: Any, backend: Any) -> None:
            self.note("trap", phase)
            happens(server, backend)
            gone.set()

        self.cluster.trap = phase, happen
        await gone.wait()

    async def cut_commit(self) -> None:
        """Its connection; perhaps in silence, or only its wait for the standby ends."""
        from tests.simulation.postgres import LATENCY_S, VANISHED_S

        noticed_s = self.rng.choice((LATENCY_S, LATENCY_S, VANISHED_S))
        await self.trapped(lambda server, backend: backend.cut(noticed_s))

    async def crash(self) -> None:
        """The primary, which is started again, or is a standby afterwards."""
        primary = self.cluster.primary
        await self.trapped(lambda server, backend: server.die())
        await self.wait(8)
        if self.rng.random() < 0.5:
            primary.start()
        else:
            await self.fail_over()

    async def fail_over(self) -> None:
        primary = self.cluster.primary
        primary.other.is_primary = True
        await self.wait(8)
        primary.follow()

    async def split(self) -> None:
        """The standby is promoted, and the primary goes on for a while."""
        primary = self.cluster.primary
        primary.other.is_primary = True
        await self.wait(10)
        primary.die()
        await self.wait(3)
        primary.follow()

    async def cut_off(self) -> None:
        """One server from the database."""
        process = self.cluster.cut_off = self.rng.choice(self.places).process
        for server in self.cluster.servers:
            for backend in [*server.backends]:
                if backend.process is process:
                    backend.cut()
        await self.wait(20)
        self.cluster.cut_off = None

    async def be_slow(self) -> None:
        self.cluster.slow_mean_s = self.rng.choice((0.1, 1.0, 4.0))
        await self.wait(15)
        self.cluster.slow_mean_s = 0.0

    async def be_full(self) -> None:
        self.cluster.is_full = True
        await self.wait(10)
        self.cluster.is_full = False

    async def lose_standby(self) -> None:
        """Nothing is durable meanwhile, though the primary may be started again and have more than
        before, or an operator end the wait of a commit. All that is lost if it dies then."""
        primary = self.cluster.primary
        primary.other.die()
        await self.wait(10)
        if self.rng.random() < 0.5:
            primary.die()
            await self.wait(1)
            primary.start()
        elif primary.waits:
            primary.end_wait("the wait was cancelled")
        await self.wait(3)
        dies = self.rng.random() < 0.5
        if dies:
            primary.die()
        primary.other.start()
        if dies:
            await self.fail_over()
