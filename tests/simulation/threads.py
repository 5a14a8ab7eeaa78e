"""What blocks in a simulated world: threads, locks, sockets, pauses.

Each thread is a real one, so that what is local to a thread is; but of all threads and the loop one
runs at any time. A thread belongs to the process that has started it.

The one rule: a thread gives its turn away only where it could wait, and the seed decides when, and
when it has one again.
"""

import asyncio
import contextvars
import ctypes
import errno
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import count
from math import inf
from types import ModuleType
from typing import Any, Final, Self
from weakref import WeakValueDictionary

from tests.simulation.loop import PROCESS, Process, SimulatedLoop, put, run_into
from tests.simulation.network import LATENCY_S, Network, SimulatedSocket, Transport

TURN_S = 0.0005
"""A thread that can go on has its turn within so long."""
GIVES_WAY = 1 / 8
"""So often does another thread come first where nothing has to be waited for."""
RECEIVED_BYTES = 64 * 1024
"""More is not received before it is read."""
PIPE_BYTES = 200 * 1024

_loop: SimulatedLoop
_network: Network
_running: "Thread | None" = None
"""None: the loop."""
_back = threading.Lock()
"""Free when the loop has its turn again."""
_back.acquire()
_numbers = count(3)
ENDPOINTS: Final = WeakValueDictionary[int, "Endpoint"]()
"""Those that are used, by their numbers."""


class Thread:
    def __init__(
        self, target: Callable[..., object], args: Iterable[Any] = (), **how: object
    ) -> None:
        self.ident = next(_numbers)
        self._call = partial(target, *args)
        self._turn = threading.Lock()
        self._turn.acquire()
        self._is_started = False
        self._ended = Event()
        self._context = contextvars.Context()

    def start(self) -> None:
        self._context = contextvars.copy_context()
        self._real = threading.Thread(
            target=self._context.copy().run, args=(self._run,), daemon=True
        )
        self.ready()

    def join(self, timeout: float | None = None) -> None:
        self._ended.wait(timeout)

    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def ready(self) -> None:
        """It has its turn soon; called once for each `pause`."""
        _loop.happen(_loop.rng.uniform(0, TURN_S), self._go_on, self._context)

    def pause(self) -> None:
        _back.release()
        self._turn.acquire()

    def _go_on(self) -> None:
        global _running
        _running = self
        if self._is_started:
            self._turn.release()
        else:
            self._is_started = True
            self._real.start()
        _back.acquire()
        _running = None

    def _run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            _loop.fail(error)
        self._ended.set()
        _back.release()


class Wait:
    """What the thread that makes it waits for. The first end decides whether it was in vain."""

    def __init__(self) -> None:
        if _running is None:
            raise AssertionError("the loop would wait for a thread")
        self._thread = _running
        self.result: bool | None = None

    def end(self, result: bool = True) -> None:
        if self.result is None:
            self.result = result
            self._thread.ready()

    def over(self, timeout_s: float = inf) -> bool:
        """Wait for the end; False when the time is over."""
        if timeout_s < inf:
            _loop.happen(max(timeout_s, 0.0), partial(self.end, False))
        self._thread.pause()
        return bool(self.result)


class Waits:
    """Threads that wait for a change. It may come and be gone before one of them has its turn."""

    def __init__(self) -> None:
        self._all: list[Wait] = []

    def until(self, predicate: Callable[[], object], timeout_s: float | None) -> bool:
        ends_s = inf if timeout_s is None else _loop.time() + timeout_s
        while not predicate():
            left_s = ends_s - _loop.time()
            if left_s <= 0:
                return False
            wait = Wait()
            self.add(wait)
            wait.over(left_s)
            self.discard(wait)
        return True

    def add(self, wait: Wait) -> None:
        self._all.append(wait)

    def discard(self, wait: Wait) -> None:
        if wait in self._all:
            self._all.remove(wait)

    def end_one(self) -> None:
        if waiting := [each for each in self._all if each.result is None]:
            _loop.rng.choice(waiting).end()

    def end_all(self) -> None:
        for each in self._all:
            each.end()


def give_way() -> None:
    if _running is not None:
        _loop.steps += 1  # What spins does so here.
        if _loop.rng.random() < GIVES_WAY:
            _running.ready()
            _running.pause()


def sleep(seconds: float) -> None:
    if _running is None:  # The loop stands still.
        _loop.clock.monotonic_s += seconds
    else:
        Wait().over(seconds)


