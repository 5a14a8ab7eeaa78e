"""Every metric, once: its name, what it means, and where its value is read.

The one rule: nothing is counted here. A scrape reads what broker and journal count anyway, for each
batch rather than each message; so being watched costs a message nothing.
"""

import platform
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from mqks import __version__
from mqks.broker import stats
from mqks.broker.broker import Broker
from mqks.journal.histogram import Histogram
from mqks.journal.journal import Journal
from mqks.settings import SETTINGS, Settings

SLICE_QUEUES: Final = 500
"""Queues told before others have their turn: a quarter of a millisecond."""


class Metric(NamedTuple):
    """A counter, when its name ends in `_total`, or else a gauge."""

    name: str
    about: str
    value: Callable[[Any], float | None]


def _of(key: str) -> Callable[[stats.Row], float | None]:
    """None for what there is not: stores differ."""
    return lambda row: None if (value := row.get(key)) is None else float(value)


# Read from what `stats` answers.
TOTALS: Final = (
    Metric("mqks_uptime_seconds", "Since the server has started.", _of("uptime_s")),
    Metric("mqks_connections", "Clients that are connected, or shake hands.", _of("connections")),
    Metric("mqks_consumers", "Consumers of all queues.", _of("consumers")),
    Metric("mqks_queues", "Queues.", _of("queues")),
    Metric("mqks_bindings", "Events and masks bound to queues.", _of("bindings")),
    Metric("mqks_messages_ready", "Messages that wait in queues.", _of("messages_ready")),
    Metric(
        "mqks_messages_unacked",
        "Messages that consumers have not settled.",
        _of("messages_unacked"),
    ),
    Metric(
        "mqks_messages_scheduled", "Messages that wait for their time.", _of("messages_scheduled")
    ),
    Metric("mqks_messages_received_total", "Messages published.", _of("received")),
    Metric("mqks_messages_routed_total", "Copies put into queues.", _of("routed")),
    Metric("mqks_messages_unroutable_total", "Messages no queue wanted.", _of("unroutable")),
    Metric("mqks_messages_confirmed_total", "Publishes confirmed as durable.", _of("confirmed")),
    Metric("mqks_messages_delivered_total", "Copies given to consumers.", _of("delivered")),
    Metric("mqks_messages_redelivered_total", "Those given with a retry.", _of("redelivered")),
    Metric(
        "mqks_messages_acknowledged_total",
        "Copies acked, or delivered without manual ack.",
        _of("acknowledged"),
    ),
    Metric("mqks_messages_rejected_total", "Copies that consumers gave back.", _of("rejected")),
    Metric(
        "mqks_messages_dropped_total",
        "Dead messages that went to no other queue.",
        _of("dropped"),
    ),
    Metric("mqks_messages_purged_total", "Copies dropped by purge and trim.", _of("purged")),
    Metric("mqks_errors_total", "Requests answered with an error.", _of("errors")),
    Metric(
        "mqks_loop_held_total",
        "Times something took the event loop's thread loop_held_s of the processor.",
        _of("loop_held"),
    ),
    Metric(
        "mqks_loop_late_total",
        "Times the event loop stood still for loop_held_s, for whatever reason.",
        _of("loop_late"),
    ),
    Metric("mqks_memory_bytes", "Waiting messages in memory.", _of("memory_bytes")),
    Metric(
        "mqks_metadata_bytes",
        "Queues, bindings and consumers, messages aside.",
        _of("metadata_bytes"),
    ),
    Metric("mqks_unacked_bytes", "Messages that consumers hold.", _of("unacked_bytes")),
    Metric("mqks_unsent_bytes", "Replies not taken yet, as of a second ago.", _of("unsent_bytes")),
    Metric("mqks_disk_full", "1 while publishes are refused, or else 0.", _of("disk_full")),
)

# Read from what `stats journal` answers.
JOURNAL: Final = (
    Metric("mqks_journal_db_bytes", "Size of the database file.", _of("db_bytes")),
    Metric("mqks_journal_wal_bytes", "Size of the WAL.", _of("wal_bytes")),
    Metric("mqks_disk_free_bytes", "Free space on its file system.", _of("disk_free_bytes")),
    Metric("mqks_journal_segments", "Segments on disk.", _of("segments")),
    Metric("mqks_journal_segment_bytes", "Bytes of all segments.", _of("segment_bytes")),
    Metric("mqks_journal_messages", "Messages on disk that are not settled.", _of("messages")),
    Metric("mqks_once_bytes", "Remembered ids of `publish --once`, in memory.", _of("once_bytes")),
    Metric("mqks_journal_checkpoints_total", "Times the WAL was folded.", _of("checkpoints")),
)

# Read from each queue, with its name as the label `queue`.
QUEUES: Final = (
    Metric("mqks_queue_messages_ready", "Messages that wait.", lambda queue: queue.ready),
    Metric(
        "mqks_queue_messages_unacked",
        "Messages that consumers have not settled.",
        lambda queue: queue.unacked,
    ),
    Metric(
        "mqks_queue_messages_scheduled",
        "Messages that wait for their time.",
        lambda queue: queue.scheduled,
    ),
    Metric(
        "mqks_queue_fullness",
        "How much of what its policy lets wait does, 0 to 1; none without a limit that refuses.",
        lambda queue: queue.fullness,
    ),
    Metric("mqks_queue_consumers", "Its consumers.", lambda queue: len(queue.consumers)),
    Metric(
        "mqks_queue_oldest_message_age_seconds",
        "Age of the message that has waited longest, within ten seconds; none without messages.",
        lambda queue: queue.oldest_age_s,
    ),
)

