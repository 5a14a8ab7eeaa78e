"""An event loop whose time, threads and network are made from a seed.

The one rule: nothing happens by itself. What comes from outside, bytes, connections, ends of what
runs in a thread, is an event with a time; where the loop would wait, the clock jumps to the next
one. Events of one time come in an order that the seed decides; callbacks keep their order, as
every loop promises that.
"""

import asyncio
import contextvars
import gc
import heapq
import random
from asyncio.base_events import BaseEventLoop
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from itertools import count
from math import ulp
from types import ModuleType, SimpleNamespace
from typing import Any, Final, cast

THREAD_S = 0.002
"""A step in a thread takes up to so long."""
TURNS_MAX = 200_000
"""Turns in one second of which no more than this many are work."""
COLLECTED_TURNS = 50_000
"""Garbage is collected after so many, and at no other time but when a server starts: what is
collected may have a last word, and leaves its addresses, by which sets are in order."""


GRAVES: Final[list[object]] = []
"""Tasks of processes, which may be killed: what is collected would run their last lines."""


Call = Callable[..., object]
Work = Coroutine[Any, Any, None]
Context = contextvars.Context | None


def the_loop() -> "SimulatedLoop":
    return cast(SimulatedLoop, asyncio.get_running_loop())


class Process:
    """What is killed or stopped at once: whatever it began does not go on."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.dead = False
        self.leaves = False
        """It may close its connections."""
        self._stopped_s = self._stopped_at_s = self._went_on_at_s = 0.0
        self.last_stop_s = 0.0
        """For how long it was stopped last."""
        self._waiting: list[tuple[contextvars.Context, Callable[[], object]]] | None = None
        """What is to be done when it goes on, while it is stopped."""
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def stopped_s(self, now_s: float) -> float:
        """For how long it was stopped, all in all."""
        running_s = 0.0 if self._waiting is None else now_s - self._stopped_at_s
        return self._stopped_s + running_s

    def runs_for_s(self, now_s: float) -> float:
        """Since it was stopped last; 0 while it is."""
        return now_s - self._went_on_at_s if self._waiting is None else 0.0

    def spawn(self, work: Work) -> asyncio.Task[None]:
        task = the_loop().create_task(work, context=self.context)
        GRAVES.append(task)
        return task

    def play(self, work: Work) -> None:
        """A failure of it ends the run."""
        self.spawn(work).add_done_callback(end_run, context=NOBODY)

    def run(self, callback: Call, *args: Any) -> None:
        if self._waiting is not None:
            self._waiting.append((contextvars.copy_context(), partial(callback, *args)))
        elif not self.dead:
            callback(*args)

    def stop(self) -> None:
        """SIGSTOP."""
        if self._waiting is None:
            self._waiting = []
            self._stopped_at_s = the_loop().time()

    def go_on(self) -> None:
        """SIGCONT."""
        loop = the_loop()
        if self._waiting is not None:
            self._went_on_at_s = loop.time()
            self.last_stop_s = self._went_on_at_s - self._stopped_at_s
            self._stopped_s += self.last_stop_s
        waiting, self._waiting = self._waiting or [], None
        for context, callback in waiting:
            loop.call_soon(callback, context=context)

    async def stop_for(self, time_s: float) -> None:
        self.stop()
        await asyncio.sleep(time_s)
        self.go_on()


PROCESS: contextvars.ContextVar[Process] = contextvars.ContextVar("process")
NOBODY: Final = contextvars.Context()
"""Of what goes on whoever ends: bytes on their way."""


def own(context: Context) -> contextvars.Context:
    """Of what is asked for now. An empty one is false, and is one all the same."""
    return contextvars.copy_context() if context is None else context


def of_process(context: contextvars.Context, callback: Call) -> Call:
    process = context.get(PROCESS)
    return callback if process is None else partial(process.run, callback)


def run_into(future: asyncio.Future[Any] | None, call: Callable[[], Any]) -> None:
    """Call it, as a thread does, and tell the future what became of it, if there is one."""
    outcome_of(call)(future)


def end_run(task: asyncio.Future[Any]) -> None:
    """If it has failed: whoever goes on would only hide how it began."""
    if not task.cancelled() and (failure := task.exception()) is not None:
        cast(SimulatedLoop, task.get_loop()).fail(failure)


def instant(time_s: float) -> float:
    """The shortest time there is then: a nanosecond; from some months on a float has none."""
    return max(1e-9, ulp(time_s))


def after(time_s: float) -> float:
    return time_s + instant(time_s)


def outcome_of(call: Callable[[], Any]) -> Callable[[asyncio.Future[Any] | None], None]:
    """Call it; what is returned tells a future what became of it."""
    failure: BaseException | None = None
    result: Any = None
    try:
        result = call()
    except BaseException as error:
        failure = error

    def tell(future: asyncio.Future[Any] | None) -> None:
        if future is None or future.done():
            return
        if failure is None:
            future.set_result(result)
        else:
            future.set_exception(failure)

    return tell


def put(replaced: Mapping[ModuleType, Mapping[str, object]]) -> None:
    for module, names in replaced.items():
        vars(module).update(names)


class Violation(AssertionError):
    """A promise was broken."""


class Stuck(AssertionError):
    """Nothing will ever happen again, or the same without end."""


class Clock:
    """Monotonic and wall clock of a world, in seconds."""

    def __init__(self, wall_s: float) -> None:
        self.monotonic_s = 1000.0
        self.step_s = 0.0
        """Passes whenever somebody looks, as if work took time: else no turn ends early."""
        self.ahead_s = self.right_s = wall_s - self.monotonic_s
        """The wall clock is ahead of the monotonic one."""
        self.sets = 0
        """How often it was set."""

    def monotonic(self) -> float:
        self.monotonic_s += self.step_s
        return self.monotonic_s

    def set(self, wrong_s: float) -> None:
        """Set the wall clock, to be wrong by so much."""
        self.ahead_s = self.right_s + wrong_s
        self.sets += 1

    def wall(self) -> float:
        return self.monotonic_s + self.ahead_s


class SimulatedLoop(BaseEventLoop):
    def __init__(self, clock: Clock, seed: int) -> None:
        super().__init__()
        self.clock = clock
        self.rng = random.Random(seed)
        self.steps = 0
        """Turns of the loop."""
        self.failure: BaseException | None = None
        """What ends the run."""
        self.spent_s: float | None = None
        """What the present step of a thread takes."""
        self._second_s, self._second_turns = 0.0, 0
        self._selector = SimpleNamespace(select=self.pass_time, close=lambda: None)
        self._events: list[tuple[float, float, int, Callable[[], object], contextvars.Context]] = []
        self._number = count()
        self.readers: dict[object, Callable[[], object]] = {}

    # -- time

    def time(self) -> float:
        return self.clock.monotonic_s

    def pass_time(self, timeout_s: float | None) -> Sequence[object]:
        """Wait for so long, or until the next event; without an end, None. It is the `select` of a
        selector."""
        if self.failure is not None:
            raise self.failure
        self.steps += 1
        if not self.steps % COLLECTED_TURNS:
            gc.collect()
        events, clock = self._events, self.clock
        end_s = clock.monotonic_s
        if timeout_s != 0:
            if timeout_s is not None:
                end_s += timeout_s
            if events and (timeout_s is None or events[0][0] <= end_s):
                end_s = max(events[0][0], clock.monotonic_s)
            elif timeout_s is None:
                raise Stuck("nothing is left to happen")
            clock.monotonic_s = end_s
            self._clock_resolution = instant(end_s)  # A timer is due when so much is missing.
        if end_s >= self._second_s + 1:
            self._second_s, self._second_turns = end_s, self.steps
        elif self.steps - self._second_turns > TURNS_MAX:
            raise Stuck(f"more than {TURNS_MAX} turns in a second: something spins")
        while events and events[0][0] <= end_s:
            *_, what, context = heapq.heappop(events)
            self.call_soon(what, context=context)
        return ()

    def fail(self, failure: BaseException) -> None:
        self.failure = self.failure or failure

    def spend(self, time_s: float) -> None:
        """What runs now takes so long: a thread, or else the loop, and with it everybody."""
        if self.spent_s is None:
            self.clock.monotonic_s += time_s
        else:
            self.spent_s += time_s

    def happen(self, after_s: float, what: Call, context: Context = None) -> None:
        """An event from outside, for the process that asked for it, or the one of the context."""
        due_s = self.clock.monotonic_s + after_s
        event = due_s, self.rng.random(), next(self._number), what
        heapq.heappush(self._events, (*event, own(context)))

    # -- processes

    def call_soon(  # type: ignore[override]
        self, callback: Call, *args: Any, context: Context = None
    ) -> asyncio.Handle:
        context = own(context)
        # As the base class does, which also asks whether it is closed, or debugged.
        handle = asyncio.Handle(of_process(context, callback), args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Call, *args: Any, context: Context = None
    ) -> asyncio.TimerHandle:
        context = own(context)
        return super().call_at(when, of_process(context, callback), *args, context=context)

    # -- threads

    def step(self, future: asyncio.Future[Any] | None, call: Callable[[], Any]) -> None:
        """One of a thread, which may say that it takes time: `spend`."""
        self.spent_s = 0.0
        tell = outcome_of(call)
        took_s, self.spent_s = self.spent_s, None
        self.happen(took_s, partial(tell, future)) if took_s else tell(future)

    def run_in_executor(  # type: ignore[override]
        self, executor: object, call: Callable[..., Any], *args: Any
    ) -> Any:
        """Runs in one step at a moment that the seed decides."""
        future = self.create_future()
        self.happen(self.rng.uniform(0, THREAD_S), partial(self.step, future, partial(call, *args)))
        return future

    # -- what a loop with a selector has

    def _process_events(self, events: Sequence[object]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass

    def add_reader(  # type: ignore[override]
        self, fd: Any, callback: Call, *args: Any
    ) -> None:
        self.readers[fd] = partial(callback, *args)
        fd.on_reader(self)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None


def in_world(main: Callable[[], Work], clock: Clock, seed: int) -> SimulatedLoop:
    """Run it; the loop is left as it is, with tasks that will never go on."""
    gc.disable()
    gc.freeze()
    loop = SimulatedLoop(clock, seed)
    asyncio.set_event_loop(loop)
    loop.run_until_complete(main())
    return loop
