"""The exceptions of the client.

    MqksError
    ├── ConfigurationError      78  the URL is invalid
    └── ClientError             70
        ├── InvalidRequest      65  invalid arguments; nothing was sent (also a ValueError)
        ├── ConnectionLost      69  no connection before the timeout, or the client is closed
        ├── Stopped             70  the consumer was stopped
        ├── ReplyTimeout        75  no reply in time; whether the request was executed is unknown
        ├── RequestFailed       65  the server sent an error reply; `reason` is the cause
        │   ├── QueueMissing        there is no such queue
        │   ├── ConsumerReplaced    another connection uses the id of the consumer
        │   ├── PublishFailed       some messages of a publish_many; `failed` lists them
        │   └── AuthenticationFailed  the server refused the credentials
        ├── CallFailed          65  the called service raised an error
        ├── NoResult            65  a job has ended without a result
        └── ProtocolViolation   69  the peer is not an MQKS server

The number is the exit code of a command that ends with this error.

The one rule: the text of an error is a single line and never contains credentials.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mqks.errors import MqksError, did_you_mean


class ClientError(MqksError):
    """The base class of the errors of a client."""


class InvalidRequest(ClientError, ValueError, exit_code=65):
    """A name, data or a combination of arguments that the protocol does not allow."""


class ConnectionLost(ClientError, ConnectionError, exit_code=69):
    """No connection could be made before the timeout, or the client is closed."""


class Stopped(ClientError):
    """The consumer gives no more messages, since `stop` was called."""


class ReplyTimeout(ClientError, TimeoutError, exit_code=75):
    """No reply in time. The server may have executed the request, or may still execute it."""


class RequestFailed(ClientError, exit_code=65):
    """The server sent an error reply. `reason` is the cause, which the client requested from the
    server, or None if that failed. `mqks inspect error` and the log of the server show it too."""

    def __init__(self, message: str, error_id: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.error_id = error_id
        self.reason = reason

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}: {self.reason}" if self.reason else message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


class CallFailed(ClientError, exit_code=65):
    """A service replied to a call with an error. `kind` is the name of the exception it raised."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(" ".join(f"{kind}: {text}".split()))
        self.kind = kind


class NoResult(ClientError, exit_code=65):
    """A job has ended otherwise than by the ack of its message: `state` is dead, cancelled, gone
    or none, and `reason` tells why."""

    def __init__(self, id: str, state: str, reason: str) -> None:
        why = f": {reason}" if reason else ""
        super().__init__(f"the job {id} is {state if state != 'none' else 'not known'}{why}")
        self.state = state
        self.reason = reason


class Refused(NamedTuple):
    """One message of a `publish_many` that the server refused."""

    number: int
    """Its index in the given messages, from 0."""
    id: str
    error_id: str


class PublishFailed(RequestFailed):
    """The server refused some of the messages. The other ones, `confirmed`, are stored."""

    def __init__(self, confirmed: int, failed: Sequence[Refused]) -> None:
        first = failed[0]
        super().__init__(
            f"{len(failed)} messages were refused, {confirmed} are confirmed; "
            f"the first refused is number {first.number}, error {first.error_id}",
            first.error_id,
        )
        self.confirmed = confirmed
        self.failed = list(failed)


class QueueMissing(RequestFailed):
    """There is no such queue. The reason names the nearest one, if one `is_near`."""

    def __init__(self, queue: str, queues: Iterable[str], error_id: str) -> None:
        hint = did_you_mean(queue, queues)
        super().__init__("", error_id, f"there is no queue {queue}{hint}")
        self.is_near = bool(hint)

    def __str__(self) -> str:
        return str(self.reason)


class ConsumerReplaced(RequestFailed):
    """Another connection has ended this consumer, or consumes under its id."""


class AuthenticationFailed(RequestFailed):
    """The server refused the credentials, or requires credentials that the URL does not have."""

    def __init__(self, error_id: str, *, given: bool) -> None:
        if given:
            super().__init__(f"the server refused the credentials, error {error_id}", error_id)
        else:
            super().__init__(
                f"the server refused the connection, error {error_id}",
                error_id,
                "it requires credentials, as in mqks://USER:PASSWORD@HOST or mqks://TOKEN@HOST",
            )


class ProtocolViolation(ClientError, exit_code=69):
    """The peer violated the protocol; the client closed the connection."""
