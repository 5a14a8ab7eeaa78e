"""Grafana's dashboard, made from the metrics' table: `python -m tools.dashboard`.

The one rule: what a metric is decides how it is asked for. A panel names metrics and what they are
called in it; only what the table cannot know is an expression.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mqks.server import metrics

TARGET = Path(__file__).parents[1] / "deploy/grafana-dashboard.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
ONE = 'instance=~"$instance"'
QUEUE = f'{ONE}, queue=~"$queue"'
ABOUT = {
    **metrics.TOTALS,
    **metrics.JOURNAL,
    **{name: about for name, (about, _) in metrics.QUEUES.items()},
    **metrics.HISTOGRAMS,
    **metrics.OTHERS,
    **dict([metrics.DEAD, metrics.LIMIT_REACHED]),
}
LABELS = {metrics.DEAD[0]: "reason", metrics.LIMIT_REACHED[0]: "limit"}


class Panel(NamedTuple):
    title: str
    series: dict[str, str]
    """What each metric, or expression, is called; at one of a queue the queue's name is added."""
    about: str = ""
    """By default what the table says of the first metric."""
    unit: str = "short"
    width: int = 12
    is_log: bool = False
    words: tuple[str, str] | None = None
    """Of one number: a word and a color for 0 and for 1."""


