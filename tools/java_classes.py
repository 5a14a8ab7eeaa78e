"""Archive the classes that Spark loads: the JVMs of tests, which are many, start in half of the
time.

    python -m tools.java_classes

The one rule: without the archive, or with another Java or Spark, tests are slower and nothing else.
"""

import sys
from pathlib import Path
from typing import Any

from mqks.pipeline.errors import JavaMissing
from mqks.pipeline.session import BRIEF, session

ARCHIVE = Path(sys.prefix) / "java-classes.jsa"


def main() -> None:
    java = f"{BRIEF} -XX:ArchiveClassesAtExit={ARCHIVE} -Xlog:disable"
    try:
        spark = session("local[1]", **{"spark.driver.extraJavaOptions": java})
    except JavaMissing as missing:
        print(missing)
        return
    spark.range(9).rdd.map(tuple).toDF(["n"]).groupBy("n").count().collect()
    gateway: Any = spark.sparkContext._gateway
    spark.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait()


if __name__ == "__main__":
    main()
