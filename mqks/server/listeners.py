"""The sockets that clients come in by: TCP, TLS and Unix, or those that the process was given.

The one rule: what belongs to another stays. A socket that was given is closed, and its path kept.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

from anyio.abc import TaskGroup

from mqks.errors import AddressUnavailable
from mqks.server.door import Door
from mqks.server.gate import shown
from mqks.server.inherited import Inherited
from mqks.server.unix import UnixPath
from mqks.server.vanished import ask_silent
from mqks.settings import Settings

BACKLOG = 4096
TLS_NAME = "tls"
"""An inherited socket of this name speaks TLS."""

Name = tuple[Any, ...] | str | bytes
"""What a socket says of where it is."""


class Listeners:
    """`inherited` ones are listened on, if there are any, instead of what the settings say; with
    TLS where the door has a context for it."""

    def __init__(self, settings: Settings, inherited: Sequence[Inherited], door: Door) -> None:
        self._settings = settings
        self._inherited = inherited
        self._door = door
        self._unix: UnixPath | None = None
        self._names: list[Name] = []
        """Of those without TLS."""
        self.shown: list[str] = []
        """Where clients find them, as people write it."""

    def open(self, tasks: TaskGroup) -> None:
        """Let clients in. Raises AddressUnavailable."""
        with_tls: list[str] = []
        for listener, speaks_tls in self._listening():
            ask_silent(listener)
            self._door.open(listener, tasks, with_tls=speaks_tls)
            name = listener.getsockname()
            if speaks_tls:
                with_tls.append(f"tls:{_shown(name)}")
            else:
                self._names.append(name)
        self.shown = [*map(_shown, self._names), *with_tls]

    def _listening(self) -> Iterator[tuple[socket.socket, bool]]:
        """Each with whether it speaks TLS."""
        settings = self._settings
        if self._inherited:
            yield from ((each, name == TLS_NAME) for each, name in self._inherited)
            return
        for each in _listen(settings.host, settings.port):
            yield each, False
        if settings.unix:
            self._unix = UnixPath(settings.unix)
            with _told(str(settings.unix)):
                listener = self._unix.listen(BACKLOG)
            yield listener, False
        if self._door.context:
            for each in _listen(settings.tls_host, settings.tls_port):
                yield each, True

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
        if self._unix:
            self._unix.delete()
        self._door.close()


def _listen(host: str, port: int) -> list[socket.socket]:
    """On every address of a host. Raises AddressUnavailable."""
    listeners = []
    with _told(f"{host}:{port}"):
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        for family, _, _, _, address in dict.fromkeys(found):
            listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
    return listeners


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AddressUnavailable(f"can't listen on {where}: {error.strerror or error}") from error


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
