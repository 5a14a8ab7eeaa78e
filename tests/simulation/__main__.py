"""Plays a seed: `python -m tests.simulation SEED [COUNT]`, so many messages of each publisher."""

import argparse
import os
import sys
import time
import traceback

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation.lives import Lives
from tests.simulation.shrink import Plan, shrink
from tests.simulation.standby import WithStandby
from tests.simulation.talk import Talk
from tests.simulation.world import MESSAGES, World, run
from tests.simulation.year import Year

KINDS = {
    "lives": (Lives, "so many lives of the chaos test"),
    "talk": (Talk, "so many lives with whatever the table of requests allows"),
    "year": (Year, "so many hours in which clocks are changed"),
    "standby": (WithStandby, "two servers, and their journal in PostgreSQL"),
}

parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
parser.add_argument("seed", type=int)
parser.add_argument("count", type=int, nargs="?", default=MESSAGES)
for name in KINDS:
    parser.add_argument(
        f"--{name}", dest="kind", action="store_const", const=name, help=KINDS[name][1]
    )
parser.add_argument("--clients", type=int, metavar="N", help="so many publishers or talkers")
parser.add_argument(
    "--without", action="append", default=[], metavar="NAME", help="what is left out of the plan"
)
parser.add_argument(
    "--shrink", action="store_true", help="look for the smallest plan that fails in the same way"
)
arguments = parser.parse_args()
kind: type[World] = KINDS[arguments.kind][0] if arguments.kind else World
clients = arguments.clients or kind.clients
if unknown := {*arguments.without} - {*kind.kinds}:
    parser.error(f"what can be left out is {', '.join(kind.kinds)}, not {', '.join(unknown)}")
if arguments.shrink:
    flag = (f"--{arguments.kind}",) if arguments.kind else ()
    plan = Plan(
        arguments.seed, arguments.count, flag, clients, frozenset(kind.kinds), (*arguments.without,)
    )
    sys.exit(1 if shrink(plan) else 0)
now_s = time.perf_counter
began_s = now_s()
try:
    result = run(arguments.seed, arguments.count, kind, clients, arguments.without)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit(1)  # What is left must not run its last lines.
took_s = now_s() - began_s
world = result.world
print(
    f"seed {world.seed}: {result.events}, {result.passed_s:.0f} s in {took_s:.1f} s "
    f"({result.passed_s / took_s:.0f} times), {result.turns} turns, {world}",
    flush=True,
)
os._exit(0)  # What was killed must not run its last lines.
