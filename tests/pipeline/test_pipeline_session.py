"""The session: which Java it takes, which Python its workers are."""

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqks.pipeline.errors import JavaMissing
from mqks.pipeline.session import check_java, session, workers_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = "needs Java 17; on Debian: apt install openjdk-17-jre-headless"


def told_by_java(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing) as told:
        session()
    assert str(told.value) == f"Java was not found: Spark {NEEDED}"


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (told_by_java("11.0.2"), "Java 11 is too old"),
        (told_by_java("1.8.0_402"), "Java 1 is too old"),
        ("echo ?", r"Java \? is too old"),
        ("exit 1", "Java was not found"),
        (told_by_java("17.0.15"), ""),
        (told_by_java("21"), ""),
        pytest.param("sleep 31\n" + told_by_java("17.0.15"), "", marks=pytest.mark.slow),
    ],
    ids=["11", "8", "no version", "it does not start", "17", "21", "it takes long"],
)
def test_which_java_will_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, told: str
) -> None:
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match=f"{told}: Spark {NEEDED}") if told else nullcontext():
        check_java()


@pytest.mark.parametrize(
    ("master", "conf", "variable", "python"),
    [
        ("local[*]", {}, "/other", sys.executable),
        ("local-cluster[2,1,1024]", {"spark.pyspark.python": "/told"}, "/other", sys.executable),
        ("spark://a:7077", {}, "", sys.executable),
        ("spark://a:7077", {}, "/other", "/other"),
        ("spark://a:7077", {"spark.pyspark.python": "/told"}, "/other", "/told"),
        (None, {}, "/other", "/other"),  # By spark-submit.
    ],
)
def test_the_workers_python(
    monkeypatch: pytest.MonkeyPatch,
    master: str | None,
    conf: dict[str, str],
    variable: str,
    python: str,
) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", variable)
    assert workers_python(master, conf) == python


def test_workers_are_this_interpreter(spark: "SparkSession") -> None:
    context = spark.sparkContext
    assert context.pythonExec == sys.executable
    assert context.parallelize([0], 1).map(lambda _: sys.executable).collect() == [sys.executable]


def test_settings_and_the_session_that_is_there(spark: "SparkSession") -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert session("local[2]", **{"spark.sql.shuffle.partitions": "1"}) is spark
