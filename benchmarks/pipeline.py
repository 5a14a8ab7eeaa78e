"""How fast a queue gets into a lake: `python -m benchmarks.pipeline [--count N] [WORK ...]`.

    archive     mqks pipeline archive as it is: tasks read and write Parquet themselves
    parsed      the same with a schema: rows pass through Spark's expressions
    spark       Spark's own reader and Parquet writer over format("mqks"), for comparison
    batches     batches of 1,000 messages, one after the other, beside Spark's own rate source
    publishing  what publishing pays for an archive beside it, as benchmarks/beside.py tells

100-byte payloads of random text under three events; broker, JVM and Python workers share the
machine. Each work is done `--rounds` times in one session, so that the first round shows what
starting costs; `publishing` comes last, on its own.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from benchmarks import beside
from mqks.client.blocking import connect_blocking
from mqks.pipeline.archive import Archive
from mqks.pipeline.lake import LAKES
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.session import session
from mqks.pipeline.wire import Server, connected
from mqks.testing import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENTS = ["page.view", "cart.add", "order.new"]
PAYLOADS = 20_000
"""Different ones, so many that compression finds little beyond what hexadecimal text has."""


class Bench:
    def __init__(self, root: Path, url: str, spark: SparkSession, count: int) -> None:
        self.root, self.url, self.spark, self.count = root, url, spark, count
        chance = random.Random(1)
        self._payloads = [
            b'{"n":%d,"text":"%b"}' % (10**9 + n, chance.randbytes(40).hex().encode())
            for n in range(PAYLOADS)
        ]
        self._lakes = 0

    def fill(self, count: int) -> None:
        """Publish messages into the queue, which is made anew, and wait until they are durable."""
        with connect_blocking(self.url) as client:
            client.delete_queue("bench", if_exists=True)
            client.subscribe("bench", EVENTS)
        events, payloads = [event.encode() for event in EVENTS], self._payloads
        wire = connected(Server(url=self.url))
        for first in range(0, count, 10_000):
            numbers = range(first, min(count, first + 10_000))
            lines = [
                b"m-%d publish %b %b\n" % (n, events[n % 3], payloads[n * 7919 % PAYLOADS])
                for n in numbers
            ]
            lines[-1] = lines[-1].replace(b"publish", b"publish --confirm", 1)
            wire.send(b"".join(lines))
            wire.line()
        wire.close()

    def lake(self) -> Path:
        self._lakes += 1
        return self.root / f"lake-{self._lakes}"

    def archive(self, **options: Any) -> list[float]:
        """Drain the queue; gives the seconds of each batch."""
        job = Archive(queue="bench", server=Server(url=self.url), once=True, **options)
        with LAKES["parquet"](self.lake()) as lake:
            return [progress.seconds for progress in job.run(self.spark, lake, Event())]


def archive(bench: Bench) -> str:
    bench.fill(bench.count)
    return _rate(bench, lambda: bench.archive())


def parsed(bench: Bench) -> str:
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL("n bigint, text string")
    bench.fill(bench.count)
    return _rate(bench, lambda: bench.archive(schema=schema))


def spark(bench: Bench) -> str:
    from pyspark.sql import functions as F

    bench.fill(bench.count)
    with QueueReader(bench.url, "bench") as reader:
        log = reader.range()

    def write() -> None:
        for start in range(log.first, log.next, 1_000_000):
            options = {"queue": "bench", "url": bench.url, "minPartitions": "2"}
            options["startingOffsets"] = str(start)
            options["endingOffsets"] = str(min(log.next, start + 1_000_000))
            rows = bench.spark.read.format("mqks").options(**options).load()
            rows = rows.select("key", "value", "topic", "offset", "timestamp")
            dated = rows.withColumn("date", F.to_date("timestamp")).withColumn("event", rows.topic)
            dated.write.partitionBy("date", "event").mode("append").option(
                "compression", "zstd"
            ).parquet(str(bench.root / "spark"))

    return _rate(bench, write)


def batches(bench: Bench) -> str:
    bench.fill(40_000)
    own = bench.archive(batch_messages=1_000)
    stream = (
        bench.spark.readStream.format("rate-micro-batch")
        .option("rowsPerBatch", 1_000)
        .load()
        .writeStream.format("parquet")
        .option("path", str(bench.lake()))
        .option("checkpointLocation", str(bench.lake()))
        .start()
    )
    while stream.lastProgress is None or stream.lastProgress.batchId < 40:
        time.sleep(0.1)
    progress = stream.recentProgress
    stream.stop()
    theirs = statistics.median(p.durationMs["triggerExecution"] for p in progress[10:])
    return f"{statistics.median(own[10:]) * 1000:.0f} ms, rate source {theirs:.0f} ms (medians)"


def _rate(bench: Bench, work: Callable[[], object]) -> str:
    began_s = time.perf_counter()
    work()
    seconds = time.perf_counter() - began_s
    return f"{bench.count / seconds:,.0f} messages/s"


PUBLISHING = "publishing"
WORKS = {work.__name__: work for work in (archive, parsed, spark, batches)}


def main(arguments: list[str] | None = None) -> None:
    options = argparse.ArgumentParser(description="How fast a queue gets into a lake.")
    names = [*WORKS, PUBLISHING]
    options.add_argument("works", nargs="*", choices=[[], *names], help="by default all of them")
    options.add_argument("--count", type=int, default=2_000_000)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=10, help="of a paced turn of publishing")
    options.add_argument(
        "--lakes", type=Path, help="where the lake of publishing goes, such as /dev/shm"
    )
    given = options.parse_args(arguments)
    works = given.works or names
    with (
        tempfile.TemporaryDirectory() as directory,
        tempfile.TemporaryDirectory(dir=given.lakes) as lakes,
    ):
        if in_session := [name for name in works if name != PUBLISHING]:
            run(Path(directory), in_session, given.count, given.rounds)
        if PUBLISHING in works:
            beside.compare(Path(directory), Path(lakes, "lake"), given.seconds, given.rounds)


def run(root: Path, works: list[str], count: int, rounds: int) -> None:
    with BrokerProcess(root / "mqks.db") as broker:
        spark = session("local[2]")
        bench = Bench(root, broker.url, spark, count)
        for number in range(rounds):
            for name in works:
                print(f"round {number + 1}: {name:<8} {WORKS[name](bench)}", flush=True)
        spark.stop()


if __name__ == "__main__":
    main()
