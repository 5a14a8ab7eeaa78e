"""Spans and metrics of OpenTelemetry, by its messaging conventions, for clients that ask for
`tracing`. Nothing else imports this module, or OpenTelemetry.

    publish EVENT             producer   one message, or many together
    process QUEUE             consumer   `message.process()`, or the function of a service
    ack, reject, release      client     followed by the queue

A message carries the context of its publish span in its attributes (`traceparent`). The process
span is a child of that context, unless another span is current: then it has a link to it.

The one rule: a message is not refused, changed or lost because of its trace.
"""

import logging
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any, ClassVar

from mqks.client import requests
from mqks.client.errors import InvalidRequest, PublishFailed
from mqks.client.messages import Message, MetaMessage, Processing, settled
from mqks.client.urls import Address
from mqks.errors import ConfigurationError
from mqks.version import __version__

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, StatusCode
except ImportError:
    raise ConfigurationError("tracing needs OpenTelemetry: pip install 'mqks[otel]'") from None

_log = logging.getLogger("mqks.client")

Attributes = dict[str, str | int | bool]

LINKS_MAX = 128
"""An ack of many messages has links to the producers of its first so many."""
NAMES_MAX = 1000
"""So many events and queues of a process have metrics of their own; others share one without a
name."""
TEXT_CHARACTERS_MAX = 256
"""Of a name or an id in a span."""

KINDS = {"publish": ("send", SpanKind.PRODUCER), "process": ("process", SpanKind.CONSUMER)}
SETTLE = "settle", SpanKind.CLIENT
BUCKETS_S = 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0
REPLY_QUEUE = re.compile(r"reply\.[0-9a-f]{32}")
REPLY_TEMPLATE = "reply.{client}"

_names: set[str] = set()
"""Those that have metrics of their own."""


@dataclass(slots=True)
class Operation:
    """A span while it runs."""

    span: Span
    context: Context
    destination: str | None
    """An event or a queue; None if it is not known, or if there are several."""


class _Meta(dict[str, str]):
    """The attributes of a publish that has its span."""


class PublishSpan:
    """One publish, or many together."""

    __slots__ = ("count", "events", "span", "terms", "without_trace")

    def __init__(self, span: Span, terms: requests.Terms) -> None:
        self.span = span
        meta = terms.get("meta") or {}
        self.terms: requests.Terms = {**terms, "meta": _Meta(_carried(meta))}
        """What to publish with."""
        self.without_trace: requests.Terms = {**terms, "meta": _Meta(meta)}
        self.count = 0
        self.events: set[str] = set()
        """Of many messages; at most two of them."""

    @property
    def flags(self) -> bytes:
        return requests.publish_flags(self.terms)

    def has_id(self, message_id: str) -> None:
        self.span.set_attribute("messaging.message.id", _text(message_id))

    def counted(
        self, messages: Iterable[tuple[str, requests.Data]]
    ) -> Iterable[tuple[str, requests.Data]]:
        """These messages, which are counted as they are taken. What is wrong with them is not
        noticed here."""
        return messages if isinstance(messages, str | bytes | Mapping) else self._counted(messages)

    def _counted(
        self, messages: Iterable[tuple[str, requests.Data]]
    ) -> Iterator[tuple[str, requests.Data]]:
        events = self.events
        for message in messages:
            self.count += 1
            if len(events) < 2 and isinstance(message, tuple | list) and message:
                event = message[0]
                if isinstance(event, str):
                    events.add(event)
            yield message


