"""What the commands share: option types, and how rows, questions and progress are shown.

The one rule: a terminal gets what is nice to look at, a pipe gets what is easy to read for a
program, and neither gets control characters that a client has sent.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
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
# What can't be read is told by whoever opens it, as with any other file.
Database = Annotated[
    Path | None,
    typer.Option("--db", metavar="PATH", help="The database; as for serve.", readable=False),
]
AddMask = Annotated[
    list[str] | None,
    typer.Option(metavar="MASK", help="Bind it to what matches, too, as logs.**. Repeatable."),
]
EventMask = Annotated[
    str | None,
    typer.Option(metavar="MASK", help="Only these events: * is anything without a dot, ** all."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

Row = Mapping[str, Any]

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
PAGE_ROWS, PAGE_CHARACTERS = 1000, 1 << 20
"""What is printed at a time, so that much to tell neither waits nor fills the memory."""
FOLDED_TEXT, FOLDED_HEADER = 10, 6
"""Characters to which a ruled table narrows its columns; with less room rows are told singly."""


def printable(text: object) -> str:
    """What a client sent must not steer the terminal: control characters are escaped."""
    if text is None:
        return "-"
    # Bytes that are no UTF-8 came as surrogates.
    text = str(text).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def duration(seconds: float) -> str:
    """A time span for people, of two units at most: 0.25s, 42s, 3m20s, 5h07m, 12d03h."""
    for (unit, length), (next_unit, next_length) in pairwise(UNITS):
        if seconds >= length:
            rest = seconds % length // next_length
            return f"{seconds // length:.0f}{unit}{rest:02.0f}{next_unit}"
    return f"{seconds:.3g}s"


def note(text: object) -> None:
    """Print a line on stderr, beside what is told."""
    typer.echo(printable(f"mqks: {text}"), err=True)


def tell(result: Row, as_json: bool, line: str = "") -> None:
    """Print what a command has done: one JSON object, or a line for people where there is one."""
    if as_json or line:
        typer.echo(json.dumps(result) if as_json else line)


def counted(count: int, done: str) -> str:
    """To how many messages something was done."""
    return f"{count} message{'' if count == 1 else 's'} {done}"


def table(
    rows: Iterable[Row], columns: Sequence[str], *, as_json: bool = False, cut: str = ""
) -> None:
    """Print rows: all they hold as JSON lines, or these columns, aligned; ruled on a terminal.

    They are printed as they come, some at a time. `cut` names the column that a terminal shows
    only as far as its width goes.
    """
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    is_terminal, is_first = sys.stdout.isatty(), True
    widths = list(map(len, columns))
    for page in _pages(rows):
        cells = [[printable(row.get(column)) for column in columns] for row in page]
        right = [any(_is_number(row.get(column)) for row in page) for column in columns]
        if is_terminal:
            _ruled(columns, cells, right, columns.index(cut) if cut else None)
        else:
            widths = [
                max(width, *map(len, column))
                for width, column in zip(widths, zip(columns, *cells, strict=True), strict=True)
            ]
            lines = [columns, *cells] if is_first else cells
            typer.echo("\n".join(_aligned(line, widths, right) for line in lines))
        is_first = False


def _pages(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Some rows at a time; one page without any where there are none."""
    page: list[Row] = []
    size, is_first = 0, True
    for row in rows:
        page.append(row)
        size += sum(len(value) for value in row.values() if isinstance(value, str))
        if len(page) == PAGE_ROWS or size >= PAGE_CHARACTERS:
            yield page
            page, size, is_first = [], 0, False
    if page or is_first:
        yield page


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _aligned(cells: Sequence[str], widths: Sequence[int], right: Sequence[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return "  ".join(padded).rstrip()


def _ruled(
    columns: Sequence[str], cells: list[list[str]], right: Sequence[bool], cut: int | None
) -> None:
    from rich import get_console  # here, so that --help need not load them
    from rich.cells import cell_len
    from rich.table import Column, Table
    from rich.text import Text

    console = get_console()
    room = console.width - 3 * len(columns) - 1
    lengths = [list(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
    widths = list(map(max, lengths))
    # Numbers stay whole, while headings and text may be folded.
    least = [
        max(min(header, FOLDED_HEADER), *numbers) if is_right else min(width, FOLDED_TEXT)
        for (header, *numbers), width, is_right in zip(lengths, widths, right, strict=True)
    ]
    if cut is not None:
        widths[cut] = min(widths[cut], max(least[cut], room - sum(widths) + widths[cut]))
    if sum(least) > room or sum(widths) > 2 * room:
        return _one_by_one(columns, cells, None if cut is None else console.width)
    while sum(widths) > room:
        slack = [width - smallest for width, smallest in zip(widths, least, strict=True)]
        widths[slack.index(max(slack))] -= 1
    ruled = Table(
        *(
            Column(name, width=width, justify="right" if is_right else "left", overflow="fold")
            for name, width, is_right in zip(columns, widths, right, strict=True)
        )
    )
    for line in cells:
        if cut is not None:
            line[cut] = _shortened(line[cut], widths[cut])
        ruled.add_row(*map(Text, line))  # As Text, brackets are not taken for markup.
    console.print(ruled)
    return None


def _one_by_one(columns: Sequence[str], cells: list[list[str]], width: int | None) -> None:
    """Each row as lines, one for each column, cut to a width if one is given."""
    names = max(map(len, columns))
    for line in cells:
        for column, cell in zip(columns, line, strict=True):
            text = f"{column.ljust(names)}  {cell}"
            typer.echo(text if width is None else _shortened(text, width))
        typer.echo()


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


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
