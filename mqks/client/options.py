"""What a caller may choose about a client. The one rule: everything that could grow has a limit."""

import os
import re
import socket
import ssl
from dataclasses import dataclass, replace

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Seconds, bytes and counts of one client and each of its consumers."""

    timeout_s: float = 30.0
    """How long a call waits for its answer, reconnects included; math.inf waits for ever."""
    connect_timeout_s: float = 10.0
    """How long the first connection may take, and each later attempt."""
    connect_again: bool = True
    """Whether a first connection that fails is tried again within that time."""
    close_timeout_s: float = 5.0
    """How long leaving waits for what is still on its way."""
    keep_alive_s: float = 15.0
    """Silence after which a ping is sent; after as much again the connection counts as lost."""
    reconnect_min_s: float = 0.05
    reconnect_max_s: float = 5.0
    """The delay between attempts doubles from the first to the second, each with jitter."""
    in_flight_max: int = 10_000
    """Requests that wait for their answer; beyond it callers wait for room."""
    in_flight_bytes_max: int = 16 * MIB
    """The same in bytes, with what is not sent yet counted."""
    outbox_bytes_max: int = MIB // 4
    """Bytes gathered for the next write; beyond it publishers wait."""
    buffer_bytes_max: int = MIB
    """Bytes of messages and updates a consumer holds unhandled; beyond it its connection is not
    read."""
    line_bytes_max: int = MIB
    """The longest request; the server's limit of the same name."""
    reply_bytes_max: int = 64 * MIB
    """The longest reply; an update names all events of a queue in one line."""
    client_name: str = ""
    """What the server calls this client in its log and in `mqks inspect connections`."""
    ssl_context: ssl.SSLContext | None = None
    """For `mqkss://`; without one, the system's certificate authorities are trusted."""


def named(options: Options, client_name: str | None) -> Options:
    """The same options with a name of the client, if there is one."""
    return replace(options, client_name=client_name) if client_name else options


def default_name(program: str) -> str:
    """What a program calls itself where nobody gave it a name: PROGRAM@HOST:PID."""
    host = socket.gethostname()
    return re.sub(r"[^\w.@:-]+", "-", f"{program}@{host}:{os.getpid()}").lstrip("-")[:200]
