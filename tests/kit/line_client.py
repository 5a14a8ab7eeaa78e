"""A blocking TCP connection that speaks lines of bytes; of the protocol it knows `stats` alone.

The one rule: every wait has a limit, after which it raises TimeoutError.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any, Self

from tests.kit.waiting import WAIT_S

_CHUNK_BYTES = 256 * 1024


class LineClient:
    """One connection to `address` (host, port); `seconds` limits each single wait."""

    def __init__(self, address: tuple[str, int], seconds: float = WAIT_S) -> None:
        self._socket = socket.create_connection(address, seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lines: deque[bytes] = deque()
        self._tail = b""

    @property
    def port(self) -> int:
        """Its own."""
        return int(self._socket.getsockname()[1])

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def line(self) -> bytes:
        """The next line without its newline; EOFError when the server closed the connection."""
        while not self._lines:
            self._receive()
        return self._lines.popleft()

    def lines(self) -> list[bytes]:
        """All lines that are here, at least one; EOFError as above."""
        while not self._lines:
            self._receive()
        lines = list(self._lines)
        self._lines.clear()
        return lines

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(_CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        if not chunk:
            raise EOFError(f"the connection is closed after {self._tail!r}")
        *lines, self._tail = (self._tail + chunk).split(b"\n")
        self._lines.extend(lines)

    def ask(self, request: bytes) -> bytes:
        """Sends one line, gives the next one that comes."""
        self.send(request + b"\n")
        return self.line()

    def stats(self, what: str = "") -> Any:
        return json.loads(self.ask(f"st stats {what}".encode()).removeprefix(b"st ok "))

    def rest(self) -> list[bytes]:
        """What still comes before the server closes."""
        lines: list[bytes] = []
        with suppress(EOFError):
            while True:
                lines += self.lines()
        return lines

    def close_sending_side(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    def leave(self) -> None:
        """Says goodbye: when this returns, the server knows that the client is gone."""
        self.close_sending_side()
        self.rest()
        self.close()

    def break_off(self) -> None:
        """Resets the connection, as a machine that dies would."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def close(self) -> None:
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
