"""What a safeguard is for, as a story without chance: with it the history holds, without it not.

The one rule: each step waits for what the next one needs, never for a time.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from mqks.errors import ClaimLost, JournalReverted
from mqks.journal.postgres.claim import LOOK_AGAIN_S
from mqks.limits import SEGMENT_MERGE_COUNT
from tests.takeover.checker import Drained, Event
from tests.takeover.clients import Consumer, Gone, Link, Place, set_up
from tests.takeover.cluster import LIMIT_S, SYNCHRONOUS, Brokers, Databases, Life
from tests.takeover.play import drain, served

COMMITS_MIN = 150
"""In a tenth of the time that a transaction is open: some pages of versions."""
Scene = Callable[[Brokers], Awaitable[None]]


def play(scene: Scene, without: str = "", databases: int = 2) -> list[Event]:
    """The history of it, until a broker that is started last has emptied the queue."""
    place = Place()
    with Databases(place, count=databases) as found:
        asyncio.run(_play(scene, place, found, without))
    return place.history


async def _play(scene: Scene, place: Place, databases: Databases, without: str) -> None:
    # Beats would be other commits that wait.
    lacks = ",".join(filter(None, [without, "beats"]))
    async with served(place, databases, lacks) as brokers, asyncio.TaskGroup() as group:
        watch = group.create_task(brokers.watch())
        await set_up(place, (await start(brokers, 0)).number)
        await scene(brokers)
        brokers.end()
        await start(brokers, 0)
        await drain(place, brokers, 1)
        place.history.append(Drained())
        watch.cancel()


async def start(brokers: Brokers, index: int) -> Life:
    """Until it serves."""
    life = await asyncio.to_thread(brokers.start, index)
    while life.number not in brokers.epochs:
        assert life.is_running, life.log
        await asyncio.sleep(0.02)
    return life


async def confirm(link: Link) -> None:
    """Wait for one, or for the end of the broker."""
    with suppress(Gone):
        link.confirmed(await link.line(LIMIT_S))


async def until(look: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await asyncio.to_thread(look):
            await asyncio.sleep(0.02)


async def suspended(brokers: Brokers) -> None:
    """A broker stands still while another one takes over, and goes on."""
    old = brokers.now[0]
    async with Link.to(brokers.place, old.number) as link:
        link.publish(b"p.0")
        await confirm(link)
        await asyncio.to_thread(brokers.stop, old)
        link.publish(b"p.1")
        await start(brokers, 1)
        brokers.go_on(old)
        await confirm(link)


async def canceled(brokers: Brokers) -> None:
    """The wait of a commit is canceled, and the primary is lost."""
    await _lost(brokers, "pg_cancel_backend")


async def terminated(brokers: Brokers) -> None:
    """The connection of a commit that waits is ended, and the primary is lost."""
    await _lost(brokers, "pg_terminate_backend")


async def _lost(brokers: Brokers, end: str) -> None:
    databases = brokers.databases
    async with Link.to(brokers.place, brokers.now[0].number) as link:
        link.publish(b"p.0")
        await confirm(link)
        await asyncio.to_thread(databases.lose_standbys)
        link.publish(b"p.1")
        await until(databases.waiting)
        [first] = databases.waiting()
        before = databases.last()
        await asyncio.to_thread(databases.signal, end, first)
        # It is visible now. The broker waits with another commit, or else has confirmed it.
        await until(lambda: databases.last() > before)
        answer = asyncio.create_task(confirm(link))
        await until(lambda: answer.done() or databases.waiting())
        await asyncio.to_thread(databases.fail_over)
        await answer


async def unnamed(brokers: Brokers) -> None:
    """The standby is lost, and an operator empties `synchronous_standby_names`: PostgreSQL reports
    success to the commit that waits."""
    databases, old = brokers.databases, brokers.now[0]
    async with Link.to(brokers.place, old.number) as link:
        link.publish(b"p.0")
        await confirm(link)
        await asyncio.to_thread(databases.lose_standbys)
        link.publish(b"p.1")
        age = "clock_timestamp() - query_start"
        long = f"wait_event = 'SyncRep' and {age} > '{2 * LOOK_AGAIN_S} s'"
        await until(lambda: databases.backends(long))
        databases.primary.change(synchronous_standby_names="")
        answer = asyncio.create_task(confirm(link))
        await until(lambda: answer.done() or "event=journal_waits" in old.log)
        databases.primary.change(synchronous_standby_names=SYNCHRONOUS)
        await asyncio.to_thread(databases.start_standbys)
        await answer


async def promoted(brokers: Brokers) -> None:
    """A standby that lacks a confirmed message becomes the primary: the broker must notice."""
    databases, broker = brokers.databases, brokers.now[0]
    old = databases.primary
    late, synchronous = databases.standbys
    async with Link.to(brokers.place, broker.number) as link:
        link.publish(b"p.0")
        await confirm(link)
        await asyncio.to_thread(late.kill)
        link.publish(b"p.1")
        await confirm(link)
        await asyncio.to_thread(old.kill)
        await asyncio.to_thread(synchronous.kill)
        await asyncio.to_thread(late.start)
        await asyncio.to_thread(late.promote)
        databases.primary = late
        link.publish(b"p.2")
        await confirm(link)
    code = await asyncio.to_thread(broker.wait)
    assert code == JournalReverted.exit_code, broker.log
    await asyncio.to_thread(old.copy, late)


async def merged(brokers: Brokers) -> None:
    """A broker stands still while another one takes over and merges its segments, and goes on."""
    old, databases = brokers.now[0], brokers.databases
    async with Link.to(brokers.place, old.number) as link:
        await _segments(link, b"p", SEGMENT_MERGE_COUNT // 2)
        last = databases.last()
        await asyncio.to_thread(brokers.stop, old)
        link.publish(b"q.0")
        new = await start(brokers, 1)
        async with Link.to(brokers.place, new.number) as other:
            await _segments(other, b"r", SEGMENT_MERGE_COUNT)
        await until(lambda: databases.first() > last)
        brokers.go_on(old)
        await confirm(link)
    code = await asyncio.to_thread(old.wait)
    assert code == ClaimLost.exit_code, old.log


async def _segments(link: Link, publisher: bytes, count: int) -> None:
    """One each."""
    for number in range(count):
        link.publish(b"%b.%d" % (publisher, number))
        await confirm(link)


@dataclass(frozen=True)
class Pace:
    """Of commits, one after the other, and the owner's table at the end of them."""

    commits: int
    median_s: float
    p99_s: float
    table_bytes: int
    pages_read: float
    """Per commit."""


