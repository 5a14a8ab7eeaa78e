"""What can happen between a client and the server: a TCP proxy that delays, cuts and swallows.

The one rule: bytes that pass are passed once and in order.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, suppress
from typing import Self

from anyio.from_thread import start_blocking_portal

CHUNK_BYTES = 64 * 1024

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Peer:
    """A listener on a free port whose connections are served by `serve`, in a thread."""

    def __init__(self, serve: Serve | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.port = 0
        self.accepted = 0
        """Connections so far."""
        self._script = serve
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"mqks://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self._script is not None
        await self._script(reader, writer)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.accepted += 1
        self._writers.add(writer)
        try:
            with suppress(ConnectionError, ssl.SSLError, asyncio.CancelledError):
                await self._serve(reader, writer)
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=self._tls
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def _close(self) -> None:
        # What was accepted a moment before a server is closed is lost without being closed, so
        # first nobody is accepted any more, for some turns of the loop.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener)
        for _ in range(10):
            await asyncio.sleep(0)
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal("asyncio"))
            self._portal.call(self._listen)
            stack.callback(self._portal.call, self._close)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class Proxy(Peer):
    def __init__(self, target_port: int, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(tls=tls)
        self.delay_s = 0.0
        """How long each chunk takes, in either direction."""
        self.is_frozen = False
        """Swallows everything, as a machine that has lost its power would."""
        self.is_mute = False
        """Swallows what is answered."""
        self.swallowed = b""
        self.is_refusing = False
        """Closes new connections at once."""
        self._target_port = target_port

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.is_refusing:
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        finally:
            far_writer.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await asyncio.sleep(self.delay_s)
            if self.is_frozen or (self.is_mute and writer in self._writers):
                self.swallowed += data
            else:
                writer.write(data)
                await writer.drain()
        if writer.can_write_eof() and not self.is_frozen:
            writer.write_eof()

    def cut(self) -> None:
        """Resets all connections."""
        self._portal.call(self._cut)

    async def _cut(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    def half_close(self) -> None:
        """Ends the stream towards each client, and goes on listening to it."""
        self._portal.call(self._half_close)

    async def _half_close(self) -> None:
        for writer in self._writers:
            writer.write_eof()


class WrongServer(Proxy):
    """Passes everything, with the bytes `wrong` for `right` in what the broker answers."""

    def __init__(self, port: int, right: bytes, wrong: bytes) -> None:
        super().__init__(port)
        self._right, self._wrong = right, wrong

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if writer not in self._writers:
            await super()._pump(reader, writer)
            return
        tail = b""
        while data := await reader.read(CHUNK_BYTES):
            # Whole lines, and those with their ends, so that no bytes to replace are cut in two.
            lines, newline, tail = (tail + data).rpartition(b"\n")
            writer.write((lines + newline).replace(self._right, self._wrong))
            await writer.drain()
        writer.write_eof()
