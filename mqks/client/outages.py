"""Losses of the connections of one client in the log: once for all that are lost together.

The one rule: a loss is told at once, its end when all connections that were lost are back.
"""

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger("mqks.client")


class Outages:
    """Any thread may call. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._lost: set[object] = set()
        """Sessions that were up, and are not up again."""
        self._since_s = 0.0
        self._server = ""
        """Where one of them is up again."""

    def lost(self, session: object, server: str, reason: str) -> None:
        """The connection of a session, which was up, has ended."""
        with self._lock:
            is_first = not self._lost
            self._lost.add(session)
            if is_first:
                self._since_s, self._server = self._clock(), ""
        if is_first:
            _log.warning("lost the connection to %s, connecting again: %s", server, reason)

    def back(self, session: object, server: str) -> None:
        """A session is up; an empty `server`: it has ended for good."""
        with self._lock:
            if session not in self._lost:
                return
            self._lost.discard(session)
            self._server = server or self._server
            if self._lost or not self._server:
                return
            lasted_s = self._clock() - self._since_s
        _log.info("connected again to %s after %.1f s", self._server, lasted_s)