async def held_open(brokers: Brokers, seconds: float, tell: Callable[[Pace], object]) -> None:
    """A transaction stays open, so that no version of the owner's row can be removed. `tell` is
    told of each tenth of the time."""
    numbers = itertools.count()
    consumer = Consumer(brokers.place, random.Random(0), lambda: False, is_calm=True)
    consuming = asyncio.create_task(consumer.run())
    async with Link.to(brokers.place, brokers.now[0].number) as link:
        with brokers.databases.primary.connection() as connection:
            connection.execute("analyze mqks.owner")
            connection.execute("begin isolation level repeatable read")
            connection.execute("select from mqks.owner")
            for _ in range(10):
                tell(await _pace(link, brokers.databases, numbers, seconds / 10))
    consuming.cancel()


async def _pace(link: Link, databases: Databases, numbers: Iterator[int], seconds: float) -> Pace:
    written, pages, _ = databases.owner_statistics()
    durations_s: list[float] = []
    end_s = time.monotonic() + seconds
    while len(durations_s) < COMMITS_MIN or time.monotonic() < end_s:
        sent_s = time.monotonic()
        link.publish(b"p.%d" % next(numbers))
        await confirm(link)
        durations_s.append(time.monotonic() - sent_s)
    # The server tells them once a second.
    await until(lambda: databases.owner_statistics()[0] > written)
    now_written, now_pages, size = databases.owner_statistics()
    durations_s.sort()
    count = len(durations_s)
    median_s, p99_s = durations_s[count // 2], durations_s[count * 99 // 100]
    return Pace(count, median_s, p99_s, size, (now_pages - pages) / (now_written - written))
