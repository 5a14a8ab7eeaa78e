"""Archive and replay while they and the broker are killed with SIGKILL; then everything is counted.

    python -m tests.pipeline_kills archive 2000000
    python -m tests.pipeline_kills replay 2000000

The one rule: what is killed is chosen by a printed seed, and nothing waits without a limit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from mqks.pipeline.sink import Publisher
from mqks.pipeline.wire import Server
from mqks.testing import BrokerProcess
from tests.conftest import SPARK_SETTINGS

LIMIT_S = 300.0
EVENTS = [b"page.view", b"cart.add", b"order.new"]


def wait_for(what: str, predicate: Callable[[], object]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not predicate():
        assert time.monotonic() < limit_s, f"waited in vain: {what}"
        time.sleep(0.01)


def columns(first: int, count: int) -> list[Any]:
    """Ids, events and data of some messages, by their numbers."""
    numbers = pa.array(range(first, first + count))
    ids = pc.binary_join_element_wise("m", numbers.cast(pa.string()), "-").cast(pa.binary())
    events = pa.array([EVENTS[n % len(EVENTS)] for n in range(first, first + count)], pa.binary())
    return [ids, events, pa.array([b"%0100d" % n for n in range(first, first + count)])]


def publish(url: str, count: int) -> None:
    """Publish messages, each until it is confirmed and no more than once."""
    with Publisher(Server(url=url)) as publisher:
        for first in range(0, count, 10_000):
            publisher.publish(*columns(first, min(10_000, count - first)))


def subscribe(url: str, queue: str, events: list[bytes]) -> None:
    from mqks.client.blocking import connect_blocking

    with connect_blocking(url) as client:
        client.subscribe(queue, [event.decode() for event in events])


class Job:
    """`mqks pipeline …` as a process group: the driver, its JVM and their Python workers."""

    def __init__(self, *arguments: str) -> None:
        conf = [word for pair in SPARK_SETTINGS.items() for word in ("--conf", "=".join(pair))]
        command = [sys.executable, "-m", "mqks", "pipeline", *arguments, "--master", "local[2]"]
        self.lines: list[dict[str, Any]] = []
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [*command, *conf, "--json"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.log,
            start_new_session=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self.lines.extend(map(json.loads, lines))

    def kill(self, everything: bool) -> None:
        """SIGKILL to the driver alone, whose JVM and workers may live on a little, or to all."""
        if everything:
            os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.kill()
        self.process.wait(LIMIT_S)

    def succeed(self) -> None:
        code = self.process.wait(LIMIT_S)
        self.log.seek(0)
        assert code == 0, self.log.read().decode(errors="replace")

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read().decode(errors="replace")


@contextmanager
def killed_now_and_then(broker: BrokerProcess, done: Callable[[], float]) -> Iterator[None]:
    """Kill the broker twice, when a third and when two thirds are done."""

    def kill() -> None:
        for part in (1 / 3, 2 / 3):
            wait_for("progress", lambda part=part: done() >= part)
            broker.kill()
            broker.start()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def archive(root: Path, count: int, seed: int, format: str = "parquet") -> dict[str, Any]:
    """Publish and archive `count` messages; the driver is killed six times, the broker twice."""
    chance = random.Random(seed)
    lake = root / "lake"
    staging = lake / "_mqks" / "staging"
    batch = str(max(1, count // 16))
    flags = ["--format", format, "--batch", batch, "--interval", "0.2"]
    messages, killed = 0, []
    with BrokerProcess(root / "mqks.db") as broker:
        subscribe(broker.url, "clicks", EVENTS)
        publishing = threading.Thread(target=publish, args=(broker.url, count), daemon=True)
        publishing.start()
        command = ["archive", "clicks", str(lake), "--url", broker.url, *flags]
        with killed_now_and_then(broker, lambda: len(killed) / 6):
            for number in range(6):
                job = Job(*command)
                in_batch = number % 2 == 0
                wait_for(
                    f"the archive to work: {job.told()}",
                    lambda job=job, in_batch=in_batch: (
                        job.process.poll() is not None
                        or job.lines
                        or (in_batch and staging.is_dir() and any(staging.iterdir()))
                    ),
                )
                assert job.process.poll() is None, job.told()
                time.sleep(chance.uniform(0, 0.4))  # Not in hope: to die anywhere in a batch.
                job.kill(everything=chance.random() < 0.5)
                messages += sum(line["messages"] for line in job.lines)
                killed.append(number)
        publishing.join(LIMIT_S)
        assert not publishing.is_alive()
        last = Job(*command, "--once")
        last.succeed()
        messages += sum(line["messages"] for line in last.lines)
    return {"kills": len(killed), "messages told by the jobs": messages}


def counted(lake: Path) -> tuple[int, int, int]:
    """Rows, distinct ids and distinct offsets of a lake, as pyarrow sees it."""
    table = ds.dataset(lake, partitioning="hive").to_table(columns=["key", "offset"])
    return (
        table.num_rows,
        pc.count_distinct(table["key"]).as_py(),
        pc.count_distinct(table["offset"]).as_py(),
    )


if __name__ == "__main__":
    work, count = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1000)
    with tempfile.TemporaryDirectory() as directory:
        began = time.monotonic()
        told = archive(Path(directory), count, seed)
        print(f"seed {seed}: {told} in {time.monotonic() - began:.0f} s")
        print("rows, ids, offsets:", counted(Path(directory, "lake")))
