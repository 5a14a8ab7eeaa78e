"""What a transaction of a client gathers, until its end sends it.

The one rule: nothing is sent before the end, so that other requests of the client go on meanwhile.
"""

from collections.abc import Callable
from typing import Any, Unpack

from mqks.client import requests
from mqks.client.errors import InvalidRequest
from mqks.client.keywords import strict
from mqks.client.messages import Message, Settle, settled


@strict("reject")
class Step:
    """Requests of a client that take effect together."""

    def __init__(self, client: Any, timeout_s: float | None) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._new_id: Callable[[], bytes] = client._session.new_id
        self._to_json: Callable[[object], str] = client._session.to_json
        self._lines: list[bytes] = []
        self._settled: list[tuple[Message, Settle]] = []

    def publish(
        self,
        event: str,
        data: requests.Data,
        *,
        id: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        **terms: Unpack[requests.Terms],
    ) -> str:
        """Publish a message with the step and return its id. The options are those of the
        client's `publish`."""
        message_id = self._new_id() if id is None else requests.name(id)
        form = requests.PUBLISH[False, once, mandatory] + requests.publish_flags(terms)
        escaped, raw = requests.published(data, self._to_json)
        line = b"%b%b%b %b %b\n" % (message_id, form, escaped, requests.name(event), raw)
        self._lines.append(line)
        return requests.decoded(message_id)

    def ack(self, message: Message, *, result: requests.Data = None) -> None:
        """Ack a message with the step, as `Message.ack`. Raises InvalidRequest if it is acked or
        returned already. If its consumer does not hold it any more, the step is refused."""
        self._take(message).ack(result=result)

    def reject(self, message: Message, **how: Any) -> None:
        """Reject a message with the step; `how` is that of `Message.reject`."""
        self._take(message).reject(**how)

    def release(self, message: Message, *, delay_s: float | None = None) -> None:
        """Release a message with the step."""
        self._take(message).release(delay_s=delay_s)

    def move(self, source: str, to: str, **choice: Unpack[requests.Choice]) -> None:
        """Move messages that are ready when the step begins; see the client's `move`."""
        self._ask(requests.confirmed("move", source, to, **choice))

    def redrive(
        self, queue: str, *, to: str | None = None, **choice: Unpack[requests.Choice]
    ) -> None:
        """Move dead letters back with the step; see the client's `redrive`."""
        self._ask(requests.confirmed("redrive", queue, to=to, **choice))

    def trim(self, queue: str, seq: int, *, epoch: str | None = None) -> None:
        """Drop messages with numbers below `seq` with the step; see the client's `trim`."""
        self._ask(requests.confirmed("trim", queue, requests.sequence_number(seq), epoch=epoch))

    def open_batch(
        self,
        name: str,
        *,
        then: requests.Follows | None = None,
        on_dead: requests.Follows | None = None,
        for_s: float | None = None,
    ) -> None:
        """Open a batch with the step, before what is published to it; see the client's
        `open_batch`."""
        for request in [*requests.open_batch(name, then, on_dead, for_s)]:
            self._ask(request)

    def close_batch(self, name: str, *, discard: bool = False) -> None:
        """Close a batch with the step; see the client's `close_batch`."""
        self._ask(requests.confirmed("close_batch", name, discard=discard))

    def _ask(self, request: bytes) -> None:
        self._lines.append(requests.line(self._new_id(), request.replace(b" --confirm", b"", 1)))

    def _take(self, message: Message) -> Message:
        settle = message._settle
        if settle is settled:
            raise InvalidRequest(f"the message {message.id} is acked or returned already")
        if settle is not None:
            self._settled.append((message, settle))
            settle(message, b"")  # Its consumer knows that it is settled.
            message._settle = self._add
        return message

    def _add(self, message: Message, action: bytes) -> None:
        told = self._new_id(), action, message.consumer_id, message._id
        self._lines.append(requests.settling(*told))

    def _undo(self) -> None:
        """Its messages may be acked or returned otherwise."""
        for message, settle in self._settled:
            message._settle = settle
