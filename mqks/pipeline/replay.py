"""Publish messages of the lake to a broker again: a time range, some events, each message once.

The id of a replayed message is `{name}:{epoch}:{offset}`, from its place in the archive, which its
attributes `origin_queue`, `origin_epoch` and `origin_offset` also tell. Every run
of a replay uses the same ids, so the broker drops the messages that it already has. The progress is
saved once a second; after a kill, the next run continues from there.

The one rule: the saved progress covers only confirmed messages.
"""

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import chain
from threading import Event
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F

from mqks.client import requests, urls
from mqks.client.errors import RequestFailed
from mqks.limits import META_BYTES_MAX
from mqks.pipeline import objects
from mqks.pipeline.columns import ORIGIN_WORDS, PROPERTIES
from mqks.pipeline.errors import BadOption
from mqks.pipeline.lake import CONTROL
from mqks.pipeline.places import home_of, messages
from mqks.pipeline.reader import QueueReader, pattern
from mqks.pipeline.report import between
from mqks.pipeline.sink import Publisher, delivery_flags, quoted
from mqks.pipeline.wire import ServerAddress
from mqks.protocol.meta import LETTER

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PART_MESSAGES, PART_BYTES = 200_000, 64 * 1024 * 1024
"""About the size of a part that is sorted and held in memory. Spark cannot collect 1 GB at once."""
SAVE_MESSAGES, SAVE_S = 100_000, 1.0
"""The progress is saved after this number of messages or seconds. The number of messages in between
must be far below the `once_ids_max` of the server."""
_ORDER = ("timestamp", "queue", "epoch", "offset")
_SET = "&(?:origin_queue|origin_epoch|origin_offset|" + "|".join(LETTER) + ")=[^&]*"
"""Attributes that a replay or the server sets."""


@dataclass(frozen=True, slots=True)
class ReplayProgress:
    messages: int
    """Replayed by all runs together. After a kill, up to one second of messages count twice."""
    total: int
    """Messages that remained at the start of this run, plus those replayed before."""
    behind_s: float
    """How far the replay is behind the requested speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    lake: objects.Place
    server: ServerAddress
    name: str = "replay"
    """The name of this replay. Another name gives other ids: everything is replayed again."""
    start: datetime | None = None
    end: datetime | None = None
    events: str = "**"
    """A mask: `*` matches any characters except dots, `**` any characters."""
    speed: float = math.inf
    """The speed relative to the original one: 2 is twice as fast."""
    bad: bool = False
    """Whether these are no copies of what another lake has: they get no attributes of an origin."""

    def rows(self, spark: "SparkSession") -> "DataFrame":
        """All messages to replay."""
        found = between(messages(spark, self.lake, properties=True), self.start, self.end)
        if self.events == "**":
            return found
        return found.where(found.topic.rlike(pattern(self.events)))

    def counts(self, spark: "SparkSession") -> list[tuple[str, int]]:
        """The number of messages of each event, the largest first."""
        counted = self.rows(spark).groupBy("topic").count().collect()
        return sorted(((r[0], r[1]) for r in counted), key=lambda pair: (-pair[1], pair[0]))

    def archived_here(self, spark: "SparkSession") -> list[str]:
        """Queues of the server that the messages were archived from. If such a queue receives the
        replayed messages and is archived again with replays, the lake contains them twice."""
        found = []
        for queue, epoch in sorted(self.rows(spark).select("queue", "epoch").distinct().collect()):
            with suppress(RequestFailed), QueueReader(None, queue, server=self.server) as reader:
                if reader.range().epoch == epoch:
                    found.append(queue)
        return found

    def run(self, spark: "SparkSession", stop: Event) -> Iterator[ReplayProgress]:
        """Replay the remaining messages in the order of arrival, until done or stopped.

        Raises BadOption and the errors of `Publisher.publish`.
        """
        done, last = self._load(home := home_of(self.lake))
        left = _behind(self.rows(spark), last)
        count, parts = _size(left)
        total = done + count
        saved, saved_s = done, time.monotonic()
        pace = _Pace(self.speed, stop)
        with Publisher(self.server) as publisher:
            for part in pace.due(_in_order(left, self.name, parts, self.bad)):
                publisher.publish(part["id"], part["event"], part["value"], part["flags"])
                done += len(part)
                last = {name: part[name][-1].as_py() for name in _ORDER}
                now_s = time.monotonic()
                if done - saved >= SAVE_MESSAGES or now_s - saved_s >= SAVE_S:
                    self._save(home, done, last)
                    saved, saved_s = done, now_s
                    yield ReplayProgress(done, total, round(pace.behind_s, 3))
        self._save(home, done, last)
        yield ReplayProgress(done, total, round(pace.behind_s, 3))

    @property
    def _state(self) -> str:
        """The name of the progress in the lake."""
        return f"{CONTROL}/replays/{requests.name(self.name).hex()}.json"

    def _job(self) -> dict[str, Any]:
        """The options that must be the same in every run of a replay."""
        limits = [limit and limit.isoformat() for limit in (self.start, self.end)]
        return {"to": str(urls.parse(self.server.url)), "mask": self.events, "between": limits}

    def _load(self, home: objects.Place) -> tuple[int, dict[str, Any] | None]:
        """The number of replayed messages, and the place of the last one. Raises BadOption."""
        try:
            state = json.loads(bytes(objects.read(home, self._state)))
        except FileNotFoundError:
            return 0, None
        job = state["job"]
        if "events" in job:  # From an older version: `*` matched any characters, `?` one.
            events = job.pop("events")
            job["mask"] = "**" if events == "*" else None if {*"*?"} & {*events} else events
        if job != self._job():
            raise BadOption(
                f"a replay named {self.name} was run with other options: choose another name"
            )
        return state["done"], state["last"]

    def _save(self, home: objects.Place, done: int, last: dict[str, Any] | None) -> None:
        state = {"name": self.name, "job": self._job(), "done": done, "last": last}
        objects.write(home, self._state, json.dumps(state).encode())


class _Pace:
    """Delays messages until they are due."""

    def __init__(self, speed: float, stop: Event) -> None:
        self._speed = speed
        self._stop = stop
        self.behind_s = 0.0

    def due(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield parts of the batches, each when its last message is due, until stopped."""
        first_us, began_s = None, 0.0
        for batch in batches:
            times = np.asarray(batch["timestamp"])
            if first_us is None:  # The clock starts with the first message, not with the sorting.
                first_us, began_s = times[0], time.monotonic()
            at = 0
            while at < len(batch) and not self._stop.is_set():
                if self._speed == math.inf:
                    yield batch
                    break
                due_s = began_s + (times[at] - first_us) / 1e6 / self._speed
                self.behind_s = time.monotonic() - due_s
                if self.behind_s < 0:
                    self._stop.wait(-self.behind_s)
                    continue
                now_us = first_us + (time.monotonic() - began_s) * 1e6 * self._speed
                until = int(np.searchsorted(times, now_us, side="right"))
                yield batch.slice(at, until - at)
                at = until
            if self._stop.is_set():
                return


