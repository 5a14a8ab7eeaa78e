"""`mqks import`: its options; `transfer.importing` tells how it is done."""

import os
import stat
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from mqks.commands.connection import Timeout, limited
from mqks.commands.options import AsJson, Url, note, progress, tell
from mqks.errors import ImportFailed


def import_(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="An export; - reads the input.", readable=False),
    ],
    url: Url = None,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", metavar="QUEUE", help="Only this one; repeat.")
    ] = None,
    event: Annotated[
        str | None,
        typer.Option(metavar="EVENT", help="Give all messages this event in place of their own."),
    ] = None,
    merge: Annotated[bool, typer.Option("--merge", help="Also into queues that exist.")] = False,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Bring an export into a running server: queues, messages, bindings and rules.

    Exit code 65 tells the line that is wrong; those before it are imported. With --event they
    reach their queue alone, whatever other queues are bound to.
    """
    from mqks.client import requests  # here, so that --help need not load them
    from mqks.client.dialogue import Dialogue
    from mqks.transfer.importing import Import, lines_of

    only = list(map(requests.name, queue or []))
    event_for_all = None if event is None else requests.name(event)
    with (
        _opened(file) as source,
        Dialogue(url, limited(timeout)) as server,
        progress("Importing", _size(source)) as advance,
    ):
        work = Import(server, only=only, event=event_for_all, merge=merge, note=note)
        counts = work.run(lines_of(source, advance))
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    tell(counts, as_json, f"{told} imported")


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise ImportFailed(f"{file}: {error.strerror}") from None


def _size(source: BinaryIO) -> int | None:
    """Bytes of a file; of a pipe nobody knows."""
    about = os.fstat(source.fileno())
    return about.st_size if stat.S_ISREG(about.st_mode) else None
