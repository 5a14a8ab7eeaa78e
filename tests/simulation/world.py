"""A world from a seed: a real server and real clients on a simulated clock, loop and network.

    python -m tests.simulation SEED

The one rule: what the product takes from outside, time, chance, threads and sockets, is replaced
before the product is imported, so that it knows nothing of it.
"""

import asyncio
import hashlib
import os
import random
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from tests.simulation import blocking, services, threads
from tests.simulation.disk import Disk
from tests.simulation.host import Started, spawn_server
from tests.simulation.loop import (
    NOBODY,
    PROCESS,
    Clock,
    Process,
    SimulatedLoop,
    Violation,
    Work,
    after,
    end_run,
    in_world,
    put,
    the_loop,
)
from tests.simulation.network import LATENCY_S, Network
from tests.simulation.promises import KEEP_ALIVE_S, Judge

HURRIED_S = 0.001
STEPS_S = 0.0, 0.0, 1e-5, 1e-3
"""Of the time that work takes."""
WALL_S = 1_790_000_000.0
CALL_S = 0.001
"""A call of SQLite takes up to so long."""
PORT = 25000
URL = f"mqks://127.0.0.1:{PORT}"
BALLAST_BYTES = 2 * 1024 * 1024
PUBLISHERS, CONSUMERS, MESSAGES = 16, 4, 60
BLOCKING = range(12, PUBLISHERS), range(2, CONSUMERS)
"""Those that block."""
AWAY_S = 900.0
"""By so much the wall clock is wrong at times: by more than any delay."""
QUIET_S = 2 * AWAY_S + 1200
"""When faults have stopped, everything is delivered in this time: delays are shorter, and after a
restart they go by a wall clock that was set."""
EVENTS = "e", "pushed"
PUSHED = range(4)
"""Those that publish the second."""
BINDINGS = {"q": EVENTS, "s": EVENTS, "p": ["pushed"], "b": ["burst"]}
"""Of the queues of the consumers, the service, `mqks push`, and who takes bursts."""
CALM_S = 60.0
"""What is done when nothing fails takes less."""
CONTENTS = "ready", "unacked", "scheduled"
HASTY = PUBLISHERS + 1
"""Who publishes without confirms."""
BURSTER = PUBLISHERS + 2
BURSTS = 20, 500
BURST_S, PAUSE_S = 20.0, 150.0
"""What is published at once is due in this time. Between two bursts."""
STOPPED, STOPS_S = 3, (5, 20, 60)
"""So many processes may be stopped at the same time, and for how long, about."""
ASKING, STILL_S = 8, 7 * KEEP_ALIVE_S
TOGETHER = 3
"""Messages of a transaction."""
ALL = 1_000_000
NOTICED_S = 5.0
"""A server notices sooner that there is room again."""
PADDING = " " + 100_000 * "x"
"""Of some messages, so that the lists of a log come in several pieces."""
LOG = "log"
"""A queue that nobody consumes."""
READ_S = 300.0
HASTE_S, MANY = 15.0, 1000
PREPARED = (
    *("anyio._backends._asyncio", "encodings.idna", "mqks.client.async_client"),
    *("mqks.server.running", "tests.chaos.play", "tests.fuzz.invariants", "tests.fuzz.peer"),
)
MEMORY = Path("/dev/shm")
"""A file system that is faster than a disk, where there is one."""
FREE_BYTES = 2**30
"""It has more, so that worlds do not fill it: in containers it may be tiny."""
LAST, TOLD = 50, 200
"""Events that a failure tells, and characters of each."""


