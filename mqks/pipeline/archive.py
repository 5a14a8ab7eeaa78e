"""From a queue into the lake: each message exactly once, whatever is killed at whatever time.

A batch is a Spark job over a range of the queue's numbers. Each task reads its part from the broker
and writes Parquet files into the lake's staging. The driver makes them part of the lake, together
with the first number of the next batch, in one atomic write. A batch that dies before that write
leaves only files to delete, and the next batch may have another size. A batch that dies after it is
finished when the lake is opened again. Tasks may therefore run twice, or outlive their driver.

The one rule: the queue is trimmed only up to the number that the lake has committed.
"""

import logging
import math
import pickle
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain
from threading import Event, Thread
from typing import TYPE_CHECKING, cast

from mqks.client.errors import RequestFailed
from mqks.pipeline.batch import READ, Payloads, Staged, TaskBatch, first_of, warmed
from mqks.pipeline.errors import DataLost, NoQueue, StoreAway
from mqks.pipeline.job import reasons
from mqks.pipeline.lake import File, Lake
from mqks.pipeline.layout import named, renamed
from mqks.pipeline.objects import Patience
from mqks.pipeline.payloads import BAD, parsed
from mqks.pipeline.reader import LogRange, QueueReader, is_mask, lost, matching, parts, pattern
from mqks.pipeline.records import RecordSchema
from mqks.pipeline.wire import QueueConnection, ServerAddress

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql.types import StructType

BATCH_MESSAGES = 1_000_000
INTERVAL_S = 10.0
IDLE_S = 0.05
"""The shortest pause between two checks of a queue with nothing new."""
ROLL_S = 300.0
FIND_S, EXPIRE_S = 5.0, 600.0
"""Pauses before new queues are looked for that match a mask, and days that are too old."""
FILES_MANY = 1000
"""Of one batch: each file and its directory cost a sync, and each reader opens each file."""

_log = logging.getLogger("mqks.pipeline")


def warm(spark: "SparkContext") -> None:
    """Start the workers, which import what a batch needs. If that fails, the first batch tells
    why."""

    def start() -> None:
        with suppress(Exception):
            count = spark.defaultParallelism
            spark.parallelize(range(count), count).mapPartitions(warmed).collect()

    Thread(target=start, daemon=True).start()