NO_CONSUMER = (
    f'topk(50, mqks_queue_messages_ready{{{QUEUE}, role=""}} > 0'
    f" unless mqks_queue_consumers{{{QUEUE}}} > 0)"
)
NUMBERS = (
    Panel(
        "Ready",
        {f"min(mqks_ready{{{ONE}}} and on (instance) mqks_active == 1)": ""},
        "1 while /readyz answers 200, for example not while the disk is full or the server stops.",
        words=("no red", "yes green"),
    ),
    Panel(
        "Disk full",
        {f"max(mqks_disk_full{{{ONE}}})": ""},
        ABOUT["mqks_disk_full"],
        words=("no green", "YES red"),
    ),
    Panel(
        "Drains",
        {f"max(mqks_draining{{{ONE}}})": ""},
        ABOUT["mqks_draining"],
        words=("no green", "YES red"),
    ),
    Panel(
        "Read-only",
        {f"max(mqks_read_only{{{ONE}}})": ""},
        ABOUT["mqks_read_only"],
        words=("no green", "YES red"),
    ),
    Panel("Waiting", {"mqks_messages_ready": ""}),
    Panel("Unacked", {"mqks_messages_unacked": ""}),
    Panel("Queues", {"mqks_queues": ""}),
    Panel("Consumers", {"mqks_consumers": ""}),
    Panel("Connections", {"mqks_connections": ""}),
    Panel(
        "Up since",
        {f"1000 * (time() - mqks_uptime_seconds{{{ONE}}})": ""},
        "Start of the server.",
        "dateTimeFromNow",
    ),
)
CHARTS = {
    "Messages": (
        Panel(
            "Messages per second",
            {
                "mqks_messages_received_total": "received",
                "mqks_messages_routed_total": "routed",
                "mqks_messages_confirmed_total": "confirmed",
                "mqks_messages_delivered_total": "delivered",
                "mqks_messages_acknowledged_total": "acknowledged",
            },
            "Received: published. Routed: added to queues. Confirmed: durable.",
            "ops",
        ),
        Panel(
            "Redeliveries, errors, limits",
            {
                "mqks_messages_redelivered_total": "redelivered",
                "mqks_messages_rejected_total": "rejected",
                "mqks_messages_unroutable_total": "unroutable",
                "mqks_messages_purged_total": "purged",
                "mqks_messages_duplicates_total": "duplicates",
                "mqks_messages_replaced_total": "replaced",
                "mqks_errors_total": "errors",
                "mqks_failed_logins_total": "failed logins",
                "mqks_limit_reached_total": "limit",
                "mqks_loop_held_total": "loop held",
                "mqks_loop_late_total": "loop late",
                "mqks_messages_dead_total": "dead:",
                "mqks_messages_dropped_total": "dropped",
                "mqks_reverts_seen_total": "epoch is stale",
                "mqks_timer_repeats_total": "timer repeats",
            },
            "Messages redelivered, rejected or without a queue, error replies, limits reached.",
            "ops",
        ),
        Panel(
            "Backlog",
            {
                "mqks_messages_ready": "ready",
                "mqks_messages_unacked": "unacked",
                "mqks_journal_messages": "on disk",
                "mqks_messages_scheduled": "scheduled",
            },
            "Ready, unacked, and on disk.",
        ),
        Panel(
            "Clients",
            {
                "mqks_connections": "connections",
                "mqks_consumers": "consumers",
                "mqks_queues": "queues",
                "mqks_bindings": "bindings",
            },
            "Numbers of connections, consumers and queues.",
        ),
    ),
    "Journal": (
        Panel("Commits", {"mqks_journal_commit_seconds": ""}, unit="s", is_log=True),
        Panel(
            "Commits and records per commit",
            {
                f"sum(rate(mqks_journal_commit_seconds_count{{{ONE}}}[$__rate_interval]))": (
                    "commits a second"
                ),
                "mqks_journal_batch_records": "records, ",
                "mqks_journal_checkpoints_total": "checkpoints a second",
            },
            "Many messages per commit mean load, not a fault.",
            is_log=True,
        ),
        Panel(
            "Disk",
            {
                "mqks_journal_db_bytes": "database",
                "mqks_journal_segment_bytes": "segments",
                "mqks_journal_wal_bytes": "WAL",
            },
            "The WAL has some MiB unless another process reads the file.",
            "bytes",
            8,
        ),
        Panel(
            "Free disk",
            {f"mqks_disk_free_bytes{{{ONE}}}": "{{instance}}"},
            ABOUT["mqks_disk_free_bytes"],
            "bytes",
            8,
        ),
        Panel("Segments", {"mqks_journal_segments": "segments"}, width=8),
    ),
    "Process": (
        Panel(
            "Memory",
            {
                "process_resident_memory_bytes": "resident",
                "mqks_memory_bytes": "waiting messages",
                f'sum(mqks_limit{{{ONE}, name="memory_bytes"}})': "limit of waiting messages",
                "mqks_unhandled_bytes": "requests that wait",
                "mqks_unsent_bytes": "unsent replies",
                "mqks_unacked_bytes": "unacked messages",
                "mqks_metadata_bytes": "queues, bindings, consumers",
                "mqks_once_bytes": "ids of publish --once",
                "mqks_result_bytes": "results of publish --keep-result",
            },
            "From half of memory_bytes on, waiting messages are dropped from memory and read back "
            "from disk later.",
            "bytes",
            8,
        ),
        Panel(
            "CPU",
            {"process_cpu_seconds_total": "cores"},
            "The event loop uses at most one core, the journal's thread some more.",
            width=8,
        ),
        Panel(
            "Open files",
            {"process_open_fds": "open", "process_max_fds": "limit"},
            "One per connection.",
            width=8,
            is_log=True,
        ),
        Panel("Schedules that fail", {"mqks_schedules_failing": ""}),
        Panel("Results of publish --keep-result", {"mqks_results": ""}),
        Panel(
            "Batches",
            {"mqks_batches": "open", "mqks_batches_expired_total": "expired"},
            "Batches that have not ended, and how many expire in a second.",
        ),
        Panel(
            "Time until the certificate expires",
            {f"mqks_certificate_expiry_timestamp_seconds{{{ONE}}} - time()": "{{instance}}"},
            ABOUT["mqks_certificate_expiry_timestamp_seconds"],
            "s",
        ),
    ),
    "Queues (from /metrics/queues)": (
        Panel("Most waiting", {"mqks_queue_messages_ready": ""}),
        Panel("Oldest message", {"mqks_queue_oldest_message_age_seconds": ""}, unit="s"),
        Panel("Oldest unacked", {"mqks_queue_oldest_unacked_age_seconds": ""}, unit="s"),
        Panel("Most unacked", {"mqks_queue_messages_unacked": ""}),
        Panel(
            "Messages, but no consumer",
            {NO_CONSUMER: ""},
            "Queues with messages and without a consumer.",
        ),
        Panel("Most scheduled", {"mqks_queue_messages_scheduled": ""}),
        Panel("Fullest by their policy", {"mqks_queue_fullness": ""}, unit="percentunit"),
        Panel("Furthest behind with their archive", {"mqks_queue_archive_lag": ""}),
        Panel("Paused", {"mqks_queue_paused": ""}),
        Panel("Held back", {"mqks_queue_held": ""}),
        Panel("Archived up to", {"mqks_queue_archived_seq": ""}),
    ),
}


def expressions(name: str, told: str) -> Iterator[tuple[str, str]]:
    """What asks for a metric, and what it is called."""
    chosen = f"{name}{{{QUEUE if name in metrics.QUEUES else ONE}}}"
    rate = f"rate({chosen}[$__rate_interval])"
    if "{" in name:
        yield name, told
    elif name in metrics.HISTOGRAMS:
        bucket = rate.replace(name, f"{name}_bucket")
        for share, called in ((0.5, "p50"), (0.99, "p99")):
            yield f"histogram_quantile({share}, sum by (le) ({bucket}))", told + called
    elif name in metrics.QUEUES:
        yield f"topk(10, {chosen})", f"{told}{{{{queue}}}}"
    elif label := LABELS.get(name):
        yield f"sum by ({label}) ({rate})", f"{told} {{{{{label}}}}}"
    else:
        yield f"sum({rate if name.endswith('_total') else chosen})", told


