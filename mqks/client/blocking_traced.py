"""The blocking client with spans.

Generated from `async_traced.py` by `python -m tools.unasync`: edit that file.

The one rule: what a span says is decided in `tracing.py`.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Unpack

from mqks.client import requests
from mqks.client.blocking import BlockingClient, BlockingConsumer
from mqks.client.blocking_connection import Lock
from mqks.client.errors import InvalidRequest
from mqks.client.keywords import check, strict
from mqks.client.messages import Message
from mqks.client.options import Options
from mqks.client.session import ConsumerSession
from mqks.client.tracing import Tracing, replying
from mqks.client.urls import Urls


@strict("publish")
class TracedClient(BlockingClient):
    """A client whose publishes have spans, and whose messages carry them."""

    def __init__(self, url: Urls | None, options: Options) -> None:
        super().__init__(url, options)
        self._tracing = Tracing(self._address, self._options.client_name)

    def publish(
        self,
        event: str,
        data: requests.Data,
        *,
        confirm: bool = False,
        id: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
        **terms: Unpack[requests.Terms],
    ) -> str:
        check(terms, BlockingClient.publish)
        requests.name(event), requests.publish_flags(terms)  # What is wrong raises before the span.
        with self._tracing.publish(event, terms.get("meta")) as publishing:

            def publish(terms: requests.Terms) -> str:
                return super(TracedClient, self).publish(
                    event,
                    data,
                    confirm=confirm,
                    id=id,
                    once=once,
                    mandatory=mandatory,
                    timeout_s=timeout_s,
                    **terms,
                )

            message_id = None
            with suppress(InvalidRequest):
                message_id = publish({**terms, "meta": publishing.meta})
            if message_id is None:  # The line may be short enough without a trace.
                message_id = publish(terms)
            publishing.has_id(message_id)
            return message_id

    def publish_batches(
        self,
        batches: Iterable[Iterable[tuple[str, requests.Data]]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
        **terms: Unpack[requests.Terms],
    ) -> int:
        requests.publish_flags(terms)
        with self._tracing.publish_many(terms.get("meta")) as publishing:

            def counted() -> Iterator[Iterable[tuple[str, requests.Data]]]:
                for messages in batches:
                    yield publishing.counted(messages)

            carried: requests.Terms = {**terms, "meta": publishing.meta}
            return super().publish_batches(
                counted(),
                id_prefix=id_prefix,
                once=once,
                mandatory=mandatory,
                timeout_s=timeout_s,
                **carried,
            )

    def reply(
        self,
        message: Message,
        data: requests.Data = None,
        *,
        error: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        with replying(message):
            super().reply(message, data, error=error, timeout_s=timeout_s)

    def consume(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        auto_ack: bool = False,
        delete_when_unused: float | bool = False,
        prefetch: int | None = None,
        backoff: requests.Backoff | None = None,
        meta: bool = False,
        **bindings: Unpack[requests.Bindings],
    ) -> "TracedConsumer":
        arguments = requests.consume(
            queue,
            events,
            auto_ack=auto_ack,
            delete_when_unused=delete_when_unused,
            prefetch=prefetch,
            backoff=backoff,
            meta=True,  # Traces are in the attributes.
            **bindings,
        )
        return TracedConsumer(self, queue, arguments, self._tracing)


@strict()
class TracedConsumer(BlockingConsumer):
    """A consumer whose messages have spans."""

    def __init__(
        self, client: TracedClient, queue: str, arguments: bytes, tracing: Tracing
    ) -> None:
        super().__init__(client, queue, arguments)
        self._tracing = tracing

    def _new_session(self, lock: Lock) -> ConsumerSession:
        session = super()._new_session(lock)
        session.message_type = self._tracing.message_type(self.queue)
        return session

    def _next(self, timeout_s: float | None) -> Message:
        message = super()._next(timeout_s)
        self._tracing.consumed(self.queue, 1)
        return message

    def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> Iterator[list[Message]]:
        for batch in super().batches(count_max, timeout_s):
            self._tracing.consumed(self.queue, len(batch))
            yield batch

    def ack(self, messages: Iterable[Message]) -> None:
        if isinstance(messages, Message):
            super().ack(messages)  # It says what is wrong.
        messages = list(messages)
        with self._tracing.ack_many(self.queue, messages):
            super().ack(messages)
