"""One blocking connection to the server: requests out, replies in, in their order.

The one rule: whatever goes wrong with it raises, and then it is of no more use.
"""

import ssl
from dataclasses import dataclass
from io import BufferedReader
from typing import Self

from mqks.client import requests, urls
from mqks.client.blocking import open_socket
from mqks.client.errors import (
    AuthenticationFailed,
    ConnectionLost,
    ProtocolViolation,
    RequestFailed,
)
from mqks.client.options import Options

HEADER_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where the server is and how patient to be with it; pickles, so that tasks can take it."""

    url: str | None = None
    """As in `mqks.client.urls`."""
    ca: str | None = None
    """A file of certificate authorities to trust instead of the system's."""
    connect_timeout_s: float = 10.0
    reply_timeout_s: float = 60.0
    """Silence after which a reply does not come any more."""
    retries: int = 10
    """Attempts to connect again before a lost connection is an error; delays double up to 5 s."""


class Wire:
    """A connection that the server has greeted.

    Raises OSError (ConnectionLost is one) when there is none, AuthenticationFailed when the server
    refuses the credentials.
    """

    def __init__(self, server: Server) -> None:
        address = urls.parse(server.url)
        context = ssl.create_default_context(cafile=server.ca) if server.ca else None
        options = Options(connect_timeout_s=server.connect_timeout_s, ssl_context=context)
        self._sock = open_socket(address, options)
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

    def send(self, data: bytes) -> None:
        self._sock.sendall(data)

    def line(self) -> bytes:
        """The next line, without its end."""
        line = self._replies.readline(HEADER_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise ConnectionLost("the server closed the connection")
        return line[:-1]

    def reply(self, asked: str) -> bytes:
        """What follows `ok` in the next reply. Raises RequestFailed, which names what was asked."""
        line = self.line()
        request_id, _, rest = line.partition(b" ")
        status, _, text = rest.partition(b" ")
        if status == b"error":
            error_id = requests.decoded(text)
            if request_id == b"-":  # It concerns the connection, not the request.
                raise ConnectionLost(f"refused by the server, error {error_id}")
            raise RequestFailed(f"the server refused {asked}, error {error_id}", error_id)
        if status != b"ok":
            raise ProtocolViolation(f"the peer sent {line[:80]!r}, which is no reply")
        return text

    def fill(self, memory: memoryview) -> None:
        """Fill the memory with what comes next, without a copy in between."""
        if self._replies.readinto(memory) < len(memory):
            raise ConnectionLost("the server closed the connection")

    def close(self) -> None:
        self._replies.close()
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
