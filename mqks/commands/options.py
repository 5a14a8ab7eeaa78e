"""Common parts of the commands: option types, and output of rows, questions and progress.

The one rule: a terminal gets output for people, a pipe gets output for programs, and a terminal
never gets control characters that a client has sent.
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from typing import Annotated, Any, TypedDict
from urllib.parse import unquote

import typer

from mqks.inspection.text import printable

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        envvar="MQKS_URL",
        help=r"The server. \[default: mqks://127.0.0.1:25000]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH",
        help=r"The database file or URL. \[default: as for serve]",
    ),
]
Names = list[str] | None
Events = Annotated[Names, typer.Argument(metavar="EVENT", help="Add these events to its bindings.")]
AddMask = Annotated[Names, "MASK", "Add a mask such as logs.** to the bindings. Repeatable."]
Create = Annotated[bool, "Create the queue if it does not exist."]
Replace = Annotated[bool, "The events replace all bindings, for every consumer."]
Scheduled = Annotated[bool, "Only scheduled messages."]
Soonest = Annotated[bool, "Only scheduled messages, by the time when they are due."]
After = Annotated[
    int, typer.Option(min=0, metavar="SEQ", help="Only messages with higher numbers.")
]
Rows = Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many.")]


EventMask = Annotated[
    str | None, "MASK", "Only events that match: * is any text without a dot, ** any text."
]
Older = Annotated[float | None, "--older", "SECONDS", "Only messages that arrived this long ago."]


def _pairs(text: str) -> dict[str, str]:
    told = (pair.partition("=") for pair in text.split("&"))
    pairs = {unquote(key): unquote(value) for key, equals, value in told if key and equals}
    if len(pairs) != text.count("&") + 1:
        raise typer.BadParameter(f"{text!r} must be KEY=VALUE&KEY=VALUE, each key once")
    return pairs


Where = Annotated[
    dict[str, str] | None,
    typer.Option(
        parser=_pairs,
        metavar="KEY=VALUE&…",
        help="Only messages with these attributes; in why=TEXT, # may stand for each number.",
    ),
]


class SelectionOptions(TypedDict):
    """Options that select messages, by the names of the client."""

    event: EventMask
    id: Annotated[str | None, "ID", "Only messages with this id."]
    older_s: Older
    where: Where


class OptionChoice(SelectionOptions):
    limit: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most this number of messages.")
    ]


Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

Row = Mapping[str, Any]
Told = tuple[Row, str]
"""The result of a command: an object for `--json`, and a line for people, empty for none."""

UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
PAGE_ROWS, PAGE_CHARACTERS = 1000, 1 << 20
"""Printed at a time, so that long output starts early and needs little memory."""
FOLDED_TEXT, FOLDED_HEADER = 10, 6
"""The narrowest columns of a table, in characters; with less space, rows are printed singly."""


def duration(seconds: float) -> str:
    """A time span with at most two units: 0.25s, 42s, 3m20s, 5h07m, 12d03h."""
    for (unit, length), (next_unit, next_length) in pairwise(UNITS):
        if seconds >= length:
            rest = seconds % length // next_length
            return f"{seconds // length:.0f}{unit}{rest:02.0f}{next_unit}"
    return f"{seconds:.3g}s"


def note(text: object) -> None:
    """Print a line on stderr."""
    typer.echo(printable(f"mqks: {text}"), err=True)


def note_stars(*events: Iterable[str] | None) -> None:
    """A warning for events that read as masks: they are bound as events of that name."""
    for event in chain.from_iterable(some or () for some in events):
        if "*" in event:
            told = "is bound as an event, not as a mask; for a mask, use --add-mask"
            note(f"warning: {event} {told} '{event}'")


def tell(result: Row, as_json: bool, line: str = "") -> None:
    """Print the result of a command: one JSON object, or a line for people if there is one."""
    if as_json or line:
        typer.echo(json.dumps(result) if as_json else line)


def counted(count: int, done: str) -> str:
    """As in `3 messages purged`."""
    return f"{count} message{'' if count == 1 else 's'} {done}"


def table(
    rows: Iterable[Row], columns: Sequence[str], *, as_json: bool = False, cut: str = ""
) -> None:
    """Print rows: all their fields as JSON lines, or these columns, aligned; ruled on a terminal.

    They are printed in pages as they arrive. `cut` names the column that is cut to the width of the
    terminal.
    """
    if as_json:
        for row in rows:
            typer.echo(json.dumps(row))
        return
    is_terminal, is_first = sys.stdout.isatty(), True
    widths = list(map(len, columns))
    for page in _pages(rows):
        cells = [[_cell(row.get(column)) for column in columns] for row in page]
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
    """Pages of rows; one empty page if there are none."""
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


def _cell(value: object) -> str:
    return "-" if value is None else printable(value)


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
    # Numbers are never folded; headings and text may be.
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
            line[cut] = shortened(line[cut], widths[cut])
        ruled.add_row(*map(Text, line))  # As Text, brackets are not markup.
    console.print(ruled)
    return None


def _one_by_one(columns: Sequence[str], cells: list[list[str]], width: int | None) -> None:
    """Print each row as lines, one for each column, cut to `width` if given."""
    names = max(map(len, columns))
    for line in cells:
        for column, cell in zip(columns, line, strict=True):
            text = f"{column.ljust(names)}  {cell}"
            typer.echo(text if width is None else shortened(text, width))
        typer.echo()


def shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation, unless `yes` or stdin is not a terminal; "no" aborts the command."""
    if not yes and sys.stdin.isatty():
        typer.confirm(question, abort=True, err=True)


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], object]]:
    """A progress bar on stderr, if that is a terminal.

    Yields a function to call with the progress made; without a `total` the bar has no end.
    """
    if not sys.stderr.isatty():
        yield lambda more: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda more: bar.advance(task, more)
