"""Spans and metrics of the clients and services, as the SDK of OpenTelemetry gets them from clients
of a real broker.

The one rule: what a trace looks like is read from what an exporter is given.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry import baggage, context, metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import messaging_attributes as conventions
from opentelemetry.semconv._incubating.metrics import messaging_metrics
from opentelemetry.trace import SpanKind, StatusCode

from mqks import (
    App,
    CallFailed,
    InvalidRequest,
    Message,
    Options,
    PublishFailed,
    ReplyTimeout,
    RequestFailed,
    blocking,
    connect,
)
from mqks.client import tracing
from mqks.testing import Broker
from tests.client.programs import ROOT, ended, environment
from tests.client.waiting import serving
from tests.kit.skins import SKINS
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.anyio
TRACING = Options(tracing=True, timeout_s=WAIT_S, client_name="tests")
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture(params=SKINS)
def skin(request: pytest.FixtureRequest) -> Any:
    return SKINS[request.param]


@pytest.fixture
async def client(skin: Any, mqks_broker: Broker) -> AsyncIterator[Any]:
    async with skin(mqks_broker.url, TRACING) as client:
        yield client


@pytest.fixture
async def consumer(client: Any) -> AsyncIterator[Any]:
    async with client.consume("q", ["e"]) as consumer:
        yield consumer


@cache
def exporters() -> tuple[InMemorySpanExporter, InMemoryMetricReader]:
    """Of this process, whose providers can be set only once."""
    exporter, reader = InMemorySpanExporter(), InMemoryMetricReader()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([reader]))
    return exporter, reader


class Spans:
    """Those that have ended since the last look."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def names(self) -> list[str]:
        return [span.name for span in self.all()]

    def __getitem__(self, name: str) -> ReadableSpan:
        [span] = [span for span in self.all() if span.name == name]
        return span


