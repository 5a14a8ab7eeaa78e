"""`mqks inspect`: look into a database, also while a server has it open.

The one rule: read only and briefly. A second connection that writes or checkpoints could
damage the file, and a long read keeps the WAL from being folded back.
"""

import json
import os
import sqlite3
import time
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer

from mqks.errors import InspectionFailed, MqksError
from mqks.settings import load

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
REASON_S = 0.2
_COLUMNS = "id, time_us, connection, request_id, action, reason"

Database = Annotated[
    Path | None, typer.Option("--db", metavar="PATH", help="The database; as for serve.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]

app = typer.Typer(
    help="Look into a database, also while it is served.",
    epilog="Example: mqks inspect errors --db mqks.db --limit 5",
    no_args_is_help=True,
)


@app.command(epilog="Example: mqks inspect error 6741f3c2a90be4d5c8123456 --db mqks.db")
def error(
    id: Annotated[str, typer.Argument(metavar="ID", help="As in the reply: m1 error ID.")],
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Tell what stands behind one error reply."""
    path = _database(db)
    found = _read(path, f"select {_COLUMNS} from error where id = ?", id)
    if not found:
        raise InspectionFailed(f"{path}: no error {id}; only the last errors_kept_max are kept")
    if as_json:
        typer.echo(json.dumps(found[0]))
    else:
        for name, value in found[0].items():
            typer.echo(f"{name:<11} {_printable(value)}")


@app.command(epilog="Example: mqks inspect errors --db mqks.db --limit 5 --json")
def errors(
    db: Database = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="At most this many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List the latest errors, the newest first."""
    newest = f"select {_COLUMNS} from error order by id desc limit ?"
    for found in _read(_database(db), newest, limit):
        line = json.dumps(found) if as_json else "  ".join(map(_printable, found.values()))
        typer.echo(line)


def reason_of(error_id: str) -> str | None:
    """Why a server refused something, if its database is the one that is meant here."""
    with suppress(MqksError):
        path, ends_s = _database(None), time.monotonic() + REASON_S
        # The reply may be a moment ahead of the commit that holds the reason.
        while path.is_file():
            for found in _read(path, f"select {_COLUMNS} from error where id = ?", error_id):
                return str(found["reason"])
            if time.monotonic() > ends_s:
                break
            time.sleep(0.02)
    return None


def _database(flag: Path | None) -> Path:
    return load({"db": flag}, os.environ).db


def _read(path: Path, select: str, value: object) -> list[dict[str, Any]]:
    """The rows of one short read, as they can be shown. Raises InspectionFailed."""
    if not path.is_file():
        raise InspectionFailed(f"{path}: no such file")
    uri = f"{path.absolute().as_uri()}?mode=ro"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            connection.text_factory = _decoded
            connection.execute("pragma query_only = 1")
            return [_shown(row) for row in connection.execute(select, (value,))]
    except sqlite3.Error as error:
        raise InspectionFailed(f"{path}: {error}") from None


def _shown(row: sqlite3.Row) -> dict[str, Any]:
    """Bytes as text, and microseconds since 1970 as an ISO 8601 time in UTC."""
    shown: dict[str, Any] = {"id": row["id"], "time": _time(row["time_us"])}
    for name in ("connection", "request_id", "action", "reason"):
        value = row[name]
        shown[name] = _decoded(value) if isinstance(value, bytes) else value
    return shown


def _time(time_us: int) -> str:
    return (_EPOCH + timedelta(microseconds=time_us)).isoformat(timespec="microseconds")


def _decoded(value: bytes) -> str:
    return value.decode("utf-8", "backslashreplace")


def _printable(text: str | None) -> str:
    """What a client sent must not steer the terminal: control characters are escaped."""
    if text is None:
        return "-"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
