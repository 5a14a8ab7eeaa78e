"""`mqks top`: a live view of a running server.

The one rule: it only reads, with a few `stats` requests for each view, and restores the terminal.
"""

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from mqks.commands.connection import connected
from mqks.commands.options import AsJson, Url, duration
from mqks.inspection.text import printable

if TYPE_CHECKING:
    from rich.console import RenderableType


ROWS_MAX = 10_000
"""Queues and consumers that are read for each view, the first by name."""
PATIENCE_S = 2.0
"""A server that does not reply within this time is shown as not connected."""
RATE_WIDTH, WORD_WIDTH, WORD_WIDTH_MAX, GAP = 26, 12, 28, 2
"""Widths in characters, for a narrow terminal."""
WORDS = {"received": "published", "acknowledged": "acked"}
"""Rates that the page calls otherwise than `stats`."""
Row = dict[str, Any]


Sort = Literal["ready", "rate", "unacked", "age", "name"]
ORDERS: dict[Sort, Callable[[Row], Any]] = {
    "ready": lambda queue: -queue["ready"],
    "rate": lambda queue: -(queue["in_per_s"] or 0) - (queue["out_per_s"] or 0),
    "unacked": lambda queue: -queue["unacked"],
    "age": lambda queue: -(queue["oldest_age_s"] or 0),
    "name": lambda queue: queue["name"],
}


def top(
    url: Url = None,
    sort: Annotated[Sort, "Order of the queues."] = "ready",
    interval: Annotated[
        float, typer.Option(min=0.1, max=3600, help="Seconds between two views.")
    ] = 2.0,
    count: Annotated[
        int, typer.Option(min=0, help="End after this number of views; 0: never.")
    ] = 0,
    rows: Annotated[
        int, typer.Option(min=1, max=ROWS_MAX, help="The most queues, and consumers, to show.")
    ] = 20,
    as_json: AsJson = False,
) -> None:
    """Show rates, queues, consumers and the journal of a server, live; q or Ctrl-C ends it.

    Rates are those since the last view; the first view has none.
    """
    from mqks.client.options import Options  # here, so that --help need not load them
    from mqks.inspection.sample import sample

    patient = Options(timeout_s=PATIENCE_S, connect_again=False, close_timeout_s=0.5)
    with _shown(as_json) as (show, pause), connected(url, patient) as client:
        earlier: Row | None = None
        looks = 0
        while True:
            earlier = sample(client, earlier, ROWS_MAX)
            show(_first(earlier, sort, rows))
            looks += 1
            if looks == count or pause(interval):
                # Not just a return: the client need not wait for a server that is away.
                raise typer.Exit


def _first(seen: Row, sort: Sort, rows: int) -> Row:
    """The view with only the first rows of each list."""
    if not seen["connected"]:
        return seen
    from mqks.inspection.marks import queue_marks

    dead = {queue["dead_letters"] for queue in seen["queues"]}
    queues = [
        queue | {"state": queue_marks(queue, is_dead=queue["name"] in dead, grows=_grows(queue))}
        for queue in sorted(seen["queues"], key=ORDERS[sort])[:rows]
    ]
    consumers = sorted(seen["consumers"], key=lambda consumer: -consumer["unacked"])[:rows]
    return seen | {"queues": queues, "consumers": consumers}


