"""What every process of the server sets: its event loop, collection of garbage, and sockets."""

import gc
import socket
from importlib.util import find_spec

from mqks.settings import Settings


def uses_uvloop(settings: Settings) -> bool:
    return settings.uvloop and find_spec("uvloop") is not None


def rarely_collect() -> None:
    """Collections of garbage need not visit what is there now. One of the middle generation visits
    6,000 others: 5 ms where they are requests that wait."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(2_000, 1, 25_000)


def send_at_once(listener: socket.socket) -> None:
    """What is written to sockets that it accepts does not wait, up to 40 ms, until the client has
    acknowledged what was written before. Uvloop sets that for each; asyncio only for a socket that
    names its protocol, as none that was accepted does."""
    if listener.family != socket.AF_UNIX:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
