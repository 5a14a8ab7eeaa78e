"""Whatever is damaged in a database, its WAL or its texts is noticed, or changes nothing.

Databases of many kinds are made by real servers. Each case takes one, damages one place of it, and
looks what `verify`, a reader, a start and a start with --salvage make of that:

    python -m tests.damage 10000            # so many places
    python -m tests.damage 500 7            # another seed; the same places again with the same one

- detected: refused, with the place
- told: gone on with, and said what is lost; what is left was there before
- harmless: all is as it was, also after more was written
- lost end: of a WAL without its last frames nobody can know; what is left was there before
- unguarded: a database of a schema without checksums, in its small tables

Damage of files with texts costs a start with --salvage what their segments say, and nothing else.

The one rule: everything else is a failure: a difference that nobody tells, a traceback, a loop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mqks.broker.broker import Broker
from mqks.broker.requests.intake import Intake
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import MqksError
from mqks.journal.compaction import Compaction
from mqks.journal.journal import Journal
from mqks.journal.recovery import Recovery
from mqks.journal.sqlite.database_file import DatabaseFile
from mqks.journal.sqlite.store import SqliteStore
from mqks.journal.sqlite.texts import EPOCH, name_of, texts_path
from mqks.journal.sqlite.verify import verify
from mqks.journal.stored import decode
from mqks.settings import Settings
from tests.journal.test_upgrade import left
from tests.kit.line_client import LineClient
from tests.kit.server_process import ServerProcess

PAGE, HEADER, FRAME = 4096, 32, 4096 + 24
_CASE_S = 20
"""Of the processor, so that a busy machine counts for nothing."""
_WAIT_S = 60
_DAMAGED = 65
_SMALL = {"queue", "binding", "once", "meta", "tally", "error", "schema", "sqlite_sequence"}

State = dict[str, Any]


class Silent(Exception):
    """A case that fails; the message tells what went by without a word."""


@contextmanager
def _limit() -> Iterator[None]:
    """A loop is ended by an exception that nobody expects."""

    def end(*_: object) -> None:
        raise Silent(f"it did not end within {_CASE_S} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, _CASE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


# ------------------------------------------------------------------------------- databases


@dataclass
class Said:
    """Which messages a segment has, and which it settles, by queue id and number; and its text."""

    has: set[tuple[int, int]]
    settles: set[tuple[int, int]]
    file: str
    text_bytes: int


@dataclass
class World:
    """A database that was left, all the messages that ever were in it, and what a start finds."""

    name: str
    db: Path
    schema: int
    pages: dict[str, list[int]] = field(default_factory=dict)
    """Kind → numbers of pages, from 1 on."""
    lines: set[bytes] = field(default_factory=set)
    state: State = field(default_factory=dict)
    view: State = field(default_factory=dict)
    said: dict[int, Said] = field(default_factory=dict)
    """What each segment says, by its id; only with texts in files."""

    @property
    def wal(self) -> Path:
        return self.db.with_name(f"{self.db.name}-wal")

    def copy(self, directory: Path) -> Path:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
        db = directory / "mqks.db"
        shutil.copy(self.db, db)
        if self.wal.exists():
            shutil.copy(self.wal, f"{db}-wal")
        if (texts := texts_path(self.db)).is_dir():
            shutil.copytree(texts, texts_path(db), symlinks=True)
        elif texts.exists():
            shutil.copy(texts, texts_path(db))
        return db


def _until(client: LineClient, line: bytes, end: bytes) -> list[bytes]:
    """Send a line, and read up to one that begins so: the messages that came before that."""
    client.send(line + b"\n")
    came: list[bytes] = []
    while not (told := client.line()).startswith(end):
        came.append(told.split(b" ")[2])
    return came


def _load(client: LineClient, rng: random.Random, commits: int, large: int) -> set[bytes]:
    """Some of everything; the messages that were published, as they are stored."""
    lines, held = set[bytes](), list[bytes]()
    for number in range(rng.randrange(2, 6)):
        _until(client, b"s subscribe --confirm q%d e%d all" % (number, number), b"s ok ")
    events = b" ".join(b"event.%d.%d" % (rng.randrange(99), n) for n in range(rng.choice([3, 300])))
    _until(client, b"s rebind --confirm nobody " + events, b"s ok ")
    _until(client, b"t consume --confirm temp --delete-queue-when-unused=600", b"t ok ")
    _until(client, b"d delete_consumer --confirm t", b"d ok ")
    _until(client, b"s subscribe --confirm gone all", b"s ok ")
    client.send(b"c consume q0 --manual-ack\n")
    for number in range(commits):
        name, event = b"m%d" % number, rng.choice([b"all", b"e0", b"e1"])
        size = large if rng.random() < 0.2 else rng.choice([5, 60, 300])
        data = b"%0*x" % (size, rng.getrandbits(4 * size))
        once = b"--once " if rng.random() < 0.3 else b""
        lines.add(b"%s event=%s %s" % (name, event, data))
        words = name, once, event, data
        held += _until(client, b"%s publish --confirm %s%s %s" % words, name + b" ok ")
        if held and rng.random() < 0.4:
            action = rng.choice([b"ack", b"ack", b"ack", b"reject"])
            held += _until(client, b"a %s --confirm c %s" % (action, held.pop(0)), b"a ok ")
        if number % 20 == 7:
            held += _until(client, b"x%d dance" % number, b"x%d error " % number)
        if number == commits // 2:
            _until(client, b"g delete_queue --confirm gone", b"g ok ")
    return lines


def _served(
    directory: Path, rng: random.Random, how: str, commits: int, large: int, *flags: str
) -> World:
    directory.mkdir()
    world = World(directory.name, directory / "mqks.db", 3)
    with (
        ServerProcess(world.db, "--ballast-bytes", "0", *flags) as server,
        LineClient(server.address) as client,
    ):
        world.lines = _load(client, rng, commits, large)
        assert (server.stop() == 0) if how == "stopped" else server.kill()
    return world


def _older(directory: Path, schema: int, how: str) -> World:
    name = f"schema {schema} {how}"
    (directory / name).mkdir()
    world = World(name, directory / name / "mqks.db", schema)
    left(world.db, schema, how)
    for stray in world.db.parent.glob("made*"):
        stray.unlink()
    return world


def worlds(directory: Path, rng: random.Random) -> list[World]:
    texts = "--text-file-bytes-min=1"
    made = [
        _served(directory / "stopped", rng, "stopped", 60, 3000),
        _served(directory / "killed", rng, "killed", 60, 3000),
        _served(directory / "large", rng, "stopped", 40, 30_000),
        _served(directory / "turned WAL", rng, "killed", 90, 900, "--wal-checkpoint-pages=20"),
        _served(directory / "few", rng, "killed", 3, 100),
        _served(directory / "texts stopped", rng, "stopped", 20, 3000, texts),
        _served(directory / "texts killed", rng, "killed", 20, 3000, texts),
    ]
    for schema in (1, 2):
        made += [_older(directory, schema, how) for how in ("stopped", "killed")]
    for world in made:
        world.pages = _pages(world.db)
        scratch = world.copy(directory / "scratch")
        world.view = _view(scratch)
        world.state, told = asyncio.run(_start(scratch, salvage=False, works=False))
        assert not told, told
        world.lines |= {line for _, lines in world.state["messages"] for line in lines}
        world.said = _said(world.copy(directory / "scratch"))
    shutil.rmtree(directory / "scratch")
    return made


def _said(db: Path) -> dict[int, Said]:
    if not texts_path(db).exists():
        return {}
    with closing(sqlite3.connect(db)) as connection:
        columns = "id, body, coalesce(text_file, id), coalesce(text_bytes, 0)"
        rows = connection.execute(f"select {columns} from segment").fetchall()
    said = {}
    for segment_id, head, number, size in rows:
        has, settles = set[tuple[int, int]](), set[tuple[int, int]]()
        for section in decode(head):
            has |= _numbers(section.queue_id, ((run.first, run.total) for run in section.runs))
            settles |= _numbers(section.queue_id, section.acks)
        said[segment_id] = Said(has, settles, name_of(number), size)
    return said


def _numbers(queue_id: int, ranges: Iterable[tuple[int, int]]) -> set[tuple[int, int]]:
    return {(queue_id, first + n) for first, count in ranges for n in range(count)}


def _pages(db: Path) -> dict[str, list[int]]:
    """Which page of the file is of which kind: header, ptrmap, free, or a table's name."""
    raw = db.read_bytes()
    kinds = dict.fromkeys(range(1, len(raw) // PAGE + 1), "overflow")
    with closing(sqlite3.connect(f"{db.absolute().as_uri()}?immutable=1", uri=True)) as connection:
        try:
            roots = connection.execute("select tbl_name, rootpage from sqlite_schema").fetchall()
        except sqlite3.DatabaseError:
            roots = []

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(raw[at : at + size], "big")

    def walk(page: int, name: str) -> None:
        kinds[page] = name
        begin = (page - 1) * PAGE
        at = begin + (100 if page == 1 else 0)
        if raw[at] in (2, 5):
            kinds[page] = f"{name} interior"
            walk(number(at + 8), name)
            for cell in range(number(at + 3, 2)):
                walk(number(begin + number(at + 12 + 2 * cell, 2)), name)

    for name, root in roots:
        walk(root, name)
    if raw:
        kinds[1], kinds[2] = "schema", "ptrmap"
        trunk = number(32)
        while trunk:
            at = (trunk - 1) * PAGE
            kinds[trunk] = "free trunk"
            leaves = range(at + 8, at + 8 + 4 * number(at + 4), 4)
            kinds |= dict.fromkeys(map(number, leaves), "free")
            trunk = number(at)
    found: dict[str, list[int]] = defaultdict(list)
    for page, kind in kinds.items():
        if page <= len(raw) // PAGE:
            found[kind].append(page)
    return found


# ---------------------------------------------------------------------------------- damage


@dataclass
class Place:
    kind: str
    what: str
    is_end: bool = False
    """Of a WAL, and no whole frame follows."""
    segments: frozenset[int] | None = None
    """Those whose texts were damaged, and nothing else was."""


HARMFUL = (
    *("flip", "cut", "empty", "delete", "swap", "directory", "link"),
    *("no directory", "no texts", "file"),
)
HARMLESS = "extend", "stray", "stray directory", "owner", "no owner"
"""Done to files of texts: what nobody reads may change."""


def _spoil_texts(world: World, db: Path, rng: random.Random) -> Place:
    """Damage one file that has a text, or two; or the directory."""
    directory = texts_path(db)
    segments = {said.file: each for each, said in world.said.items() if said.text_bytes}
    sizes = {name: world.said[segment_id].text_bytes for name, segment_id in segments.items()}
    names = sorted(segments)
    unused = max(int(each) for each in os.listdir(directory) if each != EPOCH) + 1
    how = rng.choice(["flip", "flip", *HARMFUL, *HARMLESS])
    name, other = rng.sample(names, 2)
    file, spoiled = directory / name, [name] if how in HARMFUL else []
    content, size = file.read_bytes(), sizes[name]
    match how:
        case "flip":
            at = rng.randrange(size)
            changed = content[at] ^ 1 << rng.randrange(8)
            file.write_bytes(content[:at] + bytes([changed]) + content[at + 1 :])
        case "cut":
            os.truncate(file, rng.randrange(size))
        case "empty":
            os.truncate(file, 0)
        case "extend":
            file.write_bytes(content + rng.randbytes(rng.randrange(1, 5000)))
        case "delete":
            file.unlink()
        case "swap":
            others = (directory / other).read_bytes()
            file.write_bytes(others)
            (directory / other).write_bytes(content)
            pair = (name, content, others), (other, others, content)
            spoiled = [n for n, was, now in pair if was[: sizes[n]] != now[: sizes[n]]]
        case "directory":
            file.unlink()
            file.mkdir()
        case "link":
            file.unlink()
            file.symlink_to(directory / other)
        case "stray":
            (directory / name_of(unused + rng.randrange(8))).write_bytes(content)
        case "stray directory":
            (directory / name_of(unused + rng.randrange(8))).mkdir()
        case "owner":
            (directory / EPOCH).write_text(f"{rng.getrandbits(64):016x}")
        case "no owner":
            (directory / EPOCH).unlink()
        case _:
            for each in directory.iterdir():
                each.unlink()
            if how != "no texts":
                directory.rmdir()
            if how == "file":
                directory.touch()
            spoiled = names
    return Place("text", f"{how} {name}", segments=frozenset(segments[each] for each in spoiled))


def _spoil(world: World, db: Path, rng: random.Random) -> Place:
    """Damage one place: the kind of page is chosen first, then the page, then the place."""
    if world.said and rng.random() < 0.7:
        return _spoil_texts(world, db, rng)
    wal, kinds = db.with_name(f"{db.name}-wal"), [*world.pages]
    if wal.exists() and wal.stat().st_size > HEADER:
        kinds += ["wal header", *["wal frame"] * 2, *["wal page"] * max(4, len(kinds) // 3)]
    kind = rng.choice(kinds)
    file = wal if kind.startswith("wal") else db
    content = bytearray(file.read_bytes())
    frames = (len(content) - HEADER) // FRAME
    last = _last_frame(content) if kind.startswith("wal") else -1
    if kind == "wal header":
        start, size, which = 0, HEADER, 0
    elif kind.startswith("wal"):
        which = rng.randrange(frames)
        start = HEADER + which * FRAME + (0 if kind == "wal frame" else 24)
        size = 24 if kind == "wal frame" else PAGE
    else:
        which = rng.choice(world.pages[kind])
        start, size = (which - 1) * PAGE, PAGE
    how = rng.choice(["flip"] * 6 + ["bits", "sector", "zero", "copy", "cut"])
    at = start
    if how in ("flip", "bits"):
        for _ in range(1 if how == "flip" else rng.randrange(2, 9)):
            at = _within(content, start, size, rng)
            content[at] ^= 1 << rng.randrange(8)
    elif how == "sector":
        at = start + rng.randrange(max(1, size // 512)) * 512
        content[at : at + min(512, size)] = bytes(min(512, size))
    elif how == "zero":
        content[start : start + size] = bytes(size)
    elif how == "copy":
        if kind.startswith("wal"):
            other = HEADER + rng.randrange(frames) * FRAME
            start, size = HEADER + which * FRAME, FRAME
        else:
            other = rng.randrange(len(content) // PAGE) * PAGE
        content[start : start + size] = content[other : other + size]
    else:
        # An empty file is one that was only begun, and so is one of a single byte to SQLite.
        at = max(2, start + rng.choice([0, rng.randrange(size)]))
        del content[at:]
    file.write_bytes(content)
    is_last = which == last and how in ("zero", "sector", "copy", "bits")
    place = f"{how} at {at} of {file.name} (page {which})"
    return Place(kind, place, kind.startswith("wal") and (how == "cut" or is_last))


def _last_frame(wal: bytearray) -> int:
    """Those after it are left from before the last checkpoint, and have other salts."""
    starts = range(HEADER, len(wal) - FRAME + 1, FRAME)
    return sum(wal[start + 8 : start + 16] == wal[16:24] for start in starts) - 1


def _within(content: bytearray, start: int, size: int, rng: random.Random) -> int:
    """Anywhere, at the beginning, or where something stands."""
    kind = rng.randrange(3)
    written = [at for at in range(start, start + size) if content[at]] if kind == 1 else []
    if written:
        return rng.choice(written)
    return start + rng.randrange(size if kind else min(size, 32))


# ----------------------------------------------------------------------------- what is found


async def _start(db: Path, *, salvage: bool, works: bool) -> tuple[State, list[str]]:
    """What a server would begin with, and what it told. `works`: it goes on with that."""
    told: list[str] = []
    how: Any = {"ballast_bytes": 0, "disk_free_bytes_min": 0}
    how["text_file_bytes_min"] = int(texts_path(db).exists())
    settings = Settings(db=db, salvage=salvage, **how)
    journal = Journal(await SqliteStore.open(settings, told.append))
    try:
        if journal.store.torn:
            told.append(journal.store.torn)
        clocks: Any = {"clock": time.monotonic, "now_us": lambda: 0}
        errors: Any = {"new_error_id": lambda: ("z", 0), "on_error": lambda _: True}
        broker = Broker(settings, **clocks, **errors)
        await Recovery(journal, broker, told.append).run(salvage=salvage)
        messages, numbers = [], set[tuple[int, int]]()
        for name, queue in sorted(broker.queues.items()):
            index, first = journal.index.queues[queue.id], 0
            lines: list[bytes] = []
            while first < index.next_seq:
                page = await journal.log.page(queue.id, index, first, None, 10_000, 1 << 22)
                lines += (line for p in page.pieces for line in p.text.splitlines())
                numbers |= {(queue.id, p.first + n) for p in page.pieces for n in range(p.total)}
                first = page.next_seq
            messages.append((name, lines))
        state: State = {
            "messages": messages,
            "numbers": numbers,
            "queues": {name: _facts(queue) for name, queue in broker.queues.items()},
            "bindings": {name: sorted(e) for name, e in broker.bindings.by_name.items()},
            "once": [*broker.once._ids],
            "epoch": journal.epoch,
            "next_queue": broker.next_queue_id,
            "errors": [*broker.last_errors],
        }
        if works:
            await _work(journal, broker)
    finally:
        await journal.store.close()
    return state, told


def _facts(queue: Queue) -> tuple[object, ...]:
    lane = queue.lane
    returned = [number for number, _ in lane.blocks if number < lane.cursor]
    return queue.id, queue.policy, lane.next_seq, lane.cursor, dict(lane.marks), returned


async def _work(journal: Journal, broker: Broker) -> None:
    """Write enough to use free pages, and compact."""
    intake = Intake(broker)
    connection = broker.connect("w", local=True)
    for number in range(30):
        line = b"w%d publish --once all %s\n" % (number, b"w" * 3000)
        intake.receive(connection, b"s%d subscribe w%d all\n%s" % (number, number % 3, line))
        await journal.write(broker.pending.take().entry)
    await Compaction(journal).compact_fully()


def _view(db: Path) -> State:
    with DatabaseFile.open(db) as file:
        view: State = {
            "queues": file.queues,
            "bindings": file.bindings,
            "messages": {q.name: [*file.messages(q.name)] for q in file.queues},
            "epoch": file.facts.epoch,
            "errors": file.errors(),
        }
        view["told"] = [*map(str, file.damage), *filter(None, [file.torn])]
    return view


def _attempt(what: Callable[[], Any]) -> tuple[Any, str]:
    """Its result, or the line that it is refused with."""
    try:
        return what(), ""
    except MqksError as error:
        if error.exit_code != _DAMAGED:
            raise
        return None, str(error) or "refused"


def _differing(was: State, now: State, keys: Iterable[str]) -> list[str]:
    """The keys whose values differ. Missing errors are not noticed: they have no tally."""
    known = all(each in was["errors"] for each in now["errors"])
    return [key for key in keys if not (known if key == "errors" else now[key] == was[key])]


def _is_true(world: World, state: State) -> bool:
    """Nothing is there that never was."""
    lines = {line for _, lines in state["messages"] for line in lines}
    events = {(n, e) for n, es in state["bindings"].items() for e in es}
    known = {(n, e) for n, es in world.state["bindings"].items() for e in es}
    return lines <= world.lines and (events <= known | {(b"gone", b"all")} or world.schema < 3)


def examine(world: World, directory: Path, seed: str) -> tuple[Place, str]:
    """One case: the place, and what came of it. Raises Silent."""
    rng = random.Random(seed)
    spoiled = World(world.name, world.copy(directory / "spoiled"), world.schema)
    place = _spoil(world, spoiled.db, rng)
    try:
        with _limit():
            return place, _outcome(world, spoiled, directory / "case", place, rng)
    except Exception as error:
        raise Silent(f"{place.kind}, {place.what}: {error!r}") from error


def _verified(db: Path) -> str:
    """What is damaged; empty if nothing is."""
    verdict, refused = _attempt(lambda: verify(db))
    return refused or "; ".join(map(str, verdict.damage))


def _outcome(world: World, spoiled: World, case: Path, place: Place, rng: random.Random) -> str:
    db = spoiled.copy(case)
    damage = _verified(db)
    view, _ = _attempt(lambda: _view(db))
    if rng.random() < 0.01:
        _in_process(spoiled.copy(case))
    db = spoiled.copy(case)
    works = rng.random() < 0.3
    found, line = _attempt(lambda: asyncio.run(_start(db, salvage=False, works=works)))
    guarded = world.schema >= 3 and not place.is_end
    if line:
        if guarded and not damage:
            raise Silent(f"verify finds nothing, and a start is refused: {line}")
        _salvage(world, spoiled, case, guarded, place.segments)
        return "detected"
    state, told = found
    if place.segments:
        raise Silent(f"a start goes on, and tells {told}")
    if damage and not told and not place.is_end:
        raise Silent(f"verify tells {damage}, and a start nothing")
    # Schema 1 has no epoch: each start on it makes one.
    compared = world.state.keys() - ({"epoch"} if world.schema == 1 else set())
    differs = _differing(world.state, state, compared)
    if works and not told:
        after = _verified(db)
        if after and guarded:
            raise Silent(f"damaged by going on: {after}")
    if view and not view["told"] and not told:
        shown = _differing(world.view, view, world.view)
        if shown and guarded:
            raise Silent(f"a reader shows others without a word: {shown}")
    if told:
        if not _is_true(world, state) and guarded:
            raise Silent(f"told, and yet there is what never was: {told}")
        return "told"
    if not differs:
        return "harmless"
    if place.is_end and _is_true(world, state):
        return "lost end"
    if world.schema < 3:
        return "unguarded"
    raise Silent(f"{differs} differ without a word")


def _salvage(
    world: World, spoiled: World, directory: Path, guarded: bool, segments: frozenset[int] | None
) -> None:
    db = spoiled.copy(directory)
    found, line = _attempt(lambda: asyncio.run(_start(db, salvage=True, works=False)))
    if line:
        if segments is not None:
            raise Silent(f"not salvaged: {line}")
        return
    if segments is not None:
        _salvaged_all_else(world, found[0], segments)
    if not found[1] and guarded:
        raise Silent("salvaged without a word")
    if not _is_true(world, found[0]) and guarded:
        raise Silent(f"salvaged, and yet there is what never was: {found[1]}")
    if damage := _verified(db):
        raise Silent(f"salvaged, and not whole: {damage}; told: {found[1]}")


def _salvaged_all_else(world: World, state: State, segments: frozenset[int]) -> None:
    """What is lost is what only these segments have; what came back is what they settle."""
    before, after = world.state["numbers"], state["numbers"]
    nothing = set[tuple[int, int]]()
    elsewhere = nothing.union(*(said.has for i, said in world.said.items() if i not in segments))
    settled = nothing.union(*(world.said[each].settles for each in segments))
    if before - after != before - elsewhere or not after - before <= settled & elsewhere:
        raise Silent(f"lost {before - after}, came back {after - before}")
    kept = ("bindings", "once", "epoch", "next_queue", "errors")
    if differs := [key for key in kept if state[key] != world.state[key]]:
        raise Silent(f"salvaged, and {differs} differ")


def _in_process(db: Path) -> None:
    """The real program ends, or serves: never with a traceback."""
    for flags in ([], ["--salvage"]):
        server = ServerProcess(db, "--ballast-bytes", "0", *flags)
        try:
            server._listens_or_ended.wait(_WAIT_S)
            code = server.stop()
            if "Traceback" in server.log or code not in (0, _DAMAGED):
                raise Silent(f"a server ended with {code}: {server.log}")
        finally:
            server.kill()


# ------------------------------------------------------------------------------ many of them


@dataclass
class Figures:
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Kind of page → what came of it, and how often."""
    failures: list[str] = field(default_factory=list)


def run(cases: int, seed: int, tell: Callable[[str], object] = print) -> Figures:
    """In memory where there is such a directory: what a disk forgets is none of this."""
    memory, rng, figures = Path("/dev/shm"), random.Random(seed), Figures()
    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name,
        suppress(KeyboardInterrupt),
    ):
        made = worlds(Path(name), rng)
        for number in range(cases):
            world, case = made[number % len(made)], f"{seed}-{number}"
            try:
                place, outcome = examine(world, Path(name), case)
                figures.outcomes[place.kind][outcome] += 1
            except Silent as silent:
                figures.failures.append(f"case {case}, {world.name}: {silent}")
                tell(figures.failures[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", type=int, nargs="?", default=1000)
    parser.add_argument("seed", type=int, nargs="?", default=random.randrange(2**32))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    figures = run(options.cases, options.seed, lambda line: print(line, flush=True))
    total: Counter[str] = Counter()
    for kind, counts in sorted(figures.outcomes.items()):
        total += counts
        _tell(kind, counts)
    _tell("all", total)
    print(f"{len(figures.failures)} failures")
    return bool(figures.failures)


def _tell(kind: str, counts: Counter[str]) -> None:
    print(f"{kind:20} " + ", ".join(f"{name} {count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    sys.exit(main())
