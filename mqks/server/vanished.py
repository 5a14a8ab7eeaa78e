"""Clients whose machine is gone, or the way to it: no goodbye comes, and what their consumers hold
would stay with them.

The one rule: who answers when it is asked stays, however slowly it reads. The system asks those to
whom nothing is under way. While something is, it only sends that again, for a quarter of an hour;
its limit for that (TCP_USER_TIMEOUT) would end those who do not read, too, so we look ourselves.
"""

import socket
from collections.abc import Mapping
from struct import Struct
from typing import Any, Final

import anyio

from mqks.server.client import Client

SILENT_S = 60
"""A client from which nothing came for so long is asked; without an answer it is gone as long
after that."""
AGAIN_S = 15
"""It is asked this often meanwhile."""
LOOK_S = 15.0
SLICE_CLIENTS: Final = 500
"""Looked at before others have their turn: a millisecond."""
UNANSWERED: Final = Struct("=2xBB52xI")
"""Of Linux' tcp_info: how often in a row something was sent again, how often the client was asked,
and the milliseconds since it acknowledged anything."""


def ask_silent(listener: Any) -> None:
    """Have the system ask. The sockets of clients inherit it."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, AGAIN_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // AGAIN_S)


async def end_unanswering(clients: Mapping[int, Client]) -> None:
    """End those to whom something is under way, and who have left the system without an answer."""
    while True:
        await anyio.sleep(LOOK_S)
        for number, client in enumerate(list(clients.values()), 1):
            if _is_gone(client.transport.get_extra_info("socket")):
                client.transport.abort()
            if number % SLICE_CLIENTS == 0:
                await anyio.lowlevel.checkpoint()


def _is_gone(sock: Any) -> bool:
    if sock is None:  # It was closed, and what is on top, TLS for instance, has yet to hear of it.
        return False
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNANSWERED.size)
    except (OSError, ValueError):  # A Unix socket, or one that was closed meanwhile.
        return False
    # Once is no proof: who is asked only every other minute, as it does not read for long, may
    # just be about to answer.
    again, asked, silent_ms = UNANSWERED.unpack(told)
    return bool(max(again, asked) > 1 and silent_ms > 2000 * SILENT_S)
