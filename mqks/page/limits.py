"""The limits of the server, and how near each is.

The one rule: only what `stats` returns is compared; a limit that nobody counts is not shown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple

from mqks.page.tables import FORMATS, Row


class Nearest(NamedTuple):
    """What comes nearest to a limit. `what`: a queue, a consumer or a connection, if it is one."""

    value: int
    what: str = ""


class Limit(NamedTuple):
    setting: str
    kind: str
    """How it is shown: a key of `FORMATS`."""
    nearest: Callable[[Row], Nearest]


def _of(part: str, key: str) -> Callable[[Row], Nearest]:
    """A journal in PostgreSQL has no files, and no keys for them."""
    return lambda sample: Nearest(sample[part].get(key) or 0)


def _db_bytes(sample: Row) -> Nearest:
    """Of a journal in PostgreSQL the segments count."""
    journal = sample["journal"]
    return Nearest(journal.get("db_bytes", journal["segment_bytes"]) or 0)


def _highest(rows: str, key: str, name: str) -> Callable[[Row], Nearest]:
    def nearest(sample: Row) -> Nearest:
        row: Mapping[str, Any] = max(sample[rows], key=lambda row: row[key] or 0, default={})
        return Nearest(row[key] or 0, f"{rows[:-1]} {row[name]}") if row else Nearest(0)

    return nearest


def _address(sample: Row) -> Nearest:
    hosts: Iterable[str] = (row["address"].rpartition(":")[0] for row in sample["connections"])
    counts = Counter(filter(None, hosts)).most_common(1)
    return Nearest(counts[0][1], counts[0][0]) if counts else Nearest(0)


LIMITS: Final = (
    Limit("connections_max", "count", _of("totals", "connections")),
    Limit("connections_per_address_max", "count", _address),
    Limit("queues_max", "count", _of("totals", "queues")),
    Limit("queue_messages_max", "count", _highest("queues", "ready", "name")),
    Limit("bindings_per_queue_max", "count", _highest("queues", "bindings", "name")),
    Limit("prefetch_max", "count", _highest("consumers", "unacked", "id")),
    Limit("consumers_per_connection_max", "count", _highest("connections", "consumers", "address")),
    Limit("output_buffer_bytes_max", "bytes", _highest("connections", "outbox_bytes", "address")),
    Limit("metadata_bytes_max", "bytes", _of("totals", "metadata_bytes")),
    Limit("unacked_bytes_max", "bytes", _of("totals", "unacked_bytes")),
    Limit("unsent_bytes_max", "bytes", _of("totals", "unsent_bytes")),
    Limit("db_bytes_max", "bytes", _db_bytes),
    Limit("wal_bytes_max", "bytes", _of("journal", "wal_bytes")),
    Limit("once_ids_max", "count", _of("journal", "once_ids")),
)
NEEDS: Final = frozenset({"queues", "consumers", "connections"})
"""Lists that a sample must have for the limits."""


def rows(settings: Mapping[str, int], sample: Row) -> list[Row]:
    """A row for each limit; `settings` has their values, 0 for no limit."""
    return [_row(each, settings[each.setting], each.nearest(sample)) for each in LIMITS]


def _row(limit: Limit, most: int, nearest: Nearest) -> Row:
    shown = FORMATS[limit.kind]
    return {
        "setting": limit.setting,
        "share": nearest.value / most if most else None,
        "now": shown(nearest.value),
        "limit": shown(most) if most else "none",
        "what": nearest.what,
    }
