"""The broker of FastStream and its routers: how subscribers and publishers are declared.

The one rule: what is declared wrongly raises where it is declared.
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Unpack

from fast_depends import Provider, dependency_provider
from faststream._internal.basic_types import LoggerProto
from faststream._internal.broker import BrokerRouter, BrokerUsecase
from faststream._internal.broker.registrator import Registrator
from faststream._internal.broker.router import ArgsContainer, SubscriberRoute
from faststream._internal.configs import (
    PublisherSpecificationConfig,
    PublisherUsecaseConfig,
    SubscriberSpecificationConfig,
    UnderlyingDriverAnnotation,
)
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.endpoint.subscriber.call_item import CallsCollection
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream._internal.parser import CodecProto
from faststream._internal.types import CustomCallable, IdGenerator
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.params import Context
from faststream.specification.schema import BrokerSpec

from mqks.client import requests, urls
from mqks.client.app import BACKOFF_S, RETRIES
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError
from mqks.client.lazy import LazyClient
from mqks.client.messages import Message
from mqks.client.options import Options
from mqks.client.requests import Backoff, PolicyKeywords
from mqks.faststream.messages import MqksMessage, MqksPublishCommand, PublishOptions
from mqks.faststream.publishing import (
    ONCE_S,
    MqksBrokerConfig,
    MqksProducer,
    MqksPublisher,
    MqksPublisherSpecification,
)
from mqks.faststream.subscribing import (
    MqksSubscriber,
    MqksSubscriberConfig,
    MqksSubscriberSpecification,
)
from mqks.limits import COUNT_MAX

MqksMessageContext = Annotated[MqksMessage, Context("message")]
"""What a handler declares to get its message."""


class MqksRegistrator(Registrator[Message, MqksBrokerConfig]):
    """What brokers and routers have in common."""

    def subscriber(  # type: ignore[override]
        self,
        queue: str,
        events: Iterable[str] | None = None,
        *,
        max_workers: int = 1,
        prefetch: int | None = None,
        retries: int | None = RETRIES,
        backoff: Backoff | None = BACKOFF_S,
        ack_timeout_s: float | None = None,
        delete_when_unused: float | bool = False,
        policy: PolicyKeywords | None = None,
        ack_policy: AckPolicy = EMPTY,
        no_reply: bool = False,
        dependencies: Sequence[Any] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        include_in_schema: bool = True,
    ) -> MqksSubscriber:
        """Let functions handle the messages of a queue, at most `max_workers` at a time.

        The queue is created if it does not exist, and bound to `events`, beside its other bindings;
        by default to the event of its name. One with a `*` is a mask; `{level}` stands for a `*`
        whose match `Path()` has.

        - `prefetch`: the most unacked messages, by default `max_workers`; 0: as many as the server
          allows.
        - `retries`, `backoff`: of messages that are nacked, if the policy of the queue does not set
          them; as of `mqks.App.consumer`. So with `ack_timeout_s` and `delete_when_unused`.
        - `policy`: what to set of the policy of the queue, as by `client.set_queue`.

        The others are as of each broker. Raises InvalidRequest and TypeError.
        """
        requests.reject(None, False, retries, backoff)
        requests.count("max_workers", max_workers, COUNT_MAX)
        requests.set_queue(queue, policy or {})
        consuming: dict[str, Any] = {
            "prefetch": max_workers if prefetch is None else prefetch,
            "backoff": backoff,
            "ack_timeout_s": ack_timeout_s,
            "delete_when_unused": delete_when_unused,
        }
        events = (queue,) if events is None else events
        names = events if isinstance(events, str) else [*events]  # One that is text alone raises.
        requests.consume(queue, names, **consuming)
        calls = CallsCollection[Message]()
        told = SubscriberSpecificationConfig(
            title_=title, description_=description, include_in_schema=include_in_schema
        )
        outer: Any = self.config
        made = MqksSubscriber(
            MqksSubscriberConfig(_outer_config=outer, no_reply=no_reply, _ack_policy=ack_policy),
            MqksSubscriberSpecification(outer, told, calls, queue=queue, events=names),
            calls,
            max_workers=max_workers,
            returning={"retries": retries, "backoff": backoff},
            policy=policy or {},
            consuming=consuming,
        )
        super().subscriber(made, persistent=persistent)
        return made.add_call(
            parser_=parser or self._parser,
            decoder_=decoder or self._decoder,
            codec_=codec,
            dependencies_=dependencies,
        )

    def publisher(  # type: ignore[override]
        self,
        event: str,
        *,
        persistent: bool = True,
        title: str | None = None,
        description: str | None = None,
        schema: Any = None,
        include_in_schema: bool = True,
        **options: Unpack[PublishOptions],
    ) -> MqksPublisher:
        """What publishes an event, with these options. Raises InvalidRequest and TypeError."""
        requests.name(event)
        told = PublisherSpecificationConfig(
            title_=title,
            description_=description,
            schema_=schema,
            include_in_schema=include_in_schema,
        )
        outer: Any = self.config
        made = MqksPublisher(
            PublisherUsecaseConfig(_outer_config=outer),
            MqksPublisherSpecification(outer, told, event),
            options,
        )
        super().publisher(made, persistent=persistent)
        return made


class MqksRoutePublisher(ArgsContainer):
    """The arguments of a publisher, for a `MqksRoute`."""


class MqksRoute(SubscriberRoute):
    """A handler, and the arguments of its subscriber, for a `MqksRouter`: `MqksRoute(handle,
    "orders", publishers=[MqksRoutePublisher("order.done")])`."""


class MqksRouter(MqksRegistrator, BrokerRouter[Message, MqksBrokerConfig]):
    """Subscribers and publishers that a broker includes. The prefix precedes their queues and
    events."""

    def __init__(
        self,
        prefix: str = "",
        handlers: Iterable[SubscriberRoute] = (),
        *,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[Registrator[Any, Any]] = (),
        parser: CustomCallable | None = None,
        decoder: CustomCallable | None = None,
        codec: CodecProto | None = None,
        include_in_schema: bool | None = None,
        ack_policy: AckPolicy = EMPTY,
    ) -> None:
        config = MqksBrokerConfig(
            prefix=prefix,
            broker_dependencies=dependencies,
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            include_in_schema=include_in_schema,
            ack_policy=ack_policy,
        )
        super().__init__(config=config, handlers=handlers, routers=routers)


class MqksBroker(MqksRegistrator, BrokerUsecase[Message, AsyncClient, MqksBrokerConfig]):
    """A broker for `FastStream(broker)`.

    - `url`, `options`: as of `mqks.connect`; by default MQKS_URL, else localhost.
    - `graceful_timeout`: how long a stop waits for handlers, in seconds; then their messages return
      to their queues.

    The others are as of each broker of FastStream. Raises what `mqks.connect` raises for a wrong
    URL.
    """

    def __init__(
        self,
        url: urls.Urls | None = None,
        *,
        options: Options | None = None,
        graceful_timeout: float | None = 15.0,
        decoder: CustomCallable | None = None,
        parser: CustomCallable | None = None,
        codec: CodecProto | None = None,
        dependencies: Sequence[Any] = (),
        middlewares: Sequence[Any] = (),
        routers: Iterable[Registrator[Any, Any]] = (),
        ack_policy: AckPolicy = EMPTY,
        id_generator: IdGenerator = gen_cor_id,
        specification_url: str | None = None,
        protocol: str = "mqks",
        protocol_version: str | None = None,
        description: str | None = None,
        tags: Iterable[Any] = (),
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: Any = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
    ) -> None:
        self.lazy = LazyClient(url, options)
        servers = [specification_url] if specification_url else map(_shown, urls.parse(url).each)
        config = MqksBrokerConfig(
            once_s=min(2 * (options or Options()).timeout_s, ONCE_S),
            broker_middlewares=middlewares,
            broker_parser=parser,
            broker_decoder=decoder,
            broker_codec=codec,
            logger=make_logger_state(logger, log_level, MqksLogger),
            fd_config=FastDependsConfig(
                use_fastdepends=apply_types,
                serializer=serializer,
                provider=provider or dependency_provider,
                context=context or ContextRepo(),
            ),
            broker_dependencies=dependencies,
            graceful_timeout=graceful_timeout,
            ack_policy=ack_policy,
            id_generator=id_generator,
            extra_context={"broker": self},
            default_driver_annotations={
                MqksMessage: UnderlyingDriverAnnotation(
                    type_hint=MqksMessageContext,
                    module="mqks.faststream",
                    name="MqksMessageContext",
                )
            },
        )
        config.producer = MqksProducer(config)
        super().__init__(
            config=config,
            routers=routers,
            specification=BrokerSpec(
                [*servers], protocol, protocol_version, description, tags, None
            ),
        )

    async def _connect(self) -> AsyncClient:
        client = self.config.broker_config.connected = await self.lazy.get()
        return client

    async def start(self) -> None:
        """Connect, and start all subscribers. Raises what entering a client and a consumer
        raises."""
        await self.connect()
        # All before the first handler: what it publishes may be for another one.
        mine = (each for each in self.subscribers if isinstance(each, MqksSubscriber))
        await asyncio.gather(*(each.declare() for each in mine))
        await super().start()

    async def stop(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        try:
            await super().stop(kind, error, trace)
        finally:
            self._connection = self.config.broker_config.connected = None
            await self.lazy.close()

    async def ping(self, timeout: float | None = None) -> bool:
        """Whether the server answers within so many seconds, and has ended no subscriber."""
        if self._connection is None:
            return False
        if any(isinstance(each, MqksSubscriber) and each.has_failed for each in self.subscribers):
            return False
        try:
            await self._connection.ping(timeout_s=timeout)
        except ClientError:
            return False
        return True

    async def publish(
        self, message: Any = None, event: str = "", **options: Unpack[PublishOptions]
    ) -> str:
        """Publish an event, and return the id of its message when the server has stored it. The
        options are headers, a correlation id, and those of `client.publish`, as `delay_s` and
        `priority`; what its handler returns is published as the event `reply_to`. Raises what
        `client.publish` raises."""
        cmd = MqksPublishCommand(message, event, **options)
        cmd.correlation_id = cmd.correlation_id or self.config.id_generator()
        stored: str = await self._basic_publish(cmd, producer=self.config.producer)
        return stored

    async def request(  # type: ignore[override]
        self,
        message: Any = None,
        event: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: float | None = None,
    ) -> MqksMessage:
        """Publish an event, and return what its handler returns, as a message. Raises what
        `client.call` raises: TimeoutError after so many seconds (by default `timeout_s` of the
        options), RequestFailed if no queue is bound to the event."""
        told = PublishOptions(headers=headers, correlation_id=correlation_id)
        cmd = MqksPublishCommand.request(message, event, timeout, **told)
        cmd.correlation_id = cmd.correlation_id or self.config.id_generator()
        reply: MqksMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply


def _shown(server: urls.Address) -> str:
    """Its URL, without credentials."""
    if server.path:
        return f"mqks+unix://{server.path}"
    return f"{'mqkss' if server.tls else 'mqks'}://{server}"


class MqksLogger(DefaultLoggerStorage):
    """Lines of the log have the queue."""

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Columns are not aligned."""

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        if (made := self._get_logger_ref()) is None:
            made = get_broker_logger(
                name="mqks",
                default_context={"queue": ""},
                message_id_ln=10,
                fmt="%(asctime)s %(levelname)-8s - %(queue)s %(message_id)-10s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(made)
        return made
