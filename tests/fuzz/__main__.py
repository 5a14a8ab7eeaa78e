"""The command line of the fuzzer; `python -m tests.fuzz --help` tells it."""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic, process_time

from tests.fuzz import client, expressions, world
from tests.fuzz.long_lines import LongLines
from tests.fuzz.mass import Mass
from tests.fuzz.reduce import kind_of, reduced
from tests.fuzz.steps import CORPUS, Steps, load, read, written

BROKER, SEEDS = CORPUS / "broker.txt", CORPUS / "seeds.txt"
TOLD_EVERY_LINES = 500_000
KINDS_MAX = 20
CLIENT_SHARE, EXPRESSION_SHARE, LONG_SHARE = 20, 2000, 10_000
"""One line in so many goes to a client; one expression, and one line of a mebibyte, come for so
many lines."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("lines", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=Random().randrange(10**6))
    parser.add_argument("--first", type=int, default=0, help="number of the first episode")
    parser.add_argument("--long", type=float, help="long lines for so many seconds of CPU instead")
    parser.add_argument("--replay", type=Path, help="run the steps in this file instead")
    options = parser.parse_args()
    logging.disable()
    print("seed", options.seed, flush=True)
    if options.replay:
        steps = read(options.replay.read_text())
        (client if steps[0].verb in ("consumer", "requests") else world).play(steps)
        return 0
    if options.long:
        return _long(options.long, options.seed)
    return _fuzz(options)


def _long(seconds: float, seed: int) -> int:
    long, findings = LongLines(seed), Findings()
    while process_time() < seconds:
        long.one()
        findings.tell(long.found)
        long.found.clear()
    print(f"{long.count} long lines; {long.told()}")
    return findings.count()


def _fuzz(options: argparse.Namespace) -> int:
    mass = Mass([*load(BROKER), *load(SEEDS)], options.seed)
    clients = client.ClientMass(client.seeds(), options.seed)
    looks = expressions.Expressions(options.seed)
    long = LongLines(options.seed)
    findings = Findings()
    start_s, start_cpu_s, told, number = monotonic(), process_time(), 0, options.first
    with suppress(KeyboardInterrupt):
        while mass.lines < options.lines and len(findings.kinds) < KINDS_MAX:
            mass.episode(number)
            number += 1
            while clients.lines * CLIENT_SHARE < mass.lines:
                clients.episode(number + clients.lines)
            while looks.count * EXPRESSION_SHARE < mass.lines:
                looks.one()
            while long.count * LONG_SHARE < mass.lines:
                long.one()
            for found in (mass.found, clients.found, looks.found, long.found):
                findings.tell(found)
                found.clear()
            if mass.lines - told >= TOLD_EVERY_LINES:
                told = mass.lines
                print(f"{told} lines", flush=True)
    print(
        f"{mass.lines} lines ({mass.mutated} of them unlike), {clients.lines} lines to clients, "
        f"{looks.count} expressions and {long.count} long lines in {monotonic() - start_s:.0f} s, "
        f"{process_time() - start_cpu_s:.0f} s of them CPU; "
        f"the slowest call took {mass.slowest_s * 1000:.0f} ms, "
        f"the slowest expression {looks.slowest_s * 1000:.0f} ms; {long.told()}",
        flush=True,
    )
    return findings.count()


class Findings:
    """Each kind is told once, reduced, and put into a file to replay."""

    def __init__(self) -> None:
        self.kinds: set[tuple[str, ...]] = set()

    def tell(self, found: Iterable[tuple[Steps, Exception]]) -> None:
        for steps, failure in found:
            kind = kind_of(failure)
            if kind in self.kinds:
                continue
            self.kinds.add(kind)
            print(f"FOUND {type(failure).__name__}: {str(failure)[:1000]}", flush=True)
            if steps and steps[0].verb not in ("consumer", "requests"):
                steps = reduced(steps, kind)
            if steps:
                path = Path(tempfile.mkstemp(prefix="finding-", suffix=".txt")[1])
                path.write_text(written(steps) + "\n")
                print(f"      {path}: {written(steps)[:2000]}", flush=True)

    def count(self) -> int:
        print(f"{len(self.kinds)} kinds of findings")
        return int(bool(self.kinds))


if __name__ == "__main__":
    sys.exit(main())
