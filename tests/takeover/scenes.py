"""What a safeguard is for, as a story without chance: with it the history holds, without it not.

The one rule: each step waits for what the next one needs, never for a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from mqks.errors import JournalReverted
from tests.takeover.checker import Drained, Event
from tests.takeover.clients import Gone, Link, Place, set_up
from tests.takeover.cluster import LIMIT_S, Brokers, Databases, Life
from tests.takeover.play import drain, served

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
