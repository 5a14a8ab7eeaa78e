"""Connections that a gateway opens to the broker: it makes two sockets, and sends one of them.

The one rule: the broker decides who is let in. It is told only what the gateway has found out.
"""

import json
import socket
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import anyio

OPENING_BYTES_MAX: Final = 128 * 1024
"""Of a request for a connection: it has the name of a user, which a header of 64 KiB can hold."""


class Opening(NamedTuple):
    """A connection that a gateway opens: a `trusted` one may do everything, or what the named user
    may, who is known to be one, and may send lines of this length."""

    name: str
    trusted: bool
    user: str
    line_bytes_max: int


class Openings:
    """The gateway's end."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sending = anyio.Lock()
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, OPENING_BYTES_MAX)

    async def open(
        self, name: str, trusted: bool, user: str = "", line_bytes_max: int = 0
    ) -> socket.socket:
        """Raises OSError."""
        opening = Opening(name, trusted, user, line_bytes_max)
        mine, other = socket.socketpair()
        with other:
            try:
                async with self._sending:
                    await anyio.wait_writable(self._sock)
                    socket.send_fds(self._sock, [json.dumps(opening).encode()], [other.fileno()])
            except BaseException:
                mine.close()
                raise
        mine.setblocking(False)
        return mine


async def receive(
    openings: socket.socket, let_in: Callable[[socket.socket, Opening], Awaitable[object]]
) -> None:
    """The broker's end: `let_in` gets all that comes, until the gateway ends."""
    openings.setblocking(False)
    while True:
        await anyio.wait_readable(openings)
        told, descriptors, _, _ = socket.recv_fds(openings, OPENING_BYTES_MAX, 1)
        if not told:
            return
        # Without a free descriptor there is none, and the gateway sees a lost connection.
        for descriptor in descriptors:
            await let_in(socket.socket(fileno=descriptor), Opening(*json.loads(told)))
