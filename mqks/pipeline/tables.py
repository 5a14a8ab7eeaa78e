"""A lake with a table for each event, each of them a lake of its own.

    LAKE/order.new/, s3://bucket/events/order.new       files, and Delta tables
    namespace.table_order__new                          Iceberg tables
    LAKE/_mqks/tables, namespace.table__mqks            the control: a lake, too, with a row for
                                                        each event, and how far queues are archived

A batch is committed in parts: first the new events into the control, then the rows of each event
into its table, with the number where the batch ends; then the number into the control, and then the
queue is trimmed. If the archive dies between two of them, the next batch begins where the control
says, whatever its size. The tables that were committed have the rows of their events up to their
own numbers, and these rows are left out; the others, which have their rows up to the control's
number, get what they lack. A table without rows in a batch needs no commit: nothing of its event
was between its number and that of the control. A table has rows only when the control has its
event, so that none is overlooked in the next run.

The one rule: a row is staged only if its number is not below that of its own table, and the control
is never ahead of a table that has rows to come.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from operator import attrgetter
from typing import NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from mqks.pipeline.columns import FIELDS
from mqks.pipeline.errors import LakeUnfit
from mqks.pipeline.lake import (
    WRITTEN,
    File,
    FileLake,
    Lake,
    Stages,
    control_of,
    fitted,
    latest,
    stage,
    table_at,
)
from mqks.pipeline.layout import USUAL, Layout, rows_by
from mqks.pipeline.objects import Place, tried
from mqks.pipeline.places import events_of, is_there, lake_at

TABLES_MAX = 100
COMMITS = 8
"""At a time: most of it is waiting."""


class EventStaging(NamedTuple):
    place: Place
    tables: dict[Place, tuple[Stages, int]]
    """With the first number that a table does not have."""
    is_whole: bool
    """Whether events without a table are told, each by a file without a name."""

    def written(self, rows: pa.Table) -> Iterator[File]:
        for [event], part in rows_by(rows, ["event"], len(rows)):
            assert event is not None  # Rows without a topic are left out.
            if found := self.tables.get(table_at(self.place, event)):
                staging, start = found
                if pc.min(part["offset"]).as_py() < start:
                    part = part.filter(pc.greater_equal(part["offset"], start))
                for file in staging.written(part):
                    yield replace(file, event=event) if file.rows else file
            elif self.is_whole:
                first = part["offset"][0].as_py()
                arrived_us = part["timestamp"][0].value
                yield File("", "", [""], first=first, arrived_us=arrived_us, event=event)


class EventTables(Lake):
    """The lake of its tables, which are at most `tables_max`."""

    def __init__(
        self,
        place: Place,
        format: str | None = None,
        layout: Layout = USUAL,
        *,
        tables_max: int = TABLES_MAX,
    ) -> None:
        super().__init__(place, layout)
        lake_at(place, format, layout)  # Raises LakeUnfit before there is a control.
        self._format = format
        self._tables_max = tables_max
        self._entered = ExitStack()
        self._control: Lake
        self._tables: dict[Place, Lake] | None = None
        self._events: set[str] = set()
        """That have tables."""
        self._adopted: set[Place] = set()
        """Those that were made for the batch, which is staged again for them."""
        self._of = "", ""
        """The queue and epoch of the batch."""

    def __enter__(self) -> Self:
        tried(self._opened)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._entered.close()

    def _opened(self) -> dict[Place, Lake]:
        if self._tables is None:
            if is_there(self.place):
                raise LakeUnfit(f"{self.place} was created without --table-by: leave it out")
            with ExitStack() as entered:
                control = lake_at(control_of(self.place), self._format, Layout(self.layout.by))
                self._control = entered.enter_context(control)
                control.prepared(None)
                self.layout = self.layout._replace(by=control.layout.partitions)
                self._events = {*events_of(control)}
                tables = self._made(entered, self._events)
                # One that was not made yet gets the keys of the others.
                upserts = filter(None, (lake.layout.upsert for lake in tables.values()))
                upsert = next(upserts, self.layout.upsert)
                for lake in (self, *tables.values()):
                    lake.layout = lake.layout._replace(upsert=upsert)
                self._entered, self._tables = entered.pop_all(), tables
        return self._tables

    def _made(self, entered: ExitStack, events: Iterable[str]) -> dict[Place, Lake]:
        """The tables of these events, which are open as long as others are."""
        places = {table_at(self.place, event) for event in events}
        lakes = (lake_at(place, self._format, self.layout) for place in sorted(places, key=str))
        return {lake.place: entered.enter_context(lake) for lake in lakes}

    def _every(self) -> list[Lake]:
        tables = self._opened()
        return [self._control, *tables.values()]

    @property
    def staging(self) -> EventStaging:
        told = {
            place: (lake.staging, lake.next(*self._of) or 0)
            for place, lake in self._opened().items()
            if place in self._adopted or not self._adopted
        }
        return EventStaging(self.place, told, is_whole=not self._adopted)

    def next(self, queue: str, epoch: str) -> int | None:
        self._opened()
        self._of, self._adopted = (queue, epoch), set()
        return self._control.next(queue, epoch)

    def reached(self, queue: str, epoch: str) -> int | None:
        numbers = (lake.next(queue, epoch) for lake in self._every())
        return max((number for number in numbers if number is not None), default=None)

    def arrived_us(self, queue: str, epoch: str) -> int | None:
        times = (lake.arrived_us(queue, epoch) for lake in self._every())
        return max((time_us for time_us in times if time_us is not None), default=None)

    def prepared(
        self, data: pa.DataType | None, is_of: Callable[[str], bool] | None = None
    ) -> pa.DataType | None:
        tables, before = self._opened(), data
        events = self._events if is_of is None else filter(is_of, self._events)
        for place in {table_at(self.place, event) for event in events}:
            data = tables[place].prepared(data)
        return data if data == before else self.prepared(data, is_of)

    def adopts(self, queue: str, epoch: str, start: int, files: Sequence[File]) -> bool:
        told = [file for file in files if file.event and not file.rows]
        told.sort(key=attrgetter("first"), reverse=True)
        if not (new := {file.event: file for file in told}):
            return False
        places = {table_at(self.place, event) for event in new}
        if len({*self._opened(), *places}) > self._tables_max:
            raise LakeUnfit(
                f"{self.place}: the limit is {self._tables_max} tables, and the batch has"
                f" {len(new)} new events, such as {min(new)[:80]!r}: raise --tables-max"
            )
        rows = {
            "key": [b""] * len(new),
            "value": [b""] * len(new),
            "topic": [*new],
            "offset": [file.first for file in new.values()],
            "timestamp": pa.array([file.arrived_us for file in new.values()]).cast(
                FIELDS["timestamp"]
            ),
            "queue": [queue] * len(new),
            "epoch": [epoch] * len(new),
        }
        batch = fitted(pa.RecordBatch.from_pydict(rows), WRITTEN)
        self._control.commit(queue, epoch, start, [*stage(self._control.staging, [batch])])
        self._opened().update(self._made(self._entered, new))
        self._events |= new.keys()
        self._adopted = places
        return True

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        tables = self._opened()
        # Each has the latest arrival of the batch: a database that was reset to before it is found.
        came_us = latest(None, files)
        came = [] if came_us is None else [File("", "", [""], arrived_us=came_us)]
        parts: dict[Place, list[File]] = {}
        for file in files:
            if file.rows:
                parts.setdefault(table_at(self.place, file.event), []).append(file)

        def commit(place: Place) -> None:
            tables[place].commit(queue, epoch, number, [*parts[place], *came])

        with ThreadPoolExecutor(COMMITS) as threads:
            list(threads.map(commit, parts))
        self._control.commit(queue, epoch, number, came)

    def roll(self, age_s: float) -> int:
        # Plain files of the control are never shown: some readers would take them for messages.
        lakes = self._every()[isinstance(self._control, FileLake) :]
        return sum(lake.roll(age_s) for lake in lakes)

    def expire(self, before: date) -> None:
        if isinstance(self._control, FileLake):
            self._control.expire(before)  # It refuses this.
        for lake in self._opened().values():
            lake.expire(before)

    def lacks_data(self) -> bool:
        return any(lake.lacks_data() for lake in self._opened().values())

    # What is asked of the whole, the control knows.

    def queues(self) -> list[str]:
        self._opened()
        return self._control.queues()

    def knows(self, queue: str, epoch: str = "") -> bool:
        self._opened()
        return self._control.knows(queue, epoch)

    def recorded(self, name: str) -> int | None:
        self._opened()
        return self._control.recorded(name)

    def summed(self) -> set[tuple[str, str]]:
        self._opened()
        return self._control.summed()

    def contents(self) -> list[Place]:
        return [file for lake in self._opened().values() for file in lake.contents()]
