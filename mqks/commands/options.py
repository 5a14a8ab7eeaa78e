"""What the commands share: option types, and how rows, questions and progress are shown.

The one rule: a terminal gets what is nice to look at, a pipe gets what is easy to read for a
program, and neither gets control characters that a client has sent.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="MQKS_URL",
        help="The server, mqks://127.0.0.1:25000 unless told.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
Database = Annotated[
    Path | None, typer.Option("--db", metavar="PATH", help="The database; as for serve.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Row = Mapping[str, Any]


def printable(text: object) -> str:
    """What a client sent must not steer the terminal: control characters are escaped."""
    if text is None:
        return "-"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def table(rows: Iterable[Row], columns: Sequence[str], *, as_json: bool = False) -> None:
    """Print rows: all they hold as JSON lines, or these columns, aligned; ruled on a terminal."""
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    rows = list(rows)
    cells = [[printable(row.get(column)) for column in columns] for row in rows]
    numeric = [any(isinstance(row.get(column), int | float) for row in rows) for column in columns]
    if sys.stdout.isatty():
        _ruled(columns, cells, numeric)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    for line in [columns, *cells]:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        )
        typer.echo("  ".join(aligned).rstrip())


def _ruled(columns: Sequence[str], cells: list[list[str]], numeric: Sequence[bool]) -> None:
    from rich import get_console  # here, so that --help need not load them
    from rich.table import Column, Table
    from rich.text import Text

    ruled = Table(
        *(
            Column(name, justify="right" if right else "left", overflow="fold")
            for name, right in zip(columns, numeric, strict=True)
        )
    )
    for line in cells:
        ruled.add_row(*map(Text, line))  # As Text, brackets are not taken for markup.
    get_console().print(ruled)


def confirm(question: str, yes: bool) -> None:
    """Ask before something is destroyed, unless told so or nobody sits there; "no" ends it."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """A bar on stderr, of which nothing shows unless that is a terminal.

    Gives the function that is told how much more is done; without a `total` the bar has no end.
    """
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)
