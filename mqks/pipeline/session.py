"""The Spark session of the jobs: settings for a small machine, this Python, the data source.

The one rule: another session needs nothing from here but the registration of the source.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mqks.client import urls
from mqks.pipeline.errors import JavaMissing

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

JAVA_MIN = 17
JAVA_NEEDED = f"needs Java {JAVA_MIN}; on Debian: apt install openjdk-{JAVA_MIN}-jre-headless"

SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    # Spark's 200 are for a cluster; here each is a task more for the same two or four cores.
    "spark.sql.shuffle.partitions": str(os.cpu_count() or 1),
    # Arrivals are told in UTC, and so are the days that a lake is partitioned by.
    "spark.sql.session.timeZone": "UTC",
    # Spark's own choice, INT96, is deprecated, read by few, and costs a tenth of writing a file.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}

_LOG4J = Path(__file__).absolute().with_name("log4j2.properties")  # A zip on workers is relative.
LOGGING = f"-Dlog4j2.configurationFile={_LOG4J.as_uri()}"
"""For `spark.driver.defaultJavaOptions`."""
BRIEF = f"{LOGGING} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For jobs where no message passes through Java: what it compiles further would never pay."""
LATER = (
    f"{LOGGING} -XX:+UseSerialGC -XX:Tier4InvocationThreshold=50000"
    " -XX:Tier4MinInvocationThreshold=6000 -XX:Tier4CompileThreshold=150000"
    " -XX:Tier4BackEdgeThreshold=400000"
)
"""For jobs where few do: Java compiles further what has run ten times as often as it usually waits
for, since that of the start would never pay. It takes 4 s of CPU from a start, where `LOGGING`
takes 6 and `BRIEF` 3.5."""


NICE = "MQKS_WORKERS_NICE"
"""The priority of workers while they archive, in their environment."""


def yields() -> None:
    """Give this worker the priority that its environment tells."""
    if nice := os.environ.get(NICE):
        os.setpriority(os.PRIO_PROCESS, 0, int(nice))


def session(master: str | None = None, **conf: Any) -> "SparkSession":
    """A session with `format("mqks")`; `master` is `local[*]` by default.

    Pass settings of Spark by their names: `session(**{"spark.driver.memory": "2g"})`.
    Raises JavaMissing.
    """
    from pyspark.sql import SparkSession

    from mqks.pipeline.source import register

    builder = SparkSession.builder
    for name, value in _settings(master, conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("WARN")
    register(spark)
    return spark


def context(master: str | None = None, url: str | None = None, **conf: Any) -> "SparkContext":
    """What a job without SQL needs, for half of a session's start. If the broker is on this
    machine, it keeps a core by default, and the workers have the lowest priority. Raises
    JavaMissing."""
    from pyspark import SparkConf, SparkContext

    address, usual = urls.parse(url), "local[*]"
    if address.path or address.host in ("localhost", "127.0.0.1", "::1"):
        usual = f"local[{max(1, (os.cpu_count() or 1) - 1)}]"
        conf = {f"spark.executorEnv.{NICE}": "19"} | conf
    settings = _settings(master, conf, usual)
    running = SparkContext.getOrCreate(SparkConf().setAll([*settings.items()]))
    running.setLogLevel("WARN")
    return running


def _settings(
    master: str | None, conf: Mapping[str, Any], usual: str = "local[*]"
) -> dict[str, Any]:
    check_java()
    from pyspark import SparkContext

    settings = {"spark.app.name": "mqks"} | SETTINGS
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        master = master or usual
    else:  # By spark-submit: the master is decided already, and what it was told goes before ours.
        told = SparkContext.getSystemProperty
        settings = {name: value for name, value in settings.items() if told(name) is None}
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["PYSPARK_PYTHON"] = workers_python(master, conf)
    if master:
        settings["spark.master"] = master
    if master and master.startswith("local"):
        # Spark's own choice is an address of the network, which may change or be blocked.
        settings["spark.driver.host"] = "127.0.0.1"
    return {**settings, **conf}


def workers_python(master: str | None, conf: Mapping[str, Any]) -> str:
    """On this machine the running Python, since another one may have no mqks or another version. On
    a cluster it may have another path, from Spark's usual settings."""
    told = conf.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    is_here = master is not None and master.startswith("local")
    return told if told and not is_here else sys.executable


def check_java() -> None:
    """Raises JavaMissing if Spark would find no Java, or one that is too old."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    try:
        # However long that takes: Spark, too, would wait for it.
        told = subprocess.run(
            [java or "java", "-version"], capture_output=True, text=True, check=True
        ).stderr
    except (OSError, subprocess.SubprocessError):
        raise JavaMissing(f"Java was not found: Spark {JAVA_NEEDED}") from None
    version = re.search(r'version "(\d+)', told)
    if version is None or int(version[1]) < JAVA_MIN:
        raise JavaMissing(f"Java {version[1] if version else '?'} is too old: Spark {JAVA_NEEDED}")
