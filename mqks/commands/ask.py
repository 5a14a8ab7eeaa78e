"""`mqks ping` and `mqks eval`. The one rule: they change nothing on the server."""

import json
import sys
import time
from typing import Annotated

import typer

from mqks.commands.connection import Server
from mqks.commands.options import AsJson, Told, tell
from mqks.inspection.text import printable


def ping(server: Server) -> Told:
    """Show whether a server answers, and how fast."""
    with server.connected() as client:
        began = time.perf_counter()
        client.ping("command")
        took_ms = round((time.perf_counter() - began) * 1000, 3)
        name = client.server
    return {"server": name, "ms": took_ms}, f"{name} answered in {took_ms} ms"


def eval_(
    server: Server,
    expression: Annotated[
        str, "EXPRESSION", "An expression such as len(state.queues); see docs/protocol.md."
    ],
    as_json: AsJson = False,
) -> None:
    """Print the value of an expression over the server's state, as text or JSON."""
    with server.connected() as client:
        # In a list, a text is JSON, too, and cannot be mistaken for a number.
        answer = client.evaluate(f"[({expression})]" if as_json else expression)
    if as_json:
        tell({"value": json.loads(answer)[0]}, as_json)
    elif sys.stdout.isatty():
        typer.echo(printable(answer))
    else:
        sys.stdout.buffer.write(answer.encode("utf-8", "surrogateescape") + b"\n")
