"""A few seeds of the simulated world, and that it finds what it is meant to find."""

import random
import re
from collections.abc import Sequence
from functools import partial
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
with_tasks = pytest.mark.skipif(
    not (find_spec("celery") and find_spec("django")), reason="Celery or Django is not installed"
)
with_standby = pytest.mark.skipif(find_spec("psycopg") is None, reason="psycopg is not installed")
played = partial(faults.played, str(ROOT), timeout_s=LONGEST_S)


def seed_of(number: int, *how: str) -> list[str]:
    """What is told of it, without how long it took."""
    done = played(*faults.PLAY, str(number), *how)
    assert done.returncode == 0, done.stdout + done.stderr
    hash_and_time, _, counts = done.stdout.partition(" in ")
    return [hash_and_time, counts.partition("), ")[2]]


@patches_modules
@pytest.mark.parametrize(
    "how",
    [
        *("1 --talk", "24 --long", *slow("4", "3 --lives", "6 --rare")),
        pytest.param("4 --tasks", marks=[pytest.mark.slow, with_tasks]),
        pytest.param("8 --standby", marks=with_standby),
    ],
)
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
        pytest.param("1 3 --tasks", marks=with_tasks),
        pytest.param("101 9 --tasks", marks=[pytest.mark.slow, with_tasks]),
        *(
            pytest.param(f"{n} --standby", marks=[pytest.mark.slow, with_standby])
            for n in (100, 101)
        ),
    ],
)
def test_nothing_is_lost(how: str) -> None:
    """Of several seeds in one process, which is forked for each."""
    done = played(*faults.PLAY, *how.split())
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


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_has_one_place(fault: faults.Fault) -> None:
    """Whoever changes the place puts the fault into what is there now."""
    assert fault.has_place(PACKAGE)


@pytest.mark.slow
@patches_modules
def test_a_plan_that_fails_is_made_smaller(tmp_path: Path) -> None:
    (fault,) = (each for each in faults.FAULTS if each.name == "crash-not-counted")
    fault.copy_into(tmp_path)
    told = faults.played(f"{tmp_path}", *faults.PLAY, "1", "3", "--lives", "--shrink")
    assert told.returncode == 1, told.stderr
    kind, *_, smallest = told.stdout.splitlines()
    assert smallest == "python -m tests.simulation 1 1 --lives --without=stop_and_go_on"
    again = faults.played(f"{tmp_path}", *faults.PLAY, *smallest.split()[3:])
    assert again.stderr.splitlines()[-1].startswith(kind.partition("…")[0])


@pytest.mark.slow
@patches_modules
@pytest.mark.parametrize(
    "name",
    [
        *("ack-not-written", "loss-not-counted", "crash-not-counted", "commit-not-written"),
        *("not-sent-again", "looks-before-it-waits", "not-woken-by-acks", "commit-not-synced"),
        *("directory-not-synced", "sync-tried-again", "full-for-ever", "timer-at-once"),
        *("commit-of-another", "owner-not-silent", "warning-not-heard", "lost-reply-confirms"),
        *("pipeline-forgets", "published-twice", "ack-before-its-row"),
    ],
)
def test_it_finds(name: str) -> None:
    """By one of a few seeds of a world that is as small as finds it."""
    [fault] = (each for each in faults.FAULTS if each.name == name)
    wanted = {faults.TASKS: ("celery", "django"), faults.STANDBY: ("psycopg",)}
    for each in wanted.get(fault.plays, ()):
        pytest.importorskip(each, reason=f"{each} is not installed")
    assert re.search("Violation|Stuck|ConnectionLost", str(fault.found()))
