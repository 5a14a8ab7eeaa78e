"""`mqks pipeline`: archive a queue into a lake, report, and replay.

The one rule: Spark is imported only when a job runs, and what is missing is printed as one line.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import typer

from mqks.commands import complete
from mqks.commands.complete import queue_argument
from mqks.commands.connection import explained
from mqks.commands.declare import Run, declare
from mqks.commands.options import AsJson, Row, Url, confirm, duration, note, table, tell

if TYPE_CHECKING:
    from mqks.pipeline.job import Begin
    from mqks.pipeline.report import Report


def instant(text: str) -> datetime:
    """A time in ISO 8601, in UTC unless it has a zone."""
    try:
        told = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a time such as 2026-11-20T12:00") from None
    return told if told.tzinfo else told.replace(tzinfo=UTC)


app = typer.Typer(
    help="Jobs on Spark: archive a queue into a lake, report on it, replay it.",
    epilog="Start here: mqks pipeline archive clicks lake --once",
    no_args_is_help=True,
)

Queue = Annotated[str, queue_argument("The queue, or a mask of several; without consumers.")]


def _place(text: str) -> Path | str:
    from mqks.pipeline import job  # here, so that --help need not load it

    return job.place(text)


def _in_catalog(lake: Any, catalog: str | None) -> Any:
    return _place(f"iceberg://{catalog}/{lake}") if catalog else lake


LakePlace = Annotated[
    Any,
    typer.Argument(
        metavar="LAKE",
        help="The directory of the lake, or a table as s3://bucket/path, gs://…, az://….",
        parser=_place,
    ),
]
Catalog = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="A catalog of pyiceberg; the lake is namespace.table in it."),
]
Start = Annotated[
    datetime | None,
    typer.Option(parser=instant, metavar="TIME", help="Arrivals from 2026-11-20T12:00 (UTC)."),
]
End = Annotated[
    datetime | None,
    typer.Option(parser=instant, metavar="TIME", help="Arrivals before this time."),
]


class Spark(TypedDict):
    master: Annotated[
        str | None,
        "URL",
        r"Spark's master, such as local\[2] or spark://host:7077. \[default: local\[*]; archive"
        " leaves a core to a broker on this machine]",
    ]
    conf: Annotated[list[str] | None, "NAME=VALUE", "A setting of Spark. Repeatable."]


def archive(
    queue: Queue,
    lake: LakePlace,
    url: Url = None,
    once: Annotated[bool, "End when everything is archived."] = False,
    catalog: Catalog = None,
    format: Annotated[
        Literal["parquet", "delta", "iceberg"] | None,
        "Plain files, or a table. \\[default: parquet; delta on a store; iceberg in a catalog]",
    ] = None,
    by: Annotated[
        str | None,
        *("--by", "--partition", "LIST"),
        "Partitions, with commas: day, hour, event, parsed (whether the payload fits the schema),"
        " 'day(data.created_at)', hour(…), month(…), 'bucket(16, key)', data.country."
        " \\[default: as the lake has it, or day]",
    ] = None,
    partitions_max: Annotated[
        int, typer.Option(min=1, max=100_000, help="The most partitions in a task of a batch.")
    ] = 10_000,
    sort: Annotated[
        str | None,
        "FIELDS",
        "The order of the rows of a file: 'data.user, offset'. \\[default: as they arrived]",
    ] = None,
    rename: Annotated[
        Path | None,
        "FILE",
        'Names of payload fields in the lake, as JSON or TOML: {"old.field": "new"}.'
        " \\[default: those of the payload]",
    ] = None,
    upsert: Annotated[
        str | None,
        "FIELD",
        "Only the last message of each value of this column or field is in a table: ordering_key"
        " (publish --key), key (the message id), data.id. One with an empty payload deletes."
        " \\[default: as the table has it]",
    ] = None,
    delete_where: Annotated[
        str | None,
        "FIELD",
        "With --upsert: messages with true in this field delete, too: data.deleted."
        " \\[default: as the table has it]",
    ] = None,
    table_by: Annotated[
        Literal["event"] | None,
        "event: a table for each event, LAKE/order.new, or namespace.table_order__new in a catalog."
        " \\[default: one for all]",
    ] = None,
    tables_max: Annotated[
        int, typer.Option(min=1, max=500, help="The most tables with --table-by.")
    ] = 100,
    schema: Annotated[
        list[str] | None,
        "[MASK=]DDL|FILE",
        "Parse JSON payloads into the column data: 'user string, n bigint', or a file with DDL or"
        " Spark's JSON schema; or of Avro and Protobuf: orders.avsc, or orders.desc:shop.Order."
        " Repeatable with --table-by: 'order.*=id bigint' is of these events.",
    ] = None,
    registry: Annotated[
        str | None,
        "URL",
        "The schema registry of which payloads of Avro and Protobuf begin with a schema's id."
        " \\[default: they do not]",
    ] = None,
    bad_rows: Annotated[
        str | None,
        "LAKE",
        "Archive messages there whose payload does not fit the schema, with the reason."
        " \\[default: with the others, without data]",
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="The most messages of a batch.")] = 1_000_000,
    interval: Annotated[
        float, typer.Option(min=0, help="Seconds after which a smaller batch is written.")
    ] = 10.0,
    merge: Annotated[
        float,
        *("--merge", "--roll", "SECONDS"),
        "Merge small files of a directory after this time at the latest; 0: never.",
    ] = 300.0,
    keep: Annotated[
        float | None,
        "SECONDS",
        "Remove days from a table that are older: 90d.",
    ] = None,
    trim: Annotated[bool, "--trim/--no-trim", "Drop archived messages from the queue."] = True,
    reader: Annotated[
        str | None,
        "NAME",
        "The name of this archive among the readers of the queue (set-queue --readers), which is"
        " trimmed up to the slowest. \\[default: none]",
    ] = None,
    include_replays: Annotated[
        bool, "--include-replays", "Store also replayed messages whose originals are in the lake."
    ] = False,
    fail_on_data_loss: Annotated[
        bool,
        "--fail-on-data-loss/--no-fail-on-data-loss",
        "End with 65 if messages are gone that were not archived.",
    ] = True,
    openlineage: Annotated[
        str | None,
        "URL|FILE",
        "Send events of OpenLineage there: what was read and written, by each batch."
        " \\[default: none]",
    ] = None,
    as_json: AsJson = False,
    **spark: Unpack[Spark],
) -> None:
    """Move the messages of a queue into Parquet files or a table, each exactly once.

    Runs until SIGTERM or SIGINT, unless --once is given.
    """
    lake = _in_catalog(lake, catalog)
    with _job("archive", spark, url) as begin:
        from mqks.pipeline.archive import Archive, warm
        from mqks.pipeline.errors import BadOption
        from mqks.pipeline.job import by_mask, schema_of, stop_on_signal
        from mqks.pipeline.layout import Layout, column, is_of_data, order, partitions, renames
        from mqks.pipeline.places import lake_at
        from mqks.pipeline.reader import is_mask
        from mqks.pipeline.records import fields_of, records_of
        from mqks.pipeline.session import BRIEF, LATER, context
        from mqks.pipeline.tables import EventTables
        from mqks.pipeline.upsert import Upsert
        from mqks.pipeline.wire import ServerAddress

        if bad_rows and not (schema or upsert):
            raise BadOption("--bad-rows needs --schema or --upsert")
        schemas = by_mask(schema or ())
        if schemas.keys() - {"**"} and not table_by:
            raise BadOption("--schema MASK=DDL needs --table-by event")
        names = renames(rename) if rename else {}
        keys = None
        if upsert:
            if is_mask(queue):
                raise BadOption("--upsert is of one queue: give each its own archive")
            where = column("--delete-where", delete_where, "boolean") if delete_where else None
            keys = Upsert(queue, column("--upsert", upsert, "key"), where)
        elif delete_where:
            raise BadOption("--delete-where needs --upsert")
        layout = Layout(partitions(by), order(sort), partitions_max, names, keys)
        fields = any(map(is_of_data, layout.partitions)) or any("." in each for each in layout.sort)
        fields |= any("." in each for each in (upsert or "", delete_where or ""))
        if (fields or rename) and not schema:
            raise BadOption(
                "--rename, and fields in --by, --sort, --upsert and --delete-where, need --schema"
            )
        records = {mask: records_of(text, registry) for mask, text in schemas.items()}
        if registry and not any(records.values()):
            raise BadOption("--registry needs --schema FILE.avsc, or FILE.desc:MESSAGE")
        messages = 0
        job = Archive(
            queue=queue,
            server=ServerAddress(url=url),
            once=once,
            batch_messages=batch,
            interval_s=interval,
            roll_s=merge,
            keep_s=keep,
            trim=trim,
            reader=reader,
            include_replays=include_replays,
            fail_on_data_loss=fail_on_data_loss,
        )
        if isinstance(lake, Path) and not lake.exists():
            job.check()
        whole = (
            EventTables(lake, format, layout, tables_max=tables_max)
            if table_by
            else lake_at(lake, format, layout)
        )
        # Before Spark: what is wrong with the lake need not wait for Java.
        with whole as opened, ExitStack() as stack:
            lineage = None
            if openlineage:
                from mqks.pipeline.lineage import Lineage

                lineage = stack.enter_context(Lineage(openlineage, job.server.url, queue, lake))
            bad = None
            if bad_rows:
                other = _in_catalog(bad_rows, catalog) if catalog else _place(bad_rows)
                bad = stack.enter_context(lake_at(other, format, layout.plain()))
            java = BRIEF if all(records.values()) else LATER
            running = begin(partial(context, url=url), java)
            if schema or not once:  # Meanwhile it reads schemas, or waits for messages.
                warm(running)
            given = {  # It asks Spark.
                mask: records[mask] or schema_of(text) for mask, text in schemas.items()
            }
            if lost := {*names}.difference(*map(fields_of, given.values())):
                raise BadOption(f"--rename: no schema has {min(lost)}")
            job = replace(job, schemas=given)
            for progress in job.run(running, opened, stop_on_signal(), bad):
                messages += progress.messages
                if lineage:
                    lineage.batch(progress)
                if as_json:
                    tell(asdict(progress), as_json)
                else:
                    rate = progress.messages / progress.seconds
                    apart = {"unparsed": progress.unparsed, "replayed": progress.left_out}
                    told = "".join(f", {count:,} {what}" for what, count in apart.items() if count)
                    typer.echo(
                        f"{progress.queue}: {progress.messages:,} messages in"
                        f" {duration(progress.seconds)}"
                        f" ({rate:,.0f}/s), {progress.files} files{told}, lag {progress.lag:,}",
                        err=True,
                    )
        if not as_json:
            typer.echo(f"{messages:,} messages archived", err=True)
        if "**" in schemas and messages and opened.lacks_data():
            note(
                f"older files of {lake} have no column data: read the lake in Spark with the "
                "option mergeSchema=true, in pyarrow with a schema= that has it, or that column "
                "is missing (docs/pipeline.md, Payloads)"
            )


def report(
    lake: LakePlace = None,
    catalog: Catalog = None,
    queue: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE",
            help="Report on the messages in this queue instead.",
            autocompletion=complete.queues,
        ),
    ] = None,
    url: Url = None,
    start: Start = None,
    end: End = None,
    window: Annotated[
        int | None, typer.Option(min=1, help="Seconds of a window. \\[default: by the time told]")
    ] = None,
    sent_field: Annotated[
        str | None, "FIELD", "Field of the payload with the time it was sent, for delays."
    ] = None,
    bad: Annotated[bool, "LAKE has bad rows: count their reasons, too."] = False,
    html: Annotated[Path | None, "FILE", "Write an HTML page with charts."] = None,
    parquet: Annotated[Path | None, "FILE", "Write the windows to a Parquet file."] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of events to show.")] = 20,
    as_json: AsJson = False,
    **spark: Unpack[Spark],
) -> None:
    """Count the messages of a lake by event and window, with delays and silent events.

    With --queue, reports on the messages in a queue, without consuming them.
    """
    if (lake is None) == (queue is None):
        raise typer.BadParameter("give either a lake or --queue")
    lake = _in_catalog(lake, catalog)
    with _job("report", spark, url, lake) as begin:
        session = begin()
        from mqks.pipeline import page
        from mqks.pipeline import report as reports
        from mqks.pipeline.places import messages

        if lake:
            rows = messages(session, lake, bad=bad)
        else:
            rows = reports.waiting(session, queue or "", url)
        found = reports.report(
            reports.between(rows, start, end),
            title=f"Lake {lake.name if isinstance(lake, Path) else lake}"
            if lake
            else f"Queue {queue}",
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


def replay(
    lake: LakePlace,
    catalog: Catalog = None,
    url: Url = None,
    start: Start = None,
    end: End = None,
    events: Annotated[
        str, "MASK", "Only these events: * is anything without a dot, ** all."
    ] = "**",
    speed: Annotated[str, "NUMBER|max", "1: the original pace; 10: ten times faster."] = "max",
    name: Annotated[
        str, "Name of this replay. The same name continues it; another one starts again."
    ] = "replay",
    bad: Annotated[
        bool,
        "LAKE has bad rows, which are in no other lake: publish them as they were, without the"
        " attributes of a replay.",
    ] = False,
    dry_run: Annotated[bool, "Count messages, and publish nothing."] = False,
    yes: Annotated[bool, "Also into queues that the lake was archived from."] = False,
    as_json: AsJson = False,
    **spark: Unpack[Spark],
) -> None:
    """Publish the messages of a lake again, each exactly once, in their order of arrival.

    The same command continues a replay that was stopped or killed. A replay into the broker that
    the lake is archived from adds the messages to the lake a second time: it needs --yes.
    """
    times, lake = _speed(speed), _in_catalog(lake, catalog)
    if "?" in events:
        note("--events: in a mask, ? matches only itself, and * any characters except dots")
    with _job("replay", spark, url, lake) as begin:
        session = begin()
        from mqks.pipeline.job import stop_on_signal
        from mqks.pipeline.replay import Replay
        from mqks.pipeline.wire import ServerAddress

        job = Replay(
            lake=lake,
            server=ServerAddress(url=url),
            name=name,
            start=start,
            end=end,
            events=events,
            speed=times,
            bad=bad,
        )
        if dry_run:
            counts = [{"event": event, "messages": count} for event, count in job.counts(session)]
            table(counts, ["event", "messages"], as_json=as_json)
        if not (yes or bad) and (queues := job.archived_here(session)):
            _warn_of_doubles(lake, queues, dry_run=dry_run)
        if dry_run:
            return
        began_s = time.monotonic()
        for progress in job.run(session, stop_on_signal()):
            if as_json:
                tell(asdict(progress), as_json)
            else:
                passed = duration(time.monotonic() - began_s)
                typer.echo(
                    f"{progress.messages:,} of {progress.total:,} messages, {passed}", err=True
                )


def schema(
    queue: Annotated[str, queue_argument("The queue.")],
    url: Url = None,
    messages: Annotated[int, typer.Option(min=1, help="The first so many are read.")] = 10_000,
    as_json: AsJson = False,
    **spark: Unpack[Spark],
) -> None:
    """Propose a schema for the JSON payloads of a queue, for archive --schema.

    Nothing is consumed. Look at it before you use it: later messages may have other fields.
    """
    with _job("schema", spark, url) as begin:
        from mqks.pipeline.errors import BadOption
        from mqks.pipeline.payloads import proposed
        from mqks.pipeline.reader import QueueReader

        with QueueReader(url, queue) as reader:
            log = reader.range()
            batches = (each["value"].to_pylist() for each in reader.read(log.first, log.next))
            payloads = [*islice(chain.from_iterable(batches), messages)]
        found, fit = proposed(begin(), payloads) if payloads else (None, 0)
        if not found:
            raise BadOption(f"the queue {queue} has no JSON objects to tell a schema from")
        if as_json:
            tell({"schema": found.toDDL(), "messages": len(payloads), "fit": fit}, as_json)
            return
        typer.echo(found.toDDL())
        advice = "; archive the others with --bad-rows" if fit < len(payloads) else ""
        typer.echo(f"{fit:,} of {len(payloads):,} messages fit{advice}", err=True)


def verify(
    lake: LakePlace,
    catalog: Catalog = None,
    url: Annotated[
        str | None,
        "URL",
        "Compare also with what this server has in the queues of the lake. \\[default: none]",
    ] = None,
    bad_rows: Annotated[
        str | None, "LAKE", "With --url: the lake of the bad rows. \\[default: none]"
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare the rows of a lake with what was archived into it.

    Ends with 65 if rows were added, lost, doubled or changed since, and names them; with --url also
    if the server has other messages, or has dropped some that were not archived.
    """
    from mqks.client.errors import RequestFailed  # here, so that --help need not load them
    from mqks.pipeline import job  # here, so that --help need not load them

    if bad_rows and not url:
        raise typer.BadParameter("--bad-rows needs --url: the sums of a lake are of its own rows")
    lake = _in_catalog(lake, catalog)
    bad = bad_rows and (_in_catalog(bad_rows, catalog) if catalog else _place(bad_rows))
    job.check_is_there(lake)
    job.check_extra()
    from mqks.pipeline.errors import LakeDiffers, LakeUnfit
    from mqks.pipeline.places import existing, tables_of, whole_of
    from mqks.pipeline.verify import Verification, compared
    from mqks.pipeline.wire import ServerAddress

    if url and (whole := whole_of(lake)):
        raise LakeUnfit(f"{lake} has one event of its queues: with --url, verify {whole}")
    differing, known = list[str](), set[tuple[str, str]]()
    for place in tables_of(lake):
        with existing(place) as opened:
            verification = Verification(opened)
            found = verification.run()
        known |= verification.queues
        of = "" if place == lake else f"{place}: "
        if as_json:
            tell(asdict(found) | ({"table": str(place)} if of else {}), as_json)
        elif not found.differences:
            queues = "1 queue" if found.queues == 1 else f"{found.queues} queues"
            typer.echo(f"{of}{found.messages:,} messages of {queues}: all as archived")
        if found.unchecked:
            note(f"{found.unchecked:,} rows are not checked: an older version has archived them")
        differing += [f"{place}: {difference}" for difference in found.differences]
    if url:
        try:
            both = compared(lake, known, ServerAddress(url=url), bad)
        except RequestFailed as error:
            raise explained(error, url) from None
        differing += [f"{lake}: {difference}" for difference in both.differences]
        line = f"{both.messages:,} messages that the server still has: all in the lake"
        tell(asdict(both), as_json, "" if both.differences else line)
    if differing:
        for difference in differing[:-1]:
            note(difference)
        raise LakeDiffers(differing[-1])