# Read from the journal.
HISTOGRAMS: Final[tuple[tuple[str, str, Callable[[Journal], Histogram]], ...]] = (
    (
        "mqks_journal_commit_seconds",
        "How long commits take, until they are on disk.",
        lambda journal: journal.commit_seconds,
    ),
    (
        "mqks_journal_batch_records",
        "Messages and acks in one commit.",
        lambda journal: journal.batch_records,
    ),
)

READY: Final = ("mqks_ready", "1 while /readyz says so, or else 0.")

# With labels.
DEAD: Final = ("mqks_messages_dead_total", "Messages that died, by `reason`.")
LIMIT: Final = ("mqks_limit", "The settings that are limits, by `name`.")
LIMIT_REACHED: Final = (
    "mqks_limit_reached_total",
    "Requests and connections refused, or consumers held back, at a limit, by `limit`.",
)
BUILD_INFO: Final = (
    "mqks_build_info",
    "Always 1; `version`, `python` and `sqlite` tell what runs.",
)

NAMES: Final[tuple[str, ...]] = (
    *(metric.name for metric in (*TOTALS, *JOURNAL, *QUEUES)),
    READY[0],
    *(name for name, _, _ in HISTOGRAMS),
    *(name for name, _ in (DEAD, LIMIT, LIMIT_REACHED, BUILD_INFO)),
)


class _Collector(Collector):
    def __init__(
        self,
        settings: Settings,
        broker: Broker,
        journal: Journal,
        why_not_ready: Callable[[], str],
        totals: Callable[[], stats.Row],
    ) -> None:
        self._totals = totals
        self._settings = settings
        self._broker = broker
        self._journal = journal
        self._why_not_ready = why_not_ready

    def collect(self) -> Iterator[Family]:
        for metrics, row in (
            (TOTALS, self._totals()),
            (JOURNAL, self._broker.shared.facts.journal()),
        ):
            for metric in metrics:
                kind = CounterMetricFamily if _is_counter(metric.name) else GaugeMetricFamily
                if (value := metric.value(row)) is not None:
                    yield kind(metric.name, metric.about, value)
        dead = CounterMetricFamily(*DEAD, labels=["reason"])
        for reason, count in self._broker.shared.counters.dead.items():
            dead.add_metric([reason], count)
        yield dead
        yield GaugeMetricFamily(*READY, not self._why_not_ready())
        for name, about, read in HISTOGRAMS:
            histogram = read(self._journal)
            ends = [*map(str, histogram.bounds), "+Inf"]
            buckets = list(zip(ends, accumulate(histogram.counts), strict=True))
            yield HistogramMetricFamily(name, about, buckets, histogram.sum)
        limits = GaugeMetricFamily(*LIMIT, labels=["name"])
        for name, value in _limits(self._settings):
            limits.add_metric([name], value)
        yield limits
        reached = CounterMetricFamily(*LIMIT_REACHED, labels=["limit"])
        for name, count in self._broker.limits_reached.items():
            reached.add_metric([name], count)
        yield reached
        info = {
            "version": __version__,
            "python": platform.python_version(),
            **self._journal.store.versions,
        }
        build = GaugeMetricFamily(*BUILD_INFO, labels=list(info))
        build.add_metric(list(info.values()), 1)
        yield build


def registry_of(
    settings: Settings,
    broker: Broker,
    journal: Journal,
    why_not_ready: Callable[[], str],
    totals: Callable[[], stats.Row],
) -> CollectorRegistry:
    """What `/metrics` tells: everything but the single queues, and the process. `totals` gives
    what `stats.totals` has come to, which may take several turns."""
    registry = CollectorRegistry()
    registry.register(_Collector(settings, broker, journal, why_not_ready, totals))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


def queue_lines(broker: Broker) -> Iterator[bytes]:
    """What `/metrics/queues` tells, in slices of `SLICE_QUEUES`.

    All samples of a metric must stand together: the queues are gone through once for each.
    """
    queues = list(broker.queues.values())
    for name, about, value in QUEUES:
        yield f"# HELP {name} {about}\n# TYPE {name} gauge\n".encode()
        for start in range(0, len(queues), SLICE_QUEUES):
            yield "".join(
                f'{name}{{queue="{_label(queue.name)}"}} {number}\n'
                for queue in queues[start : start + SLICE_QUEUES]
                if not queue.deleted and (number := value(queue)) is not None
            ).encode()


def _is_counter(name: str) -> bool:
    return name.endswith("_total")


def _label(name: bytes) -> str:
    """Queues are named with bytes, labels with UTF-8."""
    return name.decode("utf-8", "backslashreplace").replace("\\", r"\\").replace('"', r"\"")


def _limits(settings: Settings) -> Iterator[tuple[str, float]]:
    for name, setting in SETTINGS.items():
        if name.endswith(("_max", "_min")) or setting.about.group == "Memory and pace":
            yield name, getattr(settings, name)
