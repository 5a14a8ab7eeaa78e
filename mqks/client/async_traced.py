"""The async client with spans. `blocking_traced.py` is the same for threads, generated from here.

`python -m tools.unasync` generates the other one. `connect` returns this client for options with
`tracing`.

The one rule: what a span says is decided in `tracing.py`.
"""

from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import suppress
from typing import Unpack

from mqks.client import requests
from mqks.client.async_client import AsyncClient, AsyncConsumer
from mqks.client.async_connection import Lock
from mqks.client.errors import InvalidRequest
from mqks.client.keywords import check, strict
from mqks.client.messages import Message
from mqks.client.options import Options
from mqks.client.session import ConsumerSession
from mqks.client.tracing import Tracing, replying
from mqks.client.urls import Urls


@strict("publish")
class TracedClient(AsyncClient):
    """A client whose publishes have spans, and whose messages carry them."""

    def __init__(self, url: Urls | None, options: Options) -> None:
        super().__init__(url, options)
        self._tracing = Tracing(self._address, self._options.client_name)

    async def publish(
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
        check(terms, AsyncClient.publish)
        requests.name(event), requests.publish_flags(terms)  # What is wrong raises before the span.
        with self._tracing.publish(event, terms.get("meta")) as publishing:

            async def publish(terms: requests.Terms) -> str:
                return await super(TracedClient, self).publish(
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
                message_id = await publish({**terms, "meta": publishing.meta})
            if message_id is None:  # The line may be short enough without a trace.
                message_id = await publish(terms)
            publishing.has_id(message_id)
            return message_id

    async def publish_batches(
        self,
        batches: AsyncIterable[Iterable[tuple[str, requests.Data]]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
        **terms: Unpack[requests.Terms],
    ) -> int:
        requests.publish_flags(terms)
        with self._tracing.publish_many(terms.get("meta")) as publishing:

            async def counted() -> AsyncIterator[Iterable[tuple[str, requests.Data]]]:
                async for messages in batches:
                    yield publishing.counted(messages)

            carried: requests.Terms = {**terms, "meta": publishing.meta}
            return await super().publish_batches(
                counted(),
                id_prefix=id_prefix,
                once=once,
                mandatory=mandatory,
                timeout_s=timeout_s,
                **carried,
            )

    async def reply(
        self,
        message: Message,
        data: requests.Data = None,
        *,
        error: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        with replying(message):
            await super().reply(message, data, error=error, timeout_s=timeout_s)

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
class TracedConsumer(AsyncConsumer):
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

    async def _next(self, timeout_s: float | None) -> Message:
        message = await super()._next(timeout_s)
        self._tracing.consumed(self.queue, 1)
        return message

    async def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[list[Message]]:
        async for batch in super().batches(count_max, timeout_s):
            self._tracing.consumed(self.queue, len(batch))
            yield batch

    def ack(self, messages: Iterable[Message]) -> None:
        if isinstance(messages, Message):
            super().ack(messages)  # It says what is wrong.
        messages = list(messages)
        with self._tracing.ack_many(self.queue, messages):
            super().ack(messages)
