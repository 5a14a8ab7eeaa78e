"""The numbers of the first view."""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any, Final, Protocol

from mqks.client import requests
from mqks.inspection.marks import DELIVERIES_PAUSED, queue_marks
from mqks.page.limits import rows
from mqks.page.tables import FORMATS, Row, duration, trend

SHARE_MOST: Final = 0.8
"""Of a limit; more needs a person."""
GROWTH_MOST: Final = 1000
"""Messages in ten minutes: a queue with consumers that grows more needs a person."""
ERRORS_S: Final = 2.0
"""The points of the history are rates of so many seconds."""


class RateHistory(Protocol):
    """Rates that the server keeps: of each time, in seconds since the epoch, those of the series;
    None for a queue that has none."""

    def points(self, queue: bytes | None, *, day: bool) -> list[list[float]] | None: ...
    def trend(self, queue: bytes | None, column: int) -> list[float]: ...
    def growth(self, queue: bytes) -> int: ...
    def is_dead_letter_queue(self, name: bytes) -> bool: ...


RATES: Final = 7
"""So many rates come before the numbers of messages in a point of the history of the broker."""
GROUPS: Final = {
    ("Messages", "totals"): {
        "messages_ready": ("Ready", "count"),
        "messages_unacked": ("Unacked", "count"),
        "messages_scheduled": ("Scheduled", "count"),
    },
    ("Per second", "rates_per_s"): {
        "received": ("Published", "rate"),
        "delivered": ("Delivered", "rate"),
        "acknowledged": ("Acked", "rate"),
        "rejected": ("Rejected", "rate"),
        "dead": ("Dead", "rate"),
    },
    ("Objects", "totals"): {
        "queues": ("Queues", "count"),
        "bindings": ("Bindings", "count"),
        "consumers": ("Consumers", "count"),
        "connections": ("Connections", "count"),
    },
    ("Memory", "totals"): {
        "memory_bytes": ("Messages", "bytes"),
        "unacked_bytes": ("Unacked messages", "bytes"),
        "metadata_bytes": ("Queues and bindings", "bytes"),
        "unhandled_bytes": ("Requests that wait", "bytes"),
        "unsent_bytes": ("Unsent replies", "bytes"),
    },
    ("Journal", "journal"): {
        "db_bytes": ("Database", "bytes"),
        "wal_bytes": ("WAL", "bytes"),
        "disk_free_bytes": ("Disk free", "bytes"),
        "segments": ("Segments", "count"),
        "commits": ("Commits", "count"),
    },
    ("Server", "totals"): {
        "uptime_s": ("Uptime", "age"),
        "errors": ("Errors", "count"),
        "loop_held": ("Event loop held", "count"),
    },
}
"""By title and the part of a sample that has them: numbers, each with its title and how it is
shown, a key of `FORMATS`."""

TRENDS: Final = {
    **{f"rates_per_s.{key}": at for at, key in enumerate(GROUPS["Per second", "rates_per_s"])},
    **{f"totals.{key}": at for at, key in enumerate(GROUPS["Messages", "totals"], RATES)},
}
"""Those whose last ten minutes are drawn, and where the history of the broker has them."""
QUEUE_TRENDS: Final = {"in_per_s": 0, "out_per_s": 1}
"""Figures of a queue that have a trend, and where its history has them."""
FIGURES: Final = {
    "ready": ("Ready", "count"),
    "unacked": ("Unacked", "count"),
    "scheduled": ("Scheduled", "count"),
    "oldest_age_s": ("Oldest", "age"),
    "in_per_s": ("In/s", "rate"),
    "out_per_s": ("Out/s", "rate"),
    "dead": ("Died", "count"),
    "consumers": ("Consumers", "count"),
}
"""Of a queue, renewed while its page is open."""


def trends(history: RateHistory) -> dict[str, str]:
    return {key: trend(history.trend(None, column)) for key, column in TRENDS.items()}


def queue_told(history: RateHistory, queue: Row) -> dict[str, Any]:
    """What the page of a queue renews: its figures, their trends, the last point of its chart."""
    name = requests.name(queue["name"])
    points = history.points(name, day=False)
    last = points[-1] if points else []
    row = {**queue, **dict(zip(QUEUE_TRENDS, last[1:3], strict=False))}
    return {
        "numbers": {
            f"queue.{key}": "—" if row.get(key) is None else FORMATS[kind](row[key])
            for key, (_, kind) in FIGURES.items()
        },
        "trends": {
            f"queue.{key}": trend(history.trend(name, column))
            for key, column in QUEUE_TRENDS.items()
        },
        "mark": mark(history, "queues", queue),
        "point": last,
    }


def numbers(sample: Row) -> dict[str, str]:
    """All of them, formatted, by the part of the sample and their keys."""
    return {
        f"{source}.{key}": ""
        if (value := sample[source].get(key)) is None
        else FORMATS[kind](value)
        for (_, source), members in GROUPS.items()
        for key, (_, kind) in members.items()
    }


