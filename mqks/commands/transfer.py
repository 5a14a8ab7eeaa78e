"""`mqks export` and `mqks import`: their options; `transfer/` does the work."""

import os
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from mqks.commands.connection import ServerOptions, limited, url_or_usual
from mqks.commands.options import Names, Told, note, progress
from mqks.errors import ImportFailed
from mqks.settings import load

if TYPE_CHECKING:
    from mqks.inspection.stopped import Source


LINES = 1000
"""Of an export that are written at once."""


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
        rows = lines(source, messages, queue or [])
        while some := [*islice(rows, LINES)]:
            sys.stdout.write("\n".join(some) + "\n")
            advance(len(some))
        sys.stdout.flush()


def import_(
    server: ServerOptions,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="An export; - reads stdin.", readable=False)
    ],
    queue: Annotated[Names, "QUEUE", "Only this queue. Repeatable."] = None,
    event: Annotated[str | None, "EVENT", "Publish all messages with this event."] = None,
    merge: Annotated[bool, "Also import into queues that exist."] = False,
    into: Annotated[
        str | None,
        "DB",
        r"Into this database, made if needed, which no server uses. \[default: a running server]",
    ] = None,
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
        nullcontext(url_or_usual(server.url)) if into is None else _alone(into) as url,
        Wire(url, limited(server.timeout_s)) as asked,
        progress("Importing", _size(source)) as advance,
    ):
        work = Import(asked, only=only, event=event_for_all, merge=merge, note=note)
        counts = work.run(lines_of(source, advance))
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    return counts, f"{told} imported"


@contextmanager
def _alone(db: str) -> Iterator[str]:
    """The URL of a server of this database that nobody else finds. It has the limits of the
    settings found here. Raises like `mqks serve`."""
    import anyio  # here, as above
    from anyio.from_thread import start_blocking_portal

    from mqks.log import configure
    from mqks.server.listeners import Inherited
    from mqks.server.running import serve

    settings = load({"db": db}, os.environ)
    settings = replace(settings, page="off", http_port=None, api_port=None, sqs_port=None)
    settings = replace(settings, users=None, auth="remote", standby=False)
    configure(settings.log_format, "error")
    with (
        TemporaryDirectory(prefix="mqks-import-") as directory,  # For its owner only.
        socket.socket(socket.AF_UNIX) as listening,
        start_blocking_portal("asyncio") as portal,
    ):
        path = Path(directory) / "socket"
        listening.bind(str(path))
        listening.listen()
        stopping = portal.call(anyio.Event)
        start = partial(serve, sockets=[Inherited(listening, "import")])
        ended, _ = portal.start_task(start, settings, lambda _: stopping.wait())
        try:
            yield f"mqks+unix://{path}"
        finally:
            portal.call(stopping.set)
            ended.result()


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
