"""Tables: rows of `stats` as sorted, filtered and formatted text.

The one rule: a cell is text. Names and payloads never become markup.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from mqks.inspection.text import moment, printable

Row = Mapping[str, Any]
PAGE_ROWS: Final = 100
TREND_MEANS: Final = 60
"""Of ten seconds each."""
CELL_CHARACTERS: Final = 200
"""A longer name is shortened in a table; its own page has all of it."""
LINKED_CHARACTERS_MAX: Final = 4096
"""A longer name has no link in a table."""


class Column(NamedTuple):
    key: str
    title: str
    kind: str
    """How its values are shown: a key of `FORMATS`."""
    help: str = ""
    """What it counts, where the title does not say so."""

    @property
    def is_number(self) -> bool:
        return self.kind not in TEXTS


TEXTS: Final = (
    *("text", "texts", "address", "queue", "schedule", "batch", "need"),
    *("yes", "marks", "trend"),
)


class Cell(NamedTuple):
    text: str
    link: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A kind of table. `key` is what `stats` calls its list."""

    key: str
    title: str
    columns: Sequence[Column]
    sort: str
    """What it is sorted by unless asked otherwise; a column of numbers from the highest."""
    filter: Sequence[str]
    """The columns that a filter searches."""


@dataclass(frozen=True, slots=True)
class TableView:
    """What one reader wants to see of a table. Equal views are shown the same."""

    table: str
    sort: str
    ascending: bool
    filter: str
    first: int
    """How many rows come before those shown."""


class Shown(NamedTuple):
    rows: list[Row]
    first: int
    total: int
    """Rows that the filter has let through."""


def number(value: float) -> str:
    return f"{value:,.0f}" if value >= 9.95 or value == int(value) else f"{value:.1f}"


