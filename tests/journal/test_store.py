"""What every store must do, by itself and behind a server: SQLite, with texts in files too, the one
in memory, and PostgreSQL.

The one rule: what is said to a journal are entries, as a broker writes them.
"""

import itertools
import shutil
import sqlite3
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, closing
from copy import deepcopy
from itertools import chain, repeat
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqks.broker.broker import Broker as LocalBroker
from mqks.broker.spine.base.ranges import Range, compress
from mqks.broker.spine.log import pending
from mqks.broker.spine.log.pending import Entry, ErrorRecord, LaneChange, QueueState, Run
from mqks.broker.spine.message.mark import NO_MARK, Mark
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import ClaimLost, DiskFull, JournalDamaged
from mqks.journal import journal as journal_module
from mqks.journal import memory as memory_module
from mqks.journal import recovery
from mqks.journal.compaction import Compaction
from mqks.journal.cutting import cut
from mqks.journal.facts import JournalFacts
from mqks.journal.journal import Journal
from mqks.journal.memory import Memory, MemoryStore
from mqks.journal.recovery import Recovery
from mqks.journal.segment import ArrivedRun, NewSegment, Section, encode
from mqks.journal.sqlite.texts import texts_path
from mqks.journal.store import LastWords, Metadata, QueueRow, Store
from mqks.journal.stored import decode
from mqks.limits import SCHEDULED_SEQ
from mqks.protocol.requests import DeleteRule
from mqks.settings import DatabaseUrl
from mqks.testing import Broker
from tests.kit.compiled import patches_modules
from tests.kit.line_client import LineClient
from tests.kit.postgres import Postgres
from tests.kit.waiting import until

pytestmark = pytest.mark.anyio
Q = 1
TABLES = (
    *("owner", "segment", "damaged_segment", "queue", "binding", "once"),
    *("schedule", "batch", "error", "audit", "result"),
)


class Restored:
    """What a lane was given at a start."""

    def __init__(self) -> None:
        self.next_seq = self.cursor = self.next_aside = 0
        self.returned: dict[int, Mark] = {}
        self.waiting: dict[int, Mark] = {}
        self.holes: list[Range] = []


Place = Path | Memory | DatabaseUrl


class Disk:
    """A journal that is opened, written, closed and opened again. In PostgreSQL, it is a schema of
    `postgres`."""

    def __init__(self, there: Place, postgres: Postgres | None, text_file_bytes_min: int) -> None:
        self.told: list[str] = []
        self.there = there
        self._postgres = postgres
        self._text_file_bytes_min = text_file_bytes_min

    def execute(self, sql: str) -> None:
        if isinstance(self.there, DatabaseUrl):
            assert self._postgres
            with self._postgres.connection() as operator:
                operator.execute(f"set search_path to {_schema(self.there)}".encode())
                operator.execute(sql.encode())
        else:
            assert isinstance(self.there, Path)
            with closing(sqlite3.connect(self.there)) as db, db:
                db.execute(sql)

    def copied(self, number: int) -> Place:
        """As a crash would leave it now."""
        if isinstance(self.there, Memory):
            copy = Memory()
            copy.metadata = deepcopy(self.there.metadata)
            copy.segments = self.there.segments.copy()
            return copy
        if isinstance(self.there, DatabaseUrl):
            old, new = _schema(self.there), f"{_schema(self.there)}_{number}"
            tables = (
                f"create table {new}.{name} (like {old}.{name} including all);"
                f"insert into {new}.{name} select * from {old}.{name};"
                for name in TABLES
            )
            # Nobody beats there.
            free = f"update {new}.owner set holder = null"
            self.execute(f"create schema {new}; {''.join(tables)} {free}")
            return DatabaseUrl(f"{self.there.text}_{number}")
        to = self.there.with_name(f"{number}.db")
        shutil.copy(self.there, to)
        shutil.copy(f"{self.there}-wal", f"{to}-wal")
        if texts_path(self.there).exists():
            shutil.copytree(texts_path(self.there), texts_path(to))
        return to

    def harm(self, *, is_whole: bool) -> None:
        """Lose the second segment, or change a byte in its head."""
        if isinstance(self.there, Memory):
            head, text = self.there.segments.pop(2)
            if not is_whole:
                self.there.segments[2] = head[:4] + b"\x63" + head[5:], text
        elif is_whole:
            self.execute("delete from segment where id = 2")
        elif isinstance(self.there, DatabaseUrl):
            self.execute("update segment set head = set_byte(head, 4, 99) where id = 2")
        else:
            damaged = "cast(substr(body, 1, 4) || x'63' || substr(body, 6) as blob)"
            self.execute(f"update segment set body = {damaged} where id = 2")

    def broker(self) -> Broker:
        """A server of it."""
        there, bytes_min = self.there, self._text_file_bytes_min
        db = Path("none") if isinstance(there, Memory) else there
        broker = Broker(db, db_replication="none", text_file_bytes_min=bytes_min)
        if isinstance(there, Memory):
            broker.open_store = there.open
        return broker

    @asynccontextmanager
    async def store(self, copy: Place | None = None) -> AsyncIterator[Store]:
        """It, or a copy, before it is claimed."""
        broker = (Disk(copy, None, self._text_file_bytes_min) if copy else self).broker()
        self._settings = broker.settings
        store = await broker.open_store(broker.settings, self.told.append)
        try:
            yield store
        finally:
            await store.close()

    @asynccontextmanager
    async def open(
        self, copy: Place | None = None, *, salvage: bool = False
    ) -> AsyncIterator[Journal]:
        async with self.store(copy) as store:
            self.local = LocalBroker(
                self._settings,
                clock=lambda: 0,
                now_us=lambda: 0,
                new_error_id=lambda: ("", 0),
                on_error=lambda _: False,
            )
            journal = Journal(store)
            await Recovery(journal, self.local, self.told.append).run(salvage=salvage)
            yield journal

    @asynccontextmanager
    async def created(self, *, is_sparse: bool) -> AsyncIterator[Journal]:
        """With a queue."""
        policy = Policy(is_sparse=True) if is_sparse else DEFAULT
        async with self.open() as journal:
            await journal.write(Entry(queues={Q: QueueState(b"q", policy)}))
            yield journal


