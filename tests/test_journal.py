"""The journal by itself, on disk and in memory: what is in it after compactions and restarts.

The one rule: what is said to it are entries, as a broker writes them.
"""

import shutil
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from mqks.broker.base.ranges import Range, compress
from mqks.broker.broker import Broker
from mqks.broker.log.pending import NO_MARK, Entry, LaneChange, Mark, QueueState, Run
from mqks.broker.message.policy import DEFAULT, Policy
from mqks.broker.queue.queue import Queue
from mqks.errors import JournalDamaged
from mqks.journal.journal import Journal
from mqks.journal.memory import Memory
from mqks.journal.recovery import Recovery
from mqks.journal.segment import decode
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.sqlite.texts import texts_path
from mqks.journal.store import OpenStore
from mqks.server.facts import JournalFacts
from mqks.settings import Settings

pytestmark = pytest.mark.anyio
Q = 1


class Restored:
    """What a lane was given at a start."""

    def __init__(self) -> None:
        self.next_seq = self.cursor = 0
        self.returned: dict[int, Mark] = {}
        self.waiting: dict[int, Mark] = {}
        self.holes: list[Range] = []


class Disk:
    """A journal that is opened, written, closed and opened again."""

    def __init__(
        self, memory: Memory | None, db: Path, restored: Restored, text_file_bytes_min: int
    ) -> None:
        self.restored = restored
        self.told: list[str] = []
        self._text_file_bytes_min = text_file_bytes_min
        self._there = db if memory is None else memory

    def copied(self, number: int) -> Path | Memory:
        """As a crash would leave it now."""
        if isinstance(self._there, Memory):
            copy = Memory()
            copy.metadata = deepcopy(self._there.metadata)
            copy.segments = self._there.segments.copy()
            return copy
        to = self._there.with_name(f"{number}.db")
        shutil.copy(self._there, to)
        shutil.copy(f"{self._there}-wal", f"{to}-wal")
        if texts_path(self._there).exists():
            shutil.copytree(texts_path(self._there), texts_path(to))
        return to

    @asynccontextmanager
    async def open(
        self, copy: Path | Memory | None = None, *, salvage: bool = False
    ) -> AsyncIterator[Journal]:
        """It, or a copy."""
        there = copy or self._there
        open_store: OpenStore = there.open if isinstance(there, Memory) else SqliteStore.open
        self._settings = Settings(text_file_bytes_min=self._text_file_bytes_min)
        if isinstance(there, Path):
            self._settings = replace(self._settings, db=there)
        journal = Journal(await open_store(self._settings, self.told.append))
        try:
            self.broker = Broker(
                self._settings,
                clock=lambda: 0,
                now_us=lambda: 0,
                new_error_id=lambda: ("", 0),
                on_error=lambda _: False,
            )
            await Recovery(journal, self.broker, self.told.append).run(salvage=salvage)
            yield journal
        finally:
            await journal.close()


