"""Clients whose machine or network has failed: the connection does not end, and their unacked
messages would never be redelivered.

The one rule: a client that answers probes stays connected, however slowly it reads. The system
sends keepalive probes to idle clients. While data are in flight it only retransmits, for a quarter
of an hour; its limit for that (TCP_USER_TIMEOUT) would also end clients that do not read. So the
server checks itself.
"""

import socket
from collections.abc import Mapping
from struct import Struct
from typing import Any, Final

import anyio

from mqks.server.client import ServerClient

SILENT_S = 60
"""Probes start after this time of silence; without an answer the client is gone after the same time
again."""
AGAIN_S = 15
"""Interval of probes."""
LOOK_S = 15.0
SLICE_CLIENTS: Final = 500
"""Clients checked before other tasks run: a millisecond."""
UNANSWERED: Final = Struct("=2xBB52xI")
"""Of Linux' tcp_info: retransmissions in a row, unanswered probes, and milliseconds since the last
acknowledgement."""


def ask_silent(listener: Any) -> None:
    """Enable keepalive probes. Accepted sockets inherit it."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SILENT_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, AGAIN_S)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENT_S // AGAIN_S)


async def end_unanswering(clients: Mapping[int, ServerClient]) -> None:
    """Disconnect clients that have data in flight and do not acknowledge them."""
    while True:
        await anyio.sleep(LOOK_S)
        for number, client in enumerate(list(clients.values()), 1):
            if _is_gone(client.transport.get_extra_info("socket")):
                client.transport.abort()
            if number % SLICE_CLIENTS == 0:
                await anyio.lowlevel.checkpoint()


def _is_gone(sock: Any) -> bool:
    if sock is None:  # Closed already.
        return False
    try:
        told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, UNANSWERED.size)
    except (OSError, ValueError):  # A Unix socket, or one that was closed meanwhile.
        return False
    # One is no proof: a client that does not read is probed every other minute only, and may be
    # about to answer.
    again, asked, silent_ms = UNANSWERED.unpack(told)
    return bool(max(again, asked) > 1 and silent_ms > 2000 * SILENT_S)
