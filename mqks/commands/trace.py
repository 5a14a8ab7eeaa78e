"""The command that traces messages.

The one rule: a trace is a request of the protocol; nothing of it is kept here.
"""

from typing import Annotated

import typer

from mqks.commands.connection import ServerOptions
from mqks.commands.options import Told


def trace(
    server: ServerOptions,
    name: Annotated[
        str | None,
        typer.Argument(metavar="QUEUE|EVENT|MASK|ID", help="What to trace."),
    ] = None,
    for_s: Annotated[float | None, "--for", "SECONDS", "For so long; otherwise 10 minutes."] = None,
    off: Annotated[bool, "End it; without a name end all, and forget what was noted."] = False,
) -> Told:
    """Note what becomes of messages: those with this id or event, and those in this queue.

    mqks inspect message ID tells what was noted.
    """
    if name is None and not off:
        raise typer.BadParameter("name a queue, an event, a mask or a message id")
    if off and for_s is not None:
        raise typer.BadParameter("--off excludes --for")
    with server.connected() as client:
        if name is None or off:
            client.end_trace(name)
        else:
            client.trace(name, for_s=for_s)
    return {"name": name, "for_s": for_s, "off": off}, ""
