"""What fails, at random from a seed.

The one rule: a fault takes its choices from its own random numbers, so that the schedule does not
depend on how fast things are.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from tests.kit.clock_library import Clock
from tests.kit.waiting import until
from tests.takeover.cluster import Brokers, Databases, Mode

YEAR_S = 365 * 24 * 3600
OTHERS = "names", "happen"


class Faults:
    """Each public coroutine that takes only random numbers is a fault. `disk` is the small one of
    the first database; with `clock` the first broker's clock can be set."""

    def __init__(self, brokers: Brokers, clock: Clock | None, disk: Path | None) -> None:
        self._brokers = brokers
        self._databases: Databases = brokers.databases
        self._clock = clock
        self._disk = disk

    def names(self) -> list[str]:
        found = [name for name in vars(Faults) if name[0] != "_" and name not in OTHERS]
        without = {"clock": self._clock is None, "disk_full": self._disk is None}
        return sorted(name for name in found if not without.get(name))

    async def _settled(self) -> None:
        """Everything is there again, and works."""
        for network in self._brokers.networks:
            network.heal()
        await asyncio.to_thread(self._databases.heal)
        await self._brokers.until_confirmed(self._brokers.place)

    async def happen(self, name: str, rng: random.Random) -> None:
        """One of them, until all is well again."""
        await getattr(self, name)(rng)
        await self._settled()

    # -- brokers

    async def kill_broker(self, rng: random.Random) -> None:
        (await self._brokers.until_served()).kill_now()

    async def terminate_broker(self, rng: random.Random) -> None:
        (await self._brokers.until_served()).kill_now(signal.SIGTERM)

    async def kill_all_brokers(self, rng: random.Random) -> None:
        """Those that are started then claim at once."""
        await self._brokers.until_served()
        for life in [*self._brokers.now.values()]:
            life.kill_now()

    async def suspend_broker(self, rng: random.Random) -> None:
        """Through a take-over."""
        pause_s = rng.choice([0, 0, 1, 6])
        life = await self._brokers.until_served()
        await asyncio.to_thread(self._brokers.stop, life)
        await self._brokers.until_served(above=self._brokers.epochs[life.number])
        await asyncio.sleep(pause_s)
        self._brokers.go_on(life)
        await self._brokers.until_lost(life)

    async def clock(self, rng: random.Random) -> None:
        """It is set while the broker runs."""
        assert self._clock is not None
        self._clock.ahead(rng.choice([-YEAR_S, 0, YEAR_S]))

    # -- databases

    async def lose_a_standby(self, rng: random.Random) -> None:
        pause_s, is_killed = rng.choice([0, 2]), rng.random() < 0.5
        server = rng.choice(self._databases.standbys)
        await asyncio.to_thread(server.kill if is_killed else server.stop)
        await asyncio.sleep(pause_s)

    async def lose_all_standbys(self, rng: random.Random) -> None:
        pause_s = rng.uniform(0.5, 4)
        await asyncio.to_thread(self._databases.lose_standbys)
        await asyncio.sleep(pause_s)

    async def end_waits(self, rng: random.Random) -> None:
        """Commits are visible that no standby has; often the primary is lost with them."""
        ends = rng.choices(["pg_cancel_backend", "pg_terminate_backend"], k=rng.randrange(1, 5))
        fails_over, rewind = rng.random() < 0.6, rng.random() < 0.5
        await self._brokers.until_served()
        await asyncio.to_thread(self._databases.lose_standbys)
        for end in ends:
            await asyncio.to_thread(self._end_wait, end)
        if fails_over:
            await asyncio.to_thread(self._databases.fail_over, rewind=rewind)

    def _end_wait(self, end: str) -> None:
        for pid in until(self._databases.waiting, "no commit waits for a standby"):
            self._databases.signal(end, pid)

    async def end_backends(self, rng: random.Random) -> None:
        end = rng.choice(["pg_cancel_backend", "pg_terminate_backend"])
        for _ in range(rng.randrange(1, 10)):
            for pid in await asyncio.to_thread(self._databases.backends):
                await asyncio.to_thread(self._databases.signal, end, pid)
            await asyncio.sleep(0.02)

    async def restart_primary(self, rng: random.Random) -> None:
        is_killed, pause_s = rng.random() < 0.7, rng.choice([0, 1, 5])
        primary = self._databases.primary
        await asyncio.to_thread(primary.kill if is_killed else primary.stop)
        await asyncio.sleep(pause_s)

    async def fail_over(self, rng: random.Random) -> None:
        kill, rewind = rng.random() < 0.7, rng.random() < 0.5
        await asyncio.to_thread(self._databases.fail_over, kill=kill, rewind=rewind)

    async def fail_over_and_kill_broker(self, rng: random.Random) -> None:
        rewind = rng.random() < 0.5
        life = await self._brokers.until_served()
        doing = asyncio.create_task(
            asyncio.to_thread(self._databases.fail_over, kill=True, rewind=rewind)
        )
        await asyncio.sleep(rng.uniform(0, 1))
        life.kill_now()
        await doing

    async def two_primaries(self, rng: random.Random) -> None:
        """The old one goes on for a while, and brokers come and go."""
        seconds, rewind, kill = rng.uniform(0, 8), rng.random() < 0.5, rng.random() < 0.5
        life = await self._brokers.until_served()
        doing = asyncio.create_task(
            asyncio.to_thread(self._databases.fail_over, rewind=rewind, both_s=seconds)
        )
        await asyncio.sleep(rng.uniform(0, 3))
        if kill:
            life.kill_now()
        await doing

    async def open_transaction(self, rng: random.Random) -> None:
        """It holds back what may be vacuumed, and perhaps the row of the owner."""
        lock = rng.choice(["", " for update"])
        await asyncio.to_thread(self._hold, lock, rng.uniform(1, 7))

    def _hold(self, lock: str, seconds: float) -> None:
        with self._databases.primary.connection() as connection, connection.transaction():
            connection.execute(f"select * from mqks.owner{lock}".encode())
            time.sleep(seconds)

    async def disk_full(self, rng: random.Random) -> None:
        """Of the first database, whatever it is at the time."""
        assert self._disk is not None
        seconds, server = rng.uniform(1, 4), self._databases.servers[0]
        ballast = self._disk / "ballast"
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(64 * 1024))
        await asyncio.sleep(seconds)
        ballast.unlink()
        # It may have crashed, or be about to.
        await asyncio.to_thread(server.stop)

    # -- the network

    async def swallow_replies(self, rng: random.Random) -> None:
        seconds, mode_s = rng.uniform(0, 0.5), rng.uniform(0, 3)
        life = await self._brokers.until_served()
        network = self._brokers.networks[life.index]
        network.mode = "swallows"
        await asyncio.sleep(seconds)
        network.cut()
        await asyncio.sleep(mode_s)

    async def cut_network(self, rng: random.Random) -> None:
        modes: list[Mode] = ["drops", "refuses"]
        mode, seconds = rng.choice(modes), rng.uniform(0.2, 3)
        life = await self._brokers.until_served()
        network = self._brokers.networks[life.index]
        network.mode = mode
        network.cut()
        await asyncio.sleep(seconds)

    async def cut_network_through_a_take_over(self, rng: random.Random) -> None:
        swallows, pause_s = rng.random() < 0.5, rng.choice([0, 2])
        life = await self._brokers.until_served()
        network = self._brokers.networks[life.index]
        if swallows:
            network.mode = "swallows"
            await asyncio.sleep(0.2)
        network.mode = "drops"
        await self._brokers.until_served(above=self._brokers.epochs[life.number])
        await asyncio.sleep(pause_s)
        network.heal()
        await self._brokers.until_lost(life)
