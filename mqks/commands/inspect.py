"""`mqks inspect`: shows the state of a running server, or of the file of a stopped one.

The one rule: looking changes nothing and consumes nothing.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Literal, Unpack

import typer

from mqks.commands.complete import queue_argument
from mqks.commands.connection import Timeout, limited, usual_url
from mqks.commands.declare import Run, declare
from mqks.commands.options import (
    After,
    AsJson,
    Database,
    Rows,
    Scheduled,
    SelectionOptions,
    Url,
    duration,
    note,
    shortened,
    table,
    tell,
)
from mqks.errors import InspectionFailed, MqksError
from mqks.inspection.text import data_as_text, moment, printable, time_text
from mqks.limits import AUDIT_TOLD_MAX, SEQ_MAX
from mqks.settings import load

if TYPE_CHECKING:
    from pathlib import Path

    from mqks.inspection.live import Live
    from mqks.inspection.stopped import Source
    from mqks.settings import DatabaseUrl

Row = dict[str, Any]

Limit = Annotated[int, typer.Option(min=1, max=1000, help="The most rows.")]

REASON_S = 0.2

QUEUE = ("name", "ready", "oldest", "consumers", "unacked", "scheduled", "bindings", "rule")
BINDING = ("queue", "event", "mask", "exists")
CONSUMER = (
    *("id", "queue", "connection", "client", "address", "manual_ack", "prefetch"),
    *("ack_timeout_s", "meta"),
    *("unacked", "unacked_bytes", "oldest", "blocked"),
)
CONNECTION = (
    *("id", "name", "address", "user", "consumers", "unacked"),
    *("unconfirmed", "outbox_bytes", "blocked"),
)
UNACKED = ("queue", "seq", "consumer", "delivered", "id", "event", "retry", "data_bytes")
MESSAGE = ("seq", "time", "id", "event", "data_bytes", "retry")
MORE_OF_A_MESSAGE = (
    *("meta", "due", "expires", "rejects", "losses", "dead_letter", "letter"),
    *("escaped", "priority", "key", "unique", "batch"),
)
SCHEDULE = (
    *("name", "when", "event", "paused", "next", "last", "last_queues", "missed", "error"),
    "publish",
)
BATCH = (
    *("name", "total", "waiting", "running", "done", "dead", "closed", "opened", "expires"),
    *("then", "on_dead"),
)
RESULT = ("id", "event", "state", "queue", "reason", "data_bytes", "until")
ARCHIVE = ("queue", "state", "lag", "archived_seq", "told", "commit")
ARCHIVE_OF = (
    *("archive_state", "archived_seq", "next_seq", "archive_lag", "archive_told_age_s"),
    "archive_commit_age_s",
)
CAUSE = "queue", "reason", "why"
ERROR_WIDTHS = ("request_id", 24), ("action", 16), ("reason", 100)
AUDIT = ("time", "user", "client", "connection", "action", "what", "count", "requests")
ERROR = ("id", "time", "connection", "request_id", "action", "reason")

Name = Annotated[str, queue_argument("The queue.")]

app = typer.Typer(
    help="Show the state of a server, or of the file of a stopped one. Consumes nothing.",
    epilog="Example: mqks inspect queues --db mqks.db --sort ready",
    no_args_is_help=True,
)


Sort = Literal[
    "name", "ready", "unacked", "scheduled", "consumers", "bindings", "oldest_age_s", "memory_bytes"
]


def queues(
    source: "Source",
    sort: Annotated[Sort, "Order; except for name, the largest first."] = "name",
    as_json: AsJson = False,
) -> None:
    """List the queues with their messages and consumers."""
    rows = source.queues()
    if sort != "name":
        rows = iter(sorted(rows, key=lambda row: row[sort] or 0, reverse=True))
    counts: Counter[str] = Counter()

    def shown(row: Row) -> Row:
        counts.update(queues=1, ready=row["ready"], unacked=row["unacked"])
        paused = row["paused"] and f"paused: {row['paused']}"
        held = row["held_by"] not in (None, "pause") and f"held by {row['held_by']}"
        told = ", ".join(str(each) for each in (paused, held, _text(row["rule"])) if each)
        return row | {"oldest": _duration(row["oldest_age_s"]), "rule": told or None}

    table(rows if as_json else map(shown, rows), QUEUE, as_json=as_json)
    if sys.stdout.isatty() and not as_json:
        told = (f"{counts[name]:,} {name}" for name in ("queues", "ready", "unacked"))
        typer.echo(", ".join(told))


def queue(source: "Source", name: Name, as_json: AsJson = False) -> None:
    """Show everything about one queue, with its events and consumers."""
    row = source.queue(name)
    _object(row if as_json else row | {"policy": _policy(row.get("policy", {}))}, as_json)


def bindings(
    source: "Source",
    event: Annotated[str | None, typer.Argument(metavar="EVENT", help="Only this event.")] = None,
    as_json: AsJson = False,
) -> None:
    """List which queues get which events, by name or by mask."""
    listed(source.bindings(event), BINDING, as_json)


def consumers(source: "Source", as_json: AsJson = False) -> None:
    """List the consumers of a running server."""
    rows = source.consumers()
    if not as_json:
        rows = (row | {"oldest": _duration(row["oldest_age_s"])} for row in rows)
    listed(rows, CONSUMER, as_json)


def connections(source: "Source", as_json: AsJson = False) -> None:
    """List the connections of a running server."""
    listed(source.connections(), CONNECTION, as_json)


def messages(
    source: "Source",
    name: Name,
    limit: Rows = 20,
    after: After = 0,
    scheduled: Scheduled = False,
    data: Annotated[bool, "Also show the data."] = False,
    full: Annotated[bool, "Do not cut data on a terminal."] = False,
    as_json: AsJson = False,
    **selection: Unpack[SelectionOptions],
) -> None:
    """List the messages of a queue, including unacked ones, without consuming them."""
    from mqks.inspection.source import WantedRows  # here, so that --help need not load it

    found = source.messages(name, WantedRows(after, limit, scheduled or None, selection))
    rows = (message_object(row, data=data) | ({} if as_json else _cells(row)) for row in found)
    columns = (*MESSAGE, "due", "dead_letter", "meta", *(["data"] if data else []))
    table(rows, columns, as_json=as_json, cut="data" if data and not full else "")


def message(
    source: "Source", id: Annotated[str, "ID", "The message id."], as_json: AsJson = False
) -> None:
    """Tell what became of a traced message, step by step: see mqks trace."""
    from mqks.inspection.source import told_of  # here, as above

    rows = [*source.message(id)]
    if not rows:
        note(f"nothing was noted of {id}: only what mqks trace names is, from then on")
    if not as_json:
        rows = [
            row | {"time": time_text(row["time_us"])[:23], "told": told_of(row)} for row in rows
        ]
    table(rows, ("time", "what", "queue", "seq", "told"), as_json=as_json)


def traces(source: "Source", as_json: AsJson = False) -> None:
    """List what is traced, for how long, and by whom."""
    rows = source.traces()
    if not as_json:
        rows = (row | {"left": _duration(row["left_s"])} for row in rows)
    table(rows, ("name", "left", "user", "client", "connection"), as_json=as_json)


def letters(source: "Source", name: Name, limit: Rows = 20, as_json: AsJson = False) -> None:
    """Count the dead letters of a queue by cause, the most frequent first.

    A cause is where and why they died, and what their consumer said, with # for numbers; --where
    of redrive, move and purge takes it, as in --where 'queue=mail&why=no order #'.
    """
    from mqks.inspection.source import group_of  # here, as above

    groups: dict[tuple[str, str, str], Row] = {}
    for row in source.messages(name):
        if dead_letter := row["dead_letter"]:
            key, died = group_of(dead_letter), dead_letter["died"]
            group = groups.setdefault(
                key, {"letters": 0, **dict(zip(CAUSE, key, strict=True)), "first": died}
            )
            group["letters"] += 1
            group |= {"last": died, "id": row["id"]}
    if not groups and (other := source.queue(name)["policy"].get("dead_letters")):
        note(f"there are none in {name}: those of its messages are in {other['value']}")
    found = sorted(groups.values(), key=lambda group: -group["letters"])[:limit]
    if not as_json:
        found = [each | _moments(each, "first", "last") for each in found]
    table(iter(found), ("letters", *CAUSE, "first", "last", "id"), as_json=as_json, cut="why")


def unacked(
    source: "Source",
    name: Annotated[str | None, queue_argument("Only of this queue.")] = None,
    as_json: AsJson = False,
) -> None:
    """List unacked messages of consumers, or those when the server ended."""
    rows = (row | times(row, as_json, "delivered") for row in source.unacked(name))
    listed(rows, UNACKED, as_json)


def archives(source: "Source", as_json: AsJson = False) -> None:
    """List the archives of queues: how far they are, when they told so, and their last commit.

    An archive that has told nothing for a minute is silent: it has ended, hangs, or waits for its
    store. One is paused with the deliveries of its queue: mqks pause QUEUE --deliveries.
    """
    rows = (row for row in source.queues() if row["archived_seq"] is not None)
    found = ({"queue": row["name"]} | {name: row[name] for name in ARCHIVE_OF} for row in rows)
    table(found if as_json else map(_archive, found), ARCHIVE, as_json=as_json)


def _archive(row: Row) -> Row:
    told, commit = row["archive_told_age_s"], row["archive_commit_age_s"]
    cells = {"state": row["archive_state"], "lag": row["archive_lag"]}
    return row | cells | {"told": _duration(told), "commit": _duration(commit)}


def schedules(source: "Source", as_json: AsJson = False) -> None:
    """List the schedules, with the next and the last time of each, in UTC."""
    show_schedules(source.schedules(), as_json)


def batches(source: "Source", as_json: AsJson = False) -> None:
    """List the batches that have not ended, and how many of their messages are done."""
    show_batches(source.batches(), as_json)


def show_batches(rows: Iterable[Row], as_json: bool) -> None:
    told = (row | times(row, as_json, "opened", "expires") for row in rows)
    table(told, BATCH, as_json=as_json)


def results(source: "Source", as_json: AsJson = False) -> None:
    """List the messages of which the result is kept, and what became of each."""
    rows = (row | times(row, as_json, "until") for row in source.results())
    table(rows, RESULT, as_json=as_json)


def show_schedules(rows: Iterable[Row], as_json: bool) -> None:
    told = (row | times(row, as_json, "next", "last") for row in rows)
    table(told if as_json else map(_schedule, told), SCHEDULE, as_json=as_json, cut="publish")


def _schedule(row: Row) -> Row:
    every_s, paused = row["every_s"], _text(row["paused"])
    when = f"{row['cron']} {row['tz']}" if every_s is None else f"every {duration(every_s)}"
    return {**row, "when": when, "paused": paused}


def journal(source: "Source", as_json: AsJson = False) -> None:
    """Show the journal on disk."""
    _object(source.journal(), as_json)


def stats(source: "Source", as_json: AsJson = False) -> None:
    """Show totals, and counters since the start."""
    _object(source.totals(), as_json)


def error(
    id: Annotated[str, "ID", "The id in the reply `m1 error ID`."],
    url: Url = None,
    db: Database = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Show the reason of an error reply."""
    where, rows = _errors(url, db, timeout, 1, id)
    for row in rows:
        return _object(row if as_json else row | _moments(row, "time"), as_json)
    raise InspectionFailed(f"{where}: no error {id}; the server retains only the last ones")