class Calls:
    """The queue of a thread of aiosqlite: what is put there happens at a moment of the seed."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def put_nowait(self, item: tuple[Any, Callable[[], Any]]) -> None:
        loop = the_loop()
        now_s = loop.time()
        self._last_s = after(max(self._last_s, now_s + loop.rng.uniform(0, CALL_S)))  # In order.
        loop.happen(self._last_s - now_s, partial(loop.step, *item))


class Outside(NamedTuple):
    """What the product gets in place of what it takes from outside."""

    clock: Clock
    network: Network
    chance: random.Random

    def become(self, world: "World") -> None:
        """That of a world which is played after the product was imported."""
        vars(self.clock).update(vars(world.clock))
        vars(self.network).update(vars(world.network))
        world.clock, world.network = self.clock, self.network


def prepared() -> Outside:
    """Imported as far as a world needs it, to be forked for each seed."""
    outside = Outside(Clock(WALL_S), Network(), random.Random())
    install(outside)
    for name in PREPARED:
        import_module(name)
    return outside


def install(outside: Outside) -> None:
    """Replace what the product takes from outside."""
    clock, network, rng = outside

    def hexed(count: int = 32) -> str:
        return rng.randbytes(count).hex()

    put(
        {
            time: {
                "monotonic": clock.monotonic,
                "perf_counter": clock.monotonic,
                "time": clock.wall,
                "monotonic_ns": lambda: round(clock.monotonic() * 1e9),
                "time_ns": lambda: round(clock.wall() * 1e9),
            },
            secrets: {
                "token_hex": hexed,
                "token_urlsafe": hexed,
                "token_bytes": lambda count=32: rng.randbytes(count),
                "randbits": rng.getrandbits,
            },
            socket: {"create_server": network.create_server, "gethostname": lambda: "simulated"},
            # Names that are made of these are sent and stored, and have a size.
            os: {"getpid": lambda: 1},
            sys: {"argv": ["simulation"]},
        }
    )
    # They take the time from there when they are imported.
    import aiosqlite.core
    import anyio.to_thread

    no_thread = SimpleNamespace(start=lambda: None)
    put({aiosqlite.core: {"SimpleQueue": Calls, "Thread": lambda **how: no_thread}})
    put({anyio.to_thread: {"run_sync": run_sync}})


async def run_sync(call: Callable[..., Any], *args: Any, **how: Any) -> Any:
    from anyio import CancelScope

    with CancelScope(shield=not how.get("abandon_on_cancel")):
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)


class World:
    """One run: `events` is a hash of all that was seen in it, `last` has the latest of that."""

    url = URL
    queues: Sequence[str] = (*BINDINGS,)
    clients = PUBLISHERS
    """So many publish."""
    kinds: Sequence[str] = (
        *("kill_servers", "kill_consumers", "fill_disk", "cut_connections", "stop_processes"),
        *("stand_still", "set_clock", "read_log", "haste", "burst"),
    )
    """Methods that may be left out: faults, and visitors."""

    tells = False
    """Whether each event is printed when it happens, with the wall clock of the world."""

    def __init__(self, seed: int, directory: Path, messages: int = MESSAGES) -> None:
        self.seed = seed
        self.messages = messages
        self.rng = random.Random(f"plan {seed}")
        self.directory = directory
        self.clock = Clock(WALL_S)
        self.network = Network()
        self.names = EVENTS
        self.disk = Disk(seed, directory)
        self.events = hashlib.sha256()
        self.last = deque[str](maxlen=LAST)
        self.lives = self.cuts = self.stops = self.sets = 0
        self.confirmed: dict[str, str] = {}
        """Messages, and their events."""
        self.logged: set[str] = set()
        """Those without a delay."""
        self.acked: dict[str, Counter[str]] = {queue: Counter() for queue in BINDINGS}
        self.has_faults = True
        self.judge: Judge
        self.loop: SimulatedLoop
        rng = random.Random(f"kind {seed}")
        self.priorities = rng.choice((None, None, range(3)))
        self.keys = rng.choice((None, None, "abc"))
        self.ack_timeout_s = rng.choice((None, None, 5.0))
        self.is_hurried = rng.random() < 0.3
        """Turns are short, and end in the middle of whatever is done."""
        self.memory_bytes = rng.choice((4096, 2**29))

    def __str__(self) -> str:
        return (
            f"{self.lives} lives, {self.disk.power_cuts} power cuts, "
            f"{self.disk.failed_syncs} failed syncs, {self.disk.full} times full, "
            f"{self.disk.flips} flipped bits, "
            f"{self.cuts} cuts, {self.stops} stops, {self.sets} clocks set, {self.judge}"
        )

    def note(self, *what: object) -> None:
        words = " ".join(map(str, what)).replace(str(self.directory), "")
        told = f"{self.clock.monotonic_s:.9f} {words}"
        self.events.update(told.encode())
        self.last.append(told[:TOLD])
        if self.tells:
            shown = datetime.fromtimestamp(self.clock.wall(), UTC)
            print(f"{shown:%Y-%m-%d %H:%M:%S.%f}", words[:TOLD])

    def install(self) -> None:
        """Replace more, before the product is imported."""
        self.disk.install()
        from mqks.server import running

        if self.is_hurried:
            vars(running)["CHUNK_S"] = HURRIED_S

    # -- processes

    async def serve(self) -> None:
        """Start a server on what the one before it left."""
        from mqks.settings import Settings

        self.lives += 1
        self.judge.begin_life()
        self.clock.step_s = self.rng.choice(STEPS_S)
        process, started = Process(f"server {self.lives}"), Started()
        directory = self.disk.serve(partial(self.network.kill, process))
        settings = Settings(
            db=directory / "mqks.db",
            port=PORT,
            page="off",
            loop_held_s=0,
            ballast_bytes=BALLAST_BYTES,
            disk_free_bytes_min=self.rng.choice((0, BALLAST_BYTES)),
            memory_bytes=self.memory_bytes,
            text_file_bytes_min=self.rng.choice((0, 0, 1)),
        )
        self.server = spawn_server(process, settings, asyncio.Event(), task_status=started)
        self.server.add_done_callback(self._ended, context=NOBODY)
        while not started.event.is_set():
            await asyncio.sleep(0.01)
            if process.dead or self.server.done():
                self.disk.ended()
                await asyncio.sleep(1)
                await self.serve()
                return
        self.disk.begun()
        self.note(process.name, "listens")
        self.process = process

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Of itself, it may only for what was done to the disk."""
        from mqks.errors import JournalDamaged, JournalFailed

        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        kinds = (JournalFailed, *[JournalDamaged] * self.disk.was_flipped)
        others = BaseExceptionGroup("", [error]).split(kinds)[1]
        if others is not None or not self.disk.excuses:
            failure = Violation(f"a server has ended: {error!r}")
            failure.__cause__ = error
            self.loop.fail(failure)

    # -- players

    async def publish(self, number: int) -> None:
        if number in BLOCKING[0]:
            await threads.in_thread(blocking.publish, self, number)
            return
        async with mqks().connect(self.url) as client:
            for each in range(self.messages):
                names, terms = [f"{number}-{each}"], self.terms()
                if self.rng.random() < 0.1:
                    names = [f"{number}-{each}-{part}" for part in range(TOGETHER)]
                while not await self.accepted(client, EVENTS[number in PUSHED], *names, **terms):
                    await self.wait(2)
                await self.wait(20)
            PROCESS.get().leaves = True

    def terms(self) -> dict[str, Any]:
        rng = self.rng
        terms: dict[str, Any] = {}
        delay_s = rng.choice((None, None, 5.0, 600.0))
        if delay_s and rng.random() < 0.5:
            terms["at"] = self.clock.wall() + delay_s
        elif delay_s:
            terms["delay_s"] = delay_s
        if self.priorities:
            terms["priority"] = rng.choice(self.priorities)
        if self.keys:
            terms["key"] = rng.choice(self.keys)
        return terms

    def text(self, name: str) -> str:
        """Begins with the name."""
        return name + PADDING * (self.rng.random() < 0.05)

    async def accepted(self, client: Any, event: str, *names: str, **terms: Any) -> bool:
        """Publish one message, or several in a transaction; whether there was room."""
        terms["once"] = True
        try:
            if len(names) > 1:
                async with client.transaction(timeout_s=1e6) as step:
                    for name in names:
                        step.publish(event, self.text(name), id=name, **terms)
            else:
                how = {"id": names[0], "confirm": True, "timeout_s": 1e6}
                await client.publish(event, self.text(names[0]), **how, **terms)
        except mqks().RequestFailed:
            self.note("refused", *names)
            return False
        self.has_confirmed(event, *names, **terms)
        return True

    def has_confirmed(self, event: str, *names: str, **terms: Any) -> None:
        self.confirmed.update(dict.fromkeys(names, event))
        self.note("confirmed", *names)
        if terms.keys().isdisjoint(("at", "delay_s")):
            self.logged.update(names)

    @asynccontextmanager
    async def consuming(self, queue: str, events: Iterable[str], **how: Any) -> AsyncIterator[Any]:
        """By a client that waits for a server for as long as it takes."""
        async with (
            mqks().connect(self.url, mqks().Options(connect_timeout_s=1e6)) as client,
            client.consume(queue, events, **how) as messages,
        ):
            yield messages

    async def consume(self, number: int) -> None:
        if number in BLOCKING[1]:
            threads.Thread(target=blocking.consume, args=(self, number)).start()
            return
        async with self.consuming("q", EVENTS, ack_timeout_s=self.ack_timeout_s) as messages:
            async for message in messages:
                self.note("got", number, message.id, message.retry)
                if message.text not in (message.id, message.id + PADDING):
                    raise Violation(f"{message.id} has become {message.text[:99]!r}")
                if self.rng.random() < 0.1:
                    message.reject()
                    continue
                await asyncio.sleep(self.rng.expovariate(1 / 0.5))
                message.ack()
                self.acked["q"][message.id] += 1

    async def read_log(self) -> None:
        """At the log, where everything stays."""
        async with mqks().connect(self.url) as client:
            while self.has_faults:
                wanted = {*self.logged}
                found = [row.id for row in await client.peek(LOG, limit=ALL, timeout_s=1e6)]
                self.note("log", len(found))
                if (missing := wanted - {*found}) or len(found) > len({*found}):
                    raise Violation(f"the log has {len(found)}, and not {sorted(missing)[:9]}")
                await self.wait(READ_S)

    async def burst(self) -> None:
        """Publish much that is due at about the same time."""
        rng = self.rng
        async with mqks().connect(self.url) as client:
            for number in count():
                for part in range(rng.randrange(2, 12)):
                    prefix, size = f"{BURSTER}-{number}-{part}", rng.choice(BURSTS)
                    due_s = rng.uniform(1, BURST_S)
                    terms: dict[str, Any] = {"delay_s": due_s}
                    if rng.random() < 0.5:
                        terms = {"at": self.clock.wall() + due_s}
                    how = {"id_prefix": prefix, "once": True, "timeout_s": 1e6, **terms}
                    try:
                        await client.publish_many([("burst", "x")] * size, **how)
                    except mqks().PublishFailed:  # There was no room for some.
                        continue
                    names = [f"{prefix}-{each}" for each in range(1, size + 1)]
                    self.has_confirmed("burst", *names, **terms)
                await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
                if not self.has_faults:
                    break

    async def take(self) -> None:
        async with self.consuming("b", BINDINGS["b"], prefetch=1000) as messages:
            async for message in messages:
                message.ack()
                self.acked["b"][message.id] += 1

    async def haste(self) -> None:
        """Publish without confirms, and be gone."""
        number = count()
        async for _ in self.now_and_then(HASTE_S):
            with suppress(OSError):
                address = "127.0.0.1", PORT
                transport, _ = await self.loop.create_connection(asyncio.Protocol, *address)
                size = self.rng.choice((1, 5, 5, 5, MANY))
                names = [f"{HASTY}-{next(number)}" for _ in range(size)]
                event = "burst" if size == MANY else "e"
                lines = [f"{name} publish {event} {name}\n".encode() for name in names]
                transport.writelines([b"".join(lines)] if size == MANY else lines)
                await asyncio.sleep(self.rng.choice((0, LATENCY_S)))
                if self.rng.random() < 0.5:
                    sock = transport.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"")
                transport.abort()

    # -- faults

    def faults(self, consumers: list[Process], *others: Sequence[Process]) -> list[Work]:
        stopping = [self.stop_processes(consumers, *others) for _ in range(STOPPED)]
        still = self.stand_still(consumers, *others)
        return [
            *(self.kill_servers(), self.kill_consumers(consumers), self.fill_disk()),
            *(self.cut_connections(), *stopping, still, self.set_clock()),
        ]

    async def now_and_then(self, mean_s: float) -> AsyncIterator[None]:
        """While there are faults."""
        while self.has_faults:
            await self.wait(mean_s)
            yield

    async def wait(self, mean_s: float) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / mean_s))

    async def kill_servers(self) -> None:
        async for _ in self.now_and_then(90):
            await self.disk.end(self.server, self.note)
            await self.wait(2)
            await self.serve()

    async def kill_consumers(self, consumers: list[Process]) -> None:
        async for _ in self.now_and_then(120):
            number = self.rng.randrange(len(consumers))
            self.note("kill", consumers[number].name)
            self.network.kill(consumers[number])
            await self.wait(5)
            consumers[number] = Process(consumers[number].name)
            consumers[number].play(self.consume(number))

    async def fill_disk(self) -> None:
        async for _ in self.now_and_then(150):
            self.note("the disk is full")
            self.disk.fill()
            self.judge.has_room = False
            await self.wait(20)
            self.disk.empty()
            await asyncio.sleep(NOTICED_S)
            self.judge.has_room = True

    async def cut_connections(self) -> None:
        async for _ in self.now_and_then(30):
            self.network.tidy()
            if self.network.transports:
                self.cuts += 1
                self.note("cut")
                transport = self.rng.choice(self.network.transports)
                if self.rng.random() < 0.5:
                    transport.reset()
                else:
                    transport.breaks = True

    async def stop_processes(self, *processes: Sequence[Process]) -> None:
        async for _ in self.now_and_then(60):
            process = self.rng.choice([*chain(*processes), *self.servers()])
            await self.stop(process, self.rng.expovariate(1 / self.rng.choice(STOPS_S)))

    async def stop(self, process: Process, time_s: float) -> None:
        """And let it go on after this time."""
        self.stops += 1
        self.note("stop", process.name)
        await process.stop_for(time_s)

    async def stand_still(self, *processes: Sequence[Process]) -> None:
        """A server does, and some of those who ask it and wait, for longer than they wait."""
        async for _ in self.now_and_then(300):
            server = self.rng.choice(self.servers())
            waiting = self.rng.sample([*chain(*processes)], ASKING)
            self.note("stands still", server.name)
            server.stop()
            await asyncio.gather(*map(self.pause, waiting), asyncio.sleep(STILL_S))
            server.go_on()

    async def pause(self, process: Process) -> None:
        await asyncio.sleep(self.rng.uniform(KEEP_ALIVE_S, 2 * KEEP_ALIVE_S))
        await process.stop_for(self.rng.uniform(2.5, 4) * KEEP_ALIVE_S)

    def servers(self) -> list[Process]:
        return [self.process] * 4

    async def set_clock(self) -> None:
        async for _ in self.now_and_then(100):
            self.sets += 1
            self.note("set the clock")
            self.clock.set(self.rng.choice((-AWAY_S, -1.0, 0.0, 1.0, AWAY_S)))

    # -- the run

    async def play(self) -> None:
        self.loop = the_loop()
        self.network.install(self.loop)
        await self.main()

    async def main(self) -> None:
        threads.install(self.loop, self.network)
        self.judge = Judge(self.loop)
        self.watch_server()
        await self.serve()
        await self.set_up()
        consumers = [Process(f"consumer {number}") for number in range(CONSUMERS)]
        publishers = [Process(f"publisher {number}") for number in range(self.clients)]
        for number, each in enumerate(consumers):
            each.play(self.consume(number))
        others = self.others()
        await asyncio.sleep(5)
        working = [each.spawn(self.publish(n)) for n, each in enumerate(publishers)]
        faults = asyncio.gather(*self.faults(consumers, publishers, others), *self.visitors())
        faults.add_done_callback(end_run, context=NOBODY)
        try:
            await asyncio.wait_for(asyncio.gather(*working), 1000 + 80 * self.messages)
        except TimeoutError:
            raise Violation("publishers do not come to an end") from None
        self.has_faults = False
        await faults
        await self.calm_down()
        self.clock.set(0.0)
        self.judge.quiet_s = self.clock.monotonic_s
        for id_, event in self.judge.sure.items():
            self.confirmed.setdefault(id_.decode(), event.decode())
        deadline_s = self.clock.monotonic_s + QUIET_S
        await self.all_come(deadline_s)
        for queue in self.queues:
            await self.is_empty(queue, deadline_s)
        self.judge.judge_end()
        await self.outlive_full_disk()
        await self.is_calm()

    async def all_come(self, deadline_s: float) -> None:
        missing = set[str]()
        while missing := self.missing(missing) or self.missing():
            if self.clock.monotonic_s > deadline_s:
                told = f"{len(missing)} were confirmed and do not come"
                raise Violation(f"{told}: {sorted(missing)[:9]}")
            await asyncio.sleep(10)

    async def outlive_full_disk(self) -> None:
        """Consumers go on, and with room again messages are accepted."""
        names = (f"{PUBLISHERS}-{number}" for number in count())
        self.disk.fill()
        async with mqks().connect(self.url) as client:
            while await self.accepted(client, "e", next(names)):
                pass
            await self.all_come(self.clock.monotonic_s + 60)
            self.disk.empty()
            deadline_s = self.clock.monotonic_s + 60
            while not await self.accepted(client, "e", next(names)):
                if self.clock.monotonic_s > deadline_s:
                    raise Violation("the disk has room, and messages are refused")
                await asyncio.sleep(1)

    def watch_server(self) -> None:
        self.network.watch = partial(self.judge.watch, PORT)

    async def set_up(self) -> None:
        async with mqks().connect(self.url) as client:
            await client.subscribe(LOG, [*EVENTS, "burst"])
            if self.keys:
                await client.set_queue("q", ordered="key")

    def others(self) -> list[Process]:
        """Start whoever plays beside publishers and consumers."""
        service, push = Process("service"), Process("push")
        push.leaves = True  # As often as it is started.
        service.play(services.serve(self))
        push.play(services.push(self))
        services.listen(self)
        taker = Process("taker")
        taker.play(self.take())
        return [service, push, taker]

    def visitors(self) -> list[Work]:
        """Who comes and goes while there are faults."""
        return [self.read_log(), self.haste(), self.burst()]

    async def calm_down(self) -> None:
        """Nothing happens to the server any more, and it runs."""
        self.disk.rest()
        self.clock.step_s = 0.0
        if self.process.dead or self.server.done():
            self.disk.ended()
            await self.serve()
            self.disk.rest()
            self.clock.step_s = 0.0

    async def is_calm(self) -> None:
        calm = asyncio.create_task(threads.in_thread(blocking.calm, self))
        await asyncio.wait({calm}, timeout=CALM_S)
        if not calm.done():
            raise Violation("nothing fails, and a blocking client waits without an end")
        calm.result()

    def missing(self, of: Iterable[str] | None = None) -> set[str]:
        """What does not come to each of its queues: of these messages, or of all."""
        of = self.confirmed if of is None else of
        missing = set[str]()
        for queue in self.queues:
            wanted = {name for name in of if self.confirmed[name] in BINDINGS[queue]}
            missing |= wanted - self.acked[queue].keys()
        return missing

    async def is_empty(self, queue: str, deadline_s: float) -> None:
        """What was acked leaves nothing behind."""
        async with mqks().connect(self.url) as client:
            while True:
                told = await client.stats("queue", queue)
                left = {each: told[each] for each in CONTENTS}
                if not any(left.values()):
                    return
                if self.clock.monotonic_s > deadline_s:
                    raise Violation(f"all is acked, and the queue {queue} has {left}")
                await asyncio.sleep(10)


