"""Which arcs of the broker and the protocol an input takes: pairs of lines, one after the other.

Python 3.12 has `sys.monitoring` for it, 3.11 traces. The one rule: code that is not watched runs at
full speed, or nearly.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mqks

Arc = tuple[str, int, int]
"""A function in its file, and the lines it goes from and to."""
_ROOT = Path(mqks.__file__).parent
WATCHED = tuple(str(_ROOT / room) + "/" for room in ("broker", "protocol"))
WATCHED_CLIENT = tuple(str(_ROOT / "client" / name) for name in ("session.py", "messages.py"))


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).name}:{code.co_name}:{code.co_firstlineno}"


@contextmanager
def traced(found: set[Arc], watched: tuple[str, ...] = WATCHED) -> Iterator[None]:
    """Put the arcs that are taken meanwhile into `found`."""
    start = _monitor if sys.version_info >= (3, 12) else _trace
    stop = start(found, watched)
    try:
        yield
    finally:
        stop()


def _trace(found: set[Arc], watched: tuple[str, ...]) -> Callable[[], None]:
    names: dict[CodeType, str | None] = {}

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in names:
            names[code] = _name(code) if code.co_filename.startswith(watched) else None
        name = names[code]
        if name is None:
            frame.f_trace_lines = False
            return None
        previous = 0

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal previous
            if event == "line":
                found.add((name, previous, frame.f_lineno))
                previous = frame.f_lineno
            return line

        return line

    sys.settrace(enter)
    return lambda: sys.settrace(None)


def _monitor(found: set[Arc], watched: tuple[str, ...]) -> Callable[[], None]:
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    events, tool = monitoring.events, 4
    monitoring.use_tool_id(tool, "fuzz")
    names: dict[CodeType, str | None] = {}

    def name_of(code: CodeType) -> str | None:
        if code not in names:
            names[code] = _name(code) if code.co_filename.startswith(watched) else None
        return names[code]

    def line(code: CodeType, number: int) -> Any:
        if (name := name_of(code)) is not None:
            found.add((name, 0, number))
        return monitoring.DISABLE

    def branch(code: CodeType, source: int, destination: int) -> Any:
        if (name := name_of(code)) is None:
            return monitoring.DISABLE
        found.add((name, -source, destination))
        return None

    monitoring.register_callback(tool, events.LINE, line)
    monitoring.register_callback(tool, events.BRANCH, branch)
    monitoring.restart_events()
    monitoring.set_events(tool, events.LINE | events.BRANCH)

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)

    return stop
