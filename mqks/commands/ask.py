"""`mqks ping` and `mqks eval`. The one rule: they change nothing on the server."""

import json
import os
import sys
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from typing import Annotated, Final

import typer

from mqks.commands.connection import ANY_ADDRESS, ServerOptions
from mqks.commands.options import AsJson, Told, tell
from mqks.inspection.text import printable
from mqks.settings import PAGE_PORT, DatabaseUrl, load

STANDBY_S: Final = 5.0
"""How long a standby may take to say what it waits for."""
STANDBY_BYTES: Final = 4096


def ping(server: ServerOptions) -> Told:
    """Show whether a server answers, and how fast.

    Without a URL, that is the server with the settings found here; it may be a standby.
    """
    # Here, so that --help does not load it.
    from mqks.client.errors import ConnectionLost, RequestFailed

    try:
        with server.connected() as client:
            began = time.perf_counter()
            client.ping("command")
            took_ms = round((time.perf_counter() - began) * 1000, 3)
            address, name = client.server, None
            with suppress(RequestFailed):  # It needs the permission to see all.
                name = client.stats()["name"]
    except ConnectionLost:
        waits = None if server.url else _standby()
        if waits is None:
            raise
        return {"server": None, "standby": waits}, f"standby: {waits}"
    told = f"{address} answered in {took_ms} ms{f' ({printable(name)})' if name else ''}"
    return {"server": address, "name": name, "ms": took_ms}, told


def _standby() -> str | None:
    """What the server with the settings found here waits for, if it is a standby: it answers on its
    HTTP port only."""
    settings = load({}, os.environ)
    if not isinstance(settings.db, DatabaseUrl) or not settings.has_http:
        return None
    host, port = settings.http_host, settings.http_port or PAGE_PORT
    connection = HTTPConnection(ANY_ADDRESS.get(host, host), port, timeout=STANDBY_S)
    with closing(connection), suppress(OSError, HTTPException):
        connection.request("GET", "/readyz")
        kind, _, waits = connection.getresponse().read(STANDBY_BYTES).decode().partition(": ")
        return waits.strip() if kind == "standby" else None
    return None


def eval_(
    server: ServerOptions,
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
