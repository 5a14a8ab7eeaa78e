"""A Spark job in its own process: its session, its signals, and the reason of its failure.

The one rule: Spark's long traces are raised as one line.
"""

import json
import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from mqks.client.errors import RequestFailed
from mqks.errors import reason
from mqks.pipeline.errors import (
    BadOption,
    DataLost,
    ExtraMissing,
    JobFailed,
    LakeUnfit,
    ServerAway,
    StoreAway,
)

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

PATH_MAX = os.pathconf("/", "PC_PATH_MAX")
Begin = Callable[..., Any]
"""Given `session` (the default) or `context`, and Java's options, gives what that does."""


def check_extra() -> None:
    """Raises ExtraMissing if the packages of the extra are not installed."""
    for needed in ("jinja2", "numpy", "pandas", "pyarrow", "pyspark"):
        if find_spec(needed) is None:
            raise ExtraMissing(
                f"the pipeline needs Spark for Python ({needed} is missing):"
                " pip install 'mqks[spark]'"
            )


@contextmanager
def spark_of(name: str, master: str | None, settings: Mapping[str, str]) -> "Iterator[Begin]":
    """What begins a session or a context, which ends with the job. Raises the reason of a failure:
    RequestFailed, ServerAway, JobFailed, and others of `pipeline.errors`."""
    from py4j.protocol import Py4JError

    from mqks.pipeline.session import LOGGING, session

    running: list[Any] = []

    def begin(what: Callable[..., Any] = session, java: str = LOGGING) -> Any:
        usual = {"spark.app.name": f"mqks {name}", "spark.driver.defaultJavaOptions": java}
        with signals_wait():
            running.append(what(master, **{**usual, **settings}))
        return running[0]

    try:
        with reasons():
            yield begin
    except ConnectionError as error:
        raise ServerAway(f"the server cannot be reached: {text(error)}") from None
    except OSError as error:
        raise JobFailed(reason(error)) from None
    finally:
        try:
            for spark in running:
                spark.stop()
        except (Py4JError, OSError):  # An error before this one was a consequence of it.
            raise JobFailed("Spark's Java process has died") from None


@contextmanager
def reasons() -> Iterator[None]:
    """Raises the reason of an error of Spark instead of it."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise failure(text(error)) from None


def text(error: BaseException) -> str:
    """What an error says; if that is nothing, what its cause says, or else its name."""
    while str(error).strip() in ("", "None"):  # The second is what py4j says of nothing.
        cause = error.__cause__ or error.__context__
        if cause is None:
            return type(error).__name__
        error = cause
    return str(error)


@contextmanager
def signals_wait() -> Iterator[None]:
    """SIGINT and SIGTERM take effect at the end: a Java process whose driver ends while it starts
    would run forever."""
    came: list[int] = []
    before = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


_UNFIT = r"(?<=[:<,])(?:void|interval [^,>]+|(?:var)?char\(\d+\))(?=[,>])"
_WORKERS_PYTHON = "PYSPARK_PYTHON, or --conf spark.pyspark.python=PATH, names theirs"
_ADVICE = {
    r"\bNo module named '(fastavro|google)\b": (
        "the workers' Python has no {}: pip install 'mqks[avro,protobuf]' there; " + _WORKERS_PYTHON
    ),
    r"\bNo module named '(\w+)": (
        "the workers' Python has no {}: pip install 'mqks[spark]' there; " + _WORKERS_PYTHON
    ),
    r"different version: ([\d.]+) than that in driver: ([\d.]+)": (
        "the workers' Python is {}, and this one is {}; " + _WORKERS_PYTHON
    ),
    r'Cannot run program "(.+?)"': "the workers have no Python {}; " + _WORKERS_PYTHON,
    r"on a stopped SparkContext": (
        "Spark was stopped, or there is no master at that URL; see Spark's own lines above"
    ),
}
"""Errors that occur if the workers are other machines, and what to do about them."""


def failure(text: str) -> Exception:
    """The reason of a failed Spark job; errors from the server keep their type."""
    for pattern, advice in _ADVICE.items():
        if found := re.search(pattern, text):
            return JobFailed(advice.format(*found.groups()))
    told_last = _reason(text)
    name, _, told = told_last.partition(": ")
    name = name.rpartition(".")[2]
    if kind := {"DataLost": DataLost, "LakeUnfit": LakeUnfit, "StoreAway": StoreAway}.get(name):
        return kind(told)
    if name in ("RequestFailed", "AuthenticationFailed"):
        found = re.fullmatch(r"(.*, error (\w+))(?:: (.+))?", told)
        return RequestFailed(*found.groups()) if found else RequestFailed(told, "")
    if name == "ConnectionLost":
        return ServerAway(f"the server cannot be reached: {told}")
    return JobFailed(told_last)


def _reason(text: str) -> str:
    """The line of Spark's text with the error of the task, or its own, or else the first line."""
    raised = re.findall(
        r"^(?:: )?([\w.]+(?:Error|Exception|Lost|Failed|Violation|Unfit|Away): .+)$", text, re.M
    )
    lines = [line for line in raised if not line.startswith(("org.apache.", "java.", "py4j."))]
    told = re.findall(r"^\[[A-Z_.]+\] .+$", text, re.M)
    return (lines or raised or told or text.strip().splitlines() or ["Spark gave no reason"])[0]


