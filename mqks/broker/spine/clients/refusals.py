"""Turns an error into its reply.

The one rule: the reply contains only an id; the reason goes to the log and the database. Only a
server that nobody can ask for it tells it.
"""

import re
from collections import deque
from collections.abc import Callable
from typing import Final

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import ErrorRecord, Pending
from mqks.broker.spine.queue.shared import Counters
from mqks.errors import BadRequest, Draining, Expelled, Limit, LimitExceeded, Unwritable
from mqks.limits import ERRORS_BURST_US, REASON_CHARACTERS_MAX, STRANGER_ERRORS_MAX
from mqks.protocol import replies
from mqks.protocol.requests import request_id_of
from mqks.users import STRANGER

HTTP: Final = re.compile(rb"[A-Z]+ /|(?i:host): |[^ ]* [a-z_]*[^ a-z_].* HTTP/\d")
"""How a request of HTTP begins: with a path, a URL, `host:port` or `*`, none of which is an action;
or the header that every browser sends."""
HELP: Final = b"help"
HELP_HINT: Final = b"begin each line with an id of your choice: x help, or x help publish"


class Refusals:
    """`new_error_id` returns a text and a time in microseconds. `on_error` logs a failed request,
    and returns whether it did: when there are many, it may omit some."""

    def __init__(
        self,
        pending: Pending,
        counters: Counters,
        limits_reached: dict[Limit, int],
        last_errors: deque[ErrorRecord],
        new_error_id: Callable[[], tuple[str, int]],
        on_error: Callable[[ErrorRecord], bool],
    ) -> None:
        self.pending = pending
        self._counters = counters
        self.limits_reached = limits_reached
        self._last_errors = last_errors
        self._new_error_id = new_error_id
        self._on_error = on_error
        self.unwritable = 0
        """Requests refused while nothing can be written. That state is logged, so `on_error` gets
        only the first of them."""

    def refuse(self, connection: Connection, line: bytes, failure: BadRequest) -> None:
        """Reply to a line that failed. After one of HTTP the connection is closed, so that the body
        of the request, which any web site may have chosen, is not executed."""
        if line == HELP:
            connection.write(replies.ok(HELP, HELP_HINT))
            return
        if isinstance(failure, LimitExceeded):
            self.limits_reached[failure.limit] += 1
        if HTTP.match(line):
            failure = Expelled(
                "this port does not speak HTTP: the web page, metrics and health are on http_port"
            )
        request_id = request_id_of(line)
        action = line.partition(b" ")[2].partition(b" ")[0]
        self.fail(connection, request_id, action, failure)

    def fail(
        self, connection: Connection, request_id: bytes, action: bytes, failure: BadRequest
    ) -> None:
        """Reply, and close the connection if the error requires it."""
        self.tell(connection, request_id, action, failure)
        if connection.permissions is STRANGER:
            connection.stranger_errors += 1
            if connection.stranger_errors >= STRANGER_ERRORS_MAX:
                failure = Expelled(f"{STRANGER_ERRORS_MAX} errors without authentication")
        if isinstance(failure, Expelled):
            # Not the exception itself: its traceback would keep the chunk in memory.
            connection.overrun, connection.expelled = False, True
            connection.lines, connection.handled = [], 0
            connection.chunks.clear()
            connection.look_again()

    def expel(self, connection: Connection, reason: str) -> None:
        """Close a connection for a reason that is not a single request."""
        self.fail(connection, b"-", b"", Expelled(reason))

    def tell(
        self, connection: Connection, request_id: bytes, action: bytes, failure: BadRequest
    ) -> None:
        # On a full disk each publish fails: the log says once that nothing can be written.
        self.unwritable += isinstance(failure, Unwritable)
        is_logged = isinstance(failure, Unwritable) and self.unwritable > 1
        record = self._record(
            connection.address, request_id, action, str(failure), connection, is_logged=is_logged
        )
        pause_us = record.time_us - connection.last_error_us
        if connection.first_error is None or pause_us > ERRORS_BURST_US:
            connection.first_error = record
        connection.last_error_us = record.time_us
        if not connection.closed:
            is_told = isinstance(failure, Draining)
            told = (b"-", record.id, record.reason) if is_told else (request_id, record.id)
            connection.write(replies.error(*told))

    def reply(self, address: str, reason: str, *, told: bool) -> bytes:
        """Record an error without a connection, and return its reply; `told`: with its reason."""
        record = self._record(address, b"-", b"", reason)
        return replies.error(b"-", record.id, reason if told else "")

    def _record(
        self,
        address: str,
        request_id: bytes,
        action: bytes,
        reason: str,
        connection: Connection | None = None,
        *,
        is_logged: bool = False,
    ) -> ErrorRecord:
        """Record an error under a new id. Errors of unauthenticated connections that are not logged
        are not written to the database either."""
        self._counters.errors += 1
        error_id, time_us = self._new_error_id()
        record = ErrorRecord(
            error_id,
            time_us,
            address,
            request_id[:256],
            action[:64],
            reason[:REASON_CHARACTERS_MAX],
            None if connection is None else connection.user,
            None if connection is None else connection.name,
        )
        is_known = connection is not None and connection.permissions is not STRANGER
        if is_logged or self._on_error(record) or is_known:
            self._last_errors.append(record)
            self.pending.add_error(record)
        return record