def mqks() -> Any:
    import mqks

    return mqks


async def nothing(*_: Any) -> None:
    """In place of what is left out."""


class Result(NamedTuple):
    """`events`: the hash of all that was seen; `passed_s`: simulated seconds."""

    events: str
    passed_s: float
    turns: int
    world: World


def run(
    seed: int,
    messages: int = MESSAGES,
    kind: type[World] = World,
    clients: int = 0,
    without: Sequence[str] = (),
    *,
    tells: bool = False,
    outside: Outside | None = None,
) -> Result:
    """Raises Violation, or what the product raised, after it has told the last events."""
    is_roomy = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > FREE_BYTES
    where = MEMORY if is_roomy else None
    directory = Path(tempfile.mkdtemp(prefix="mqks-simulation-", dir=where))
    world = kind(seed, directory, messages)
    world.clients, world.tells = clients or kind.clients, tells
    for name in without:
        setattr(world, name, nothing)
    if outside is None:
        outside = Outside(world.clock, world.network, random.Random())
        install(outside)
    outside.become(world)
    outside.chance.seed(f"chance {seed}")
    random.seed(seed)
    world.install()
    from mqks import log
    from mqks.errors import MqksError

    def nowhere(error: BaseException) -> str:
        """What is stored of it is compressed, so that also a name of the same length has a size."""
        return Exception.__str__(error).replace(str(directory), "")

    MqksError.__str__ = nowhere  # type: ignore[method-assign]
    log.configure("text", "critical")
    start_s = world.clock.monotonic_s
    try:
        loop = in_world(world.play, world.clock, seed)
    except BaseException:
        if not tells:
            print("\n".join(world.last))
        if where is not None:  # By another process: this one's files are watched.
            os.spawnlp(os.P_WAIT, "mv", "mv", str(directory), tempfile.gettempdir())
        print(f"seed {seed} failed; its files: {tempfile.gettempdir()}/{directory.name}")
        raise
    shutil.rmtree(directory)
    passed_s = world.clock.monotonic_s - start_s
    return Result(world.events.hexdigest()[:16], passed_s, loop.steps, world)
