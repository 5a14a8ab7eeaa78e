"""Plays a seed: `python -m tests.simulation SEED [MESSAGES]`, so many of each publisher."""

import os
import sys
import time

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation.world import run

now_s = time.perf_counter
began_s = now_s()
result = run(*map(int, sys.argv[1:3]))
took_s = now_s() - began_s
world = result.world
print(
    f"seed {world.seed}: {result.events}, {result.passed_s:.0f} s in {took_s:.1f} s "
    f"({result.passed_s / took_s:.0f} times), {result.turns} turns, {world.lives} lives, "
    f"{world.cuts} cuts, {world.stops} stops, {world.sets} clocks set",
    flush=True,
)
os._exit(0)  # What was killed must not run its last lines.
