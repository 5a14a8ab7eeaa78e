"""Connections to the broker from inside its own process.

The one rule: one end is a client like every other, with the same limits; only its peer is not on
the network.
"""

import asyncio
import socket
from dataclasses import dataclass

import anyio
from anyio.abc import ByteStream

STREAM_BYTES = 256 * 1024


@dataclass(eq=False)
class Stream(ByteStream):
    """The end of the one who asks."""

    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter

    async def receive(self, max_bytes: int = 65536) -> bytes:
        data = await self._reader.read(max_bytes)
        if not data:
            raise anyio.EndOfStream
        return data

    async def send(self, item: bytes) -> None:
        self._writer.write(item)
        await self._writer.drain()

    async def send_eof(self) -> None:
        self._writer.write_eof()

    async def aclose(self) -> None:
        self._writer.close()


async def pair() -> tuple[socket.socket, Stream]:
    """A socket for the server, and the other end of it."""
    server_end, other_end = socket.socketpair()
    for each in (server_end, other_end):
        each.setblocking(False)
    reader, writer = await asyncio.open_unix_connection(sock=other_end, limit=STREAM_BYTES)
    return server_end, Stream(reader, writer)
