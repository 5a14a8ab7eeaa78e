"""`mqks pipeline`: what flows through the broker becomes a lake, and a lake flows back.

The one rule: Spark is imported when a job runs and not before, and what it is missing is said in
one line.
"""

import json
import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from socket import gaierror
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mqks.pipeline.errors import BadOption, ExtraMissing, JobFailed, ServerAway

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

app = typer.Typer(
    help="Jobs on Spark: archive a queue into a lake, report on it, replay it.",
    epilog="Start here: mqks pipeline archive clicks lake --once",
    no_args_is_help=True,
)

Queue = Annotated[str, typer.Argument(metavar="QUEUE", help="The queue; nobody else consumes it.")]
LakePath = Annotated[Path, typer.Argument(metavar="LAKE", help="The directory of the lake.")]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", envvar="MQKS_URL", help="The server."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON lines on standard output.")]
Master = Annotated[
    str | None,
    typer.Option(
        metavar="URL", help="Spark's master, such as local\\[2] or spark://host:7077. [local\\[*]]"
    ),
]
Conf = Annotated[
    list[str] | None,
    typer.Option("--conf", metavar="NAME=VALUE", help="A setting of Spark; may be repeated."),
]


@app.command(epilog="Example: mqks pipeline archive clicks lake --once")
def archive(
    queue: Queue,
    lake: LakePath,
    url: Url = None,
    once: Annotated[
        bool, typer.Option("--once", help="End when what is there now is in the lake.")
    ] = False,
    format: Annotated[
        Literal["parquet", "delta"], typer.Option(help="Plain files, or a Delta table.")
    ] = "parquet",
    schema: Annotated[
        str | None,
        typer.Option(
            metavar="DDL|FILE",
            help="Parse JSON payloads into the column data: 'user string, n bigint', or a file"
            " with that or with Spark's JSON schema.",
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Messages of a batch at most.")] = 1_000_000,
    interval: Annotated[
        float, typer.Option(min=0, help="Seconds after which fewer make a batch.")
    ] = 10.0,
    compact: Annotated[
        bool, typer.Option("--compact/--no-compact", help="Merge small files.")
    ] = True,
    trim: Annotated[
        bool, typer.Option("--trim/--no-trim", help="Drop from the queue what the lake has.")
    ] = True,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Move a queue's messages into Parquet files or a Delta table, each of them once.

    It goes on until it is stopped with SIGTERM or SIGINT, unless --once is given.
    """
    with _job("archive", master, conf) as spark:
        from mqks.pipeline.archive import Archive
        from mqks.pipeline.lake import LAKES
        from mqks.pipeline.wire import Server

        job = Archive(
            queue=queue,
            server=Server(url=url),
            once=once,
            batch_messages=batch,
            interval_s=interval,
            schema=_schema(schema),
            compact=compact,
            trim=trim,
        )
        messages = 0
        with LAKES[format](lake) as opened:
            for progress in job.run(spark, opened, _stop_on_signal()):
                messages += progress.messages
                if as_json:
                    typer.echo(json.dumps(asdict(progress)))
                else:
                    rate = progress.messages / progress.seconds
                    unparsed = f", {progress.unparsed:,} unparsed" if progress.unparsed else ""
                    typer.echo(
                        f"{progress.messages:,} messages in {progress.seconds:.2f} s"
                        f" ({rate:,.0f}/s), {progress.files} files{unparsed}, lag {progress.lag:,}",
                        err=True,
                    )
        if not as_json:
            typer.echo(f"{messages:,} messages archived", err=True)


@contextmanager
def _job(name: str, master: str | None, conf: list[str] | None) -> "Iterator[SparkSession]":
    """A session of Spark that ends with the job, and its failures told in one line."""
    try:
        import numpy  # noqa: F401
        import pandas  # noqa: F401
        import pyarrow  # noqa: F401
        import pyspark  # noqa: F401
    except ImportError as error:
        raise ExtraMissing(
            f"the pipeline needs Spark for Python ({error.name} is missing):"
            " pip install 'mqks[spark]'"
        ) from None
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    from mqks.pipeline.session import session

    given = dict(_pair(text) for text in conf or [])
    spark = session(master, **{"spark.app.name": f"mqks {name}"} | given)
    try:
        yield spark
    except (PySparkException, Py4JError) as error:
        raise JobFailed(_reason(str(error))) from None
    except (ConnectionError, TimeoutError, gaierror) as error:
        raise ServerAway(f"the server cannot be reached: {error}") from None
    except OSError as error:
        raise JobFailed(str(error)) from None
    finally:
        spark.stop()


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


def _reason(text: str) -> str:
    """Of what Spark tells, the line that a task died with, or else the first."""
    raised = re.findall(r"^[\w.]+(?:Error|Exception|Lost|Failed|Violation): .+$", text, re.M)
    lines = [line for line in raised if not line.startswith(("org.apache.", "java.", "py4j."))]
    return (lines or raised or text.strip().splitlines() or ["Spark does not say why"])[0]


def _schema(text: str | None) -> Any:
    """A schema of Spark from DDL, or from a file with that or with its JSON. Raises BadOption."""
    if text is None:
        return None
    from pyspark.sql.types import StructType

    if len(text) < os.pathconf("/", "PC_PATH_MAX") and Path(text).is_file():
        text = Path(text).read_text()
    try:
        if text.lstrip().startswith("{"):
            return StructType.fromJson(json.loads(text))
        return StructType.fromDDL(text)
    except Exception as error:
        raise BadOption(f"the schema cannot be read: {_reason(str(error))}") from None


def _stop_on_signal() -> Event:
    """Set by the first SIGTERM or SIGINT: the batch under way is finished. The second one ends."""
    stop = Event()

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
