"""`mqks export` and `mqks import` as users start them.

    python -m benchmarks.transfer [--count N] [--rounds N]

The one rule: what was imported is exported again, and is the same.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.pipeline import EVENTS, fill, messages
from mqks.client.blocking import connect
from mqks.testing import BrokerProcess


def timed(*words: str, to: Path | None = None) -> float:
    """Run a command of MQKS, whose output may be put into a file; gives the seconds."""
    began_s = time.perf_counter()
    with open(to, "wb") if to else sys.stderr.buffer as file:
        subprocess.run([sys.executable, "-m", "mqks", *words], check=True, stdout=file)
    return time.perf_counter() - began_s


def data(export: Path) -> list[str]:
    """The lines of an export, without the times, which an import makes anew."""
    return [line.partition('"id": ')[2] for line in export.read_text().splitlines()[1:]]


def measured(directory: Path, count: int) -> str:
    source, target = directory / "source.db", directory / "target.db"
    before, after = directory / "before.jsonl", directory / "after.jsonl"
    with BrokerProcess(source) as broker, BrokerProcess(target) as other:
        with connect(broker.url) as client:
            client.subscribe("bench", EVENTS)
        fill(broker.url, messages(count, keyed=False))
        exported_s = timed("export", "--messages", "--url", broker.url, to=before)
        imported_s = timed("import", str(before), "--url", other.url, to=Path("/dev/null"))
        timed("export", "--messages", "--url", other.url, to=after)
    if data(before) != data(after):
        raise RuntimeError("what was imported is not what was exported")
    return f"{count:,} messages: export {exported_s:.1f} s, import {imported_s:.1f} s"


def main() -> None:
    options = argparse.ArgumentParser(description="How long exports and imports take.")
    options.add_argument("--count", type=int, default=1_000_000)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    for _ in range(given.rounds):
        with tempfile.TemporaryDirectory() as directory:
            print(measured(Path(directory), given.count), flush=True)


if __name__ == "__main__":
    main()
