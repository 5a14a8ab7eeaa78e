"""What a client raises on purpose.

    MqksError
    ├── ConfigurationError      78  the URL cannot be understood
    └── ClientError             70
        ├── InvalidRequest      65  refused before it reached the wire (a ValueError, too)
        ├── ConnectionLost      69  no connection within the time given, or the client is closed
        ├── ConfirmTimeout      75  no answer in time; whether it was done is not known
        ├── RequestFailed       65  the server's error reply: `reason` is the cause
        │   ├── ConsumerReplaced    another connection consumes under the id of the consumer
        │   ├── PublishFailed       some messages of a publish_many: `failed` names them
        │   └── AuthenticationFailed  the server does not take these credentials
        ├── CallFailed          65  the service that was called raised an error
        └── ProtocolViolation   69  the peer does not speak the protocol

The one rule: a message is a single line and never holds credentials. The number is the exit code
when the error ends a command.
"""

from collections.abc import Sequence
from typing import NamedTuple

from mqks.errors import MqksError


class ClientError(MqksError):
    """The root of what clients raise."""


class InvalidRequest(ClientError, ValueError, exit_code=65):
    """A name, data or a combination of arguments that the wire cannot carry."""


class ConnectionLost(ClientError, ConnectionError, exit_code=69):
    """There is no connection, and there was none within the time given; or the client is closed."""


class ConfirmTimeout(ClientError, TimeoutError, exit_code=75):
    """No answer in time. The request may have been carried out, or may yet be."""


class RequestFailed(ClientError, exit_code=65):
    """The server answered with an error. `reason` is the cause, which the client has asked for, or
    None without an answer. `mqks inspect error` and the server's log have it, too."""

    def __init__(self, message: str, error_id: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.error_id = error_id
        self.reason = reason

    def __str__(self) -> str:
        message = super().__str__()
        return f"{message}: {self.reason}" if self.reason else message


class CallFailed(ClientError, exit_code=65):
    """A service has answered a call with an error: `kind` is the name of what it raised there."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(" ".join(f"{kind}: {text}".split()))
        self.kind = kind


class Failed(NamedTuple):
    """One message of a `publish_many` that the server refused."""

    number: int
    """Its place in what was given, from 0."""
    id: str
    error_id: str


class PublishFailed(RequestFailed):
    """Some of many messages were refused; the other `confirmed` ones are safe."""

    def __init__(self, confirmed: int, failed: Sequence[Failed]) -> None:
        first = failed[0]
        super().__init__(
            f"{len(failed)} messages were refused, {confirmed} are confirmed; "
            f"the first refused is number {first.number}, error {first.error_id}",
            first.error_id,
        )
        self.confirmed = confirmed
        self.failed = list(failed)


class ConsumerReplaced(RequestFailed):
    """Another connection consumes under the id of this consumer, which has ended therefore."""


class AuthenticationFailed(RequestFailed):
    """The server refused the credentials, or the URL has none where the server needs some."""

    def __init__(self, error_id: str, *, given: bool) -> None:
        if given:
            super().__init__(f"the server refused the credentials, error {error_id}", error_id)
        else:
            super().__init__(
                f"the server refused the connection, error {error_id}",
                error_id,
                "it needs credentials, as in mqks://USER:PASSWORD@HOST or mqks://TOKEN@HOST",
            )


class ProtocolViolation(ClientError, exit_code=69):
    """The peer sent what is not in the protocol; the connection is given up."""
