"""A few seeds of the simulated world, and that it finds what it is meant to find."""

import os
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

import mqks
from mqks.protocol.requests import ACTIONS, Action
from tests.kit.compiled import patches_modules
from tests.kit.marks import slow
from tests.simulation import faults, vfs
from tests.simulation.grammar import QUEUES, Usage, is_allowed


def missing() -> str:
    try:
        vfs.library()
    except (ImportError, OSError) as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

ROOT = Path(__file__).parents[2]
PACKAGE = Path(mqks.__file__).parent  # The wheel's, where that is tested.
LONGEST_S = 1200
SEEDS = 12
"""So many must be enough to find a fault."""
WITH_A_FAULT = """
import os
from tests.simulation.standby import WithStandby
from tests.simulation.world import World, run

def put_in():
{fault}

class Faulty({kind}):
    def install(self):
        super().install()
        put_in()

try:
    run({seed}, {messages}, Faulty)
except BaseException as error:
    print(type(error).__name__, error, flush=True)
    os._exit(3)
os._exit(0)
"""
LITTERED = """
import gc, os
from tests.simulation.world import World, run

class Litter:
    def __init__(self, world):
        self.me, self.world = self, world

    def __del__(self):
        World.note(self.world, "collected")

class Littered(World):
    def note(self, *what):
        super().note(*what)
        Litter(self)

gc.set_threshold({threshold})
gc.set_threshold = lambda *_: None
print(run(1, 2, Littered).events, flush=True)
os._exit(0)
"""
FAULTS = {
    "a commit that is confirmed and was not written": """
    from mqks.journal.sqlite.store import SqliteStore
    commit_now = SqliteStore._commit_now
    def lost(self, segment, once):
        if segment.id % 20:
            commit_now(self, segment, once)
    SqliteStore._commit_now = lost
""",
    "a client that does not send again what was in flight": """
    from mqks.client.session import Session
    Session._send_again = lambda self: self._in_flight.clear()
""",
    "a thread that looks before it waits to be woken": """
    from math import inf
    from mqks.client.blocking_connection import OneTimeEvent, SessionConnection
    def arrival(self, predicate, timeout_s):
        while True:
            with self.lock:
                if predicate():
                    return True
            event = OneTimeEvent()
            with self.lock:
                self._waiting.add(event)
            if not event.wait(inf if timeout_s is None else timeout_s):
                return False
    SessionConnection.arrival = arrival
""",
    "a thread that is not woken by acks": """
    from mqks.client.blocking_connection import SessionConnection
    def output(self, is_prompt):
        if is_prompt and not self._out:
            self._write()
    SessionConnection._output = output
""",
    "commits that are not synced": """
    from mqks.journal.sqlite.store import SqliteStore
    prepare = SqliteStore._prepare
    async def normal(db, settings):
        version = await prepare(db, settings)
        await db.execute_fetchall("pragma synchronous = normal")
        return version
    SqliteStore._prepare = normal
""",
    "a directory of texts that is not synced": """
    from mqks.journal.sqlite.texts import Texts
    sync = Texts._sync
    def unsynced(self, descriptor, call=os.fsync):
        if descriptor != self._descriptor:
            sync(self, descriptor, call)
    Texts._sync = unsynced
""",
    "a sync that is tried again": """
    import sqlite3
    from mqks.journal.sqlite import commits
    commits.FULL_CODES.add(sqlite3.SQLITE_IOERR)
""",
    "a full disk that has no room again": """
    from mqks.journal.sqlite.store import SqliteStore
    async def never(self):
        return False
    SqliteStore.has_room = never
""",
    "a timer that comes again at once": """
    from mqks.server.turn import Turn
    Turn._catch_up = lambda self, turns, until_s: self._loop.call_soon(self._catch_up, 0, 0)
""",
}
FAULTS_WITH_STANDBY = {
    "commits that do not depend on who owns the journal": """
    from mqks.journal.postgres import claim, statements
    for module, name in (claim, "BEAT"), (statements, "ADD"), (statements, "CHANGE"):
        setattr(module, name, getattr(module, name).replace(claim.IS_OURS, "true"))
""",
    "a standby that does not wait until the owner is silent": """
    from mqks.journal.postgres import claim
    claim.LOOKS, claim.SUSPECT_S = 1, 0.0
""",
    "a commit that only the primary has, by a warning": """
    from mqks.journal.postgres.connection import PostgresConnection
    rows = PostgresConnection.rows
    async def deaf(self, *words):
        found = await rows(self, *words)
        self.warnings.clear()
        return found
    PostgresConnection.rows = deaf
""",
    "a commit that only the primary has, after a lost reply": """
    from mqks.journal.postgres.claim import Claim
    checked, commit = Claim._checked, Claim._commit
    class Exists(BaseException):
        pass
    def found(self, found, before, after):
        if checked(self, found, before, after) != before and self._is_ours:
            raise Exists(found)
        return found
    async def committed(self, *words):
        try:
            return await commit(self, *words)
        except Exists as exists:
            [self.owner], self.waits = exists.args, ""
            return ()
    Claim._checked, Claim._commit = found, committed
""",
}
with_standby = pytest.mark.skipif(find_spec("psycopg") is None, reason="psycopg is not installed")


