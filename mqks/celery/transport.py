"""The transport: connections, and channels with the methods of AMQP that kombu calls.

The one rule: what is unacked, routed or delayed is known to the server alone.
"""

import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields
from datetime import UTC, datetime
from functools import partial, partialmethod
from importlib import import_module
from secrets import token_hex
from typing import Any
from uuid import uuid4

from amqp.protocol import queue_declare_ok_t
from celery.signals import before_task_publish, worker_ready
from kombu.exceptions import ChannelError
from kombu.message import Message
from kombu.transport import base
from kombu.utils.json import dumps, loads

from mqks.celery import names
from mqks.celery.link import Link, LinkConsumer, Pipeline
from mqks.client import requests, urls
from mqks.client.errors import ConnectionLost, InvalidRequest, ProtocolViolation, RequestFailed
from mqks.client.options import Options
from mqks.client.requests import Unique
from mqks.errors import ConfigurationError
from mqks.protocol.escapes import escape, unescape
from mqks.protocol.replies import ESCAPED
from mqks.version import __version__

UNUSED_S = 60.0
"""So long an exclusive or auto-delete queue without `x-expires` stays without a consumer."""
GET_S = 1.0
"""How long `basic_get` waits for a message of which the server has told."""
ONCE_S = 3600
"""So long after a publish it may be tried again and is dropped, if it was stored."""
ID = "mqks_id"
"""The property that has the id of a message until it is confirmed. Each call of a producer has its
own properties, which kombu passes again when it tries again."""
_POLICY: dict[str, Callable[[Any], list[str]]] = {
    "x-message-ttl": lambda ms: [f"--ttl={max(ms, 1) / 1000}"],
    "x-max-length": lambda n: [f"--messages-max={n}", "--overflow=drop"],
    "x-max-length-bytes": lambda n: [f"--bytes-max={n}", "--overflow=drop"],
    "x-dead-letter-routing-key": lambda queue: [f"--dead-letters={names.key(queue)}"],
    "x-single-active-consumer": lambda on: [f"--single-consumer={'yes' if on else 'no'}"],
}
"""The policy for arguments of RabbitMQ."""
_WITHOUT_POLICY = "x-expires", "x-max-priority"


