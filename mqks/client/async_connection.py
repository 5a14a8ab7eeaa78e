"""Connections of the async client, on asyncio: one for requests, and one of its own per consumer.

Each is a protocol of the event loop (`_Wire`), TLS or not: what arrives is handled in the turn in
which it arrives, and what has gathered in a turn is written at its end; a request that is alone in
flight is written at once. No message has a task, a timer or a queue hop of its own.

The one rule: whatever is waited for shows in the session, and `notify` tells when to look again.
"""

import asyncio
import logging
import math
import os
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar, cast

import anyio
from anyio.lowlevel import cancel_shielded_checkpoint, checkpoint

from mqks.client import failures, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Settle
from mqks.client.opened import Opened
from mqks.client.options import Options
from mqks.client.session import CATCH_UP_S, LATE_S, Session

_log = logging.getLogger("mqks.client")

TURN_BYTES = 64 * 1024
"""After so many bytes at once the tasks have a turn: uvloop would read on for up to 32 times."""
TRY_NEXT_S = 0.25
"""After this time without a connection, the next address of a host is tried as well."""
CLOSED = "the server closed the connection"
INTERRUPTED = "a task was interrupted while it wrote"
TIMER_S_MAX = 1e6
"""A longer wait has no end."""

S = TypeVar("S", bound=Session)


Lock = nullcontext[None]
"""Of a session: tasks of one event loop need none."""


def guard(lock: Lock, settle: Settle) -> Settle:
    """`settle`, called with the lock held."""
    return settle


class OneTimeEvent:
    """Something that happens once. One task waits for it."""

    __slots__ = ("_is_set", "_wake")

    def __init__(self) -> None:
        self._is_set = False
        self._wake: Callable[[], object] | None = None

    def set(self) -> None:
        self._is_set = True
        if self._wake is not None:
            self._wake()

    async def wait(self, timeout_s: float, *, shield: bool = False) -> bool:
        """Wait until it has happened; False when the time is over. With `shield` a cancellation
        does not end the wait. After a pause of the process what came meanwhile is read first."""
        if shield:
            with anyio.CancelScope(shield=True):
                return await self.wait(timeout_s)
        # Not in a cancel scope, which costs more than the rest of a call.
        loop = asyncio.get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self._wake = wake
        if self._is_set:
            wake()

        timer: asyncio.TimerHandle | None = None
        late_from_s = loop.time() + timeout_s + LATE_S

        def end() -> None:
            nonlocal timer
            if loop.time() > late_from_s:
                timer = loop.call_later(CATCH_UP_S, wake)
            else:
                wake()

        if timeout_s < TIMER_S_MAX:
            timer = loop.call_later(max(timeout_s, 0.0), end)
        try:
            await future
        finally:
            if timer is not None:
                timer.cancel()
        return self._is_set


def begin(client: object) -> None:
    """A client is used that is not connected."""
    raise RuntimeError("the client is not connected: write `async with mqks.connect() as client:`")


class Connections(Opened):
    """The connections of one client, in a task group."""

    async def open(self) -> None:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()

    def start(self, connection: "SessionConnection[Any]") -> None:
        self.started(connection)
        self._tasks.start_soon(connection.run)

    async def close(self) -> None:
        self.closed()
        # Not the task group but the caller tells of errors: a group would wrap them.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