@dataclass(frozen=True, slots=True)
class Progress:
    """One batch that is in the lake."""

    queue: str
    epoch: str
    first: int
    next: int
    """Everything below is in the lake."""
    messages: int
    unparsed: int
    """The number of these that do not fit the schema; their `data` is null."""
    left_out: int
    """The number of replayed messages, whose originals are in the lake."""
    files: int
    bytes: int
    waiting: int
    """Messages in the lake that are not visible yet."""
    seconds: float
    lag: int
    """How many numbers the lake is behind the end of the queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The settings of an archive."""

    queue: str
    """A name, or a mask: `*` matches any characters except dots, `**` any characters."""
    server: ServerAddress
    once: bool = False
    """End when everything that the queue held at the start is archived."""
    batch_messages: int = BATCH_MESSAGES
    interval_s: float = INTERVAL_S
    """A smaller batch is archived after this time."""
    schema: "StructType | RecordSchema | None" = None
    """The schema of payloads, which are parsed into the column `data`: JSON's for Spark's types."""
    schemas: "Mapping[str, StructType | RecordSchema]" = field(default_factory=dict)
    """Schemas of the payloads of events, by masks of which the first counts; only for a lake with a
    table for each event."""
    roll_s: float = ROLL_S
    """The longest time before small files are merged; until then they are not visible."""
    keep_s: float | None = None
    """Days that ended before this time are removed from a table."""
    trim: bool = True
    reader: str | None = None
    """Which of its readers is this for the queue, which is trimmed up to the slowest."""
    include_replays: bool = False
    """Archive also what a replay has published and the lake has already."""
    fail_on_data_loss: bool = True
    """End with DataLost if messages are missing from the queue that the lake does not have."""

    def check(self) -> None:
        """Before a lake is made. Raises RequestFailed and NoQueue, as `run`."""
        with closing(QueueConnection(self.server)) as connection:
            names = matching(connection, self.queue)
            if not is_mask(self.queue):
                QueueReader(None, self.queue, connection=connection).range()
            elif self.once and not names:
                raise NoQueue(f"no queue matches {self.queue}")

    def run(
        self, spark: "SparkContext", lake: Lake, stop: Event, bad: Lake | None = None
    ) -> Iterator[Progress]:
        """Archive until stopped, or with `once` until what existed at the start is in the lake.

        `lake` must be entered, and so `bad`, where payloads go that do not fit the schema.

        Raises RequestFailed (no such queue), OSError (no server), DataLost (messages are missing,
        or an older state of the database was restored), NoQueue (none matches the mask) and the
        reason of a Spark job that failed.
        """
        runs, gone = dict[str, _Run](), set[str]()
        lakes = [lake] if bad is None else [lake, bad]
        find_s = expire_s = -math.inf
        patience, rests = Patience(stop), False

        with closing(QueueConnection(self.server)) as connection:
            while not stop.is_set():
                if self.keep_s is not None and time.monotonic() >= expire_s and not rests:
                    for each in lakes:
                        each.expire((datetime.now(UTC) - timedelta(seconds=self.keep_s)).date())
                    expire_s = time.monotonic() + EXPIRE_S
                if time.monotonic() >= find_s:
                    names = matching(connection, self.queue)
                    is_mine = re.compile(pattern(self.queue)).search
                    with suppress(StoreAway):
                        known = {name for name in lake.queues() if is_mine(name)}
                        gone |= known - {*names}
                    for name in names:
                        if name not in runs:
                            reader = QueueReader(
                                None, name, connection=connection, schema=READ, meta=True
                            )
                            runs[name] = _Run(self, spark, lake, bad, name, reader)
                    if self.once and not (runs or gone):
                        raise NoQueue(f"no queue matches {self.queue}")
                    if not names and find_s == -math.inf:
                        _log.warning("no queue matches %s yet", self.queue)
                    once = self.once or not is_mask(self.queue)
                    find_s = math.inf if once else time.monotonic() + FIND_S
                try:
                    while gone:
                        self._lose(lake, min(gone), "deleted")
                        gone.remove(min(gone))
                except StoreAway as error:
                    patience.wait(error)
                is_idle = True
                for name, run in [*runs.items()]:
                    try:
                        progress = run.step()
                    except StoreAway as error:
                        is_idle = False
                        patience.wait(error)
                        break
                    except RequestFailed:
                        if name in matching(connection, self.queue):
                            raise
                        run.is_done = True  # A queue of a mask, which was deleted.
                        progress = None
                        if run.goal is not None:
                            gone.add(name)
                    if run.is_done:
                        del runs[name]
                    if progress is not None:
                        is_idle = False
                        patience = Patience(stop)
                        yield progress
                    if stop.is_set():
                        break
                if self.once and not (runs or gone):
                    break
                # Whoever pauses all of them may be at work on the lake.
                rests = bool(runs) and all(run.is_paused for run in runs.values())
                if is_idle:
                    stop.wait(min(1.0, max(IDLE_S, self.interval_s)))
                    for each in [] if rests else lakes:
                        each.roll(self.roll_s)
        for each in [] if rests else lakes:
            each.roll(0)

    def _lose(self, lake: Lake, queue: str, what: str) -> None:
        """Messages of this queue may have gone with it that the lake does not have. Raises
        DataLost, or warns, once."""
        told = f"the queue {queue} was {what}: what was not archived of it is gone"
        lost(told, self.fail_on_data_loss)
        if lake.knows(queue):
            lake.next(queue, "")
            lake.commit(queue, "", 0, [])


