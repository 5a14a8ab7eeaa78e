"""Archives into lakes of all kinds while everything dies; then each message is looked for.

    python -m tests.pipeline_trial 200 7             at least so many kills and faults, and the seed
    python -m tests.pipeline_trial 67 7 iceberg      into one kind: parquet, delta, iceberg

Three queues get messages with attributes, priorities and keys; some are delayed, some do not fit
the schema. An archive of all three moves them into files, then one into a Delta table on a store,
then one into an Iceberg table of a catalog; a proxy is before the store and the catalog. Meanwhile
the broker, the driver, its JVM, its Python workers and the proxies are killed, and answers to
commits are lost. At the end `verify` and DuckDB find what was confirmed, each message once, as it
was sent.

The one rule: what is done follows from the printed seed, and nothing waits without a limit.
"""

import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa
from pyiceberg.utils.config import Config

from mqks.client.blocking import connect
from mqks.pipeline.objects import Place
from mqks.pipeline.places import existing
from mqks.pipeline.sink import Publisher
from mqks.pipeline.verify import Verification, compared
from mqks.pipeline.wire import ServerAddress
from mqks.testing import BrokerProcess
from tests.kit.rest_catalog import TOKEN
from tests.pipeline.test_pipeline_store import Between, local_store
from tests.pipeline_kills import (
    EVENTS,
    LIMIT_S,
    Job,
    at_the_same_time,
    descendants,
    kill_all,
    seen,
    wait_for,
    workers,
)

QUEUES = {event: f"trial.{event}" for event in EVENTS}
CHUNK = 500
"""Messages that are published at a time."""
FAULTS_EACH = 5
"""Of a driver before it is killed."""
DELAY_S = 3


class Message(NamedTuple):
    queue: str
    event: str
    value: bytes
    attribute: str
    priority: int
    key: str
    fits: bool


def message(number: int) -> Message:
    event, fits = EVENTS[number % len(EVENTS)], number % 50 != 0
    value = b'{"n": %d, "pad": "%060d"}' % (number, number) if fits else b'{"n": "%d"}' % number
    return Message(
        QUEUES[event], event, value, f"é {number}", number % 7 - 3, f"k{number % 97}", fits
    )


def flags(number: int, one: Message) -> bytes:
    delay = f" --delay={number % DELAY_S + 1}" if number % 10 == 0 else ""
    return (
        f" --meta=trace=%C3%A9%20{number} --priority={one.priority} --key={one.key}{delay}".encode()
    )


class Publishing:
    """Publishes until it `ends`; `count` messages are confirmed then."""

    def __init__(self, url: str) -> None:
        self.count, self.ends, self._url = 0, threading.Event(), url

    def run(self) -> None:
        with Publisher(ServerAddress(url=self._url)) as publisher:
            while not self.ends.wait(0.5):
                numbers = range(self.count, self.count + CHUNK)
                sent = [message(n) for n in numbers]
                columns = (
                    [b"m-%d" % n for n in numbers],
                    [one.event.encode() for one in sent],
                    [one.value for one in sent],
                    [flags(n, one) for n, one in zip(numbers, sent, strict=True)],
                )
                publisher.publish(*(pa.array(column, pa.binary()) for column in columns))
                self.count += CHUNK


