"""Weeks and years of a broker that rests most of the time: who uses it comes for some minutes, and
what they leave has delays, TTLs, leases and backoffs of hours and days.

The one rule: nobody does anything in between, so an hour takes as many turns as something happens
in it.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from tests.simulation.host import Host
from tests.simulation.loop import Violation
from tests.simulation.trades import DAY_S, HOUR_S, Once, Trade, Unused, until_quiet
from tests.simulation.world import PORT, URL, mqks
from tests.simulation.year import FIELDS, GONE_S, Year

TRADES: Final = 5
SCHEDULES: Final = 4
BREAKS_S: Final = 1.5 * DAY_S
AWAY_S: Final = HOUR_S, DAY_S, 3 * DAY_S
SKIPPED_S: Final = 60.0
"""A tick that is later is left out."""
DRAINS_MAX: Final = 400
ONCE_IDS_MAX: Final = 10_000
"""More than count at any time, and soon reached, so that the database stops growing."""
DB_BYTES_MAX: Final = 8_000_000
FILES_MAX: Final = 60
IDLE_TURNS_MAX: Final = 100


class Long(Year):
    """`messages` is the number of hours."""

    kinds = ("break_things",)

    def __init__(self, seed: int, directory: Path, messages: int) -> None:
        super().__init__(seed, directory, messages)
        names = [*self.planned][:SCHEDULES]
        minutes = "0", "30", "59", "5,35"
        fields = minutes, *FIELDS[1:]
        crons = {name: " ".join(map(self.rng.choice, fields)) for name in names}
        self.planned = {name: self.planned[name]._replace(cron=crons[name]) for name in names}
        self.troubles = self.breaks = 0
        """Whatever makes times inexact; ends of servers."""
        self.outages: list[tuple[float, float]] = []
        """From when to when there was no server for long."""
        self.trades: list[Trade] = []
        self._leaving: asyncio.Event
        self.db_bytes = 0

    def __str__(self) -> str:
        told = {
            name: sum(getattr(each, name) for each in self.trades)
            for name in ("published", "delivered", "deaths")
        }
        counts = ", ".join(f"{count} {name}" for name, count in told.items())
        return (
            f"{super().__str__()}, {counts}, {self.once.sent} sent once, "
            f"{self.unused.deleted} queues unused, {self.db_bytes} bytes at the end"
        )

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        """Who comes, and waits for as long as it takes."""
        waits = {"connect_timeout_s": 1e9, "timeout_s": 1e9, "keep_alive_s": DAY_S}
        options = mqks().Options(reconnect_max_s=600.0, **waits)
        self.network.tidy()
        async with mqks().connect(URL, options) as client:
            yield client

    async def rest(self, time_s: float) -> bool:
        """Whether to go on after it."""
        try:
            await asyncio.wait_for(self._leaving.wait(), time_s)
        except TimeoutError:
            return True
        return False

    async def serve(self, ended_s: float | None = None) -> None:
        ended_s = self.clock.monotonic_s if ended_s is None else ended_s
        await self.host.serve(synchronous="off", once_ids_max=ONCE_IDS_MAX)
        self.unused.begin_life(ended_s)

    # -- the run

    async def main(self) -> None:
        self.host = Host(self.network, self.directory / "long", PORT, self.note)
        self._leaving = asyncio.Event()
        self.once, self.unused = Once(self), Unused(self)
        self.trades = [Trade(self, f"t{number}") for number in range(TRADES)]
        await self.serve()
        async with self.client() as client:
            await client.subscribe("ticks", ["tick"])
            await client.subscribe(Once.queue, [Once.queue])
            for each in self.trades:
                await each.set_up(client)
        await self.add()
        added = datetime.fromtimestamp(self.clock.wall(), UTC)
        players = [self.break_things(), self.take_ticks(), self.once.publish(), self.unused.come()]
        for each in self.trades:
            players += [each.publish(), each.take()]
        playing = asyncio.gather(*players)
        await asyncio.wait([playing], timeout=self.messages * HOUR_S)
        if playing.done():
            playing.result()
        self._leaving.set()
        await playing
        self.troubles += 1
        self.clock.set(0.0)
        now = datetime.fromtimestamp(self.clock.wall(), UTC)
        await self.tick_tock()
        self.judge_ticks(added, now)
        await self.leave_nothing()

    async def take_ticks(self) -> None:
        while await self.rest(self.rng.expovariate(1 / DAY_S)):
            await self.tick_tock()

    async def tick_tock(self) -> None:
        async with self.client() as client, client.consume("ticks", auto_ack=True) as messages:
            async for message in until_quiet(messages, 90):
                self.note("tick", message.id)
                self.got[message.id] += 1

    async def break_things(self) -> None:
        rng = self.rng
        while await self.rest(rng.expovariate(1 / BREAKS_S)):
            self.troubles += 1
            what, gone_s = rng.random(), rng.uniform(0, GONE_S)
            if what < 0.6:
                self.breaks += 1
                began_s = self.clock.monotonic_s
                await self.host.end(kill=what < 0.3)
                if rng.random() < 0.1:
                    gone_s = rng.expovariate(1 / rng.choice(AWAY_S))
                await asyncio.sleep(gone_s)
                await self.serve(began_s)
                self.troubles += 1
                self.breaks += 1
                if gone_s > GONE_S:
                    self.outages.append((began_s, self.clock.monotonic_s))
            elif what < 0.8:
                self.stops += 1
                await self.host.process.stop_for(gone_s)
                self.troubles += 1
            else:
                self.sets += 1
                wrong_s = rng.uniform(-GONE_S / 2, GONE_S / 2)
                self.note("the clock is wrong by", wrong_s)
                self.clock.set(wrong_s)

    # -- what is judged

    def is_open(self, second: int) -> bool:
        """Whether this tick was about to be published when a server ended, or was due so long
        before it was started again that it may have been left out."""
        at_s = second - self.clock.right_s
        return any(
            began_s - SKIPPED_S < at_s < ended_s + SKIPPED_S for began_s, ended_s in self.outages
        )

    def served_s(self, time_s: float) -> float:
        """The first moment from this one on at which there was a server."""
        return max((end for start, end in self.outages if start <= time_s <= end), default=time_s)

    async def leave_nothing(self) -> None:
        """All is taken, and then nothing is left of so long a time."""
        for each in self.trades:
            for _ in range(DRAINS_MAX):
                await each.visit(wants_all=True)
                if all(item.is_done or not item.is_certain for item in each.items.values()):
                    break
                await asyncio.sleep(6 * HOUR_S)
            else:
                raise Violation(f"{each.name}: {[*each.items.values()][:5]} do not come")
        await asyncio.sleep(8 * DAY_S)  # No result is kept for longer.
        async with self.client() as client:
            await self.unused.judge(client)
            for row in await client.schedules():
                await client.unschedule(row["name"])
            for row in await client.stats("queues"):
                told = await client.stats("queue", row["name"])
                left = {name: told[name] for name in ("ready", "unacked", "scheduled")}
                if row["name"] != "ticks" and any(left.values()):
                    raise Violation(f"all was taken, and {row['name']} has {left}")
                await client.delete_queue(row["name"])
        await asyncio.sleep(HOUR_S)
        broker = self.host.broker
        more = {"results": len(broker.results.rows), "timers": len(broker.schedule)}
        await self.host.leave_nothing(DAY_S, IDLE_TURNS_MAX, **more)
        files = {each.name: each.stat().st_size for each in self.host.db.parent.iterdir()}
        self.db_bytes = sum(size for name, size in files.items() if "ballast" not in name)
        if self.db_bytes > DB_BYTES_MAX:
            raise Violation(f"all is taken, and the database has {files}")
        if (opened := len(os.listdir("/proc/self/fd"))) > FILES_MAX:
            raise Violation(f"{opened} files are open")
