"""`mqks import`: its options; `importing` tells how it is done."""

import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from mqks.commands.options import Url, progress
from mqks.errors import ImportFailed


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An export; - reads the input.")],
    url: Url = None,
    merge: Annotated[bool, typer.Option("--merge", help="Also into queues that exist.")] = False,
) -> None:
    """Bring an export into a running server: queues, messages, bindings and rules.

    Exit code 65 tells the line that is wrong; those before it are imported.
    """
    from mqks.client.dialogue import Dialogue  # here, so that --help need not load them
    from mqks.commands.importing import Import, lines_of

    with _opened(file) as source, Dialogue(url) as server, progress("Importing") as advance:
        counts = Import(server, merge=merge).run(lines_of(source, advance))
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items())
    typer.echo(f"{told} imported")


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    if str(file) == "-":
        return nullcontext(sys.stdin.buffer)
    try:
        return file.open("rb")
    except OSError as error:
        raise ImportFailed(f"{file}: {error.strerror}") from None
