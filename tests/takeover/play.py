"""One run: faults under load for some time, then everything heals, and the queues are emptied.

The one rule: all processes and files are gone when it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from tests.kit import clock_library
from tests.takeover.checker import Drained, Event
from tests.takeover.clients import Consumer, Gone, Place, Publisher, Reader, is_empty, set_up
from tests.takeover.cluster import LIMIT_S, Brokers, Databases, Network, Violation
from tests.takeover.faults import Faults

BROKERS = 3
DISK_BYTES = 512 * 1024 * 1024


@contextmanager
def small_disk(say: Callable[[str], None]) -> Iterator[Path | None]:
    """A file system of its own, which can be filled."""
    directory = Path(tempfile.mkdtemp(prefix="mqks-disk-"))
    try:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=777", "none"]
        done = subprocess.run([*mount, str(directory)], capture_output=True, text=True)
        if done.returncode:
            say(f"without a full disk, since none can be mounted: {done.stderr.strip()}")
            yield None
            return
        try:
            yield directory
        finally:
            subprocess.run(["umount", str(directory)], check=True)
    finally:
        directory.rmdir()


@contextmanager
def clock(say: Callable[[str], None]) -> Iterator[clock_library.Clock | None]:
    """A clock that can be set."""
    if shutil.which("cc") is None:
        say("without clocks that differ, since there is no C compiler (cc)")
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="mqks-clock-") as name:
        yield clock_library.Clock(clock_library.compiled(Path(name)), Path(name))


class Play:
    """`run` adds to `history` and `counts` what has happened."""

    def __init__(
        self,
        seed: int,
        *,
        without: str = "",
        only: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self.place = Place()
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._without = without
        self._only = only
        """Faults, instead of all: each of them happens, however long it takes."""
        self._say = say
        self._ends = False

    @property
    def history(self) -> list[Event]:
        return self.place.history

    def run(self, seconds: float) -> None:
        """Faults for so long. Raises Violation."""
        with ExitStack() as stack:
            disk = stack.enter_context(small_disk(self._say))
            watch = stack.enter_context(clock(self._say))
            databases = stack.enter_context(Databases(self.place, disk))
            asyncio.run(self._run(databases, watch, disk, seconds))

    async def _run(
        self,
        databases: Databases,
        watch: clock_library.Clock | None,
        disk: Path | None,
        seconds: float,
    ) -> None:
        environments = {0: watch.environment} if watch else {}
        async with (
            served(self.place, databases, self._without, environments) as brokers,
            asyncio.TaskGroup() as group,
        ):
            background = [group.create_task(brokers.keep(index)) for index in range(BROKERS)]
            background.append(group.create_task(brokers.watch()))
            await set_up(self.place, (await brokers.until_served()).number)
            clients = [group.create_task(client.run()) for client in self._clients()]
            await self._fail(Faults(brokers, watch, disk), seconds)
            self._ends = True
            _, late = await asyncio.wait(clients, timeout=LIMIT_S)
            if late:
                raise Violation(f"clients do not end: {late}; {brokers.told()}")
            await drain(self.place, brokers, 1)
            (await brokers.until_served()).kill_now()
            await drain(self.place, brokers, 2)
            self.history.append(Drained())
            for task in background:
                task.cancel()

    def _clients(self) -> list[Publisher | Consumer | Reader]:
        def of(name: str) -> tuple[Place, random.Random, Callable[[], bool]]:
            return self.place, random.Random(f"{self._seed} {name}"), lambda: self._ends

        return [
            *(Publisher(*of(name), name, once=name > "p1") for name in ("p0", "p1", "p2", "p3")),
            *(Consumer(*of(name)) for name in ("c0", "c1", "c2")),
            Reader(*of("reader"), 0),
        ]

    async def _fail(self, faults: Faults, seconds: float) -> None:
        begin_s, number = time.monotonic(), 0
        names = [*self._only]
        while names or time.monotonic() < begin_s + seconds:
            rng = random.Random(f"{self._seed} {number}")
            if not names:  # All of them, in another order each time.
                names = [*self._only] or faults.names()
                rng.shuffle(names)
            name = names.pop()
            self._say(f"{time.monotonic() - begin_s:7.1f} s: {name}")
            await asyncio.sleep(rng.uniform(0, 0.5))
            await faults.happen(name, rng)
            self.counts[name] += 1
            number += 1


@asynccontextmanager
async def served(
    place: Place,
    databases: Databases,
    without: str = "",
    environments: dict[int, dict[str, str]] | None = None,
) -> AsyncIterator[Brokers]:
    """None of them runs yet."""
    async with AsyncExitStack() as stack:
        networks = [
            await stack.enter_async_context(Network(databases.sockets).listening())
            for _ in range(BROKERS)
        ]
        brokers = Brokers(place, databases, networks, without=without, environments=environments)
        try:
            yield brokers
        finally:
            brokers.end()


async def drain(place: Place, brokers: Brokers, reader: int) -> None:
    """Consume the queue until it is empty, and read the whole log."""
    done = False
    rng = random.Random(reader)
    consumer = Consumer(place, rng, lambda: done, is_calm=True)
    log = Reader(place, rng, lambda: log.is_at_end, reader)
    try:
        async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
            group.create_task(consumer.run())
            group.create_task(log.run())
            while not done:
                await asyncio.sleep(0.1)
                with suppress(Gone):
                    done = await is_empty(place, (await brokers.until_served()).number)
    except TimeoutError:
        raise Violation(f"the queue does not become empty; {brokers.told()}") from None
