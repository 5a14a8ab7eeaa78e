"""Every exception MQKS raises on purpose.

    MqksError                  70
    ├── BadRequest             the request gets an error reply, the connection stays open
    │   ├── NotAllowed         the user has no permission, or has not authenticated
    │   ├── Expelled           the connection is closed after the reply
    │   │   └── Draining       because the server drains
    │   ├── LimitExceeded      the request would exceed a limit
    │   │   └── LineTooLong    (and Expelled) the line is longer than line_bytes_max
    │   ├── QueuePaused        the publishes of a queue are paused
    │   │   └── PublishesWait  until when who can waits
    │   ├── ReadOnly           the server is read-only
    │   └── Unwritable         the journal cannot be written at the moment
    │       └── DiskFull       because the disk is full
    ├── ConfigurationError     78  a setting is unknown, invalid or unsafe
    ├── DatabaseLocked         69  another process serves this database file
    ├── DatabaseUnreachable    69  there is no connection to the PostgreSQL database
    ├── AddressUnavailable     69  the server cannot listen on the address
    ├── SchemaTooNew           65  a newer MQKS wrote this database file
    ├── JournalDamaged         65  the checksums of the journal do not match
    ├── InspectionFailed       65  a queue or file to be inspected is missing or unreadable
    ├── ImportFailed           65  a line to be imported is invalid, or conflicts with the server
    ├── CannotWrite            73  an output file exists, or cannot be created
    ├── BenchFailed            69  the server to be measured does not answer, or answers wrongly
    ├── JournalFailed          74  the journal could not be written
    ├── JournalReverted        76  the database has lost commits that it had confirmed
    ├── ClaimLost              77  another process has taken over the journal
    ├── BadData                65  the input of a command cannot be published
    ├── TimedOut               75  a command has waited too long
    └── ClientError            70  raised by clients, see mqks.client.errors
        ├── InvalidRequest     65  the protocol cannot carry the arguments
        ├── RequestFailed      65  the server's error reply
        ├── ConnectionLost     69  the server does not answer
        ├── ProtocolViolation  69  the peer is not an MQKS server
        └── ReplyTimeout       75  no answer in time

The one rule: the message is a single line for the person who must act on it. The number is the
exit code when the exception ends the process, as in BSD's sysexits.h.
"""

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

Limit = Literal[
    "connections_max",
    "connections_per_address_max",
    "unauthenticated_max",
    "line_bytes_max",
    "name_bytes_max",
    "metadata_bytes_max",
    "queues_max",
    "schedules_max",
    "batches_max",
    "batches_bytes_max",
    "rename_max",
    "traces_max",
    "queue_messages_max",
    "messages_max",
    "bindings_per_queue_max",
    "consumers_per_connection_max",
    "reads_waiting_max",
    "receives_waiting_max",
    "results_max",
    "result_bytes_max",
    "results_bytes_max",
    "results_keep_s_max",
    "transaction_max",
    "tails_max",
    "tails_per_connection_max",
    "logins_waiting_max",
    "user_connections_max",
    "user_queues_max",
    "user_queue_bytes_max",
    "unhandled_bytes_max",
    "unsent_bytes_max",
    "unacked_bytes_max",
]
"""Limits at which a request or connection is refused, or deliveries pause. Each has a counter."""


class MqksError(Exception):
    """The base class. Raised itself, it means a fault inside MQKS."""

    exit_code: ClassVar[int] = 70

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


class BadRequest(MqksError):
    """A request that gets an error reply and changes nothing."""


class NotAllowed(BadRequest):
    """The user has no permission for the request, or the connection is not authenticated."""


class Expelled(BadRequest):
    """The connection is closed after the error reply."""


class Draining(Expelled):
    """A connection that comes while the server drains."""

    def __init__(self) -> None:
        super().__init__("the server drains: it lets nobody in")


class LimitExceeded(BadRequest):
    """A request that would exceed a limit."""

    def __init__(self, limit: Limit, reason: str) -> None:
        super().__init__(reason)
        self.limit = limit


class LineTooLong(LimitExceeded, Expelled):
    """A line longer than `line_bytes_max`."""


class QueuePaused(BadRequest):
    """A publish to a queue whose publishes are paused."""


class PublishesWait(QueuePaused):
    """A publish to a queue whose publishes wait until it is resumed. For those that cannot wait it
    is an error like any other."""

    def __init__(self, reason: str, waiting: dict[Any, Callable[[], None]]) -> None:
        super().__init__(reason)
        self.waiting = waiting
        """Who waits there, and what to call when that ends."""


class ReadOnly(BadRequest):
    """A request that would add something while the server is read-only."""

    def __init__(self) -> None:
        super().__init__("the server is read-only (mqks read-only off)")


class Unwritable(BadRequest):
    """A request that must be durable while the journal cannot be written."""


class DiskFull(Unwritable):
    """The journal cannot be written because the disk is full."""

    state: ClassVar[str] = "disk full"
    """What publishers and `/readyz` get to know."""


class LowDiskSpace(DiskFull):
    """The disk has less free space than `disk_free_bytes_min`."""

    state = "low disk space"


class ConfigurationError(MqksError, exit_code=78):
    """A setting is unknown, invalid or unsafe; the message contains its place and the reason.
    `others` are further mistakes, a line each."""

    def __init__(self, message: str, *others: str) -> None:
        super().__init__(message)
        self.others = others


class DatabaseLocked(MqksError, exit_code=69):
    """Another process serves this database file."""


class DatabaseUnreachable(MqksError, exit_code=69):
    """There is no connection to the PostgreSQL database, or no primary among its hosts."""


class AddressUnavailable(MqksError, exit_code=69):
    """The server cannot listen on the address."""


class SchemaTooNew(MqksError, exit_code=65):
    """A newer MQKS wrote this database file."""


class JournalDamaged(MqksError, exit_code=65):
    """The checksums of the journal do not match, and `salvage` is off."""


class InspectionFailed(MqksError, exit_code=65):
    """A queue to be inspected does not exist, or the file cannot be read."""


class ImportFailed(MqksError, exit_code=65):
    """A line to be imported is invalid, or conflicts with the server; it changed nothing."""


class CannotWrite(MqksError, exit_code=73):
    """An output file exists, or cannot be created."""


class BenchFailed(MqksError, exit_code=69):
    """The server to be measured does not answer, or answers wrongly."""


class JournalFailed(MqksError, exit_code=74):
    """The journal could not be written; requests not yet confirmed can be lost."""


class JournalReverted(MqksError, exit_code=76):
    """The database has gone back to an earlier state, and lost commits that it had confirmed."""


class ClaimLost(MqksError, exit_code=77):
    """Another process has taken over the journal; requests not yet confirmed are not written."""


class BadData(MqksError, exit_code=65):
    """The input of a command cannot be published; the message contains its place."""


class TimedOut(MqksError, exit_code=75):
    """A command has waited too long."""


def reason(error: OSError) -> str:
    """The reason of an OSError, with its file if there is one."""
    text = error.strerror or str(error) or type(error).__name__
    return text if error.filename is None else f"{error.filename}: {text}"


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error about a name that does not exist: the nearest one that does."""
    from difflib import get_close_matches  # here, since most processes need none

    near = get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else ""
