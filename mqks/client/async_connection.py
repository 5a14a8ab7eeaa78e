"""Connections of the async client, on anyio: one for requests, and one of its own per consumer.

Three tasks serve a connection: one reads, one writes what has gathered since its last write, one
looks at the time. No message has a task, a timer or a queue hop of its own.

The one rule: whatever is waited for shows in the session, and `_changed` tells when to look again.
"""

import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any, Generic, TypeVar

import anyio
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint
from anyio.streams.tls import TLSStream

from mqks.client import failures, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Settle
from mqks.client.options import Options
from mqks.client.session import Session

CHUNK_BYTES = 256 * 1024

_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)

S = TypeVar("S", bound=Session)


class Lock(nullcontext[None]):
    """Of a session: tasks of one event loop need none."""

    @staticmethod
    def guard(settle: Settle) -> Settle:
        """The same function, called with the lock held."""
        return settle


class Event:
    """Something that happens once."""

    def __init__(self) -> None:
        self._event = anyio.Event()
        self.set = self._event.set

    async def wait(self, timeout_s: float, *, shield: bool = False) -> bool:
        """Wait until it has happened; False when the time is over. With `shield` a cancellation
        does not end the wait."""
        with anyio.move_on_after(timeout_s, shield=shield):
            await self._event.wait()
        return self._event.is_set()


def begin(client: object) -> None:
    """A client is used that is not connected."""
    raise RuntimeError("the client is not connected: write `async with mqks.connect() as client:`")


class Connections:
    """The connections of one client: its own, and those of its consumers, which end with it."""

    async def open(self) -> None:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()

    def start(self, connection: "Connection[Any]") -> None:
        self._tasks.start_soon(connection.run)

    async def close(self) -> None:
        # Not the task group but the caller tells of errors: a group would wrap them.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


class Connection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S, lock: Lock) -> None:
        self.session = session
        session.is_tls = address.tls
        if address.tls:
            session.reason = f"no answer to the TLS handshake; perhaps {failures.PLAIN}"
        self.lock = lock
        self._address = address
        self._options = options
        self._output = anyio.Event()
        self._changed = anyio.Event()
        self._room_turn = anyio.Lock()
        self._scope = anyio.CancelScope()
        session.on_output = lambda: self._output.set()

    async def until(self, predicate: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until it is so; False when the time is over."""
        with anyio.move_on_after(timeout_s):
            while not predicate():
                await self._changed.wait()
            return True
        return False

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
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

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
            self.close("the client is closed")

    async def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        try:
            with anyio.fail_after(self._options.connect_timeout_s):
                stream = await _open(self._address, self._options)
        except _BROKEN as error:
            return _told(error)
        ends: list[str] = []

        async def serve(work: Callable[[ByteStream], Awaitable[str]]) -> None:
            try:
                ends.append(await work(stream))
            except _BROKEN as error:
                ends.append(_told(error))
            except ProtocolViolation as error:
                self.session.fail(error)
                ends.append(str(error))
            tasks.cancel_scope.cancel()

        async with stream:
            self.session.connected(time.monotonic())
            async with anyio.create_task_group() as tasks:
                for work in (self._read, self._write, self._watch):
                    tasks.start_soon(serve, work)
        return ends[0]

    async def _read(self, stream: ByteStream) -> str:
        session = self.session
        while session.failure is None:
            data = await stream.receive(CHUNK_BYTES)
            session.receive(data, time.monotonic())
            self.notify()
            while session.is_full:
                await self._changed.wait()
        return "closed"

    async def _write(self, stream: ByteStream) -> str:
        session = self.session
        while session.failure is None:
            if data := session.take():
                self.notify()  # There is room again.
                await stream.send(data)
            else:
                self._output = anyio.Event()
                await self._output.wait()
        return "closed"

    async def _watch(self, stream: ByteStream) -> str:
        session = self.session
        while session.tick(time.monotonic()):
            await anyio.sleep(max(session.deadline_s - time.monotonic(), 0.001))
        return f"no answer to a ping for {self._options.keep_alive_s} seconds"


async def _open(address: urls.Address, options: Options) -> ByteStream:
    if address.opener is not None:
        stream: ByteStream = await address.opener()
        return stream
    if address.path:
        return await anyio.connect_unix(address.path)
    if not address.tls:
        return await anyio.connect_tcp(address.host, address.port)
    stream = await anyio.connect_tcp(address.host, address.port)
    try:
        return await TLSStream.wrap(
            stream,
            hostname=address.host,
            ssl_context=options.ssl_context,
            standard_compatible=False,
        )
    except BaseException as error:
        await anyio.aclose_forcefully(stream)
        if isinstance(error, _BROKEN):
            raise ConnectionLost(failures.of_handshake(error, address)) from None
        raise


def _told(error: BaseException) -> str:
    if isinstance(error, anyio.EndOfStream):
        return "the server closed the connection"
    return str(error.__cause__ or error) or type(error).__name__
