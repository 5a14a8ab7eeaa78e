"""Every metric, once: its name, its meaning, and the source of its value.

The one rule: nothing is counted here. A scrape reads the counters that broker and journal maintain
for each batch anyway, so monitoring costs nothing per message.
"""

import platform
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any, Final

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mqks import __version__
from mqks.broker.broker import Broker
from mqks.broker.requests import stats
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.readers import archive_lag, archived_seq
from mqks.journal.journal import Journal
from mqks.server.tls import Context
from mqks.settings import SETTINGS

BUDGETS: Final = ("memory_bytes", "delivery_pause_bytes")
"""Settings that are limits and whose names do not end so."""
KEY: Final = re.compile(r"^mqks_(journal_|messages_(?=\w+_total$))?|_total$")
"""What a name has that the key in `stats` has not, which may be missing: stores differ."""
SLICE_QUEUES: Final = 500
"""Queues written before other tasks run: a quarter of a millisecond."""


# Each is a counter if its name ends in `_total`, otherwise a gauge.

# Read from the reply of `stats`; `KEY` says by which key.
TOTALS: Final = {
    "mqks_uptime_seconds": "Seconds since the start of the server.",
    "mqks_connections": "Open connections, including TLS handshakes.",
    "mqks_consumers": "Consumers of all queues.",
    "mqks_queues": "Queues.",
    "mqks_bindings": "Bindings of all queues.",
    "mqks_messages_ready": "Ready messages of all queues.",
    "mqks_messages_unacked": "Unacked messages of all queues.",
    "mqks_messages_scheduled": "Scheduled messages of all queues.",
    "mqks_results": "Messages and results of publish --keep-result.",
    "mqks_result_bytes": "What these take in memory.",
    "mqks_messages_received_total": "Messages published.",
    "mqks_messages_routed_total": "Messages added to queues, one per queue.",
    "mqks_messages_unroutable_total": "Published messages without a queue bound to their event.",
    "mqks_messages_confirmed_total": "Publishes confirmed.",
    "mqks_messages_delivered_total": "Messages delivered to consumers.",
    "mqks_messages_redelivered_total": "Messages delivered with a retry.",
    "mqks_messages_acknowledged_total": "Messages acked, or delivered without manual ack.",
    "mqks_messages_rejected_total": "Messages rejected by consumers.",
    "mqks_messages_dropped_total": "Dead messages without a dead-letter queue.",
    "mqks_messages_duplicates_total": "Copies that a unique message has kept out of a queue.",
    "mqks_messages_replaced_total": "Messages whose place a unique one has taken.",
    "mqks_messages_purged_total": "Messages dropped by purge and trim.",
    "mqks_errors_total": "Error replies.",
    "mqks_failed_logins_total": "Logins with a wrong password or token.",
    "mqks_loop_held_total": "Times something used the event loop for loop_held_s of CPU time.",
    "mqks_loop_late_total": "Times the event loop was blocked for loop_held_s of wall time, "
    "for any reason.",
    "mqks_reverts_seen_total": "Reads of messages that this database has lost, though its "
    "epoch is the same.",
    "mqks_timer_repeats_total": "Times a timer rested for a second, after it had fired again and "
    "again for one moment.",
    "mqks_memory_bytes": "Memory of ready messages.",
    "mqks_metadata_bytes": "Memory of queues, bindings and consumers, without messages.",
    "mqks_unacked_bytes": "Memory of unacked messages.",
    "mqks_unhandled_bytes": "Requests that wait for their turn, and incomplete ones.",
    "mqks_unsent_bytes": "Replies that clients have not read yet, at most a second old.",
    "mqks_disk_full": "1 while publishes are refused because the journal cannot be written, "
    "otherwise 0.",
    "mqks_draining": "1 while the server drains, otherwise 0.",
    "mqks_read_only": "1 while the server is read-only, otherwise 0.",
}

