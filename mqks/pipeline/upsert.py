"""Tables with the last value of each key, as `--upsert` makes them.

    tasks: the last message of each key ─► files of no commit ─► the last ones of the batch
    commit: rows with these keys leave the table, the new ones join it, the number is recorded

The one rule: such a table is of one queue, whose batches are committed in their order, so that the
row of a key is always older than a message for it.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mqks.pipeline import objects
from mqks.pipeline.columns import field_of
from mqks.pipeline.objects import Place
from mqks.pipeline.payloads import BAD
from mqks.pipeline.sums import HASHED, Sums, added, batches_of, sums_of

UPSERT = "mqks.upsert"
"""The property of a table that has the last values."""


class Upsert(NamedTuple):
    """Whose last values a table has; pickles."""

    queue: str
    key: str
    """A column, or a field of the payload."""
    delete_where: str | None = None
    """A field that deletes the row of the key where it is true; an empty payload always does."""

    @classmethod
    def of(cls, told: str | None) -> "Upsert | None":
        """From the property of a table."""
        return None if told is None else cls(*json.loads(told))

    @property
    def option(self) -> str:
        where = f" --delete-where {self.delete_where}" if self.delete_where else ""
        return f"--upsert {self.key}{where} of the queue {self.queue}"

    @property
    def sql(self) -> str:
        name, *path = (each.replace("'", "''") for each in self.key.split("."))
        return name + "".join(f"['{each}']" for each in path)

    def keys(self, rows: pa.Table) -> Any:
        found = field_of(rows, self.key)
        return pa.nulls(len(rows)) if found is None else found

    def last(self, rows: pa.Table) -> pa.Table:
        """The last row of each key, of rows of one epoch."""
        told = pa.table({"key": self.keys(rows), "offset": rows["offset"]})
        numbers = told.group_by("key").aggregate([("offset", "max")])["offset_max"]
        return rows.filter(pc.is_in(rows["offset"], numbers))

    def deletes(self, rows: pa.Table) -> Any:
        """Of each row, whether it deletes that of its key."""
        is_empty = empty(rows)
        told = field_of(rows, self.delete_where) if self.delete_where else None
        return is_empty if told is None else pc.or_(is_empty, pc.fill_null(told, False))

    def keyless(self, rows: pa.Table, why: Any) -> Any:
        """Why rows are bad, as `BAD`, also those without a key; None if none is."""
        keys = self.keys(rows)
        if not keys.null_count:
            return why
        told = pa.repeat(pa.scalar({"reason": "no key", "field": self.key}, BAD), len(rows))
        why = pa.nulls(len(rows), BAD) if why is None else why.cast(BAD)
        return pc.if_else(pc.and_(keys.is_null(), why.is_null()), told, why)


def empty(rows: Any) -> Any:
    return pc.equal(pc.binary_length(rows["value"]), 0)


class LastRows(NamedTuple):
    """Of a batch."""

    upsert: Upsert
    rows: pa.Table
    """The last one of each key."""
    deletes: Any
    """Of each of them, whether it is not to be in the table."""
    holders: dict[Place, Sums]
    """The files of the table that have rows with these keys, and the sums of those."""

    @property
    def new(self) -> pa.Table:
        return self.rows.filter(pc.invert(self.deletes))

    @property
    def sums(self) -> list[Sums]:
        """What a commit adds to those of the table."""
        gone = added(self.holders.values())
        return [sums_of(self.new), {of: total.negative() for of, total in gone.items()}]

    def have_keys(self, rows: pa.Table) -> Any:
        keys = self.upsert.keys(self.rows)
        return pc.is_in(self.upsert.keys(rows).cast(keys.type), keys)

    def sums_in(self, file: Place) -> Sums:
        """Of the rows of a file of the table that have these keys."""

        def batches(*columns: str) -> Iterator[pa.Table]:
            for batch in batches_of(file, [*columns, self.upsert.key]):
                yield pa.Table.from_batches([batch])

        if not any(pc.any(self.have_keys(rows)).as_py() for rows in batches()):
            return {}
        return added(sums_of(rows.filter(self.have_keys(rows))) for rows in batches(*HASHED))


def last_rows(
    upsert: Upsert,
    staged: Iterable[Place],
    files: Sequence[Place],
    made: Callable[[pa.Table], pa.Table],
) -> LastRows:
    """Of a batch with these staged files, for a table with these files; `made` gives rows the
    columns of the table."""
    tables = (pq.ParquetFile(pa.BufferReader(objects.read(file))).read() for file in staged)
    rows = upsert.last(pa.concat_tables(map(made, tables)))
    last = LastRows(upsert, rows, upsert.deletes(rows), {})
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        told = zip(files, threads.map(last.sums_in, files), strict=True)
        return last._replace(holders={file: sums for file, sums in told if sums})