class Lock:
    """Each process has its own."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        self._holders = set[Process | None]()
        self._waits = Waits()

    def __hash__(self) -> int:
        return self._number

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        give_way()
        limit_s = (None if timeout < 0 else timeout) if blocking else 0.0
        is_free = self._waits.until(lambda: not self.locked(), limit_s)
        self._holders.add(PROCESS.get(None))
        return is_free

    def release(self) -> None:
        if not self.locked():
            raise RuntimeError("release unlocked lock")
        self._holders.remove(PROCESS.get(None))
        self._waits.end_one()
        give_way()

    def locked(self) -> bool:
        return PROCESS.get(None) in self._holders

    _at_fork_reinit = int  # Only the world itself forks, and not to go on.

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *failure: object) -> None:
        self.release()


class RLock(Lock):
    def __init__(self) -> None:
        super().__init__()
        self._owner: Thread | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not (self._depth and self._owner is _running):
            if not super().acquire(blocking, timeout):
                return False
            self._owner = _running
        self._depth += 1
        return True

    def release(self) -> None:
        if not (self._depth and self._owner is _running):
            raise RuntimeError("cannot release un-acquired lock")
        self._depth -= 1
        if not self._depth:
            super().release()


class Event:
    def __init__(self) -> None:
        self._is_set = False
        self._waits = Waits()

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._waits.end_all()

    def wait(self, timeout: float | None = None) -> bool:
        give_way()
        return self._waits.until(self.is_set, timeout)


class Endpoint:
    """A socket of a thread."""

    def __init__(self) -> None:
        self._fd = next(_numbers)
        ENDPOINTS[self._fd] = self
        self._timeout_s: float | None = None
        self.waits = Waits()
        self._received = bytearray()
        self._has_end = False
        """Nothing more will be received."""
        self._error: OSError | None = None

    # -- what differs

    def _put(self, data: bytes) -> int:
        """Send some of it; 0 if there is no room."""
        raise NotImplementedError

    def _has_room(self) -> bool:
        raise NotImplementedError

    def _was_read(self) -> None:
        pass

    def _end(self) -> None:
        """Tell the other side that nothing more is sent."""

    # -- for poll

    def fileno(self) -> int:
        return self._fd

    def events(self) -> int:
        if self._fd < 0:
            return select.POLLNVAL
        if self._error is not None:
            return select.POLLIN | select.POLLOUT | select.POLLERR | select.POLLHUP
        can_read = bool(self._received or self._has_end)
        return can_read * select.POLLIN | self._has_room() * select.POLLOUT

    # -- for programs

    def settimeout(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s

    def setblocking(self, blocks: bool) -> None:
        self._timeout_s = None if blocks else 0.0

    def setsockopt(self, *args: Any) -> None:
        pass

    def recv(self, size: int) -> bytes:
        give_way()
        self._await(lambda: self.events() & (select.POLLIN | select.POLLNVAL))
        if not self._received:
            self._raise()
        data = bytes(self._received[:size])
        del self._received[: len(data)]
        self._was_read()
        return data

    def send(self, data: Any) -> int:
        give_way()
        self._await(lambda: self.events() & (select.POLLOUT | select.POLLNVAL))
        self._raise()
        size = _loop.rng.choice((1, 7, len(data), len(data), len(data), len(data)))
        return self._put(bytes(data[:size]))

    def _await(self, predicate: Callable[[], object]) -> None:
        if not self.waits.until(predicate, self._timeout_s):
            raise TimeoutError("timed out") if self._timeout_s else BlockingIOError

    def _raise(self) -> None:
        if self._fd < 0:
            raise OSError(errno.EBADF, "Bad file descriptor")
        if self._error is not None:
            error, self._error = self._error, None
            self._has_end = True
            raise error

    def shutdown(self, how: int) -> None:
        self._end()
        self._has_end = True
        self.waits.end_all()

    def close(self) -> None:
        if self._fd >= 0:
            self._fd = -1
            self._end()
            self.waits.end_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


class PipeEnd(Endpoint):
    """Of a socketpair: what is sent is there at once."""

    other: "PipeEnd"

    def _put(self, data: bytes) -> int:
        if self.other._fd < 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.other._received += data
        self.other.waits.end_all()
        return len(data)

    def _has_room(self) -> bool:
        return len(self.other._received) < PIPE_BYTES

    def _was_read(self) -> None:
        self.other.waits.end_all()

    def _end(self) -> None:
        self.other._has_end = True
        self.other.waits.end_all()


def socketpair() -> tuple[PipeEnd, PipeEnd]:
    one, other = PipeEnd(), PipeEnd()
    one.other, other.other = other, one
    return one, other


class Connection(Endpoint, asyncio.Protocol):
    def __init__(self, sock: SimulatedSocket) -> None:
        super().__init__()
        self._is_full = False
        self._transport = _network.connected(Transport(_loop, sock, self))

    def data_received(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > RECEIVED_BYTES:
            self._transport.pause_reading()
        self.waits.end_all()

    def eof_received(self) -> bool:
        self._has_end = True
        self.waits.end_all()
        return True  # What is to be sent is another matter.

    def connection_lost(self, error: Exception | None) -> None:
        self._has_end = True
        if isinstance(error, OSError):
            self._error = error
            self._received.clear()
        self.waits.end_all()

    def pause_writing(self) -> None:
        self._is_full = True

    def resume_writing(self) -> None:
        self._is_full = False
        self.waits.end_all()

    def _put(self, data: bytes) -> int:
        if self._transport.is_closing():
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self._transport.write(data)
        return len(data)

    def _has_room(self) -> bool:
        return not self._is_full

    def _was_read(self) -> None:
        if len(self._received) <= RECEIVED_BYTES and not self._transport.is_closing():
            self._transport.resume_reading()

    def _end(self) -> None:
        self._transport.close()


def create_connection(address: tuple[str, int], timeout: float | None = None) -> Connection:
    sleep(_loop.rng.uniform(0, LATENCY_S))
    connection = Connection(_network.dial(address))
    connection.settimeout(timeout)
    return connection


class Poll:
    def __init__(self) -> None:
        self._wanted: dict[int, tuple[Any, int]] = {}

    def register(self, endpoint: Any, events: int = select.POLLIN | select.POLLOUT) -> None:
        self._wanted[endpoint.fileno()] = endpoint, events

    def unregister(self, endpoint: Any) -> None:
        del self._wanted[endpoint.fileno()]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        """`timeout`: in milliseconds."""
        give_way()
        ends_s = inf if timeout is None else _loop.time() + timeout / 1000
        while not (found := self._found()) and (left_s := ends_s - _loop.time()) > 0:
            wait = Wait()
            polled = [endpoint for endpoint, _ in self._wanted.values()]
            for endpoint in polled:
                endpoint.waits.add(wait)
            wait.over(left_s)
            for endpoint in polled:
                endpoint.waits.discard(wait)
        return found

    def _found(self) -> list[tuple[int, int]]:
        always = select.POLLERR | select.POLLHUP | select.POLLNVAL
        all_of_them = self._wanted.items()
        found = [(fd, each.events() & (wanted | always)) for fd, (each, wanted) in all_of_them]
        return [(fd, events) for fd, events in found if events]


async def in_thread(
    call: Callable[..., Any], *args: Any, limiter: Any = None, abandon_on_cancel: bool = False
) -> Any:
    """Await what it gives in a thread of its own: `anyio.to_thread.run_sync`."""
    from anyio import CancelScope

    with CancelScope(shield=not abandon_on_cancel):
        async with limiter or nullcontext():
            future = _loop.create_future()
            Thread(target=run_into, args=(future, partial(call, *args))).start()
            return await future


def in_loop(call: Callable[..., Any], *args: Any) -> Any:
    """Call it in the loop, and wait for what it gives: `anyio.from_thread.run_sync`."""
    future, wait = _loop.create_future(), Wait()

    def called() -> None:
        run_into(future, partial(call, *args))
        wait.end()

    _loop.call_soon(called)
    wait.over()
    return future.result()


def finish(work: Coroutine[Any, Any, Any]) -> Any:
    """Run it in the loop, and wait for what it gives: `asyncio.run`."""
    task, wait = _loop.create_task(work), Wait()
    task.add_done_callback(lambda _: wait.end())
    wait.over()
    return task.result()


def instead_of(module: ModuleType, **names: object) -> ModuleType:
    made = ModuleType(module.__name__)
    vars(made).update(vars(module) | names)
    return made


def install(loop: SimulatedLoop, network: Network) -> None:
    global _loop, _network
    _loop, _network = loop, network
    if sys.platform == "linux":  # One core: to wake a thread on another one takes longer.
        os.sched_setaffinity(0, {ctypes.CDLL(None).sched_getcpu()})
    from anyio import from_thread, to_thread

    from mqks.client import app, blocking_connection

    sockets = instead_of(socket, socketpair=socketpair, create_connection=create_connection)
    put(
        {
            blocking_connection: {
                "threading": instead_of(threading, Thread=Thread, Lock=Lock, Event=Event),
                "select": instead_of(select, poll=Poll),
                "socket": sockets,
                "Lock": RLock,
                "_beginning": Lock(),
            },
            time: {"sleep": sleep},
            app: {
                "to_thread": instead_of(to_thread, run_sync=in_thread),
                "from_thread": instead_of(from_thread, run_sync=in_loop),
            },
        }
    )
    # Sets of them are iterated, and the order is to be that of each run.
    once: Any = blocking_connection.OneTimeEvent
    once.__hash__ = lambda event: hash(event._lock)
    connection: Any = blocking_connection.SessionConnection
    connection.__hash__ = lambda connection: hash(connection.lock)