# The same from the reply of `stats journal`.
JOURNAL: Final = {
    "mqks_journal_db_bytes": "Size of the database file.",
    "mqks_journal_wal_bytes": "Size of the WAL.",
    "mqks_disk_free_bytes": "Free space on the file system of the database.",
    "mqks_journal_segments": "Journal segments on disk.",
    "mqks_journal_segment_bytes": "Size of all segments.",
    "mqks_journal_messages": "Messages on disk that are neither acked nor dropped.",
    "mqks_once_bytes": "Memory of the ids of `publish --once`.",
    "mqks_journal_checkpoints_total": "Checkpoints of the WAL.",
}


def _oldest_unacked_age_s(queue: Queue) -> float | None:
    held = [each.unacked for each in queue.consumers if isinstance(each, Consumer) and each.unacked]
    if not held:
        return None
    oldest_us = min(next(iter(unacked.values()))[2] for unacked in held)
    return max(0.0, (queue.shared.schedule.wall_us() - oldest_us) / 1e6)


# Read from each queue, with its name as the label `queue`.
QUEUES: Final[dict[str, tuple[str, Callable[[Queue], float | None]]]] = {
    "mqks_queue_messages_ready": ("Ready messages of the queue.", lambda queue: queue.ready),
    "mqks_queue_messages_unacked": ("Unacked messages of the queue.", lambda queue: queue.unacked),
    "mqks_queue_messages_scheduled": (
        "Scheduled messages of the queue.",
        lambda queue: queue.scheduled,
    ),
    "mqks_queue_fullness": (
        "Used part of the queue's own limit, 0 to 1; absent unless it refuses publishes.",
        lambda queue: queue.capacity.fullness,
    ),
    "mqks_queue_consumers": ("Consumers of the queue.", lambda queue: len(queue.consumers)),
    "mqks_queue_oldest_message_age_seconds": (
        "Age of the oldest ready message, accurate to ten seconds; absent without messages.",
        lambda queue: queue.oldest_age_s,
    ),
    "mqks_queue_oldest_unacked_age_seconds": (
        "How long a consumer has held its first unacked message, the longest of all consumers; "
        "absent without unacked messages.",
        _oldest_unacked_age_s,
    ),
    "mqks_queue_paused": (
        "1 while deliveries or publishes of the queue are paused, otherwise 0.",
        lambda queue: int(queue.rules.pause is not None),
    ),
    "mqks_queue_held": (
        "1 while a pause or a limit of deliveries holds ready messages back, otherwise 0.",
        lambda queue: int(queue.held_back is not None),
    ),
    "mqks_queue_archive_lag": (
        "Messages that the archive of the queue has not stored yet; absent without an archive.",
        archive_lag,
    ),
    "mqks_queue_archived_seq": (
        "The number up to which the queue is archived; absent without an archive.",
        archived_seq,
    ),
}

# Read from the journal, by the same names.
HISTOGRAMS: Final = {
    "mqks_journal_commit_seconds": "Duration of commits, including the sync.",
    "mqks_journal_batch_records": "Messages and acks per commit.",
}

# What is in neither.
OTHERS: Final = {
    "mqks_ready": "1 while /readyz answers 200, otherwise 0.",
    "mqks_active": "1 on the broker that owns the journal, 0 on a standby.",
    "mqks_schedules_failing": "Schedules whose last tick failed.",
    "mqks_batches": "Batches that have not ended.",
    "mqks_batches_expired_total": "Batches that expired before all of their messages were done.",
    "mqks_certificate_expiry_timestamp_seconds": "When the TLS certificate in use expires, in "
    "seconds since the epoch; absent without TLS.",
}

# With labels.
DEAD: Final = ("mqks_messages_dead_total", "Dead messages, by `reason`.")
LIMIT: Final = ("mqks_limit", "Value of each limit, by `name` of the setting.")
LIMIT_REACHED: Final = (
    "mqks_limit_reached_total",
    "Requests and connections refused, or deliveries paused, at a limit, by `limit`.",
)
BUILD_INFO: Final = (
    "mqks_build_info",
    "Always 1; labels are the broker's `name`, and the versions: `version`, `python`, `sqlite`.",
)