class Trial:
    """Of one lake; `proxies` are before what it is on."""

    def __init__(self, root: Path, lake: Place, bad: Place, format: str, *proxies: Between) -> None:
        self.lake, self.bad, self.proxies = lake, bad, proxies
        self._root, self.format = root, format
        self.done: Counter[str] = Counter()

    def run(self, kills: int, chance: random.Random) -> None:
        with BrokerProcess(self._root / f"{self.format}.db") as broker:
            with connect(broker.url) as client:
                for event, queue in QUEUES.items():
                    client.subscribe(queue, [event])
            publishing = Publishing(broker.url)
            with at_the_same_time(publishing.run):
                while self.done.total() < kills:
                    self._kill(chance, broker)
                publishing.ends.set()
            time.sleep(DELAY_S + 1)
            self._job(broker, "--once").succeed()
            self._check(publishing.count, broker.url)

    def _kill(self, chance: random.Random, broker: BrokerProcess) -> None:
        """A job works, has some faults, and is killed."""
        job = self._job(broker)
        wait_for("a batch", lambda: job.told or not job.is_running())
        for _ in range(chance.randrange(FAULTS_EACH)):
            time.sleep(chance.uniform(0, 1))
            self._fault(chance, broker, job)
        time.sleep(chance.uniform(0, 1))
        which = chance.choice(["driver", "driver with all of it", "JVM"])
        if which == "JVM":
            kill_all(pid for pid in descendants(job.process.pid) if is_java(pid))
            assert job.process.wait(LIMIT_S) != 0
        job.kill(everything=which != "driver")
        self.done[which] += 1

    def _job(self, broker: BrokerProcess, *more: str) -> Job:
        options = ["--format", self.format, "--url", broker.url, "--interval", "0.2"]
        options += ["--roll", "2", "--batch", "10000", "--schema", "n bigint, pad string"]
        places = str(self.lake), "--bad-rows", str(self.bad)
        return Job(self._root / "job.log", "archive", "trial.**", *places, *options, *more)

    def _fault(self, chance: random.Random, broker: BrokerProcess, job: Job) -> None:
        faults = ["broker", "workers"]
        faults += ["proxy", "no answers", "swallow", "done"] if self.proxies else []
        match fault := chance.choice(faults):
            case "broker":
                broker.kill()
                broker.start()
            case "workers":
                if not kill_all(workers(job.process.pid)):
                    return
            case "proxy":
                proxy = chance.choice(self.proxies)
                proxy.stop()
                time.sleep(chance.uniform(0, 3))
                proxy.start()
            case "no answers":
                proxy = chance.choice(self.proxies)
                proxy.fault = "down"
                time.sleep(chance.uniform(0, 3))
                proxy.fault = ""
            case _:
                chance.choice(self.proxies).fault = fault
        self.done[fault] += 1

    def _check(self, count: int, url: str) -> None:
        """All messages are in one of the two, as they were sent."""
        sent, seen = [message(n) for n in range(count)], Counter[int]()
        queues: set[tuple[str, str]] = set()
        for place, fits in ((self.lake, True), (self.bad, False)):
            with existing(place) as opened:
                verification = Verification(opened)
                verified = verification.run()
                queues |= verification.queues
            rows = self._rows(place)
            assert (verified.messages, verified.differences) == (len(rows), []), verified
            for key, *row in rows:
                number = int(key.removeprefix("m-"))
                seen[number] += 1
                assert sent[number] == (*row, fits), (number, row)
        assert (len(seen), seen.total()) == (count, count)
        server = ServerAddress(url=url)
        assert not (told := compared(self.lake, queues, server, self.bad)).differences, told
        print(
            f"{self.lake}: {count} messages, {self.done.total()} times: {dict(self.done)}",
            flush=True,
        )

    def _rows(self, place: Place) -> list[tuple[Any, ...]]:
        """Those that DuckDB finds."""
        with duckdb.connect() as db:
            db.register("lake", seen(place))
            told = "decode(key), queue, topic, value, headers['trace'], priority, ordering_key"
            return db.sql(f"select {told} from lake").fetchall()


def is_java(pid: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/exe").endswith("java")
    except OSError:
        return False


@contextmanager
def rest_catalog(root: Path, warehouse: str) -> Iterator[Between]:
    """A catalog named `trial` with its files on the store, behind a proxy."""
    command = [sys.executable, "-m", "tests.kit.rest_catalog", str(root), warehouse]
    with ExitStack() as opened:
        server = opened.enter_context(Popen(command, stdout=PIPE, text=True))
        opened.callback(server.kill)
        assert server.stdout is not None
        proxy = Between(int(server.stdout.readline()))
        opened.callback(proxy.stop)
        os.environ["PYICEBERG_CATALOG__TRIAL__URI"] = f"http://127.0.0.1:{proxy.port}"
        os.environ["PYICEBERG_CATALOG__TRIAL__TOKEN"] = TOKEN
        vars(sys.modules["pyiceberg.catalog"])["_ENV_CONFIG"] = Config()
        yield proxy


def main(kills: int, seed: int, kind: str | None = None) -> None:
    chance, began_s = random.Random(seed), time.monotonic()
    print(f"seed {seed}", flush=True)
    done: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as directory, local_store() as store:
        root = Path(directory)
        with rest_catalog(root, "s3://bucket/warehouse") as catalog:
            objects, tables = "s3://bucket/delta", "iceberg://trial/db"
            trials = [
                Trial(root, root / "files", root / "files-bad", "parquet"),
                Trial(root, objects, f"{objects}-bad", "delta", store),
                Trial(root, f"{tables}.t", f"{tables}.bad", "iceberg", store, catalog),
            ]
            trials = [trial for trial in trials if kind in (None, trial.format)]
            for number, trial in enumerate(trials):
                parts = [kills * some // len(trials) for some in (number, number + 1)]
                trial.run(parts[1] - parts[0], chance)
                done += trial.done
    print(f"{done.total()} times in {time.monotonic() - began_s:.0f} s: {dict(done)}")


if __name__ == "__main__":
    given = sys.argv[2:]
    main(int(sys.argv[1]), int(given[0]) if given else random.randrange(1000), *given[1:])
