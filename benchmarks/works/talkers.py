"""Many connections, each with few confirmed publishes in flight, and few connections with big
messages. What was confirmed is fetched and checked after the clock has stopped.

Of large messages it is told beside what the disk takes if one program appends to a file and syncs.
"""

import os
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.load import busiest, clocked, consume, part, percentiles_us, rate, together
from benchmarks.process import Running
from benchmarks.talk import missing, talk
from benchmarks.work import Figures, Size, Work

SYNCED_BYTES = 500_000
"""Bytes between two syncs."""
LARGE_BYTES = 10_000
APPENDED_BYTES = 128_000_000


def run(window: int, running: Running, size: Size) -> Figures:
    if reason := missing():
        raise RuntimeError(reason)
    running.declare()
    before = running.written_bytes()
    reports = together(running, part(talk, size.shared, window=window))
    written = running.written_bytes() - before
    together(running, part(consume, size.shared))
    per_s = rate(size.shared.total, reports)
    of_disk: Figures = {}
    if size.payload_bytes >= LARGE_BYTES:
        published = size.shared.total * size.payload_bytes
        of_disk = {
            "disk_megabytes_per_s": synced(running.directory, min(APPENDED_BYTES, published)),
            "disk_bytes_per_published_byte": written / published,
        }
    return {
        "confirms_per_s": per_s,
        "megabytes_per_s": per_s * size.payload_bytes / 1e6,
        **of_disk,
        **percentiles_us(reports[0].times),
        "load_cores": busiest(reports),
    }


def synced(directory: Path, size: int) -> float:
    """MB/s of a plain program that appends so many bytes."""
    block, blocks = os.urandom(SYNCED_BYTES), -(-size // SYNCED_BYTES)
    with tempfile.NamedTemporaryFile(dir=directory, buffering=0) as file, clocked() as report:
        for _ in range(blocks):
            file.write(block)
            os.fdatasync(file.fileno())
    return blocks * SYNCED_BYTES / report.took / 1e6


def _work(title: str, connections: int, window: int, payload_bytes: int, count: int) -> Work:
    full = Size(count, payload_bytes, connections)
    tiny = Size(4 * min(connections, 10), payload_bytes, min(connections, 10))
    return Work(title, partial(run, window), full, tiny)


WORKS = {
    "talkers_100": _work("100 connections, one confirm in flight each", 100, 1, 100, 100_000),
    "talkers_1000": _work("1,000 connections, one confirm in flight each", 1_000, 1, 100, 100_000),
    "talkers_10k": _work("50 connections, one in flight each, 10 KB", 50, 1, 10_000, 20_000),
    "big_10k": _work("1 connection, 50 in flight, 10 KB", 1, 50, 10_000, 20_000),
    "big_100k": _work("1 connection, 16 in flight, 100 KB", 1, 16, 100_000, 3_000),
    "big_900k": _work("1 connection, 4 in flight, 900 KB", 1, 4, 900_000, 300),
}
