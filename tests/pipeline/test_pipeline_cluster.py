"""The jobs where tasks are lost and done again, at length on a cluster of Spark: a master and two
workers on loopback, their executors, a server.

The one rule: each message is counted, and what was started here is gone when a test ends.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.dataset as ds
import pyspark
import pytest

import mqks.__main__
from mqks.client.blocking import connect
from mqks.pipeline.reader import QueueReader
from mqks.testing import BrokerProcess
from tests import pipeline_kills as kills
from tests.conftest import JAVA, SPARK_SETTINGS

BIN = Path(pyspark.__file__).with_name("bin")
WORKERS = 2
COUNT = 2_000

pytestmark = pytest.mark.timeout(900)  # JVMs one after the other.


class Cluster:
    """Standalone, as `start-all.sh` of a Spark makes it; a context in which it runs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log = directory / "log"
        self._processes = ExitStack()
        java = f"{JAVA} -Djava.io.tmpdir={directory}"
        # The whole Spark, with its archive of Python files, which workers without pyspark get.
        self._environment = {k: v for k, v in os.environ.items() if k != "SPARK_HOME"} | {
            "SPARK_DAEMON_JAVA_OPTS": f"{java} -Dspark.master.rest.enabled=false",
            "SPARK_LOCAL_DIRS": str(directory),
        }
        settings = {
            "spark.driver.host": "127.0.0.1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": java,
        }
        self._conf = kills.conf(settings)

    def __enter__(self) -> "Cluster":
        with self._processes:
            flags = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
            self._start("master.Master", *flags)
            [self.url, *_] = self._told(r"Starting Spark master at (\S+)", 1)
            flags += ["--cores", "1", "--memory", "512m", "--work-dir", str(self._directory)]
            for _ in range(WORKERS):
                self._start("worker.Worker", *flags, self.url)
            self._told(r"Registering worker", WORKERS)
            self._processes = self._processes.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.close()
        kills.wait_for("all to end", lambda: not self._running())

    def _start(self, program: str, *flags: str) -> None:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [BIN / "spark-class", f"org.apache.spark.deploy.{program}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
            )
        self._processes.callback(process.wait, kills.LIMIT_S)
        self._processes.callback(process.terminate)

    def _told(self, sign: str, times: int) -> list[str]:
        """What the log says, once it has said so as often."""

        def found() -> list[str]:
            return re.findall(sign, self._log.read_text())

        kills.wait_for(f"{sign} in {self._log}", lambda: len(found()) >= times)
        return found()

    @property
    def flags(self) -> list[str]:
        """Of a command that is to run here."""
        return ["--master", self.url, *self._conf]

    @property
    def few(self) -> list[str]:
        """Of a command for which one executor will do."""
        return [*self.flags, "--conf", "spark.cores.max=1"]

    def executors(self) -> list[int]:
        """Their process ids."""
        return [pid for pid in self._running() if "ExecutorBackend" in _command(pid)]

    def _running(self) -> list[int]:
        """Of executors and their Python; each works in a directory of its own below ours."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                works_here = (process / "cwd").readlink().is_relative_to(self._directory)
            except OSError:
                continue
            if works_here:
                found.append(int(process.name))
        return found


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.fixture(scope="module")
def cluster(java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.mark.slow
def test_an_executor_is_killed_and_each_message_is_there_once(
    cluster: Cluster, mqks_broker_process: BrokerProcess, tmp_path: Path
) -> None:
    url, lake, log = mqks_broker_process.url, tmp_path / "lake", tmp_path / "log"
    kills.subscribe(url, "clicks")
    kills.publish(url, COUNT)
    flags = ["--url", url, "--interval", "0.2", *cluster.flags]
    job = kills.Job(log, "archive", "clicks", str(lake), *flags)
    staging = lake / "_mqks" / "staging"
    kills.wait_for("a batch", lambda: kills.is_at_work(job, staging, set()))
    os.kill(cluster.executors()[0], signal.SIGKILL)
    kills.wait_for("the loss", lambda: "Lost executor" in log.read_text() or not job.is_running())
    kills.publish(url, COUNT, start=COUNT)
    kills.wait_for("all of it", lambda: _messages(job) == 2 * COUNT or not job.is_running())
    job.process.terminate()
    job.succeed()

    assert kills.counted(lake) == (2 * COUNT,) * 3
    table = ds.dataset(lake, partitioning="hive").to_table(columns=["offset", "topic", "value"])
    archived = table.sort_by("offset").select(["topic", "value"]).to_pylist()
    assert archived == [_message(n) for n in range(2 * COUNT)]

    with connect(url) as client:
        client.subscribe("copy", kills.EVENTS)
    module = mqks.__main__.__file__
    subprocess.run(
        # Its queue is archived no more: it is the one beside it that is counted.
        [
            *[str(BIN / "spark-submit"), *cluster.few, *kills.conf(SPARK_SETTINGS), str(module)],
            *["pipeline", "replay", str(lake), "--yes", "--url", url],
        ],
        env=os.environ | {"PYSPARK_PYTHON": sys.executable},
        stdin=subprocess.DEVNULL,
        timeout=kills.LIMIT_S,
        check=True,
    )

    with QueueReader(url, "copy") as reader:
        log_range = reader.range()
        batches = reader.read(log_range.first, log_range.next)
        copied = [row for batch in batches for row in batch.select(["topic", "value"]).to_pylist()]
    assert copied == archived


@pytest.fixture
def _whole_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its archive of Python files, which workers without pyspark get."""
    monkeypatch.delenv("SPARK_HOME", raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("_whole_spark")
def test_workers_get_the_package_as_a_zip(
    cluster: Cluster,
    mqks_broker_process: BrokerProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their Python has no mqks, and of what it needs only pyarrow and numpy."""
    url, lake = mqks_broker_process.url, tmp_path / "lake"
    kills.subscribe(url, "clicks")
    kills.publish(url, 100)
    venv.create(tmp_path / "python", symlinks=True)
    [packages] = (tmp_path / "python").glob("lib/*/site-packages")
    for module in (pa, numpy):
        here = Path(str(module.__file__)).parent
        for each in here.parent.glob(f"{here.name}*"):  # Also the libraries beside it.
            (packages / each.name).symlink_to(each)
    package = Path(mqks.__main__.__file__).parent
    shutil.make_archive(str(tmp_path / "mqks"), "zip", package.parent, package.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "python" / "bin" / "python"))
    job = kills.Job(
        tmp_path / "log",
        *["archive", "clicks", str(lake), "--url", url, "--once", *cluster.few],
        *["--conf", "spark.submit.pyFiles=mqks.zip", "--schema", "n bigint"],
    )
    job.succeed()
    assert kills.counted(lake) == (100,) * 3


def _messages(job: kills.Job) -> int:
    return sum(progress["messages"] for progress in job.told)


def _message(number: int) -> dict[str, object]:
    """As `kills.publish` makes it."""
    return {"topic": kills.EVENTS[number % len(kills.EVENTS)], "value": b"%0100d" % number}
