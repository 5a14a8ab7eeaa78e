"""`mqks export`: its options; `transfer.exporting` describes the lines."""

import json
import sys
from contextlib import nullcontext
from typing import Annotated

import typer

from mqks.commands.connection import Timeout
from mqks.commands.inspect import source_of
from mqks.commands.options import Database, Url, progress


def export(
    context: typer.Context,
    url: Url = None,
    db: Database = None,
    messages: Annotated[bool, typer.Option("--messages", help="Also export messages.")] = False,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", metavar="QUEUE", help="Only this queue. Repeatable."),
    ] = None,
    timeout: Timeout = 30.0,
) -> None:
    """Write queues, bindings and optionally messages as JSON lines.

    Reads from a running server, or from the file of a stopped one.
    """
    from mqks.transfer.exporting import lines  # here, so that --help need not load them

    # On a terminal, the bar would be mixed with the lines.
    bar = nullcontext(lambda more: None) if sys.stdout.isatty() else progress("Exporting")
    with source_of(context, url, db, timeout) as opened, bar as advance:
        for row in lines(opened, messages, queue or []):
            sys.stdout.write(json.dumps(row) + "\n")
            advance(1)
        sys.stdout.flush()
