"""Where the records of the audit are logged: in the log, in syslog, or in a file.

The one rule: who writes a file or to syslog is a thread, with a bounded queue before it.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler, QueueListener, SysLogHandler, WatchedFileHandler
from math import inf
from queue import Queue
from time import monotonic
from typing import Final

from mqks import log
from mqks.audit import FAILED_LOGIN, LOGIN, AuditRecord
from mqks.errors import ConfigurationError
from mqks.limits import AUDIT_TOLD_MAX

SYSLOG: Final = "/dev/log"
MINUTE_S: Final = 60.0


class _AuditOutput(logging.Handler):
    """Says when it fails, at most once a minute."""

    _told_s = -inf

    def handleError(self, record: logging.LogRecord) -> None:
        now_s = monotonic()
        if now_s > self._told_s + MINUTE_S:
            self._told_s, error = now_s, sys.exc_info()[1]
            log.error("audit_failed", reason=str(error) or type(error).__name__)


class _File(_AuditOutput, WatchedFileHandler):
    """A file that is opened again when it was moved away."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError:
            self.handleError(record)


class _Syslog(_AuditOutput, SysLogHandler):
    ident = "mqks: "


class _Records(_AuditOutput, QueueHandler):
    """Those that wait for the thread."""


class _Listener(QueueListener):
    queue: Queue[logging.LogRecord | None]

    def enqueue_sentinel(self) -> None:
        self.queue.put(None)  # It may be full.


def tell(record: AuditRecord) -> None:
    """Log a record."""
    who, what = log.who(record.connection, record.user, record.client), log.text(record.what)
    requests = record.requests if record.requests > 1 else None
    if record.action == LOGIN:
        log.audit("login", **who, requests=requests)
    elif record.action == FAILED_LOGIN:
        log.audit("login_failed", logging.WARNING, **who, tried=what, requests=requests)
    else:
        log.audit(
            "changed",
            **who,
            action=record.action,
            what=what,
            count=record.count,
            requests=requests,
        )


@contextmanager
def audit_to(where: str, formatter: logging.Formatter) -> Iterator[None]:
    """Log records there: `log`, `syslog`, or the path of a file; `off` is as `log`.

    Raises ConfigurationError.
    """
    if where in ("log", "off"):
        yield
        return
    output: _AuditOutput
    try:
        output = (
            _Syslog(SYSLOG, SysLogHandler.LOG_AUTH)
            if where == "syslog"
            else _File(where, encoding="utf-8")
        )
    except OSError as error:
        raise ConfigurationError(f"audit: {where}: {error.strerror}") from None
    output.setFormatter(formatter)
    waiting = Queue[logging.LogRecord | None](AUDIT_TOLD_MAX)
    records, listener = _Records(waiting), _Listener(waiting, output)
    listener.start()
    log.AUDIT.propagate, log.AUDIT.handlers[:] = False, [records]
    log.AUDIT.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.AUDIT.propagate, log.AUDIT.handlers[:] = True, []
        listener.stop()
        output.close()