def panel_of(panel: Panel, kind: str) -> dict[str, Any]:
    is_now = kind != "timeseries"
    told = (each for name, word in panel.series.items() for each in expressions(name, word))
    first = next(iter(panel.series))
    about = panel.about or ("The ten highest. " if first in metrics.QUEUES else "") + ABOUT[first]
    targets = [
        {
            "refId": chr(ord("A") + number),
            "datasource": SOURCE,
            "expr": expression,
            "legendFormat": called,
            "editorMode": "code",
            "range": not is_now,
            **({"instant": True} if is_now else {}),
            **({"format": "table"} if kind == "table" else {}),
        }
        for number, (expression, called) in enumerate(told)
    ]
    return {
        "type": kind,
        "title": panel.title,
        "description": about,
        "datasource": SOURCE,
        "targets": targets,
        **LOOKS[kind](panel),
    }


def _number(panel: Panel) -> dict[str, Any]:
    words = {}
    for value, told in enumerate(panel.words or ()):
        text, color = told.split()
        words[str(value)] = {"text": text, "color": color, "index": value}
    steps = [{"color": "text", "value": None}]
    defaults = {
        "unit": panel.unit,
        "color": {"mode": "thresholds"},
        "thresholds": {"mode": "absolute", "steps": steps},
        "mappings": [{"type": "value", "options": words}] if words else [],
    }
    calculated = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {"reduceOptions": calculated, "colorMode": "value", "graphMode": "none"},
    }


def _chart(panel: Panel) -> dict[str, Any]:
    scale = {"type": "log", "log": 10} if panel.is_log else {"type": "linear"}
    defaults = {
        "unit": panel.unit,
        **({} if panel.is_log else {"min": 0}),
        "color": {"mode": "palette-classic"},
        "custom": {"fillOpacity": 10, "showPoints": "never", "scaleDistribution": scale},
    }
    return {
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _table(panel: Panel) -> dict[str, Any]:
    names = {
        "excludeByName": {"Time": True, "__name__": True, "job": True},
        "renameByName": {"Value": "ready"},
    }
    return {
        "transformations": [
            {"id": "merge", "options": {}},
            {"id": "organize", "options": names},
        ],
        "fieldConfig": {"defaults": {}, "overrides": []},
        "options": {"showHeader": True, "sortBy": [{"displayName": "ready", "desc": True}]},
    }


LOOKS = {"stat": _number, "timeseries": _chart, "table": _table}


def panels() -> Iterator[dict[str, Any]]:
    """All of them, each in its place: a row has 24 columns."""
    y = 0
    for heading, some in ("Now", NUMBERS), *CHARTS.items():
        yield {"type": "row", "title": heading, "collapsed": False, "panels": []} | _at(0, y, 24, 1)
        x, y = 0, y + 1
        for each in some:
            is_number = some is NUMBERS
            kind = "stat" if is_number else "table" if NO_CONSUMER in each.series else "timeseries"
            width, height = (3, 4) if is_number else (each.width, 8)
            yield panel_of(each, kind) | _at(x, y, width, height)
            x = (x + width) % 24
            y += 0 if x else height
        y += height if x else 0


def _at(x: int, y: int, w: int, h: int) -> dict[str, Any]:
    return {"gridPos": {"h": h, "w": w, "x": x, "y": y}}


def dashboard() -> str:
    instances = "label_values(mqks_build_info, instance)"
    every = {"text": ".*", "value": ".*"}
    variables = [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "instance",
            "label": "Instance",
            "type": "query",
            "datasource": SOURCE,
            "definition": instances,
            "query": {"query": instances, "refId": "A"},
            "includeAll": True,
            "multi": True,
            "refresh": 2,
            "sort": 1,
        },
        {
            "name": "queue",
            "label": "Queues (regular expression)",
            "type": "textbox",
            "query": ".*",
            "current": every,
            "options": [every | {"selected": True}],
        },
    ]
    board = {
        "__inputs": [],
        "__requires": [
            {"type": "grafana", "id": "grafana", "name": "Grafana", "version": "9.0.0"},
            {"type": "datasource", "id": "prometheus", "name": "Prometheus", "version": "1.0.0"},
        ],
        "id": None,
        "uid": "mqks",
        "title": "MQKS",
        "description": "The metrics of MQKS. docs/monitoring.md explains them.",
        "tags": ["mqks"],
        "editable": True,
        "graphTooltip": 1,
        "schemaVersion": 36,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": [{"id": number} | each for number, each in enumerate(panels(), 1)],
    }
    return json.dumps(board, indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(dashboard())
