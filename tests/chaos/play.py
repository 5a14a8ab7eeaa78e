"""Lives of servers on one database: each is started, looked at, played with, and ended.

The one rule: whatever is not as the checker says ends the whole, and leaves the database, the
server's log and all that passed in a directory that is named.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Container, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos import crowd
from tests.chaos.checker import Checker, Found, Queue, Row, Violation
from tests.chaos.desk import Desk
from tests.chaos.forge import Forge
from tests.chaos.nuisance import Nuisance
from tests.chaos.plan import LifePlan
from tests.chaos.renting import Renting
from tests.chaos.scene import Scene
from tests.chaos.server import Server, Servers
from tests.chaos.ward import Ward
from tests.chaos.wire import Life, Wire

_RANGE = re.compile(rb"epoch=(\S+) first=(\d+) next=(\d+)(?: paused=yes)?")


class _Looker:
    """What there is right after a start."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def look(self, others: Container[bytes], *, full: bool) -> dict[bytes, Found]:
        """But for the queues of others."""
        bound: dict[str, set[bytes]] = {}
        for row in await self._rows("bindings"):
            bound.setdefault(row["queue"], set()).add((row["event"] or row["mask"]).encode())
        rows = {row["name"]: row for row in await self._rows("queues")}
        queues: dict[bytes, Found] = {}
        for name, row in rows.items():
            if name.encode() in others:
                continue
            if not name.startswith("n."):
                queues[name.encode()] = await self._queue(name, row, bound.get(name, set()))
            elif not full:
                await self._wire.answer(b"look", b"delete_queue --confirm " + name.encode())
        await self._wire.close()
        return queues

    async def _rows(self, what: str) -> list[dict[str, Any]]:
        [told] = await self._wire.answer(b"look", f"stats {what} --limit=10000".encode())
        return list(json.loads(told))

    async def _queue(self, name: str, row: dict[str, Any], bound: set[bytes]) -> Found:
        [told] = await self._wire.answer(b"look", f"range {name}".encode())
        found = _RANGE.fullmatch(told)
        assert found, told
        rows: list[Row] = []
        answer = [b""]
        while answer:
            after = rows[-1].number if rows else 0
            line = f"peek {name} --after={after} --limit=1000".encode()
            *answer, _ = await self._wire.answer(b"look", line, lambda rest: rest == b"--end")
            rows += map(crowd.peeked, answer)
        numbers = [each.number for each in rows]
        first, after = int(found[2]), int(found[3])
        if numbers != sorted(set(numbers)) or first != (numbers[0] if numbers else after):
            raise Violation(f"{name} has the numbers {numbers[:9]}... from {first}")
        if numbers and numbers[-1] >= after:
            raise Violation(f"{name} has number {numbers[-1]}, and ends at {after}")
        if (row["ready"], row["unacked"]) != (len(rows), 0):
            raise Violation(f"{name} has {len(rows)} messages, and tells {row}")
        return Found(found[1], after, frozenset(bound), rows)


@dataclass(slots=True)
class Figures:
    lives: int = 0
    killed: int = 0
    stopped: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        counts = ", ".join(f"{number:,} {what}" for what, number in self.counts.items())
        return f"{self.killed} killed, {self.stopped} stopped: {counts}"


