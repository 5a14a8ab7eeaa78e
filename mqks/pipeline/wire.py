"""How the pipeline connects to a server, and how often it retries.

The one rule: after an error a wire is not used again; the connection opens another.
"""

import logging
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from mqks.client import urls
from mqks.client.errors import ConnectionLost
from mqks.client.options import Options
from mqks.client.wire import Wire

HEADER_BYTES_MAX = 16 * 1024 * 1024
"""Of a line: a page of `stats queues` has 1000 names."""
RETRY_MIN_S, RETRY_MAX_S = 0.1, 5.0

_log = logging.getLogger("mqks.pipeline")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """The address of the server, timeouts and retries; pickles, so that tasks can have it."""

    url: str | None = field(default=None, repr=False)
    """As in `mqks.client.urls`; the default is that of the driver, not of the task."""
    ca: str | None = None
    """A file with the certificate authorities to trust instead of the system's."""
    connect_timeout_s: float = 10.0
    reply_timeout_s: float = 60.0
    """Time without data after which a reply counts as lost."""
    retries: int = 10
    """Attempts to reconnect before a lost connection is an error; delays double up to 5 s."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", self.url or urls.default())


class QueueConnection:
    """Opens a wire when it is needed, and again when it is lost; pickles without it."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self.ahead: object = None
        """The request that was sent ahead, and whose reply was not read yet."""
        self._wire: Wire | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"server": self.server, "ahead": None, "_wire": None}

    def close(self) -> None:
        """Close the wire; the next call opens another."""
        wire, self._wire, self.ahead = self._wire, None, None
        if wire is not None:
            wire.close()

    def again(self, call: Callable[[Wire], T]) -> T:
        """Make the call, on a new wire each time the old one is lost.

        Raises what the call raises, ConnectionLost if the server cannot be reached within all
        retries, and AuthenticationFailed if it refuses the credentials.
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
                _log.warning("reconnecting to the server in %g s: %s", delay_s, error)
                time.sleep(delay_s)
            except BaseException:
                self.close()
                raise
        raise AssertionError("unreachable")


class Connected:
    """What has a connection, which the end of a `with` closes; a later call opens it again."""

    def __init__(self, connection: QueueConnection) -> None:
        self._connection = connection

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._connection.close()


def connected(server: ServerAddress) -> Wire:
    """A connected and authenticated wire."""
    options = Options(
        timeout_s=server.connect_timeout_s,
        connect_timeout_s=server.connect_timeout_s,
        reply_bytes_max=HEADER_BYTES_MAX,
        ssl_context=ssl.create_default_context(cafile=server.ca) if server.ca else None,
    )
    wire = Wire(server.url, options, greets=True).open()
    wire.settimeout(server.reply_timeout_s)
    return wire