def vacuum(
    lake: LakePlace,
    catalog: Catalog = None,
    older_than: Annotated[
        float | None, "SECONDS", "Only files older than this, at least 1d. \\[default: 7d]"
    ] = None,
    dry_run: Annotated[bool, "Print the files, and delete nothing."] = False,
    as_json: AsJson = False,
) -> None:
    """Delete files of a table that none of its versions needs.

    They are of expired snapshots, or of an archive that was killed. Archives of Delta tables do so
    by themselves. Running archives and readers are not disturbed.
    """
    from mqks.pipeline import job  # here, so that --help need not load them

    age_s = 604_800.0 if older_than is None else older_than
    if age_s < 86_400:
        raise typer.BadParameter(
            "--older-than is at least 1d: archives and readers use what is new"
        )
    lake = _in_catalog(lake, catalog)
    job.check_is_there(lake)
    job.check_extra()
    from mqks.pipeline.places import existing, parts_of

    found = []
    for place in parts_of(lake):
        with existing(place) as opened:
            found += opened.vacuum(age_s, dry_run=dry_run)
    told = f"{len(found):,} files {'to delete' if dry_run else 'deleted'}"
    tell({"files": found, "dry_run": dry_run}, as_json, "\n".join([*found * dry_run, told]))


COMMANDS: dict[Run, str] = {
    archive: "mqks pipeline archive clicks lake --once",
    report: "mqks pipeline report lake --window 3600 --html report.html",
    replay: "mqks pipeline replay lake --events 'order.*' --dry-run",
    schema: "mqks pipeline schema clicks",
    verify: "mqks pipeline verify lake",
    vacuum: "mqks pipeline vacuum lake --dry-run",
}
for run, example in COMMANDS.items():
    declare(app, run, example)


