"""Connections of commands to a server.

The one rule: a command never waits without a limit, and fails at once if no server listens.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from mqks.commands.options import note
from mqks.settings import SETTINGS, Settings, load

if TYPE_CHECKING:
    from mqks.client.blocking import BlockingClient
    from mqks.client.options import Options
    from mqks.inspection.stopped import Source

REASON_S = 2.0
"""How long the server may take to send the reason of an error."""
TIMEOUT_S_MAX = 1e6
"""Eleven days; a socket does not accept infinity."""

Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="How long the server may take to reply.")
]


class ServerOptions(NamedTuple):
    """What --url and --timeout say."""

    url: str | None
    timeout_s: float

    def connected(self) -> AbstractContextManager["BlockingClient"]:
        return connected(self.url, limited(self.timeout_s))


ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Where a server that listens on all addresses is reached from its own machine."""


def usual_url(settings: Settings) -> str:
    """The URL of a server with these settings on this machine."""
    host = ANY_ADDRESS.get(settings.host, settings.host)
    return (
        f"mqks://{f'[{host}]' if ':' in host else host}:{settings.port or SETTINGS['port'].default}"
    )


def url_or_usual(url: str | None) -> str:
    """The URL that was given, else that of a server with the settings found here."""
    return url or usual_url(load({}, os.environ))


def limited(timeout_s: float = 30.0) -> "Options":
    """Limits of a client that gives up at once when nobody listens, and else after `timeout_s`."""
    from mqks.client.options import Options, default_name  # here, so that --help does not load it

    if not timeout_s > 0:
        raise typer.BadParameter(f"--timeout {timeout_s:g} is not a number of seconds above 0")
    timeout_s = min(timeout_s, TIMEOUT_S_MAX)
    command = "-".join(sys.argv[1:2])
    return Options(
        timeout_s=timeout_s,
        connect_timeout_s=min(timeout_s, Options().connect_timeout_s),
        close_timeout_s=min(timeout_s, Options().close_timeout_s),
        connect_again=False,
        client_name=default_name(f"mqks-{command}"),
    )


def checked(name: str) -> str:
    """A name that is valid as a word of a request. Raises InvalidRequest."""
    from mqks.client import requests  # here, as above

    requests.name(name)
    return name


@contextmanager
def connected(url: str | None, options: "Options") -> Iterator["BlockingClient"]:
    """A client. Raises what clients raise: ConfigurationError, ConnectionLost and the others."""
    from mqks.client import urls  # here, as above
    from mqks.client.blocking import connect
    from mqks.client.errors import ConnectionLost

    url = url_or_usual(url)
    address, client = urls.parse(url), connect(url, options)
    with ExitStack() as leaving:
        try:
            leaving.enter_context(client)
        except ConnectionLost as error:
            reason = str(error).removeprefix(f"{address}: ")
            raise ConnectionLost(f"no server at {address}: {reason}") from None
        yield client


def explained(error: Exception, url: str | None) -> Exception:
    """An error, with the server's reason if it has refused something and the reason is missing."""
    from mqks.client.errors import ClientError, RequestFailed  # here, as above

    if isinstance(error, RequestFailed) and error.reason is None:
        with suppress(ClientError), connected(url, limited(REASON_S)) as client:
            error.reason = client.reason(error.error_id, timeout_s=REASON_S)
    return error


def source_of(
    context: typer.Context, url: str | None, db: str | None, timeout_s: float
) -> "Source":
    """The source: an option has precedence over a variable, and a URL over a file."""
    from mqks.inspection.live import Live  # here, as above
    from mqks.inspection.stopped import source_of

    options, told_by = limited(timeout_s), context.get_parameter_source("url")
    if url and (db is None or (told_by is not None and told_by.name == "COMMANDLINE")):
        return Live(url, options)
    settings = load({"db": db}, os.environ)
    usual = usual_url(settings) if db is None else None
    return source_of(settings.db, options, note, usual)
