"""`mqks export` and `mqks import`: their options; `transfer/` does the work."""

import json
import os
import stat
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mqks.commands.connection import Server, limited
from mqks.commands.options import Names, Told, note, progress
from mqks.errors import ImportFailed

if TYPE_CHECKING:
    from mqks.inspection.stopped import Source


def export(
    source: "Source",
    messages: Annotated[bool, "Also export messages."] = False,
    queue: Annotated[Names, "QUEUE", "Only this queue. Repeatable."] = None,
) -> None:
    """Write queues, bindings and optionally messages as JSON lines.

    Reads from a running server, or from the file of a stopped one.
    """
    from mqks.transfer.exporting import lines  # here, so that --help need not load them

    # On a terminal, the bar would be mixed with the lines.
    bar = nullcontext(lambda more: None) if sys.stdout.isatty() else progress("Exporting")
    with bar as advance:
        for row in lines(source, messages, queue or []):
            sys.stdout.write(json.dumps(row) + "\n")
            advance(1)
        sys.stdout.flush()


def import_(
    server: Server,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An export; - reads stdin.", readable=False)
    ],
    queue: Annotated[Names, "QUEUE", "Only this queue. Repeatable."] = None,
    event: Annotated[str | None, "EVENT", "Publish all messages with this event."] = None,
    merge: Annotated[bool, "Also import into queues that exist."] = False,
) -> Told:
    """Add an export to a running server: queues, messages, bindings and rules.

    On exit code 65, an invalid line is named; the lines before it are imported. With --event,
    messages are added only to their own queue, whatever other queues are bound to.
    """
    from mqks.client import requests  # here, as above
    from mqks.client.wire import Wire
    from mqks.transfer.importing import Import, lines_of

    only = list(map(requests.name, queue or []))
    event_for_all = None if event is None else requests.name(event)
    with (
        _opened(file) as source,
        Wire(server.url, limited(server.timeout_s)) as asked,
        progress("Importing", _size(source)) as advance,
    ):
        work = Import(asked, only=only, event=event_for_all, merge=merge, note=note)
        counts = work.run(lines_of(source, advance))
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return counts, f"{told} imported"


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise ImportFailed(f"{file}: {error.strerror}") from None


def _size(source: BinaryIO) -> int | None:
    """The bytes of a file; None for a pipe."""
    about = os.fstat(source.fileno())
    return about.st_size if stat.S_ISREG(about.st_mode) else None