class Tracing:
    """The spans and metrics of one client. They go to the providers that the program has set."""

    def __init__(self, address: Address, client_name: str) -> None:
        self._tracer = trace.get_tracer("mqks", __version__)
        meter = metrics.get_meter("mqks", __version__)
        self._sent = meter.create_counter(
            "messaging.client.sent.messages", "{message}", "Messages sent to the broker."
        )
        self._consumed = meter.create_counter(
            "messaging.client.consumed.messages", "{message}", "Messages given to the program."
        )
        self._client_s = meter.create_histogram(
            "messaging.client.operation.duration",
            "s",
            "Duration of a publish, ack, reject or release.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self._process_s = meter.create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of the work on a message.",
            explicit_bucket_boundaries_advisory=BUCKETS_S,
        )
        self._common: Attributes = {
            "messaging.system": "mqks",
            "server.address": address.path or address.host,
        }
        if not address.path:
            self._common["server.port"] = address.port
        self._of_client: Attributes = {"messaging.client.id": client_name} if client_name else {}

    # -- publishing

    def has_begun(self, terms: requests.Terms) -> bool:
        """Whether a publish with these has its span."""
        return isinstance(terms.get("meta"), _Meta)

    @contextmanager
    def publish(self, event: str, terms: requests.Terms) -> Iterator[PublishSpan]:
        meta, more = terms.get("meta"), Attributes()
        if meta and "correlation-id" in meta:
            more["messaging.message.conversation_id"] = _text(meta["correlation-id"])
        with self._operation("publish", event, more) as operation:
            error: BaseException | None = None
            try:
                yield PublishSpan(operation.span, terms)
            except BaseException as raised:
                error = raised
                raise
            finally:
                if not isinstance(error, InvalidRequest):
                    self._sent.add(1, self._labels("publish", event, error))

    @contextmanager
    def publish_many(self, terms: requests.Terms) -> Iterator[PublishSpan]:
        with self._operation("publish", None, {}) as operation:
            many = PublishSpan(operation.span, terms)
            confirmed, failed, error = 0, 0, None
            try:
                yield many
                confirmed = many.count
            except BaseException as raised:
                error = raised
                if isinstance(raised, PublishFailed):
                    confirmed, failed = raised.confirmed, len(raised.failed)
                elif not isinstance(raised, InvalidRequest):  # After that it is not known.
                    failed = many.count
                raise
            finally:
                if len(many.events) == 1:
                    [operation.destination] = many.events
                    operation.span.update_name(_span_name("publish", operation.destination))
                    operation.span.set_attributes(_destination(operation.destination))
                operation.span.set_attribute("messaging.batch.message_count", many.count)
                for count, reason in (confirmed, None), (failed, error):
                    if count:
                        self._sent.add(
                            count, self._labels("publish", operation.destination, reason)
                        )

    # -- consuming

    def message_type(self, of_queue: str) -> type[Message]:
        """What the deliveries of a consumer become."""

        class Delivered(TracedMessage):
            __slots__ = ()
            tracing = self
            queue = of_queue

        return Delivered

    def consumed(self, queue: str, count: int) -> None:
        self._consumed.add(count, self._labels("consume", queue))

    @contextmanager
    def process(self, message: Message, *, is_alone: bool) -> Iterator[None]:
        """The work on one message; if it `is_alone`, whatever span is current is not its parent."""
        assert isinstance(message, TracedMessage)
        current = trace.get_current_span()
        context, links = _producer(message), list[Link]()
        if not is_alone and current.get_span_context().is_valid:
            links = _links([context])
            context = trace.set_span_in_context(current, context)
        more: Attributes = {"messaging.message.id": _text(message.id)}
        with self._operation("process", message.queue, more, context, links) as operation:
            message.context = operation.context
            yield

    @contextmanager
    def settle(self, action: bytes, message: "TracedMessage") -> Iterator[None]:
        """An ack, reject or release of one message."""
        name = action.partition(b" ")[0].decode()
        more: Attributes = {"messaging.message.id": _text(message.id)}
        links = [] if message.context else _links([_producer(message)])
        with self._operation(name, message.queue, more, message.context, links):
            yield

    @contextmanager
    def ack_many(self, queue: str, messages: Sequence[Message]) -> Iterator[None]:
        more: Attributes = {"messaging.batch.message_count": len(messages)}
        links = _links(map(_producer, islice(messages, LINKS_MAX)))
        with self._operation("ack", queue, more, None, links):
            yield

    @contextmanager
    def replying(self, message: Message) -> Iterator[None]:
        """What is published meanwhile belongs to the process span of the message, if it has one."""
        context = message.context if isinstance(message, TracedMessage) else None
        token = contexts.attach(context or contexts.get_current())
        try:
            yield
        finally:
            contexts.detach(token)

    # -- all of them

    @contextmanager
    def _operation(
        self,
        name: str,
        destination: str | None,
        more: Attributes,
        context: Context | None = None,
        links: Sequence[Link] = (),
    ) -> Iterator[Operation]:
        kind, span_kind = KINDS.get(name, SETTLE)
        began_s = time.perf_counter()
        span = self._tracer.start_span(
            _span_name(name, destination),
            context,
            span_kind,
            {
                **self._common,
                **self._of_client,
                **_destination(destination),
                **more,
                "messaging.operation.name": name,
                "messaging.operation.type": kind,
            },
            links,
        )
        operation = Operation(span, trace.set_span_in_context(span, context), destination)
        token = contexts.attach(operation.context)
        error: BaseException | None = None
        try:
            yield operation
        except BaseException as raised:
            error = raised
            span.set_attribute("error.type", type(raised).__qualname__)
            span.record_exception(raised)
            span.set_status(StatusCode.ERROR, _text(str(raised)))
            raise
        finally:
            contexts.detach(token)
            span.end()
            duration = self._process_s if name == "process" else self._client_s
            labels = self._labels(name, operation.destination, error)
            labels["messaging.operation.type"] = kind
            duration.record(time.perf_counter() - began_s, labels)

    def _labels(
        self, operation: str, destination: str | None, error: BaseException | None = None
    ) -> Attributes:
        """The attributes of a metric: of each, few values only."""
        labels = {**self._common, "messaging.operation.name": operation}
        if destination is not None:
            labels.update(_counted_name(destination))
        if error is not None:
            labels["error.type"] = type(error).__qualname__
        return labels


