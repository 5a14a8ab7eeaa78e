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
CELL_CHARACTERS: Final = 200
"""A longer name is shortened in a table; its own page has all of it."""
LINKED_CHARACTERS_MAX: Final = 4096
"""A longer name has no link in a table."""


class Column(NamedTuple):
    key: str
    title: str
    kind: str
    """How its values are shown: a key of `FORMATS`."""

    @property
    def is_number(self) -> bool:
        return self.kind not in ("text", "texts", "queue", "schedule", "need", "yes")


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
    filter: str
    """The column that a filter searches."""


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


FORMATS: Final[dict[str, Callable[[Any], str]]] = {
    "text": short,
    "queue": short,
    "schedule": short,
    "count": number,
    "rate": number,
    "bytes": size,
    "age": duration,
    "need": short,
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
        self._rows = [(str(row[table.filter]).lower(), row) for row in rows]
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


QUEUES: Final = Table(
    "queues",
    "Queues",
    (
        # What tells that something is wrong comes first: a narrow screen shows no more.
        Column("name", "Name", "queue"),
        Column("mark", "Mark", "text"),
        Column("ready", "Ready", "count"),
        Column("oldest_age_s", "Oldest", "age"),
        Column("consumers", "Consumers", "count"),
        Column("in_per_s", "In /s", "rate"),
        Column("out_per_s", "Out /s", "rate"),
        Column("unacked", "Unacked", "count"),
        Column("scheduled", "Scheduled", "count"),
        Column("dead", "Dead", "count"),
        Column("archive_lag", "Archive lag", "count"),
        Column("archived_per_s", "Archived/s", "rate"),
        Column("bindings", "Bindings", "count"),
        Column("memory_bytes", "Memory", "bytes"),
    ),
    "ready",
    "name",
)
CONSUMERS: Final = Table(
    "consumers",
    "Consumers",
    (
        Column("id", "Consumer", "text"),
        Column("queue", "Queue", "queue"),
        Column("connection", "Connection", "connection"),
        Column("client", "Client", "text"),
        Column("address", "Address", "text"),
        Column("manual_ack", "Manual ack", "yes"),
        Column("prefetch", "Prefetch", "count"),
        Column("ack_timeout_s", "Ack timeout", "age"),
        Column("unacked", "Unacked", "count"),
        Column("oldest_age_s", "Held for", "age"),
        Column("unacked_bytes", "Bytes", "bytes"),
        Column("blocked", "Paused", "yes"),
    ),
    "unacked",
    "id",
)
CONNECTIONS: Final = Table(
    "connections",
    "Connections",
    (
        Column("id", "Number", "connection"),
        Column("address", "Address", "text"),
        Column("name", "Client", "text"),
        Column("user", "User", "text"),
        Column("slowed", "Slowed", "yes"),
        Column("consumers", "Consumers", "count"),
        Column("unacked", "Unacked", "count"),
        Column("unconfirmed", "Unconfirmed", "count"),
        Column("outbox_bytes", "Unsent", "bytes"),
        Column("blocked", "Paused", "yes"),
    ),
    "id",
    "address",
)
ARCHIVES: Final = Table(
    "archives",
    "Archives",
    (
        Column("name", "Queue", "queue"),
        Column("archive_state", "State", "text"),
        Column("archive_lag", "Lag", "count"),
        Column("archived_per_s", "Archived/s", "rate"),
        Column("archived_seq", "Archived up to", "count"),
        Column("archive_told_age_s", "Last told", "age"),
        Column("archive_commit_age_s", "Last commit", "age"),
    ),
    "archive_lag",
    "name",
)
SCHEDULES: Final = Table(
    "schedules",
    "Schedules",
    (
        Column("name", "Name", "schedule"),
        Column("event", "Event", "text"),
        Column("cron", "Cron", "text"),
        Column("tz", "Time zone", "text"),
        Column("every_s", "Every", "age"),
        Column("next_us", "Next, UTC", "time"),
        Column("last_us", "Last, UTC", "time"),
        Column("last_queues", "Queues of the last", "count"),
        Column("paused", "Paused", "yes"),
        Column("error", "Error", "text"),
        Column("missed", "If missed", "text"),
        Column("jitter_s", "Jitter", "age"),
    ),
    "name",
    "name",
)
BATCHES: Final = Table(
    "batches",
    "Batches",
    (
        Column("name", "Name", "text"),
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
    "name",
)
ERRORS: Final = Table(
    "errors",
    "Errors",
    (
        Column("time_us", "Time", "time"),
        Column("reason", "Reason", "text"),
        Column("action", "Action", "text"),
        Column("request_id", "Request", "text"),
        Column("connection", "Connection", "text"),
        Column("client", "Client", "text"),
        Column("user", "User", "text"),
        Column("id", "Error id", "text"),
    ),
    "time_us",
    "reason",
)
AUDIT: Final = Table(
    "audit",
    "Audit",
    (
        Column("time_us", "Time", "time"),
        Column("user", "User", "text"),
        Column("action", "Action", "text"),
        Column("what", "What", "text"),
        Column("count", "Count", "count"),
        Column("requests", "Requests", "count"),
        Column("client", "Client", "text"),
        Column("connection", "Connection", "text"),
    ),
    "time_us",
    "what",
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
    "setting",
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
        Column("publishes_per_s", "Publishes/s", "count"),
        Column("bytes_per_s", "Bytes/s", "count"),
        Column("connections_max", "Connections", "count"),
        Column("queues", "Queues", "count"),
        Column("queues_max", "Most queues", "count"),
        Column("queue_bytes", "Bytes in queues", "bytes"),
        Column("queue_bytes_max", "Most bytes", "bytes"),
    ),
    "name",
    "name",
)
ATTENTION: Final = Table(
    "attention",
    "What needs a person",
    (
        Column("what", "What needs a person", "need"),
        Column("queue", "Queue", "queue"),
        Column("told", "Figures", "text"),
    ),
    "rank",
    "what",
)
"""Shown by the overview."""
TABLES: Final = {
    each.key: each
    for each in (
        *(ATTENTION, QUEUES, CONSUMERS, CONNECTIONS, ARCHIVES),
        *(SCHEDULES, BATCHES, ERRORS, AUDIT, LIMITS, USERS),
    )
}