def _behind(rows: "DataFrame", last: dict[str, Any] | None) -> "DataFrame":
    """The rows after the last replayed one."""
    if last is None:
        return rows
    place = {name: F.lit(value) for name, value in last.items()}
    place["timestamp"] = F.timestamp_micros(place["timestamp"])
    place["offset"] = place["offset"].cast("bigint")
    rows = between(rows, datetime.fromtimestamp(last["timestamp"] // 10**6, UTC), None)
    return rows.where(F.struct(*_ORDER) > F.struct(*(place[name].alias(name) for name in _ORDER)))


def _size(rows: "DataFrame") -> tuple[int, int]:
    """The number of rows, and the number of parts of which each fits into memory."""
    sums = rows.agg(F.count("*"), F.coalesce(F.sum(F.length("value")), F.lit(0)))
    [(count, size)] = sums.collect()
    return count, max(1, -(-count // PART_MESSAGES), -(-size // PART_BYTES))


def _in_order(rows: "DataFrame", name: str, parts: int, bad: bool) -> Iterator[pa.RecordBatch]:
    """The rows in order, sorted by Spark and collected part by part as record batches."""
    told = rows.select("topic", "value", *_ORDER, *PROPERTIES.names)
    ordered = told.repartitionByRange(parts, *_ORDER)
    packed = ordered.sortWithinPartitions(*_ORDER).mapInArrow(
        partial(_pack, name, bad), "batch binary"
    )
    for row in packed.toLocalIterator(prefetchPartitions=True):
        with pa.ipc.open_stream(bytes(row.batch)) as stream:
            yield from stream


def _pack(name: str, bad: bool, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        offset = batch["offset"].cast(pa.string())
        ids = pc.binary_join_element_wise(name, batch["epoch"], offset, ":")
        told = zip(ORIGIN_WORDS, (quoted(batch["queue"]), batch["epoch"], offset), strict=True)
        columns = {
            "flags": _flags("" if bad else pc.binary_join_element_wise(*chain(*told), ""), batch),
            "id": ids.cast(pa.binary()),
            "event": batch["topic"].cast(pa.binary()),
            "value": batch["value"],
            **{place: batch[place] for place in _ORDER},
            "timestamp": batch["timestamp"].cast(pa.int64()),
        }
        whole = pa.RecordBatch.from_pydict(columns)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, whole.schema) as stream:
            stream.write_batch(whole)
        yield pa.RecordBatch.from_pydict({"batch": pa.array([sink.getvalue().to_pybytes()])})


def _flags(origins: Any, batch: pa.RecordBatch) -> Any:
    """Of a publish, each after a space. Attributes for which there is no room behind those of the
    origin are left out."""
    headers, priorities, keys = (batch[name] for name in PROPERTIES.names)
    pairs = pc.binary_join_element_wise("&", quoted(headers.keys), "=", quoted(headers.items), "")
    own = pc.binary_join(pa.ListArray.from_arrays(headers.offsets, pairs), "")
    own = pc.replace_substring_regex(own, _SET, "")
    fits = pc.less_equal(pc.add(pc.binary_length(origins), pc.binary_length(own)), META_BYTES_MAX)
    metas = pc.binary_join_element_wise(origins, pc.if_else(fits, own, ""), "")
    metas = pc.utf8_ltrim(metas, "&")
    words = pc.if_else(pc.equal(metas, ""), "", pc.binary_join_element_wise(" --meta=", metas, ""))
    flags = words, delivery_flags(priorities, keys), ""
    return pc.binary_join_element_wise(*flags).cast(pa.binary())