class TracedMessage(MetaMessage):
    """A delivery to a consumer of a client with `tracing`."""

    __slots__ = ("context",)

    tracing: ClassVar[Tracing]
    queue: ClassVar[str]

    def __init__(self, *told: Any) -> None:
        super().__init__(*told)
        self.context: Context | None = None
        """Of its process span, also after that has ended."""

    def process(self) -> Processing:
        super().process()
        return TracedProcessing(self)

    def _settle_once(self, action: bytes) -> None:
        if self._settle is None or self._settle is settled:
            super()._settle_once(action)
        else:
            with self.tracing.settle(action, self):
                super()._settle_once(action)


class TracedProcessing(Processing):
    """A message while it is worked on, and its span; the ack or reject belongs to the span."""

    __slots__ = ("_span",)

    def __init__(self, message: TracedMessage) -> None:
        super().__init__(message)
        self._span: Any = message.tracing.process(message, is_alone=False)

    def __enter__(self) -> Message:
        self._span.__enter__()
        return super().__enter__()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            super().__exit__(kind, error, trace)
        finally:
            self._span.__exit__(kind, error, trace)

    async def __aenter__(self) -> Message:
        return self.__enter__()


def _carried(meta: Mapping[str, str]) -> Mapping[str, str]:
    """These attributes and those that carry the current context, if they fit: a traceparent of
    the program's own counts more, and so do all its attributes."""
    carrier: dict[str, str] = {}
    propagate.inject(carrier)
    carried = dict(meta)
    if not carried.keys().isdisjoint(carrier):
        return meta
    for key, value in carrier.items():
        with suppress(InvalidRequest):
            requests.publish_flags({"meta": {**carried, key: value}})
            carried[key] = value
    return carried


def _producer(message: Message) -> Context:
    """The current context with the span that has published a message instead of the current one."""
    bare = trace.set_span_in_context(trace.INVALID_SPAN)
    try:
        # Bytes that are not UTF-8 are no reason to lose the rest.
        carrier = {key: _printable(value) for key, value in message.meta.items()}
        return propagate.extract(carrier, bare)
    except Exception:
        # Anybody may have written them, and propagators are the program's own choice.
        _log.debug("the trace of message %s cannot be read", message.id, exc_info=True)
        return bare


def _links(producers: Iterable[Context]) -> list[Link]:
    """To each once."""
    spans = (trace.get_current_span(context).get_span_context() for context in producers)
    return [
        *{(span.trace_id, span.span_id): Link(span) for span in spans if span.is_valid}.values()
    ]


def _is_reply(destination: str) -> bool:
    """Whether this is the event of a client's replies, which is another for each client."""
    return REPLY_QUEUE.fullmatch(destination) is not None


def _span_name(operation: str, destination: str | None) -> str:
    if destination is None:
        return operation
    return f"{operation} {REPLY_TEMPLATE if _is_reply(destination) else _text(destination)}"


def _destination(name: str | None) -> Attributes:
    if name is None:
        return {}
    attributes: Attributes = {"messaging.destination.name": _text(name)}
    if _is_reply(name):
        attributes["messaging.destination.template"] = REPLY_TEMPLATE
        attributes["messaging.destination.temporary"] = True
    return attributes


def _counted_name(name: str) -> Attributes:
    if _is_reply(name):
        return {"messaging.destination.template": REPLY_TEMPLATE}
    text = _text(name)
    if text not in _names:
        if len(_names) >= NAMES_MAX:
            return {}
        _names.add(text)
    return {"messaging.destination.name": text}


def _printable(text: str) -> str:
    """Without halves of surrogate pairs, which stand for bytes that are not UTF-8: an exporter that
    finds one may drop a whole batch of spans."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _text(text: str) -> str:
    return _printable(text[:TEXT_CHARACTERS_MAX])
