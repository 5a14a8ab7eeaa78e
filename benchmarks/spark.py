"""`python -m benchmarks.spark`: how fast Spark reads a queue, and what a batch of a stream costs.

The broker is a process of its own; Spark has `local[2]`. The first read into Parquet warms Java up
and is told all the same: that is what a short job gets. The cost of a batch is the median time of
a trigger that reads 1000 rows into nothing, next to Spark's own source rate-micro-batch.

The one rule: every run is checked to have read every message.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import mqks
from mqks.pipeline.reader import QueueReader
from mqks.pipeline.session import session
from mqks.testing import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

QUEUE = "q"
EVENTS = [f"clicks.{number}" for number in range(7)]
DATA_BYTES, CONTENTS = 100, 5000
BATCH_ROWS = 1000
WAIT_S = 300.0


def publish(url: str, count: int) -> None:
    contents = [f"{n:08x}".ljust(DATA_BYTES, "x") for n in range(CONTENTS)]
    with mqks.connect_blocking(url) as client:
        client.subscribe(QUEUE, EVENTS)
        client.publish_many(
            ((EVENTS[n % len(EVENTS)], contents[n % CONTENTS]) for n in range(count)),
            timeout_s=WAIT_S,
        )


def tell(name: str, count: int, since_s: float) -> None:
    print(f"{name:32} {count / (time.perf_counter() - since_s):12,.0f} rows/s", flush=True)


def reader_alone(url: str, count: int) -> None:
    with QueueReader(url, QUEUE) as log:
        there = log.range()
        since_s = time.perf_counter()
        rows = sum(batch.num_rows for batch in log.read(there.first, there.next))
        assert rows == count
        tell("reader alone", count, since_s)


def into_parquet(spark: "SparkSession", url: str, count: int, out: Path) -> None:
    for name in ("into Parquet", "again", "once more"):
        since_s = time.perf_counter()
        frame = spark.read.format("mqks").option("url", url).option("queue", QUEUE).load()
        frame.write.mode("overwrite").parquet(str(out))
        tell(name, count, since_s)
        assert spark.read.parquet(str(out)).count() == count


def trigger_ms(frame: "DataFrame", batches: int, checkpoint: Path) -> float:
    """Milliseconds of a trigger, once the first few have warmed Java up."""
    writer = frame.writeStream.format("noop").option("checkpointLocation", str(checkpoint))
    query = writer.trigger(processingTime="0 seconds").start()
    limit_s = time.monotonic() + WAIT_S
    try:
        while True:
            steps = [step for step in query.recentProgress if step["numInputRows"]]
            if len(steps) >= batches:
                warm = steps[batches // 4 :]
                return statistics.median(
                    float(step["durationMs"]["triggerExecution"]) for step in warm
                )
            assert query.isActive, "the query ended"
            assert time.monotonic() < limit_s, "the query stands still"
            time.sleep(0.1)
    finally:
        query.stop()


def overhead(spark: "SparkSession", url: str, batches: int, directory: Path) -> None:
    rate = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", BATCH_ROWS).load()
    queue = spark.readStream.format("mqks").option("url", url).option("queue", QUEUE)
    queue = queue.option("startingOffsets", "earliest").option("maxOffsetsPerTrigger", BATCH_ROWS)
    for name, frame in (("rate", rate), ("mqks", queue.load())):
        took_ms = trigger_ms(frame, batches, directory / name)
        print(f"{f'a batch of {BATCH_ROWS}, {name}':32} {took_ms:12,.0f} ms", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2_000_000, help="messages")
    parser.add_argument("--batches", type=int, default=40, help="of the stream")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with BrokerProcess(directory / "mqks.db") as broker:
            publish(broker.url, chosen.count)
            reader_alone(broker.url, chosen.count)
            spark = session("local[2]")
            into_parquet(spark, broker.url, chosen.count, directory / "out")
            overhead(spark, broker.url, chosen.batches, directory)
            spark.stop()


if __name__ == "__main__":
    main()