NAMES: Final[tuple[str, ...]] = (
    *(*TOTALS, *JOURNAL, *QUEUES, *OTHERS, *HISTOGRAMS),
    *(name for name, _ in (DEAD, LIMIT, LIMIT_REACHED, BUILD_INFO)),
)


def of_broker(
    broker: Broker,
    journal: Journal,
    totals: Mapping[str, Any],
    why_not_ready: str,
    certificate: Context | None,
) -> Iterator[Family]:
    """All but those of single queues; `totals` is the reply of `stats`."""
    others: dict[str, Any] = {
        "ready": not why_not_ready,
        "active": True,
        "schedules_failing": len(broker.schedules.errors),
        "batches": len(broker.batches.rows),
        "batches_expired": broker.batches.expired,
        "certificate_expiry_timestamp_s": certificate and certificate.expires_s,
    }
    for metrics, row in (TOTALS, totals), (JOURNAL, stats.journal(broker)), (OTHERS, others):
        for name, about in metrics.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            if (value := row.get(KEY.sub("", name).replace("seconds", "s"))) is not None:
                yield kind(name, about, float(value))
    dead = CounterMetricFamily(*DEAD, labels=["reason"])
    for reason, count in broker.shared.counters.dead.items():
        dead.add_metric([reason], count)
    yield dead
    for name, about in HISTOGRAMS.items():
        histogram = getattr(journal, name.removeprefix("mqks_journal_"))
        ends = [*map(str, histogram.bounds), "+Inf"]
        buckets = list(zip(ends, accumulate(histogram.counts), strict=True))
        yield HistogramMetricFamily(name, about, buckets, histogram.sum)
    limits = GaugeMetricFamily(*LIMIT, labels=["name"])
    for name in SETTINGS:
        if name.endswith(("_max", "_min")) or name in BUDGETS:
            limits.add_metric([name], getattr(broker.settings, name))
    yield limits
    reached = CounterMetricFamily(*LIMIT_REACHED, labels=["limit"])
    for name, count in broker.limits_reached.items():
        reached.add_metric([name], count)
    yield reached
    info = {
        "name": broker.settings.broker_name or "",
        "version": __version__,
        "python": platform.python_version(),
        **journal.store.versions,
    }
    build = GaugeMetricFamily(*BUILD_INFO, labels=list(info))
    build.add_metric(list(info.values()), 1)
    yield build


def role(*, is_active: bool) -> Family:
    """A standby has no other."""
    return GaugeMetricFamily("mqks_active", OTHERS["mqks_active"], is_active)


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


def lines(families: Iterable[Family]) -> bytes:
    """The text of these metrics, and of those of the process."""
    registry = CollectorRegistry()
    for kind in (ProcessCollector, PlatformCollector, GCCollector):
        kind(registry=registry)
    registry.register(_Collected(families))
    return generate_latest(registry)


def queue_lines(broker: Broker) -> Iterator[bytes]:
    """The text of `/metrics/queues`, in slices of `SLICE_QUEUES`.

    All samples of a metric must be adjacent, so the queues are iterated once per metric.
    """
    queues = list(broker.queues.values())
    slices = [queues[at : at + SLICE_QUEUES] for at in range(0, len(queues), SLICE_QUEUES)]
    dead: set[bytes | None] = set()
    for some in slices:
        dead.update(queue.rules.dead_letters for queue in some)
        yield b""
    for name, (about, value) in QUEUES.items():
        yield f"# HELP {name} {about}\n# TYPE {name} gauge\n".encode()
        for some in slices:
            yield "".join(
                f'{name}{{queue="{_label(queue.name)}"{_role(queue, dead)}}} {number}\n'
                for queue in some
                if not queue.deleted and (number := value(queue)) is not None
            ).encode()


def _role(queue: Queue, dead: Container[bytes | None]) -> str:
    """The label of a queue whose messages wait for no consumer."""
    if queue.name in dead:
        return ',role="dead_letters"'
    return "" if archived_seq(queue) is None else ',role="archive"'


def _label(name: bytes) -> str:
    """Queues are named with bytes, labels with UTF-8."""
    return name.decode("utf-8", "backslashreplace").replace("\\", r"\\").replace('"', r"\"")
