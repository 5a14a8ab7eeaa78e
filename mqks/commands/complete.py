"""What the shell completes with TAB besides commands and options: queues, consumers, users.

The one rule: it asks the running server for `ASKED_S` at most, prints no error, and gives nothing
when there is no answer. A shell evaluates what it is given, so that only names of letters, digits
and marks without a meaning in a shell are given.
"""

import os
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from threading import Thread
from typing import Annotated, Any, Final

import typer

ASKED_S: Final = 1.0
NAMES_MAX: Final = 200
SAFE: Final = re.compile(r"[\w.][\w.@%+=,/-]*")


def queues(context: typer.Context, incomplete: str) -> list[str]:
    return _bounded(lambda: _of_server(context, b"queues", "name", incomplete))


def queue_argument(help: str | None = None, metavar: str = "QUEUE") -> Any:
    return typer.Argument(metavar=metavar, help=help, autocompletion=queues)


Queue = Annotated[str, queue_argument()]


def consumers(context: typer.Context, incomplete: str) -> list[str]:
    return _bounded(lambda: _of_server(context, b"consumers", "id", incomplete))


def users(context: typer.Context, incomplete: str) -> list[str]:
    return _bounded(lambda: _of_file(context, incomplete))


def _bounded(ask: Callable[[], Iterable[str]]) -> list[str]:
    """What is found in time; whatever goes wrong gives nothing."""
    found = list[str]()

    def run() -> None:
        with suppress(BaseException):
            found.extend(name for name in ask() if SAFE.fullmatch(name))

    asking = Thread(target=run, daemon=True)
    asking.start()
    asking.join(ASKED_S)
    return list(found)


def _of_server(context: typer.Context, what: bytes, key: str, begin: str) -> Iterable[str]:
    from mqks.client import requests  # here, so that --help need not load them
    from mqks.client.options import Options
    from mqks.client.wire import Wire, rows

    behind = {key: requests.decoded(_before(requests.encoded(begin))) or None}
    limits = Options(timeout_s=ASKED_S, connect_timeout_s=ASKED_S)
    with Wire(context.params.get("url"), limits) as server:
        names = (row[key] for row in rows(server.stats, what.decode(), key, behind=behind))
        yield from islice(takewhile(lambda name: name.startswith(begin), names), NAMES_MAX)


def _before(begin: bytes) -> bytes:
    """A name that comes before all that begin so, with little between."""
    if not begin or begin[-1] <= ord("!"):
        return begin[:-1]
    return begin[:-1] + bytes([begin[-1] - 1]) + b"\xff"


def _of_file(context: typer.Context, begin: str) -> Iterable[str]:
    from mqks import users_file  # here, as above
    from mqks.settings import load

    given: Path | None = context.params.get("users")
    path = load({"users": given}, os.environ).users
    if path is not None:
        yield from (each.name for each in users_file.read(path) if each.name.startswith(begin))