NEEDS: Final = {
    "Requests fail": "fails",
    "A schedule fails": "fails",
    "A limit is near": "near",
    "The disk is nearly full": "near",
    "The event loop was held": "slow",
    "Dead letters grow": "dead letters",
    "Grows behind its consumers": "grows",
    "Grows without a consumer": "grows",
    "Grows while deliveries are paused": "paused",
    "Messages wait for long": "old",
    "A schedule reaches no queue": "no queue",
    "The server drains": "paused",
    "The server is read-only": "paused",
}
"""What needs a person, and the mark of its row; of anything else it is stuck."""


def attention(settings: Mapping[str, Any], history: RateHistory, sample: Row) -> list[Row]:
    """What needs a person: rows of the table `ATTENTION`."""
    return [
        {"rank": rank, "mark": NEEDS.get(what, "stuck"), "what": what, "queue": queue, "told": told}
        for rank, (what, queue, told) in enumerate(_needs(settings, history, sample))
    ]


def _needs(
    settings: Mapping[str, Any], history: RateHistory, sample: Row
) -> Iterator[tuple[str, str | None, str]]:
    if why := sample["journal"].get("unwritable"):
        yield "Publishes are refused", None, str(why)
    if sample["totals"]["draining"]:
        yield "The server drains", None, "nothing is delivered, and nobody is let in"
    if sample["totals"]["read_only"]:
        yield "The server is read-only", None, "publishes are refused"
    for row in rows(settings, sample):
        # Of the ids of --once the oldest are forgotten: where they are used, all places are full.
        if (row["share"] or 0) >= SHARE_MOST and row["setting"] != "once_ids_max":
            told = f"{row['setting']}: {row['now']} of {row['limit']} {row['what']}"
            yield "A limit is near", None, told
    free, least = sample["journal"].get("disk_free_bytes"), settings["disk_free_bytes_min"]
    if free is not None and free < 2 * least:
        yield "The disk is nearly full", None, f"{FORMATS['bytes'](free)} free"
    points = history.points(None, day=False) or []
    errors, held = (
        f"{max(1, round(rate * ERRORS_S)):,} in the last 10 minutes" if rate else ""
        for rate in (sum(point[at] for point in points) for at in (RATES - 1, RATES))
    )
    if held:
        yield "The event loop was held", None, held
    for schedule in sample["schedules"]:
        if schedule["error"]:
            yield "A schedule fails", None, f"{schedule['name']}: {schedule['error']}"
        elif schedule["last_queues"] == 0 and not schedule["paused"]:
            told = f"{schedule['name']}: no queue is bound to {schedule['event']}"
            yield "A schedule reaches no queue", None, told
    warning_s = settings["queue_age_warning_s"]
    for queue in sorted(sample["queues"], key=itemgetter("ready"), reverse=True):
        name, ready, age_s = queue["name"], queue["ready"], queue["oldest_age_s"] or 0.0
        if not ready:
            break
        key = requests.name(name)
        is_dead = history.is_dead_letter_queue(key)
        more = history.growth(key)
        told = f"{ready:,} ready, {more:,} more in it than 10 minutes ago"
        if is_dead and more > 0:
            yield "Dead letters grow", name, told
        elif more > (GROWTH_MOST if queue["consumers"] else 0):
            why = "behind its consumers" if queue["consumers"] else "without a consumer"
            if queue["paused"] in DELIVERIES_PAUSED:
                why = "while deliveries are paused"
            if (held_by := queue["held_by"]) not in (None, "pause"):
                told += f", held by {held_by}"
            yield f"Grows {why}", name, told
        elif warning_s and age_s >= warning_s and not is_dead:
            yield "Messages wait for long", name, f"the oldest of {ready:,} for {duration(age_s)}"
    if errors:
        yield "Requests fail", None, errors


def archives(sample: Row) -> list[Row]:
    """The queues that an archive has told of: rows of the table `ARCHIVES`."""
    return [queue for queue in sample["queues"] if queue["archived_seq"] is not None]


def mark(history: RateHistory, table: str, row: Row) -> str:
    """What a person should know of a row of a list; "ok" is nothing."""
    if table == "queues":
        return ", ".join(_queue_marks(history, row))
    told = {"slowed": row.get("slowed"), "paused": row.get("blocked") or row.get("paused")}
    told |= {"fails": row.get("error"), "no queue": row.get("last_queues") == 0}
    return ", ".join(key for key, counts in told.items() if counts) or "ok"


def _queue_marks(history: RateHistory, queue: Row) -> list[str]:
    key = requests.name(queue["name"])
    grows = history.growth(key) > (GROWTH_MOST if queue["consumers"] else 0)
    return queue_marks(queue, is_dead=history.is_dead_letter_queue(key), grows=grows)
