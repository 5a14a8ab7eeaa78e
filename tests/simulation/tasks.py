"""Who has tasks done: programs and workers of Celery, with its real kombu and loops, and of Django.

The one rule: no two threads share what has a lock of others, so that nobody who waits holds one.
"""

import asyncio
import logging
import os
import secrets
import uuid
from collections.abc import Iterable
from typing import Any

from tests.simulation import threads
from tests.simulation.loop import Process, Violation, Work, put
from tests.simulation.world import World, mqks, nothing

WORKERS = {"tasks": 2, "tasks.default": 1, "outbox.default": 1}
MANY, HASTE_S, CUT_S = 12, 1.0, 3.0
ANEW_S = 1200.0
"""A worker has begun anew in this time."""


class Tasks(World):
    clients = 6
    kinds = World.kinds[:-3]
    queues = (*WORKERS,)
    outlive_full_disk = nothing

    async def set_up(self) -> None:
        logging.disable()
        put({uuid: {"uuid4": lambda: uuid.UUID(bytes=secrets.token_bytes(16), version=4)}})
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.django_project.settings"
        os.environ["TEST_DB"] = f"file:{self.directory}/tasks.db?vfs=unix"  # Not on its disk.
        os.environ["MQKS_URL"] = self.url
        self.handled, self.successful, self.undone = set[str](), set[str](), set[str]()
        """What has ended; rows that were saved so; rows of the outbox that were rolled back."""
        self.wanted = dict[str, str]()
        """How tasks of Django end."""
        # Their modules take the time, pauses and ids from where these are replaced now.
        from tests.simulation import enqueued, linked

        self.linked, self.enqueued = linked, enqueued
        linked.install()
        await Process("migrate").spawn(threads.in_thread(enqueued.install, self))

    def others(self) -> list[Process]:
        return []

    def visitors(self) -> list[Work]:
        return []

    def player(self, number: int) -> Any:
        return self.enqueued if number % 2 else self.linked

    async def publish(self, number: int, *how: Any) -> None:
        how = how or (self.messages, 20.0)
        await threads.in_thread(self.player(number).publish, self, number, *how)

    async def consume(self, number: int) -> None:
        threads.Thread(self.player(number).work, (self, number)).start()

    def missing(self, of: Iterable[str] | None = None) -> set[str]:
        return {*([*self.confirmed, *self.wanted] if of is None else of)} - self.handled

    async def is_calm(self) -> None:
        """The server runs, and all connections are cut, again and again: each worker goes on."""
        works = [self.publish(self.clients + each, MANY, HASTE_S) for each in range(2)]
        last = asyncio.gather(*(Process("last").spawn(each) for each in works))
        while not last.done():
            await self.wait(CUT_S)
            self.network.tidy()
            for each in self.network.transports:
                each.reset()
            await self.all_work()
        await last
        await self.all_come(self.clock.monotonic_s + ANEW_S)
        await Process("judge").spawn(threads.in_thread(self.enqueued.judge))

    async def all_work(self) -> None:
        deadline_s = self.clock.monotonic_s + ANEW_S
        async with mqks().connect(self.url) as client:
            for queue, count in WORKERS.items():
                while (found := (await client.stats("queue", queue))["consumers"]) != count:
                    if self.clock.monotonic_s > deadline_s:
                        raise Violation(f"{queue} has {found} consumers, and not {count}")
                    await asyncio.sleep(1)