@pytest.fixture(params=["sqlite", "texts in files", "memory"])
def disk(request: pytest.FixtureRequest, db: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    restored = Restored()

    def restore(
        queue: Queue,
        next_seq: int,
        cursor: int,
        returned: Iterable[tuple[int, Mark]],
        waiting: Iterable[tuple[int, Mark]],
        holes: Iterable[Range],
        mean_bytes: float,
    ) -> None:
        restored.next_seq, restored.cursor = next_seq, cursor
        restored.returned, restored.waiting = dict(returned), dict(waiting)
        restored.holes = [*holes]

    monkeypatch.setattr(Queue, "restore", restore)
    memory = Memory() if request.param == "memory" else None
    return Disk(memory, db, restored, int(request.param == "texts in files"))


def line(number: int) -> bytes:
    return b"m%d event=e %b" % (number, b"x" * (number % 50))


def change(
    next_seq: int,
    numbers: Iterable[int] = (),
    *,
    cursor: int = 1,
    acks: Iterable[int] = (),
    marks: dict[int, Mark] | None = None,
) -> LaneChange:
    runs = [
        Run(first, [line(number) for number in range(first, first + count)])
        for first, count in compress([*numbers])
    ]
    return LaneChange(Q, next_seq, cursor, runs, compress([*acks]), [], marks or {})


def entry(*changes: LaneChange, time_us: int = 1) -> Entry:
    return Entry(time_us, [*changes])


def made(*, is_sparse: bool) -> Entry:
    policy = Policy(is_sparse=True) if is_sparse else DEFAULT
    return Entry(queues={Q: QueueState(b"q", policy)})


async def compact(journal: Journal) -> None:
    while await journal.maintain(idle=True):
        pass
    await journal.compact_fully()


async def everything(journal: Journal, first: int = 1) -> list[int]:
    """The numbers of all messages, as pages bring them."""
    found: list[int] = []
    while runs := await journal.read(Q, first, bytes_max=500):
        for run in runs:
            assert run.lines == [*map(line, range(run.first, run.first + len(run.lines)))]
            found += range(run.first, run.first + len(run.lines))
        first = found[-1] + 1
    return found


async def looked_at(journal: Journal) -> list[int]:
    """The same for those who look."""
    queue, found, first = journal.index.queues[Q], list[int](), 1
    while first < queue.next_seq:
        page = await journal.log.page(Q, queue, first, None, 7, 300)
        for piece in page.pieces:
            numbers = range(piece.first, piece.first + piece.total)
            assert piece.text == b"".join(line(number) + b"\n" for number in numbers)
            found += numbers
        assert page.next_seq > first
        first = page.next_seq
    return found


async def test_a_sparse_queue_keeps_its_holes_when_nothing_on_disk_tells_of_them(
    disk: Disk,
) -> None:
    alive = [n for n in range(1, 201) if n % 3 == 0 or 100 <= n < 110]
    holes = [n for n in range(1, 201) if n not in alive]
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        for first in range(1, 201, 20):
            await journal.write(entry(change(first + 20, range(first, first + 20))))
        await journal.write(entry(change(201, acks=holes)))
        assert await everything(journal) == await looked_at(journal) == alive
        await compact(journal)
        assert len(journal.index.segments) == 1
        assert await everything(journal) == await looked_at(journal) == alive
    for _ in range(2):
        async with disk.open() as journal:
            assert (disk.restored.next_seq, disk.restored.cursor) == (201, 1)
            assert disk.restored.holes == compress(holes[:])
            assert disk.restored.returned == disk.restored.waiting == {}
            assert await everything(journal) == await looked_at(journal) == alive
            assert await everything(journal, 101) == [n for n in alive if n > 100]
            await compact(journal)
    assert disk.told == []


async def test_what_is_missing_in_any_other_queue_is_damage(disk: Disk) -> None:
    async with disk.open() as journal:
        await journal.write(made(is_sparse=False))
        await journal.write(entry(change(6, [1, 2, 4, 5])))
    with pytest.raises(JournalDamaged):
        async with disk.open():
            pass
    assert disk.told == ["queue q: 1 ready messages are missing"]
    async with disk.open(salvage=True):
        assert disk.restored.holes == []
        assert [*disk.restored.returned] == [1, 2, 4, 5]


async def test_scheduled_messages_are_alive_wherever_the_cursor_is(disk: Disk) -> None:
    marks = {n: Mark(1, due_us=10**15 + n, is_dated=n % 2 == 0) for n in range(1, 11)}
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        await journal.write(entry(change(11, range(1, 11), marks=marks)))
        await journal.write(entry(change(21, range(11, 21), cursor=15, acks=[3, 11, 12, 13, 14])))
        # Promoted, and scheduled anew.
        later = {5: Mark(2), 6: Mark(2, due_us=7)}
        await journal.write(entry(change(21, cursor=15, marks=later)))
        await journal.write(entry(change(21, cursor=15, acks=[18])))
    for is_compacted in (False, True):
        async with disk.open() as journal:
            assert disk.restored.returned == {
                n: mark for n, mark in (marks | later).items() if n != 3
            }
            assert disk.restored.holes == [(18, 1)]
            if not is_compacted:
                await compact(journal)


async def test_a_compaction_carries_of_a_messages_marks_the_highest(disk: Disk) -> None:
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        await journal.write(
            entry(change(10, range(1, 10), marks={n: Mark(1) for n in range(1, 9)}))
        )
        for version in (3, 2):
            mark = Mark(version, rejects=version, losses=70000, joined_us=5)
            await journal.write(entry(change(10, marks={1: mark, 2: mark, 9: mark})))
        await journal.write(entry(change(10, acks=[2, 3, 4, 5, 6, 7])))
        await compact(journal)
        highest = Mark(3, rejects=3, losses=70000, joined_us=5)
        [segment] = journal.index.segments
        bodies = await journal.store.bodies([segment])
        [section] = decode(bodies[segment])
        assert [*section.marks.items()] == [(8, Mark(1)), (1, highest), (9, highest)]
    async with disk.open():
        assert disk.restored.waiting == {1: highest, 8: Mark(1), 9: highest}


async def test_bodies_are_fetched_from_wherever_they_are(disk: Disk) -> None:
    alive = [n for n in range(1, 1001) if n % 4]
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        for first in range(1, 1001, 100):
            await journal.write(entry(change(first + 100, range(first, first + 100))))
        await journal.write(entry(change(1001, acks=[n for n in range(1, 1001) if n % 4 == 0])))
        wanted = [999, 1, 4, 500, 501, 2, 10**9, *range(300, 340)]
        expected = {number: line(number) for number in wanted if number in alive}
        assert await journal.fetch(Q, wanted) == expected
        assert await journal.fetch(Q, []) == await journal.fetch(9, [1]) == {}
        await compact(journal)
        assert await journal.fetch(Q, wanted) == expected
        assert await journal.fetch(Q, alive) == {number: line(number) for number in alive}


async def test_what_moves_while_it_is_fetched_is_found_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        for first in range(1, 101, 10):
            await journal.write(entry(change(first + 10, range(first, first + 10))))
        bodies = journal.store.bodies
        asked: list[int] = []

        async def moved(ids: list[int], *, background: bool = False) -> dict[int, bytes]:
            asked.append(len(ids))
            monkeypatch.setattr(journal.store, "bodies", bodies)
            await journal.write(entry(change(101, acks=[7])))
            await journal.compact_fully()
            return await bodies(ids, background=background)

        for read in (
            lambda: journal.fetch(Q, range(1, 101)),
            lambda: journal.read(Q, 1),
        ):
            monkeypatch.setattr(journal.store, "bodies", moved)
            found = await read()
            numbers = (
                found
                if isinstance(found, dict)
                else [n for run in found for n in range(run.first, run.first + len(run.lines))]
            )
            assert [*numbers] == [n for n in range(1, 101) if n != 7]
            await journal.write(entry(change(101, acks=[7])))
        assert asked == [10, 1]


async def test_when_messages_came_is_told_in_stretches(disk: Disk) -> None:
    minute = 60_000_000
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        facts = JournalFacts(journal)
        assert [*facts.arrivals(Q)] == [*facts.arrivals(9)] == []
        await journal.write(entry(change(3, [1, 2]), time_us=minute))
        await journal.write(entry(change(5, [3, 4]), time_us=2 * minute))
        await journal.write(entry(change(7, [5, 6]), time_us=3 * minute))
        assert [facts.arrived_us(Q, n) for n in (1, 4, 7)] == [minute, 2 * minute, 0]
        arrivals = facts.arrivals(Q)
        assert next(arrivals) == (1, minute)
        await journal.write(entry(change(7, acks=[3, 4])))
        assert [*arrivals] == [(5, 3 * minute)]


# -- crashes


class Model:
    """What has been written: which messages are alive, and their marks."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.next_seq = self.cursor = 1
        self.alive: dict[int, Mark] = {}

    def change(self) -> LaneChange:
        """One commit of a queue whose messages are scheduled, come due, are delivered, change and
        are settled."""
        random, first = self.random, self.next_seq
        gone = {n for n in self.alive if random.random() < 0.3}
        count = random.randrange(6)
        self.next_seq += count
        marks = {
            n: Mark(
                self.alive[n].version + 1, retry=random.randrange(3), due_us=random.randrange(2)
            )
            for n in self.alive
            if n not in gone and random.random() < 0.3
        }
        marks |= {
            n: Mark(1, due_us=9) for n in range(first, self.next_seq) if random.random() < 0.5
        }
        self.alive |= dict.fromkeys(range(first, self.next_seq), NO_MARK)
        self.alive = {n: marks.get(n, mark) for n, mark in self.alive.items() if n not in gone}
        self.cursor = random.randrange(self.cursor, max(self.cursor, first - 10) + 1)
        numbers = range(first, self.next_seq)
        return change(self.next_seq, numbers, cursor=self.cursor, acks=gone, marks=marks)

    def found(self, restored: Restored) -> None:
        """It is what a start has found."""
        waiting = dict.fromkeys(range(restored.cursor, restored.next_seq), NO_MARK)
        for first, count in restored.holes:
            for number in range(first, first + count):
                del waiting[number]
        below = {n: mark for n, mark in restored.returned.items() if not mark.redelivered}
        held = dict.fromkeys(restored.returned.keys() - below.keys(), NO_MARK)
        assert waiting | restored.waiting | below | held == self.alive
        assert (restored.next_seq, restored.cursor) == (self.next_seq, self.cursor)


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
async def test_a_crash_between_any_two_commits_loses_nothing_and_brings_nothing_back(
    disk: Disk, seed: int
) -> None:
    model = Model(seed)
    states: list[tuple[Path | Memory, Model]] = []
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        commit = journal.store.commit

        async def watched(*args: object, **more: object) -> None:
            await commit(*args, **more)  # type: ignore[arg-type]
            states.append((disk.copied(len(states)), deepcopy(model)))

        journal.store.commit = watched  # type: ignore[method-assign]
        for step in range(40):
            await journal.write(entry(model.change(), time_us=step * 4_000_000))
            if step % 3 == 0:
                await journal.maintain(idle=True)
            if step % 10 == 9:
                await journal.compact_fully()
    assert len(states) > 60
    for copy, expected in states:
        async with disk.open(copy) as journal:
            expected.found(disk.restored)
            await compact(journal)
            assert await everything(journal) == sorted(expected.alive)
            wanted = [*expected.alive]
            assert await journal.fetch(Q, wanted) == {n: line(n) for n in wanted}
        async with disk.open(copy):
            expected.found(disk.restored)
    assert disk.told == []


async def test_very_many_marks_come_back_in_any_order(disk: Disk) -> None:
    count, step = 100_000, 10_000
    async with disk.open() as journal:
        await journal.write(made(is_sparse=True))
        for first in range(1, count, step):
            numbers = range(first, first + step)
            marks = {n: Mark(1, due_us=n, id_crc=7) for n in numbers}
            await journal.write(entry(change(first + step, numbers, marks=marks)))
        later = {n: Mark(2, due_us=1) for n in range(count, 0, -1000)}
        await journal.write(entry(change(count + 1, marks=later)))
    async with disk.open():
        marks = {n: Mark(1, due_us=n, id_crc=7) for n in range(1, count + 1)}
        assert disk.restored.waiting == marks | later