class SessionConnection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S, lock: Lock) -> None:
        self.session = session
        self.lock = lock
        self._servers = urls.Servers(address)
        self._options = options
        self._wire: _Wire | None = None
        self._is_flushing = False
        """Whether the end of this turn writes."""
        self._waiting: set[OneTimeEvent] = set()
        self._room_turn = anyio.Lock()
        self._scope = anyio.CancelScope()
        session.on_output = self._output

    def _output(self, is_prompt: bool) -> None:
        if self._wire is None:
            return
        if is_prompt:
            self._flush()
        elif not self._is_flushing:
            self._is_flushing = True
            self._wire.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flushing = False
        wire = self._wire
        if wire is None or not wire.may_write or wire.end:
            return
        # An exception of a signal handler may come between any two steps: then the connection ends.
        wire.end = INTERRUPTED
        try:
            if data := self.session.take():
                wire.transport.write(data)
                self.notify()  # There is room again.
            wire.end = ""
        finally:
            if wire.end:
                wire.ended.set()

    async def until(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until it is so; False when the time is over."""
        now_s = time.monotonic()
        deadline_s = math.inf if timeout_s is None else now_s + timeout_s
        while not predicate():
            if now_s >= deadline_s:
                return False
            event = OneTimeEvent()
            self._waiting.add(event)
            try:
                await event.wait(deadline_s - now_s)
            finally:
                self._waiting.discard(event)
            now_s = time.monotonic()
        return True

    arrival = until

    async def room(self, deadline_s: float) -> bool:
        """Wait until the session has room; False when the time is over."""
        session = self.session
        if session.has_room:
            return True
        with anyio.move_on_after(deadline_s - time.monotonic()):
            async with self._room_turn:  # Not all who wait look at each change.
                return await self.until(lambda: session.has_room)
        return False

    async def turn(self) -> None:
        """Let the other tasks have one."""
        await checkpoint()

    def notify(self) -> None:
        """Something in the session has changed."""
        self.resume()
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            for event in waiting:
                event.set()

    def resume(self) -> None:
        """Read on if that was held back."""
        if self._wire is not None and self._wire.is_held and not self.session.is_full:
            self._wire.is_held = False
            self._wire.transport.resume_reading()

    def leave_to_parent(self, failure: ConnectionLost) -> None:
        """In the child of a fork: close what it has of the connection, and nothing else. The event
        loop and its transports share with the parent what they wait for."""
        self.session.disown(failure)
        sock: Any = self._wire and self._wire.transport.get_extra_info("socket")
        if sock is not None and (number := sock.fileno()) >= 0:
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, number, inheritable=False)
            os.close(nothing)

    def close(self, reason: str) -> None:
        self.session.fail(ConnectionLost(reason))
        self.notify()
        self._scope.cancel()

    async def run(self) -> None:
        session = self.session
        try:
            with self._scope:
                while session.failure is None:
                    delay_s = session.lost(await self._live())
                    self.notify()
                    await anyio.sleep(delay_s)
        finally:  # Whoever waits for a consumer of a closed client hears of it.
            if session.failure is None and session.has_unpublished:
                _log.error("the event loop ended before all published messages were sent")
            self.close("the client is closed")

    async def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        failures: list[tuple[urls.Address, str]] = []
        for address in self._servers.round():
            try:
                # None of them takes the time of the others.
                with anyio.fail_after(self._options.connect_timeout_s / self._servers.count):
                    wire = await _connected(address, self._options, self)
            except OSError as error:
                failures.append((address, _told(error)))
            else:
                self.session.is_tls, self.session.server = address.tls, str(address)
                return await self._serve(wire)
        return urls.told(failures)

    async def _serve(self, wire: "_Wire") -> str:
        session, self._wire = self.session, wire
        try:
            session.connected(time.monotonic())
            while session.tick(time.monotonic()):
                with anyio.move_on_after(max(session.deadline_s - time.monotonic(), 0.001)):
                    await wire.ended.wait()
                    return wire.end
            return session.silence
        except anyio.get_cancelled_exc_class():
            self._flush()  # The event loop may end, and nobody have closed the client.
            raise
        finally:
            self._wire = None
            wire.transport.abort()
            await cancel_shielded_checkpoint()  # The loop closes the socket in its next turn.


class _Wire(asyncio.Protocol):
    """A connection while it lasts."""

    transport: asyncio.Transport

    def __init__(self, connection: SessionConnection[Any], loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.ended = anyio.Event()
        self.end = ""
        """Why it has ended; during a write, what its interruption would be."""
        self.may_write = True
        self.is_held = False
        """Whether reading is held back, since enough waits to be handled."""
        self._connection = connection

    def _ends(self, why: str) -> None:
        self.end = self.end or why
        self.ended.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # What is not taken gathers in the session. With TLS, 0 would stop writing for good.
        self.transport.set_write_buffer_limits(1, 0)

    def data_received(self, data: bytes) -> None:
        connection = self._connection
        session = connection.session
        if session.failure is not None:
            return
        try:
            session.receive(data, time.monotonic())
        except ProtocolViolation as error:
            session.fail(error)
            self._ends(str(error))
        connection.notify()
        if session.is_full and not self.is_held:
            self.is_held = True
            self.transport.pause_reading()
        elif len(data) >= TURN_BYTES and not self.is_held:
            self.transport.pause_reading()
            self.loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        if not self.is_held and not self.transport.is_closing():
            self.transport.resume_reading()

    def eof_received(self) -> None:
        self._ends(CLOSED)

    def connection_lost(self, error: Exception | None) -> None:
        self._ends(_told(error) if error else CLOSED)

    def pause_writing(self) -> None:
        self.may_write = False

    def resume_writing(self) -> None:
        self.may_write = True
        self._connection._flush()


async def _connected(
    address: urls.Address, options: Options, connection: SessionConnection[Any]
) -> _Wire:
    loop = asyncio.get_running_loop()
    wire = _Wire(connection, loop)
    if address.opener is not None:
        await loop.create_unix_connection(lambda: wire, sock=await address.opener())
        return wire
    if address.path:
        await loop.create_unix_connection(lambda: wire, address.path)
        return wire
    sock = await _dialled(address, loop)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if address.tls:
            context = options.ssl_context or ssl.create_default_context()
            name = address.host
            await loop.create_connection(lambda: wire, sock=sock, ssl=context, server_hostname=name)
        else:
            await loop.create_connection(lambda: wire, sock=sock)
    except BaseException as error:
        sock.close()
        if address.tls and isinstance(error, OSError):
            raise ConnectionLost(failures.of_handshake(error, address)) from None
        raise
    return wire


async def _dialled(address: urls.Address, loop: asyncio.AbstractEventLoop) -> socket.socket:
    """A connection to the first address of the host that accepts one (RFC 8305)."""
    infos = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    accepted: list[socket.socket] = []
    errors: list[OSError] = []

    async def dial(family: int, to: Any, failed: anyio.Event) -> None:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            errors.append(error)
            failed.set()
            return
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, to)
            if not accepted:
                accepted.append(sock)
                tasks.cancel_scope.cancel()
        except OSError as error:
            errors.append(error)
            failed.set()
        finally:
            if sock not in accepted:
                sock.close()

    try:
        async with anyio.create_task_group() as tasks:
            for family, _, _, _, to in infos:
                failed = anyio.Event()
                tasks.start_soon(dial, family, to, failed)
                with anyio.move_on_after(TRY_NEXT_S):
                    await failed.wait()
    except BaseException:
        for sock in accepted:
            sock.close()
        raise
    if not accepted:
        raise errors[0]
    return accepted[0]


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__