@pytest.fixture
def spans() -> Spans:
    exporter, _ = exporters()
    exporter.clear()
    return Spans(exporter)


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def link_ids(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def span_id(span: ReadableSpan) -> int:
    assert span.context is not None
    return int(span.context.span_id)


def parent_id(span: ReadableSpan) -> int | None:
    return span.parent and span.parent.span_id


def points(name: str, operation: str, destination: str) -> list[Any]:
    """Of a metric; a destination is of one test alone."""
    data = exporters()[1].get_metrics_data()
    found = []
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                found += [
                    point
                    for point in metric.data.data_points
                    if (labels := point.attributes or {}) and metric.name == name
                    if labels.get("messaging.operation.name") == operation
                    if labels.get("messaging.destination.name") == destination
                ]
    return found


def traceparent(span: ReadableSpan) -> str:
    assert span.context is not None
    ids = f"{span.context.trace_id:032x}-{span.context.span_id:016x}"
    return f"00-{ids}-{span.context.trace_flags:02x}"


def in_one_trace(spans: Sequence[ReadableSpan]) -> bool:
    return len({span.context.trace_id for span in spans if span.context}) == 1


async def test_publish_process_publish_process_is_one_trace(
    client: Any, mqks_broker: Broker, spans: Spans
) -> None:
    async with (
        client.consume("orders", ["order.new"]) as orders,
        client.consume("mails", ["mail.due"]) as mails,
    ):
        order_id = await client.publish("order.new", {"no": 17}, confirm=True)
        async with (await orders.receive(WAIT_S)).process() as message:
            await client.publish("mail.due", message.text)
        async with (await mails.receive(WAIT_S)).process() as message:
            assert message.traceparent == traceparent(spans["publish mail.due"])

    assert spans.names() == [
        *("publish order.new", "process orders", "publish mail.due", "ack orders"),
        *("process mails", "ack mails"),
    ]
    first, process, second, ack, last, last_ack = spans.all()
    assert in_one_trace(spans.all())
    assert parent_id(first) is None
    assert parent_id(process) == span_id(first)
    assert parent_id(second) == parent_id(ack) == span_id(process)
    assert parent_id(last) == span_id(second)
    assert parent_id(last_ack) == span_id(last)
    assert not any(span.links for span in spans.all())
    assert {span.status.status_code for span in spans.all()} == {StatusCode.UNSET}
    kinds = [SpanKind.PRODUCER, SpanKind.CONSUMER, SpanKind.CLIENT]
    assert [span.kind for span in (first, process, ack)] == kinds
    common = {
        conventions.MESSAGING_SYSTEM: "mqks",
        "server.address": "127.0.0.1",
        "server.port": mqks_broker.port,
        conventions.MESSAGING_CLIENT_ID: "tests",
        conventions.MESSAGING_MESSAGE_ID: order_id,
    }
    for span, name, kind, destination in (
        (first, "publish", conventions.MessagingOperationTypeValues.SEND, "order.new"),
        (process, "process", conventions.MessagingOperationTypeValues.PROCESS, "orders"),
        (ack, "ack", conventions.MessagingOperationTypeValues.SETTLE, "orders"),
    ):
        assert attributes(span) == {
            **common,
            conventions.MESSAGING_OPERATION_NAME: name,
            conventions.MESSAGING_OPERATION_TYPE: kind.value,
            conventions.MESSAGING_DESTINATION_NAME: destination,
        }


async def test_two_services_and_a_caller_are_one_trace(
    client: Any, mqks_broker: Broker, spans: Spans
) -> None:
    app, done = App(mqks_broker.url, TRACING), anyio.Event()

    @app.consumer("orders", ["order.new"])
    async def order(message: Message) -> None:
        reply = await app.client.call("price.ask", message.text)
        await app.client.publish("mail.due", reply.text)

    @app.consumer("prices", ["price.ask"])
    async def price(message: Message) -> float:
        return 9.5

    @app.consumer("mails", ["mail.due"])
    async def mail(message: Message) -> None:
        done.set()

    around = trace.get_tracer("tests").start_as_current_span("the whole service")
    async with AsyncExitStack() as stack:
        with around:
            await stack.enter_async_context(serving(app))
        for queue, event in ("orders", "order.new"), ("prices", "price.ask"), ("mails", "mail.due"):
            await client.subscribe(queue, [event])
        await client.publish("order.new", "tea", confirm=True)
        await done.wait()

    parents = {
        "publish order.new": None,
        "process orders": "publish order.new",
        "publish price.ask": "process orders",
        "process prices": "publish price.ask",
        "publish reply.{client}": "process prices",
        "ack prices": "process prices",
        "publish mail.due": "process orders",
        "ack orders": "process orders",
        "process mails": "publish mail.due",
        "ack mails": "process mails",
    }
    assert {*spans.names()} == {*parents, "the whole service"}
    for name, parent in parents.items():
        assert parent_id(spans[name]) == (parent and span_id(spans[parent])), name
    reply = attributes(spans["publish reply.{client}"])
    assert re.fullmatch("reply\\.[0-9a-f]{32}", reply[conventions.MESSAGING_DESTINATION_NAME])
    assert reply[conventions.MESSAGING_DESTINATION_TEMPLATE] == "reply.{client}"
    assert reply[conventions.MESSAGING_DESTINATION_TEMPORARY] is True
    asked = reply[conventions.MESSAGING_MESSAGE_CONVERSATION_ID]
    request = attributes(spans["publish price.ask"])
    assert request[conventions.MESSAGING_MESSAGE_CONVERSATION_ID] == asked


async def test_failures_of_a_service(
    client: Any, skin: Any, mqks_broker: Broker, spans: Spans
) -> None:
    app, done = App(mqks_broker.url, TRACING), anyio.Event()
    failing = f"failing.{skin.__name__}"

    @app.consumer(failing, ["fail"], backoff=None)
    async def fail(message: Message) -> None:
        if not message.retry:
            raise ZeroDivisionError("by zero")
        done.set()

    @app.consumer("asked", ["ask"])
    async def answer(message: Message) -> None:
        raise LookupError("no such price")

    async with serving(app):
        await client.subscribe(failing, ["fail"])
        await client.subscribe("asked", ["ask"])
        await client.publish("fail", "x", confirm=True)
        await done.wait()
        with pytest.raises(CallFailed, match="no such price"):
            await client.call("ask")

    first, second = (span for span in spans.all() if span.name == f"process {failing}")
    assert (first.status.status_code, first.status.description) == (StatusCode.ERROR, "by zero")
    assert attributes(first)["error.type"] == "ZeroDivisionError"
    assert [event.name for event in first.events] == ["exception"]
    assert second.status.status_code is StatusCode.UNSET
    assert parent_id(first) == parent_id(second) == span_id(spans["publish fail"])
    assert parent_id(spans[f"reject {failing}"]) == span_id(first)
    assert parent_id(spans[f"ack {failing}"]) == span_id(second)
    failed = spans["process asked"]
    assert attributes(failed)["error.type"] == "LookupError"
    assert parent_id(spans["publish reply.{client}"]) == span_id(failed)
    told = {
        point.attributes.get("error.type"): point.count
        for point in points(messaging_metrics.MESSAGING_PROCESS_DURATION, "process", failing)
    }
    assert told == {"ZeroDivisionError": 1, None: 1}


async def test_a_block_that_raises_rejects_within_its_span(
    client: Any, consumer: Any, spans: Spans
) -> None:
    await client.publish("e", "x")
    with pytest.raises(KeyError):
        async with (await consumer.receive(WAIT_S)).process():
            raise KeyError("k")

    assert spans.names() == ["publish e", "process q", "reject q"]
    assert attributes(spans["process q"])["error.type"] == "KeyError"
    assert parent_id(spans["reject q"]) == span_id(spans["process q"])
    assert not trace.get_current_span().get_span_context().is_valid


async def test_within_another_span_a_link_leads_to_the_producer(
    consumer: Any, client: Any, spans: Spans
) -> None:
    await client.publish("e", "1")
    await client.publish("e", "2")
    messages = [await consumer.receive(WAIT_S) for _ in range(2)]
    with trace.get_tracer("tests").start_as_current_span("around"):
        with messages[0].process():
            pass
        messages[1].release()

    published = [span for span in spans.all() if span.name == "publish e"]
    around = span_id(spans["around"])
    assert parent_id(spans["process q"]) == parent_id(spans["release q"]) == around
    assert link_ids(spans["process q"]) == [span_id(published[0])]
    assert link_ids(spans["release q"]) == [span_id(published[1])]
    assert not spans["ack q"].links


async def test_batches(skin: Any, client: Any, spans: Spans) -> None:
    event = queue = f"batches.{skin.__name__}"
    async with client.consume(queue, [event], prefetch=0) as consumer:
        await client.publish_many([(event, str(n)) for n in range(1000)], meta={"a": "b"})
        await client.publish(event, "last", confirm=True)
        messages: list[Message] = []
        async for batch in consumer.batches():
            messages += batch
            if len(messages) == 1001:
                break
        consumer.ack(messages)
        assert await client.publish_many([("e1", "x"), ("e2", "x")]) == 2
        assert await client.publish_many([]) == 0

    many, one, ack, mixed, none = spans.all()
    names = [f"publish {event}", f"publish {event}", f"ack {queue}", "publish", "publish"]
    assert spans.names() == names
    counts = [
        attributes(span).get(conventions.MESSAGING_BATCH_MESSAGE_COUNT)
        for span in (many, one, ack, mixed, none)
    ]
    assert counts == [1000, None, 1001, 2, 0]
    assert {(message.meta["a"], message.traceparent) for message in messages[:-1]} == {
        ("b", traceparent(many))
    }
    assert link_ids(ack) == [span_id(many)]  # The last message is beyond LINKS_MAX.
    assert conventions.MESSAGING_MESSAGE_ID not in attributes(ack)
    [sent] = points(messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES, "publish", event)
    [got] = points(messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES, "consume", queue)
    assert sent.value == got.value == 1001


async def test_an_ack_of_many_has_a_link_to_each_producer(client: Any, spans: Spans) -> None:
    count = tracing.LINKS_MAX + 2
    async with client.consume("q", ["e"], prefetch=0) as consumer:
        for _ in range(count):
            await client.publish("e", "x")
        consumer.ack([await consumer.receive(WAIT_S) for _ in range(count)])

    published = [span_id(span) for span in spans.all() if span.name == "publish e"]
    assert link_ids(spans["ack q"]) == published[: tracing.LINKS_MAX]


async def test_metrics(client: Any, skin: Any, mqks_broker: Broker, spans: Spans) -> None:
    event = queue = f"metrics.{skin.__name__}"
    async with client.consume(queue, [event]) as consumer:
        for _ in range(3):
            await client.publish(event, "x", confirm=True)
        for _ in range(2):
            with (await consumer.receive(WAIT_S)).process():
                pass
        (await consumer.receive(WAIT_S)).reject(dead=True)

    [sent] = points(messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES, "publish", event)
    common = {
        "messaging.system": "mqks",
        "messaging.destination.name": event,
        "server.address": "127.0.0.1",
        "server.port": mqks_broker.port,
    }
    assert sent.value == 3
    assert sent.attributes == {**common, "messaging.operation.name": "publish"}
    [got] = points(messaging_metrics.MESSAGING_CLIENT_CONSUMED_MESSAGES, "consume", queue)
    assert got.value == 3
    for name, operation, kind, count in (
        (messaging_metrics.MESSAGING_PROCESS_DURATION, "process", "process", 2),
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "publish", "send", 3),
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "ack", "settle", 2),
        (messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "reject", "settle", 1),
    ):
        [point] = points(name, operation, queue)
        assert isinstance(point, HistogramDataPoint)
        assert point.count == count
        assert point.attributes == {
            **common,
            "messaging.operation.name": operation,
            "messaging.operation.type": kind,
        }
        assert tuple(point.explicit_bounds) == tracing.BUCKETS_S
    assert not points(messaging_metrics.MESSAGING_CLIENT_OPERATION_DURATION, "process", queue)


