"""The HTTP ports: opened at the start; what answers there is started with the first connection.

The one rule: a broker whose HTTP ports nobody uses pays for a socket only. The web page, its
templates and its server are a quarter of the memory of an empty broker.
"""

import socket
from collections.abc import Awaitable, Callable
from importlib import import_module
from time import monotonic
from typing import Any

import anyio
from anyio.abc import TaskStatus

from mqks import log
from mqks.errors import AddressUnavailable
from mqks.settings import PAGE_PORT, shown

AGAIN_S = 0.1
"""Interval at which opening and loading are tried again."""
Answer = Callable[[socket.socket], Awaitable[None]]
"""Answers on a socket until it is cancelled."""


async def serve(
    host: str,
    port: int | None,
    answer: Answer,
    *,
    scheme: str = "http",
    logged: str = "",
    taken_s: float = 0.0,
    task_status: TaskStatus[str],
) -> None:
    """Answer until cancelled. The task status is started with the address, which is logged unless
    it was `logged` before. The port may be taken for so many seconds yet.

    Raises AddressUnavailable, unless nobody has asked for this port.
    """
    end_s = monotonic() + taken_s
    while True:
        try:
            sock = _bind(host, port)
            break
        except AddressUnavailable as failure:
            if port is None:
                log.warning("no_page", reason=failure, todo="set http_port (MQKS_HTTP_PORT)")
                task_status.started("")
                return
            if monotonic() >= end_s:
                raise
        await anyio.sleep(AGAIN_S)
    with sock:
        address = f"{scheme}://{shown(*sock.getsockname()[:2])}"
        if address != logged:
            log.event("listening", address=address)
        task_status.started(address)
        # The first connection waits in the backlog while what answers it is loaded.
        await anyio.wait_readable(sock)
        await answer(sock)


async def load(module: str) -> Any:
    """What answers. A crowd may have taken the descriptors that loading it needs."""
    told = False
    while True:
        try:
            # In a thread: the event loop would stand still for 0.1 s.
            return await anyio.to_thread.run_sync(import_module, module)
        except (OSError, ImportError) as failure:
            if not told:
                log.warning("connection_failed", reason="HTTP was not loaded", error=failure)
                told = True
            await anyio.sleep(AGAIN_S)


def _bind(host: str, port: int | None) -> socket.socket:
    port = PAGE_PORT if port is None else port
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise AddressUnavailable(f"can't listen on {host}:{port}: {error.strerror}") from error
