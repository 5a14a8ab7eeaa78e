"""`mqks export`: its options; `transfer.exporting` tells what the lines say."""

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
    messages: Annotated[bool, typer.Option("--messages", help="The messages, too.")] = False,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", metavar="QUEUE", help="Only this one; repeat.")
    ] = None,
    timeout: Timeout = 30.0,
) -> None:
    """Write queues, bindings and, if asked, messages as JSON lines.

    From a server while it runs, or from the file of one that does not.
    """
    from mqks.transfer.exporting import lines  # here, so that --help need not load them

    # On a terminal the bar would stand between the lines.
    bar = nullcontext(lambda more: None) if sys.stdout.isatty() else progress("Exporting")
    with source_of(context, url, db, timeout) as opened, bar as advance:
        for row in lines(opened, messages, queue or []):
            sys.stdout.write(json.dumps(row) + "\n")
            advance(1)
        sys.stdout.flush()
