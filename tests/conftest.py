"""What every test gets: asyncio for coroutines, and no settings from around the test run.

With `-n` (pytest-xdist) files run side by side in several processes, each with fixtures of its own.
The tests of one file run in one process, in their order, and all that start a JVM in a few of them.
"""

import logging
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from mqks.settings import DatabaseUrl
from tests.kit import preloaded
from tests.kit.postgres import Postgres, installations
from tools.java_classes import ARCHIVE, SETTINGS

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["mqks.testing", "tests.kit.fixtures"]

FROM_OUTSIDE = ("MQKS_", "NOTIFY_", "WATCHDOG_", "LISTEN_", "COLUMNS", "LINES")
"""Beginnings of variables: our own, and what service managers and terminals set."""

SCHEMAS = count(1)

DISK_BYTES = 2**30
"""What the tests write at a time, with room to spare; a server refuses publishes on a full disk."""


def pytest_sessionstart() -> None:
    directory = tempfile.gettempdir()
    if shutil.disk_usage(directory).free < DISK_BYTES:
        raise pytest.UsageError(f"the tests want 1 GiB of free disk in {directory}")
    # A shell ignores it for what it runs in the background, and so would all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)


JVMS = (
    *("tests/pipeline/test_pipeline_jobs", "tests/pipeline/test_pipeline_typed"),
    *("tests/pipeline/test_pipeline_notebook", "tests/pipeline/"),
)
"""Beginnings of files that share a JVM, or start their own."""
LONGEST = (
    *(*JVMS, "tests/lives/test_simulation", "tests/sources/test_compiled"),
    *("tests/broker/test_model", "tests/doors/test_celery", "tests/sources/test_benchmarks"),
)
"""Beginnings of files that take long, and so begin first."""


OTHER_LAKES = re.compile(r"\b(delta|iceberg|rest|glue|moto)\b")
"""Words of ids of tests that are repeated with other tables, catalogs and stores than files."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith("tests/pipeline/") and OTHER_LAKES.search(item.name):
            item.add_marker("lakes")
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            """What is of one scope runs in one process."""
            shared = (jvm for jvm in JVMS if nodeid.startswith(jvm))
            return next(shared, str(super()._split_scope(nodeid)))

    config.option.loadscopereorder = False
    return ByFile(config, log)


# How long something took, or what chance gave, is never a test's verdict.
quick = settings(
    deadline=None,
    max_examples=20,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
        HealthCheck.filter_too_much,
    ],
)
settings.register_profile("quick", quick)
settings.register_profile("full", quick, max_examples=200)  # By --hypothesis-profile=full.
settings.load_profile("quick")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(FROM_OUTSIDE)]:
        monkeypatch.delenv(variable)


@pytest.fixture(autouse=True)
def _log_as_before() -> Iterator[None]:
    """A server in the test's process sets up the log: for itself, not for the tests after it."""
    log = logging.getLogger("mqks")
    before = [*log.handlers], log.propagate, log.level
    yield
    log.handlers[:], log.propagate, level = before
    log.setLevel(level)


@pytest.fixture
def db(tmp_path: Path) -> Path:
    """Where a server that the test starts has its database."""
    return tmp_path / "mqks.db"


@pytest.fixture
def tls_port() -> Iterator[int]:
    """A port that nobody else is given meanwhile, and that a server may still listen on."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield int(held.getsockname()[1])


JAVA = f"-XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:SharedArchiveFile={ARCHIVE} -Xlog:disable"
"""Without its log, Java says nothing of an archive that it cannot use."""
SPARK_SETTINGS = SETTINGS | {
    "spark.sql.shuffle.partitions": "1",
    "spark.driver.extraJavaOptions": JAVA,
}
"""Starts sooner, and is slower only in runs longer than a test's."""


@pytest.fixture(scope="session")
def _spark_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Spark without its archive of Python files: its workers would compile them at each start, for
    a second of CPU, and Spark waits for no worker longer than 10 seconds, on any machine."""
    import pyspark

    home = tmp_path_factory.mktemp("spark-home")
    for part in ("bin", "jars", "sbin"):
        (home / part).symlink_to(Path(pyspark.__file__).with_name(part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_HOME", str(home))
        yield


@pytest.fixture
def quick_spark(_spark_home: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that start Spark have the settings of tests, whatever else they set."""
    words = [word for pair in SPARK_SETTINGS.items() for word in ("--conf", "=".join(pair))]
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", shlex.join([*words, "pyspark-shell"]))


@pytest.fixture(scope="session")
def spark(_spark_home: None) -> "Iterator[SparkSession]":
    """One session for all tests that need one; they are skipped where there is no Java."""
    from mqks.pipeline.errors import JavaMissing
    from mqks.pipeline.session import session

    try:
        running = session("local[2]", **SPARK_SETTINGS)
    except JavaMissing as missing:
        pytest.skip(str(missing))
    yield running
    running.stop()


@pytest.fixture
def jobs_here(spark: "SparkSession", monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`main(["pipeline", …])` has this session, or its context, and leaves it and the handlers of
    signals as they are: the start of a JVM costs more than most jobs."""
    for name, running in (("session", spark), ("context", spark.sparkContext)):
        monkeypatch.setattr(f"mqks.pipeline.session.{name}", partial(_given, running))
        monkeypatch.setattr(type(running), "stop", lambda _: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _given(running: Any, *_told: object, **_conf: object) -> Any:
    return running


@pytest.fixture(scope="session")
def sync_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For LD_PRELOAD: tests/kit/preloaded.py."""
    return preloaded.compiled(tmp_path_factory.mktemp("preloaded"))


@pytest.fixture
def clock(sync_library: Path, tmp_path: Path) -> preloaded.Clock:
    """A wall clock that can be set, for servers that have its environment."""
    return preloaded.Clock(sync_library, tmp_path)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A server for all tests of this process, each with a schema of its own."""
    pytest.importorskip("psycopg", reason="psycopg is not installed")
    if not installations():
        pytest.skip("no PostgreSQL: neither the dev extra's wheel nor /usr/lib has it")
    with Postgres(fsync="on") as server:
        yield server


@pytest.fixture
def journal_url(postgres: Postgres) -> DatabaseUrl:
    """Of a journal that does not exist yet."""
    return DatabaseUrl(postgres.url(f"journal_{next(SCHEMAS)}"))
