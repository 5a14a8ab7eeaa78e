"""What both clients do with attributes, times, dead letters and calls, against a real broker."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import anyio
import pytest

from mqks import (
    App,
    CallFailed,
    ConnectionLost,
    InvalidRequest,
    Message,
    Options,
    ReplyTimeout,
    RequestFailed,
    users_file,
)
from mqks.limits import PREFETCH
from mqks.testing import Broker
from mqks.users import User, hash_token
from tests.client.conftest import QUICK
from tests.client.waiting import serving, until
from tests.kit.proxy import Proxy
from tests.kit.skins import SKINS
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.anyio

HOUR_S = 3600


async def test_attributes_of_every_kind_arrive(client: Any) -> None:
    meta = {"a b": "x&y=z,%\t\n", "ä": "", "traceparent": "00-1-2-01", "\udcff": "/~"}
    async with client.consume("q", ["e,meta=x"], meta=True, auto_ack=True) as consumer:
        await client.publish("e,meta=x", "data", meta=meta)
        await client.publish_many([("e,meta=x", "100%")], meta=meta)
        await client.publish("e,meta=x", "none", meta={})
        for data in ("data", "100%"):
            message = await consumer.receive(WAIT_S)
            assert (message.meta, message.text) == (meta, data)
            assert (message.event, message.retry) == ("e,meta=x", 0)
            assert (message.traceparent, message.reply_to) == ("00-1-2-01", None)
        message = await consumer.receive(WAIT_S)
        assert (message.meta, message.dead_letter, message.event) == ({}, None, "e,meta=x")


async def test_scheduled_messages(client: Any) -> None:
    due = datetime.now(UTC) + timedelta(days=400)
    await client.subscribe("q", ["e"])
    await client.publish("e", "later", confirm=True, id="m1", delay_s=HOUR_S, meta={"k": "v"})
    await client.publish("e", "then", confirm=True, id="m2", at=due)
    await client.publish("e", "", confirm=True, id="m3", at=due.timestamp())
    await client.publish("e", "now", confirm=True, id="m4", delay_s=0)
    assert [each.id for each in await client.peek("q")] == ["m4"]
    first, then, _ = await client.peek("q", scheduled=True)
    assert (first.id, first.event, first.data, first.meta) == ("m1", "e", b"later", {"k": "v"})
    assert 0 < first.due - time.time() <= HOUR_S
    assert abs(then.due - due.timestamp()) < 0.01
    await client.publish("e", "sooner", confirm=True, id="m#5", delay_s=HOUR_S / 2)
    assert [each.id for each in await client.peek("q", soonest=True, limit=2)] == ["m#5", "m1"]
    assert await client.cancel("q", "m#*") == 1

    assert await client.cancel("q", "m2") == 1
    assert await client.promote("q", "m1") == 1
    assert [each.id for each in await client.peek("q")] == ["m4", "m1"]
    assert await client.purge("q") == 2
    assert await client.purge("q", scheduled=True) == 1
    await client.publish_many([("e", n) for n in range(5)], delay_s=HOUR_S)
    assert await client.promote("q", None) == 5
    with anyio.fail_after(WAIT_S):
        while len(await client.peek("q")) < 5:
            await anyio.sleep(0.01)
    assert await client.cancel("q", None) == 0


async def test_what_is_peeked_at_is_told_page_by_page(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many([("e", f"{n} ok ") for n in range(5)])
    rows = await client.peek("q", after=1, limit=3)
    assert [(row.seq, row.data) for row in rows] == [(n, b"%d ok " % (n - 1)) for n in (2, 3, 4)]
    assert await client.peek("q", after=5) == []


@pytest.mark.parametrize(
    "terms",
    [
        {"delay_s": -1},
        {"delay_s": float("nan")},
        {"delay_s": 1, "at": 1},
        {"at": datetime(2030, 1, 1)},
        {"ttl_s": 0},
        {"ttl_s": float("inf")},
        {"meta": {"": "x"}},
        {"meta": {"k": 1}},
        {"meta": {"reason": "x"}},
        {"meta": {"k": "x" * 5000}},
    ],
    ids=str,
)
async def test_bad_terms_are_refused(client: Any, terms: Any) -> None:
    with pytest.raises(InvalidRequest):
        await client.publish("e", "x", **terms)
    with pytest.raises(InvalidRequest):
        await client.publish_many([("e", "x")], **terms)


async def test_how_many_messages_a_consumer_holds_unless_told(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many(("e", n) for n in range(100))
    for options, expected in (({}, PREFETCH), ({"prefetch": 0}, 100), ({"prefetch": 3}, 3)):
        async with client.consume("q", **options) as consumer:
            await consumer.receive(WAIT_S)
            held = "[len(m) for m in state.messages_by_consumer_ids.values()]"
            assert await client.evaluate(held) == f"[{expected}]"
    async with client.consume("q", prefetch=0, auto_ack=True) as consumer:
        assert [(await consumer.receive(WAIT_S)).json() for _ in range(100)] == [*range(100)]


async def test_prefetch_and_meta_outlive_the_connection(client: Any, proxy: Proxy) -> None:
    how: Any = {"prefetch": 1, "meta": True}
    async with client.consume("q", ["e"], **how) as consumer:
        await client.rebind("q", replace=["f"])
        await client.publish_many([("f", n) for n in range(2)], meta={"k": "v"})
        (await consumer.receive(WAIT_S)).release()
        assert (await consumer.receive(WAIT_S)).meta == {"k": "v"}
        proxy.cut()
        message = await consumer.receive(WAIT_S)
        assert (message.event, message.meta) == ("f", {"k": "v"})
        with pytest.raises(TimeoutError):
            await consumer.receive(0.05)


async def test_messages_that_come_back(client: Any) -> None:
    async with client.consume("q", ["e"], prefetch=1) as consumer:
        await client.publish_many(("e", n) for n in range(3))
        (await consumer.receive(WAIT_S)).release()
        again = await consumer.receive(WAIT_S)
        assert (again.json(), again.retry) == (0, 0)
        again.touch()
        again.reject(delay_s=HOUR_S)
        again.touch()
        (await consumer.receive(WAIT_S)).release(delay_s=HOUR_S)
        assert (await consumer.receive(WAIT_S)).json() == 2
        assert [each.retry for each in await client.peek("q", scheduled=True)] == [1, 0]
        with pytest.raises(InvalidRequest):
            again.reject(delay_s=1, dead=True)


async def test_a_lease_of_one_message(client: Any) -> None:
    await client.set_queue("q", losses=2, deliveries=3)
    async with client.consume("q", ["e"], ack_timeout_s=HOUR_S) as consumer:
        await client.publish("e", "x")
        message = await consumer.receive(WAIT_S)
        message.touch(for_s=HOUR_S)
        message.touch(for_s=0.05)
        again = await consumer.receive(WAIT_S)
        assert again.retry == 1
        again.touch(for_s=0)
        again.ack()
        last = await consumer.receive(WAIT_S)
        assert last.retry == 2
        last.touch(for_s=0)
        with pytest.raises(TimeoutError):
            await consumer.receive(0.05)
        await until(lambda: client.peek("q"), [])
        with pytest.raises(InvalidRequest):
            message.touch(for_s=-1)
    for options in ({"ack_timeout_s": 2, "auto_ack": True}, {"ack_timeout_s": 0.0}):
        with pytest.raises(InvalidRequest):
            client.consume("q", **options)


async def test_a_prefetch_that_changes(client: Any, proxy: Proxy) -> None:
    async with client.consume("q", ["e"], prefetch=1) as consumer:
        await client.publish_many(("e", n) for n in range(5))
        held = [await consumer.receive(WAIT_S)]
        consumer.set_prefetch(3)
        held += [await consumer.receive(WAIT_S) for _ in range(2)]
        consumer.set_prefetch(1)
        held[0].ack()
        with pytest.raises(TimeoutError):
            await consumer.receive(0.05)
        consumer.ack(held)
        assert (await consumer.receive(WAIT_S)).json() == 3
        consumer.set_prefetch(2)
        assert (await consumer.receive(WAIT_S)).json() == 4
        proxy.cut()
        assert [(await consumer.receive(WAIT_S)).json() for _ in range(2)] == [3, 4]
        with pytest.raises(InvalidRequest):
            consumer.set_prefetch(-1)
    async with client.consume("q", auto_ack=True) as consumer:
        with pytest.raises(InvalidRequest):
            consumer.set_prefetch(1)
    for options in ({"prefetch": 2, "auto_ack": True}, {"prefetch": -1}):
        with pytest.raises(InvalidRequest):
            client.consume("q", **options)


class Colour(Enum):
    RED = "red"


@dataclass
class Order:
    id: UUID
    price: Decimal
    parts: list[Order]


async def test_json_knows_the_types_of_the_standard_library(
    connect: Any, mqks_broker: Broker
) -> None:
    def default(value: object) -> object:
        if isinstance(value, complex):
            return [value.real, value.imag]
        raise TypeError(f"no {value!r}")

    own = Options(json_default=default, json_loads=lambda data: ("read", data))
    part = Order(UUID(int=1), Decimal("0.10"), [])
    order = Order(UUID(int=2), Decimal("1e3"), [part])
    ids = [f"00000000-0000-0000-0000-00000000000{number}" for number in (1, 2)]
    told = {"id": ids[1], "price": "1E+3", "parts": [{"id": ids[0], "price": "0.10", "parts": []}]}
    day = date(2030, 1, 31)
    at = datetime(2030, 1, 31, 9, tzinfo=UTC)
    values = {"day": day, "at": at, "colour": Colour.RED, "all": (order,)}
    async with (
        connect(mqks_broker.url) as client,
        client.consume("q", ["e"], auto_ack=True) as consumer,
    ):
        await client.publish("e", order)
        await client.publish_many([("e", values), ("e", at)])
        found = [(await consumer.receive(WAIT_S)).json() for _ in range(3)]
        text = "2030-01-31T09:00:00+00:00"
        assert found == [
            told,
            {"day": "2030-01-31", "at": text, "colour": "red", "all": [told]},
            text,
        ]
        with pytest.raises(InvalidRequest, match="json_default"):
            await client.publish("e", {"x": 1j})
    async with connect(mqks_broker.url, own) as client, client.consume("q", meta=True) as consumer:
        await client.publish("e", {"x": 1j})
        await client.publish_many([("e", [part.id, 2j])])
        found = [(await consumer.receive(WAIT_S)).json() for _ in range(2)]
        lines = [b'{"x":[0.0,1.0]}', b'["%b",[0.0,2.0]]' % ids[0].encode()]
        assert found == [("read", line) for line in lines]
        with pytest.raises(InvalidRequest, match="no <object"):
            await client.publish("e", {"x": object()})


class Empty(ValueError):
    """False, as some exceptions with a length are."""

    def __len__(self) -> int:
        return 0


async def test_dead_letters_say_why_and_go_back(client: Any) -> None:
    began = time.time() - 1
    await client.set_queue("a b".replace(" ", "%"), retries=1, dead_letter_queue="dead")
    async with client.consume("a%b", ["e", "f"], meta=True) as consumer:
        for event in ("e", "f", "e"):
            await client.publish(event, "x", meta={"k": "v"})
        (await consumer.receive(WAIT_S)).reject(reason=Empty("no, 1\n& ü"))
        (await consumer.receive(WAIT_S)).reject(dead=True, reason="x" * 512)
        (await consumer.receive(WAIT_S)).reject()
        async with client.consume("dead", meta=True) as letters:
            letter = await letters.receive(WAIT_S)
            assert (letter.meta, letter.retry) == ({"k": "v"}, 0)
            assert letter.dead_letter is not None
            reason, queue, tries, published, died, why = letter.dead_letter
            assert (reason, queue, tries, why) == ("rejects", "a%b", 1, "Empty: no, 1 & ü")
            assert began < published <= died < time.time() + 1
            letter = await letters.receive(WAIT_S)
            assert letter.dead_letter is not None
            assert letter.dead_letter.reason == "dead"
            await letters.receive(WAIT_S)
        rows = await client.peek("dead")
        assert [row.dead_letter.reason for row in rows] == ["rejects", "dead", "rejects"]
        assert [row.dead_letter.why for row in rows][1:] == ["x" * 512, None]

        assert await client.redrive("dead", event="f") == 1
        revived = await consumer.receive(WAIT_S)
        assert (revived.event, revived.dead_letter, revived.retry) == ("f", None, 0)
        assert await client.redrive("dead", to="other", limit=1) == 1
        assert await client.move("dead", "other") == 1
        assert [row.dead_letter is None for row in await client.peek("other")] == [True, False]


def adder(url: str) -> App:
    app = App(url, QUICK)

    @app.consumer("numbers", events=["add"], concurrency=100)
    async def add(message: Message) -> int:
        numbers = message.json()
        await anyio.sleep(numbers[0] % 7 / 1000)
        return sum(numbers)

    @app.consumer("troubles", events=["fail"])
    async def fail(message: Message) -> object:
        if message.text == "unwritable":
            return object()
        raise ValueError(f"{message.text}\nis no\tnumber")

    return app


async def test_calls_are_answered(connect: Any, mqks_broker: Broker) -> None:
    async with serving(adder(mqks_broker.url)), connect(mqks_broker.url) as client:
        await client.subscribe("numbers", ["add"])
        await client.subscribe("troubles", ["fail"])
        assert (await client.call("add", [1, 2], WAIT_S)).json() == 3
        answers: dict[int, int] = {}

        async def ask(number: int) -> None:
            answers[number] = (await client.call("add", [number, 1])).json()

        async with anyio.create_task_group() as tasks:
            for number in range(30):
                tasks.start_soon(ask, number)
        assert answers == {number: number + 1 for number in range(30)}
        queues = await client.evaluate("len(state.queues)")
        assert queues == "3"  # One for all replies.


async def test_a_call_with_attributes(client: Any) -> None:
    """One of them may be the correlation id, for one call at a time."""
    meta = {"correlation-id": "7", "custom": "1", "reply-to": "elsewhere"}
    async with client.consume("q", ["e"], meta=True) as consumer:
        with pytest.raises(ReplyTimeout):
            await client.call("e", "late", 0.05, meta=meta)

        async def answer() -> None:
            request = await consumer.receive(WAIT_S)
            while request.text != "first":  # That of before may have been delivered.
                request = await consumer.receive(WAIT_S)
            assert request.meta["reply-to"].startswith("reply.")
            assert (request.meta["correlation-id"], request.meta["custom"]) == ("7", "1")
            with pytest.raises(InvalidRequest, match="another call waits"):
                await client.call("e", "second", meta=meta)
            await client.reply(request, "answer")
            request.ack()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answer)
            reply = await client.call("e", "first", meta=meta)
        assert (reply.text, reply.correlation_id) == ("answer", "7")


async def test_a_service_that_fails_tells_the_caller(connect: Any, mqks_broker: Broker) -> None:
    async with serving(adder(mqks_broker.url)), connect(mqks_broker.url) as client:
        await client.subscribe("troubles", ["fail"])
        with pytest.raises(CallFailed, match=r"^ValueError: seven is no number$") as failure:
            await client.call("fail", "seven")
        assert failure.value.kind == "ValueError"
        with pytest.raises(CallFailed, match=r"^InvalidRequest: the data cannot be written"):
            await client.call("fail", "unwritable")
        await drained(client, "troubles")


async def drained(client: Any, queue: str) -> None:
    await until(lambda: client.peek(queue), [])


async def test_a_call_that_nobody_is_bound_to(client: Any) -> None:
    with pytest.raises(RequestFailed):
        await client.call("nobody", 1)


async def test_a_call_that_nobody_answers(client: Any) -> None:
    """The request does not wait longer than its caller; a late reply goes nowhere."""
    async with client.consume("q", ["e"], meta=True) as consumer:
        with pytest.raises(ReplyTimeout):
            await client.call("e", "x", 0.3)
        request = await consumer.receive(WAIT_S)
        await client.reply(request, "late")
        request.ack()
        assert request.reply_to is not None
        with pytest.raises(InvalidRequest):
            await client.reply(Message(b"c", b"m", b"event=e", b"", None))

        async with anyio.create_task_group() as tasks:

            async def answer() -> None:
                request = await consumer.receive(WAIT_S)
                await client.publish(request.reply_to, "not mine", meta={"correlation-id": "?"})
                await client.reply(request, "mine")
                await client.reply(request, "twice")
                request.ack()

            tasks.start_soon(answer)
            assert (await client.call("e", "y")).text == "mine"
    with pytest.raises(ReplyTimeout):
        await client.call("e", "x", 0.05)
    await drained(client, "q")


async def test_calls_under_way_outlive_lost_connections(connect: Any, proxy: Proxy) -> None:
    answers: dict[int, int] = {}
    async with serving(adder(proxy.url)), connect(proxy.url, QUICK) as client:
        await client.subscribe("numbers", ["add"])

        async def ask(number: int) -> None:
            answers[number] = (await client.call("add", [number, 1])).json()

        async with anyio.create_task_group() as tasks:
            for number in range(40):
                tasks.start_soon(ask, number)
            for _ in range(3):
                await anyio.sleep(0.01)
                proxy.cut()
    assert answers == {number: number + 1 for number in range(40)}


async def test_a_call_under_way_outlives_the_server(connect: Any, mqks_broker: Broker) -> None:
    app, begun, restarted = App(mqks_broker.url, QUICK), anyio.Event(), anyio.Event()

    @app.consumer("q", events=["e"])
    async def work(message: Message) -> str:
        begun.set()
        await restarted.wait()
        return message.text

    async with serving(app), connect(mqks_broker.url, QUICK) as client:
        await client.subscribe("q", ["e"])
        async with anyio.create_task_group() as tasks:
            answers: list[str] = []

            async def ask() -> None:
                answers.append((await client.call("e", "hello")).text)

            tasks.start_soon(ask)
            await begun.wait()
            await anyio.to_thread.run_sync(mqks_broker.stop)
            await anyio.to_thread.run_sync(mqks_broker.start)
            restarted.set()
        assert answers == ["hello"]


async def test_calls_need_no_more_than_their_permissions(connect: Any, tmp_path: Path) -> None:
    caller = User("caller", token=hash_token("C"), publish=["add"], consume=["reply.*"])
    service = User("service", token=hash_token("S"), publish=["reply.*"], consume=["numbers"])
    stranger = User("stranger", token=hash_token("X"), publish=["add"])
    users = [replace(each, bind=[*each.consume, "add"]) for each in (caller, service, stranger)]
    users_file.write(tmp_path / "users", users)
    with Broker(tmp_path / "mqks.db", users=tmp_path / "users", auth="always") as broker:
        url = broker.url.replace("//", "//{}@")
        app = App(url.format("S"), QUICK)

        @app.consumer("numbers", events=["add"])
        async def add(message: Message) -> int:
            return sum(message.json())

        async with serving(app), connect(url.format("S")) as other:
            await other.subscribe("numbers", ["add"])
            async with connect(url.format("C")) as client:
                assert (await client.call("add", [1, 2])).json() == 3
            async with connect(url.format("X")) as client:
                for _ in range(2):
                    with pytest.raises(RequestFailed):
                        await client.call("add", [1, 2])


async def test_the_queue_of_replies_goes_with_its_client(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as other:
        async with serving(adder(mqks_broker.url)):
            await other.subscribe("numbers", ["add"])
            async with connect(mqks_broker.url) as client:
                await client.call("add", [1])
                assert "reply." in await other.evaluate("state.queues")
        assert "reply." not in await other.evaluate("state.queues")
        with pytest.raises(ConnectionLost):
            await client.call("add", [1])


async def test_calls_end_with_their_client(mqks_broker: Broker) -> None:
    async with SKINS["async"](mqks_broker.url) as other:
        await other.subscribe("q", ["e"])
        failures: list[str] = []

        async def call(client: Any) -> None:
            try:
                await client.call("e", 1)
            except ConnectionLost as error:
                failures.append(str(error))

        async with anyio.create_task_group() as tasks, SKINS["async"](mqks_broker.url) as client:
            tasks.start_soon(partial(call, client))
            await until(lambda: other.peek("q"))
        assert len(failures) == 1
