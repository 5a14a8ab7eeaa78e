"""FastStream on a real server: what of it the server keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

import mqks
from mqks.testing import Broker
from tests.client.waiting import until
from tests.kit.proxy import Proxy
from tests.kit.waiting import WAIT_S

pytest.importorskip("faststream", reason="the extra faststream is not installed")
from faststream import FastStream
from faststream.exceptions import AckMessage, NackMessage, RejectMessage
from faststream.middlewares import AckPolicy

from mqks.faststream import MqksBroker, MqksMessageContext
from mqks.faststream.subscribing import MqksSubscriber

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
DEAD: Any = {"dead_letter_queue": "dead"}


@asynccontextmanager
async def started(broker: MqksBroker) -> AsyncIterator[mqks.AsyncClient]:
    """Its client. There is a queue for dead letters."""
    async with broker:
        client = await broker.lazy.get()
        await client.set_queue("dead")
        await broker.start()
        yield client


async def counts(broker: MqksBroker, queue: str = "q") -> tuple[int, int, int]:
    """Of its messages that are ready, unacked and scheduled."""
    told = await (await broker.lazy.get()).stats("queue", queue)
    return told["ready"], told["unacked"], told["scheduled"]


async def settles(broker: MqksBroker, *expected: int) -> None:
    await until(lambda: counts(broker), expected)


@pytest.mark.parametrize(
    ("policy", "expected", "why"),
    [
        (AckPolicy.ACK_FIRST, (0, 0, 0), None),
        (AckPolicy.ACK, (0, 0, 0), None),
        (AckPolicy.NACK_ON_ERROR, (0, 0, 1), None),
        (AckPolicy.REJECT_ON_ERROR, (0, 0, 0), "ValueError: no such customer"),
        (AckPolicy.MANUAL, (0, 1, 0), None),
    ],
)
async def test_ack_policies(
    mqks_broker: Broker, policy: AckPolicy, expected: tuple[int, int, int], why: str | None
) -> None:
    """Of a handler that fails, and of one that does not."""
    broker, ran = MqksBroker(mqks_broker.url, ack_policy=policy), list[str]()

    @broker.subscriber("q", backoff=3600, policy=DEAD)
    async def handle(body: str) -> None:
        if policy is AckPolicy.ACK_FIRST:
            await settles(broker, 0, 0, 0)
        ran.append(body)
        if body == "fail":
            raise ValueError("no such customer")

    async with started(broker) as client:
        await broker.publish("fail", "q")
        await until(lambda: ran)
        await settles(broker, *expected)
        if why is not None:
            (letter,) = await until(lambda: client.peek("dead"))
            assert letter.dead_letter
            assert letter.dead_letter.why == why
        if policy is not AckPolicy.MANUAL:
            await broker.publish("done", "q")
            await until(lambda: "done" in ran)
            await settles(broker, *expected)


@pytest.mark.parametrize("by", ["message", "exception"])
async def test_settled_by_hand(mqks_broker: Broker, by: str) -> None:
    broker = MqksBroker(mqks_broker.url)
    raised: dict[str, Any] = {
        "ack": AckMessage(),
        "nack": NackMessage(delay_s=3600),
        "reject": RejectMessage(reason="spoiled"),
    }
    how: dict[str, Any] = {"nack": {"delay_s": 3600}, "reject": {"reason": "spoiled"}}

    @broker.subscriber("q", policy=DEAD)
    async def handle(body: str, message: MqksMessageContext) -> None:
        if by == "exception":
            raise raised[body]
        await getattr(message, body)(**how.get(body, {}))
        await message.ack()  # Only the first one counts.

    async with started(broker) as client:
        for body in raised:
            await broker.publish(body, "q")
        await settles(broker, 0, 0, 1)
        (nacked,) = await client.peek("q", scheduled=True)
        assert (nacked.text, nacked.retry) == ("nack", 1)
        (letter,) = await until(lambda: client.peek("dead"))
        assert letter.dead_letter
        assert (letter.text, letter.dead_letter.why) == ("reject", "spoiled")


async def test_the_policy_of_the_queue_has_the_last_word(mqks_broker: Broker) -> None:
    broker, tries = MqksBroker(mqks_broker.url), list[int]()

    @broker.subscriber("q", policy=DEAD | {"retries": 3, "backoff": 0.01})
    async def handle(body: str, message: MqksMessageContext) -> None:
        tries.append(message.raw_message.retry)
        raise ValueError(body)

    async with started(broker) as client:
        await broker.publish("no", "q")
        (letter,) = await until(lambda: client.peek("dead"))
        assert tries == [0, 1, 2]
        assert letter.dead_letter
        assert (letter.dead_letter.reason, letter.dead_letter.why) == ("rejects", "ValueError: no")


async def test_handlers_have_no_more_than_their_workers(mqks_broker: Broker) -> None:
    broker, running, most, goes_on = MqksBroker(mqks_broker.url), 0, 0, asyncio.Event()

    @broker.subscriber("q", max_workers=3)
    async def handle(body: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await goes_on.wait()
        running -= 1

    async with started(broker):
        await asyncio.gather(*(broker.publish(number, "q") for number in range(10)))
        await settles(broker, 7, 3, 0)
        await until(lambda: most == 3)
        goes_on.set()
        await settles(broker, 0, 0, 0)
    assert most == 3


async def test_a_cancellation_in_a_handler_is_a_failure(mqks_broker: Broker) -> None:
    """Of what it waits for, for example; its worker goes on."""
    broker, ran = MqksBroker(mqks_broker.url), list[str]()

    @broker.subscriber("q", backoff=3600)
    async def handle(body: str) -> None:
        if body == "cancelled":
            future = asyncio.get_running_loop().create_future()
            future.cancel()
            await future
        ran.append(body)

    async with started(broker):
        for body in ("cancelled", "next"):
            await broker.publish(body, "q")
        await until(lambda: ran)
        await settles(broker, 0, 0, 1)
        assert ran == ["next"]


async def test_a_stop_gives_back_what_no_handler_has(mqks_broker: Broker) -> None:
    """And waits for the handler, whose message is acked."""
    broker, begun, goes_on = MqksBroker(mqks_broker.url), asyncio.Event(), asyncio.Event()
    ran = []

    @broker.subscriber("q", prefetch=5)
    async def handle(body: int) -> None:
        begun.set()
        await goes_on.wait()
        ran.append(body)

    async with mqks.connect(mqks_broker.url) as client:
        async with started(broker):
            await asyncio.gather(*(broker.publish(number, "q") for number in range(8)))
            await begun.wait()
            await settles(broker, 3, 5, 0)
            stopping = asyncio.create_task(broker.stop())

            async def held() -> tuple[int, int]:
                told = await client.stats("queue", "q")
                return told["ready"], told["unacked"]

            await until(held, (7, 1))
            goes_on.set()
            await stopping
        left = await client.peek("q")
        assert [each.text for each in left] == [f"{number}" for number in range(1, 8)]
        assert not any(each.retry for each in left[1:])  # The first may have been on its way.
        assert ran == [0]


async def test_a_stop_does_not_wait_for_ever(mqks_broker: Broker) -> None:
    broker, begun = MqksBroker(mqks_broker.url, graceful_timeout=0.01), asyncio.Event()

    @broker.subscriber("q")
    async def handle(body: int) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with started(broker):
        await broker.publish(1, "q")
        await begun.wait()
    async with mqks.connect(mqks_broker.url) as client:
        (message,) = await client.peek("q")
        assert message.retry == 1


async def test_an_application_ends_with_its_consumer(mqks_broker: Broker) -> None:
    """Instead of going on with nobody to handle anything."""
    broker = MqksBroker(mqks_broker.url)
    app = FastStream(broker)

    @broker.subscriber("q")
    async def handle(body: int) -> None:
        pass

    running = asyncio.create_task(app.run())
    (subscriber,) = broker.subscribers
    await until(lambda: subscriber.running)
    assert await broker.ping(WAIT_S)
    async with mqks.connect(mqks_broker.url) as client:
        (consumer,) = await client.stats("consumers")
        await client.request("delete_consumer", "--confirm", consumer["id"], "--tell")
        await running
    assert isinstance(subscriber, MqksSubscriber)
    assert subscriber.has_failed


async def test_a_lost_connection(mqks_broker: Broker, proxy: Proxy) -> None:
    """What a handler had is delivered again; what is published meanwhile waits, and is stored
    once."""
    broker = MqksBroker(f"mqks://127.0.0.1:{proxy.port}")
    tries, goes_on = list[int](), asyncio.Event()

    @broker.subscriber("q")
    async def handle(body: str, message: MqksMessageContext) -> None:
        tries.append(message.raw_message.retry)
        if len(tries) == 1:
            await goes_on.wait()

    async with started(broker):
        await broker.publish("a", "q")
        await until(lambda: tries)
        proxy.cut()
        await broker.publish("b", "other", to="q")
        goes_on.set()
        await until(lambda: len(tries) == 3)
        assert tries == [0, 1, 0]
        await settles(broker, 0, 0, 0)


async def test_what_cannot_be_sent(mqks_broker: Broker) -> None:
    """Raises, and nothing is sent."""
    broker = MqksBroker(mqks_broker.url)
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (mqks.InvalidRequest, {"message": "x" * MIB}),
        (mqks.InvalidRequest, {"event": "a b"}),
        (mqks.InvalidRequest, {"event": ""}),
        (mqks.InvalidRequest, {"headers": {"a": 1}}),
        (mqks.InvalidRequest, {"headers": {"reason": "x"}}),
        (mqks.InvalidRequest, {"headers": {"a": "x" * MIB}}),
        (mqks.InvalidRequest, {"priority": 1000}),
        (mqks.InvalidRequest, {"delay_s": -1}),
        (TypeError, {"pririty": 1}),
        (TypeError, {"meta": {}}),
        (mqks.RequestFailed, {"event": "nobody", "mandatory": True}),
    ]
    async with broker:
        subscriber = broker.subscriber("q")
        await subscriber.start()
        for kind, options in wrong:
            with pytest.raises(kind):
                await broker.publish(**{"message": "x", "event": "q", **options})
        await broker.publish("x" * (MIB - 300), "q")
        await settles(broker, 1, 0, 0)
        message = await subscriber.get_one(timeout=WAIT_S)
        assert message is not None
        assert len(message.body) == MIB - 300
    for declared in (
        lambda: broker.publisher("a b"),
        lambda: broker.publisher("e", priority=1000),
        lambda: broker.publisher("e", pririty=1),  # type: ignore[call-arg]
        lambda: broker.subscriber("q", "e"),
        lambda: broker.subscriber("q", max_workers=0),
        lambda: broker.subscriber("q", retries=-1),
        lambda: broker.subscriber("q", policy=DEAD | {"retires": 1}),
        lambda: broker.subscriber("a b"),
        lambda: MqksBroker("http://localhost"),
    ):
        with pytest.raises((mqks.InvalidRequest, mqks.ConfigurationError, TypeError)):
            declared()
    assert not broker.publishers


async def test_what_the_server_keeps(mqks_broker: Broker) -> None:
    """Delays, priorities and ids."""
    broker, ran = MqksBroker(mqks_broker.url), list[str]()

    async with broker:
        await broker.connect()
        client = await broker.lazy.get()
        await client.subscribe("q", ["q"])
        more: Any = {"key": "k", "ttl_s": 3600, "mandatory": True, "headers": {"a": "ä"}}
        await broker.publish("late", "q", delay_s=3600, reply_to="replies", **more)
        (late,) = await client.peek("q", scheduled=True)
        assert (late.key, late.meta["a"], late.meta["reply-to"]) == ("k", "ä", "replies")
        for priority in (-1, 5, 0):
            await broker.publish(str(priority), "q", priority=priority)
        for _ in range(2):
            await broker.publish("once", "q", id="7", once=True, priority=-2)
        assert await counts(broker) == (4, 0, 1)

        @broker.subscriber("q")
        async def handle(body: str) -> None:
            ran.append(body)

        await broker.start()
        await until(lambda: len(ran) == 4)
        assert ran == ["5", "0", "-1", "once"]


async def test_a_first_start_loses_nothing(mqks_broker: Broker) -> None:
    """What a handler publishes is kept for subscribers that start after it."""
    broker, got = MqksBroker(mqks_broker.url), list[int]()

    def chained(number: int) -> None:
        @broker.subscriber(f"q{number}", [f"e{number}"])
        @broker.publisher(f"e{number + 1}")
        async def handle(body: int) -> int:
            got.append(body)
            return body + 1

    for number in range(8):  # They start in any order.
        chained(number)
    async with mqks.connect(mqks_broker.url) as client:
        await client.subscribe("q0", ["e0"])
        await client.publish("e0", 0, confirm=True)
    async with started(broker):
        await until(lambda: len(got) == 8)
    assert got == [*range(8)]


async def test_other_clients(mqks_broker: Broker) -> None:
    """A service of `mqks.App` and a handler of FastStream ask each other."""
    broker, app, stop = MqksBroker(mqks_broker.url), mqks.App(mqks_broker.url), asyncio.Event()

    @app.consumer("service", ["service"])
    async def serve(message: mqks.Message) -> Any:
        if message.meta["custom"] == "fail":
            raise ValueError("no")
        return {"asked": message.json()}

    @broker.subscriber("q")
    async def handle(body: dict[str, int]) -> Any:
        return body["no"] + 1

    async with broker, mqks.connect(mqks_broker.url) as client:
        await broker.start()
        await client.subscribe("service", ["service"])
        service = asyncio.create_task(app.serve(stop))  # type: ignore[arg-type]
        reply = await broker.request([1], "service", headers={"custom": "1"})
        assert await reply.decode() == {"asked": [1]}
        with pytest.raises(mqks.CallFailed):
            await broker.request([1], "service", headers={"custom": "fail"})
        assert (await client.call("q", {"no": 1})).json() == 2
        stop.set()
        await service


async def test_requests_of_nobody_and_at_the_same_time(mqks_broker: Broker) -> None:
    broker = MqksBroker(mqks_broker.url)

    @broker.subscriber("q", max_workers=100)
    async def handle(body: int) -> int:
        return -body

    async with broker:
        await broker.start()
        with pytest.raises(mqks.RequestFailed, match="no queue is bound"):
            await broker.request(1, "nobody")
        replies = await asyncio.gather(*(broker.request(number, "q") for number in range(100)))
        assert [await each.decode() for each in replies] == [-number for number in range(100)]
        asked = (broker.request(1, "q", correlation_id="c") for _ in range(2))
        first, second = await asyncio.gather(*asked, return_exceptions=True)
        assert not isinstance(first, BaseException)
        assert isinstance(second, mqks.InvalidRequest)
