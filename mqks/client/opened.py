"""The open clients of this process: what a fork, the end of the process, and the loss of the last
reference to a client do with its connections.

The one rule: a child of a fork uses nothing of its parent's connections, and closes none of them.
"""

import atexit
import logging
import os
import sys
import time
import warnings
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet, ref

from mqks.client.errors import ConnectionLost
from mqks.client.outages import Outages

_log = logging.getLogger("mqks.client")

FORKED = "it belongs to the process that this one was forked from: start another one here"
STATE = "_session", "_connection", "_connections"
"""What a client has while it is open."""


class Opened:
    """The connections of an open client: its own, and those of its consumers, which end with it."""

    def __init__(self, client: Any) -> None:
        self._client = ref(client)
        self._made_at: tuple[str, int] = client._made_at
        self._is_told = False
        self._outages = Outages(time.monotonic)
        self.is_forsaken = False
        self.main: Any = None
        self.all = WeakSet[Any]()
        _opened.add(self)
        _watch_exit()

    def closed(self) -> None:
        """Its user has closed it."""
        _opened.discard(self)

    def leave_to_parent(self) -> None:
        """In the child of a fork: the client is as it was before it was opened."""
        for connection in list(self.all):
            connection.leave_to_parent(ConnectionLost(FORKED))
        if (client := self._client()) is not None:
            for name in STATE:
                client.__dict__.pop(name, None)
            client._replies = None

    def forsaken(self) -> None:
        """Nobody can use the client any more."""
        if self in _opened and self.main is not None:
            self.is_forsaken = True
            self.send_rest()
            self.warn()

    def warn(self) -> None:
        """Say that nobody has closed it. Raises ResourceWarning where warnings are errors."""
        if not self._is_told:
            self._is_told = True
            where = "%s:%d" % self._made_at  # noqa: UP031
            text = f"the client made at {where} was not closed: use `with`, or call close()"
            warnings.warn_explicit(text, ResourceWarning, *self._made_at)

    def started(self, connection: Any) -> None:
        self.main = self.main or connection
        connection.session.outages = self._outages
        self.all.add(connection)

    def send_rest(self) -> None:
        """Begin to send what is not sent yet; end then, if the client is forsaken."""

    def is_sent(self, deadline_s: float) -> bool:
        """Whether all is sent until then. The process ends."""
        return not self.main.session.has_unsent

    def end(self, deadline_s: float) -> None:
        """The process ends."""


def caller() -> tuple[str, int]:
    """The file and the line outside of this package that have called it."""
    frame = sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == "mqks":
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


_opened = set[Opened]()
_is_watching = False
"""Whether the end of a child of multiprocessing is waited for, which does without `atexit`."""


def _watch_exit() -> None:
    """Have `_exit` called at the end of this process, whatever it is."""
    global _is_watching
    process = sys.modules.get("multiprocessing.process")
    if process is not None and process.parent_process() is not None and not _is_watching:
        from multiprocessing.util import Finalize

        _is_watching = True
        Finalize(None, _exit, exitpriority=0)


def _exit() -> None:
    opened = [each for each in _opened if each.main is not None]
    _opened.clear()
    if not opened:
        return
    for each in opened:
        each.send_rest()
    limit_s = max(each.main._options.close_timeout_s for each in opened)
    deadline_s = time.monotonic() + limit_s
    with ExitStack() as warning:
        for each in opened:
            if not each.is_sent(deadline_s):
                told = "client made at %s:%d: published messages may be lost, not sent in %g s: %s"
                _log.error(told, *each._made_at, limit_s, each.main.session.reason)
            each.end(deadline_s)
            warning.callback(each.warn)


def _in_child() -> None:
    global _is_watching
    opened, _is_watching = [*_opened], False
    _opened.clear()
    for each in opened:
        each.leave_to_parent()


atexit.register(_exit)
os.register_at_fork(after_in_child=_in_child)
