"""URLs: the address of the server, and credentials.

    mqks://[token@|user:password@]host[:port]      TCP, port 25000
    mqkss://[token@|user:password@]host[:port]     TLS over TCP
    mqks+unix://[token@|user:password@]/path       a Unix socket

Each may end with ?name=NAME, the name of the client.

The one rule: no error and no repr contains credentials.
"""

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from mqks.errors import ConfigurationError

PORT = 25000
DEFAULT_URL = f"mqks://127.0.0.1:{PORT}"


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
    opener: Callable[[], Awaitable[Any]] | None = field(default=None, repr=False, compare=False)
    """Returns the stream of each connection of an async client, instead of the network."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"unix:{self.path}" if self.path else f"{host}:{self.port}"


def default() -> str:
    """The default URL: the variable MQKS_URL, else this machine."""
    return os.environ.get("MQKS_URL") or DEFAULT_URL


def parse(url: str | None = None) -> Address:
    """Parse a URL; by default that in MQKS_URL, else that of this machine.

    Raises ConfigurationError, and TypeError.
    """
    if url is not None and not isinstance(url, str):
        raise TypeError(f"the URL must be text, such as mqks://localhost, not {url!r}")
    try:
        parts = urlsplit(url or default())
        port = PORT if parts.port is None else parts.port
    except ValueError:
        raise ConfigurationError(
            "the URL is invalid, or its port is not a number, as in mqks://host:25000"
        ) from None
    given = (parts.username, parts.password)
    if parts.password is not None and not parts.username:
        raise ConfigurationError(
            "the URL has a password without a user: write mqks://USER:PASSWORD@HOST"
        )
    credentials = tuple(unquote(word) for word in given if word)
    client_name = _client_name(parts.query)
    if parts.fragment:
        raise ConfigurationError("the URL must not have a fragment: write # as %23")
    if parts.scheme == "mqks+unix":
        if parts.hostname or parts.path in ("", "/"):
            raise ConfigurationError(
                "the path of the socket is missing in the URL, as in mqks+unix:///run/mqks.sock"
            )
        path = unquote(parts.path)
        return Address("", 0, path, credentials=credentials, client_name=client_name)
    if parts.scheme not in ("mqks", "mqkss"):
        raise ConfigurationError(
            "the URL must start with mqks://, mqkss:// or mqks+unix://, as in mqks://localhost:25000"
        )
    if not parts.hostname or parts.path not in ("", "/"):
        raise ConfigurationError("the URL must have a host and no path, as in mqks://host:25000")
    tls = parts.scheme == "mqkss"
    return Address(parts.hostname, port, tls=tls, credentials=credentials, client_name=client_name)


def _client_name(query: str) -> str:
    if not query:
        return ""
    key, _, value = query.partition("=")
    if key != "name" or not value or "&" in value:
        raise ConfigurationError("the only parameter of the URL is the name, as in ?name=web-1")
    return unquote(value)