def by_mask(schemas: Iterable[str]) -> dict[str, str]:
    """Schemas by the masks of their events, as in `order.*=id bigint`; one without is for all that
    no mask finds. Raises BadOption."""
    found: dict[str, str] = {}
    for text in schemas:
        mask, equals, schema = text.partition("=")
        if not equals or re.search(r"[\s{]", mask) or Path(text[:PATH_MAX]).is_file():
            mask, schema = "**", text
        if mask in found:
            raise BadOption(f"--schema: there are two for {mask}")
        found[mask] = schema
    return dict(sorted(found.items(), key=lambda pair: pair[0] == "**"))


def schema_of(text: str) -> "StructType":
    """A Spark schema from DDL, or from a file with DDL or JSON. Raises BadOption, and LakeUnfit for
    types that no lake can hold."""
    from pyspark.sql.types import StructType

    if len(text) < PATH_MAX and Path(text).is_file():
        text = Path(text).read_text()
    try:
        is_json = text.lstrip().startswith("{")
        schema = StructType.fromJson(json.loads(text)) if is_json else StructType.fromDDL(text)
    except Exception as error:
        raise BadOption(f"the schema cannot be read: {_reason(str(error))}") from None
    if not isinstance(schema, StructType):
        raise BadOption(
            f"the schema is not a list of columns such as 'user string, n bigint': {text[:80]!r}"
        )
    if found := re.search(_UNFIT, schema.simpleString()):
        raise LakeUnfit(
            f"no lake can hold the type {found[0]}: give the field another type in --schema, or"
            " leave it out"
        )
    return schema


def place(text: str) -> Path | str:
    """The directory of a lake, or the URL of a table: `s3://bucket/path`, gs://, az://, or
    `iceberg://catalog/namespace.table`. Raises LakeUnfit for another URL, which would be taken for
    a path."""
    if found := re.fullmatch(r"(s3|gs|az|iceberg)a?://([\w.-]+(?:/[\w.=-]+)+)/?", text):
        return f"{found[1]}://{found[2]}"
    if found := re.match(r"([A-Za-z][\w+.-]*):/+", text):
        raise LakeUnfit(
            f"a lake cannot be at {found[0]}…: it is a directory, a table at s3://bucket/path,"
            " gs://bucket/path or az://container/path, or iceberg://catalog/namespace.table"
        )
    return Path(text)


def check_is_there(lake: Path | str) -> None:
    """Raises LakeUnfit before Spark takes seconds to start."""
    if isinstance(lake, Path) and not lake.is_dir():
        raise LakeUnfit(f"there is no lake at {lake}")


def stop_on_signal() -> Event:
    """Set by the first SIGTERM or SIGINT, so that the current batch is finished. The second one
    ends the process."""
    stop = Event()

    def on_signal(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return stop
