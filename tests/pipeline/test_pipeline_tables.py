"""A lake with a table for each event: names, limits, deaths between the commits of two tables.

The one rule: what is in the tables is read as any program would read each of them.
"""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.utils.config import Config

from mqks.pipeline.errors import LakeInUse, LakeUnfit
from mqks.pipeline.lake import File, FileLake, Lake, stage, table_at
from mqks.pipeline.objects import Place
from mqks.pipeline.places import existing, tables_of
from mqks.pipeline.sums import batches_of
from mqks.pipeline.table import LakeTable
from mqks.pipeline.tables import Tables
from mqks.pipeline.verify import Verification
from tests.pipeline.test_pipeline_lake import ODD, batch

FORMATS = ["parquet", "delta", "iceberg"]
CYCLE = ["order.new", "page.view", "order.new", "rare", "page.view", "order.new", "late"]


@pytest.fixture(params=FORMATS)
def opened(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Tables]:
    for name, value in catalog(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # Else as at the import.
    place: Place = tmp_path / "lake"
    if request.param == "iceberg":
        place = "iceberg://tables/lake.events"
    return lambda **options: Tables(place, request.param, **options)


def catalog(path: Path) -> dict[str, str]:
    told = {
        "TYPE": "sql",
        "URI": f"sqlite:///{path}/catalog.db",
        "WAREHOUSE": f"file://{path}/warehouse",
    }
    return {f"PYICEBERG_CATALOG__TABLES__{name}": value for name, value in told.items()}


def rows(numbers: range, events: Sequence[str]) -> list[pa.RecordBatch]:
    return [batch(range(n, n + 1), events[n % len(events)]) for n in numbers]


def put(lake: Lake, end: int, events: Sequence[str] = CYCLE, most: int = 1000) -> None:
    """What an archive does until `end` numbers of a queue are archived."""
    while (start := lake.next("q", "x-1") or 0) < end:
        until = min(end, start + most)
        files = staged(lake, rows(range(start, until), events))
        if lake.adopts("q", "x-1", start, files):
            files += staged(lake, rows(range(start, until), events))
        lake.commit("q", "x-1", until, files)


def staged(lake: Lake, batches: Sequence[pa.RecordBatch]) -> list[File]:
    lake.prepared(None)
    return [*stage(lake.staging, batches)]


def archived(place: Place) -> dict[str, list[int]]:
    """The numbers in each table, which are as they were archived."""
    found = {}
    for table in tables_of(place):
        with existing(table) as lake:
            verified = Verification(lake).run()
            assert verified.differences == []
            read = [each for file in lake.contents() for each in batches_of(file, _READ)]
        events = {event for each in read for event in each["topic"].to_pylist()}
        assert len(events) == 1
        found[events.pop()] = sorted(n for each in read for n in each["offset"].to_pylist())
    return found


_READ = ["topic", "offset"]


def expected(count: int, events: Sequence[str] = CYCLE) -> dict[str, list[int]]:
    told: dict[str, list[int]] = {}
    for n in range(count):
        told.setdefault(events[n % len(events)], []).append(n)
    return told


def test_each_event_has_a_table(opened: Callable[..., Tables]) -> None:
    with opened() as lake:
        assert lake.next("q", "x-1") is None
        put(lake, 5)
        put(lake, 20, most=4)
    with opened() as lake:
        assert lake.next("q", "x-1") == 20
        put(lake, 30)
        lake.roll(0)
    assert archived(lake.place) == expected(30)


class DiesError(Exception):
    """As a kill would end it."""


@pytest.mark.parametrize("is_done", [False, True])
def test_a_death_at_any_commit_doubles_and_loses_nothing(
    opened: Callable[..., Tables], is_done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or after each of the commits in turn, and the next batches have other sizes."""
    with opened():
        pass
    commits, deaths = 0, 0
    for kind in (FileLake, LakeTable):

        def commit(self: Any, *told: Any, kept: Any = kind.commit) -> None:
            nonlocal commits, deaths
            commits += 1
            dies = commits == deaths + 1
            if dies:
                commits, deaths = 0, deaths + 1
            if not dies or is_done:
                kept(self, *told)
            if dies:
                raise DiesError

        monkeypatch.setattr(kind, "commit", commit)
    sizes = [7, 3, 11, 5, 2]
    for size in sizes * 20:
        try:
            with opened() as lake:
                put(lake, 60, [*CYCLE, "rare.2", "rare"], most=size)
                break
        except DiesError:
            commits = 0
    assert deaths > 8
    assert archived(lake.place) == expected(60, [*CYCLE, "rare.2", "rare"])
