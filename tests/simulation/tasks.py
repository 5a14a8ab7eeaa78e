"""Who has tasks done: programs and workers of Celery, with its real kombu and loops.

    python -m tests.simulation SEED --tasks

The one rule: no two threads share what has a lock of others, so that nobody who waits holds one.
"""

import asyncio
import logging
import uuid
from collections.abc import Iterable, Sequence
from secrets import token_bytes

from tests.simulation import threads
from tests.simulation.loop import Process, Violation, Work, put
from tests.simulation.world import World, mqks, nothing

WORKED = ("tasks",)
"""What both workers of a kind consume."""
WORKERS = 4
MANY, HASTE_S = 30, 1.0
CUT_S = 3.0
ANEW_S = 1200.0
"""A worker has begun anew in this time."""


class Tasks(World):
    clients = 6
    kinds: Sequence[str] = World.kinds[:-3]
    queues: Sequence[str] = ("tasks",)
    set_up = outlive_full_disk = nothing

    async def main(self) -> None:
        logging.disable()
        put({uuid: {"uuid4": lambda: uuid.UUID(bytes=token_bytes(16), version=4)}})
        threads.install(self.loop, self.network)
        # Their modules take the time, pauses and ids from where these are replaced now.
        from tests.simulation import linked

        linked.install()
        self.linked = linked
        self.handled = set[str]()
        await super().main()

    def others(self) -> list[Process]:
        return []

    def visitors(self) -> list[Work]:
        return []

    async def publish(self, number: int) -> None:
        await threads.in_thread(self.linked.publish, self, number, self.messages)

    async def consume(self, number: int) -> None:
        threads.Thread(self.linked.work, (self, number)).start()

    def missing(self, of: Iterable[str] | None = None) -> set[str]:
        return {*(self.confirmed if of is None else of)} - self.handled

    async def is_calm(self) -> None:
        """The server runs, and all connections are cut, again and again: each worker goes on."""
        many = threads.in_thread(self.linked.publish, self, self.clients, MANY, HASTE_S)
        last = Process("last").spawn(many)
        while not last.done():
            await self.wait(CUT_S)
            self.network.tidy()
            for each in self.network.transports:
                each.reset()
            await self.all_work()
        await last
        await self.all_come(self.clock.monotonic_s + ANEW_S)

    async def all_work(self) -> None:
        deadline_s = self.clock.monotonic_s + ANEW_S
        async with mqks().connect(self.url) as client:
            for queue in WORKED:
                while (count := (await client.stats("queue", queue))["consumers"]) != WORKERS:
                    if self.clock.monotonic_s > deadline_s:
                        raise Violation(f"{queue} has {count} consumers, and not {WORKERS}")
                    await asyncio.sleep(1)
