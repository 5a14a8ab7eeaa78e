"""A world from a seed: a real server and real clients on a simulated clock, loop and network.

    python -m tests.simulation SEED

The one rule: what the product takes from outside, time, chance, threads and sockets, is replaced
before the product is imported, so that it knows nothing of it.
"""

import asyncio
import hashlib
import random
import secrets
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

from tests.simulation.loop import NOBODY, Clock, Process, SimulatedLoop, in_world, run_into
from tests.simulation.network import Network

WALL_S = 1_790_000_000.0
CALL_S = 0.001
"""A call of SQLite takes up to so long."""
PORT = 25000
URL = f"mqks://127.0.0.1:{PORT}"
PUBLISHERS, CONSUMERS, MESSAGES = 16, 4, 60
AWAY_S = 3600.0
"""By so much the wall clock is wrong at times."""
QUIET_S = 2 * AWAY_S + 1200
"""When faults have stopped, everything is delivered in this time: delays are shorter, and after a
restart they go by a wall clock that was set."""
CONTENTS = "ready", "unacked", "scheduled"
LAST = 50
"""Events that a failure tells."""


class Violation(AssertionError):
    """A promise was broken."""


class Calls:
    """The queue of a thread of aiosqlite: what is put there happens at a moment of the seed."""

    def __init__(self) -> None:
        self._last_s = 0.0

    def put_nowait(self, item: tuple[Any, Callable[[], Any]]) -> None:
        loop = cast(SimulatedLoop, asyncio.get_running_loop())
        now_s = loop.time()
        self._last_s = max(self._last_s, now_s + loop.rng.uniform(0, CALL_S)) + 1e-9  # In order.
        loop.happen(self._last_s - now_s, partial(run_into, *item))


class NoThread:
    def __init__(self, **how: Any) -> None:
        pass

    def start(self) -> None:
        pass


def install(clock: Clock, network: Network, seed: int) -> None:
    """Replace what the product takes from outside."""
    rng = random.Random(f"chance {seed}")
    random.seed(seed)
    replaced: dict[ModuleType, dict[str, object]] = {
        time: {
            "monotonic": clock.monotonic,
            "perf_counter": clock.monotonic,
            "time": clock.wall,
            "monotonic_ns": lambda: round(clock.monotonic() * 1e9),
            "time_ns": lambda: round(clock.wall() * 1e9),
        },
        secrets: {
            "token_hex": lambda count=32: rng.randbytes(count).hex(),
            "token_urlsafe": lambda count=32: rng.randbytes(count).hex(),
            "token_bytes": lambda count=32: rng.randbytes(count),
            "randbits": rng.getrandbits,
        },
        socket: {"create_server": network.create_server},
    }
    put(replaced)
    # They take the time from there when they are imported.
    import aiosqlite.core
    import anyio.to_thread

    put({aiosqlite.core: {"SimpleQueue": Calls, "Thread": NoThread}})
    put({anyio.to_thread: {"run_sync": run_sync}})


def put(replaced: Mapping[ModuleType, Mapping[str, object]]) -> None:
    for module, names in replaced.items():
        for name, value in names.items():
            setattr(module, name, value)


async def run_sync(call: Callable[..., Any], *args: Any, **how: Any) -> Any:
    """That of anyio."""
    from anyio import CancelScope

    with CancelScope(shield=not how.get("abandon_on_cancel")):
        return await asyncio.get_running_loop().run_in_executor(None, call, *args)


