"""What the package does, counted: for features that may cost nothing where they are not, and for
work that may not grow. Unlike time, it is the same on any machine."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def counted_calls() -> Iterator[Counter[str]]:
    """How often each function of the package is called in this thread meanwhile."""
    called = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and "/mqks/" in code.co_filename:
            called[code.co_qualname] += 1

    gc.collect()  # What it ends of others is not called here.
    gc.disable()
    sys.setprofile(note)
    try:
        yield called
    finally:
        sys.setprofile(None)
        gc.enable()


def lines_of(work: Callable[[], object]) -> int:
    """How many lines of Python this runs; each turn of a loop is one at least."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> Any:
        nonlocal count
        count += event == "line"
        return note

    before = sys.gettrace()
    sys.settrace(note)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
