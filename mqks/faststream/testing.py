"""A test broker: handlers run in the test, without a server.

The one rule: who gets a message is decided as the server does it: each queue that is bound to its
event has a copy, which goes to one of its subscribers.
"""

import secrets
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock, MagicMock

import anyio
from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound

from mqks.client import requests
from mqks.client.messages import Message, MetaMessage
from mqks.faststream.broker import MqksBroker
from mqks.faststream.messages import MqksPublishCommand
from mqks.faststream.publishing import MqksProducer, MqksPublisher
from mqks.faststream.subscribing import MqksSubscriber
from mqks.protocol.masks import bound_matches


class TestMqksBroker(TestBroker[MqksBroker, EnterType], broker=MqksBroker):
    """`async with TestMqksBroker(broker): ...`. With `with_real` on a server; what nobody
    subscribes to goes to queues that are deleted at the end."""

    def create_publisher_fake_subscriber(
        self, broker: MqksBroker, publisher: MqksPublisher
    ) -> tuple[MqksSubscriber, bool]:
        if found := next(bound(self.brokers, publisher.event), None):
            return found, True
        queue, events = f"test.{secrets.token_hex(8)}", [publisher.event]
        return broker.subscriber(queue, events, delete_when_unused=True, persistent=False), False

    @contextmanager
    def _patch_producer(self, broker: MqksBroker) -> Generator[None, None, None]:
        config = broker.config.broker_config
        with change_producer(config, FakeProducer(config, self.brokers)):
            yield

    async def _fake_connect(self, broker: MqksBroker, *args: Any, **kwargs: Any) -> Any:
        consumer = AsyncMock(stop=MagicMock(), set_prefetch=MagicMock())
        consumer.receive.side_effect = TimeoutError
        consumer.__aenter__.return_value = consumer
        client = AsyncMock(consume=MagicMock(return_value=consumer))
        broker.config.broker_config.connected = client
        return client


class FakeProducer(MqksProducer):
    def __init__(self, config: Any, brokers: Sequence[MqksBroker]) -> None:
        super().__init__(config)
        self._brokers = brokers

    async def publish(self, cmd: MqksPublishCommand) -> str:
        message = await self._made(cmd)
        for subscriber in bound(self._brokers, cmd.destination, cmd.terms.get("to")):
            await subscriber.process_message(message)
        return message.id

    async def request(self, cmd: MqksPublishCommand) -> Message:
        message = await self._made(cmd)
        for subscriber in bound(self._brokers, cmd.destination):
            with anyio.fail_after(cmd.wait_s):
                result = await subscriber.process_message(message)
            cmd = MqksPublishCommand.from_cmd(result.as_publish_command())
            cmd.destination = "reply.test"
            return await self._made(cmd)
        raise SubscriberNotFound(f"no queue is bound to {cmd.destination}")

    async def _made(self, cmd: MqksPublishCommand) -> Message:
        """A delivery, as it comes from the server."""
        data, meta = await self.encoded(cmd)
        terms = {word: cmd.terms.get(word) for word in ("priority", "key")}
        flags = requests.flags("publish", {**terms, "meta": meta})  # In the order of a delivery.
        event = b"event=%b,retry=0" % requests.name(cmd.destination)
        event += b"".join(flag.replace(b"--", b",", 1) for flag in flags)
        name = requests.name(cmd.terms.get("id") or secrets.token_hex(16))
        return MetaMessage(b"test", name, event, data, lambda message, action: None)


def bound(
    brokers: Iterable[MqksBroker], event: str, to: str | None = None
) -> Generator[MqksSubscriber, None, None]:
    """The first subscriber of each queue that gets this event."""
    queues = dict[str, list[MqksSubscriber]]()
    for broker in brokers:
        for each in broker.subscribers:
            if isinstance(each, MqksSubscriber):
                queues.setdefault(each.queue, []).append(each)
    name = requests.name(event)
    for queue, subscribers in queues.items():
        masks = [requests.name(mask) for each in subscribers for mask in each.bindings]
        if queue == to if to else any(bound_matches(mask, name) for mask in masks):
            yield subscribers[0]
