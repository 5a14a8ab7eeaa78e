"""`mqks ping` and `mqks eval`. The one rule: they change nothing on the server."""

import json
import sys
import time
from typing import Annotated

import typer

from mqks.commands.connection import Timeout, connected
from mqks.commands.options import AsJson, Url, printable, tell


def ping(url: Url = None, timeout: Timeout = 30.0, as_json: AsJson = False) -> None:
    """Show whether a server answers, and how fast."""
    with connected(url, timeout) as client:
        began = time.perf_counter()
        client.ping("command")
        took_ms = round((time.perf_counter() - began) * 1000, 3)
        server = client.server
    tell({"server": server, "ms": took_ms}, as_json, f"{server} answered in {took_ms} ms")


def evaluate(
    expression: Annotated[
        str,
        typer.Argument(
            metavar="EXPRESSION",
            help="An expression such as len(state.queues); see docs/protocol.md.",
        ),
    ],
    url: Url = None,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
) -> None:
    """Print the value of an expression over the server's state, as text or JSON."""
    with connected(url, timeout) as client:
        # In a list, a text is JSON, too, and cannot be mistaken for a number.
        answer = client.evaluate(f"[({expression})]" if as_json else expression)
    if as_json:
        tell({"value": json.loads(answer)[0]}, as_json)
    elif sys.stdout.isatty():
        typer.echo(printable(answer))
    else:
        sys.stdout.buffer.write(answer.encode("utf-8", "surrogateescape") + b"\n")
