"""`python -m tests.takeover 60 [--seed S]`: faults for so many seconds, then the verdict.

`600 --open-transaction` measures commits while a transaction is open.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path

from tests.chaos.__main__ import in_a_line
from tests.takeover import scenes
from tests.takeover.checker import faults
from tests.takeover.play import Play
from tests.takeover.without import SAFEGUARDS


def say(what: str) -> None:
    print(what, flush=True)


def open_transaction(seconds: float) -> int:
    """One transaction stays open, while a client publishes and another one consumes."""
    scene = partial(scenes.held_open, seconds=seconds, tell=lambda pace: say(str(pace)))
    found = faults(scenes.play(scene))
    for each in found:
        say(each)
    return bool(found)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.takeover", description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=60)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("--without", choices=SAFEGUARDS, default="", metavar="SAFEGUARD")
    parser.add_argument("--only", nargs="+", default=(), metavar="FAULT")
    parser.add_argument("--open-transaction", action="store_true")
    arguments = parser.parse_args(words)
    if arguments.open_transaction:
        return open_transaction(arguments.seconds)
    say(f"seed {arguments.seed}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # What was started is stopped then.
    play = Play(
        arguments.seed,
        without=arguments.without,
        only=arguments.only,
        say=say,
    )
    failed: BaseException | None = None
    try:
        play.run(arguments.seconds)
    except Exception as failure:
        failed = failure
        say(in_a_line(failure))
    found = faults(play.history)
    for each in found:
        say(each)
    counts = Counter(type(event).__name__ for event in play.history)
    say(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    if failed or found:
        kept = Path(tempfile.mkdtemp(prefix="mqks-takeover-")) / "history"
        kept.write_text("\n".join(map(repr, play.history)))
        say(f"seed {arguments.seed}; kept: {kept}")
        if failed:
            raise failed
        return 1
    say(f"{play.counts.total()} faults, and nothing was lost, doubled or out of order")
    return 0


if __name__ == "__main__":
    sys.exit(main())
