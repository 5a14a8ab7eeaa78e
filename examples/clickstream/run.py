"""A click-stream from end to end: broker, archive, report, replay; and everything counted again.

    pip install 'mqks[server,spark]'
    python examples/clickstream/run.py                      # 2,000,000 events, a minute or two
    python examples/clickstream/run.py --count 20000 --keep /tmp/clickstream

It starts a broker of its own on a free port and works in a temporary directory, or in that of
--keep, where the lake and the report stay. It ends with 1 when a single event is missing, comes
twice or has changed.
"""

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
from clicks import EVENTS, clicks

from mqks import blocking
from mqks.pipeline.sink import Publisher
from mqks.pipeline.wire import ServerAddress
from mqks.testing import BrokerProcess

Sums = dict[str, tuple[int, int]]
"""Of each event: how many, and the sum of their payloads' checksums, in whatever order."""


def publish(url: str, count: int, seed: int) -> Sums:
    counts, sums, number = Counter[str](), Counter[str](), 0
    events = clicks(count, seed)
    with Publisher(ServerAddress(url=url)) as publisher:
        while block := list(islice(events, 50_000)):
            for event, value in block:
                counts[event] += 1
                sums[event] += zlib.crc32(value)
            ids = [b"click-%d" % n for n in range(number, number + len(block))]
            number += len(block)
            names, values = [event.encode() for event, _ in block], [value for _, value in block]
            publisher.publish(*(pa.array(column, pa.binary()) for column in (ids, names, values)))
    return {event: (counts[event], sums[event]) for event in counts}


def summed(lake: Path) -> Sums:
    counts, sums = Counter[str](), Counter[str]()
    dataset = ds.dataset(lake, partitioning="hive")
    for batch in dataset.to_batches(columns=["topic", "value"]):
        for event, value in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            counts[event] += 1
            sums[event] += zlib.crc32(value)
    return {event: (counts[event], sums[event]) for event in counts}


def mqks(*words: object) -> float:
    """Run a command of the pipeline; gives its seconds."""
    command = [sys.executable, "-m", "mqks", "pipeline", *map(str, words)]
    print("\n$", shlex.join(["mqks", *command[3:]]), flush=True)
    began_s = time.monotonic()
    subprocess.run(command, check=True, timeout=600)
    return time.monotonic() - began_s


def end_to_end(root: Path, count: int, seed: int, master: str) -> bool:
    lake, copy = root / "lake", root / "copy"
    with BrokerProcess(root / "mqks.db") as broker:
        with blocking.connect(broker.url) as client:
            client.subscribe("clicks", EVENTS)
        began_s = time.monotonic()
        published = publish(broker.url, count, seed)
        seconds = {"made, published and confirmed": time.monotonic() - began_s}
        at, spark = ["--url", broker.url], ["--master", master]
        seconds["archived"] = mqks("archive", "clicks", lake, "--once", *at, *spark)
        seconds["reported"] = mqks("report", lake, "--html", root / "report.html", *spark)
        with blocking.connect(broker.url) as client:
            client.delete_queue("clicks")
            client.subscribe("copy", EVENTS)
        seconds["replayed"] = mqks("replay", lake, *at, *spark)
        seconds["archived again"] = mqks("archive", "copy", copy, "--once", *at, *spark)
    print(f"\n{count:,} events, seed {seed}; seconds from the start of a command to its end:")
    for what, passed_s in seconds.items():
        print(f"  {what:<30} {passed_s:6.1f} s  {count / passed_s:>10,.0f} events/s")
    is_whole = published == summed(lake) == summed(copy)
    print("every event is there once, unchanged" if is_whole else "EVENTS ARE MISSING OR DOUBLED")
    return is_whole


def main() -> int:
    options = argparse.ArgumentParser(description="A click-stream from end to end.")
    options.add_argument("--count", type=int, default=2_000_000)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--master", default="local[2]", help="Spark's master")
    options.add_argument("--keep", type=Path, help="a new directory for everything that is made")
    given = options.parse_args()
    if given.keep is not None:
        given.keep.mkdir(parents=True)
        return not end_to_end(given.keep, given.count, given.seed, given.master)
    with tempfile.TemporaryDirectory() as directory:
        return not end_to_end(Path(directory), given.count, given.seed, given.master)


if __name__ == "__main__":
    sys.exit(main())
