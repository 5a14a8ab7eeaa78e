"""A watchdog of the event loop: what blocks it for long is counted, and logged with its stack and
the request that is being handled.

The one rule: the event loop pays nothing. A timer on the loop counts about twenty ticks a second; a
thread watches the count, and reads the loop's stack when the ticks stop for too long.
"""

import asyncio
import gc
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, Final, NamedTuple

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.requests import gathered_publishes, gathered_settles, intake
from mqks.broker.spine.clients.connection import Connection
from mqks.limits import LOOP_HELD_LINES_MAX
from mqks.protocol.requests import ACTIONS

ROOM: Final = str(Path(__file__).parents[1])
INTAKE: Final = {intake.__file__, gathered_publishes.__file__, gathered_settles.__file__}
RUNNERS: Final = ("asyncio", "anyio", "uvloop")
FRAMES_MAX: Final = 3
TICK_S: Final = 0.05
MINUTE_S: Final = 60.0


class Handled(NamedTuple):
    """The request that is being handled, and how many lines are handled with it."""

    connection: str | None = None
    user: str | None = None
    client: str | None = None
    action: str | None = None
    line_bytes: int | None = None
    lines: int | None = None


class Seen(NamedTuple):
    """What the thread saw while the loop was blocked. `on_time`: the thread itself was awake, so
    neither the process nor the machine was suspended."""

    tick: int
    where: str
    handled: Handled
    on_time: bool


class HeldWatch:
    """Counts in the broker: `loop_held`, when the loop's thread used more than `held_s` of CPU
    time; `loop_late`, when it was blocked for so long by the clock, also by a slow disk or a busy
    machine."""

    def __init__(self, broker: Broker, held_s: float) -> None:
        self._broker = broker
        self._held_s = held_s
        self._tick_s = min(TICK_S, held_s / 2)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mqks-held", daemon=True)
        self._ticks = 0
        self._seen = Seen(-1, "", Handled(), on_time=False)
        self._lines = self._suppressed = 0
        """Since the first of this minute."""
        self._minute_s = 0.0
        self._collected_s = self._collecting_s = 0.0
        """CPU time of collections of garbage, and when the current one began."""
        self._next_tick()

    def __enter__(self) -> None:
        if self._held_s:
            self._thread.start()
            self._timer = self._loop.call_later(self._tick_s, self._tick)
            gc.callbacks.append(self._collect)

    def __exit__(self, *failure: object) -> None:
        if self._held_s:
            gc.callbacks.remove(self._collect)
            self._timer.cancel()
            self._ended.set()
            self._thread.join()

    # -- on the loop

    def _next_tick(self) -> None:
        self._ticks += 1
        self._collected_s = 0.0
        self._cpu_s, self._due_s = time.thread_time(), time.monotonic() + self._tick_s

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s > self._held_s:
            self._check(late_s, min(late_s, time.thread_time() - self._cpu_s))
        self._next_tick()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _collect(self, phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == self._loop_thread:
            self._collected_s += (time.thread_time() - self._collecting_s) * (phase == "stop")
            self._collecting_s = time.thread_time()

    def _check(self, late_s: float, cpu_s: float) -> None:
        seen = self._seen
        if seen.tick != self._ticks:
            # The thread looks now and then, or was kept from it by what blocked the loop.
            seen = Seen(self._ticks, "", Handled(), on_time=False)
        is_held = cpu_s > self._held_s
        if is_held or seen.on_time:
            self._broker.loop_held += is_held
            self._broker.loop_late += 1
            self._tell(late_s, cpu_s, seen)

    def _tell(self, late_s: float, cpu_s: float, seen: Seen) -> None:
        now_s = time.monotonic()
        if now_s > self._minute_s + MINUTE_S:
            self._minute_s, self._lines = now_s, 0
        self._lines += 1
        if self._lines > LOOP_HELD_LINES_MAX:
            self._suppressed += 1
            return
        suppressed, self._suppressed = self._suppressed, 0
        log.warning(
            "loop_held",
            ms=round(late_s * 1000),
            cpu_ms=round(cpu_s * 1000),
            gc_ms=round(self._collected_s * 1000),
            where=seen.where or "-",
            **log.who(*seen.handled[:3]),
            action=seen.handled.action,
            line_bytes=seen.handled.line_bytes,
            lines=seen.handled.lines,
            suppressed=suppressed,
        )

    # -- on the thread

    def _watch(self) -> None:
        period_s = self._held_s / 2
        woken_s = time.monotonic()
        while not self._ended.wait(period_s):
            slept_s, woken_s = time.monotonic() - woken_s, time.monotonic()
            tick = self._ticks
            if woken_s - self._due_s > self._held_s and self._seen.tick != tick:
                frame = sys._current_frames().get(self._loop_thread)
                on_time = slept_s < 2 * period_s
                self._seen = Seen(tick, place(frame), handled(frame), on_time)


def place(frame: FrameType | None) -> str:
    """The innermost frames of MQKS, innermost first: file:function:line."""
    places: list[str] = []
    while frame is not None and len(places) < FRAMES_MAX:
        code = frame.f_code
        path = Path(code.co_filename)
        if path.is_relative_to(ROOM):
            places.append(f"{path.relative_to(ROOM)}:{code.co_name}:{frame.f_lineno}")
        elif any(name in path.parts for name in RUNNERS):
            break
        frame = frame.f_back
    return ",".join(places)


def handled(frame: FrameType | None) -> Handled:
    """The request whose handling has led to this frame."""
    connection = line = lines = None
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOM):
            connection = connection or frame.f_locals.get("connection")
        # What other modules call a line may be a message.
        if frame.f_code.co_filename in INTAKE:
            line = line or frame.f_locals.get("line")
            lines = lines or frame.f_locals.get("lines")
        frame = frame.f_back
    found = Handled()
    if isinstance(connection, Connection):
        found = Handled(**log.who(*connection.who))
    if isinstance(line, bytes):
        action = line.partition(b" ")[2].partition(b" ")[0]
        known = log.name(action) if action in ACTIONS else None
        found = found._replace(action=known, line_bytes=len(line))
    return found._replace(lines=len(lines)) if isinstance(lines, list) else found