def _schema(url: DatabaseUrl) -> str:
    return url.text.rpartition("schema=")[2]


@pytest.fixture(params=["sqlite", "texts in files", "memory", "postgresql"])
def disk(request: pytest.FixtureRequest, db: Path) -> Disk:
    postgres: Postgres | None = None
    there: Place = db
    if request.param == "memory":
        there = Memory()
    elif request.param == "postgresql":
        postgres = request.getfixturevalue("postgres")
        there = request.getfixturevalue("journal_url")
    return Disk(there, postgres, int(request.param == "texts in files"))


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Restored:
    """Of the last start."""
    restored = Restored()

    def restore(
        queue: Queue,
        next_seq: int,
        cursor: int,
        returned: Iterable[tuple[int, Mark]],
        waiting: Iterable[tuple[int, Mark]],
        holes: Iterable[Range],
        mean_bytes: float,
        next_aside: int,
    ) -> None:
        restored.next_seq, restored.cursor = next_seq, cursor
        restored.next_aside = next_aside
        restored.returned, restored.waiting = dict(returned), dict(waiting)
        restored.holes = [*holes]

    monkeypatch.setattr(recovery, "restore", restore)
    return restored


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


async def compact(journal: Journal) -> None:
    while await Compaction(journal).maintain(idle=True):
        pass
    await Compaction(journal).compact_fully()


async def everything(journal: Journal, first: int = 1) -> list[int]:
    """The numbers of all messages, as pages bring them."""
    found: list[int] = []
    while runs := await journal.log.read(Q, first, bytes_max=500):
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


async def test_what_is_missing_in_any_other_queue_is_damage(disk: Disk, restored: Restored) -> None:
    async with disk.created(is_sparse=False) as journal:
        await journal.write(entry(change(6, [1, 2, 4, 5])))
    with pytest.raises(JournalDamaged):
        async with disk.open():
            pass
    assert disk.told == ["queue q: 1 ready messages are missing"]
    async with disk.open(salvage=True):
        assert restored.holes == []
        assert [*restored.returned] == [1, 2, 4, 5]


