"""`python -m tests.chaos 1000 [--seed S] [--texts]`: so many lives of servers on one database."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.play import Chaos, Figures
from tests.chaos.server import Processes


def in_a_line(failure: BaseException) -> str:
    """Type and text: printed before the traceback, of which a log may hold only the begin."""
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return " ".join(f"{type(failure).__name__}: {failure}".split())


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("lives", type=int)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--texts", action="store_true", help="all texts are in files")
    arguments = parser.parse_args(words)
    directory = Path(tempfile.mkdtemp(prefix="mqks-chaos-"))
    print(f"seed {arguments.seed}, in {directory}", flush=True)
    asyncio.run(lives(directory, arguments.seed, arguments.lives, texts=arguments.texts))
    print("all is drained", flush=True)
    shutil.rmtree(directory)
    return 0


async def lives(
    directory: Path, seed: int, count: int, *, seconds: float = 1e9, texts: bool = False
) -> Figures:
    """So many lives of real servers, or so long. Raises Violation."""
    begin_s, life = time.monotonic(), 0
    servers = Processes(directory / "mqks.db")
    chaos = Chaos(directory, servers, seed, texts=texts)
    try:
        for life in range(count):
            if time.monotonic() > begin_s + seconds:
                break
            await chaos.live(life)
            if life % 10 == 9 or life == count - 1:
                print(f"{time.monotonic() - begin_s:7.1f} s: {chaos.figures}", flush=True)
        await chaos.end(count)
    except BaseException as failure:
        print(in_a_line(failure))
        print(f"seed {seed}, life {life}; kept: {directory}", flush=True)
        raise
    finally:
        servers.close()
    return chaos.figures


if __name__ == "__main__":
    sys.exit(main())
