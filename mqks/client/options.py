"""The options of a client. The one rule: everything that can grow has a limit."""

import os
import re
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mqks.client.keywords import strict

MIB = 1024 * 1024


@strict()
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Seconds, bytes and counts of one client and each of its consumers."""

    timeout_s: float = 30.0
    """How long a call waits for its reply, including reconnects; math.inf: forever."""
    connect_timeout_s: float = 10.0
    """How long the first connection, and each later attempt, may take."""
    connect_again: bool = True
    """Whether failed attempts of the first connection are repeated within that time."""
    close_timeout_s: float = 5.0
    """How long the end of the block waits for requests in flight."""
    keep_alive_s: float = 15.0
    """Time without data before a ping, and again before the connection counts as lost."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 1.0
    """The delay between attempts doubles from the first to the second, each with jitter."""
    in_flight_max: int = 10_000
    """Requests without a reply; above it, callers wait."""
    in_flight_bytes_max: int = 16 * MIB
    """Their bytes, including what is not sent yet."""
    outbox_bytes_max: int = MIB // 4
    """Bytes collected for the next write; above it, publishers wait."""
    buffer_bytes_max: int = MIB
    """Unhandled messages and updates of a consumer, in bytes; above it, its connection is not
    read."""
    line_bytes_max: int = MIB
    """The longest request; equal to the server's setting of the same name."""
    reply_bytes_max: int = 64 * MIB
    """The longest reply; an update names all events of a queue in one line."""
    client_name: str = ""
    """The name of the client in the server's log and in `mqks inspect connections`."""
    tracing: bool = False
    """Whether clients and services emit spans and metrics of OpenTelemetry, and messages carry
    their trace. Needs `mqks[otel]`."""
    json_default: Callable[[Any], Any] | None = None
    """Returns what to encode as JSON instead of a value of a type that the client does not know."""
    json_loads: Callable[[bytes], Any] | None = None
    """What `message.json()` calls with the data; by default `json.loads`."""
    ssl_context: ssl.SSLContext | None = None
    """For `mqkss://`; by default the system's certificate authorities are trusted."""


def named(options: Options, client_name: str | None) -> Options:
    """These options with a name of the client, if there is one."""
    return replace(options, client_name=client_name) if client_name else options


def default_name(program: str) -> str:
    """The default name of a service or command: PROGRAM@HOST:PID."""
    host = socket.gethostname()
    return re.sub(r"[^\w.@:-]+", "-", f"{program}@{host}:{os.getpid()}").lstrip("-")[:200]
