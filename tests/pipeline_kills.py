"""Archive and replay while they and the broker are killed with SIGKILL; then everything is counted.

    python -m tests.pipeline_kills archive 2000000
    python -m tests.pipeline_kills archive 2000000 7 delta      a table in a directory, or iceberg
    python -m tests.pipeline_kills archive 2000000 7 store      a Delta table on a store, whose
                                                                answers fail; workers are killed
    python -m tests.pipeline_kills upsert 300000 7 delta        a table of last values, or iceberg
    python -m tests.pipeline_kills replay 2000000

The one rule: when something is killed follows from a printed seed, and nothing waits without a
limit.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from mqks.client.blocking import connect
from mqks.pipeline.archive import Archive
from mqks.pipeline.lake import Lake
from mqks.pipeline.objects import ICEBERG, Place, store
from mqks.pipeline.places import existing, lake_at, messages
from mqks.pipeline.session import session
from mqks.pipeline.sink import Publisher
from mqks.pipeline.table import delta
from mqks.pipeline.tables import EventTables
from mqks.pipeline.verify import Verification
from mqks.pipeline.wire import ServerAddress
from mqks.testing import BrokerProcess
from tests.conftest import SPARK_SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.pipeline.test_pipeline_store import Between

LIMIT_S = 900.0
EVENTS = ["page.view", "cart.add", "order.new"]
DRIVER_KILLS, BROKER_KILLS = 4, 2
KEYS = 10_000
"""Of a table of last values; of seven messages one deletes."""


class Counts(NamedTuple):
    """Of a lake: all three are the same when each message is there once."""

    rows: int
    ids: int
    offsets: int


def wait_for(what: str, predicate: Callable[[], object]) -> None:
    limit_s = time.monotonic() + LIMIT_S
    while not predicate():
        assert time.monotonic() < limit_s, f"waited in vain for {what}"
        time.sleep(0.01)


def publish(url: str, count: int, start: int = 0, *, upsert: bool = False) -> None:
    """Publish messages of these numbers, each until it is confirmed, and no more than once; with
    `upsert`, such as a table of last values needs."""
    events = [event.encode() for event in EVENTS]
    with Publisher(ServerAddress(url=url)) as publisher:
        for first in range(start, start + count, 10_000):
            numbers = range(first, min(first + 10_000, start + count))
            columns = (
                [b"m-%d" % n for n in numbers],
                [events[n % len(events)] for n in numbers],
                [value_of(n) if upsert else b"%0100d" % n for n in numbers],
                *([[b" --key=" + key_of(n) for n in numbers]] if upsert else ()),
            )
            publisher.publish(*(pa.array(column, pa.binary()) for column in columns))


def key_of(number: int) -> bytes:
    return b"k%d" % (number * number * 31 % KEYS + number % 7)


def value_of(number: int) -> bytes:
    return b"%0100d" % number if number % 7 else b""


def last_values(count: int) -> dict[str, bytes]:
    """Of so many messages."""
    last = {key_of(n).decode(): value_of(n) for n in range(count)}
    return {key: value for key, value in last.items() if value}


def subscribe(url: str, queue: str) -> None:
    with connect(url) as client:
        client.subscribe(queue, EVENTS)


class Job:
    """`mqks pipeline …` as a process group: the driver, its JVM and their Python workers.

    It runs in `local[2]`, unless the arguments name another master.
    """

    def __init__(
        self, log: Path, *arguments: str, master: Sequence[str] = ("--master", "local[2]")
    ) -> None:
        # What Java leaves in a temporary directory when it is killed goes away with the test.
        options = f"{SPARK_SETTINGS['spark.driver.extraJavaOptions']} -Djava.io.tmpdir={log.parent}"
        settings = SPARK_SETTINGS | {"spark.driver.extraJavaOptions": options}
        name, *rest = arguments
        command = [sys.executable, "-m", "mqks", "pipeline", name, *master, *conf(settings)]
        self.told: list[dict[str, Any]] = []
        self._log = log
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--json", *rest],
                env=os.environ | {"TMPDIR": str(log.parent)},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.endswith(b"\n"):  # Not the half of one that was being written.
                    self.told.append(json.loads(line))

    def is_running(self) -> bool:
        assert self.process.poll() is None, f"it ended:\n{self._log.read_text()}"
        return True

    def kill(self, everything: bool) -> None:
        """SIGKILL to all of it, or to the driver alone, whose JVM and workers live on a little."""
        if everything:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait(LIMIT_S)

    def succeed(self) -> list[dict[str, Any]]:
        code = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        assert code == 0, self._log.read_text()
        return self.told


def conf(settings: Mapping[str, str]) -> list[str]:
    """Settings of Spark as flags, for its commands and ours."""
    return [word for pair in settings.items() for word in ("--conf", "=".join(pair))]


def descendants(pid: int) -> Iterator[int]:
    """The processes that one has started, and those that they have."""
    parents = dict[int, int]()
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            stat = (place / "stat").read_text()
            parents[int(place.name)] = int(stat.rpartition(")")[2].split()[1])
    family = [pid]
    for each in family:
        children = [child for child, parent in parents.items() if parent == each]
        family += children
        yield from children


def workers(pid: int) -> set[int]:
    """The Python workers among the descendants of a process: forks of Spark's daemon."""
    daemons = {
        each
        for each in descendants(pid)
        if b"pyspark.daemon" in read_or_empty(f"/proc/{each}/cmdline")
    }
    return daemons & {*chain.from_iterable(map(descendants, daemons))}


