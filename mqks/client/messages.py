"""What a consumer gets: messages, and updates of what its queue is bound to.

The one rule: nothing is decoded before someone asks for it.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mqks.client.errors import InvalidRequest, ProtocolViolation
from mqks.client.requests import decoded, is_number

Settle = Callable[["Message", bytes], None]


class Message:
    """One delivery. Made by a consumer."""

    __slots__ = ("_event", "_id", "_settle", "consumer_id", "data")

    def __init__(
        self,
        consumer_id: bytes,
        message_id: bytes,
        event: bytes,
        data: bytes,
        settle: Settle | None,
    ) -> None:
        self.consumer_id = consumer_id
        """The consumer id that it was delivered to; a new one after each reconnect."""
        self.data = data
        """The bytes as they were published."""
        self._id = message_id
        self._event = event  # as on the wire: event=NAME[,retry=N]
        self._settle = settle

    @property
    def id(self) -> str:
        return decoded(self._id)

    @property
    def event(self) -> str:
        return decoded(self._split_event()[0])

    @property
    def retry(self) -> int:
        """How often it was delivered before and came back."""
        return self._split_event()[1]

    def _split_event(self) -> tuple[bytes, int]:
        name, comma, retry = self._event[len(b"event=") :].rpartition(b",retry=")
        return (name, int(retry)) if comma and is_number(retry) else (self._event[6:], 0)

    @property
    def text(self) -> str:
        """The data as UTF-8; raises UnicodeDecodeError."""
        return self.data.decode()

    def json(self) -> Any:
        """The data as JSON; raises ValueError, mostly a json.JSONDecodeError."""
        try:
            return json.loads(self.data)
        except RecursionError:
            raise ValueError("the JSON is nested too deeply") from None

    def ack(self) -> None:
        """It is dealt with. Sent together with other acks, a moment later.

        The first ack or reject counts. After a reconnect it goes nowhere, since the server has
        taken the message back. Raises InvalidRequest where the consumer has no manual ack.
        """
        self._settle_once(b"ack")

    def reject(self) -> None:
        """Put it back at the tail of its queue; otherwise as `ack`."""
        self._settle_once(b"reject")

    def _settle_once(self, action: bytes) -> None:
        settle, self._settle = self._settle, settled
        if settle is None:
            self._settle = None
            raise InvalidRequest("this consumer was started without manual_ack")
        settle(self, action)

    def process(self) -> "Processing":
        """`async with` or `with`: acks at the end, rejects on an exception, which goes on."""
        if self._settle is None:
            raise InvalidRequest("this consumer was started without manual_ack")
        return Processing(self)

    def __repr__(self) -> str:
        return f"<Message {self.id} event={self.event} retry={self.retry} {self.data[:40]!r}>"


def settled(message: Message, action: bytes) -> None:
    """Stands in a message that is settled: doing so again does nothing."""


class Processing:
    """A message while it is worked on; a context manager of both kinds."""

    __slots__ = ("_message",)

    def __init__(self, message: Message) -> None:
        self._message = message

    def __enter__(self) -> Message:
        return self._message

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self._message.ack()
        else:
            self._message.reject()

    async def __aenter__(self) -> Message:
        return self._message

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self.__exit__(kind, error, trace)


@dataclass(frozen=True, slots=True)
class Update:
    """What a queue is bound to now, and its delete rule."""

    queue: str
    events: list[str]
    delete_when_unused: float | bool
    """Seconds; True: at once; False: no rule."""

    @classmethod
    def parse(cls, text: bytes) -> "Update":
        """From what follows `--update` on the wire. Raises ProtocolViolation."""
        queue, *words = decoded(text).split(" ")
        rule: float | bool = False
        for word in words:
            flag, equals, seconds = word.partition("=")
            if flag == "--delete-queue-when-unused":
                try:
                    rule = float(seconds) if equals else True
                except ValueError:
                    raise ProtocolViolation(f"the peer sent {word[:80]!r} for a rule") from None
        return cls(queue, [word for word in words if not word.startswith("--")], rule)
