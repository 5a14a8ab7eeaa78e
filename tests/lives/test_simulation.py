"""A few seeds of the simulated world, and that it finds what it is meant to find."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.compiled import patches_modules

ROOT = Path(__file__).parents[2]
WITH_A_FAULT = """
import os
from tests.simulation import world

install = world.install

def with_a_fault(*args):
    install(*args)
{fault}

world.install = with_a_fault
try:
    world.run({seed}, 20)
except BaseException as error:
    print(type(error).__name__, error, flush=True)
    os._exit(3)
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
    "a timer that comes again at once": """
    from mqks.server.server import Server
    Server._catch_up = lambda self, turns, until_s: self._loop.call_soon(self._catch_up, 0, 0)
""",
}


def played(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def seed_of(number: int, *messages: str) -> list[str]:
    """What is told of it, without how long it took."""
    done = played("-m", "tests.simulation", str(number), *messages)
    assert done.returncode == 0, done.stdout + done.stderr
    hash_and_time, _, counts = done.stdout.partition(" in ")
    return [hash_and_time, counts.partition("), ")[2]]


@patches_modules
def test_a_seed_replays_exactly() -> None:
    first, again, other = seed_of(1, "8"), seed_of(1, "8"), seed_of(2, "8")
    assert first == again != other


@pytest.mark.slow
@patches_modules
@pytest.mark.parametrize("seed", range(100, 104))
def test_nothing_is_lost(seed: int) -> None:
    seed_of(seed)


@pytest.mark.slow
@patches_modules
@pytest.mark.parametrize("fault", FAULTS)
def test_it_finds(fault: str) -> None:
    for seed in range(3):
        done = played("-c", WITH_A_FAULT.format(fault=FAULTS[fault], seed=seed))
        if done.returncode == 3:
            break
    else:
        pytest.fail(f"not found: {fault}")
    assert done.stdout.splitlines()[-1].startswith(("Violation", "Stuck"))