def _fit(seen: Row, height: int) -> Row:
    """The view cut to the height of the screen; queues get two thirds of the space for lists."""
    if not seen["connected"]:
        return seen
    room = max(3, height - 12)
    consumers = seen["consumers"][: room - min(len(seen["queues"]), room * 2 // 3)]
    return seen | {"queues": seen["queues"][: room - len(consumers)], "consumers": consumers}


# -- showing


Show = Callable[[Row], object]
Pause = Callable[[float], bool]
"""Waits this number of seconds; returns whether to end."""


@contextmanager
def _shown(as_json: bool) -> Iterator[tuple[Show, Pause]]:
    """Shows views as lines of JSON, on the whole screen, or one after the other."""
    from rich import get_console
    from rich.live import Live

    console = get_console()
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        if as_json:
            yield (lambda seen: typer.echo(json.dumps(seen))), _sleep
        elif not console.is_terminal or console.is_dumb_terminal:
            yield (lambda seen: console.print(_view(seen, console.width))), _sleep
        else:
            with _keys() as pause, Live(console=console, screen=True, auto_refresh=False) as live:
                yield (
                    lambda seen: live.update(
                        _view(_fit(seen, console.height), console.width), refresh=True
                    ),
                    pause,
                )
    except KeyboardInterrupt:
        return
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminated(number: int, frame: object) -> NoReturn:
    """Raise, so that the terminal is restored."""
    raise typer.Exit(128 + number)


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


@contextmanager
def _keys() -> Iterator[Pause]:
    """A pause that q ends. Keys are read singly, without echo."""
    if not sys.stdin.isatty():
        yield _sleep
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)

    def pause(seconds: float) -> bool:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            if select.select([terminal], [], [], left_s)[0]:
                keys = os.read(terminal, 64)
                if not keys or b"q" in keys.lower():
                    return True
        return False

    try:
        tty.setcbreak(terminal)
        # Ctrl-Z would show the shell on our screen.
        attributes = termios.tcgetattr(terminal)
        attributes[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(terminal, termios.TCSANOW, attributes)
        yield pause
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _view(seen: Row, width: int) -> "RenderableType":
    from rich.console import Group
    from rich.text import Text

    if not seen["connected"]:
        return Text("not connected: waiting for the server", style="bold red")
    rates, queues, consumers = _rates(seen, width), _queues(seen, width), _consumers(seen, width)
    return Group(_head(seen), Text(), rates, Text(), queues, Text(), consumers)


def _head(seen: Row) -> "RenderableType":
    from rich.text import Text

    totals, journal = seen["totals"], seen["journal"]
    head = Text(
        f"mqks {totals['version']}  up {duration(totals['uptime_s'])}  "
        f"{totals['connections']:,} connections  {totals['queues']:,} queues  "
        f"{totals['consumers']:,} consumers  {totals['bindings']:,} bindings\n"
        f"{totals['messages_ready']:,} ready  {totals['messages_unacked']:,} unacked  "
        f"{totals['messages_scheduled']:,} scheduled  "
        f"{_size(totals['memory_bytes'])} + {_size(totals['unacked_bytes'])} in memory\n"
        f"{_journal(journal)}"
    )
    if why := journal["unwritable"] or journal.get("waits"):
        head.append(f"  {why.upper()}", style="bold red")
    for state in ("draining", "read_only"):
        if totals.get(state):  # An earlier version has no such states.
            head.append(f"  {state.upper().replace('_', '-')}", style="bold red")
    return head


def _journal(journal: Row) -> str:
    messages = f"{journal['messages']:,} messages in {journal['segments']:,} segments"
    if "owner" in journal:
        return (
            f"journal {journal['path']}  {messages}\n"
            f"active: {journal['owner']}  for {duration(journal['active_s'])}  "
            f"claim {journal['claim']:,}"
        )
    return (
        f"journal {_size(journal['db_bytes'])} + WAL {_size(journal['wal_bytes'])}  "
        f"{messages}  {_size(journal['disk_free_bytes'])} free"
    )


def _rates(seen: Row, width: int) -> "RenderableType":
    told = [f"{WORDS.get(key, key)} {_rate(rate)}/s" for key, rate in seen["rates_per_s"].items()]
    beside = max(1, min(3, width // RATE_WIDTH))
    lines = -(-len(told) // beside)
    rows = [tuple(told[start::lines]) for start in range(lines)]
    return _table(("",) * beside, rows, width, show_header=False)


def _queues(seen: Row, width: int) -> "RenderableType":
    rows: list[tuple[str, ...]] = [
        (
            queue["state"][0],
            printable(queue["name"]),
            f"{queue['ready']:,}",
            "-" if (age_s := queue["oldest_age_s"]) is None else duration(age_s),
            f"{queue['consumers']:,}",
            *(_rate(queue[key]) for key in ("in_per_s", "out_per_s")),
            *(f"{queue[key]:,}" for key in ("unacked", "scheduled", "dead")),
            "-" if (lag := queue["archive_lag"]) is None else f"{lag:,}",
            _rate(queue["archived_per_s"]),
        )
        for queue in seen["queues"]
    ]
    columns = (
        *("state", "name", "ready", "oldest", "consumers"),
        *("in/s", "out/s", "unacked", "scheduled", "died"),
    )
    first = "scheduled", "died", "consumers", "unacked"
    last = "oldest", "state", "in/s", "out/s"
    if any(queue["archive_lag"] is not None for queue in seen["queues"]):
        archive = "lag", "archived/s"
        spare = *first, *reversed(archive), *last
        return _table((*columns, *archive), rows, width, spare=spare)
    rows = [row[: len(columns)] for row in rows]
    return _table(columns, rows, width, spare=(*first, *last))


def _grows(queue: Row) -> bool:
    """Nobody takes what has come in since the last view."""
    return bool(queue["in_per_s"] and not queue["out_per_s"] and queue["ready"])


def _consumers(seen: Row, width: int) -> "RenderableType":
    rows = [
        (
            "paused" if consumer["blocked"] else "ok",
            printable(consumer["id"]),
            printable(consumer["queue"]),
            f"{consumer['unacked']:,}",
            "-" if (age_s := consumer["oldest_age_s"]) is None else duration(age_s),
            printable(consumer["client"] or consumer["address"]),
        )
        for consumer in seen["consumers"]
    ]
    columns = ("state", "consumer", "queue", "unacked", "held for", "client")
    return _table(columns, rows, width, spare=("held for", "client", "state"))


def _table(
    columns: tuple[str, ...],
    rows: Sequence[tuple[str, ...]],
    width: int,
    *,
    spare: tuple[str, ...] = (),
    show_header: bool = True,
) -> "RenderableType":
    """A table within the width; `spare` are columns to omit if necessary, in this order."""
    from rich.table import Column, Table
    from rich.text import Text

    words = ("", "state", "name", "queue", "consumer", "client")
    for name in spare:
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        least = [
            min(each, WORD_WIDTH) if column in words else each
            for column, each in zip(columns, widths, strict=True)
        ]
        if sum(least) + GAP * (len(columns) - 1) <= width:
            break
        at = columns.index(name)
        columns, *rows = [(*line[:at], *line[at + 1 :]) for line in (columns, *rows)]
    widths = [max(map(len, column)) for column in zip_longest(columns, *rows, fillvalue="")]
    given = [
        min(each, WORD_WIDTH_MAX) if name in words else each
        for name, each in zip(columns, widths, strict=True)
    ]
    texts = [at for at, name in enumerate(columns) if name in words]
    while sum(given) + GAP * (len(given) - 1) > width and max(given[at] for at in texts) > GAP:
        given[max(texts, key=given.__getitem__)] -= 1  # Numbers are never cut.
    table = Table(
        *(
            Column(name, justify="left" if name in words else "right", no_wrap=True, width=each)
            for name, each in zip(columns, given, strict=True)
        ),
        box=None,
        show_header=show_header,
        header_style="bold",
        pad_edge=False,
    )
    for row in rows:  # As Text, brackets are not taken for markup.
        cells = zip(columns, row, strict=False)
        table.add_row(*(Text(each, _style(name, each)) for name, each in cells))
    return table


def _style(column: str, text: str) -> str:
    from mqks.inspection.marks import AT_REST, STYLES

    return STYLES.get(text, AT_REST) if column == "state" else ""


def _rate(per_second: float | None) -> str:
    return "-" if per_second is None else f"{per_second:,.1f}"


def _size(size: int) -> str:
    from rich.filesize import decimal

    return decimal(size)
