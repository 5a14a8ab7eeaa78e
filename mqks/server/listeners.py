"""The listening sockets: TCP, TLS and Unix, or the inherited ones.

The one rule: what belongs to another process stays. An inherited socket is used, or refused by
name, and closed, but its path is not deleted; a Unix socket at which somebody answers is not
replaced.
"""

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, repeat
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from anyio.abc import TaskGroup

from mqks.errors import AddressUnavailable, ConfigurationError
from mqks.files import identity, lock
from mqks.loops import send_at_once
from mqks.server.door import Door
from mqks.server.vanished import ask_silent
from mqks.settings import Settings, shown

BACKLOG = 4096
FIRST_DESCRIPTOR = 3
"""Of those that a process inherits by sd_listen_fds(3)."""
TLS_NAME = "tls"
"""An inherited socket with this name uses TLS."""

Name = tuple[Any, ...] | str | bytes
"""The address of a socket."""


class Inherited(NamedTuple):
    socket: socket.socket
    name: str
    """FileDescriptorName= of its unit, or the name of the unit."""


class Listeners:
    """Listens on the `inherited` sockets if there are any, otherwise on those of the settings; with
    TLS if the door has a context."""

    def __init__(self, settings: Settings, inherited: Sequence[Inherited], door: Door) -> None:
        self._settings = settings
        self._inherited = inherited
        self._door = door
        self._unix: UnixPath | None = None
        self._names: list[Name] = []
        """Addresses of the sockets without TLS."""
        self._tls_names: list[Name] = []
        self.shown: list[str] = []
        """Addresses for people."""

    def open(self, tasks: TaskGroup) -> None:
        """Accept clients. Raises AddressUnavailable."""
        for listener, speaks_tls in self._listening():
            ask_silent(listener)
            send_at_once(listener)
            self._door.open(listener, tasks, with_tls=speaks_tls)
            name = listener.getsockname()
            (self._tls_names if speaks_tls else self._names).append(name)
        self.shown = [
            *map(_shown, self._names),
            *(f"tls:{_shown(name)}" for name in self._tls_names),
        ]

    def _listening(self) -> Iterator[tuple[socket.socket, bool]]:
        """Each socket, and whether it uses TLS."""
        settings = self._settings
        if self._inherited:
            yield from ((each, name == TLS_NAME) for each, name in self._inherited)
            return
        for each in _listen(settings.host, settings.port):
            yield each, False
        if settings.unix:
            self._unix = UnixPath(settings.unix)
            with _told(str(settings.unix)):
                listener = self._unix.listen()
            yield listener, False
        if self._door.context:
            for each in _listen(settings.tls_host, settings.tls_port):
                yield each, True

    @property
    def port(self) -> int:
        """The TCP port; 0 without one."""
        return next((name[1] for name in self._names if isinstance(name, tuple)), 0)

    @property
    def url(self) -> str:
        """URL of the first socket for clients on this machine; empty if there is none."""
        return _url(self._names[0]) if self._names else ""

    @property
    def far_url(self) -> str:
        """URL of the first socket for clients on other machines; empty if there is none."""
        # TLS first: other machines can be reached over networks of others.
        for scheme, names in (("mqkss", self._tls_names), ("mqks", self._names)):
            for name in names:
                if isinstance(name, tuple):
                    address = ipaddress.ip_address(name[0].partition("%")[0])
                    if not address.is_loopback:
                        host = socket.gethostname() if address.is_unspecified else str(address)
                        return f"{scheme}://{shown(host, name[1])}"
        return ""

    def close(self) -> None:
        """Accept no more clients; open connections stay open."""
        if self._unix:
            self._unix.delete()
        self._door.close()


def _listen(host: str, port: int) -> list[socket.socket]:
    """Listen on every address of a host. Raises AddressUnavailable."""
    listeners = []
    with _told(f"{host}:{port}"):
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # A name may have an address twice, and a second socket could not listen there.
        for family, _, _, _, address in dict.fromkeys(found):
            listeners.append(socket.create_server(address, family=family, backlog=BACKLOG))
    return listeners


@contextmanager
def _told(where: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or str(error)  # `create_server` repeats the address in it.
        why = why.partition(" (while attempting")[0]
        raise AddressUnavailable(f"can't listen on {where}: {why}") from error


def _shown(name: Name) -> str:
    """The address of a socket for people."""
    if not isinstance(name, tuple):
        return "unix:" + os.fsdecode(name).replace("\0", "@")
    return shown(*name[:2])


def _url(name: Name) -> str:
    """URL of a socket for clients on this machine; empty for a socket without a path."""
    if not isinstance(name, tuple):
        path = os.fsencode(name)
        return f"mqks+unix://{quote(path)}" if path.startswith(b"/") else ""
    host, port = name[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    return f"mqks://{shown(host, port)}"


# -- inherited sockets


def take_sockets(environ: MutableMapping[str, str]) -> list[Inherited]:
    """Return the sockets that the process was started with; remove their variables from `environ`.

    Raises ConfigurationError for a descriptor that is not a listening stream socket.
    """
    process = environ.pop("LISTEN_PID", "")
    count = environ.pop("LISTEN_FDS", "")
    names = environ.pop("LISTEN_FDNAMES", "")
    if process != str(os.getpid()):
        return []
    if not count.isdecimal():
        raise ConfigurationError(f"LISTEN_FDS: {count!r} is not a number")
    descriptors = range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count))
    named = zip(descriptors, chain(filter(None, names.split(":")), repeat("unknown")), strict=False)
    return [Inherited(_listening(descriptor, name), name) for descriptor, name in named]


def _listening(descriptor: int, name: str) -> socket.socket:
    place = f"LISTEN_FDS: descriptor {descriptor} ({name})"
    try:
        inherited = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigurationError(f"{place}: {error.strerror}") from None
    inherited.set_inheritable(False)
    if (
        inherited.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
        or inherited.type != socket.SOCK_STREAM
        or not inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    ):
        raise ConfigurationError(f"{place} is not a listening TCP or Unix stream socket")
    return inherited


# -- a Unix socket


class UnixPath:
    """The path of a listening server, until `delete`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._identity = -1, -1

    def listen(self) -> socket.socket:
        """Raises AddressUnavailable, OSError."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _alone(self._path.parent):
                self._make_way()
                listener.bind(str(self._path))
                self._identity = identity(self._path.lstat())
                listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        return listener

    def delete(self) -> None:
        """Call it before the socket is closed, so that nobody else takes the path meanwhile."""
        with suppress(OSError):
            if identity(self._path.lstat()) == self._identity:
                self._path.unlink()
        self._identity = -1, -1

    def _make_way(self) -> None:
        try:
            found = self._path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(found.st_mode):
            raise AddressUnavailable(f"can't listen on {self._path}: it exists and is not a socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            asking.setblocking(False)
            # ECONNREFUSED alone means that the socket is stale. 0 means that somebody answers,
            # EAGAIN that the backlog is full.
            if asking.connect_ex(str(self._path)) != errno.ECONNREFUSED:
                raise AddressUnavailable(
                    f"can't listen on {self._path}: another process listens there"
                )
        self._path.unlink()


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    """Servers that start at the same time check and listen one after the other."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        lock(descriptor)
        yield
    except BlockingIOError:
        raise AddressUnavailable(f"{directory} is locked by another process") from None
    finally:
        os.close(descriptor)
