"""Notifications to the service manager: the protocol of sd_notify(3).

The one rule: a notification is true when it is sent. READY=1 means that clients can connect, and
WATCHDOG=1 that the journal commits, or has nothing to commit.
"""

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic, monotonic_ns

import anyio

from mqks import log
from mqks.errors import ConfigurationError

SEND_S = 1.0
"""Timeout for sending a datagram."""
START_STEP_S = 30.0
"""Interval at which a start that makes progress extends its timeout."""


class Notify:
    """Notifies the service manager named in `environ`, if there is one."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """Raises ConfigurationError if WATCHDOG_USEC is not a number."""
        name = environ.get("NOTIFY_SOCKET", "")
        # In an abstract name @ replaces the first byte, which is 0.
        self._address = f"\0{name[1:]}" if name.startswith("@") else name
        self.watchdog_s: float | None = None
        """Interval of the watchdog in seconds; None without one."""
        if environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid()):
            try:
                self.watchdog_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6 or None
            except ValueError as error:
                raise ConfigurationError(f"WATCHDOG_USEC: {error}") from None

    def tell(self, *assignments: str) -> None:
        """Send one datagram. A failure is logged: whether to continue or to end the server is up to
        the service manager."""
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
        """Enclose a reload. It has ended when the context ends, also if it failed and nothing
        changed."""
        self.tell("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns() // 1000}")
        try:
            yield
        finally:
            self.tell("READY=1")

    async def while_it_moves(
        self, assignment: str, every_s: float, progress: Callable[[], int | None]
    ) -> None:
        """Send this periodically, unless `progress` has not changed for two periods.

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
        """Extend the start timeout while the start makes progress, or has no steps to count."""
        extension = f"EXTEND_TIMEOUT_USEC={3 * START_STEP_S * 1e6:.0f}"
        await self.while_it_moves(extension, START_STEP_S, progress)

    async def feed_watchdog(self, progress: Callable[[], int | None]) -> None:
        """Notify the watchdog. One step may take as long as the watchdog's interval: if a sync, or
        the event loop itself, takes longer, the notifications stop."""
        if self.watchdog_s is not None:
            await self.while_it_moves("WATCHDOG=1", self.watchdog_s / 2, progress)
