"""A stranger holds a read transaction open while messages are published: how far the WAL grows,
what that costs the publisher, and whether the WAL comes back once the reader has gone.

What was published is drained and checked in the end.
"""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from benchmarks.load import part, together
from benchmarks.messages import Wrong
from benchmarks.process import Running, sampled
from benchmarks.work import Figures, Size, Work
from benchmarks.works.paging import REST_S, drain_blocks, publish_blocks


@contextmanager
def reader(database: Path) -> Iterator[None]:
    """Sees the database as it is on entry until the exit; raises `Wrong` if it does not."""
    uri = f"{database.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as connection:
        pages = "select count(*) from pragma_page_count, sqlite_schema"
        connection.execute("begin")
        before = connection.execute(pages).fetchone()
        yield
        if connection.execute(pages).fetchone() != before:
            raise Wrong("the reader's view has changed")


def run(running: Running, size: Size) -> Figures:
    running.declare(manual_ack=True)
    half = size.count // 2
    first, second = (size.messages.part(0, half), size.messages.part(half, size.count - half))
    with sampled(running.wal_bytes) as held, reader(running.database):
        [during] = together(running, part(publish_blocks, first))
        at_end = running.wal_bytes()
    with sampled(running.wal_bytes) as free:
        [after] = together(running, part(publish_blocks, second))
    together(running, part(drain_blocks, size.messages))
    time.sleep(REST_S)
    return {
        "in_held_per_s": first.count / sum(during.times),
        "in_after_per_s": second.count / sum(after.times),
        "held_s": sum(during.times),
        "wal_held_most_bytes": held.seen,
        "wal_held_end_bytes": at_end,
        "wal_after_most_bytes": free.seen,
        "wal_rested_bytes": running.wal_bytes(),
    }


WORK = Work(
    "a reader holds a transaction: the WAL's size",
    run,
    Size(6_000_000),
    Size(1_000),
    mqks_only=True,
)
