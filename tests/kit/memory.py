"""What Python allocates, and has not freed."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Allocated:
    """In a block, known at its end."""

    bytes: int = 0
    peak_bytes: int = 0


@contextmanager
def allocated() -> Iterator[Allocated]:
    tracemalloc.start()
    try:
        found = Allocated()
        yield found
        found.bytes, found.peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