async def test_metrics_name_a_limited_number_of_events(
    client: Any, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_names", set[str]())
    monkeypatch.setattr(tracing, "NAMES_MAX", 3)
    name = messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES
    for number in range(10):
        await client.publish(f"limited.{number}", "x", confirm=True)

    named = [number for number in range(10) if points(name, "publish", f"limited.{number}")]
    assert named == [0, 1, 2]
    assert len(spans.all()) == 10


async def test_publishes_that_fail(
    client: Any, skin: Any, mqks_broker: Broker, spans: Spans
) -> None:
    name, event = messaging_metrics.MESSAGING_CLIENT_SENT_MESSAGES, f"refused.{skin.__name__}"
    with pytest.raises(RequestFailed):
        await client.publish(event, "x", confirm=True, mandatory=True)
    with pytest.raises(PublishFailed):
        await client.publish_many([(event, "1"), (event, "2")], mandatory=True)
    for data in ("x" * 1_500_000, "x" * 2_000_000):
        with pytest.raises(InvalidRequest) as raised:
            await client.publish(event, data)
        assert raised.value.__context__ is None
    with pytest.raises(InvalidRequest):
        await client.publish_many([(event, "1"), (event, "\ud800")])
    await anyio.to_thread.run_sync(mqks_broker.stop)
    with pytest.raises(ReplyTimeout):
        await client.publish(event, "x", confirm=True, timeout_s=0)
    await anyio.to_thread.run_sync(mqks_broker.start)

    assert {span.status.status_code for span in spans.all()} == {StatusCode.ERROR}
    kinds = [attributes(span)["error.type"] for span in spans.all()]
    assert kinds == [
        *("RequestFailed", "PublishFailed", "InvalidRequest", "InvalidRequest"),
        *("InvalidRequest", "ReplyTimeout"),
    ]
    counted = {
        point.attributes["error.type"]: point.value for point in points(name, "publish", event)
    }
    assert counted == {"RequestFailed": 1, "PublishFailed": 2, "ReplyTimeout": 1}


async def test_arguments_that_are_wrong_raise_as_without_traces(
    client: Any, skin: Any, mqks_broker: Broker, spans: Spans
) -> None:
    calls: list[Callable[[Any], Any]] = [
        lambda client: client.publish(17, "x"),
        lambda client: client.publish("a b", "x"),
        lambda client: client.publish("e", "x", meta=17),
        lambda client: client.publish("e", "x", meta={"queue": "reserved"}),
        lambda client: client.publish_many([(["e"], "x")]),
        lambda client: client.publish_many([("e", "x")], meta={"k": 17}),
        lambda client: client.publish_many([("e",)]),
        lambda client: client.publish_many("ab"),
        lambda client: client.publish_many({"e": "x"}),
        lambda client: client.publish_many([()]),
        lambda client: client.publish_many(17),
    ]
    async with skin(mqks_broker.url) as plain:
        for call in calls:
            with pytest.raises((InvalidRequest, TypeError, ValueError, AttributeError)) as expected:
                await call(plain)
            with pytest.raises(expected.type) as raised:
                await call(client)
            assert str(raised.value) == str(expected.value)
        async with client.consume("q", ["e"]) as consumer:
            await client.publish("e", "x")
            with pytest.raises(TypeError, match="needs a list of messages"):
                consumer.ack(await consumer.receive(WAIT_S))


NO_TRACEPARENTS = [
    *("", "x", "00", TRACEPARENT[:-1], TRACEPARENT.upper(), f"ff{TRACEPARENT[2:]}"),
    *("00-" + "0" * 32 + f"-{SPAN_ID}-01", f"00-{TRACE_ID}-" + "0" * 16 + "-01"),
    *(TRACEPARENT + "-more", "9" * 3000, "\udcff" * 300, "00-\n-\0-01", "00-" + "é" * 32),
]
NO_STATES = ["\udcff=1", "\udcff", "=,;", "a=" + "%FF" * 500, ",=" * 600]
HOSTILE = [
    *({"traceparent": bad} for bad in NO_TRACEPARENTS),
    *({"traceparent": bad, "tracestate": bad, "baggage": bad} for bad in NO_TRACEPARENTS[:8]),
    *({"traceparent": TRACEPARENT, "tracestate": bad} for bad in NO_STATES),
    *({"traceparent": TRACEPARENT, "baggage": bad} for bad in NO_STATES),
]


@pytest.mark.parametrize("meta", HOSTILE)
async def test_bad_state_or_baggage_does_not_cost_the_trace_and_a_bad_traceparent_is_none(
    consumer: Any, client: Any, mqks_broker: Broker, spans: Spans, meta: dict[str, str]
) -> None:
    async with connect(mqks_broker.url) as stranger:
        await stranger.publish("e", "x", meta=meta | {"a": "b"}, confirm=True)
    async with (await consumer.receive(WAIT_S)).process():
        await client.publish("other", "y")

    wanted = int(SPAN_ID, 16) if meta["traceparent"] == TRACEPARENT else None
    assert (parent_id(spans["process q"]), spans["process q"].links) == (wanted, ())
    assert in_one_trace(spans.all())


async def test_a_propagator_that_raises_at_what_it_reads_does_not_end_the_work(
    consumer: Any, client: Any, spans: Spans, monkeypatch: pytest.MonkeyPatch
) -> None:
    def extract(*arguments: object, **options: object) -> None:
        raise ValueError("what is this?")

    await client.publish("e", "x")
    monkeypatch.setattr("opentelemetry.propagate.extract", extract)
    async with (await consumer.receive(WAIT_S)).process():
        pass

    assert spans.names() == ["publish e", "process q", "ack q"]
    assert parent_id(spans["process q"]) is None


async def test_names_that_are_not_utf8_can_be_exported(client: Any, spans: Spans) -> None:
    async with client.consume("q\udcff", ["e\udcff"]) as consumer:
        await client.publish("e\udcff", "x", id="i\udcff" + "d" * 250)
        await client.publish("long" * 1000, "x")
        with suppress(ValueError), (await consumer.receive(WAIT_S)).process():
            raise ValueError("bad \udcff")

    assert spans.names() == [
        *("publish e\\udcff", "publish " + "long" * 64, "process q\\udcff", "reject q\\udcff")
    ]
    for span in spans.all():
        texts = [span.name, *map(str, attributes(span).values()), span.status.description or ""]
        assert "".join(texts).encode()
        assert len(attributes(span)[conventions.MESSAGING_MESSAGE_ID]) < 300


async def test_what_the_program_has_in_meta_is_kept(client: Any, spans: Spans) -> None:
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        own = {"tenant": "ü=&", "traceparent": TRACEPARENT}
        await client.publish("e", "x", meta=own)
        assert (await consumer.receive(WAIT_S)).meta == own
        await client.publish("e", "x", meta={"tenant": "ü=&"})
        published = spans.all()[-1]
        assert (await consumer.receive(WAIT_S)).meta == {
            "tenant": "ü=&",
            "traceparent": traceparent(published),
        }


async def test_baggage_goes_along(client: Any, spans: Spans) -> None:
    token = context.attach(baggage.set_baggage("tenant", "blue"))
    try:
        await client.subscribe("q", ["e"])
        await client.publish("e", "x", confirm=True)
    finally:
        context.detach(token)
    async with client.consume("q") as consumer:
        async with (await consumer.receive(WAIT_S)).process() as message:
            assert message.meta["baggage"] == "tenant=blue"
            assert baggage.get_baggage("tenant") == "blue"
        assert baggage.get_baggage("tenant") is None


@pytest.mark.parametrize("free", [0, 40, 67, 68, 100])
async def test_a_trace_takes_only_the_room_that_meta_leaves(
    skin: Any, mqks_broker: Broker, spans: Spans, free: int
) -> None:
    token = context.attach(baggage.set_baggage("long", "x" * 100))
    try:
        async with (
            skin(mqks_broker.url, TRACING) as client,
            client.consume("q", ["e"], auto_ack=True) as consumer,
        ):
            own = {"k": "v" * (4096 - 2 - free)}
            await client.publish("e", "x", meta=own, confirm=True)
            await client.publish_many([("e", "x")], meta=own)
            for published in spans.all():
                added = {"traceparent": traceparent(published)} if free >= 68 else {}
                assert (await consumer.receive(WAIT_S)).meta == {**own, **added}
            with pytest.raises(InvalidRequest, match="4096"):
                await client.publish("e", "x", meta={"k": "v" * 5000})
    finally:
        context.detach(token)


async def test_a_line_that_is_as_long_as_may_be_goes_without_a_trace(
    skin: Any, mqks_broker: Broker, spans: Spans
) -> None:
    options = Options(tracing=True, line_bytes_max=2000)
    async with (
        skin(mqks_broker.url, options) as client,
        client.consume("q", ["e"], auto_ack=True) as consumer,
    ):
        for confirm in True, False:
            await client.publish("e", "x" * 1950, id="i", confirm=confirm)
            assert (await consumer.receive(WAIT_S)).meta == {}
        await client.publish("e", "x" * 1850, id="j")
        assert (await consumer.receive(WAIT_S)).traceparent is not None
    assert {span.status.status_code for span in spans.all()} == {StatusCode.UNSET}


async def test_touch_and_a_second_ack_have_no_span(
    consumer: Any, client: Any, spans: Spans
) -> None:
    async with client.consume("free", ["e"], auto_ack=True) as free:
        await client.publish("e", "x")
        message = await consumer.receive(WAIT_S)
        message.touch()
        message.ack()
        message.ack()
        message.reject()
        with pytest.raises(InvalidRequest, match="auto_ack"):
            (await free.receive(WAIT_S)).process()

    assert spans.names() == ["publish e", "ack q"]
    assert link_ids(spans["ack q"]) == [span_id(spans["publish e"])]


WITHOUT = """
import sys
import mqks

with mqks.blocking.connect() as client, client.consume("q", ["e"]) as consumer:
    client.publish("e", "x", confirm=True)
    with consumer.receive(60).process() as message:
        print(message.meta)

app = mqks.App()

@app.consumer("q")
async def work(message):
    loaded = {name for name in sys.modules if "opentelemetry" in name or "trac" in name}
    print(loaded - {"traceback"}, flush=True)
    import os, signal
    os.kill(os.getpid(), signal.SIGTERM)

with mqks.blocking.connect() as client:
    client.publish("e", "x", confirm=True)
app.run()
"""


def test_nothing_is_imported_that_nobody_has_asked_for(mqks_broker: Broker, tmp_path: Path) -> None:
    done = ended(tmp_path, mqks_broker.url, WITHOUT, "-W", "error")

    assert (done.stdout, done.returncode) == ("{}\nset()\n", 0), done.stderr


def test_the_example(mqks_broker: Broker) -> None:
    with blocking.connect(mqks_broker.url) as client:
        client.subscribe("orders", ["order.new"])
        client.subscribe("mailer", ["mail.due"])
        client.publish("order.new", {"no": 17}, confirm=True)
    services = [
        subprocess.Popen(
            [sys.executable, "-W", "error", ROOT / f"examples/traces/{name}.py"],
            env=environment(mqks_broker.url),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for name in ("shop", "mailer")
    ]
    try:
        lines = []
        for service, count in zip(services, (3, 4), strict=True):
            assert service.stdout is not None
            lines.append([service.stdout.readline() for _ in range(count)])
            service.send_signal(signal.SIGTERM)
            assert service.wait(WAIT_S) == 0
    finally:
        for service in services:
            service.kill()
            service.communicate()
    shop, mailer = lines
    assert mailer.pop(1) == "Your order 17 has arrived.\n"
    form = re.compile(r"(.+): trace=(\w{32}) span=(\w{16}) parent=(\w+)\n")
    told = [found.groups() for line in shop + mailer if (found := form.fullmatch(line))]
    (_, _, publish, _), (_, _, orders, _), _, _, (_, _, mails, _), _ = told
    assert [(name, parent) for name, _, _, parent in told] == [
        ("publish mail.due", orders),
        ("process orders", "none"),
        ("ack orders", orders),
        ("write the mail", mails),
        ("process mailer", publish),
        ("ack mailer", mails),
    ]
    assert len({trace_id for _, trace_id, _, _ in told}) == 1
