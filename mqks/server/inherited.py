"""Listening sockets that the process was started with, as in sd_listen_fds(3).

The one rule: each is used, or refused by name; none is left open unserved.
"""

import os
import socket
from collections.abc import MutableMapping
from itertools import chain, repeat
from typing import NamedTuple

from mqks.errors import ConfigurationError

FIRST_DESCRIPTOR = 3


class Inherited(NamedTuple):
    socket: socket.socket
    name: str
    """FileDescriptorName= of its unit, or the name of the unit."""


def take_sockets(environ: MutableMapping[str, str]) -> list[Inherited]:
    """Return the sockets for this process; remove their variables from `environ`.

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
