"""What is published: by the broker, by publishers, as replies and as requests.

The one rule: a publish returns when the server has stored the message, once, also if its confirm
was lost and it was sent again.
"""

import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast

from faststream._internal.configs import (
    BrokerConfig,
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
)
from faststream._internal.endpoint.publisher import PublisherSpecification, PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import CodecProto, DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import FeatureNotSupportedException, IncorrectState
from faststream.response import PublishCommand
from faststream.specification.asyncapi.utils import resolve_payloads
from faststream.specification.schema import Message as MessageSpec
from faststream.specification.schema import Operation, PublisherSpec

from mqks.client import requests
from mqks.client.async_client import AsyncClient
from mqks.client.messages import Message
from mqks.faststream.messages import (
    CONTENT_TYPE,
    CORRELATION_ID,
    REPLY_TO,
    MqksPublishCommand,
    PublishOptions,
    decode,
    parse,
)

ONCE_S = 3600.0
"""The most seconds in which a publish that is sent again is dropped; an answer is not awaited for
longer than half of it."""


@dataclass(kw_only=True)
class MqksBrokerConfig(BrokerConfig):
    once_s: float = ONCE_S
    connected: AsyncClient | None = None

    @property
    def client(self) -> AsyncClient:
        if self.connected is None:
            raise IncorrectState("the broker is not connected: await broker.connect() first")
        return self.connected


class MqksProducer(ProducerProto[MqksPublishCommand]):
    def __init__(self, config: MqksBrokerConfig) -> None:
        self._config = config
        self.codec: CodecProto = config.broker_codec or DefaultCodec()
        self._parser = ParserComposition(config.broker_parser, parse)
        own = self.codec.decode if config.broker_codec else decode
        self._decoder = ParserComposition(config.broker_decoder, own)

    async def encoded(self, cmd: MqksPublishCommand) -> tuple[bytes, dict[str, str]]:
        """The data and the attributes."""
        data, content_type = await self.codec.encode(cmd.body, self._config.fd_config._serializer)
        told = {
            CONTENT_TYPE: content_type,
            CORRELATION_ID: cmd.correlation_id,
            REPLY_TO: cmd.reply_to,
        }
        return data, cmd.headers | {key: value for key, value in told.items() if value}

    async def publish(self, cmd: MqksPublishCommand) -> str:
        data, meta = await self.encoded(cmd)
        terms = {"confirm": True, **cmd.terms}
        if not terms.keys() & {"id", "once", "once_s"}:
            terms |= {"id": secrets.token_hex(16), "once_s": self._config.once_s}
        return await self._config.client.publish(cmd.destination, data, meta=meta, **terms)

    async def request(self, cmd: MqksPublishCommand) -> Message:
        data, meta = await self.encoded(cmd)
        return await self._config.client.call(cmd.destination, data, cmd.wait_s, meta=meta)

    async def publish_batch(self, cmd: MqksPublishCommand) -> None:
        raise FeatureNotSupportedException(
            "publish many with asyncio.gather: they are sent together"
        )


class MqksReplies(FakePublisher):
    """Publishes what a handler returns to whom its message names."""

    def __init__(self, producer: ProducerProto[Any], event: str) -> None:
        super().__init__(producer=producer)
        self._event = event

    def patch_command(self, cmd: PublishCommand) -> MqksPublishCommand:
        reply = MqksPublishCommand.from_cmd(super().patch_command(cmd))
        reply.destination = self._event
        return reply


class MqksPublisherSpecification(
    PublisherSpecification[BrokerConfig, PublisherSpecificationConfig]
):
    def __init__(
        self, outer: BrokerConfig, config: PublisherSpecificationConfig, event: str
    ) -> None:
        super().__init__(outer, config)
        self._event = event

    @property
    def event(self) -> str:
        return f"{self._outer_config.prefix}{self._event}"

    @property
    def name(self) -> str:
        return self.config.title_ or f"{self.event}:Publisher"

    def get_schema(self) -> dict[str, PublisherSpec]:
        payload = resolve_payloads(self.get_payloads(), "Publisher")
        message = MessageSpec(title=f"{self.name}:Message", payload=payload)
        told = self.config.description_, Operation(message, None), None, self.event
        return {self.name: PublisherSpec(*told)}


class MqksPublisher(PublisherUsecase):
    """Publishes an event; what is returned by functions that it decorates, too."""

    _outer_config: Any
    specification: MqksPublisherSpecification

    def __init__(
        self,
        config: PublisherUsecaseConfig,
        specification: MqksPublisherSpecification,
        options: PublishOptions,
    ) -> None:
        super().__init__(config, specification)
        self._own = MqksPublishCommand(None, **options)
        flags = self._own.terms.keys() & requests.Terms.__annotations__.keys()
        requests.publish_flags(cast(Any, {flag: self._own.terms[flag] for flag in flags}))

    @property
    def event(self) -> str:
        return self.specification.event

    def _filled(self, cmd: MqksPublishCommand) -> MqksPublishCommand:
        """With what the publisher has and the command does not have."""
        own, new_id = self._own, self._outer_config.id_generator
        cmd.destination = cmd.destination or self.event
        cmd.add_headers(own.headers, override=False)
        cmd.correlation_id = cmd.correlation_id or own.correlation_id or new_id()
        cmd.reply_to = cmd.reply_to or own.reply_to
        cmd.terms = {**own.terms, **cmd.terms}
        return cmd

    async def publish(
        self, message: Any = None, event: str = "", **options: Unpack[PublishOptions]
    ) -> str:
        """As `MqksBroker.publish`. What is not given is as the publisher has it."""
        cmd = self._filled(MqksPublishCommand(message, event, **options))
        producer = self._outer_config.producer
        stored: str = await self._basic_publish(cmd, producer=producer, _extra_middlewares=())
        return stored

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[Any]) -> None:
        await self._basic_publish(
            self._filled(MqksPublishCommand.from_cmd(cmd)),
            producer=self._outer_config.producer,
            _extra_middlewares=_extra_middlewares,
        )

    async def request(
        self,
        message: Any = None,
        event: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float | None = None,
    ) -> Any:
        """As `MqksBroker.request`."""
        told = PublishOptions(headers=headers, correlation_id=correlation_id)
        cmd = MqksPublishCommand.request(message, event, timeout, **told)
        return await self._basic_request(self._filled(cmd), producer=self._outer_config.producer)
