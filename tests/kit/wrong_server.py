"""A server between client and broker that changes what the broker answers.

The one rule: it only replaces bytes, so that everything else is the real broker's.
"""

from __future__ import annotations

import asyncio

from tests.kit.proxy import CHUNK_BYTES, Proxy


class WrongServer(Proxy):
    """Passes everything on to a port of this machine and back, with the bytes `wrong` instead of
    `right` in each line of the answers."""

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
