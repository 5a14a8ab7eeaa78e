"""What `mqks follow` leaves of the rate of a publisher at full speed.

    python -m benchmarks.follow [--count N] [--pairs N]

The one rule: each pair is one after the other, with the follower at work and stopped; at the end
its copy is verified.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from signal import SIGCONT, SIGSTOP, SIGTERM
from statistics import median

from benchmarks.pipeline import EVENTS, fill, messages
from mqks.client.blocking import connect
from mqks.testing import BrokerProcess

PAUSE_S = 2.0
"""After each round: the follower has copied what came."""


def measured(directory: Path, chunks: list[bytes], pairs: int) -> list[float]:
    """The rates of each pair, as the ratio of that beside the follower to the other."""
    db, copy, ratios = directory / "mqks.db", str(directory / "copy"), list[float]()
    mqks = sys.executable, "-m", "mqks"
    with BrokerProcess(db) as broker, connect(broker.url) as client:
        client.subscribe("bench", EVENTS)
        with subprocess.Popen([*mqks, "follow", copy, "--db", str(db)]) as follower:
            fill(broker.url, chunks)  # Both have warmed up.
            time.sleep(3 * PAUSE_S)
            for _ in range(pairs):
                seconds = list[float]()
                for before in (SIGCONT, SIGSTOP):
                    os.kill(follower.pid, before)
                    seconds.append(fill(broker.url, chunks))
                    os.kill(follower.pid, SIGCONT)
                    client.purge("bench")
                    time.sleep(PAUSE_S)
                ratios.append(seconds[1] / seconds[0])
            follower.send_signal(SIGTERM)
        subprocess.run([*mqks, "verify", copy], check=True)
    return ratios


def main() -> None:
    options = argparse.ArgumentParser(description="What a follower costs a publisher.")
    options.add_argument("--count", type=int, default=200_000, help="messages of a round")
    options.add_argument("--pairs", type=int, default=8)
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        chunks = messages(given.count, keyed=False)
        ratios = measured(Path(directory), chunks, given.pairs)
    told = ", ".join(f"{ratio:.2f}" for ratio in sorted(ratios))
    print(f"beside the follower: {told}; median {median(ratios):.2f}")


if __name__ == "__main__":
    main()