@pytest.mark.parametrize("is_whole", [False, True], ids=["a byte", "a segment"])
async def test_a_damaged_journal_is_refused_and_can_be_salvaged(disk: Disk, is_whole: bool) -> None:
    async with disk.created(is_sparse=False) as journal:
        for number in range(1, 4):
            await journal.write(entry(change(number + 1, [number])))
    disk.harm(is_whole=is_whole)
    for _ in range(2):
        with pytest.raises(JournalDamaged):
            async with disk.open():
                pass
    assert any("queue q" in told for told in disk.told)
    async with disk.open(salvage=True) as journal:
        assert await everything(journal) == [1, 3]
    disk.told.clear()
    async with disk.open() as journal:
        assert await everything(journal) == [1, 3]
    assert disk.told == []


async def test_messages_with_a_delay_are_behind_the_log_and_their_numbers_are_used_once(
    disk: Disk, restored: Restored
) -> None:
    delayed = range(SCHEDULED_SEQ, SCHEDULED_SEQ + 10)
    marks = {number: Mark(due_us=number) for number in delayed[1:]}
    async with disk.created(is_sparse=False) as journal:
        await journal.write(entry(change(3, [1, 2, *delayed], marks=marks)))
        assert await everything(journal) == [1, 2]
    lost_its_mark = {delayed[0]: Mark(due_us=1)}
    for gone in delayed[-1:], delayed[:-1]:
        async with disk.open() as journal:
            assert restored.waiting == lost_its_mark | marks
            assert (restored.holes, restored.next_aside) == ([], delayed.stop)
            assert await everything(journal) == [1, 2]
            await journal.write(entry(change(3, acks=gone)))
            marks = {number: mark for number, mark in marks.items() if number not in gone}
    async with disk.open() as journal:
        assert (restored.waiting, restored.next_aside) == ({}, delayed.stop)
        await compact(journal)
    async with disk.open() as journal:
        # No segment knows them any more.
        assert restored.next_aside == SCHEDULED_SEQ + 3
        assert await everything(journal) == [1, 2]


async def test_what_moves_while_it_is_fetched_is_found_again(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with disk.created(is_sparse=True) as journal:
        for first in range(1, 101, 10):
            await journal.write(entry(change(first + 10, range(first, first + 10))))
        bodies = journal.store.bodies
        asked: list[int] = []

        async def moved(ids: list[int], *, background: bool = False) -> dict[int, bytes]:
            asked.append(len(ids))
            monkeypatch.setattr(journal.store, "bodies", bodies)
            await journal.write(entry(change(101, acks=[7])))
            await Compaction(journal).compact_fully()
            return await bodies(ids, background=background)

        for read in (lambda: journal.log.fetch(Q, range(1, 101)), lambda: journal.log.read(Q, 1)):
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
    async with disk.created(is_sparse=True) as journal:
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

    def __init__(self) -> None:
        self.random = Random(0)
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
            n: Mark(1, due_us=9, is_dated=n % 3 == 0)
            for n in range(first, self.next_seq)
            if random.random() < 0.5
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


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 5])
async def test_a_crash_between_any_two_commits_loses_nothing_and_brings_nothing_back(
    disk: Disk, restored: Restored, every: int
) -> None:
    model = Model()
    states: list[tuple[Place, Model]] = []
    commits = itertools.count()
    async with disk.created(is_sparse=True) as journal:
        commit = journal.store.commit

        async def watched(*args: object, **more: object) -> None:
            await commit(*args, **more)  # type: ignore[arg-type]
            if next(commits) % every == 0:
                states.append((disk.copied(len(states)), deepcopy(model)))

        journal.store.commit = watched  # type: ignore[method-assign]
        for step in range(40):
            await journal.write(entry(model.change(), time_us=step * 4_000_000))
            if step % 3 == 0:
                await Compaction(journal).maintain(idle=True)
            if step % 10 == 9:
                await Compaction(journal).compact_fully()
    assert next(commits) > 60
    for copy, expected in states:
        async with disk.open(copy) as journal:
            expected.found(restored)
            assert await everything(journal) == await looked_at(journal) == sorted(expected.alive)
            await compact(journal)
            assert await everything(journal) == await looked_at(journal) == sorted(expected.alive)
            wanted = [*expected.alive]
            assert await journal.log.fetch(Q, [*wanted, 10**9]) == {n: line(n) for n in wanted}
        async with disk.open(copy):
            expected.found(restored)
    assert disk.told == []


