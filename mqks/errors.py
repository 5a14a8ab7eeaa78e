"""Every exception MQKS raises on purpose.

    MqksError                  70
    ├── BadRequest             the request gets an error reply, the connection goes on
    │   ├── NotAllowed         the user may not do that, or has not said who it is
    │   ├── Expelled           the connection is closed after the reply
    │   ├── LimitExceeded      the request would pass one of the limits
    │   │   └── LineTooLong    (and Expelled) the line is longer than line_bytes_max
    │   └── Unwritable         what must last cannot be written for now
    │       └── DiskFull       for want of room
    ├── ConfigurationError     78  a setting is unknown, bad or unsafe
    ├── DatabaseLocked         69  another process serves this database
    ├── AddressUnavailable     69  the address cannot be listened on
    ├── SchemaTooNew           65  a newer MQKS wrote this database
    ├── JournalDamaged         65  the journal fails its checksums
    ├── InspectionFailed       65  what was asked for is not there or cannot be read
    ├── ImportFailed           65  a line to be imported is wrong, or does not fit what is there
    ├── CannotWrite            73  a file to be made is there already, or can't be made
    ├── BenchFailed            69  the server to be measured is not there, or answers wrongly
    ├── JournalFailed          74  the journal could not be written
    ├── ClaimLost              77  another process has taken the journal over
    ├── BadData                65  what a command is given to send cannot be sent
    ├── TimedOut               75  what a command waits for has not come in time
    └── ClientError            70  what clients raise, in mqks.client.errors
        ├── InvalidRequest     65  the wire cannot carry it
        ├── RequestFailed      65  the server's error reply
        ├── ConnectionLost     69  there is no server
        ├── ProtocolViolation  69  the peer is no MQKS server
        └── ConfirmTimeout     75  no answer in time

The one rule: the message is a single line for the person who has to act on it. The number is
the exit code when the exception ends the process, as in BSD's sysexits.h.
"""

from typing import ClassVar, Literal

Limit = Literal[
    "connections_max",
    "connections_per_address_max",
    "unauthenticated_max",
    "line_bytes_max",
    "name_bytes_max",
    "metadata_bytes_max",
    "queues_max",
    "queue_messages_max",
    "messages_max",
    "bindings_per_queue_max",
    "consumers_per_connection_max",
    "reads_waiting_max",
    "logins_waiting_max",
    "outboxes_bytes_max",
    "unacked_bytes_max",
]
"""The limits at which a request or a connection is refused, or consumers are held back; how often
is counted for each."""


class MqksError(Exception):
    """The root; by itself it tells of a fault inside MQKS."""

    exit_code: ClassVar[int] = 70

    def __init_subclass__(cls, exit_code: int | None = None) -> None:
        if exit_code is not None:
            cls.exit_code = exit_code


class BadRequest(MqksError):
    """A request that gets an error reply and changes nothing."""


class NotAllowed(BadRequest):
    """A request that this user may not make, or that nobody may before authentication."""


class Expelled(BadRequest):
    """What costs the connection: it is closed after the reply."""


class LimitExceeded(BadRequest):
    """A request that would pass one of the limits."""

    def __init__(self, limit: Limit, reason: str) -> None:
        super().__init__(reason)
        self.limit = limit


class LineTooLong(LimitExceeded, Expelled):
    """A line longer than `line_bytes_max`."""


class Unwritable(BadRequest):
    """A request that must last while nothing can be written."""


class DiskFull(Unwritable):
    """The same for want of room."""

    state: ClassVar[str] = "disk full"
    """What publishers and `/readyz` get to know."""


class LowDiskSpace(DiskFull):
    """The same: the disk has less free space than `disk_free_bytes_min`."""

    state = "low disk space"


class ConfigurationError(MqksError, exit_code=78):
    """A setting that is unknown, bad or unsafe; the message has its place and the reason. `others`
    are further mistakes, a line each."""

    def __init__(self, message: str, *others: str) -> None:
        super().__init__(message)
        self.others = others


class DatabaseLocked(MqksError, exit_code=69):
    """Another process serves this database."""


class AddressUnavailable(MqksError, exit_code=69):
    """The address cannot be listened on."""


class SchemaTooNew(MqksError, exit_code=65):
    """The database was written by a newer MQKS."""


class JournalDamaged(MqksError, exit_code=65):
    """The journal fails its checksums, and `salvage` is off."""


class InspectionFailed(MqksError, exit_code=65):
    """What was asked for is not there, or the file cannot be read."""


class ImportFailed(MqksError, exit_code=65):
    """A line to be imported is wrong, or does not fit what is there; nothing of it was done."""


class CannotWrite(MqksError, exit_code=73):
    """A file to be made is there already, or can't be made."""


class BenchFailed(MqksError, exit_code=69):
    """The server to be measured is not there, falls silent or answers wrongly."""


class JournalFailed(MqksError, exit_code=74):
    """The journal could not be written; what is not yet confirmed may be lost."""


class ClaimLost(MqksError, exit_code=77):
    """Another process has taken the journal over; what is not yet confirmed was not written."""


class BadData(MqksError, exit_code=65):
    """What a command is given to send cannot be sent; the message tells where it stands."""


class TimedOut(MqksError, exit_code=75):
    """What a command waits for has not come in time."""


def reason(error: OSError) -> str:
    """What the system had against it, with the file if it was one."""
    told = error.strerror or str(error) or type(error).__name__
    return told if error.filename is None else f"{error.filename}: {told}"
