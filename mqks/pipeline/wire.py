"""One blocking connection to the server: requests out, replies in, in their order.

The one rule: a wire with which something went wrong is of no more use; a connection makes another.
"""

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import BufferedReader
from typing import Any, TypeVar

from mqks.client import requests, urls
from mqks.client.blocking_connection import open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ConnectionLost,
    RequestFailed,
)
from mqks.client.options import Options

HEADER_BYTES_MAX = 64 * 1024
RETRY_MIN_S, RETRY_MAX_S = 0.1, 5.0

_log = logging.getLogger("mqks.pipeline")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server is and how patient to be with it; pickles, so that tasks can take it."""

    url: str | None = field(default=None, repr=False)
    """As in `mqks.client.urls`; the default is found here, and not where a task runs."""
    ca: str | None = None
    """A file of certificate authorities to trust instead of the system's."""
    connect_timeout_s: float = 10.0
    reply_timeout_s: float = 60.0
    """Silence after which a reply does not come any more."""
    retries: int = 10
    """Attempts to connect again before a lost connection is an error; delays double up to 5 s."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url or urls.default())


class Wire:
    """A connection that the server has greeted.

    Raises OSError (ConnectionLost is one) when there is none, AuthenticationFailed when the server
    refuses the credentials.
    """

    def __init__(self, server: Server) -> None:
        self.ahead: object = None
        """The request that was sent before its time, its reply not taken yet."""
        address = urls.parse(server.url)
        context = ssl.create_default_context(cafile=server.ca) if server.ca else None
        options = Options(connect_timeout_s=server.connect_timeout_s, ssl_context=context)
        self._sock = open_socket(address, options)
        self._sock.settimeout(server.connect_timeout_s)
        # Small reads come out of its buffer, large ones go past it: straight into our memory.
        self._replies: BufferedReader = self._sock.makefile("rb")
        try:
            credentials = address.credentials
            self.send(b"hello %b\n" % (requests.auth(credentials) if credentials else b"ping"))
            self.reply("the connection")
        except RequestFailed as error:
            self.close()
            raise AuthenticationFailed(
                f"the server refused us, error {error.error_id}", error.error_id
            ) from None
        except BaseException:
            self.close()
            raise
        self._sock.settimeout(server.reply_timeout_s)

    def send(self, data: bytes | memoryview) -> None:
        self._sock.sendall(data)

    def reply(self, asked: str) -> bytes:
        """What follows `ok` in the next reply. Raises RequestFailed, which names what was asked."""
        request_id, is_error, text = requests.Reply.parse(self._line())
        if not is_error:
            return text
        error_id = requests.decoded(text)
        if request_id == b"-":  # It concerns the connection, not the request.
            raise ConnectionLost(f"refused by the server, error {error_id}")
        raise RequestFailed(f"the server refused {asked}, error {error_id}", error_id)

    def confirms(self, count: int) -> None:
        """Take the confirms of so many messages. Raises RequestFailed, which names the message."""
        for _ in range(count):
            line = self._line()
            if line[-4:] != b" ok ":
                request_id, _, text = requests.Reply.parse(line)
                name, error_id = requests.decoded(request_id), requests.decoded(text)
                raise RequestFailed(
                    f"the server refused the message {name}, error {error_id}", error_id
                )

    def _line(self) -> bytes:
        line = self._replies.readline(HEADER_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ConnectionLost("the server closed the connection")
        return line[:-1]

    def fill(self, memory: memoryview) -> None:
        """Fill the memory with what comes next, without a copy in between."""
        if self._replies.readinto(memory) < len(memory):
            raise ConnectionLost("the server closed the connection")

    def close(self) -> None:
        self._replies.close()
        self._sock.close()


class Connection:
    """A wire that is made when it is needed, and again when it is lost; it pickles without."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._wire: Wire | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"server": self.server, "_wire": None}

    def close(self) -> None:
        """Drop the wire; what comes next makes another."""
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.close()

    @property
    def ahead(self) -> object:
        return self._wire and self._wire.ahead

    def again(self, call: Callable[[Wire], T]) -> T:
        """Do it, on a new wire each time the old one is lost.

        Raises what the call raises, and ConnectionLost when the server is away for longer than its
        retries last.
        """
        retries = self.server.retries
        for attempt in range(retries + 1):
            try:
                if self._wire is None:
                    self._wire = Wire(self.server)
                return call(self._wire)
            except OSError as error:
                self.close()
                if attempt == retries:
                    # A worker is another machine, for which the same name may mean another one.
                    where = f"{urls.parse(self.server.url)} from {socket.gethostname()}"
                    raise ConnectionLost(f"{where}: {error}") from None
                delay_s = min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(attempt, 64))
                _log.warning("connecting to the server again in %g s: %s", delay_s, error)
                time.sleep(delay_s)
            except BaseException:
                self.close()
                raise
        raise AssertionError("unreachable")
