"""`mqks pipeline`: what flows through the broker becomes a lake, and a lake flows back.

The one rule: Spark is imported when a job runs and not before, and what it is missing is said in
one line.
"""

import json
import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mqks.commands import complete
from mqks.commands.connection import explained
from mqks.commands.options import AsJson, Row, Url, duration, table, tell

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from mqks.pipeline.report import Report


def instant(text: str) -> datetime:
    """A time in ISO 8601, in UTC unless it tells its zone."""
    try:
        told = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: 2026-11-20T12:00 is") from None
    return told if told.tzinfo else told.replace(tzinfo=UTC)


app = typer.Typer(
    help="Jobs on Spark: archive a queue into a lake, report on it, replay it.",
    epilog="Start here: mqks pipeline archive clicks lake --once",
    no_args_is_help=True,
)

Queue = Annotated[
    str,
    typer.Argument(
        metavar="QUEUE",
        help="The queue; nobody else consumes it.",
        autocompletion=complete.queues,
    ),
]
LakePath = Annotated[Path, typer.Argument(metavar="LAKE", help="The directory of the lake.")]
LakeOrNone = Annotated[Path | None, typer.Argument(metavar="[LAKE]", help="Its directory.")]
Start = Annotated[
    datetime | None,
    typer.Option(parser=instant, metavar="TIME", help="From then on: 2026-11-20T12:00, UTC."),
]
End = Annotated[
    datetime | None,
    typer.Option(parser=instant, metavar="TIME", help="Up to then, and not then."),
]
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
    by: Annotated[
        Literal["event", "day"],
        typer.Option(help="A directory for each event of a day, or one for each day."),
    ] = "event",
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
    roll: Annotated[
        float, typer.Option(min=0, help="Seconds that small files wait to be merged.")
    ] = 300.0,
    trim: Annotated[
        bool, typer.Option("--trim/--no-trim", help="Drop from the queue what the lake has.")
    ] = True,
    fail_on_data_loss: Annotated[
        bool,
        typer.Option(
            "--fail-on-data-loss/--no-fail-on-data-loss",
            help="Refuse to go on when something else took messages from the queue.",
        ),
    ] = True,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Move a queue's messages into Parquet files or a Delta table, each of them once.

    It goes on until it is stopped with SIGTERM or SIGINT, unless --once is given.
    """
    with _job("archive", master, conf, url) as spark:
        from mqks.pipeline.archive import Archive
        from mqks.pipeline.job import schema_of, stop_on_signal
        from mqks.pipeline.lake import LAKES
        from mqks.pipeline.wire import Server

        job = Archive(
            queue=queue,
            server=Server(url=url),
            once=once,
            batch_messages=batch,
            interval_s=interval,
            schema=schema_of(schema),
            roll_s=roll,
            trim=trim,
            fail_on_data_loss=fail_on_data_loss,
        )
        messages = 0
        with LAKES[format](lake, by_event=by == "event") as opened:
            for progress in job.run(spark, opened, stop_on_signal()):
                messages += progress.messages
                if as_json:
                    tell(asdict(progress), as_json)
                else:
                    rate = progress.messages / progress.seconds
                    unparsed = f", {progress.unparsed:,} unparsed" if progress.unparsed else ""
                    typer.echo(
                        f"{progress.messages:,} messages in {duration(progress.seconds)}"
                        f" ({rate:,.0f}/s), {progress.files} files{unparsed}, lag {progress.lag:,}",
                        err=True,
                    )
        if not as_json:
            typer.echo(f"{messages:,} messages archived", err=True)


@app.command(epilog="Example: mqks pipeline report lake --window 3600 --html report.html")
def report(
    lake: LakeOrNone = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="Report on what waits in this queue instead.",
            autocompletion=complete.queues,
        ),
    ] = None,
    url: Url = None,
    start: Start = None,
    end: End = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Seconds of a window; chosen to fit by default.")
    ] = None,
    sent_field: Annotated[
        str | None,
        typer.Option(
            metavar="FIELD", help="The payload's field with the time it was sent, for the delay."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with charts.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the windows as Parquet.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Events to show.")] = 20,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Count what went through: events, windows, delays, and what fell silent.

    The lake is read, or with --queue what waits in a queue, which stays as it is.
    """
    if (lake is None) == (queue is None):
        raise typer.BadParameter("give either a lake or --queue")
    with _job("report", master, conf, url, lake) as spark:
        from mqks.pipeline import page
        from mqks.pipeline import report as reports
        from mqks.pipeline.lake import messages

        rows = messages(spark, lake) if lake else reports.waiting(spark, queue or "", url)
        found = reports.report(
            reports.between(rows, start, end),
            title=f"Lake {lake.name}" if lake else f"Queue {queue}",
            window_s=window,
            sent_field=sent_field,
        )
        if parquet:
            found.write_parquet(parquet)
        if html:
            html.write_text(page.page(found), encoding="utf-8")
        if as_json:
            silent = [event.event for event in found.silent]
            typer.echo(json.dumps(asdict(found) | {"silent": silent}, default=datetime.isoformat))
        else:
            _show(found, top)


