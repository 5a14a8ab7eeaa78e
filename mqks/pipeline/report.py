"""A report: counts per event and window, delays, silent events.

The one rule: a report only reads, and changes neither the lake nor the queue.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import functions as F

from mqks.pipeline.errors import BadOption

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

WINDOWS_S = (1, 10, 60, 600, 3_600, 21_600, 86_400, 604_800)
"""The default is the first of these that results in at most WINDOWS_WANTED windows."""
WINDOWS_WANTED, WINDOWS_MAX = 72, 10_000
SENT_MAX_S = 253_402_300_800
"""The year 10000. Later times in payloads, and those before 1970, are ignored."""


@dataclass(frozen=True, slots=True)
class Window:
    """The messages of one event in one window."""

    start: datetime
    queue: str
    event: str
    messages: int
    bytes: int
    ids: int


@dataclass(frozen=True, slots=True)
class ReportedEvent:
    """All messages of one event."""

    event: str
    messages: int
    bytes: int
    """Of data."""
    ids: int
    """The number of distinct ids."""
    first: datetime
    last: datetime

    @property
    def retries(self) -> int:
        """Messages with an id that the event already had: published again."""
        return self.messages - self.ids


@dataclass(frozen=True, slots=True)
class Delay:
    """Delays in seconds of the messages of a queue that have both times."""

    queue: str
    messages: int
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class BadReason:
    """Bad rows of one reason."""

    reason: str
    field: str | None
    """Of the schema; None if it is the whole payload."""
    messages: int


@dataclass(frozen=True, slots=True)
class Report:
    title: str
    start: datetime
    end: datetime
    window_s: int
    delay_of: str
    """The two ends of the delays."""
    windows: list[Window]
    events: list[ReportedEvent]
    """Most messages first."""
    delays: list[Delay]
    reasons: list[BadReason]
    """Of rows with `data.reason`, most messages first."""

    @property
    def last_window(self) -> datetime:
        return _floor(self.end, self.window_s)

    @property
    def silent(self) -> list[ReportedEvent]:
        """Events with messages before the last window and none in it."""
        return [event for event in self.events if event.last < self.last_window]

    @property
    def messages(self) -> int:
        return sum(event.messages for event in self.events)

    @property
    def bytes(self) -> int:
        return sum(event.bytes for event in self.events)

    def write_parquet(self, path: Path) -> None:
        """One row per window, queue and event."""
        names = Window.__slots__
        columns = {name: [getattr(row, name) for row in self.windows] for name in names}
        types = [pa.timestamp("us", tz="UTC"), pa.string(), pa.string(), *[pa.int64()] * 3]
        pq.write_table(pa.table(columns, schema=pa.schema(zip(names, types, strict=True))), path)


def waiting(spark: "SparkSession", queue: str, url: str | None) -> "DataFrame":
    """The messages in a queue now, with the columns for a report."""
    options = {"queue": queue} | ({"url": url} if url else {})
    rows = spark.read.format("mqks").options(**options).load()
    return rows.withColumns({"queue": F.lit(queue), "archived": F.current_timestamp()})


def between(rows: "DataFrame", start: datetime | None, end: datetime | None) -> "DataFrame":
    """The rows that arrived from `start` up to, not including, `end`."""
    for limit, is_start in ((start, True), (end, False)):
        if limit is None:
            continue
        arrived, instant = F.col("timestamp"), F.lit(limit)
        rows = rows.where(arrived >= instant if is_start else arrived < instant)
        if "date" in rows.columns:  # So that the directories of other days are not even listed.
            day, date = F.col("date"), F.lit(limit.astimezone(UTC).date())
            rows = rows.where(day >= date if is_start else day <= date)
    return rows


def report(
    rows: "DataFrame", *, title: str, window_s: int | None = None, sent_field: str | None = None
) -> Report:
    """Report on messages with the columns of a lake's files.

    Delays are measured from the time in the payload's field `sent_field` (a JSON number of seconds,
    milliseconds or microseconds since 1970, or ISO 8601 text) to the arrival at the broker; without
    it, from the arrival to the archive. Raises BadOption.
    """
    total = F.coalesce(F.sum(F.length("value")), F.lit(0))
    counts = [F.count("*"), total, F.count_distinct("key")]
    times = [F.unix_micros(F.min("timestamp")), F.unix_micros(F.max("timestamp"))]
    events = [
        ReportedEvent(event, messages, size, ids, _time(first), _time(last))
        for event, messages, size, ids, first, last in (
            rows.groupBy("topic").agg(*counts, *times).collect()
        )
    ]
    now = datetime.now(UTC)
    start = min((event.first for event in events), default=now)
    end = max((event.last for event in events), default=now)
    window_s = window_s or _window_s(end - start)
    if (end - start).total_seconds() / window_s > WINDOWS_MAX:
        raise BadOption(
            f"windows of {window_s} s: there would be more than {WINDOWS_MAX:,}; use longer ones"
        )
    window_us = window_s * 10**6
    window = F.floor(F.unix_micros(F.col("timestamp")) / window_us)
    windows = [
        Window(_time(number * window_us), *counted)
        for number, *counted in rows.groupBy(window, "queue", "topic").agg(*counts).collect()
    ]
    return Report(
        title=title,
        start=start,
        end=end,
        window_s=window_s,
        delay_of=f"{sent_field} to arrival" if sent_field else "arrival to archive or now",
        windows=sorted(windows, key=lambda each: (each.start, each.queue, each.event)),
        events=sorted(events, key=lambda event: (-event.messages, event.event)),
        delays=_delays(rows, sent_field),
        reasons=_reasons(rows) if "data" in rows.columns else [],
    )


def _reasons(rows: "DataFrame") -> list[BadReason]:
    found = rows.groupBy("data.reason", "data.field").count().collect()
    reasons = [BadReason(*row) for row in found if row.reason]
    return sorted(reasons, key=lambda each: (-each.messages, each.reason, each.field or ""))


def _delays(rows: "DataFrame", sent_field: str | None) -> list[Delay]:
    arrived = F.unix_micros(F.col("timestamp")) / 10**6
    if sent_field is None:
        delay = F.unix_micros(F.col("archived")) / 10**6 - arrived
    else:
        delay = arrived - _sent_s(sent_field)
    told = rows.select("queue", delay.alias("delay")).where("delay is not null")
    quantiles = F.percentile_approx("delay", [0.5, 0.9, 0.99], 10_000).alias("quantiles")
    found = told.groupBy("queue").agg(F.count("*").alias("n"), quantiles, F.max("delay").alias("m"))
    delays = []
    for row in sorted(found.collect()):
        p50, p90, p99 = row.quantiles
        delays.append(Delay(row.queue, row.n, p50, p90, p99, row.m))
    return delays


def _sent_s(field: str) -> "Column":
    """The time in a field of the payload, in seconds since 1970, or null."""
    text = F.get_json_object(F.col("value").cast("string"), f"$.{field}")
    number = text.try_cast("double")
    sent_s = (
        F.when(number >= 1e14, number / 1e6)
        .when(number >= 1e11, number / 1e3)
        .when(number.isNotNull(), number)
        .otherwise(F.unix_micros(text.try_cast("timestamp")) / 1e6)
    )
    return F.when(sent_s.between(0, SENT_MAX_S), sent_s)  # NaN is above every number.


def _time(us: int) -> datetime:
    return datetime.fromtimestamp(0, UTC) + timedelta(microseconds=us)


def _floor(instant: datetime, window_s: int) -> datetime:
    return datetime.fromtimestamp(instant.timestamp() // window_s * window_s, UTC)


def _window_s(span: timedelta) -> int:
    fitting = (s for s in WINDOWS_S if span.total_seconds() <= s * WINDOWS_WANTED)
    return next(fitting, WINDOWS_S[-1])