class Chaos:
    """`directory` gets all that tells about it when something is wrong."""

    def __init__(
        self, directory: Path, servers: Servers, seed: int, *, texts: bool = False
    ) -> None:
        """`texts`: the texts of all segments are in files."""
        self.directory = directory
        self.seed = seed
        self._servers = servers
        self._flags = {"text_file_bytes_min": 1} if texts else {}
        self.figures = Figures()
        self._checker = Checker()
        self._scenes: tuple[Scene, ...] = Ward(), Forge(), Renting(), Desk()
        self._again: dict[str, dict[bytes, int]] = {}
        self._stopped = True
        self.latest: Life | None = None
        """The one that ended last."""
        self._tasks: list[asyncio.Task[None]] = []
        for name in [*crowd.FIXED, crowd.FLUX]:
            self._checker.queues[name] = Queue(name, [(None, self._checker.start)])

    async def live(self, number: int) -> None:
        """One life. Raises Violation."""
        await self._live(LifePlan(self.seed, number), self._play)

    async def end(self, number: int) -> None:
        """Everything is drained, and stays so after a crash. Raises Violation."""
        for how, kill in ((self._drain, True), (self._is_drained, False)):
            calm = LifePlan(self.seed, number)
            kept = "ballast_bytes", "disk_free_bytes_min"
            calm.flags = {name: calm.flags[name] for name in kept}
            calm.full, calm.limited, calm.kill = False, False, kill
            await self._live(calm, how)

    async def _live(
        self, its_plan: LifePlan, play: Callable[[Life, LifePlan], Awaitable[None]]
    ) -> None:
        server = await self._servers.start(its_plan, its_plan.flags | self._flags)
        life = Life(server.address, self._checker, server.wait_s)
        try:
            try:
                await play(life, its_plan)
                life.ending = True
                await server.end(kill=its_plan.kill)
                await self._left(life)
            finally:
                await self._leave(life)
        except BaseException as failure:
            if not life.ending and (how := server.has_ended):
                failure.add_note(f"the server had ended: {how}")
            if life.first not in (None, failure):
                failure.add_note(f"what was wrong first: {life.first!r}")
            self._keep(life, server, its_plan, failure)
            raise
        # On a full disk what was received may have found no room.
        self._stopped = not its_plan.kill and not its_plan.full
        self.latest = life
        figures = self.figures
        figures.lives += 1
        figures.killed += its_plan.kill
        figures.stopped += not its_plan.kill
        figures.counts = Counter(self._checker.counts)
        for scene in self._scenes:
            figures.counts.update(scene.counts)

    def _keep(self, life: Life, server: Server, its_plan: LifePlan, failure: BaseException) -> None:
        (self.directory / "plan.txt").write_text(f"{vars(its_plan)}\n\n{failure!r}\n")
        (self.directory / "server.log").write_text(server.log)
        for name, each in (("transcript.txt", life), ("transcript-before.txt", self.latest)):
            with (self.directory / name).open("wb") as file:
                for who, data in each.transcript if each else ():
                    for line in data.split(b"\n"):
                        file.write(who.encode() + b" " + line[:300] + b"\n")

    # -- a life

    async def _play(self, life: Life, its_plan: LifePlan) -> None:
        await self._restarted(life, its_plan)
        self._checker.exact = not its_plan.full
        self._checker.limited = its_plan.limited
        if its_plan.number == 0:
            await crowd.Owner(life, its_plan, "set-up").set_up()
        self._tasks = [asyncio.ensure_future(each) for each in self._players(life, its_plan)]
        await self._until(life, its_plan.events, self._tasks)

    async def _left(self, life: Life) -> None:
        """All players end with their server."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=life.wait_s)
        for task in self._tasks:
            if not task.done():
                raise Violation(f"a player does not end: {task}")
            task.result()

    async def _leave(self, life: Life) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await life.close()

    async def _drain(self, life: Life, its_plan: LifePlan) -> None:
        await self._restarted(life, its_plan)
        self._checker.exact = True
        self._checker.limited = False
        queues = [each for each in self._checker.queues.values() if each.shapes[-1][0] is not None]
        for queue in queues:
            await crowd.Drainer(life, its_plan, queue).run()

    async def _is_drained(self, life: Life, its_plan: LifePlan) -> None:
        await self._restarted(life, its_plan)
        for queue in self._checker.queues.values():
            if queue.copies:
                raise Violation(f"{queue.name!r} was drained, and has {list(queue.copies)}")

    @staticmethod
    async def _until(life: Life, events: int, tasks: list[asyncio.Task[None]]) -> None:
        """So much has happened; or a player has failed."""
        while life.events < events:
            life.progress.clear()
            look = asyncio.ensure_future(life.progress.wait())
            done, _ = await asyncio.wait(
                [look, *tasks], timeout=life.wait_s, return_when=asyncio.FIRST_COMPLETED
            )
            look.cancel()
            if not done:
                raise Violation("nothing happens any more")
            for task in done - {look}:
                task.result()
                raise Violation("a player has ended")
            await asyncio.sleep(0.005)

    async def _restarted(self, life: Life, its_plan: LifePlan) -> None:
        theirs = {queue for scene in self._scenes for queue in scene.queues}
        seen = await _Looker(await Wire.open(life, "look")).look(theirs, full=its_plan.full)
        self._checker.restarted(seen, stopped=self._stopped)
        if others := seen.keys() - self._checker.queues.keys():
            raise Violation(f"there are queues that nobody has made: {others}")
        if not its_plan.full:  # What dies at the start would be on its way to another queue.
            for scene in self._scenes:
                await scene.restarted(life, stopped=self._stopped)

    def _players(self, life: Life, its_plan: LifePlan) -> list[Coroutine[Any, Any, None]]:
        p = its_plan
        players: list[crowd.Player] = [crowd.Owner(life, p, "owner"), Nuisance(life, p, "nuisance")]
        for number in range(p.publishers):
            name = f"publisher{number}"
            players.append(crowd.Publisher(life, p, name, self._again.setdefault(name, {})))
        shared = b"c-shared" if p.shared else None
        for number in range(p.workers):
            players.append(crowd.Worker(life, p, f"work{number}", b"work"))
            players.append(crowd.Worker(life, p, f"mix{number}", b"mix", shared))
            if number == 0:
                players.append(crowd.Worker(life, p, f"solo{number}", b"solo"))
        players += [crowd.Taker(life, p, f"take{number}") for number in range(p.takers)]
        players += [crowd.Reader(life, p, f"read{number}") for number in range(p.readers)]
        return [
            *(each.run() for each in players),
            *(each.run(life, p) for each in self._scenes if each.name in p.scenes),
        ]