class Started:
    """The task status of a server."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def started(self, value: object = None) -> None:
        self.event.set()


class World:
    """One run: `events` is a hash of all that was seen in it, `last` has the latest of that."""

    def __init__(self, seed: int, directory: Path, messages: int = MESSAGES) -> None:
        self.seed = seed
        self.messages = messages
        self.rng = random.Random(f"plan {seed}")
        self.directory = directory
        self.clock = Clock(WALL_S)
        self.network = Network()
        self.events = hashlib.sha256()
        self.last = deque[str](maxlen=LAST)
        self.lives = self.cuts = self.stops = self.sets = 0
        self.graves: list[object] = []
        """Tasks of processes that were killed: what is collected would run their last lines."""
        self.confirmed: set[str] = set()
        self.acked: Counter[str] = Counter()
        self.has_faults = True
        self.failure: BaseException | None = None
        """What has ended a server."""

    def note(self, *what: object) -> None:
        told = f"{self.clock.monotonic_s:.9f} {' '.join(map(str, what))}"
        self.events.update(told.encode())
        self.last.append(told)

    # -- processes

    def spawn(self, process: Process, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, context=process.context)
        self.graves.append(task)
        return task

    async def serve(self) -> None:
        """Start a server on what the one before it left."""
        from mqks.server.running import serve
        from mqks.settings import Settings

        self.lives += 1
        old, new = (self.directory / f"life-{life}" for life in (self.lives - 1, self.lives))
        if old.exists():
            # A killed process leaves what it has written; its locks and its memory are gone.
            shutil.copytree(old, new, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
        else:
            new.mkdir()
        settings = Settings(db=new / "mqks.db", port=PORT, page="off", loop_held_s=0)
        process, started = Process(f"server {self.lives}"), Started()

        async def until(reload: object) -> None:
            await asyncio.Event().wait()

        self.server = self.spawn(process, serve(settings, until, task_status=started))
        self.server.add_done_callback(self._ended, context=NOBODY)
        while not started.event.is_set():
            await asyncio.sleep(0.01)
            if self.failure is not None:
                raise self.failure
        self.note(process.name, "listens")
        self.process = process

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.failure = task.exception()

    # -- players

    async def publish(self, number: int) -> None:
        async with mqks().connect(URL) as client:
            for each in range(self.messages):
                name = f"{number}-{each}"
                delay_s = self.rng.choice((None, None, 5.0, 600.0))
                await client.publish(
                    "e", name, id=name, confirm=True, once=True, delay_s=delay_s, timeout_s=1e6
                )
                self.confirmed.add(name)
                self.note("confirmed", name)
                await asyncio.sleep(self.rng.expovariate(1 / 20))

    async def consume(self, number: int) -> None:
        async with mqks().connect(URL) as client, client.consume("q", ["e"]) as messages:
            async for message in messages:
                self.note("got", number, message.text, message.retry)
                if self.rng.random() < 0.1:
                    message.reject()
                    continue
                await asyncio.sleep(self.rng.expovariate(1 / 0.5))
                message.ack()
                self.acked[message.text] += 1

    # -- faults

    async def kill_servers(self) -> None:
        while self.has_faults:
            await asyncio.sleep(self.rng.expovariate(1 / 90))
            self.note("kill", self.process.name)
            self.network.kill(self.process)
            await asyncio.sleep(self.rng.expovariate(1 / 2))
            await self.serve()

    async def cut_connections(self) -> None:
        while self.has_faults:
            await asyncio.sleep(self.rng.expovariate(1 / 30))
            self.network.tidy()
            if self.network.transports:
                self.cuts += 1
                self.note("cut")
                self.rng.choice(self.network.transports).reset()

    async def stop_processes(self, processes: Sequence[Process]) -> None:
        while self.has_faults:
            await asyncio.sleep(self.rng.expovariate(1 / 60))
            process = self.rng.choice([*processes, *[self.process] * 4])
            self.stops += 1
            self.note("stop", process.name)
            process.stop()
            await asyncio.sleep(self.rng.expovariate(1 / 20))
            process.go_on(asyncio.get_running_loop())

    async def set_clock(self) -> None:
        while self.has_faults:
            await asyncio.sleep(self.rng.expovariate(1 / 200))
            self.sets += 1
            self.clock.set(self.rng.choice((-AWAY_S, -1.0, 0.0, 1.0, AWAY_S)))

    # -- the run

    async def main(self) -> None:
        self.network.install(cast(SimulatedLoop, asyncio.get_running_loop()))
        await self.serve()
        consumers = [Process(f"consumer {number}") for number in range(CONSUMERS)]
        publishers = [Process(f"publisher {number}") for number in range(PUBLISHERS)]
        for number, each in enumerate(consumers):
            self.spawn(each, self.consume(number))
        await asyncio.sleep(5)
        working = [self.spawn(each, self.publish(n)) for n, each in enumerate(publishers)]
        faults = asyncio.gather(
            self.kill_servers(),
            self.cut_connections(),
            self.stop_processes([*consumers, *publishers]),
            self.set_clock(),
        )
        try:
            await asyncio.wait_for(asyncio.gather(*working), 1000 + 80 * self.messages)
        except TimeoutError:
            raise Violation("publishers do not come to an end") from None
        self.has_faults = False
        await faults
        self.clock.set(0.0)
        deadline_s = self.clock.monotonic_s + QUIET_S
        while (missing := self.confirmed - self.acked.keys()) and self.failure is None:
            if self.clock.monotonic_s > deadline_s:
                raise Violation(
                    f"{len(missing)} were confirmed and do not come: {sorted(missing)[:9]}"
                )
            await asyncio.sleep(10)
        if self.failure is not None:
            raise self.failure
        await self.is_empty(deadline_s)

    async def is_empty(self, deadline_s: float) -> None:
        """What was acked leaves nothing behind."""
        async with mqks().connect(URL) as client:
            while True:
                told = await client.stats("queue", "q")
                left = {each: told[each] for each in CONTENTS}
                if not any(left.values()):
                    return
                if self.clock.monotonic_s > deadline_s:
                    raise Violation(f"all is acked, and the queue has {left}")
                await asyncio.sleep(10)


def mqks() -> Any:
    import mqks

    return mqks


class Result(NamedTuple):
    """`events`: the hash of all that was seen; `passed_s`: simulated seconds."""

    events: str
    passed_s: float
    turns: int
    world: World


def run(seed: int, messages: int = MESSAGES) -> Result:
    """Raises Violation, or what the product raised, after it has told the last events."""
    with tempfile.TemporaryDirectory() as directory:
        world = World(seed, Path(directory), messages)
        install(world.clock, world.network, seed)
        from mqks.server import log

        log.configure("text", "critical")
        start_s = world.clock.monotonic_s
        try:
            loop = in_world(world.main, world.clock, seed)
        except BaseException:
            print("\n".join(world.last))
            print(f"seed {seed} failed")
            raise
    passed_s = world.clock.monotonic_s - start_s
    return Result(world.events.hexdigest()[:16], passed_s, loop.steps, world)
