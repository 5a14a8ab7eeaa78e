"""The sockets that clients come in by: TCP, TLS and Unix, or those that the process was given.

The one rule: what belongs to another stays. A socket that was given is closed, and its path kept.
"""

import asyncio
import ipaddress
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from urllib.parse import quote

from anyio.abc import TaskGroup

from mqks.errors import AddressUnavailable
from mqks.server import tls
from mqks.server.gate import shown
from mqks.server.inherited import Inherited
from mqks.server.tls import TlsListener
from mqks.server.vanished import ask_silent
from mqks.settings import Settings

BACKLOG = 4096
TLS_NAME = "tls"
"""An inherited socket of this name speaks TLS."""
# From Python 3.13 on the path would be deleted at the end, and it belongs to another.
KEEP_PATH: dict[str, Any] = {"cleanup_socket": False} if sys.version_info >= (3, 13) else {}

Name = tuple[Any, ...] | str | bytes
"""What a socket says of where it is."""


class Listeners:
    """`inherited` ones are listened on, if there are any, instead of what the settings say; with
    TLS where there is a listener for it."""

    def __init__(
        self, settings: Settings, inherited: Sequence[Inherited], tls_listener: TlsListener | None
    ) -> None:
        self._settings = settings
        self._inherited = inherited
        self._tls = tls_listener
        self._servers: list[asyncio.Server] = []
        self._names: list[Name] = []
        """Of those without TLS."""
        self.shown: list[str] = []
        """Where clients find them, as people write it."""

    async def open(self, make_client: Callable[[], asyncio.Protocol], tasks: TaskGroup) -> None:
        """Let clients in. Raises AddressUnavailable."""
        for where, opening in self._openings(make_client):
            with _told(where):
                self._servers.append(await opening)
        self._names = [each.getsockname() for server in self._servers for each in server.sockets]
        self.shown = [_shown(name) for name in self._names]
        for server in self._servers:
            for each in server.sockets:
                ask_silent(each)
        if self._tls:
            with_tls = self._open_with_tls()
            for listener in with_tls:
                ask_silent(listener)
            self.shown += [f"tls:{_shown(each.getsockname())}" for each in with_tls]
            tasks.start_soon(self._tls.run, with_tls)

    def _openings(
        self, make_client: Callable[[], asyncio.Protocol]
    ) -> Iterator[tuple[str, Awaitable[asyncio.Server]]]:
        settings, loop = self._settings, asyncio.get_running_loop()
        on_tcp = partial(loop.create_server, make_client, backlog=BACKLOG)
        on_unix = partial(loop.create_unix_server, make_client, backlog=BACKLOG)
        for inherited, name in self._inherited:
            if name == TLS_NAME:
                continue
            if inherited.family == socket.AF_UNIX:
                yield name, on_unix(sock=inherited, **KEEP_PATH)
            else:
                yield name, on_tcp(sock=inherited)
        if not self._inherited:
            yield f"{settings.host}:{settings.port}", on_tcp(settings.host, settings.port)
            if settings.unix:
                yield str(settings.unix), on_unix(settings.unix)

    def _open_with_tls(self) -> list[socket.socket]:
        if self._inherited:
            return [each for each, name in self._inherited if name == TLS_NAME]
        with _told(f"{self._settings.tls_host}:{self._settings.tls_port}"):
            return tls.listen(self._settings, BACKLOG)

    @property
    def port(self) -> int:
        """Of TCP; 0 without."""
        return next((name[1] for name in self._names if isinstance(name, tuple)), 0)

    @property
    def url(self) -> str:
        """How a client on this machine finds the first of them; empty if it can't."""
        return _url(self._names[0]) if self._names else ""

    def close(self) -> None:
        """Let nobody in any more; those who are in stay."""
        for server in self._servers:
            server.close()
        if self._tls:
            self._tls.close()
        if self._settings.unix and not self._inherited:
            self._settings.unix.unlink(missing_ok=True)


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AddressUnavailable(f"can't listen on {where}: {error.strerror}") from error


def _shown(name: Name) -> str:
    """A socket's name as people write it."""
    if not isinstance(name, tuple):
        return "unix:" + os.fsdecode(name).replace("\0", "@")
    return shown(*name[:2])


def _url(name: Name) -> str:
    """How a client on this machine finds a socket; empty for one that has no path."""
    if not isinstance(name, tuple):
        path = os.fsencode(name)
        return f"mqks+unix://{quote(path)}" if path.startswith(b"/") else ""
    host, port = name[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"mqks://{shown(host, port)}"