async def test_very_many_marks_come_back_in_any_order(disk: Disk, restored: Restored) -> None:
    total, step = 20_000, 2_000
    async with disk.created(is_sparse=True) as journal:
        for first in range(1, total, step):
            numbers = range(first, first + step)
            marks = {n: Mark(1, due_us=n, id_crc=7) for n in numbers}
            await journal.write(entry(change(first + step, numbers, marks=marks)))
        later = {n: Mark(2, due_us=1) for n in range(total, 0, -200)}
        await journal.write(entry(change(total + 1, marks=later)))
    async with disk.open():
        marks = {n: Mark(1, due_us=n, id_crc=7) for n in range(1, total + 1)}
        assert restored.waiting == marks | later


# -- commits


async def test_a_commit_may_say_everything_at_once(disk: Disk) -> None:
    @asynccontextmanager
    async def loaded() -> AsyncIterator[tuple[Store, Metadata]]:
        async with disk.store() as store:
            await store.claim(wait=False)
            metadata = await store.load()
            async for _ in store.segments(metadata):
                pass
            await store.begin()
            yield store, metadata

    policy = Policy(DeleteRule(1.0))
    errors = [ErrorRecord(f"{n:024}", n, "here", b"r", b"dance", "no") for n in range(2)]
    async with loaded() as (store, _):
        queues: dict[int, QueueState | None] = {
            1: QueueState(b"a", DEFAULT),
            2: QueueState(b"b", DEFAULT),
            4: QueueState(b"d", DEFAULT),
        }
        bindings = {(b"a", b"e"): True, (b"a", b"\xff"): True}
        await store.commit([], Entry(queues=queues, bindings=bindings, once=[b"m1", b"m2"]))
        await store.commit([NewSegment(1, b"head", [b"text"], 8)])
        entry = Entry(
            queues={1: QueueState(b"a", policy), 3: QueueState(b"c", DEFAULT), 4: None},
            bindings={(b"a", b"e"): False, (b"none", b"e"): True},
            errors=errors,
            once=[b"m3"],
        )
        words = [LastWords(1, 9, 7), LastWords(2, 8, 8)]
        await store.commit([NewSegment(2, b"head", [b"two"], 7)], entry, [1], words)
        assert await store.bodies([1, 2, 3]) == {2: b"headtwo"}
    async with loaded() as (store, metadata):
        assert await store.bodies([1, 2, 3]) == {2: b"headtwo"}
    assert (disk.told, metadata.damage, metadata.notes) == ([], [], [])
    assert sorted(metadata.queues.values()) == [
        QueueRow(1, b"a", policy.encode(), 9, 7),
        QueueRow(2, b"b", DEFAULT.encode(), 8, 8),
        QueueRow(3, b"c"),
    ]
    assert sorted(metadata.bindings) == [(b"a", b"\xff"), (b"none", b"e")]
    assert (metadata.once, metadata.errors) == ([b"m1", b"m2", b"m3"], errors)
    assert (metadata.next_queue_id, metadata.next_segment) == (5, 3)


