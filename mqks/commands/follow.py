"""`mqks follow` keeps a copy of a journal up to date, `mqks restore` brings back a moment of it.

The one rule: an outage of the copy ends neither the command nor the broker.
"""

import os
import signal
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from mqks.commands.options import Database, Told, note
from mqks.commands.pipeline import instant
from mqks.errors import ConfigurationError, InspectionFailed, reason
from mqks.settings import load

PAUSE_S_MAX = 15.0
"""The longest pause before a copy that is away is tried again."""

UNTIL = "mqks_follow_until_seconds"

At = Annotated[
    datetime | None,
    typer.Option("--at", parser=instant, metavar="TIME", help="Such as 2026-11-20T12:00:30 (UTC)."),
]


def follow(
    to: Annotated[str, "TO", "A directory, or a place such as s3://bucket/prefix."],
    db: Database = None,
    keep: Annotated[float, "SECONDS", "How far back a restore can go."] = 14 * 86400.0,
    metrics: Annotated[
        Path | None, "PATH", r"Write metrics to this file, for node_exporter. \[default: none]"
    ] = None,
    once: Annotated[bool, "End when the copy is up to date."] = False,
) -> None:
    """Keep a copy of a database, also of a running server, up to date until Ctrl-C.

    The copy is less than a second behind. Each state of it can be restored later.
    """
    from mqks.follow.copies import Copy, stamp  # here, so that --help does not load the journal
    from mqks.follow.following import LOOK_S, Follower
    from mqks.pipeline.errors import StoreAway

    path = load({"db": db}, os.environ).db
    if not isinstance(path, Path):
        raise ConfigurationError(
            f"{path} is in PostgreSQL, which has tools of its own: standbys, and pg_basebackup "
            "with an archive of its WAL"
        )
    stop, follower, is_away, pause_s = threading.Event(), None, False, LOOK_S
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    copy = Copy(to)
    while True:
        is_last = stop.is_set() or once
        try:
            follower = follower or Follower(path, copy, keep, note)
            until_us = follower.look()
        except (StoreAway, OSError, InspectionFailed) as error:
            if is_last or (follower is None and isinstance(error, InspectionFailed)):
                raise
            if not is_away:
                told = reason(error) if isinstance(error, OSError) else error
                note(f"{told}; it is tried again")
            is_away, pause_s = True, min(2 * pause_s, PAUSE_S_MAX)
        else:
            if is_away:
                note(f"{to} is up to date again, to {stamp(until_us)}")
            is_away, pause_s = False, LOOK_S
            if metrics is not None:
                _write(metrics, until_us)
        if is_last:
            return
        stop.wait(pause_s)


def _write(metrics: Path, until_us: int) -> None:
    """A time, not a lag, so that it tells of a command that has ended, too."""
    new = metrics.with_name(f"{metrics.name}.new")
    try:
        new.write_text(
            f"# HELP {UNTIL} What was confirmed before is in the copy.\n"
            f"# TYPE {UNTIL} gauge\n"
            f"{UNTIL} {until_us / 1e6}\n"
        )
        new.replace(metrics)
    except OSError as error:
        note(f"{reason(error)}; the metrics are not written")
        time.sleep(1)


def restore(
    copy: Annotated[str, "SOURCE", "The directory or place of the copy."],
    to: Annotated[Path, "TO", "The database file to create."],
    at: At = None,
) -> Told:
    """Create a database from a copy that mqks follow has made, and verify it.

    Without --at it has the last state of the copy, else the last one at or before that time.
    """
    from mqks.follow.copies import Copy  # here, as above
    from mqks.follow.restoring import restore

    found, verdict = restore(Copy(copy), to, at)
    told = {
        "file": str(to),
        "time": found.isoformat(),
        "queues": verdict.queues,
        "messages": verdict.messages,
    }
    return told, (
        f"{to}: as of {found.isoformat()}, {verdict.queues:,} queues, "
        f"{verdict.messages:,} messages, verified"
    )
