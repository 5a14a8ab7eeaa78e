"""Deliveries as messages of FastStream, and what it publishes as commands.

The one rule: headers are attributes of the message. Content type, correlation id and reply-to are
attributes too, under the names that every client uses.
"""

import sys
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, Self, TypedDict, Unpack

from faststream._internal.utils.path import Address, AddressSyntax, match_path
from faststream.exceptions import HandlerException
from faststream.message import StreamMessage, decode_message
from faststream.response import PublishCommand, PublishType, Response

from mqks.client.messages import Message
from mqks.client.requests import Backoff
from mqks.errors import did_you_mean

CONTENT_TYPE, CORRELATION_ID, REPLY_TO = "content-type", "correlation-id", "reply-to"
MASKS = AddressSyntax(
    replace_symbol="*",
    patch_regex=lambda regex: regex.replace(r"\*\*", ".*").replace(r"\*", "[^.]*"),
    param_regex="[^.]*",
)


@lru_cache(maxsize=4096)
def address(event: str) -> Address:
    """An event, a mask, or one with parameters, as in `logs.{level}`."""
    return Address(event, MASKS)


class PublishOptions(TypedDict, total=False):
    """Headers and correlation id, and the options of `client.publish`, except `meta`: its
    attributes are headers here."""

    headers: dict[str, str] | None
    correlation_id: str | None
    reply_to: str
    """The event of the reply."""
    id: str | None
    once: bool
    once_s: float | None
    mandatory: bool
    delay_s: float | None
    at: datetime | float | None
    ttl_s: float | None
    to: str | None
    priority: int | None
    key: str | None
    confirm: bool
    """True by default."""
    timeout_s: float | None


class Returning(TypedDict):
    """What applies to a message that its handler has failed on, if the policy of its queue does not
    say otherwise."""

    retries: int | None
    backoff: Backoff | None


class MqksMessage(StreamMessage[Message]):
    """A delivery. `raw_message` is that of the client, with `event`, `retry`, `priority`, `key` and
    `dead_letter`. Only the first ack, nack or reject counts."""

    returning = Returning(retries=None, backoff=None)

    async def ack(self) -> None:
        if self.committed is None:
            self.raw_message.ack()
        await super().ack()

    async def nack(
        self, *, delay_s: float | None = None, reason: str | BaseException | None = None
    ) -> None:
        """Deliver it again, after `delay_s` seconds or the backoff of its queue; or it is dead,
        after the retries of its queue. Its dead letter has the reason, by default the exception
        that is being handled. Raises InvalidRequest."""
        if self.committed is None:
            how: dict[str, Any] = {**self.returning}
            if delay_s is not None:
                how |= {"backoff": None, "delay_s": delay_s}
            self.raw_message.reject(reason=reason or _handled(), **how)
        await super().nack()

    async def reject(self, *, reason: str | BaseException | None = None) -> None:
        """It is dead. Its dead letter has the reason, as of `nack`."""
        if self.committed is None:
            self.raw_message.reject(dead=True, reason=reason or _handled())
        await super().reject()


def _handled() -> BaseException | None:
    error = sys.exception()
    return None if isinstance(error, HandlerException) else error


async def parse(
    message: Message, events: Iterable[str] = (), returning: Returning | None = None
) -> MqksMessage:
    """The values of the parameters in `events` are in its path."""
    headers, event = message.meta, message.event
    content_type, correlation_id = (
        headers.pop(CONTENT_TYPE, None),
        headers.pop(CORRELATION_ID, None),
    )
    parsed = MqksMessage(
        message,
        message.data,
        reply_to=headers.pop(REPLY_TO, ""),
        headers=headers,
        path=next(filter(None, (match_path(address(each).regex, event) for each in events)), None),
        content_type=content_type,
        correlation_id=correlation_id,
        message_id=message.id,
    )
    if returning is not None:
        parsed.returning = returning
    return parsed


async def decode(message: StreamMessage[Any]) -> Any:
    return decode_message(message)


class MqksPublishCommand(PublishCommand):
    """Raises TypeError for options that there are not."""

    def __init__(
        self,
        message: Any,
        event: str = "",
        *,
        publish_type: PublishType = PublishType.PUBLISH,
        wait_s: float | None = None,
        **options: Unpack[PublishOptions],
    ) -> None:
        terms: dict[str, Any] = {**options}
        super().__init__(
            message,
            destination=event,
            headers=terms.pop("headers", None),
            correlation_id=terms.pop("correlation_id", None),
            reply_to=terms.pop("reply_to", ""),
            _publish_type=publish_type,
        )
        self.wait_s = wait_s
        """How long a request waits for its reply."""
        self.terms = terms
        """Options of `client.publish`."""
        for word in terms.keys() - PublishOptions.__annotations__.keys():
            wrong = f"a publish has no option {word!r}"
            raise TypeError(wrong + did_you_mean(word, PublishOptions.__annotations__))

    @classmethod
    def request(cls, message: Any, event: str, wait_s: float | None, **options: Any) -> Self:
        kind = PublishType.REQUEST
        return cls(message, event, publish_type=kind, wait_s=wait_s, **options)

    @classmethod
    def from_cmd(cls, cmd: PublishCommand) -> "MqksPublishCommand":
        if isinstance(cmd, MqksPublishCommand):
            return cmd
        return cls(
            cmd.body,
            cmd.destination,
            publish_type=cmd.publish_type,
            headers=cmd.headers,
            correlation_id=cmd.correlation_id,
            reply_to=cmd.reply_to,
        )


class MqksResponse(Response):
    """What a handler returns to choose how it is published, as in `MqksResponse(17, priority=5)`.
    Raises TypeError."""

    def __init__(self, body: Any, **options: Unpack[PublishOptions]) -> None:
        told = MqksPublishCommand(body, **options)
        super().__init__(body, headers=told.headers, correlation_id=told.correlation_id)
        self._options = options

    def as_publish_command(self) -> MqksPublishCommand:
        options = self._options.copy()
        options |= {"headers": self.headers, "correlation_id": self.correlation_id}
        return MqksPublishCommand(self.body, **options)
