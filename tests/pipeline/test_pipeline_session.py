"""The session: which Java it takes, which Python its workers are."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mqks.pipeline.errors import JavaMissing
from mqks.pipeline.session import check_java, session, workers_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NEEDED = "needs Java 17; on Debian: apt install openjdk-17-jre-headless"


def java(directory: Path, script: str) -> None:
    """A `java` that is this script."""
    program = directory / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def told_by_java(version: str) -> str:
    return f"echo 'openjdk version \"{version}\" 2025-04-15' >&2"


def test_no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaMissing) as told:
        session()

    assert str(told.value) == f"Java was not found: Spark {NEEDED}"


@pytest.mark.parametrize("script", [told_by_java("11.0.2"), told_by_java("1.8.0_402"), "echo ?"])
def test_a_java_too_old(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    java(tmp_path, script)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing, match="too old") as told:
        check_java()

    assert NEEDED in str(told.value)


@pytest.mark.parametrize("version", ["17.0.15", "21"])
def test_a_java_that_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, version: str) -> None:
    java(tmp_path, told_by_java(version))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check_java()


@pytest.mark.slow
def test_a_java_that_takes_long_is_none_the_less_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    java(tmp_path, "sleep 31\n" + told_by_java("17.0.15"))
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    check_java()


def test_a_java_that_does_not_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    java(tmp_path, "exit 1")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaMissing):
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
