"""A Delta table on an object store: S3, and what speaks its protocol.

    URL/date=2026-11-20/{first}-{last}-{id}.parquet
    URL/_delta_log/

Tasks write files to their final names. They are in the table when a commit names them, which is a
conditional put of the next entry of the table's log.

The one rule: a commit without an answer is looked up in the table, and never just repeated.
"""

import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from mqks.pipeline.errors import LakeInUse, LakeUnfit, PipelineError, StoreAway
from mqks.pipeline.lake import DeltaLake, File, Merge, in_use, table
from mqks.pipeline.objects import OPTIONS, asked, file_system, key

_log = logging.getLogger("mqks.pipeline")


class DeltaStore(DeltaLake):
    """A Delta table at `s3://bucket/path`, open for writing. It has no lock: of two archives that
    commit the same queue, one ends with LakeInUse."""

    def __init__(self, url: str, *, by_event: bool | None = None) -> None:
        self.path = self.staging = self.url = url
        self.by_event = bool(by_event)
        self._by_event = by_event
        self._is_open = False

    def __enter__(self) -> Self:
        with suppress(StoreAway):  # Whoever asks later tries it again.
            self._open()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def _open(self) -> None:
        self._table = table(self.url)
        self._is_open = True
        if self._table is not None:
            self._keep(by_event="event" in self._table.metadata().partition_columns)

    def _transaction(self, application: str) -> int | None:
        if not self._is_open:
            self._open()
        return super()._transaction(application)

    def commit(self, queue: str, epoch: str, number: int, files: Sequence[File]) -> None:
        before = self.next(queue, epoch)
        try:
            asked(self.url, partial(super().commit, queue, epoch, number, files))
        except (LakeInUse, LakeUnfit):
            raise
        except PipelineError:
            self._is_open = False
            now = self.next(queue, epoch)
            if now == before:
                raise
            if now != number:
                raise in_use(self.url, queue, now) from None

    def roll(self, run: Merge, age_s: float) -> int:
        """What a compaction could not do, a later one does."""
        try:
            asked(self.url, partial(super().roll, run, age_s))
        except PipelineError as error:
            _log.warning("small files are not merged: %s", error)
        return 0

    def _create(self, schema: pa.Schema, partitions: list[str]) -> Any:
        from deltalake import DeltaTable

        return DeltaTable.create(
            self.url, schema, mode="ignore", partition_by=partitions, storage_options=OPTIONS
        )

    def _read_schema(self, file: File) -> pa.Schema:
        return pq.read_schema(key(self.url, self._path(file)), filesystem=file_system())

    def _path(self, file: File) -> str:
        return f"date={file.date}/{file.name}.parquet"

    # What a directory needs and a store does not.

    def _check_is_here(self, names: Iterable[str]) -> None:
        pass

    def _place(self, moves: Iterable[Sequence[str]]) -> None:
        pass

    def _sync_log(self, first: int) -> None:
        pass

    def _sync(self, files: Iterable[str]) -> None:
        pass
