"""Telling the service manager how the server fares: the protocol of sd_notify(3).

The one rule: what is told is true when it is told. READY=1 means that clients can connect, and
WATCHDOG=1 that the journal commits, or has nothing to commit.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, monotonic_ns

import anyio

from mqks.errors import ConfigurationError
from mqks.server import log

SEND_S = 1.0
"""How long a service manager may take to take a datagram."""
START_STEP_S = 30.0
"""A start that makes progress asks for more time this often."""


class Notify:
    """Tells whom `environ` names, or nobody."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigurationError when WATCHDOG_USEC is no number."""
        name = environ.get("NOTIFY_SOCKET", "")
        # An abstract name is written with @ in the place of its first byte, which is 0.
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self.watchdog_s: float | None = None
        """How often WATCHDOG=1 is expected, in seconds; None when it is not."""
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            try:
                self.watchdog_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6 or None
            except ValueError as error:
                raise ConfigurationError(f"WATCHDOG_USEC: {error}") from None

    def tell(self, *assignments: str) -> None:
        """One datagram. One that can't be sent is logged: whether to go on without us, or to end
        us, is up to the service manager."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(SEND_S)
                sender.connect(self._address)
                sender.send("\n".join(assignments).encode())
        except OSError as error:
            log.warning("not_notified", reason=error, notification=" ".join(assignments))

    @contextmanager
    def reloading(self) -> Iterator[None]:
        """Around everything that is loaded again; it has ended when the context ends, also when
        it has failed and all stays as it was."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.tell("READY=1")

    async def while_it_moves(
        self, assignment: str, every_s: float, progress: Callable[[], int | None]
    ) -> None:
        """Tell this again and again, unless `progress` has not changed for two periods.

        `progress` counts steps; it is None while there is nothing to do.
        """
        seen, seen_s = None, monotonic()
        while True:
            steps = progress()
            if steps is None or steps != seen:
                seen, seen_s = steps, monotonic()
            if monotonic() - seen_s < 2 * every_s:
                self.tell(assignment)
            await anyio.sleep(every_s)

    async def wait_for_start(self, progress: Callable[[], int | None]) -> None:
        """Ask for more time as long as the start makes progress, or does what has no steps."""
        extension = f"EXTEND_TIMEOUT_USEC={3 * START_STEP_S * 1e6:.0f}"
        await self.while_it_moves(extension, START_STEP_S, progress)

    async def feed_watchdog(self, progress: Callable[[], int | None]) -> None:
        """Tell that the server lives. One step may take as long as the watchdog's interval:
        whatever takes longer, a sync or the event loop itself, ends the feeding."""
        if self.watchdog_s is not None:
            await self.while_it_moves("WATCHDOG=1", self.watchdog_s / 2, progress)
