"""MQKS, Message Queue Kept Simple.

The one rule: importing it is cheap; the clients are loaded when they are first asked for.
"""

import sys
import warnings
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from mqks.version import __version__

if TYPE_CHECKING:
    from mqks import blocking as blocking
    from mqks.client.app import App
    from mqks.client.async_client import (
        AsyncBatch,
        AsyncClient,
        AsyncConsumer,
        AsyncJob,
        AsyncTail,
        connect,
    )
    from mqks.client.blocking import (
        BlockingBatch,
        BlockingClient,
        BlockingConsumer,
        BlockingJob,
        BlockingTail,
    )
    from mqks.client.errors import (
        AuthenticationFailed,
        CallFailed,
        ClientError,
        ConnectionLost,
        ConsumerReplaced,
        InvalidRequest,
        NoResult,
        ProtocolViolation,
        PublishFailed,
        QueueMissing,
        Refused,
        ReplyTimeout,
        RequestFailed,
        Stopped,
    )
    from mqks.client.messages import DeadLetter, JobState, Message, PeekedMessage, QueueUpdate
    from mqks.client.options import Options
    from mqks.client.requests import PublishedId, Unique
    from mqks.errors import ConfigurationError, MqksError

__all__ = [
    "App",
    "AsyncBatch",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncJob",
    "AsyncTail",
    "AuthenticationFailed",
    "BlockingBatch",
    "BlockingClient",
    "BlockingConsumer",
    "BlockingJob",
    "BlockingTail",
    "CallFailed",
    "ClientError",
    "ConfigurationError",
    "ConnectionLost",
    "ConsumerReplaced",
    "DeadLetter",
    "InvalidRequest",
    "JobState",
    "Message",
    "MqksError",
    "NoResult",
    "Options",
    "PeekedMessage",
    "ProtocolViolation",
    "PublishFailed",
    "PublishedId",
    "QueueMissing",
    "QueueUpdate",
    "Refused",
    "ReplyTimeout",
    "RequestFailed",
    "Stopped",
    "Unique",
    "__version__",
    "blocking",
    "connect",
]

_RENAMED = {
    "ConfirmTimeout": "ReplyTimeout",
    "Failed": "Refused",
    "Letter": "DeadLetter",
    "Peeked": "PeekedMessage",
    "Update": "QueueUpdate",
    "connect_blocking": "blocking.connect",
}
"""Names of 0.1, which still mean the same."""

_HOMES = {
    "mqks.client.app": ("App",),
    "mqks.client.async_client": (
        "AsyncBatch",
        "AsyncClient",
        "AsyncConsumer",
        "AsyncJob",
        "AsyncTail",
        "connect",
    ),
    "mqks.client.blocking": (
        "BlockingBatch",
        "BlockingClient",
        "BlockingConsumer",
        "BlockingJob",
        "BlockingTail",
    ),
    "mqks.client.messages": ("DeadLetter", "JobState", "Message", "PeekedMessage", "QueueUpdate"),
    "mqks.client.options": ("Options",),
    "mqks.client.requests": ("PublishedId", "Unique"),
    "mqks.errors": ("ConfigurationError", "MqksError"),
}


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"mqks.{name} is now mqks.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return attrgetter(_RENAMED[name])(sys.modules[__name__])
    if name == "blocking":
        return import_module("mqks.blocking")
    if name in __all__:
        homes = (home for home, names in _HOMES.items() if name in names)
        return getattr(import_module(next(homes, "mqks.client.errors")), name)
    raise AttributeError(f"module 'mqks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