@app.command(epilog="Example: mqks pipeline replay lake --events 'order.*' --dry-run")
def replay(
    lake: LakePath,
    url: Url = None,
    start: Start = None,
    end: End = None,
    events: Annotated[
        str, typer.Option(metavar="MASK", help="Only these events; * and ? as in file names.")
    ] = "*",
    speed: Annotated[
        str, typer.Option(metavar="NUMBER|max", help="1 is the pace in which they came.")
    ] = "max",
    name: Annotated[
        str,
        typer.Option(help="Of this replay: the same one goes on, another one replays all again."),
    ] = "replay",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count, and publish nothing.")] = False,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Publish what is in a lake again, each message once, in the order it came.

    A replay that was stopped or killed goes on when it is started again.
    """
    times = _speed(speed)
    with _job("replay", master, conf, url, lake) as spark:
        from mqks.pipeline.job import stop_on_signal
        from mqks.pipeline.replay import Replay
        from mqks.pipeline.wire import Server

        job = Replay(
            lake=lake,
            server=Server(url=url),
            name=name,
            start=start,
            end=end,
            events=events,
            speed=times,
        )
        if dry_run:
            counts = [{"event": event, "messages": count} for event, count in job.counts(spark)]
            table(counts, ["event", "messages"], as_json=as_json)
            return
        began_s = time.monotonic()
        for progress in job.run(spark, stop_on_signal()):
            if as_json:
                tell(asdict(progress), as_json)
            else:
                passed = duration(time.monotonic() - began_s)
                typer.echo(
                    f"{progress.messages:,} of {progress.total:,} messages, {passed}", err=True
                )


def _show(report: "Report", top: int) -> None:
    """What a terminal has room for; `--json` tells all."""

    def shown(**row: Any) -> Row:
        return {name: _shown(value) for name, value in row.items()}

    begin, end, last = map(_shown, (report.start, report.end, report.last_window))
    typer.echo(f"{begin} to {end} UTC, {report.messages:,} messages")
    counts: Counter[datetime] = Counter()
    for window in report.windows:
        counts[window.start] += window.messages
    sections = {
        "Top events": [
            shown(**asdict(event) | {"retries": event.retries}) for event in report.events[:top]
        ],
        f"Windows of {duration(report.window_s)}": [
            shown(start=start, messages=count) for start, count in sorted(counts.items())
        ],
        f"Seconds from {report.delay_of}": [shown(**asdict(delay)) for delay in report.delays],
        f"Silent since {last}": [
            shown(event=event.event, last=event.last, messages=event.messages)
            for event in report.silent
        ],
    }
    for heading, rows in sections.items():
        if rows:
            typer.echo(f"\n{heading}")
            table(rows, list(rows[0]))


def _shown(value: Any) -> Any:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return round(value, 6) if isinstance(value, float) else value


def _speed(text: str) -> float:
    if text == "max":
        return math.inf
    try:
        speed = float(text)
    except ValueError:
        speed = 0
    if not 0 < speed < math.inf:
        raise typer.BadParameter(f"the speed {text!r} is neither max nor a number above 0")
    return speed


@contextmanager
def _job(
    name: str,
    master: str | None,
    conf: list[str] | None,
    url: str | None,
    lake: Path | None = None,
) -> "Iterator[SparkSession]":
    """A session of Spark that ends with the job, over a lake that must be there if one is given;
    what the server refused is explained."""
    from mqks.client.errors import RequestFailed  # here, so that --help need not load them
    from mqks.pipeline import job

    if lake:
        job.check_is_there(lake)
    job.check_extra()

    try:
        with job.session_of(name, master, dict(map(_pair, conf or []))) as spark:
            yield spark
    except RequestFailed as error:
        raise explained(error, url) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value
