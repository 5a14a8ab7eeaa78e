"""The cases that FastStream has for each of its brokers, on ours: on a server, and on the test
broker. Its sources have no tests, so these are ours, under its names.

The one rule: each case that does not apply is named here, with its reason:

- consume and publish of batches: asyncio.gather publishes many together, and each message is acked
  alone;
- connection arguments of `connect`: it has none;
- paths in publishers: an event that is published is a name;
- SASL, OAuth, GSSAPI: credentials are in the URL, TLS in Options;
- concurrency between partitions: there are none.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any
from unittest.mock import MagicMock

import pytest

from mqks.testing import Broker
from tests.kit.waiting import WAIT_S

pytest.importorskip("faststream", reason="the extra faststream is not installed")
import prometheus_client
from faststream import BaseMiddleware, Context, Depends, ExceptionMiddleware, FastStream, Path
from faststream.exceptions import IncorrectState, SetupError, StopConsume, SubscriberNotFound
from faststream.message import StreamMessage
from faststream.middlewares import AckPolicy
from faststream.response import Response
from faststream.specification import AsyncAPI
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import BaseModel

from mqks.faststream import (
    MqksBroker,
    MqksMessage,
    MqksMessageContext,
    MqksResponse,
    MqksRoute,
    MqksRoutePublisher,
    MqksRouter,
    TestMqksBroker,
)
from mqks.faststream.fastapi import MqksStreamRouter
from mqks.faststream.opentelemetry import MqksTelemetryMiddleware
from mqks.faststream.prometheus import MqksPrometheusMiddleware

pytestmark = pytest.mark.anyio
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("cases") / "db") as server:
        yield server


@dataclass
class Case:
    url: str
    is_real: bool
    queue: str

    def __post_init__(self) -> None:
        self.got: asyncio.Queue[Any] = asyncio.Queue()

    def broker(self, **options: Any) -> MqksBroker:
        return MqksBroker(self.url, **options)

    @asynccontextmanager
    async def running(self, broker: MqksBroker) -> AsyncIterator[MqksBroker]:
        if self.is_real:
            async with broker:
                await broker.start()
                yield broker
        else:
            async with TestMqksBroker(broker, connect_only=False) as running:
                yield running

    async def next(self) -> Any:
        async with asyncio.timeout(WAIT_S):
            return await self.got.get()

    async def answer(self, handle: Any, sent: Any, headers: Any = None, **options: Any) -> Any:
        """What this handler, of a broker with these options, answers."""
        broker = self.broker(**options)
        broker.subscriber(self.queue)(handle)
        async with self.running(broker):
            reply = await broker.request(sent, self.queue, headers=headers, timeout=WAIT_S)
            return await reply.decode()


@pytest.fixture(params=["server", "memory"])
def case(request: pytest.FixtureRequest, server: Broker) -> Case:
    return Case(server.url, request.param == "server", f"q{next(NUMBERS)}")


class Order(BaseModel):
    no: int


# -- consume


async def test_consume(case: Case) -> None:
    broker, queue = case.broker(), case.queue

    @broker.subscriber(queue)
    @broker.subscriber(f"{queue}.2")
    async def handle(body: Any) -> None:
        case.got.put_nowait(body)

    async with case.running(broker):
        for event in (queue, f"{queue}.2"):
            await broker.publish("hello", event)
            assert await case.next() == "hello"
        await broker.publisher(queue).publish("of a publisher after the start")
        assert await case.next() == "of a publisher after the start"


async def test_different_consume(case: Case) -> None:
    """Each queue that is bound to an event gets it, and one consumer of each."""
    broker, queue = case.broker(), case.queue

    @broker.subscriber(f"{queue}.a", [queue])
    async def first(body: str) -> None:
        case.got.put_nowait("a")

    @broker.subscriber(f"{queue}.b", [queue])
    async def second(body: str) -> None:
        case.got.put_nowait("b")

    @broker.subscriber(f"{queue}.b", [queue])
    async def another(body: str) -> None:
        case.got.put_nowait("b")

    async with case.running(broker):
        for _ in range(10):
            await broker.publish("hello", queue)
            assert {await case.next(), await case.next()} == {"a", "b"}
        await broker.publish("hello", queue, to=f"{queue}.a")
        assert await case.next() == "a"
        assert case.got.empty()


async def test_consume_with_filter(case: Case) -> None:
    broker = case.broker()
    subscriber = broker.subscriber(case.queue)

    @subscriber(filter=lambda message: message.content_type == "application/json")
    async def objects(body: Order) -> None:
        case.got.put_nowait(body.no)

    @subscriber
    async def others(body: Any) -> None:
        case.got.put_nowait(body)

    async with case.running(broker):
        await broker.publish(Order(no=1), case.queue)
        await broker.publish(b"raw", case.queue)
        assert [await case.next(), await case.next()] == [1, b"raw"]


async def test_consume_validate_false(case: Case) -> None:
    async def handle(body: Order) -> Any:
        return body

    assert await case.answer(handle, {"no": "1"}, apply_types=False) == {"no": "1"}


async def test_a_sync_handler(case: Case) -> None:
    def handle(body: Order) -> int:
        return body.no

    assert await case.answer(handle, {"no": 5}) == 5


async def test_dynamic_sub(case: Case) -> None:
    broker = case.broker()

    async def handle(body: str) -> None:
        case.got.put_nowait(body)

    async with case.running(broker):
        subscriber = broker.subscriber(case.queue, persistent=False)
        subscriber(handle)
        await subscriber.start()
        await broker.publish("hello", case.queue)
        assert await case.next() == "hello"
        await subscriber.stop()


async def test_path(case: Case) -> None:
    broker, router = case.broker(), MqksRouter(prefix=f"{case.queue}.")

    @router.subscriber("q", ["logs.{level}.{host}", "all.{kind}.**"])
    async def handle(
        level: Annotated[str, Path(default="-")], kind: Annotated[str, Path(default="-")]
    ) -> None:
        case.got.put_nowait((level, kind))

    broker.include_router(router)
    async with case.running(broker):
        for event in ("logs.warn.a", "all.x.y.z", "logs..b"):
            await broker.publish(None, f"{case.queue}.{event}")
        told = [await case.next() for _ in range(3)]
        assert told == [("warn", "-"), ("-", "x"), ("", "-")]


async def test_stop_consume_exc(server: Broker) -> None:
    case = Case(server.url, True, f"q{next(NUMBERS)}")
    broker = case.broker()

    @broker.subscriber(case.queue)
    async def handle(body: str) -> None:
        case.got.put_nowait(body)
        raise StopConsume

    async with case.running(broker):
        await broker.publish("1", case.queue)
        await broker.publish("2", case.queue)
        assert await case.next() == "1"
        client = await broker.lazy.get()
        while (await client.stats("queue", case.queue))["consumers"]:
            await asyncio.sleep(0.01)
        told = await client.stats("queue", case.queue)
        assert (told["ready"], told["scheduled"]) == (1, 1)  # One was nacked.
        assert case.got.empty()


# -- publish


SERIALIZED: list[tuple[Any, Any, Any]] = [
    ("hello", str, "hello"),
    (b"hello", bytes, b"hello"),
    (b"\x00\n\xff\t\r", bytes, b"\x00\n\xff\t\r"),
    (1, int, 1),
    (1.5, float, 1.5),
    (False, bool, False),
    ({"m": "1"}, dict[str, int], {"m": 1}),
    ([1, 2], list[float], [1.0, 2.0]),
    (Order(no=3), Order, Order(no=3)),
    (datetime(2026, 1, 2), datetime, datetime(2026, 1, 2)),
    (None, Any, b""),
]
"""What is sent, what a handler declares, and what it gets."""


@pytest.mark.parametrize(("sent", "of", "expected"), SERIALIZED, ids=repr)
async def test_serialize(case: Case, sent: Any, of: Any, expected: Any) -> None:
    async def handle(body: Any) -> None:
        case.got.put_nowait(body)

    handle.__annotations__["body"] = of
    await case.answer(handle, sent)
    assert await case.next() == expected


@pytest.mark.parametrize("sent", [{"a": 1, "b": 2}, [1, 2]])
async def test_unwrap(case: Case, sent: Any) -> None:
    async def handle(a: int, b: int) -> Any:
        return f"{a} {b}"

    assert await case.answer(handle, sent) == "1 2"


async def test_publishers(case: Case) -> None:
    """As a decorator, several of them, an object, one that is used twice, and by hand."""
    broker, queue = case.broker(), case.queue
    shared = broker.publisher(f"{queue}.out", headers={"a": "1", "b": "1"}, priority=5)

    @broker.subscriber(f"{queue}.1")
    @shared
    async def first(body: Any) -> Any:
        return Response("1", headers={"b": "2"}, correlation_id="c")

    @broker.subscriber(f"{queue}.2")
    @shared
    @broker.publisher(f"{queue}.out")
    async def second(body: Any) -> Any:
        return MqksResponse("2", key="k")

    @broker.subscriber(f"{queue}.3")
    async def third(body: Any) -> None:
        await shared.publish("3", headers={"b": "3"}, correlation_id="d")

    @broker.subscriber(f"{queue}.out")
    async def out(body: str, message: MqksMessageContext) -> None:
        raw = message.raw_message
        case.got.put_nowait((body, message.headers, raw.priority, raw.key, message.correlation_id))

    async with case.running(broker):
        await broker.publish(None, f"{queue}.1", correlation_id="x")
        assert await case.next() == ("1", {"a": "1", "b": "2"}, 5, None, "c")
        await broker.publish(None, f"{queue}.2", correlation_id="x")
        assert await case.next() == ("2", {}, 0, "k", "x")
        assert await case.next() == ("2", {"a": "1", "b": "1"}, 5, "k", "x")
        await broker.publish(None, f"{queue}.3", correlation_id="x")
        assert await case.next() == ("3", {"a": "1", "b": "3"}, 5, None, "d")


async def test_reply_to(case: Case) -> None:
    broker, queue = case.broker(), case.queue

    @broker.subscriber(queue)
    async def handle(body: str) -> str:
        return body.upper()

    @broker.subscriber(f"{queue}.silent", no_reply=True)
    async def silent(body: str) -> str:
        return "never"

    @broker.subscriber(f"{queue}.replies")
    async def replies(body: str, message: MqksMessageContext) -> None:
        case.got.put_nowait((body, message.correlation_id, message.reply_to))

    async with case.running(broker):
        await broker.publish("no", f"{queue}.silent", reply_to=f"{queue}.replies")
        await broker.publish("a", queue, reply_to=f"{queue}.replies", correlation_id="7")
        assert await case.next() == ("A", "7", "")
        assert case.got.empty()


async def test_message_context(case: Case) -> None:
    broker = case.broker()

    @broker.subscriber(case.queue)
    async def handle(
        body: str,
        message: MqksMessageContext,
        header: Annotated[str, Context("message.headers.custom")],
        of: Annotated[Any, Context("broker")],
    ) -> None:
        assert of is broker
        case.got.put_nowait((header, message.message_id, message.content_type))

    async with case.running(broker):
        headers = {"custom": "ä & = ,", "content-type": "text/plain"}
        name = await broker.publish(b"text", case.queue, headers=headers)
        assert await case.next() == ("ä & = ,", name, "text/plain")


async def test_a_message_is_declared_with_its_context() -> None:
    broker = MqksBroker()

    @broker.subscriber("q")
    async def handle(body: str, message: MqksMessage) -> None: ...

    with pytest.raises(SetupError, match="MqksMessageContext"):
        async with TestMqksBroker(broker, connect_only=False):
            pass


# -- requests


async def test_requests(case: Case) -> None:
    broker, router = case.broker(), MqksRouter(prefix=f"{case.queue}.")
    publisher, of_router = broker.publisher(case.queue), router.publisher("r")

    @broker.subscriber(case.queue)
    async def handle(body: Any) -> Any:
        return MqksResponse("answer", headers={"h": "1"})

    @router.subscriber("r")
    async def of_prefix(body: Any) -> Any:
        return {"no": 1}

    broker.include_router(router)
    async with case.running(broker):
        for asked in (
            broker.request(None, case.queue, correlation_id="1", timeout=WAIT_S),
            publisher.request(None, correlation_id="1", timeout=WAIT_S),
        ):
            reply = await asked
            assert (await reply.decode(), reply.headers) == ("answer", {"h": "1"})
            assert reply.correlation_id == "1"
        reply = await of_router.request(None, timeout=WAIT_S)
        assert await reply.decode() == {"no": 1}


async def test_request_timeout(case: Case) -> None:
    broker = case.broker()

    @broker.subscriber(case.queue)
    async def handle(body: Any) -> None:
        await asyncio.sleep(1)

    async with case.running(broker):
        with pytest.raises(TimeoutError):
            await broker.request(None, case.queue, timeout=0.01)


async def test_request_respects_middlewares_and_parsers(case: Case) -> None:
    seen = []

    class Marks(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            seen.append(msg.source_type.value)
            msg.body = msg.body + b"!"
            return await call_next(msg)

    async def parser(message: Any, original: Any) -> Any:
        parsed = await original(message)
        parsed.body = parsed.body + b"?"
        return parsed

    async def handle(body: str) -> str:
        return body

    assert await case.answer(handle, "a", middlewares=[Marks], parser=parser) == "a?!?!"
    assert len(seen) == 2


# -- routers


async def test_routers(case: Case) -> None:
    """Prefixes, nested ones, handlers and publishers that are declared later, dependencies."""
    made = MagicMock()

    async def later(body: str) -> str:
        return f"later {body}"

    route = MqksRoute(later, "later", publishers=[MqksRoutePublisher("out")])
    inner = MqksRouter(
        "inner.",
        [route],
        dependencies=[Depends(lambda: made.inner())],
        ack_policy=AckPolicy.REJECT_ON_ERROR,
    )
    outer = MqksRouter("outer.")
    outer.include_router(inner, prefix="mid.")

    @inner.subscriber("now")
    @inner.publisher("out")
    async def now(body: str) -> str:
        return f"now {body}"

    @inner.subscriber("out", title="Out")
    async def out(body: str) -> None:
        case.got.put_nowait(body)

    broker = case.broker(dependencies=[Depends(lambda: made.broker())])
    top = MqksRouter(f"{case.queue}.", routers=[outer])
    broker.include_router(top)
    async with case.running(broker):
        for name in ("later", "now"):
            await broker.publish("hello", f"{case.queue}.outer.mid.inner.{name}")
            assert await case.next() == f"{name} hello"
    assert made.inner.call_count == made.broker.call_count == 4
    assert {each.ack_policy for each in inner.subscribers} == {AckPolicy.REJECT_ON_ERROR}


async def test_router_parser_and_middlewares(case: Case) -> None:
    seen = []

    def marking(name: str) -> Any:
        class Marks(BaseMiddleware):
            async def on_receive(self) -> None:
                seen.append(name)

        return Marks

    router = MqksRouter(middlewares=[marking("router")], parser=parse_headers)

    @router.subscriber(case.queue)
    async def handle(body: str, message: MqksMessageContext) -> None:
        case.got.put_nowait(message.headers)

    broker = case.broker(middlewares=[marking("broker")])
    broker.include_router(router, middlewares=[marking("included")])
    async with case.running(broker):
        await broker.publish("hello", case.queue)
        assert await case.next() == {"parsed": "1"}
    assert seen == ["broker", "included", "router"]


async def parse_headers(message: Any, original: Any) -> Any:
    parsed: StreamMessage[Any] = await original(message)
    parsed.headers["parsed"] = "1"
    return parsed


# -- middlewares, parsers


async def test_middlewares(case: Case) -> None:
    """That of a consumed message, and that of what is published."""

    class Marks(BaseMiddleware):
        async def consume_scope(self, call_next: Any, msg: Any) -> Any:
            msg.body = msg.body + b" in"
            return await call_next(msg)

        async def publish_scope(self, call_next: Any, cmd: Any) -> Any:
            cmd.body += " out"
            cmd.headers["marked"] = "1"
            return await call_next(cmd)

        async def after_processed(self, *told: Any) -> Any:
            case.got.put_nowait("processed")
            return await super().after_processed(*told)

    broker = case.broker()
    broker.add_middleware(Marks)

    @broker.subscriber(case.queue)
    @broker.publisher(f"{case.queue}.out")
    async def handle(body: str) -> str:
        return body

    @broker.subscriber(f"{case.queue}.out")
    async def out(body: str, message: MqksMessageContext) -> None:
        case.got.put_nowait((body, message.headers))

    async with case.running(broker):
        await broker.publish("a", case.queue)
        told = [await case.next() for _ in range(3)]
        assert ("a out in out in", {"marked": "1"}) in told
        assert told.count("processed") == 2


async def test_exception_middleware(case: Case) -> None:
    async def handle(body: str) -> str:
        raise ValueError(body)

    catching = ExceptionMiddleware(publish_handlers={ValueError: lambda error: "caught"})
    assert await case.answer(handle, "a", middlewares=[catching]) == "caught"


async def test_decoders_and_codecs(case: Case) -> None:
    class Reversed:
        async def decode(self, msg: Any) -> Any:
            return msg.body[::-1].decode()

        async def encode(self, msg: Any, serializer: Any = None) -> Any:
            return str(msg).encode()[::-1], "text/reversed"

    broker = case.broker()

    @broker.subscriber(f"{case.queue}.1", decoder=lambda message: message.body.hex())
    async def handle(body: str) -> str:
        return body

    @broker.subscriber(f"{case.queue}.2", parser=parse_headers)
    async def parsed(body: str, message: MqksMessageContext) -> Any:
        return message.headers["parsed"]

    async with case.running(broker):
        for number, expected in ((1, "6162"), (2, "1")):
            reply = await broker.request("ab", f"{case.queue}.{number}", timeout=WAIT_S)
            assert str(await reply.decode()) == expected

    async def echo(body: str, message: MqksMessageContext) -> str:
        assert (message.body, message.content_type) == (b"cba", "text/reversed")
        return body

    assert await case.answer(echo, "abc", codec=Reversed()) == "abc"


# -- test broker


@pytest.mark.parametrize("with_real", [False, True])
async def test_mocks(server: Broker, with_real: bool) -> None:
    queue = f"q{next(NUMBERS)}"
    broker = MqksBroker(server.url)
    nobody, somebody = broker.publisher(f"{queue}.nobody"), broker.publisher(f"{queue}.somebody")

    @broker.subscriber(queue)
    @nobody
    @somebody
    async def handle(body: str) -> str:
        return f"{body}!"

    @broker.subscriber(f"{queue}.q", [f"{queue}.some*"])
    async def other(body: str) -> None:
        pass

    async with TestMqksBroker(broker, with_real=with_real, connect_only=False) as running:
        await running.publish("a", queue)
        async with asyncio.timeout(WAIT_S):
            while not (other.mock.called and nobody.mock.called):
                await asyncio.sleep(0.01)
        handle.mock.assert_called_once_with("a")
        for mock in (nobody.mock, somebody.mock, other.mock):
            mock.assert_called_once_with("a!")
    assert len(broker.subscribers) == 2


async def test_exceptions_raise_in_the_test() -> None:
    broker = MqksBroker()

    @broker.subscriber("q")
    async def handle(body: Any) -> None:
        raise ValueError("no")

    async with TestMqksBroker(broker, connect_only=False):
        with pytest.raises(ValueError, match="no"):
            await broker.publish(None, "q")
        with pytest.raises(SubscriberNotFound):
            await broker.request(None, "nobody")
        assert await broker.ping()


# -- the application


async def test_connections(server: Broker) -> None:
    broker = MqksBroker(server.url)
    await broker.stop()  # Before it was started.
    assert not await broker.ping(1)
    with pytest.raises(IncorrectState):
        await broker.publish(None, "e")
    for _ in range(2):
        async with broker:
            await broker.start()
            assert await broker.ping(WAIT_S)
        assert not await broker.ping(1)


async def test_lifespan(server: Broker) -> None:
    broker, steps = MqksBroker(server.url), list[str]()
    app = FastStream(broker)

    @app.after_startup
    async def begin() -> None:
        await broker.publish("hello", queue)

    @app.on_shutdown
    async def end() -> None:
        steps.append("end")

    queue = f"q{next(NUMBERS)}"

    @broker.subscriber(queue)
    async def handle(body: str) -> None:
        steps.append(body)
        app.exit()

    async with asyncio.timeout(WAIT_S):
        await app.run()
    assert steps == ["hello", "end"]


async def test_get_one(server: Broker) -> None:
    """What is got is acked when the next one is asked for, or by hand."""
    queue = f"q{next(NUMBERS)}"
    async with MqksBroker(server.url) as broker:
        subscriber = broker.subscriber(queue)
        await subscriber.start()
        assert await subscriber.get_one(timeout=0.01) is None
        for number in range(6):
            await broker.publish(number, queue)
        for number in range(2):
            message = await subscriber.get_one(timeout=WAIT_S)
            assert message is not None
            assert await message.decode() == number
        numbers = []
        async for message in subscriber:
            numbers.append(await message.decode())
            if numbers[-1] == 4:
                break
        assert numbers == [2, 3, 4]
        await subscriber.stop()
        client = await broker.lazy.get()
        assert [each.text for each in await client.peek(queue)] == ["4", "5"]


async def test_get_one_conflicts_with_handler(server: Broker) -> None:
    subscriber = MqksBroker(server.url).subscriber("q")

    @subscriber
    async def handle(body: str) -> None:
        pass

    with pytest.raises(AssertionError):
        await subscriber.get_one()


async def test_fastapi(server: Broker) -> None:
    fastapi: Any = pytest.importorskip("fastapi")
    queue, got = f"q{next(NUMBERS)}", asyncio.Queue[Any]()
    router: Any = MqksStreamRouter(server.url)

    @router.subscriber(queue)  # type: ignore[untyped-decorator]
    async def handle(no: int, double: int = fastapi.Depends(lambda no=0: 7)) -> None:
        got.put_nowait((no, double))

    app = fastapi.FastAPI()
    app.include_router(router)
    async with app.router.lifespan_context(app), asyncio.timeout(WAIT_S):
        await router.publisher(queue).publish({"no": 5})
        assert await got.get() == (5, 7)
    paths = [getattr(route, "path", "") for route in app.routes]
    assert "/asyncapi" in paths or router.docs_router is not None


def test_asyncapi() -> None:
    broker = MqksBroker(
        "mqks://user:secret@one:1,mqks://user:secret@two:2",
        description="Ours",
        tags=[{"name": "shop"}],
    )

    @broker.subscriber("orders", ["order.new", "order.{kind}.old"], description="All orders")
    @broker.publisher("order.done", title="Done", description="What is done", schema=int)
    async def handle(body: Order) -> int:
        return body.no

    @broker.subscriber("hidden", include_in_schema=False)
    async def hidden(body: Order) -> None:
        pass

    told = AsyncAPI(broker).to_specification()
    spec: Any = told.to_jsonable()
    addresses = {name: each["address"] for name, each in spec["channels"].items()}
    assert addresses == {
        "order.new:Handle": "order.new",
        "order.{kind}.old:Handle": "order.{kind}.old",
        "Done": "order.done",
    }
    assert "secret" not in told.to_json()
    servers = spec["servers"].values()
    assert {(each["host"], each["protocol"]) for each in servers} == {
        ("one:1", "mqks"),
        ("two:2", "mqks"),
    }
    assert spec["components"]["schemas"]["Order"]["properties"]["no"]["type"] == "integer"


# -- metrics and traces


async def test_prometheus(case: Case) -> None:
    registry = prometheus_client.CollectorRegistry()
    broker = case.broker(middlewares=[MqksPrometheusMiddleware(registry=registry, app_name="a")])

    @broker.subscriber(case.queue, [f"{case.queue}.*"])
    async def handle(body: str) -> None:
        case.got.put_nowait(body)

    async with case.running(broker):
        await broker.publish("hello", f"{case.queue}.x")
        await case.next()
    labels = {"app_name": "a", "broker": "mqks", "handler": f"{case.queue}.x"}
    name = "faststream_received_messages"
    assert registry.get_sample_value(f"{name}_total", labels) == 1
    assert registry.get_sample_value(f"{name}_size_bytes_sum", labels) == 5
    labels = {"app_name": "a", "broker": "mqks", "destination": f"{case.queue}.x"}
    labels["status"] = "success"
    assert registry.get_sample_value("faststream_published_messages_total", labels) == 1


async def test_opentelemetry(case: Case) -> None:
    """One trace goes through a publish, its handler, and what that publishes."""
    spans, reader, provider = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    telemetry = MqksTelemetryMiddleware(
        tracer_provider=provider, meter_provider=MeterProvider([reader])
    )
    broker = case.broker(middlewares=[telemetry])

    @broker.subscriber(case.queue)
    @broker.publisher(f"{case.queue}.out")
    async def handle(body: str) -> str:
        return body

    @broker.subscriber(f"{case.queue}.out")
    async def out(body: str, message: MqksMessageContext) -> None:
        case.got.put_nowait(message.headers["traceparent"])

    async with case.running(broker):
        await broker.publish("hello", case.queue)
        traceparent = await case.next()
    finished = spans.get_finished_spans()
    assert {span.context.trace_id for span in finished} == {int(traceparent.split("-")[1], 16)}
    assert {span.name for span in finished} >= {
        f"{case.queue}{of} {step}" for of in ("", ".out") for step in ("publish", "process")
    }
    assert {span.attributes["messaging.system"] for span in finished if span.attributes} == {"mqks"}
    assert reader.get_metrics_data() is not None
