"""Plays a seed: `python -m tests.simulation SEED [COUNT]`, so many messages of each publisher; or
several, `1-100`."""

import argparse
import gc
import os
import sys
import time
import traceback

if os.environ.get("PYTHONHASHSEED") != "0":
    os.environ["PYTHONHASHSEED"] = "0"
    os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])

from tests.simulation.lives import Lives
from tests.simulation.long import Long
from tests.simulation.rare import Rare
from tests.simulation.shrink import Plan, shrink
from tests.simulation.standby import WithStandby
from tests.simulation.talk import Talk
from tests.simulation.tasks import Tasks
from tests.simulation.world import MESSAGES, Outside, World, prepared, run
from tests.simulation.year import Year

KINDS = {
    "lives": (Lives, "so many lives of the chaos test"),
    "talk": (Talk, "so many lives with whatever the table of requests allows"),
    "rare": (Rare, "so many rounds of what seldom meets"),
    "year": (Year, "so many hours in which clocks are changed"),
    "long": (Long, "so many hours of who comes for some minutes in hours or days"),
    "tasks": (Tasks, "programs and workers of Celery and Django"),
    "standby": (WithStandby, "two servers, and their journal in PostgreSQL"),
}

parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
parser.add_argument("seed", help="a number, or the first and the last one: 1-100")
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
    "--tell", action="store_true", help="print each event, with the wall clock of the world"
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
    left_out, may_be = (*arguments.without,), frozenset(kind.kinds)
    plan = Plan(int(arguments.seed), arguments.count, flag, clients, may_be, left_out)
    sys.exit(1 if shrink(plan) else 0)
now_s = time.perf_counter


def play(seed: int, outside: Outside | None = None) -> None:
    """Ends this process: what was killed must not run its last lines."""
    began_s = now_s()
    how = {"tells": arguments.tell, "outside": outside}
    try:
        result = run(seed, arguments.count, kind, clients, arguments.without, **how)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(1)
    took_s, world = now_s() - began_s, result.world
    print(
        f"seed {seed}: {result.events}, {result.passed_s:.0f} s in {took_s:.1f} s "
        f"({result.passed_s / took_s:.0f} times), {result.turns} turns, {world}",
        flush=True,
    )
    os._exit(0)


first, _, last = arguments.seed.partition("-")
if not last:
    play(int(first))
if kind in (World, Tasks, WithStandby):
    parser.error("threads and PostgreSQL are replaced in a process of its own: one seed at a time")
forked = prepared()
gc.freeze()
has_failed = False
for each in range(int(first), int(last) + 1):
    # Imports take longer than a short seed.
    if (child := os.fork()) == 0:
        play(each, forked)
    has_failed |= os.waitpid(child, 0)[1] != 0
os._exit(has_failed)