class Channel(base.StdChannel):  # type: ignore[misc]
    """Raises RequestFailed for what the server refuses, ChannelError for what MQKS does not have,
    and ConnectionLost."""

    Message: Any = Message

    def __init__(self, link: Link) -> None:
        self.connection: Link | None = link
        link.channels.append(self)
        self._consumers = dict[str, LinkConsumer]()
        self._prefetch = 0

    @property
    def _link(self) -> Link:
        link = self.connection
        if link is not None and link.is_parents:
            self._consumers.clear()
            link = self.connection = link.client.connection
            if link is not None:
                link.channels.append(self)
        if link is None:
            raise ConnectionLost("the channel is closed")
        return link

    def close(self) -> None:
        """Its unacked messages return to their queues."""
        link, self.connection = self.connection, None
        if link is not None and link.failure is None:
            link.channels.remove(self)
            link.end(*link.of(self))

    # -- exchanges and queues

    def exchange_declare(
        self, exchange: str = "", type: str = "direct", passive: bool = False, **_: Any
    ) -> None:
        if passive:
            return
        if type not in Transport.implements.exchange_type:
            raise ChannelError(f"exchange {exchange}: MQKS has no exchanges of type {type}")
        self._link.exchange_types[exchange] = type

    def exchange_delete(self, exchange: str, **_: Any) -> None:
        self._link.exchange_types.pop(exchange, None)

    def exchange_bind(self, *_: Any, **__: Any) -> None:
        raise ChannelError("MQKS binds queues to exchanges, and no exchanges to each other")

    exchange_unbind = exchange_bind

    def prepare_queue_arguments(self, arguments: Any, **options: Any) -> Any:
        return base.to_rabbitmq_queue_arguments(arguments, **options)

    def queue_declare(
        self,
        queue: str = "",
        passive: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: dict[str, Any] | None = None,
        **_: Any,
    ) -> queue_declare_ok_t:
        """Only a passive one tells how many messages and consumers there are."""
        if passive:
            return queue_declare_ok_t(queue, *self._counts(queue))
        link, queue = self._link, queue or f"mqks.gen-{uuid4().hex}"
        name = names.key(queue)
        told = {key: value for key, value in (arguments or {}).items() if value is not None}
        if unknown := told.keys() - _POLICY.keys() - {*_WITHOUT_POLICY, "x-dead-letter-exchange"}:
            raise ChannelError(f"queue {queue}: MQKS has no argument {', '.join(sorted(unknown))}")
        if told.pop("x-dead-letter-exchange", ""):
            raise ChannelError(f"queue {queue}: dead letters go to a queue: leave out the exchange")
        flags = [flag for key in _POLICY if key in told for flag in _POLICY[key](told[key])]
        link.ask(f"subscribe --confirm {name} --add {names.event('', queue)}".encode())
        if flags:
            link.ask(f"set_queue --confirm {name} {' '.join(dict.fromkeys(flags))}".encode())
        if auto_delete or exclusive or "x-expires" in told:
            # A consumer may set the rule without the permission to delete queues.
            unused_s = told.get("x-expires", UNUSED_S * 1000) / 1000
            rule = f"--delete-queue-when-unused={unused_s} --manual-ack --prefetch=1"
            link.end(self._consume(name, rule, lambda *_: None))
        return queue_declare_ok_t(queue, 0, 0)

    def _counts(self, queue: str) -> tuple[int, int]:
        words = b"stats queue %b --limit=1" % names.key(queue).encode()
        told = requests.stats_told(self._link.ask(words))
        return told["ready"], told["consumers"]

    def _rebind(
        self, add: str, queue: str, exchange: str = "", routing_key: str = "", **_: Any
    ) -> None:
        if exchange:  # The default exchange has all queues, for good.
            kind = self._link.exchange_types.get(exchange, "direct")
            events, masks = names.bound(kind, exchange, routing_key)
            words = [f"rebind --confirm {names.key(queue)}"]
            words += [f"--{add}", *events] if events else []
            words += [f"--{add}-mask", *masks] if masks else []
            self._link.ask(" ".join(words).encode())

    queue_bind = partialmethod(_rebind, "add")
    queue_unbind = partialmethod(_rebind, "remove")

    def queue_purge(self, queue: str, **_: Any) -> int:
        """Also messages that wait for their ETA."""
        body = f"purge --confirm {names.key(queue)} --scheduled"
        return requests.number_told(self._link.ask(body.encode()))

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **_: Any
    ) -> int:
        ready = 0
        if if_unused or if_empty:
            ready, consumers = self._counts(queue)
            if (if_unused and consumers) or (if_empty and ready):
                raise ChannelError(f"queue {queue} has {ready} messages and {consumers} consumers")
        self._link.ask(f"delete_queue --confirm {names.key(queue)}".encode())
        return ready

    # -- messages

    def prepare_message(
        self,
        body: str | bytes,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> tuple[dict[str, Any], bytes, dict[str, Any]]:
        given = {} if properties is None else properties
        told = {key: value for key, value in given.items() if key != ID}
        about = {
            "content-type": content_type,
            "content-encoding": content_encoding,
            "headers": headers or {},
            "properties": {**told, "priority": priority or 0},
        }
        return about, body.encode() if isinstance(body, str) else body, given

    def basic_publish(
        self,
        message: tuple[dict[str, Any], bytes, dict[str, Any]],
        exchange: str = "",
        routing_key: str = "",
        mandatory: bool = False,
        **_: Any,
    ) -> None:
        """Returns when the server has stored the message, except within `pipelined`; once, also if
        kombu tries it again. Events, which are transient and of a topic exchange, are sent without
        a wait."""
        about, body, given = message
        properties, link = about["properties"], self._link
        is_topic = link.exchange_types.get(exchange) == "topic"
        is_event = is_topic and properties.get("delivery_mode") == 1
        flags = ["publish --escaped", *([] if is_event else ["--confirm", f"--once={ONCE_S}"])]
        if mandatory:
            flags.append("--mandatory")
        if properties.get("expiration"):
            flags.append(f"--ttl={max(float(properties['expiration']), 1) / 1000}")
        if priority := properties.get("priority"):
            flags.append(f"--priority={min(max(int(priority), 0), 9)}")
        if (at := _seconds(about["headers"].get("eta"))) is not None:
            flags.append(f"--at={at}")
        if unique := about["headers"].get("unique"):
            flags.append(f"--unique={_unique(unique)}")
        flags.append(names.event(exchange or "", routing_key or ""))
        data = escape(b"%b\n%b" % (dumps(about).encode(), body))
        request = b"%b %b" % (" ".join(flags).encode(), data)
        if is_event:
            link.send(request)
            return
        id_ = given.setdefault(ID, uuid4().hex).encode()
        if link.shared.pipeline is None:
            link.ask(request, id_)
        else:
            link.shared.pipeline.publish(link, request, id_)
        del given[ID]  # Published once more, it is another message.

    def _received(self, consumer: LinkConsumer, text: bytes, tag: str) -> Any:
        message_id, _, rest = text.partition(b" ")
        delivery_tag = requests.decoded(b"%b %b" % (consumer.id, message_id))
        told, _, data = rest.partition(b" ")
        event = told.removeprefix(b"event=").removesuffix(ESCAPED)
        name, _, retry = event.partition(b",retry=")
        exchange, routing_key = names.published(requests.decoded(name))
        args = arguments(unescape(data) if told.endswith(ESCAPED) else data)
        return self.Message(
            channel=self,
            delivery_tag=delivery_tag,
            delivery_info={
                "consumer_tag": tag,
                "delivery_tag": delivery_tag,
                "exchange": exchange,
                "routing_key": routing_key,
                "redelivered": bool(retry),
                "priority": (args.get("properties") or {}).get("priority", 0),
            },
            **args,
        )

    def basic_get(self, queue: str, no_ack: bool = False, **_: Any) -> Any:
        """The first message, or None. The consumer that takes it ends with its ack."""
        link, found = self._link, list[bytes]()
        if not self._counts(queue)[0]:
            return None
        flags = "--existing --keep --manual-ack --prefetch=1"
        consumer = self._consume(names.key(queue), flags, lambda _, text: found.append(text))
        ends_s = time.monotonic() + GET_S
        try:
            while not found:
                link.drain_events(timeout=max(0.0, ends_s - time.monotonic()))
        except TimeoutError:
            return None
        finally:
            if not found:
                link.end(consumer)
        consumer.is_cancelled = True
        message = self._received(consumer, found[0], "")
        if no_ack:
            self.basic_ack(message.delivery_tag)
        return message

    def _consume(
        self, name: str, flags: str, deliver: Callable[[LinkConsumer, bytes], None]
    ) -> LinkConsumer:
        consumer = LinkConsumer(self, deliver, acks="--manual-ack" in flags)
        call = self._link.start(f"consume --confirm {name} {flags}".encode(), consumer=consumer)
        try:
            self._link.wait([call])
        except RequestFailed:
            self._link.consumers.pop(consumer.id, None)
            raise
        except BaseException:  # Of a signal handler, for example: the server has it.
            self._link.end(consumer)
            raise
        return consumer

    def basic_consume(
        self,
        queue: str,
        no_ack: bool = False,
        consumer_tag: str = "",
        callback: Callable[[Any], object] | None = None,
        **_: Any,
    ) -> str:
        """No update of its queue changes it, so `on_cancel` is never called."""
        tag = consumer_tag or uuid4().hex
        flags = "--existing --keep" if no_ack else "--existing --keep --manual-ack"
        if self._prefetch and not no_ack:
            flags += f" --prefetch={self._prefetch}"

        def deliver(consumer: LinkConsumer, text: bytes) -> None:
            message = self._received(consumer, text, tag)
            if consumer.is_cancelled and consumer.acks:
                self.basic_release(message.delivery_tag)
            elif callback is not None:
                callback(message)

        self._consumers[tag] = self._consume(names.key(queue), flags, deliver)
        return tag

    def basic_cancel(self, consumer_tag: str, **_: Any) -> None:
        consumer = self._consumers.pop(consumer_tag, None)
        if consumer is not None and self.connection is not None:
            self._link.cancel(consumer)

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """The most unacked messages of each consumer of this channel."""
        self._prefetch = prefetch_count
        for consumer in self._consumers.values():
            if consumer.acks:
                self._link.send(b"set_prefetch %b %d" % (consumer.id, prefetch_count))

    def _settle(self, action: bytes, delivery_tag: str) -> None:
        consumer_id, _, message_id = requests.encoded(delivery_tag).partition(b" ")
        consumer = self._link.consumers.get(consumer_id)
        if consumer is not None and consumer.acks:
            self._link.settle(consumer, action % (consumer_id, message_id))

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        if multiple:
            raise ChannelError("MQKS acks messages one by one, and no `multiple`")
        self._settle(b"ack %b %b", delivery_tag)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """With `requeue` it goes to the tail of its queue, and counts as a reject there; otherwise
        it is dead."""
        self._settle(b"reject %b %b" if requeue else b"reject %b %b --dead", delivery_tag)

    def basic_release(self, delivery_tag: str) -> None:
        self._settle(b"release %b %b", delivery_tag)

    def basic_recover(self, requeue: bool = False) -> None:
        """Its unacked messages return to their places, and are delivered again."""
        for consumer in self._link.of(self):
            consumer.held = 0
            self._link.send(b"release %b --all" % consumer.id)

    def flow(self, active: bool = True) -> None:
        raise ChannelError("MQKS has no flow control by channel: use prefetch")


def arguments(data: bytes) -> dict[str, Any]:
    """Of the message with these data."""
    first, _, body = data.partition(b"\n")
    try:
        about = loads(first)
        return {
            "body": body,
            "content_type": about["content-type"],
            "content_encoding": about["content-encoding"],
            "headers": {**about["headers"]},
            "properties": {**about["properties"]},
        }
    except Exception:  # Another program has published it, and kombu's types raise anything.
        return {"body": data, "content_type": "application/json", "content_encoding": "utf-8"}


@contextmanager
def pipelined(producer: Any) -> Iterator[None]:
    """What is published with this producer of kombu is confirmed when the block ends, all together.
    Raises RequestFailed for the first message that was refused, and ConnectionLost, after which
    some may not be stored."""
    shared, pipeline = producer.channel._link.shared, Pipeline()
    shared.pipeline = pipeline
    try:
        yield
        pipeline.wait(producer.channel._link)
    finally:
        shared.pipeline = None


def _identify(properties: dict[str, Any], **_: Any) -> None:
    """Celery retries what a finished task publishes by itself, each time with a copy of these."""
    group = names.group(str(properties.get("correlation_id") or ""))
    properties.setdefault(ID, group + token_hex(8))


def _control(**_: Any) -> None:
    import_module("mqks.celery.control")  # Here, since it needs what only workers load.


before_task_publish.connect(_identify)
worker_ready.connect(_control)


def _unique(header: str) -> str:
    """The value of `--unique`. Raises InvalidRequest."""
    wanted = Unique.parse(header)
    if wanted.until == "acked":
        # The task that retries itself would keep its own retry out.
        raise InvalidRequest("unique: until=acked is not possible here")
    return wanted.text.decode()


def _seconds(eta: Any) -> float | None:
    """The time of the header `eta`, in seconds since 1970; None if it has none."""
    with suppress(TypeError, ValueError, OverflowError):
        time_ = datetime.fromisoformat(eta)
        at = (time_ if time_.tzinfo else time_.replace(tzinfo=UTC)).timestamp()
        return at if 0 < at < 1e10 else None
    return None


class Transport(base.Transport):  # type: ignore[misc]
    """What `kombu.Connection` uses for `mqks://`, `mqkss://` and `mqks+unix://`."""

    default_port = urls.PORT
    # Of the same behaviour as far as Celery asks: mingle and gossip work, events use topics.
    driver_type = "amqp"
    driver_name = "mqks"
    connection_errors = (ProtocolViolation, OSError, *base.Transport.connection_errors)
    channel_errors = (ChannelError, RequestFailed)
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors = ()
    implements = base.Transport.implements.extend(
        asynchronous=True,
        heartbeats=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
    )

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {"hostname": "127.0.0.1", "port": self.default_port}

    def driver_version(self) -> str:
        return __version__

    def establish_connection(self) -> Link:
        """Raises ConfigurationError, AuthenticationFailed, ConnectionLost."""
        client = self.client
        if client.virtual_host not in (None, "", "/"):
            raise ConfigurationError(
                f"MQKS has no virtual hosts: leave {client.virtual_host!r} out of the URL"
            )
        options = client.transport_options
        values = {each.name: options[each.name] for each in fields(Options) if each.name in options}
        if client.connect_timeout:
            values.setdefault("connect_timeout_s", client.connect_timeout)
        tls = client.transport_cls == "mqkss" or bool(client.ssl)
        if isinstance(client.ssl, dict):
            context = ssl.create_default_context(cafile=client.ssl.get("ca_certs"))
            if client.ssl.get("certfile"):
                context.load_cert_chain(client.ssl["certfile"], client.ssl.get("keyfile"))
            values.setdefault("ssl_context", context)
        host = client.hostname or "127.0.0.1"
        if host.startswith("unix:"):
            address = urls.parse(f"mqks+{host}")
        else:
            password = client.password() if callable(client.password) else client.password
            credentials = tuple(word for word in (client.userid, password) if word)
            port = client.port or self.default_port
            address = urls.Address(host, int(port), tls=tls, credentials=credentials)
        return Link(client, address, Options(**values))

    def close_connection(self, connection: Link) -> None:
        self.unregister_from_event_loop(connection, None)
        connection.leave()

    def _collect(self, connection: Link | None) -> None:
        """After a loss, and in the child of a fork."""
        if connection is not None:
            connection.close()

    def create_channel(self, connection: Link) -> Channel:
        return Channel(connection)

    def close_channel(self, channel: Channel) -> None:
        channel.close()

    def verify_connection(self, connection: Link) -> bool:
        return connection.failure is None

    def drain_events(self, connection: Link, timeout: float | None = None, **_: Any) -> None:
        connection.drain_events(timeout)

    def get_heartbeat_interval(self, connection: Link) -> float:
        return self.client.heartbeat or 0

    def heartbeat_check(self, connection: Link, rate: int = 2) -> None:
        connection.beat(self.get_heartbeat_interval(connection))

    def register_with_event_loop(self, connection: Link, loop: Any) -> None:
        read = partial(self.on_readable, connection, loop)
        connection.wake = partial(loop.call_soon, read)
        connection.unregister = partial(loop.remove, connection.fileno())
        loop.add_reader(connection.fileno(), read)
        connection.wake()

    def unregister_from_event_loop(self, connection: Link, loop: Any) -> None:
        connection.unregister()
        connection.wake = connection.unregister = lambda: None