def size(value: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 10 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def duration(value: float) -> str:
    if value < 10:
        return f"{number(value)} s"
    for unit, length, least in (("d", 86400, 2), ("h", 3600, 2), ("min", 60, 2)):
        if value >= least * length:
            return f"{value / length:.0f} {unit}"
    return f"{value:.0f} s"


def interval(value: float) -> str:
    """Of two steps, with milliseconds if it is short; nothing for none."""
    return f"{value * 1000:.3g} ms" if 0 < value < 1 else duration(value) if value > 0 else ""


def setting(value: object) -> str:
    """A value of a policy."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(setting, value))
    return f"{value:.15g}" if isinstance(value, float) else str(value)


def short(value: object) -> str:
    """What a cell shows of a value: its beginning, if it is long."""
    told = printable(str(value)[: CELL_CHARACTERS + 1])
    return told if len(told) <= CELL_CHARACTERS else told[:CELL_CHARACTERS] + "…"


def trend(means: Sequence[float]) -> str:
    """The last ten minutes as the corners of a shape, 100 wide and 24 high, for SVG; its sides
    and its ground are beyond the edges. Empty without means."""
    if not means:
        return ""
    highest, first = max(*means, 0.0) or 1.0, TREND_MEANS - len(means)
    heights = [f"{22 - 20 * each / highest:.3g}" for each in means]
    step = 100 / (TREND_MEANS - 1)
    line = [f"{(first + at) * step:.3g},{height}" for at, height in enumerate(heights)]
    return f"{first * step - 2:.3g},26 {first * step - 2:.3g},{heights[0]} {' '.join(line)} " + (
        f"102,{heights[-1]} 102,26"
    )


FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "text": short,
    "address": short,
    "queue": short,
    "schedule": short,
    "batch": short,
    "count": number,
    "rate": number,
    "bytes": size,
    "most": lambda value: number(value) if value else "no limit",
    "most_bytes": lambda value: size(value) if value else "no limit",
    "age": duration,
    "need": short,
    "marks": str,
    "trend": str,
    "figure": str,
    "time": moment,
    "connection": number,
    "share": lambda value: f"{value:.1%}",
    "texts": lambda value: short(" ".join(value)),
    "yes": lambda value: "yes" if value else "",
}


def queue_link(name: str) -> str:
    return "/queue?name=" + quoted(name)


def schedule_link(name: str) -> str:
    return "/schedule?name=" + quoted(name)


def batch_link(name: str) -> str:
    return "/batch?name=" + quoted(name)


def quoted(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")


def connection_link(connection_id: int) -> str:
    return f"/connection?number={connection_id}"


NEEDS: Final = {
    "A limit is near": "/limits",
    "Requests fail": "/errors",
    "A schedule fails": "/schedules",
    "A schedule reaches no queue": "/schedules",
}
"""Where more is said about what needs a person."""
LINKS: Final[dict[str, Callable[[Any], str]]] = {
    "need": lambda value: NEEDS.get(value, ""),
    "queue": queue_link,
    "schedule": schedule_link,
    "batch": batch_link,
    "connection": connection_link,
}


def cell(column: Column, row: Row) -> Cell:
    value = row.get(column.key)
    if value is None:
        return Cell("")
    link = LINKS.get(column.kind)
    if link is None or len(str(value)) > LINKED_CHARACTERS_MAX:
        return Cell(FORMATS[column.kind](value))
    return Cell(FORMATS[column.kind](value), link(value))


def view_of(table: Table, wanted: Mapping[str, str]) -> TableView:
    """What a request's parameters ask for; what makes no sense is as if it were not there."""
    columns = {each.key: each for each in table.columns}
    sort = wanted.get("sort", "")
    if sort not in columns:
        sort = table.sort
    is_number = sort in columns and columns[sort].is_number
    order = wanted.get("order") or ("desc" if is_number else "asc")
    first = wanted.get("first", "")
    return TableView(
        table.key,
        sort,
        order == "asc",
        wanted.get("filter", "")[:255],
        int(first) if first.isascii() and first.isdigit() and len(first) < 10 else 0,
    )


class Ordered:
    """The rows of a table, in each order that a view has wanted; they are sorted once for all."""

    def __init__(self, table: Table, rows: Iterable[Row]) -> None:
        self._rows = [
            ("\n".join(str(row[each] or "") for each in table.filter).lower(), row) for row in rows
        ]
        self._orders: dict[tuple[str, bool], list[tuple[str, Row]]] = {}

    def part(self, view: TableView) -> Shown:
        wanted = view.filter.lower()
        found = [row for name, row in self._order(view.sort, view.ascending) if wanted in name]
        first = min(view.first, max(0, (len(found) - 1) // PAGE_ROWS * PAGE_ROWS))
        return Shown(found[first : first + PAGE_ROWS], first, len(found))

    def _order(self, key: str, ascending: bool) -> list[tuple[str, Row]]:
        """Those without a value come last."""
        order = self._orders.get((key, ascending))
        if order is None:
            order = [each for each in self._rows if each[1].get(key) is not None]
            order.sort(key=lambda each: each[1][key], reverse=not ascending)
            order += [each for each in self._rows if each[1].get(key) is None]
            self._orders[key, ascending] = order
        return order


STATE: Final = Column("mark", "State", "marks")
"""What a person should know of a row: words with commas between them."""
QUEUES: Final = Table(
    "queues",
    "Queues",
    (
        # What tells that something is wrong comes first: a narrow screen shows no more.
        STATE,
        Column("name", "Name", "queue"),
        Column("ready", "Ready", "count"),
        Column("trend", "Messages, 10 min", "trend", "Ready, unacked and scheduled"),
        Column("oldest_age_s", "Oldest", "age"),
        Column("consumers", "Consumers", "count"),
        Column("in_per_s", "In/s", "rate"),
        Column("out_per_s", "Out/s", "rate"),
        Column("unacked", "Unacked", "count"),
        Column("scheduled", "Scheduled", "count"),
        Column("dead", "Died", "count", "Since the server started"),
        Column("memory_bytes", "Memory", "bytes"),
    ),
    "ready",
    ("name",),
)
CONSUMERS: Final = Table(
    "consumers",
    "Consumers",
    (
        STATE,
        Column("id", "Consumer", "address"),
        Column("queue", "Queue", "queue"),
        Column("unacked", "Unacked", "count"),
        Column("oldest_age_s", "Held for", "age"),
        Column("client", "Client", "text"),
        Column("connection", "Connection", "connection"),
        Column("address", "Address", "address"),
        Column("prefetch", "Prefetch", "count"),
        Column("ack_timeout_s", "Ack timeout", "age"),
        Column("manual_ack", "Manual ack", "yes"),
        Column("unacked_bytes", "Bytes", "bytes"),
    ),
    "unacked",
    ("id", "queue", "client"),
)
CONNECTIONS: Final = Table(
    "connections",
    "Connections",
    (
        STATE,
        Column("id", "Number", "connection"),
        Column("address", "Address", "address"),
        Column("name", "Client", "text"),
        Column("user", "User", "text"),
        Column("consumers", "Consumers", "count"),
        Column("unacked", "Unacked", "count"),
        Column("unconfirmed", "Unconfirmed", "count", "Requests whose reply is still to come"),
        Column("outbox_bytes", "Unsent", "bytes"),
    ),
    "id",
    ("address", "name", "user"),
)
ARCHIVES: Final = Table(
    "archives",
    "Archives",
    (
        Column("archive_state", "State", "marks"),
        Column("name", "Queue", "queue"),
        Column("archive_lag", "Lag", "count"),
        Column("archived_per_s", "Archived/s", "rate"),
        Column("archived_seq", "Archived up to", "count"),
        Column("archive_told_age_s", "Last told", "age"),
        Column("archive_commit_age_s", "Last commit", "age"),
    ),
    "archive_lag",
    ("name",),
)
SCHEDULES: Final = Table(
    "schedules",
    "Schedules",
    (
        STATE,
        Column("name", "Name", "schedule"),
        Column("error", "Error", "text"),
        Column("next_us", "Next, UTC", "time"),
        Column("last_us", "Last, UTC", "time"),
        Column("last_queues", "Queues of the last", "count"),
        Column("event", "Event", "text"),
        Column("cron", "Cron", "text"),
        Column("tz", "Time zone", "address"),
        Column("every_s", "Every", "age"),
        Column("missed", "If missed", "text"),
        Column("jitter_s", "Jitter", "age"),
    ),
    "name",
    ("name",),
)
BATCHES: Final = Table(
    "batches",
    "Batches",
    (
        Column("name", "Name", "batch"),
        Column("total", "Messages", "count"),
        Column("waiting", "Waiting", "count"),
        Column("running", "Running", "count"),
        Column("done", "Done", "count"),
        Column("dead", "Dead", "count"),
        Column("closed", "Closed", "yes"),
        Column("then", "Then", "text"),
        Column("on_dead", "If some are dead", "text"),
        Column("opened_us", "Opened, UTC", "time"),
        Column("expires_us", "Expires, UTC", "time"),
    ),
    "name",
    ("name",),
)
ERRORS: Final = Table(
    "errors",
    "Errors",
    (
        Column("time_us", "Time, UTC", "time"),
        Column("reason", "Reason", "text"),
        Column("action", "Action", "text"),
        Column("request_id", "Request", "address"),
        Column("connection", "Connection", "address"),
        Column("client", "Client", "text"),
        Column("user", "User", "text"),
        Column("id", "Error id", "address"),
    ),
    "time_us",
    ("reason",),
)
AUDIT: Final = Table(
    "audit",
    "Audit",
    (
        Column("time_us", "Time, UTC", "time"),
        Column("user", "User", "text"),
        Column("action", "Action", "text"),
        Column("what", "What", "text"),
        Column("count", "Count", "count"),
        Column("requests", "Requests", "count"),
        Column("client", "Client", "text"),
        Column("connection", "Connection", "address"),
    ),
    "time_us",
    ("what",),
)
LIMITS: Final = Table(
    "limits",
    "Limits",
    (
        Column("setting", "Setting", "text"),
        Column("share", "Used", "share"),
        Column("now", "Now", "figure"),
        Column("limit", "Limit", "figure"),
        Column("what", "Nearest", "text"),
    ),
    "share",
    ("setting",),
)
USERS: Final = Table(
    "users",
    "Users",
    (
        Column("name", "Name", "text"),
        Column("publish", "Publish", "texts"),
        Column("consume", "Consume", "texts"),
        Column("read", "Read", "texts"),
        Column("bind", "Bind", "texts"),
        Column("monitoring", "Monitoring", "yes"),
        Column("admin", "Admin", "yes"),
        Column("eval", "Eval", "yes"),
        Column("publishes_per_s", "Most publishes/s", "most"),
        Column("bytes_per_s", "Most bytes/s", "most_bytes"),
        Column("connections_max", "Most connections", "most"),
        Column("queues", "Queues", "count"),
        Column("queues_max", "Most queues", "most"),
        Column("queue_bytes", "Bytes in queues", "bytes"),
        Column("queue_bytes_max", "Most bytes in queues", "most_bytes"),
    ),
    "name",
    ("name",),
)
ATTENTION: Final = Table(
    "attention",
    "What needs a person",
    (
        STATE,
        Column("what", "What needs a person", "need"),
        Column("queue", "Queue", "queue"),
        Column("told", "Figures", "text"),
    ),
    "rank",
    ("what",),
)
"""Shown by the overview."""
VIEWS: Final = {
    "Messages": (
        ("overview", "Overview", "o"),
        ("queues", "Queues", "q"),
        ("schedules", "Schedules", "s"),
        ("batches", "Batches", "b"),
        ("archives", "Archives", "a"),
        ("tail", "Live tail", "t"),
        ("message", "Trace", "m"),
        ("publish", "Publish", "p"),
    ),
    "Clients": (
        ("consumers", "Consumers", "c"),
        ("connections", "Connections", "n"),
        ("users", "Users", "u"),
    ),
    "Server": (
        ("errors", "Errors", "e"),
        ("limits", "Limits", "l"),
        ("audit", "Audit", "d"),
    ),
}
"""Path and title of each view, and the key that opens it after a g."""
TABLES: Final = {
    each.key: each
    for each in (
        *(ATTENTION, QUEUES, CONSUMERS, CONNECTIONS, ARCHIVES),
        *(SCHEDULES, BATCHES, ERRORS, AUDIT, LIMITS, USERS),
    )
}