def _warn_of_doubles(lake: Path | str, queues: list[str], *, dry_run: bool) -> None:
    """Raises ReplayDoubles unless the user confirms the replay at a terminal."""
    from mqks.pipeline.errors import ReplayDoubles  # here, so that --help need not load them

    told = (
        f"{lake} was archived from {', '.join(queues)} of this server: if that queue receives the "
        "replayed messages and is archived again, the lake contains each of them twice (with "
        "--include-replays), and consumers of the same events receive them twice"
    )
    if dry_run:
        note(f"{told}; without --dry-run this needs --yes")
    elif sys.stdin.isatty():
        note(told)
        confirm("Replay?", False)
    else:
        raise ReplayDoubles(
            f"{told}. Replay into another server (--url), unbind the queue, or give --yes"
        )


def _show(report: "Report", top: int) -> None:
    """Print a summary; `--json` has everything."""

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
        "Bad rows": [shown(**asdict(reason)) for reason in report.reasons],
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
        raise typer.BadParameter(f"--speed {text!r} is not max or a number above 0, such as 10")
    return speed


@contextmanager
def _job(
    name: str, spark: Spark, url: str | None, lake: Path | str | None = None
) -> "Iterator[Begin]":
    """What begins Spark, which ends with the job. The lake, if given, must exist. Errors of the
    server get their reason."""
    from mqks.client.errors import RequestFailed  # here, so that --help need not load them
    from mqks.pipeline import job

    if lake:
        job.check_is_there(lake)
    job.check_extra()

    try:
        with job.spark_of(name, spark["master"], dict(map(_pair, spark["conf"] or []))) as opened:
            yield opened
    except RequestFailed as error:
        raise explained(error, url) from None


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise typer.BadParameter(
            f"--conf {text!r} is not NAME=VALUE, such as spark.driver.memory=2g"
        )
    return name, value
