"""The numbers of the first view."""

from typing import Any, Final, NamedTuple

from mqks.page.tables import FORMATS, Row


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
