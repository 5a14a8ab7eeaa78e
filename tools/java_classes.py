"""Archive the classes that Spark loads: the JVMs of tests, which are many, start in half of the
time.

    python -m tools.java_classes

The one rule: without the archive, or with another Java or Spark, tests are slower and nothing else.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mqks.pipeline.errors import JavaMissing
from mqks.pipeline.session import BRIEF, session

ARCHIVE = Path(sys.prefix) / "java-classes.jsa"
SETTINGS = {"spark.sql.codegen.wholeStage": "false", "spark.sql.codegen.factoryMode": "NO_CODEGEN"}
"""Spark compiles nothing, and loads nothing for that."""


def main() -> None:
    java = f"{BRIEF} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:disable"
    try:
        spark = session("local[1]", **SETTINGS, **{"spark.driver.extraJavaOptions": java})
    except JavaMissing as missing:
        print(missing)
        return
    with TemporaryDirectory() as directory:
        spark.range(9).rdd.map(tuple).toDF(["n"]).write.parquet(f"{directory}/rows")
        spark.read.parquet(f"{directory}/rows").groupBy("n").count().collect()
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main()
