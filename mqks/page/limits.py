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


LIMITS: Final[dict[str, Callable[[Row], Nearest]]] = {
    "connections_max": _of("totals", "connections"),
    "connections_per_address_max": _address,
    "queues_max": _of("totals", "queues"),
    "queue_messages_max": _highest("queues", "ready", "name"),
    "bindings_per_queue_max": _highest("queues", "bindings", "name"),
    "prefetch_max": _highest("consumers", "unacked", "id"),
    "consumers_per_connection_max": _highest("connections", "consumers", "address"),
    "output_buffer_bytes_max": _highest("connections", "outbox_bytes", "address"),
    "metadata_bytes_max": _of("totals", "metadata_bytes"),
    "unacked_bytes_max": _of("totals", "unacked_bytes"),
    "unhandled_bytes_max": _of("totals", "unhandled_bytes"),
    "unsent_bytes_max": _of("totals", "unsent_bytes"),
    "db_bytes_max": _db_bytes,
    "wal_bytes_max": _of("journal", "wal_bytes"),
    "once_ids_max": _of("journal", "once_ids"),
    "results_max": _of("totals", "results"),
    "results_bytes_max": _of("totals", "result_bytes"),
}
"""By the setting: what comes nearest to it."""
NEEDS: Final = frozenset({"queues", "consumers", "connections"})
"""Lists that a sample must have for the limits."""


def rows(settings: Mapping[str, int], sample: Row) -> list[Row]:
    """A row for each limit; `settings` has their values, 0 for no limit."""
    found = list[Row]()
    for name, nearest in LIMITS.items():
        most, (value, what) = settings[name], nearest(sample)
        shown = FORMATS["bytes" if "bytes" in name else "count"]
        row = {"setting": name, "share": value / most if most else None, "now": shown(value)}
        found.append({**row, "limit": shown(most) if most else "none", "what": what})
    return found
