"""The lives of `tests.chaos` in the simulated world.

The one rule: what is played and who judges it is the same there and here; only time, threads,
sockets and processes are made from the seed, and processes are stopped as well.
"""

import asyncio
import io
from collections.abc import Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING

from tests.simulation.host import Host
from tests.simulation.loop import Process
from tests.simulation.world import PORT, World

if TYPE_CHECKING:
    from tests.chaos.plan import LifePlan
    from tests.chaos.play import Chaos

STOPS_S = 0.3
"""Between two stops of a process, about."""
STOPPED_S = 0.001, 0.1, 0.1, 10.0
"""A process stands still for up to so long."""


class SimulatedServer:
    wait_s = 600.0
    has_ended = ""
    """A server that ends of itself ends the run."""

    def __init__(self, host: Host, told: io.StringIO) -> None:
        self._host, self._told = host, told
        self.address = "127.0.0.1", host.port

    @property
    def log(self) -> str:
        return self._told.getvalue()

    async def end(self, *, kill: bool) -> None:
        from tests.chaos.server import check_log

        await self._host.end(kill=kill)
        check_log(self.log)


class SimulatedServers:
    def __init__(self, world: World, directory: Path) -> None:
        self._world = world
        self.host = Host(world.network, directory, PORT, world.note)
        self.listens = asyncio.Event()

    async def start(
        self, plan: "LifePlan", flags: Mapping[str, str | int | float]
    ) -> SimulatedServer:
        from mqks import log
        from tests.chaos.server import size_of_database

        settings: dict[str, object] = dict(flags)
        settings.pop("uvloop", None)
        if plan.full:
            settings["db_bytes_max"] = size_of_database(self.host.db) + plan.room
        told = io.StringIO()
        with redirect_stderr(told):
            log.configure("text", "info")
        # Turns that are short end in the middle of whatever has come in.
        step_s = 0.0001 if plan.hurried else self._world.rng.choice((0, 1e-6, 1e-5))
        self._world.clock.step_s = step_s
        await self.host.serve(**settings)
        self.listens.set()
        return SimulatedServer(self.host, told)


class Lives(World):
    """`messages` is the number of lives."""

    clients = 0
    kinds = ("stop_and_go_on",)

    def __init__(self, seed: int, directory: Path, messages: int) -> None:
        super().__init__(seed, directory, messages)
        self.chaos: Chaos

    def __str__(self) -> str:
        return f"{self.stops} stops, {self.chaos.figures}"

    async def main(self) -> None:
        from tests.chaos.play import Chaos

        servers = SimulatedServers(self, self.directory / "lives")
        self.chaos = Chaos(self.directory, servers, self.seed)
        clients = Process("clients")
        playing = clients.spawn(self.live())
        await servers.listens.wait()
        stopping = asyncio.ensure_future(self.stop_and_go_on(servers.host, clients))
        await asyncio.wait([playing, stopping], return_when=asyncio.FIRST_EXCEPTION)
        playing.result()

    async def live(self) -> None:
        for number in range(self.messages):
            await self.chaos.live(number)
            self.remember()
        await self.chaos.end(self.messages)
        self.remember()
        self.has_faults = False

    def remember(self) -> None:
        """What passed in the latest life."""
        assert self.chaos.latest is not None
        here = str(self.directory).encode()
        for who, data in self.chaos.latest.transcript:
            self.events.update(who.encode() + data.replace(here, b""))
        self.note("life", self.chaos.figures.lives, dict(self.chaos.figures.counts))

    async def stop_and_go_on(self, host: Host, clients: Process) -> None:
        async for _ in self.now_and_then(STOPS_S):
            process = self.rng.choice((host.process, clients))
            await self.stop(process, self.rng.uniform(0, self.rng.choice(STOPPED_S)))