def read_or_empty(place: str) -> bytes:
    with suppress(OSError):
        return Path(place).read_bytes()
    return b""


def kill_all(pids: Iterable[int]) -> int:
    """SIGKILL to processes; gives their number."""
    count = 0
    for each in pids:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
            count += 1
    return count


@contextmanager
def at_the_same_time(work: Callable[[], None]) -> Iterator[None]:
    """Something done in a thread, which has done it when the context ends well."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it goes on and on"
    assert not failures, failures


def archive_once(
    spark: "SparkSession",
    url: str,
    queue: str,
    lake: Place,
    format: str,
    kind: Callable[[Place, str], Lake] = lake_at,
) -> Place:
    """What is there, with nothing killed."""
    job = Archive(queue=queue, server=ServerAddress(url=url), once=True)
    with kind(lake, format) as opened:
        for _ in job.run(spark.sparkContext, opened, threading.Event()):
            pass
    return lake


def archive(
    spark: "SparkSession",
    root: Path,
    count: int,
    seed: int,
    format: str = "parquet",
    driver_kills: int = DRIVER_KILLS,
    lake: str | None = None,
    files: Path | None = None,
    proxy: "Between | None" = None,
    tables: bool = False,
    upsert: bool = False,
) -> Place:
    """Publish and archive so many messages while all is being killed; gives the lake, which is a
    directory unless it is given. `files` is where it has them, if elsewhere. `proxy` is before its
    store, and then the store fails, too, or workers die. With `tables`, each event has its own;
    with `upsert`, it has the last value of each key."""
    chance = random.Random(seed)
    log = root / "job.log"
    place: Place = root / "lake" if lake is None else lake
    with BrokerProcess(root / "mqks.db") as broker:
        subscribe(broker.url, "clicks")
        flags = ["--format", format, "--batch", str(count // 20), "--interval", "0.2"]
        flags += ["--roll", "0.5", *(["--table-by", "event"] if tables else ())]
        flags += ["--upsert", "ordering_key"] if upsert else []
        command = ["archive", "clicks", str(place), "--url", broker.url, *flags]
        with at_the_same_time(lambda: publish(broker.url, count, upsert=upsert)):
            for number in range(driver_kills):
                before = names(files or place)
                job = Job(log, *command)
                wait_for("a batch", partial(is_at_work, job, files or place, before))
                if number % 2 == 0:  # Every other time the broker dies first, in mid-batch.
                    broker.kill()
                    broker.start()
                if proxy is not None:
                    disturb(proxy, job, chance.choice(["swallow", "done", "down", "workers"]))
                time.sleep(chance.uniform(0, 0.5))  # So as to die anywhere in a batch.
                job.kill(everything=chance.random() < 0.5)
        kind = EventTables if tables else lake_at
        return archive_once(spark, broker.url, "clicks", place, format, kind)


def disturb(proxy: "Between", job: Job, fault: str) -> None:
    if fault == "workers":
        kill_all(workers(job.process.pid))
        return
    proxy.fault = fault
    if fault == "down":
        time.sleep(1)
        proxy.fault = ""


def names(place: Place) -> set[str]:
    """Of the files with messages."""
    if isinstance(place, str):
        found = [each["path"] for each in chain(*store(place).list())]
    else:
        found = [file.name for file in place.rglob("*")]
    return {name for name in found if re.search(r"\d{12}-\d{12}-", name)}


def is_at_work(job: Job, place: Place, before: set[str]) -> bool:
    return bool(job.told) or (job.is_running() and not names(place) <= before)


def replay(
    spark: "SparkSession", root: Path, count: int, seed: int, broker_kills: int = BROKER_KILLS
) -> Place:
    """Replay a lake into another broker, which is killed again and again, and so is the job but
    for the last time; gives the lake of what came there."""
    chance = random.Random(seed)
    lake, log, copy = root / "lake", root / "job.log", root / "copy"
    with BrokerProcess(root / "one.db") as broker:
        subscribe(broker.url, "clicks")
        publish(broker.url, count)
        archive_once(spark, broker.url, "clicks", lake, "parquet")
    with BrokerProcess(root / "two.db") as broker:
        subscribe(broker.url, "copy")
        command = ["replay", str(lake), "--url", broker.url]
        for number in range(broker_kills):
            job = Job(log, *command)
            wait_for("progress", lambda: job.told or not job.is_running())  # noqa: B023
            time.sleep(chance.uniform(0, 0.2))
            broker.kill()
            broker.start()
            if number < broker_kills - 1:
                job.kill(everything=True)
            else:
                job.succeed()
        return archive_once(spark, broker.url, "copy", copy, "parquet")


def counted(lake: Place) -> Counts:
    table = rows_of(lake, ["key", "offset"])
    distinct = [pc.count_distinct(table[name]).as_py() for name in ("key", "offset")]
    return Counts(table.num_rows, *distinct)


def seen(lake: Place) -> Any:
    """A table or a dataset, as pyarrow, or pyiceberg, sees it."""
    if str(lake).startswith(ICEBERG):
        from mqks.pipeline.iceberg import found  # here, since it reads the environment

        return found(str(lake)).scan().to_arrow()
    table = delta(lake)
    return table.to_pyarrow_dataset() if table else ds.dataset(lake, partitioning="hive")


def rows_of(lake: Place, columns: list[str]) -> Any:
    """It is as it was archived."""
    with existing(lake) as opened:
        verified = Verification(opened).run()
    rows = seen(lake)
    table = rows.to_table(columns=columns) if isinstance(rows, ds.Dataset) else rows
    assert (verified.messages, verified.differences) == (table.num_rows, []), verified
    return table


def counted_by_spark(spark: "SparkSession", lake: Place) -> Counts:
    from pyspark.sql import functions as F

    rows = messages(spark, lake)
    [counts] = rows.agg(F.count("*"), F.count_distinct("key"), F.count_distinct("offset")).collect()
    return Counts(*counts)


if __name__ == "__main__":
    works: dict[str, Callable[..., Place]] = {
        "archive": archive,
        "replay": replay,
        "upsert": partial(archive, upsert=True),
    }
    work, count = works[sys.argv[1]], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else random.randrange(1000)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as opened:
        told: dict[str, Any] = {}
        match sys.argv[4:]:
            case ["store"]:
                from tests.pipeline.test_pipeline_store import local_store

                proxy = opened.enter_context(local_store())
                told = {"lake": "s3://bucket/lake", "format": "delta", "proxy": proxy}
            case ["iceberg"]:
                files = Path(directory, "files")
                files.mkdir()
                os.environ["PYICEBERG_CATALOG__KILLS__URI"] = f"sqlite:///{directory}/catalog.db"
                os.environ["PYICEBERG_CATALOG__KILLS__WAREHOUSE"] = f"file://{files}"
                told = {"lake": "iceberg://kills/db.events", "format": "iceberg", "files": files}
            case [format]:
                told = {"format": format}
        spark = session("local[2]", **SPARK_SETTINGS)
        began_s = time.monotonic()
        print(f"seed {seed}")
        lake = work(spark, Path(directory), count, seed, **told)
        print(f"{count} messages, {time.monotonic() - began_s:.0f} s")
        if sys.argv[1] == "upsert":
            table = rows_of(lake, ["ordering_key", "value"])
            pairs = zip(table["ordering_key"].to_pylist(), table["value"].to_pylist(), strict=True)
            assert sorted(pairs) == sorted(last_values(count).items())
            print(f"{len(table)} keys, each with its last value")
        else:
            print("pyarrow:", counted(lake))
            print("Spark:  ", counted_by_spark(spark, lake))
        spark.stop()