def played(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )


def seed_of(number: int, *how: str) -> list[str]:
    """What is told of it, without how long it took."""
    done = played("-m", "tests.simulation", str(number), *how)
    assert done.returncode == 0, done.stdout + done.stderr
    hash_and_time, _, counts = done.stdout.partition(" in ")
    return [hash_and_time, counts.partition("), ")[2]]


@patches_modules
@pytest.mark.parametrize("how", ["1 --talk", "24 --long", *slow("4", "3 --lives", "6 --rare")])
def test_a_seed_replays_exactly(how: str) -> None:
    first, again, other = (seed_of(seed, *how.split()) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.slow
@patches_modules
def test_the_world_decides_when_garbage_is_collected() -> None:
    seldom, often = (played("-c", LITTERED.format(threshold=each)) for each in (100_000, 50))
    assert seldom.stdout == often.stdout != "", seldom.stderr


@patches_modules
@pytest.mark.parametrize(
    "how",
    [
        *("1-8 1 --lives", "1-80 1 --year", "1-12 6 --long", "1-2 6 --rare"),
        *slow("81-140 3 --year", "13-47 24 --long", "100 30", "101 30", "200-202 10 --lives"),
        *slow("3-6 6 --rare", "200-202 8 --talk"),
        *slow(*(f"{n} 3000 --long" for n in (201, 202, 203))),
        *(
            pytest.param(f"{n} --standby", marks=[pytest.mark.slow, with_standby])
            for n in (100, 101)
        ),
    ],
)
def test_nothing_is_lost(how: str) -> None:
    """Of several seeds in one process, which is forked for each."""
    done = played("-m", "tests.simulation", *how.split())
    assert done.returncode == 0, done.stdout + done.stderr


class Drawing:
    """A `Chance`."""

    def __init__(self) -> None:
        self.rng = random.Random(5)
        self.consumers = ["c1"]
        self.consumer = ""
        self.queues: Sequence[str] = QUEUES
        self.held: dict[str, list[str]] = {}
        self.messages: list[str] = []
        self.leases: list[str] = []
        self.epochs: list[str] = []


@pytest.mark.parametrize("action", ACTIONS.values(), ids=lambda action: action.name)
def test_every_action_and_flag_is_drawn(action: Action) -> None:
    """What has a new kind of value must be given some."""
    drawing, usage = Drawing(), Usage(action.usage)
    lines = [usage.draw(drawing) for _ in range(2000)]
    assert any(is_allowed(f"x {action.name} {line}".encode()) for line in lines)
    for flag in re.findall(r"--[a-z-]+", action.usage):
        assert any(re.search(rf"{flag}\b", line) for line in lines), flag


@with_standby
@patches_modules
def test_a_seed_with_a_standby_replays_exactly() -> None:
    first, again = (seed_of(1, "8", "--standby") for _ in range(2))
    assert first == again


@pytest.mark.slow
@patches_modules
@pytest.mark.parametrize(
    ("kind", "messages", "fault"),
    [
        *(pytest.param("World", 5, FAULTS[name], id=name) for name in FAULTS),
        *(
            pytest.param("WithStandby", 10, FAULTS_WITH_STANDBY[name], id=name, marks=with_standby)
            for name in FAULTS_WITH_STANDBY
        ),
    ],
)
def test_it_finds(kind: str, messages: int, fault: str) -> None:
    """By one of a few seeds of a world that is as small as finds it."""
    for seed in range(1, 1 + SEEDS):
        text = WITH_A_FAULT.format(kind=kind, messages=messages, fault=fault, seed=seed)
        done = played("-c", text)
        if done.returncode == 3:
            assert done.stdout.splitlines()[-1].startswith(("Violation", "Stuck", "ConnectionLost"))
            return
        assert done.returncode == 0, done.stderr
    raise AssertionError("no seed finds it")


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault: faults.Fault) -> None:
    """Whoever changes the place puts the fault into what is there now."""
    assert fault.has_place(PACKAGE)


@pytest.mark.slow
@patches_modules
def test_a_plan_that_fails_is_made_smaller(tmp_path: Path) -> None:
    (fault,) = (each for each in faults.FAULTS if each.name == "crash-not-counted")
    fault.copy_into(tmp_path)
    told = faults.played(f"{tmp_path}", "1", "3", "--lives", "--shrink")
    assert told.returncode == 1, told.stderr
    kind, *_, smallest = told.stdout.splitlines()
    assert smallest == "python -m tests.simulation 1 1 --lives --without=stop_and_go_on"
    again = faults.played(f"{tmp_path}", *smallest.split()[3:])
    assert again.stderr.splitlines()[-1].startswith(kind.partition("…")[0])


@pytest.mark.slow
@patches_modules
@pytest.mark.parametrize("name", ["ack-not-written", "loss-not-counted", "crash-not-counted"])
def test_it_finds_what_is_put_into_a_copy(name: str) -> None:
    (fault,) = (each for each in faults.FAULTS if each.name == name)
    assert fault.found() is not None
