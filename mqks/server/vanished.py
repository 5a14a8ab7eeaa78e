"""Clients whose machine or network has failed: the connection does not end, and their unacked
messages would never be redelivered.

The one rule: a client that answers probes stays connected, however slowly it reads. The system
sends keepalive probes to idle clients. While data are in flight it only retransmits, for a quarter
of an hour; its limit for that (TCP_USER_TIMEOUT) would also end clients that do not read. So the
server checks itself.
"""

import select
import socket
from collections.abc import Callable, Mapping
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


async def end_unanswering(
    clients: Mapping[int, ServerClient], schedule_flush: Callable[[], None]
) -> None:
    """Disconnect clients that have data in flight and do not acknowledge them. One whose publish
    waits for the end of a pause is not read: if it has ended, its patience has, too."""
    while True:
        await anyio.sleep(LOOK_S)
        for number, client in enumerate(list(clients.values()), 1):
            sock = client.transport.get_extra_info("socket")
            if _is_gone(sock):
                client.transport.abort()
            elif sock and client.connection.awaits_resume is not None and _has_ended(sock):
                client.connection.can_wait = False
                client.connection.look_again()
                schedule_flush()
            if number % SLICE_CLIENTS == 0:
                await anyio.lowlevel.checkpoint()


def _has_ended(sock: Any) -> bool:
    """Whether the peer has closed, or only its sending side."""
    poll = select.poll()
    try:
        poll.register(sock.fileno(), select.POLLRDHUP)
    except ValueError:  # It was closed meanwhile.
        return False
    return bool(poll.poll(0))


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
