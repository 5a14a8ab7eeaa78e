"""Subscribers: consumers of queues, whose messages go to the handlers of FastStream.

The one rule: what has no ack is the server's. A subscriber that stops gives back at once what no
handler has, and leaves its queue after the last ack.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Any

from faststream._internal.configs import (
    BrokerConfig,
    SubscriberSpecificationConfig,
    SubscriberUsecaseConfig,
)
from faststream._internal.constants import EMPTY
from faststream._internal.endpoint.subscriber import SubscriberSpecification, SubscriberUsecase
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.endpoint.utils import process_msg
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, SubscriberSpec

from mqks.client.async_client import AsyncConsumer
from mqks.client.errors import ClientError
from mqks.client.messages import Message
from mqks.client.requests import PolicyKeywords
from mqks.faststream.messages import MqksMessage, Returning, address, decode, parse
from mqks.faststream.publishing import MqksReplies


class MqksSubscriberConfig(SubscriberUsecaseConfig):
    @property
    def ack_policy(self) -> AckPolicy:
        """By default a handler that raises nacks: its message is delivered again."""
        chosen = (self._ack_policy, self._outer_config.ack_policy, AckPolicy.NACK_ON_ERROR)
        return next(each for each in chosen if each is not EMPTY)


class MqksSubscriberSpecification(
    SubscriberSpecification[BrokerConfig, SubscriberSpecificationConfig]
):
    """A channel for each event."""

    def __init__(self, *args: Any, queue: str, events: Iterable[str]) -> None:
        super().__init__(*args)
        self._queue = queue
        self._events = tuple(events)

    @property
    def queue(self) -> str:
        return f"{self._outer_config.prefix}{self._queue}"

    @property
    def events(self) -> list[str]:
        """As they are declared, with parameters."""
        return [f"{self._outer_config.prefix}{event}" for event in self._events]

    @property
    def channel_labels(self) -> list[str]:
        return [address(event).template for event in self.events]

    def get_schema(self) -> dict[str, SubscriberSpec]:
        labels, specs = self.channel_labels, {}
        for label in labels:
            key = self._channel_key(label, split=len(labels) > 1)
            payload = resolve_payloads(self.get_payloads())
            message = MessageSpec(title=f"{key}:Message", payload=payload)
            specs[key] = SubscriberSpec(self.description, Operation(message, None), None, label)
        return specs


class MqksSubscriber(SubscriberUsecase[Message]):
    _outer_config: Any
    specification: MqksSubscriberSpecification

    def __init__(
        self,
        config: SubscriberUsecaseConfig,
        specification: MqksSubscriberSpecification,
        calls: CallsCollection[Message],
        *,
        max_workers: int,
        returning: Returning,
        policy: PolicyKeywords,
        consuming: dict[str, Any],
    ) -> None:
        config.parser, config.decoder = self._parse, decode
        super().__init__(config, specification, calls)
        self._max_workers = max_workers
        self._returning = returning
        self._policy = policy
        self._consuming = consuming
        self._consumer: AsyncConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._last: StreamMessage[Message] | None = None
        self.has_failed = False
        """Whether the server has ended its consumer."""

    @property
    def queue(self) -> str:
        return self.specification.queue

    @property
    def bindings(self) -> list[str]:
        """Events, and masks, which have a `*`."""
        return [address(event).broker_address for event in self.specification.events]

    def _bound(self) -> dict[str, list[str]]:
        names = self.bindings
        masks = [name for name in names if "*" in name]
        return {"events": [name for name in names if name not in masks], "masks": masks}

    async def _parse(self, message: Message) -> MqksMessage:
        return await parse(message, self.specification.events, self._returning)

    async def declare(self) -> None:
        """Create the queue, bind it, and set its policy. Raises RequestFailed."""
        client = self._outer_config.client
        await client.subscribe(self.queue, **self._bound())
        if self._policy:
            await client.set_queue(self.queue, **self._policy)

    async def start(self) -> None:
        """Raises RequestFailed if the server refuses the consumer or the policy."""
        await super().start()
        await self.declare()
        if self.calls:  # Without, it takes nothing before it is asked.
            consumer = await self._opened()
            work = (self._work(consumer) for _ in range(self._max_workers))
            self._tasks = [*map(asyncio.create_task, work)]
        self.has_failed = False
        self._post_start()

    async def _opened(self) -> AsyncConsumer:
        if self._consumer is None:
            options = {**self._bound(), "meta": True, "create": True, **self._consuming}
            consumer = self._outer_config.client.consume(self.queue, **options)
            self._consumer = await consumer.__aenter__()
        return self._consumer

    async def _work(self, consumer: AsyncConsumer) -> None:
        try:
            async for message in consumer:
                try:
                    await self.consume(message)
                except asyncio.CancelledError as error:
                    task = asyncio.current_task()
                    if task is None or task.cancelling():
                        raise
                    # Not this worker was cancelled, but what its handler has waited for.
                    message.reject(reason=error, **self._returning)
        except ClientError as error:
            if self.has_failed or not self.running:
                return
            self.has_failed, self.running = True, False
            told = f"the consumer of {self.queue} has ended"
            self._log(logging.CRITICAL, told, self.get_log_context(None), error)
            if app := self._outer_config.context.get("app"):
                app.exit()

    async def stop(self) -> None:
        self.running = False
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.set_prefetch(1)  # While a handler has one, no more come.
            with suppress(TimeoutError, ClientError):
                while True:
                    (await consumer.receive(0)).release()
            consumer.stop()
        await super().stop()
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if consumer is not None:
            await consumer.__aexit__(None, None, None)

    async def get_one(self, *, timeout: float = 5.0) -> StreamMessage[Message] | None:
        """The next message, or None after so many seconds. The one before is acked, unless it was
        settled or the ack policy is MANUAL; the last one is for the caller to ack."""
        assert not self.calls, "a subscriber with a handler has no get_one"
        consumer = await self._opened()
        try:
            await self._ack_last()
            return await self._processed(await consumer.receive(timeout))
        except TimeoutError:
            return None

    async def __aiter__(self) -> AsyncIterator[StreamMessage[Message]]:
        """Each message is acked when the next one is asked for, as in `get_one`."""
        assert not self.calls, "a subscriber with a handler has no iterator"
        consumer = await self._opened()
        while True:
            await self._ack_last()
            try:
                message = await anext(consumer)
            except StopAsyncIteration:
                return
            yield await self._processed(message)

    async def _ack_last(self) -> None:
        last, self._last = self._last, None
        if last is not None and self.ack_policy is not AckPolicy.MANUAL:
            await last.ack()

    async def _processed(self, message: Message) -> StreamMessage[Message]:
        context = self._outer_config.context
        parser, decoder = self._get_parser_and_decoder()
        middlewares = (each(message, context=context) for each in self._broker_middlewares)
        self._last = found = await process_msg(
            message, middlewares=middlewares, parser=parser, decoder=decoder
        )
        assert found is not None
        return found

    def _make_response_publisher(self, message: StreamMessage[Message]) -> Iterable[MqksReplies]:
        return (MqksReplies(self._outer_config.producer, message.reply_to),)

    def get_log_context(self, message: StreamMessage[Message] | None) -> dict[str, str]:
        return {"queue": self.queue, "message_id": getattr(message, "message_id", "")}