@pytest.mark.parametrize("commits", [1, 2, 3])
def test_what_a_full_store_has_no_room_for_is_not_confirmed(
    commits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message for four queues, in pieces, of which as many commits find room."""
    monkeypatch.setattr(pending, "BATCH_QUEUES_MAX", 1)
    has_room = chain([False], repeat(True, commits), repeat(False))

    class Meagre(MemoryStore):
        async def commit(self, segments: Sequence[NewSegment], *rest: Any) -> None:
            if any(segment.texts for segment in segments) and not next(has_room):
                raise DiskFull("there is no room")
            await super().commit(segments, *rest)

    monkeypatch.setattr(memory_module, "MemoryStore", Meagre)
    memory = Memory()
    with served(memory) as broker, client_of(broker) as client:
        for queue in b"abcd":
            assert client.ask(b"s subscribe --confirm %c e" % queue) == b"s ok "
        reply = client.ask(b"m publish --confirm e x")
        kept = [
            run.total
            for head, _ in memory.segments.values()
            for section in decode(head)
            for run in section.runs
        ]
        assert reply.startswith(b"m error ") or kept == [1, 1, 1, 1]


# -- large commits

NUMBERS = st.integers(1, 99)
TEXTS = [[b"%d" % n * (n % 40) for n in range(first, first + 7)] for first in range(5)]
COUNTS = st.sampled_from([0, 1, 0xFFFF, 0x10000, 0xFFFFFFFF])
TIMES = st.sampled_from([0, 1, 2**63])
FLAGS = st.booleans()
MARKS = st.builds(
    Mark,
    st.sampled_from([0, 3, 2**32]),
    *([COUNTS] * 3 + [FLAGS] * 3 + [TIMES] * 3 + [COUNTS, TIMES]),
)
RUNS = st.builds(
    ArrivedRun, NUMBERS, st.just(0), st.sampled_from(TEXTS) | st.lists(st.binary(), min_size=1)
)
SECTIONS = st.lists(
    st.builds(
        Section,
        st.integers(1, 9),
        NUMBERS,
        NUMBERS,
        st.lists(RUNS, max_size=3),
        st.lists(st.tuples(NUMBERS, NUMBERS), max_size=5),
        st.lists(st.tuples(NUMBERS, MARKS), max_size=5),
    ),
    min_size=1,
    unique_by=lambda section: section.queue_id,
)


def said(parts: list[list[Section]]) -> list[object]:
    """Everything, a message at a time."""
    found: list[object] = []
    for section in (section for part in parts for section in part):
        queue_id, next_seq, cursor, runs, acks, marks = section
        found += {(queue_id, "numbers", next_seq, cursor)}
        found += ((queue_id, "ack", *acked) for acked in acks)
        found += ((queue_id, "mark", *mark) for mark in marks)
        for run in runs:
            found += ((queue_id, number, line) for number, line in enumerate(run.lines, run.first))
    return sorted(set(found), key=repr)


@pytest.mark.slow
@given(SECTIONS, st.integers(1, 500))
def test_parts_of_a_commit_say_what_it_says(sections: list[Section], size_max: int) -> None:
    parts = list(cut(sections, size_max))
    assert said(parts) == said([sections])
    for part in parts:
        head, texts = encode(part)
        stored = decode(head)
        assert len(stored) == len(part)
        for section, read in zip(part, stored, strict=True):
            assert sorted(read.marks.items()) == sorted(section.marks)
        lengths = [len(line) for section in part for run in section.runs for line in run.lines]
        assert sum(map(len, texts)) <= max([size_max, *lengths])


@patches_modules
def test_a_large_commit_is_several_segments(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "SEGMENT_BYTES_MAX", 2000)
    broker = disk.broker()
    with broker, client_of(broker) as client:
        for queue in (b"q", b"r"):
            assert client.ask(b"s subscribe --confirm %b e" % queue) == b"s ok "
        lines = [b"m%d publish e %b\n" % (n, b"x" * (n * 7 % 500)) for n in range(100)]
        client.send(b"".join(lines) + b"last publish --confirm e x\n")
        assert client.line() == b"last ok "
        assert client.stats("journal")["segments"] > 10
    with broker, client_of(broker) as client:
        for queue in (b"q", b"r"):
            client.send(b"c%b consume %b\n" % (queue, queue))
            found = [client.line().split(b" ") for _ in range(101)]
            assert [words[2] for words in found] == [*(b"m%d" % n for n in range(100)), b"last"]
            assert [len(words[4]) for words in found] == [*(n * 7 % 500 for n in range(100)), 1]


# -- behind a server


def served(memory: Memory) -> Broker:
    broker = Broker(Path("none"))
    broker.open_store = memory.open
    return broker


def client_of(broker: Broker) -> LineClient:
    return LineClient(("127.0.0.1", broker.port))


def test_what_a_server_writes_after_its_claim_is_lost_is_not_there() -> None:
    memory = Memory()
    old = served(memory)
    old.start()
    with client_of(old) as client:
        assert client.ask(b"s subscribe --confirm q e") == b"s ok "
        assert client.ask(b"m publish --confirm e x") == b"m ok "
        with served(memory) as new:
            client.send(b"n publish --confirm e y\n")
            until(old._ended.done)
            with pytest.RaisesGroup(ClaimLost):
                old.stop()
            with client_of(new) as other:
                assert other.ask(b"c consume q") == b"c ok m event=e x"
                assert other.ask(b"p ping x") == b"p ok x"