@dataclass(slots=True)
class _Run:
    """A running archive of one queue."""

    job: Archive
    spark: "SparkContext"
    lake: Lake
    bad: Lake | None
    queue: str
    reader: QueueReader
    goal: int | None = None
    waited_until: float = field(default_factory=time.monotonic)
    is_done: bool = False
    """Whether everything is archived that an archive with `once` shall."""
    is_paused: bool = False

    def step(self) -> Progress | None:
        """One batch, or none."""
        job = self.job
        log, start = self._look()
        is_first = self.goal is None
        self.goal = log.next if self.goal is None else self.goal
        # The last run may have died between the two, and a server that starts knows no marks.
        if job.trim and (job.reader or (is_first and log.first < start)):
            self._trim(log.epoch, start)
        if log.is_paused != self.is_paused:
            self.is_paused = log.is_paused
            _log.warning("the queue %s is %s", self.queue, "paused" if log.is_paused else "resumed")
        if log.is_paused:
            return None
        end = min(log.next, start + job.batch_messages)
        if job.once and (start >= self.goal or end <= start):
            self.is_done = True
            return None
        short = not job.once and end - start < job.batch_messages
        if end <= start or (short and time.monotonic() < self.waited_until):
            return None
        progress = self._archive(log.epoch, start, end)
        self.waited_until = time.monotonic() + job.interval_s
        return progress

    def _look(self) -> tuple[LogRange, int]:
        """The range of the queue, and the number of its first message that the lake does not have.

        Raises DataLost.
        """
        queue, log = self.queue, self.reader.range()
        done, reached, came_us = (
            told(queue, log.epoch)
            for told in (self.lake.next, self.lake.reached, self.lake.arrived_us)
        )
        archived = None if self.job.reader else done or log.first
        log = self.reader.range(None if came_us is None else came_us + 1, archived)
        if done is None:
            if self.lake.knows(queue, log.epoch):
                self.job._lose(self.lake, queue, "deleted and created again")
            return log, log.first
        other = log.next if log.at is None else log.at
        if other < (reached or done):
            # Numbers that the lake has were, or will be, used again for other messages: these must
            # neither count as archived nor be trimmed.
            raise DataLost(
                f"the lake has messages of the queue {queue} up to {reached}, but from {other} on"
                " the queue has other messages: an older state of the database was restored. Stop"
                " the server and run mqks new-epoch"
            )
        if log.first > done:
            lost(
                f"messages {done} to {log.first - 1} of the queue {queue} are gone and were not"
                " archived: another program consumes or trims this queue",
                self.job.fail_on_data_loss,
            )
        return log, max(done, log.first)

    def _archive(self, epoch: str, start: int, end: int) -> Progress:
        """One batch, from the queue into the lake."""
        queue, began = self.queue, time.perf_counter()
        bad_start = (self.bad and self.bad.next(queue, epoch)) or 0
        files, bad_files = self._stage(epoch, start, end, bad_start)
        if self.lake.adopts(queue, epoch, start, files):
            more, _ = self._stage(epoch, start, end, bad_start=end)
            files += (file for file in more if file.rows or file.replaced)
        if self.bad is not None:
            # First: what is in this lake and not in the other one is not added again.
            if bad_files:
                self.bad.commit(queue, epoch, max(end, bad_start), bad_files)
            self.bad.roll(self.job.roll_s)
        self.lake.commit(queue, epoch, end, files)
        if len(self.lake.layout.partitions) > 1 and len(files) > FILES_MANY:
            _log.warning("%d files in one batch: --by day writes one for each day", len(files))
        if self.job.trim:
            self._trim(epoch, end)
        after = self.reader.range(archived=None if self.job.reader else end)
        return Progress(
            queue=queue,
            epoch=epoch,
            first=start,
            next=end,
            messages=sum(file.rows + file.replaced for file in [*files, *bad_files]),
            unparsed=sum(file.unparsed for file in files) + sum(file.rows for file in bad_files),
            left_out=sum(file.left_out for file in files),
            files=sum(bool(file.rows) for file in files),
            bytes=sum(file.bytes for file in files),
            waiting=self.lake.roll(self.job.roll_s),
            seconds=round(time.perf_counter() - began, 3),
            lag=after.next - (end if after.epoch == epoch else after.first),
        )

    def _stage(
        self, epoch: str, start: int, end: int, bad_start: int
    ) -> tuple[list[File], list[File]]:
        """Run one batch as Spark jobs; returns the staged files, and those of bad rows."""
        schemas = self._schemas()
        batch = TaskBatch(
            reader=self.reader,
            queue=self.queue,
            epoch=epoch,
            start=start,
            ranges=parts(start, end, self.spark.defaultParallelism),
            archived_us=time.time_ns() // 1000,
            staging=self.lake.staging,
            fail_on_data_loss=self.job.fail_on_data_loss,
            leaves_out=not self.job.include_replays,
            types=[each for each, _ in schemas],
            bad=None if self.bad is None else self.bad.staging,
            bad_start=bad_start,
            upsert=self.lake.layout.upsert,
        )
        with reasons():
            ranges = self.spark.parallelize(batch.ranges, len(batch.ranges))
            staged: list[Staged] = ranges.mapPartitions(batch.read_and_stage).collect()
            for only, (_, schema) in enumerate(schemas):
                left = [each for one in staged for which, each in one.left if which == only]
                if left:
                    staged += self._parsed(replace(batch, ranges=left, only=only), schema)
        good, bad, _ = map(chain.from_iterable, zip(*staged, strict=True))
        return [*good], [*bad]

    def _parsed(self, batch: TaskBatch, schema: "StructType") -> list[Staged]:
        """What Spark has parsed."""
        from pyspark.sql import SparkSession
        from pyspark.sql.functions import col

        from mqks.pipeline.older import from_arrow_type

        count = len(batch.ranges)
        tasks = min(self.spark.defaultParallelism, count)
        started = SparkSession.builder.getOrCreate().range(0, count, 1, tasks)
        messages = started.mapInArrow(batch.read_rows, "value binary, batch binary")
        names = ("batch", "data", "bad")[: 2 if self.bad is None else 3]
        rows = parsed(messages, schema).select(*names)
        if batch.only is not None and self.lake.layout.names:  # By position.
            named = from_arrow_type(batch.types[batch.only].named)
            rows = rows.withColumn("data", col("data").cast(named))
        staged = rows.mapInArrow(batch.stage_rows, "staged binary")
        return [pickle.loads(row.staged) for row in staged.collect()]

    def _schemas(self) -> "list[tuple[Payloads, StructType]]":
        """Of payloads, by patterns of events, with types as wide as the lake has them, and Spark's
        of JSON. Raises LakeUnfit."""
        from mqks.pipeline.older import from_arrow_type, to_arrow_type

        every = {**self.job.schemas} if self.job.schema is None else {"**": self.job.schema}
        patterns = [*map(pattern, every)]
        found: list[tuple[Payloads, StructType]] = []

        def is_of(at: int | None, event: str) -> bool:
            return first_of(patterns, event) == at

        for at, (each, given) in enumerate(zip(patterns, every.values(), strict=True)):
            if isinstance(given, RecordSchema):
                records, own = given, given.kind
            else:
                records, own = None, to_arrow_type(given)
            new = renamed(own, self.lake.layout.names)
            fitted = self.lake.prepared(new, partial(is_of, at)) or own
            kind = named(fitted, own)
            same = given if kind == own else from_arrow_type(kind)
            payloads = Payloads(each, kind, fitted, records)
            found.append((payloads, cast("StructType", same)))
        if "**" not in every:
            self.lake.prepared(None, partial(is_of, None))
        if self.bad is not None:
            self.bad.prepared(BAD)
        return found

    def _trim(self, epoch: str, number: int) -> None:
        """Trim the queue, unless it was created again: then other messages have these numbers."""
        try:
            self.reader.trim(number, epoch, self.job.reader)
        except RequestFailed:
            if self.reader.range().epoch == epoch:
                raise
