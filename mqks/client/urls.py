"""URLs: the address of the server, or of several, and credentials.

    mqks://[token@|user:password@]host[:port]      TCP, port 25000
    mqkss://[token@|user:password@]host[:port]     TLS over TCP
    mqks+unix://[token@|user:password@]/path       a Unix socket

Each may end with ?name=NAME, the name of the client. Several servers, of which one is active and
the others stand by, are a list, or a text with commas in between.

The one rule: no error and no repr contains credentials.
"""

import os
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from socket import socket
from typing import Final, TypeVar
from urllib.parse import unquote, urlsplit

from mqks.client.errors import ConnectionLost
from mqks.errors import ConfigurationError, reason

T = TypeVar("T")

PORT = 25000
DEFAULT_URL = f"mqks://127.0.0.1:{PORT}"
Urls = str | Sequence[str]
_NEXT: Final = re.compile(r",\s*(?=mqks(?:s|\+unix)?://)")
"""Between two URLs; other commas belong to a URL."""


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    path: str = ""
    """Of a Unix socket; empty for TCP."""
    tls: bool = False
    credentials: tuple[str, ...] = field(default=(), repr=False)
    """Nothing, a token, or user and password."""
    client_name: str = ""
    opener: Callable[[], Awaitable[socket]] | None = field(default=None, repr=False, compare=False)
    """Returns the Unix socket of each connection of an async client, instead of the network."""
    others: tuple["Address", ...] = ()
    """Of further servers."""

    @property
    def each(self) -> tuple["Address", ...]:
        """Of one server each."""
        return (replace(self, others=()), *self.others) if self.others else (self,)

    def __str__(self) -> str:
        if self.others:
            return ", ".join(map(str, self.each))
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"{host}:{self.port}"


class Servers:
    """The servers of an address. A round tries all, and begins where the last one has stopped: so
    after a lost connection the next server is tried first."""

    def __init__(self, address: Address) -> None:
        self.count = len(address.each)
        self._next = cycle(address.each)

    def round(self) -> Iterator[Address]:
        return islice(self._next, self.count)

    def first(self, connect: Callable[[Address], T]) -> T:
        """What `connect` returns for the first server that it reaches. Raises ConnectionLost with
        what each has said."""
        failures: list[tuple[Address, str]] = []
        for address in self.round():
            try:
                return connect(address)
            except OSError as error:
                failures.append((address, reason(error)))
        raise ConnectionLost(told(failures))


def told(failures: Sequence[tuple[Address, str]]) -> str:
    """Why none of the servers was reached."""
    if len(failures) == 1:
        return failures[0][1]
    return "; ".join(f"{address}: {why}" for address, why in failures)


def default() -> str:
    """The default URL: the variable MQKS_URL, else this machine."""
    return os.environ.get("MQKS_URL") or DEFAULT_URL


def parse(url: Urls | None = None) -> Address:
    """Parse a URL, or several; by default those in MQKS_URL, else that of this machine.

    Raises ConfigurationError, and TypeError.
    """
    texts = [url or default()] if url is None or isinstance(url, str) else url
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"the URL must be text, such as mqks://localhost, not {url!r}")
    given = [each for text in texts for each in _NEXT.split(text)]
    if not given:
        raise ConfigurationError("the list of URLs is empty")
    names = [f"URL {number} of the list" for number in range(1, len(given) + 1)]
    found = [*map(_parse, given, names if len(given) > 1 else ["the URL"])]
    first, *others = found
    if len({(each.credentials, each.client_name) for each in found}) > 1:
        raise ConfigurationError("all URLs of a list must have the same credentials and name")
    return replace(first, others=tuple(others))


def _parse(url: str, name: str) -> Address:
    """`name` is what errors call it."""
    try:
        parts = urlsplit(url)
        _refuse_list(parts.netloc.rpartition("@")[2], name)
        port = PORT if parts.port is None else parts.port
    except ValueError:
        raise ConfigurationError(
            f"{name} is invalid, or its port is not a number, as in mqks://host:25000"
        ) from None
    given = (parts.username, parts.password)
    if parts.password is not None and not parts.username:
        raise ConfigurationError(
            f"{name} has a password without a user: write mqks://USER:PASSWORD@HOST"
        )
    credentials = tuple(unquote(word) for word in given if word)
    client_name = _client_name(parts.query)
    if parts.fragment:
        raise ConfigurationError(f"{name} must not have a fragment: write # as %23")
    if parts.scheme == "mqks+unix":
        if parts.hostname or parts.path in ("", "/"):
            raise ConfigurationError(
                f"the path of the socket is missing in {name}, as in mqks+unix:///run/mqks.sock"
            )
        path = unquote(parts.path)
        return Address("", 0, path, credentials=credentials, client_name=client_name)
    if parts.scheme not in ("mqks", "mqkss"):
        raise ConfigurationError(
            f"{name} must start with mqks://, mqkss:// or mqks+unix://, as in mqks://localhost:25000"
        )
    if not parts.hostname or parts.path not in ("", "/"):
        raise ConfigurationError(f"{name} must have a host and no path, as in mqks://host:25000")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ConfigurationError(f"the host in {name} is not the name of a host") from None
    tls = parts.scheme == "mqkss"
    return Address(parts.hostname, port, tls=tls, credentials=credentials, client_name=client_name)


def _refuse_list(hosts: str, name: str) -> None:
    """Refuse commas that do not separate URLs."""
    first, *others = hosts.split(",")
    if not all(others):
        raise ConfigurationError(f"{name} has a comma after {first} that no URL follows")
    if others:
        raise ConfigurationError(
            f"{others[0]} after the comma in {name} is no URL: several servers are several URLs, "
            "as in mqks://host1:25000,mqks://host2:25000"
        )


def _client_name(query: str) -> str:
    if not query:
        return ""
    key, _, value = query.partition("=")
    if key != "name" or not value or "&" in value:
        raise ConfigurationError("the only parameter of the URL is the name, as in ?name=web-1")
    return unquote(value)