def errors(
    url: Url = None,
    db: Database = None,
    limit: Limit = 20,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List the latest errors, the newest first."""
    _, rows = _errors(url, db, timeout, limit)
    table(rows if as_json else map(_shortened, rows), ERROR, as_json=as_json)


def audit(
    url: Url = None,
    db: Database = None,
    action: Annotated[
        list[str] | None, "ACTION", "Only records of this action, as purge. Repeatable."
    ] = None,
    user: Annotated[str | None, "NAME", "Only of this user."] = None,
    limit: Limit = 20,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """List who logged in, and who changed or removed what, the newest first.

    A server tells its last 1,000 records; with --db the database is read, which has all that are
    kept.
    """
    from mqks.inspection.stopped import audit_of  # here, as above

    database, server = _kept_at(url, db, timeout)
    chooses = bool(action) or user is not None
    if server is None:
        rows = audit_of(database, note, SEQ_MAX if chooses else limit)
    else:
        with server:
            rows = server.audit(AUDIT_TOLD_MAX if chooses else limit)
    rows = [
        row
        for row in rows
        if (not action or row["action"] in action) and (user is None or row["user"] == user)
    ][:limit]
    if not as_json:
        rows = [row | {"what": printable(row["what"])} | _moments(row, "time") for row in rows]
    table(iter(rows), AUDIT, as_json=as_json, cut="what")


COMMANDS: dict[Run, str] = {
    queues: "mqks inspect queues --sort ready",
    queue: "mqks inspect queue mail",
    bindings: "mqks inspect bindings user.created",
    consumers: "mqks inspect consumers",
    connections: "mqks inspect connections",
    messages: "mqks inspect messages mail --limit 5 --data --event 'user.*'",
    message: "mqks inspect message order-17",
    traces: "mqks inspect traces",
    letters: "mqks inspect letters mail",
    unacked: "mqks inspect unacked mail",
    schedules: "mqks inspect schedules --db mqks.db",
    batches: "mqks inspect batches --db mqks.db",
    results: "mqks inspect results --db mqks.db",
    archives: "mqks inspect archives",
    journal: "mqks inspect journal --json",
    stats: "mqks inspect stats --json",
    error: "mqks inspect error 6741f3c2a90be4d5c8123456 --db mqks.db",
    errors: "mqks inspect errors --db mqks.db --limit 5 --json",
    audit: "mqks inspect audit --limit 5",
}
for run, example in COMMANDS.items():
    declare(app, run, example)


def reason_of(error_id: str) -> str | None:
    """The reason of a refused request, if `inspect` would read the database of its server."""
    from mqks.inspection.stopped import errors_of  # here, so that --help need not load them

    with suppress(MqksError):
        path, ends_s = load({}, os.environ).db_file, time.monotonic() + REASON_S
        # The reply may be a moment ahead of the commit that holds the reason.
        while path.is_file():
            for row in errors_of(path, note, 1, error_id):
                return str(row["reason"])
            if time.monotonic() > ends_s:
                break
            time.sleep(0.02)
    return None


# ------------------------------------------------------------------------------ where to look


def _errors(
    url: str | None, db: str | None, timeout_s: float, limit: int, error_id: str | None = None
) -> tuple[object, list[Row]]:
    """Where they are kept, and the latest ones, the newest first, or that one, if it is there."""
    from mqks.inspection.stopped import errors_of  # here, as above

    database, server = _kept_at(url, db, timeout_s)
    if server is None:
        return database, errors_of(database, note, limit, error_id)
    with server:
        return server.address, server.errors(limit, error_id)


def _kept_at(
    url: str | None, db: str | None, timeout_s: float
) -> "tuple[Path | DatabaseUrl, Live | None]":
    """The database that has errors and audit, or the server to ask instead.

    The file has more of them than the server, and can be read while it is served. The server is
    asked where there is no file.
    """
    from mqks.inspection.live import Live  # here, as above
    from mqks.inspection.stopped import usual_server

    options = limited(timeout_s)
    settings = load({"db": db}, os.environ)
    if url and db is None:
        return settings.db, Live(url, options)
    server = usual_server(settings.db, options, usual_url(settings)) if db is None else None
    return settings.db, server


# ------------------------------------------------------------------------------ what is shown


def _object(row: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        tell(row, as_json)
    else:
        lines = []
        for name, value in row.items():
            if name.endswith("until_s"):
                name, value = name[:-2], value and _moment_s(value)
            elif name.endswith("_s"):
                name, value = name[:-2], _duration(value)
            text = _text(value)
            lines.append({"what": name, "value": None if text is None else str(text)})
        table(lines, ("what", "value"))


def listed(rows: Iterable[Row], columns: Sequence[str], as_json: bool) -> None:
    if not as_json:
        rows = ({name: _text(row.get(name)) for name in row} for row in rows)
    table(rows, columns, as_json=as_json)


def _text(value: object) -> object:
    """As people read it; numbers stay what they are, to be aligned."""
    match value:
        case {"rejects": _}:
            assert isinstance(value, dict)
            return " ".join(f"{name}={count}" for name, count in value.items())
        case bool():
            return "yes" if value else "no"
        case list():
            return " ".join(map(str, value)) or "-"
        case {"delay_s": delay_s}:
            return "delete at once" if delay_s is None else f"delete after {duration(delay_s)}"
    return value


def _policy(told: Row) -> list[str]:
    """What holds for a queue, and of defaults for which queues they are."""
    values = {field: _text(each["value"]) for field, each in told.items()}
    if until_s := told.get("paused_until_s"):
        values["paused_until_s"] = _moment_s(until_s["value"])
    return [
        f"{field}={values[field]}" + (f" (as {each['name']})" if "name" in each else "")
        for field, each in told.items()
    ]


def _shortened(row: Row) -> Row:
    """An error in one line: clients may have sent anything. `inspect error` shows all of it."""
    told = {name: shortened(printable(row[name]), width) for name, width in ERROR_WIDTHS}
    return row | told | _moments(row, "time")


def _duration(seconds: float | None) -> str | None:
    return None if seconds is None else duration(seconds)


def _moment_s(seconds: float) -> str:
    return moment(int(seconds * 1e6))


def times(row: Row, as_json: bool, *names: str) -> Row:
    """Times that `stats` tells in microseconds, as text."""
    shown = time_text if as_json else moment
    return {name: (at := row[f"{name}_us"]) and shown(at) for name in names}


def _moments(row: Row, *names: str) -> Row:
    """Times that are text, for people."""
    return {name: row[name] and moment(row[name]) for name in names}


def message_object(row: Row, *, data: bool) -> Row:
    """A message as `--json` tells it."""
    raw: bytes = row["data"]
    shown = {name: row.get(name, len(raw)) for name in (*MESSAGE, "doubtful", *MORE_OF_A_MESSAGE)}
    return shown | (data_as_text(raw) if data else {})


def _cells(row: Row) -> Row:
    """What stands otherwise in a table."""
    told, data = row["dead_letter"], row["data"].decode("utf-8", "surrogateescape")
    cause = told and ": ".join(filter(None, (told["reason"], told["why"])))
    return {**_moments(row, "time", "due"), "dead_letter": cause, "data": data}
