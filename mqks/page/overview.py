"""The numbers of the first view."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple, Protocol

from mqks.client import requests
from mqks.page.limits import rows
from mqks.page.tables import FORMATS, Row, duration

SHARE_MOST: Final = 0.8
"""Of a limit; more needs a person."""
ERRORS_S: Final = 2.0
"""The points of the history are rates of so many seconds."""


class History(Protocol):
    """Rates that the server keeps: of each time, in seconds since the epoch, those of the series;
    None for a queue that has none."""

    def points(self, queue: bytes | None, *, day: bool) -> list[list[float]] | None: ...
    def growth(self, queue: bytes) -> int: ...
    def is_dead_letters(self, name: bytes) -> bool: ...


class Number(NamedTuple):
    key: str
    title: str
    kind: str
    """How it is shown: a key of `FORMATS`."""


class Group(NamedTuple):
    title: str
    source: str
    """The part of a sample that has them."""
    numbers: tuple[Number, ...]


GROUPS: Final = (
    Group(
        "Messages",
        "totals",
        (
            Number("messages_ready", "Ready", "count"),
            Number("messages_unacked", "Unacked", "count"),
            Number("messages_scheduled", "Scheduled", "count"),
        ),
    ),
    Group(
        "Per second",
        "rates_per_s",
        (
            Number("received", "Published", "rate"),
            Number("delivered", "Delivered", "rate"),
            Number("acknowledged", "Acked", "rate"),
            Number("rejected", "Rejected", "rate"),
            Number("dead", "Dead", "rate"),
        ),
    ),
    Group(
        "Objects",
        "totals",
        (
            Number("queues", "Queues", "count"),
            Number("bindings", "Bindings", "count"),
            Number("consumers", "Consumers", "count"),
            Number("connections", "Connections", "count"),
        ),
    ),
    Group(
        "Memory",
        "totals",
        (
            Number("memory_bytes", "Messages", "bytes"),
            Number("unacked_bytes", "Unacked messages", "bytes"),
            Number("metadata_bytes", "Queues and bindings", "bytes"),
            Number("unsent_bytes", "Unsent replies", "bytes"),
        ),
    ),
    Group(
        "Journal",
        "journal",
        (
            Number("db_bytes", "Database", "bytes"),
            Number("wal_bytes", "WAL", "bytes"),
            Number("disk_free_bytes", "Disk free", "bytes"),
            Number("segments", "Segments", "count"),
            Number("commits", "Commits", "count"),
        ),
    ),
    Group(
        "Server",
        "totals",
        (
            Number("uptime_s", "Uptime", "age"),
            Number("errors", "Errors", "count"),
            Number("loop_held", "Event loop held", "count"),
        ),
    ),
)


def value(source: Any, number: Number) -> str:
    found = source.get(number.key)
    return "" if found is None else FORMATS[number.kind](found)


def numbers(sample: Row) -> dict[str, str]:
    """All of them, formatted, by the part of the sample and their keys."""
    return {
        f"{group.source}.{each.key}": value(sample[group.source], each)
        for group in GROUPS
        for each in group.numbers
    }


def attention(settings: Mapping[str, Any], history: History, sample: Row) -> list[Row]:
    """What needs a person: rows of the table `ATTENTION`."""
    return [
        {"rank": rank, "what": what, "queue": queue, "told": told}
        for rank, (what, queue, told) in enumerate(_needs(settings, history, sample))
    ]


def _needs(
    settings: Mapping[str, Any], history: History, sample: Row
) -> Iterator[tuple[str, str | None, str]]:
    if why := sample["journal"].get("unwritable"):
        yield "Publishes are refused", None, str(why)
    for row in rows(settings, sample):
        # Of the ids of --once the oldest are forgotten: where they are used, all places are full.
        if (row["share"] or 0) >= SHARE_MOST and row["setting"] != "once_ids_max":
            told = f"{row['setting']}: {row['now']} of {row['limit']} {row['what']}"
            yield "A limit is near", None, told
    free, least = sample["journal"].get("disk_free_bytes"), settings["disk_free_bytes_min"]
    if free is not None and free < 2 * least:
        yield "The disk is nearly full", None, f"{FORMATS['bytes'](free)} free"
    *_, errors, held = [
        0.0,
        *map(sum, zip(*history.points(None, day=False) or [[0] * 8], strict=True)),
    ]
    for what, rate in (("Requests fail", errors), ("The event loop was held", held)):
        if rate:
            yield what, None, f"{max(1, round(rate * ERRORS_S)):,} in the last 10 minutes"
    for schedule in sample["schedules"]:
        if schedule["error"]:
            yield "A schedule fails", None, f"{schedule['name']}: {schedule['error']}"
    warning_s = settings["queue_age_warning_s"]
    for queue in sample["queues"]:
        name, ready, age_s = queue["name"], queue["ready"], queue["oldest_age_s"] or 0.0
        if not ready:
            continue
        key = requests.name(name)
        is_dead = history.is_dead_letters(key)
        if (is_dead or not queue["consumers"]) and (more := history.growth(key)) > 0:
            what = "Dead letters grow" if is_dead else "Grows without a consumer"
            yield what, name, f"{ready:,} wait, {more:,} more within 10 minutes"
        elif warning_s and age_s >= warning_s and not is_dead:
            yield "Messages wait for long", name, f"the oldest of {ready:,} for {duration(age_s)}"


def mark(history: History, queue: Row) -> str:
    """What a person should know of a queue in a list."""
    if history.is_dead_letters(requests.name(queue["name"])):
        return "dead letters"
    return "" if queue["consumers"] else "no consumer"
