"""What a work asks of a server: to be started, and to be spoken to in its own bytes.

The one rule: a server object holds settings alone, so that it can be handed to the processes of
the load programs; its process is held by `benchmarks.process.Running`.
"""

import shutil
import socket
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from benchmarks.flow import Flow, connect
from benchmarks.messages import Messages, Wrong

TALKERS = frozenset(
    {"talkers_100", "talkers_1000", "talkers_10k", "big_10k", "big_100k", "big_900k"}
)
"""The works whose load program tells a reply by a mark."""


class Server(ABC):
    """One kind of server in one setting.

    `name` is the column in the table, `refusal` the bytes that tell an error in its answers, and
    `scale` the part of a work's count it gets, for servers so slow that the whole count would take
    minutes.
    """

    name: str
    refusal: ClassVar[bytes]
    scale: float = 1.0
    is_cluster = False
    """It is several processes, and compared only when it is named."""
    skips: frozenset[str] = frozenset()
    """The works it cannot do, or that tell nothing about it."""

    # Its process

    @property
    @abstractmethod
    def program(self) -> str:
        """The executable it is started by."""

    @abstractmethod
    def command(self, directory: Path, port: int) -> list[str]:
        """Starts it with its data in `directory`, listening on `port` of this machine."""

    def missing(self) -> str | None:
        """Why it cannot run here, or None when it can."""
        return None if shutil.which(self.program) else f"{self.program} is not installed"

    def listening(self, log: Path, port: int) -> int | None:
        """The port it listens on, or None when it does not yet; `port` is the one proposed."""
        return port

    @abstractmethod
    def answers(self, sock: socket.socket) -> bool:
        """Pings it: whether it answers as a server that is ready."""

    # Its bytes

    def connect(self, port: int) -> socket.socket:
        """A connection over which requests can be sent."""
        return connect(port)

    @abstractmethod
    def declare(self, sock: socket.socket, queues: int, manual_ack: bool) -> None:
        """Makes so many durable queues that all get every message."""

    @abstractmethod
    def publisher(self, sock: socket.socket, messages: Messages, window: int | None = None) -> Flow:
        """Publishes the messages of one publisher, with at most `window` of them unconfirmed;
        without a window only the last is confirmed (if the server lets one choose)."""

    @abstractmethod
    def consumer(
        self, sock: socket.socket, messages: Messages, queue: int = 0, manual_ack: bool = False
    ) -> Flow:
        """Takes messages off a queue. With `manual_ack` each is acked once it has come, and the
        flow is done when the last ack was taken."""

    @abstractmethod
    def payloads(self, raw: bytes, payload_bytes: int) -> list[bytes]:
        """The payloads in what a consumer has received."""

    # Its answers, checked after the clock has stopped

    def check_no_refusal(self, raw: bytes) -> None:
        """Raises `Wrong` when an error is among the answers."""
        at = raw.find(self.refusal)
        if at >= 0:
            raise Wrong(f"refused: {raw[max(0, at - 40) : at + 100]!r}")

    def check_confirms(self, raw: bytes, messages: Messages, window: int | None) -> None:
        """Raises `Wrong` when a publisher got other answers than it should."""
        self.check_no_refusal(raw)
