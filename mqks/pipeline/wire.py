"""How the pipeline reaches a server, and how often it tries.

The one rule: a wire with which something went wrong is of no more use; a connection makes another.
"""

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mqks.client import urls
from mqks.client.errors import ConnectionLost
from mqks.client.options import Options
from mqks.client.wire import Wire

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


class Connection:
    """A wire that is made when it is needed, and again when it is lost; it pickles without."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.ahead: object = None
        """The request that was sent before its time, its reply not taken yet."""
        self._wire: Wire | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"server": self.server, "ahead": None, "_wire": None}

    def close(self) -> None:
        """Drop the wire; what comes next makes another."""
        wire, self._wire, self.ahead = self._wire, None, None
        if wire is not None:
            wire.close()

    def again(self, call: Callable[[Wire], T]) -> T:
        """Do it, on a new wire each time the old one is lost.

        Raises what the call raises, ConnectionLost when the server is away for longer than its
        retries last, and AuthenticationFailed when it refuses the credentials.
        """
        retries = self.server.retries
        for attempt in range(retries + 1):
            try:
                if self._wire is None:
                    self._wire = connected(self.server)
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


def connected(server: Server) -> Wire:
    """A wire that the server has greeted."""
    address = urls.parse(server.url)
    options = Options(
        timeout_s=server.connect_timeout_s,
        connect_timeout_s=server.connect_timeout_s,
        reply_bytes_max=HEADER_BYTES_MAX,
        client_name=address.client_name,
        ssl_context=ssl.create_default_context(cafile=server.ca) if server.ca else None,
    )
    wire = Wire(address, options)
    wire.greet(address.credentials, "us")
    wire.introduce()
    wire.settimeout(server.reply_timeout_s)
    return wire
