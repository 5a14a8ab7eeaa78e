"""`python -m tests.chaos 1000 [--seed S]`: so many lives of servers on one database."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.play import Chaos


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("lives", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="mqks-chaos-"))
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    chaos, begin = Chaos(directory, arguments.seed), time.monotonic()
    for life in range(arguments.lives):
        try:
            chaos.live(life)
        except BaseException:
            print(f"seed {arguments.seed}, life {life}; kept: {directory}", flush=True)
            raise
        if life % 10 == 9 or life == arguments.lives - 1:
            figures = chaos.figures
            counts = ", ".join(f"{number:,} {what}" for what, number in figures.counts.items())
            print(
                f"{time.monotonic() - begin:7.1f} s: {figures.lives} lives, "
                f"{figures.killed} killed, {figures.stopped} stopped: {counts}",
                flush=True,
            )
    chaos.end(arguments.lives)
    print("all is drained", flush=True)
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
