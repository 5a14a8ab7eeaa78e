"""What both clients promise, over real TCP against a real broker, with a proxy in between."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any
from uuid import uuid4

import anyio
import pytest
import trustme
from anyio import to_thread

import mqks
from mqks import (
    AuthenticationFailed,
    ConnectionLost,
    ConsumerReplaced,
    InvalidRequest,
    Options,
    ProtocolViolation,
    PublishFailed,
    QueueMissing,
    QueueUpdate,
    ReplyTimeout,
    RequestFailed,
    Stopped,
    Unique,
)
from mqks.client.wire import Wire
from mqks.testing import Broker
from tests.client.conftest import QUICK
from tests.client.waiting import until
from tests.kit.line_client import LineClient
from tests.kit.proxy import Peer, Proxy
from tests.kit.skins import SKINS
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.anyio


async def take(consumer: Any, count: int) -> list[Any]:
    return [await consumer.receive(timeout_s=WAIT_S) for _ in range(count)]


async def unacked(client: Any, queue: str) -> int:
    return int((await client.stats("queue", queue))["unacked"])


async def ready(client: Any, queue: str) -> int:
    """Messages that wait in the broker's queue."""
    return int(await client.evaluate(f"len(state.queues['{queue}'])"))


async def consumers(client: Any) -> list[str]:
    """Ids of the consumers of the queue q, as the broker knows them."""
    ids: list[str] = json.loads(await client.evaluate("state.consumers_by_queues['q']"))
    return ids


async def are_new(client: Any, count: int, earlier: list[str]) -> bool:
    """Whether the queue q has so many consumers, and none of the earlier ones."""
    now = await consumers(client)
    return len(now) == count and not {*now} & {*earlier}


def answering(answer: Callable[[bytes], bytes]) -> Peer:
    """A peer with an answer to each line; in an answer, `%b` is the line's id."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            told = answer(line)
            writer.write((told % line.split()[0] if b"%b" in told else told) + b"\n")

    return Peer(serve)


async def test_data_of_every_kind_arrives(client: Any) -> None:
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        sent: list[Any] = ["text  with spaces ", "", b"\xff\r\x00", {"a": ["b\t\n", 1, None]}, 17]
        ids = [await client.publish("e", data) for data in sent]
        text, empty, raw, value, number = await take(consumer, len(sent))

        assert (text.text, empty.data, raw.data) == (sent[0], b"", sent[2])
        assert (value.json(), number.json()) == (sent[3], sent[4])
        assert [m.id for m in (text, empty, raw, value, number)] == ids
        assert (text.event, text.retry) == ("e", 0)


async def test_many_are_confirmed_and_keep_their_order(client: Any) -> None:
    count = 6_000
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        assert await client.publish_many(("e", n) for n in range(count)) == count
        got: list[int] = []
        batch: list[Any]
        async for batch in consumer.batches(700):
            assert 0 < len(batch) <= 700
            got += [message.json() for message in batch]
            if len(got) == count:
                break
        assert got == list(range(count))


async def test_what_waits_when_a_consumer_ends_was_not_delivered(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many(("e", n) for n in range(10))
    async with client.consume("q", prefetch=4) as consumer:
        for _ in range(2):
            await consumer.receive(WAIT_S)
    assert [each.retry for each in await client.peek("q")] == [1] * 2 + [0] * 8


async def test_a_consumer_pauses(client: Any) -> None:
    await client.subscribe("q", ["e"])
    async with client.consume("q", prefetch=1) as paused:
        await client.publish("e", "1", confirm=True)
        first = await paused.receive(WAIT_S)
        paused.pause(3600)
        first.ack()
        await until(partial(unacked, client, "q"), 0)
        await client.publish_many(("e", n) for n in range(10))
        async with client.consume("q") as other:
            assert [each.json() for each in await take(other, 10)] == [*range(10)]
    async with client.consume("q", auto_ack=True) as consumer:
        with pytest.raises(InvalidRequest, match="auto_ack"):
            consumer.pause(1)


async def test_process_acks_or_rejects(client: Any) -> None:
    async with client.consume("q", ["e"]) as consumer:
        await client.publish("e", "x")
        with pytest.raises(RuntimeError):
            async with (await consumer.receive(WAIT_S)).process():
                raise RuntimeError
        message = await consumer.receive(WAIT_S)
        assert message.retry == 1
        async with message.process():
            pass
    assert await ready(client, "q") == 0


async def test_an_outage_is_logged_once(
    connect: Any, mqks_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[tuple[str, str]]:
        records = [each for each in caplog.records if each.name == "mqks.client"]
        return [(each.levelname, each.message) for each in records]

    caplog.set_level(logging.INFO, "mqks.client")
    async with (
        connect(mqks_broker.url, QUICK) as client,
        client.consume("q", ["e"]) as consumer,
        client.consume("q2", ["e2"]),
    ):
        for outages in range(1, 3):
            await to_thread.run_sync(mqks_broker.stop)
            await until(lambda: len(told()) >= 2 * outages - 1)  # noqa: B023
            await anyio.sleep(0.2)  # Several attempts fail.
            await to_thread.run_sync(mqks_broker.start)
            await client.publish("e", "x", confirm=True)
            (await consumer.receive(WAIT_S)).ack()
            await until(lambda: len(told()) >= 2 * outages)  # noqa: B023
    server = f"127.0.0.1:{mqks_broker.port}"
    lost = ("WARNING", f"lost the connection to {server}, connecting again: ")
    back = ("INFO", f"connected again to {server} after ")
    for (level, text), (wanted, start) in zip(told(), [lost, back] * 2, strict=True):
        assert level == wanted
        assert text.startswith(start)
        assert text != start


async def waits(message: Any) -> None:
    async with message.process():
        await anyio.sleep_forever()


async def cancelled_by_a_scope(message: Any) -> None:
    with anyio.move_on_after(0.01):
        await waits(message)


async def cancelled_by_asyncio(message: Any) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(waits(message), 0.01)


async def ends(error: type[BaseException], message: Any) -> None:
    with pytest.raises(error), message.process():
        raise error


@pytest.mark.parametrize(
    "interrupt",
    [
        cancelled_by_a_scope,
        cancelled_by_asyncio,
        partial(ends, KeyboardInterrupt),
        partial(ends, SystemExit),
    ],
)
async def test_what_is_interrupted_has_not_failed(
    consumer: Any, client: Any, interrupt: Callable[[Any], Awaitable[None]]
) -> None:
    await client.set_queue("q", retries=1, dead_letter_queue="dead")
    await client.publish("e", "x")
    await interrupt(await consumer.receive(WAIT_S))
    assert (await consumer.receive(WAIT_S)).retry == 0


async def test_what_is_not_acked_comes_back(client: Any) -> None:
    async with client.consume("q", ["e"]) as consumer:
        await client.publish_many(("e", n) for n in range(10))
        got = await take(consumer, 6)
        consumer.ack(got[:3])
        got[3].ack()
        got[3].reject()  # The first word counts.
        consumer.ack(got[:3])
    assert await ready(client, "q") == 6
    async with client.consume("q") as consumer:
        assert [m.json() for m in await take(consumer, 6)] == [4, 5, 6, 7, 8, 9]


async def test_a_loop_that_is_left_loses_nothing(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many(("e", n) for n in range(1000))
    async with client.consume("q") as consumer:
        async for message in consumer:
            message.ack()
            break
    async with client.consume("q") as consumer:
        async for _ in consumer.batches():
            break
    with suppress(RuntimeError):
        async with client.consume("q", prefetch=0) as consumer:
            async for message in consumer:
                raise RuntimeError(message.id)
    left = await client.peek("q", limit=1000)
    assert [message.data for message in left] == [b"%d" % n for n in range(1, 1000)]


async def test_more_is_peeked_than_one_answer_has(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many(("e", n) for n in range(2100))
    for limit in (999, 1000, 1010, 2500):
        found = await client.peek("q", limit=limit)
        assert [message.data for message in found] == [b"%d" % n for n in range(min(limit, 2100))]
    # An answer of some MiB ends early, too.
    await client.subscribe("large", ["l"])
    await client.publish_many(("l", f"{n:0100000}") for n in range(100))
    found = await client.peek("large", limit=90)
    assert [int(message.data[-9:]) for message in found] == [*range(90)]


async def test_manual_ack_is_the_contrary_of_auto_ack(connect: Any, client: Any) -> None:
    for given in (True, False):
        with pytest.warns(DeprecationWarning, match="auto_ack=True") as warned:
            consumer = client.consume("q", ["e"], manual_ack=given)
        assert connect is not SKINS["async"] or warned[0].filename == __file__
        async with consumer:
            [row] = json.loads(await client.request("stats", "consumers"))
            assert row["manual_ack"] is given


async def test_no_ack_with_auto_ack(client: Any) -> None:
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        await client.publish("e", "x")
        message = await consumer.receive(WAIT_S)
        for act in (message.ack, message.reject, message.process, lambda: consumer.ack([message])):
            with pytest.raises(InvalidRequest):
                act()


async def test_rebind_and_updates(client: Any) -> None:
    updates: list[QueueUpdate] = []
    async with client.consume("q", ["a.1", "b"], delete_when_unused=5, auto_ack=True) as consumer:
        consumer.on_update = updates.append
        await consumer.rebind(add=["c"], remove=["b"], remove_mask=["*.1"])
        await consumer.rebind(replace=["d", "e"])
        await client.rebind("q", replace=[], add=["f"])
        await client.rebind("q", replace=[])
        with pytest.raises(InvalidRequest, match="nothing to change"):
            await client.rebind("q")
        await client.delete_queue("q", when_unused=True)
        await client.subscribe("q", ["last"])
        await client.publish("last", "x", confirm=True)
        await consumer.receive(WAIT_S)
    assert updates == [
        QueueUpdate("q", ["c"], 5.0),
        QueueUpdate("q", ["d", "e"], 5.0),
        QueueUpdate("q", ["f"], 5.0),
        QueueUpdate("q", [], 5.0),
        QueueUpdate("q", ["last"], True),
    ]
    assert await client.evaluate("len(state.queues)") == "0"


async def test_a_queue_is_paused_and_resumed(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.pause("q", publishes=True, for_s=600)
    with pytest.raises(RequestFailed):
        await client.publish("e", "x", confirm=True)
    await client.resume("q")
    await client.publish("e", "x", confirm=True)
    await client.pause("q", publishes="wait", for_s=1)
    assert (await client.stats("queue", "q"))["paused"] == "publishes wait"
    await client.publish("e", "x", confirm=True)
    assert (await client.stats("queue", "q"))["paused"] is None
    with pytest.raises(RequestFailed):
        await client.pause("none")
    with pytest.raises(RequestFailed):
        await client.resume("none")


async def test_a_queue_is_renamed(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish("e", "x", confirm=True)
    await client.rename_queue("q", "r")
    await client.publish("e", "y", confirm=True)
    assert [each.data for each in await client.peek("r")] == [b"x", b"y"]
    async with client.consume("r", auto_ack=True) as consumer:
        await client.rename_queue("r", "t")
        await client.publish("e", "z", confirm=True)
        assert [(await consumer.receive(WAIT_S)).data for _ in range(3)] == [b"x", b"y", b"z"]
        await client.rename_queue("t", "r")
    with pytest.raises(QueueMissing):
        await client.rename_queue("q", "s")
    await client.subscribe("s", ["e"])
    with pytest.raises(RequestFailed):
        await client.rename_queue("r", "s")


async def test_a_message_is_traced(client: Any) -> None:
    await client.trace("e", for_s=60)
    await client.publish("e", "x", id="m", confirm=True)
    [step] = await client.stats("message", "m")
    assert (step["what"], step["event"]) == ("published", "e")
    assert [each["name"] for each in await client.stats("traces")] == ["e"]
    await client.end_trace("e")
    assert len(await client.stats("message", "m")) == 1
    await client.end_trace()
    assert await client.stats("message", "m") == []


async def test_set_queue(client: Any) -> None:
    await client.set_queue("q", retries=3, backoff=(0.5, 60), dead_letter_queue="d", ttl_s=1.5)
    await client.set_queue("q", ttl_s=None, single_consumer=True)
    told = json.loads(await client.request("stats", "queue", "q"))["policy"]
    assert {name: value["value"] for name, value in told.items()} == {
        "retries": 3,
        "backoff": [0.5, 60.0],
        "dead_letters": "d",
        "single_consumer": True,
    }
    await client.set_queue("q", reset=True)
    assert json.loads(await client.request("stats", "queue", "q"))["policy"] == {}
    for wrong in ({"ttl_s": 0}, {"retries": -1}, {"backoff": (2, 1)}, {"dead_letter_queue": "a b"}):
        with pytest.raises(InvalidRequest):
            await client.set_queue("q", **wrong)
    with pytest.raises(TypeError, match="'ttl'; did you mean ttl_s"):
        await client.set_queue("q", ttl=5)


async def test_a_queue_that_is_missing_is_an_error(client: Any) -> None:
    await client.subscribe("orders", ["e"])
    asked: tuple[tuple[str, tuple[Any, ...], dict[str, Any]], ...] = (
        *(("purge", (), how) for how in ({}, {"limit": 5}, {"event": "e"})),
        *(("peek", (), how) for how in ({}, {"after": 5}, {"scheduled": True})),
        *(("move", ("orders",), {}), ("redrive", (), {}), ("trim", (5,), {})),
        *((method, (id,), {}) for method in ("cancel", "promote") for id in ("m", None)),
        *(("rebind", (), {"add": ["f"]}), ("delete_queue", (), {}), ("check_queue", (), {})),
        ("delete_queue", (), {"when_unused": 5}),
    )
    for method, arguments, how in asked:
        for name, hint in (("ordres", "; did you mean orders?"), ("x", "")):
            with pytest.raises(QueueMissing) as raised:
                await getattr(client, method)(name, *arguments, **how)
            assert str(raised.value) == raised.value.reason == f"there is no queue {name}{hint}"
    await client.delete_queue("ordres", if_exists=True)
    assert json.loads(await client.evaluate("[q for q in state.queues]")) == ["orders"]
    for method, arguments, how in asked:
        target = ("other",) if method == "move" else arguments
        await getattr(client, method)("orders", *target, **how)
        await client.subscribe("orders", ["e"])


async def test_the_nearest_queue_is_among_thousands(connect: Any, tmp_path: Path) -> None:
    with Broker(tmp_path / "m.db") as broker:
        with LineClient(("127.0.0.1", broker.port)) as lines:
            for name in (*(f"q{n:04d}" for n in range(1_500)), "zebras"):
                lines.send(f"q subscribe {name} e\n".encode())
            lines.ask(b"q ping x")
        async with connect(broker.url) as client:
            with pytest.raises(QueueMissing, match="did you mean zebras"):
                await client.purge("zebars")


@pytest.mark.parametrize("name", ["", "a b", "a\tb", "a\nb", "--add"])
async def test_bad_names_are_refused(client: Any, name: str) -> None:
    requests: list[Callable[[], Awaitable[Any]]] = [
        lambda: client.publish(name, "x"),
        lambda: client.publish("e", "x", id=name),
        lambda: client.publish_many([(name, "x")]),
        lambda: client.subscribe(name, ["e"]),
        lambda: client.subscribe("q", [name]),
        lambda: client.rebind("q", add=[name]),
        lambda: client.delete_queue(name),
    ]
    for request in requests:
        with pytest.raises(InvalidRequest):
            await request()
    with pytest.raises(InvalidRequest):
        client.consume(name)
    with pytest.raises(InvalidRequest):
        client.consume("q", [name])
    assert await client.ping("alive") == "alive"


@pytest.mark.parametrize("name", ["a\x1bb", "\x00\x7f\r", "\udcff\x85"])
async def test_names_may_have_control_characters(client: Any, name: str) -> None:
    await client.subscribe(name, [name])
    async with client.consume(name) as consumer:
        for number in range(4):
            await client.publish(name, str(number), id=name)
        found = await take(consumer, 4)
        assert {(message.id, message.event) for message in found} == {(name, name)}
        found[0].ack()
        consumer.ack(found[1:3])
    assert await client.purge(name) == 1
    await client.rebind(name, remove=[name])
    assert await client.evaluate("state.queues_by_events") == "{}"
    await client.delete_queue(name)
    assert await client.evaluate("len(state.queues)") == "0"


@pytest.mark.parametrize("data", ["\ud800", float("nan"), [object()]])
async def test_bad_data_is_refused(client: Any, data: Any) -> None:
    with pytest.raises(InvalidRequest):
        await client.publish("e", data, confirm=True)
    with pytest.raises(InvalidRequest):
        await client.publish_many([("e", "good"), ("e", data)])
    with pytest.raises(InvalidRequest, match="line_bytes_max"):
        await client.publish("e", "x" * 1024 * 1024)
    assert await client.publish_many([("e", "good")]) == 1


ODD = [b"", b"\n", b"a\tb", b"end\r", b"\\", b"\\n", bytes(range(256)) * 5, b"\\\n\\t" * 9]


@pytest.mark.parametrize("meta", [False, True])
async def test_any_bytes_arrive_as_they_were(client: Any, meta: bool) -> None:
    async with (
        client.consume("q", ["e", "a,escaped=0"], meta=meta, prefetch=0) as consumer,
        client.tail("e") as tail,
    ):
        for data in ODD:
            await client.publish("e", data, confirm=True)
        assert await client.publish_many(("e", data) for data in ODD) == len(ODD)
        await client.publish("e", "two\nlines", meta={"a": "b"}, confirm=True)
        await client.publish("a,escaped=0", "x\ny", confirm=True)
        peeked = await client.peek("q", limit=100)
        taken = await take(consumer, 2 * len(ODD) + 2)
        seen = await take(tail, 2 * len(ODD) + 1)

        wanted = [*ODD, *ODD, b"two\nlines", b"x\ny"]
        assert [message.data for message in peeked] == wanted
        assert [message.data for message in taken] == wanted
        assert [message.data for message in seen] == wanted[:-1]
        assert {message.event for message in taken[:-1]} == {"e"}
        assert (taken[-1].event, taken[-1].retry) == ("a,escaped=0", 0)
        taken[1].reject()
        [again] = await take(consumer, 1)
        assert (again.data, again.event, again.retry) == (b"\n", "e", 1)


async def test_priority_and_key_are_told_with_meta(client: Any) -> None:
    async with client.consume("q", ["e", "f"], meta=True) as consumer:
        await client.publish("e", "x\n", priority=-7, key="a b,ü=%", confirm=True)
        assert await client.publish_many([("f", "y")], key="k") == 1
        [peeked, other] = await client.peek("q")
        first, second = await take(consumer, 2)

        for message in (first, peeked):
            assert (message.priority, message.key, message.data) == (-7, "a b,ü=%", b"x\n")
        for message in (second, other):
            assert (message.priority, message.key, message.event) == (0, "k", "f")
        for wrong in ({"priority": 128}, {"key": ""}, {"key": "k" * 257}):
            with pytest.raises(InvalidRequest):
                await client.publish("e", "x", **wrong)


async def test_unique_messages_tell_what_became_of_them(client: Any) -> None:
    await client.subscribe("q", ["e"])
    first = await client.publish("e", 1, unique="a b,ü", confirm=True)
    again = await client.publish("e", 1, unique="a b,ü", confirm=True, id=first)
    dropped = await client.publish("e", 2, unique="a b,ü", confirm=True)
    assert await client.publish_many([("e", 3)], unique="a b,ü") == 1
    wanted = Unique("a b,ü", until="acked", for_s=60, on="replace")
    second = await client.publish("e", 4, unique=wanted, confirm=True)

    assert [(each.duplicate_of, each.replaced) for each in (first, again, dropped, second)] == [
        *((None, None), (None, None), (first, None), (None, first)),
    ]
    [peeked] = await client.peek("q")
    async with client.consume("q", meta=True) as consumer:
        [message] = await take(consumer, 1)
        for each in (peeked, message):
            assert (each.id, each.unique, each.data) == (second, "a b,ü", b"4")
        assert (await client.publish("e", 5, unique="a b,ü", confirm=True)).duplicate_of == second
        message.reject(dead=True)
    for wrong in ("", "k" * 257, Unique("k", until="never"), Unique("k", for_s=0)):  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await client.publish("e", "x", unique=wrong)


async def test_a_redrive_counts_those_whose_keys_are_held(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.set_queue("q", dead_letter_queue="dead")
    await client.publish("e", 1, unique="k", confirm=True)
    async with client.consume("q") as consumer:
        [message] = await take(consumer, 1)
        message.reject(dead=True)
    await until(lambda: ready(client, "dead"), 1)
    await client.publish("e", 2, unique="k", confirm=True)
    moved = await client.redrive("dead")
    assert (moved, moved.duplicates) == (0, 1)


async def test_leaving_sends_what_was_published(
    client: Any, connect: Any, mqks_broker: Broker
) -> None:
    await client.subscribe("q", ["e"])
    async with connect(mqks_broker.url) as other:
        for n in range(1000):
            await other.publish("e", n)
    assert await ready(client, "q") == 1000


async def test_purge_and_trim_tell_how_many(client: Any) -> None:
    await client.subscribe("q", ["e"])
    await client.publish_many([("e", n) for n in range(10)])
    epoch = (await client.request("range", "q")).split()[0].removeprefix("epoch=")

    assert await client.trim("q", 4) == 3
    assert await client.trim("q", 5, epoch=epoch) == 1
    with pytest.raises(RequestFailed):
        await client.trim("q", 6, epoch="another")
    assert await client.purge("q") == 6
    assert [await client.purge("q"), await client.trim("q", 4)] == [0, 0]


async def test_a_mandatory_message_needs_a_queue(
    client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await client.subscribe("q", ["e"])
    assert await client.publish("e", "x", confirm=True, mandatory=True, id="m") == "m"
    assert await client.publish_many([("e", "x")] * 2, mandatory=True) == 2
    await client.publish("e", "x", mandatory=True)
    with pytest.raises(RequestFailed):
        await client.publish("f", "x", confirm=True, mandatory=True)
    with pytest.raises(PublishFailed) as failure:
        await client.publish_many([("e", "x"), ("f", "x"), ("e", "x")], mandatory=True)
    assert (failure.value.confirmed, failure.value.failed[0].number) == (2, 1)
    await client.publish("f", "x", mandatory=True, id="unheard")
    await client.ping()
    assert await ready(client, "q") == 6
    assert "request unheard failed" in caplog.text


async def test_a_refused_message_may_come_again(client: Any) -> None:
    how = {"id_prefix": uuid4().hex, "once": True, "mandatory": True}
    publish = partial(client.publish_many, [("e", "x")], **how)
    with pytest.raises(PublishFailed):
        await publish()
    await client.subscribe("q", ["e"])
    assert [await publish(), await publish()] == [1, 1]
    assert await ready(client, "q") == 1


async def test_the_reason_of_a_refusal_can_be_asked_for(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        with pytest.raises(RequestFailed) as failure:
            await client.publish("e", "x", confirm=True, mandatory=True)
        reason = "publish: no queue is bound to 'e'"
        assert failure.value.reason == reason
        assert str(failure.value).endswith(f", error {failure.value.error_id}: {reason}")
        assert await client.reason(failure.value.error_id) == reason
        assert await client.reason("0" * 24) is None
    async with connect(mqks_broker.url) as another:
        assert await another.reason(failure.value.error_id) == reason


@pytest.mark.parametrize(
    ("method", "arguments", "options", "told"),
    [
        ("publish", (1, 2), {}, "a name (of an event, a queue, an id …) must be text, not 1"),
        ("publish", (["e"], 2), {}, "must be text, not ['e']"),
        ("publish", ("e", 2), {"id": 5}, "must be text, not 5"),
        ("publish", ("e", 2), {"delay_s": "5"}, "delay_s must be a number of seconds, not '5'"),
        ("publish", ("e", 2), {"at": "now"}, "at must be a number of seconds, not 'now'"),
        ("publish", ("e", 2), {"ttl_s": [5]}, "ttl_s must be a number of seconds, not [5]"),
        ("publish", ("e", 2), {"meta": 5}, "meta must be a dict of texts, not 5"),
        (
            "publish",
            ("e", 2),
            {"confirm": True, "timeout_s": "5"},
            "timeout_s must be a number of sec",
        ),
        ("publish_many", ([1, 2],), {}, "a message must be a pair of event and data, not 1"),
        ("publish_many", ([(1, 2)],), {}, "must be text, not 1"),
        ("publish_many", ([("e", "x", 3)],), {}, "a message must be a pair of event and data"),
        ("publish_many", ({"e": 1},), {}, "messages must be pairs of event and data, not {'e"),
        ("publish_many", ("ab",), {}, "messages must be pairs of event and data, not 'ab'"),
        ("subscribe", ("q", 5), {}, "a list of names is needed, not 5"),
        ("subscribe", (None, ["e"]), {}, "must be text, not None"),
        ("subscribe", ("q", [5]), {}, "must be text, not 5"),
        ("rebind", ("q",), {"add": 5}, "a list of names is needed, not 5"),
        ("delete_queue", ("q",), {"when_unused": "5"}, "a number of seconds, True or False is ne"),
        ("purge", (5,), {}, "must be text, not 5"),
        ("cancel", ("q", 5), {}, "must be text, not 5"),
        ("move", ("q", "r"), {"limit": "5"}, "limit must be a whole number, not '5'"),
        ("redrive", ("q",), {"to": 5}, "must be text, not 5"),
        ("peek", ("q",), {"after": "5"}, "after must be a whole number, not '5'"),
        ("peek", ("q",), {"limit": 1.5}, "limit must be a whole number, not 1.5"),
        ("trim", ("q", "5"), {}, "seq must be a whole number, not '5'"),
        ("reason", (5,), {}, "must be text, not 5"),
        ("reply", (5,), {}, "reply needs the message to reply to, not 5"),
    ],
)
async def test_arguments_of_a_wrong_type(
    client: Any, method: str, arguments: tuple[Any, ...], options: dict[str, Any], told: str
) -> None:
    with pytest.raises(TypeError) as refusal:
        await getattr(client, method)(*arguments, **options)
    assert told in str(refusal.value)
    assert await client.ping("x") == "x"


async def test_consumers_with_arguments_of_a_wrong_type(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        for queue, options, told in (
            (5, {}, "must be text, not 5"),
            ("q", {"events": 5}, "a list of names is needed, not 5"),
            (
                "q",
                {"prefetch": "5"},
                "prefetch must be a whole number, not '5'",
            ),
            ("q", {"delete_when_unused": "5"}, "a number of seconds, True or False is needed"),
        ):
            with pytest.raises(TypeError, match=re.escape(told)):
                client.consume(queue, **options)
        async with client.consume("q", ["e"]) as consumer:
            await client.publish("e", "x")
            with pytest.raises(TypeError, match=r"for one message, use message\.ack\(\)"):
                consumer.ack(await consumer.receive(WAIT_S))
        with pytest.raises(RuntimeError, match=r"with client\.consume\(…\) as consumer"):
            await client.consume("q").receive()
    for url, given, told in (
        (5, None, "the URL must be text, such as mqks://localhost, not 5"),
        (None, {"timeout_s": 5}, "options must be mqks.Options(…), not {'timeout_s': 5}"),
    ):
        with pytest.raises(TypeError, match=re.escape(told)):
            connect(url, given)


def test_a_blocking_client_without_with(mqks_broker: Broker) -> None:
    client = mqks.blocking.connect(mqks_broker.url)
    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(client.ping, "abcdefgh")] == [*"abcdefgh"]
    assert len(json.loads(client.request("stats", "connections"))) == 1
    with client.consume("q", ["e"], auto_ack=True) as consumer:
        client.publish("e", "x")
        assert consumer.receive(WAIT_S).text == "x"
    client.publish("e", "last")
    client.close()
    client.close()
    with pytest.raises(ConnectionLost, match="the client is closed"):
        client.ping()
    with mqks.blocking.connect(mqks_broker.url) as another, another.consume("q") as consumer:
        assert consumer.receive(WAIT_S).text == "last"
    mqks.blocking.connect(mqks_broker.url).close()


def test_a_blocking_client_without_with_or_server(refusing: str) -> None:
    client = mqks.blocking.connect(refusing, Options(connect_again=False))
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="Connection refused"):
            client.publish("e", "x")


async def test_an_async_client_without_with(mqks_broker: Broker) -> None:
    client = mqks.connect(mqks_broker.url)
    with pytest.raises(RuntimeError, match=r"async with mqks\.connect\(\) as client"):
        await client.publish("e", "x")
    await client.close()


def test_the_module_shows_its_names() -> None:
    assert dir(mqks) == sorted(mqks.__all__)
    assert {"connect", "blocking", "App", "RequestFailed"} <= {*dir(mqks)}
    for name in dir(mqks):
        assert getattr(mqks, name) is not None


async def test_a_bulk_publish_that_fails_names_its_first_cause(
    connect: Any, tmp_path: Path
) -> None:
    with Broker(tmp_path / "a.db", queue_messages_max=1) as broker:
        async with connect(broker.url) as client:
            await client.subscribe("full", ["full"])
            await client.publish("full", "x", confirm=True)
            events = ["full", *(f"nowhere-{number}" for number in range(5000))]
            with pytest.raises(PublishFailed) as failure:
                await client.publish_many(((event, "x") for event in events), mandatory=True)
        # Its own errors have driven the first ones out of the last errors.
        async with connect(broker.url) as another:
            assert await another.reason(failure.value.failed[0].error_id) is None

    assert failure.value.confirmed == 0
    assert [each.number for each in failure.value.failed] == [*range(5001)]
    assert failure.value.reason == (
        "queue_messages_max is 1, and 1 messages wait in a queue bound to 'full'"
    )
    assert str(failure.value).endswith(f": {failure.value.reason}")


async def test_a_server_that_knows_only_its_last_error(connect: Any) -> None:
    error_ids = iter(b"first second third".split())

    def answer(line: bytes) -> bytes:
        if b" publish " in line:
            return b"%b error " + next(error_ids)
        if b" stats " in line:
            return b'%b ok [{"reason":"no such day"}]' if b" third" in line else b"%b ok []"
        return b"%b ok"

    with answering(answer) as peer:
        async with connect(peer.url, QUICK) as client:
            with pytest.raises(PublishFailed) as failure:
                await client.publish_many([("e", 1), ("e", 2), ("e", 3)])
    assert failure.value.reason == "the server no longer has it; the last error was: no such day"


async def test_a_server_that_never_tells_the_reason(connect: Any) -> None:
    with answering(
        lambda line: b"%b ok" if b" ping " in line else b"%b error " + b"0" * 24
    ) as peer:
        async with connect(peer.url, QUICK) as client:
            with pytest.raises(RequestFailed, match=r"request, error 0{24}$") as failure:
                await client.purge("q")
    assert failure.value.reason is None


async def test_a_consumer_that_is_refused_says_why(connect: Any, tmp_path: Path) -> None:
    with Broker(tmp_path / "a.db", queues_max=1) as broker:
        async with connect(broker.url) as client:
            await client.subscribe("q", ["e"])
            with pytest.raises(RequestFailed) as failure:
                async with client.consume("another", create=True):
                    pass
            assert failure.value.reason == "the limit of 1 queues is reached (queues_max)"
            assert await client.ping() == ""


async def test_credentials_that_are_missing(connect: Any) -> None:
    told = "it requires credentials, as in mqks://USER:"
    with (
        answering(lambda line: b"%b error " + b"0" * 24) as peer,
        pytest.raises(AuthenticationFailed, match=told),
    ):
        async with connect(peer.url, QUICK):
            pass


@pytest.mark.parametrize("answer", [b"ok ", b"ok no JSON", b'ok [{"id": 1}]', b"ok [1]"])
async def test_a_peer_that_tells_no_reason_and_no_number(connect: Any, answer: bytes) -> None:
    with answering(lambda line: b"%b " + answer) as peer:
        async with connect(peer.url, QUICK) as client:
            with pytest.raises(ProtocolViolation):
                await client.reason("0" * 24)
            with pytest.raises(ProtocolViolation):
                await client.purge("q")


async def test_an_exception_passes_as_it_is(connect: Any, mqks_broker: Broker) -> None:
    with pytest.raises(KeyError):
        async with connect(mqks_broker.url) as client, client.consume("q", ["e"]):
            raise KeyError


async def test_stop_ends_the_iteration(client: Any) -> None:
    async with client.consume("q", ["e"]) as consumer:
        await client.publish_many([("e", "x")] * 10)
        async for message in consumer:
            message.ack()
            consumer.stop()
        with pytest.raises(Stopped):
            await consumer.receive(WAIT_S)
    assert await ready(client, "q") == 9


async def test_a_closed_client_says_so(connect: Any, mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        pass
    for call in (client.ping(), client.publish("e", "x"), client.publish_many([("e", "x")])):
        with pytest.raises(ConnectionLost):
            await call


async def test_nobody_listens(connect: Any, proxy: Proxy) -> None:
    proxy.is_refusing = True
    with pytest.raises(ConnectionLost, match=r"not connected within 0\.1 s"):
        async with connect(proxy.url, Options(connect_timeout_s=0.1, reconnect_min_s=0.01)):
            pass


async def test_a_server_that_comes_later_is_waited_for(connect: Any, proxy: Proxy) -> None:
    proxy.is_refusing = True

    async def come() -> None:
        await until(lambda: proxy.accepted >= 3)
        proxy.is_refusing = False

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(come)
        async with connect(proxy.url, QUICK) as client:
            assert await client.ping("x") == "x"


# -- the connection is lost


@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_confirmed_publishes_outlive_lost_connections(
    client: Any, proxy: Proxy, how: str
) -> None:
    count = 6_000
    await client.subscribe("q", ["e"])
    proxy.delay_s = 0.005  # So that there is something in flight.

    def messages() -> Iterator[tuple[str, int]]:
        for n in range(count):
            if n in (1_500, 3_300, 5_100):
                getattr(proxy, how)()
            yield "e", n

    assert await client.publish_many(messages()) == count
    proxy.delay_s = 0.0
    assert proxy.accepted > 1
    firsts: dict[str, int] = {}
    async with client.consume("q", auto_ack=True) as consumer:
        async for batch in consumer.batches():
            for message in batch:
                assert firsts.setdefault(message.id, message.json()) == message.json()
            if len(firsts) == count:
                break
    assert sorted(firsts.values()) == list(range(count))


@pytest.mark.parametrize("how", ["cut", "half_close"])
async def test_a_consumer_starts_again_as_last_told(client: Any, proxy: Proxy, how: str) -> None:
    async with client.consume("q", ["old"]) as consumer:
        await client.rebind("q", replace=["new"])
        await client.publish("new", "1", confirm=True)
        first = await consumer.receive(WAIT_S)
        getattr(proxy, how)()
        again = await consumer.receive(WAIT_S)
        assert (again.data, again.retry) == (b"1", 1)
        assert again.consumer_id != first.consumer_id
        first.ack()  # It is not this consumer's any more, and goes nowhere.
        await client.publish("old", "lost", confirm=True)
        await client.publish("new", "2", confirm=True)
        assert (await consumer.receive(WAIT_S)).data == b"2"
        again.ack()
    assert await ready(client, "q") == 1


async def bound(client: Any) -> list[str]:
    """What the queue q is bound to, as the broker knows it."""
    rows = json.loads(await client.request("stats", "bindings"))
    return sorted(row["event"] or row["mask"] for row in rows if row["queue"] == "q")


async def test_a_reconnect_changes_no_bindings(
    client: Any, connect: Any, mqks_broker: Broker, proxy: Proxy
) -> None:
    async with (
        connect(mqks_broker.url) as other,
        client.consume("q", ["a"], replace=True, delete_when_unused=100),
        client.consume("q", ["b"], delete_when_unused=100),
        client.consume("q", masks=["m.*"], delete_when_unused=100),
    ):
        earlier = await consumers(other)
        proxy.is_frozen = True
        await other.rebind("q", replace=["c"])
        proxy.cut()
        proxy.is_frozen = False
        await until(partial(are_new, other, 3, earlier))
        assert await bound(other) == ["c"]


async def test_a_queue_that_was_deleted_meanwhile_is_as_it_was_told_last(
    client: Any, connect: Any, mqks_broker: Broker, proxy: Proxy
) -> None:
    async with connect(mqks_broker.url) as other:
        async with client.consume("q", ["a"], auto_ack=True) as consumer:
            await client.rebind("q", add=["b"])
            await client.publish("b", "1")
            assert (await consumer.receive(WAIT_S)).data == b"1"
            proxy.is_frozen = True
            await other.delete_queue("q")
            proxy.cut()
            proxy.is_frozen = False
            await until(lambda: bound(other), ["a", "b"])
        await other.delete_queue("q")
        await client.subscribe("q", ["a"])
        async with client.consume("q", auto_ack=True) as consumer:
            proxy.is_frozen = True
            await other.delete_queue("q")
            proxy.cut()
            proxy.is_frozen = False
            with pytest.raises(RequestFailed):
                await consumer.receive(WAIT_S)
            assert await other.evaluate("len(state.queues)") == "0"


async def test_a_consumer_whose_id_another_connection_uses_ends_with_an_error(
    client: Any, mqks_broker: Broker
) -> None:
    async with client.consume("q", ["e"]) as consumer:
        await client.publish("e", "x", confirm=True)
        message = await consumer.receive(WAIT_S)
        with LineClient(("127.0.0.1", mqks_broker.port)) as other:
            consume = message.consumer_id + b" consume --confirm q"
            assert other.ask(consume) == message.consumer_id + b" ok "
            with pytest.raises(ConsumerReplaced, match="another connection") as failure:
                await consumer.receive(WAIT_S)
            reason = await client.reason(failure.value.error_id)
            assert "consumes under this id now" in reason
            message.ack()
            assert other.line().endswith(b"event=e,retry=1 x")
    assert await ready(client, "q") == 0


async def test_silence_is_noticed(client: Any, proxy: Proxy) -> None:
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        connections = proxy.accepted
        earlier = await consumers(client)
        proxy.is_frozen = True
        await until(lambda: proxy.accepted >= connections + 2)
        proxy.is_frozen = False
        # The server did not see the old connection end: the client ends its old consumer.
        await until(partial(are_new, client, 1, earlier))
        await client.publish("e", "x", confirm=True)
        assert (await consumer.receive(WAIT_S)).data == b"x"


async def test_a_client_that_was_held_up_keeps_its_connection(connect: Any, proxy: Proxy) -> None:
    async with connect(proxy.url, Options(keep_alive_s=0.2)) as client:
        for _ in range(2):
            with client._connection.lock:  # The blocking client waits for it, the other for us.
                time.sleep(0.5)
            await anyio.sleep(0.1)
            await client.ping()
    assert proxy.accepted == 1


async def test_a_timeout_leaves_the_session_in_order(connect: Any, proxy: Proxy) -> None:
    options = Options(keep_alive_s=WAIT_S, reconnect_min_s=0.01)
    async with connect(proxy.url, options) as client:
        await client.subscribe("q", ["e"])
        proxy.is_frozen = True
        with pytest.raises(ReplyTimeout):
            await client.publish("e", "x", confirm=True, timeout_s=0.05)
        with pytest.raises(ReplyTimeout):
            await client.publish_many([("e", "x")] * 1000, timeout_s=0.05)
        with pytest.raises(ReplyTimeout):
            await client.ping("x", timeout_s=0.05)
        await until(lambda: b" ping x\n" in proxy.swallowed)
        proxy.is_frozen = False
        assert await client.publish("e", "last", confirm=True, id="last") == "last"
        async with client.consume("q", auto_ack=True) as consumer:
            assert (await consumer.receive(WAIT_S)).text == "last"  # Nothing was sent again.


async def test_publishers_wait_while_the_server_is_away(connect: Any, proxy: Proxy) -> None:
    options = Options(outbox_bytes_max=10_000, reconnect_min_s=0.01, close_timeout_s=0.1)
    published = 0

    async def publish() -> None:
        nonlocal published
        async with connect(proxy.url, options) as client:
            proxy.is_refusing = True
            proxy.cut()
            try:
                while published < 100_000:
                    await client.publish("e", "x" * 90, timeout_s=0.1)
                    published += 1
            except ReplyTimeout:
                pass

    with pytest.raises(ConnectionLost, match="before all published messages were sent"):
        await publish()
    # Some may have been sent before the cut was noticed, but few.
    assert published < 100_000


async def test_a_slow_consumer_holds_back_only_itself(connect: Any, mqks_broker: Broker) -> None:
    count, data = 3_000, "x" * 10_000
    options = Options(buffer_bytes_max=100_000)
    async with (
        connect(mqks_broker.url, options) as client,
        client.consume("slow", ["e"], auto_ack=True) as slow,
        client.consume("fast", ["e"], auto_ack=True) as fast,
    ):
        await client.publish_many([("e", data)] * count)
        assert len(await take(fast, count)) == count
        # What the slow one was not given stays in the broker: it holds a bounded part only.
        assert await ready(client, "slow") > count / 3
        await anyio.sleep(0)
        assert len(await take(slow, count)) == count


async def test_leaving_while_held_back(connect: Any, mqks_broker: Broker) -> None:
    options = Options(buffer_bytes_max=1_000, close_timeout_s=WAIT_S)
    async with connect(mqks_broker.url, options) as client:
        async with client.consume("q", ["e"]) as consumer:
            await client.publish_many([("e", "x" * 1000)] * 10_000)
            (await consumer.receive(WAIT_S)).ack()
        assert await ready(client, "q") == 9_999


async def test_cancelled_calls_leave_the_session_in_order(proxy: Proxy) -> None:
    async with SKINS["async"](proxy.url) as client:
        await client.subscribe("q", ["e"])
        proxy.delay_s = 0.05
        async with anyio.create_task_group() as tasks:
            for n in range(100):
                tasks.start_soon(partial(client.publish, "e", n, confirm=True))
            tasks.start_soon(client.publish_many, [("e", "many")] * 1000)
            await anyio.sleep(0.01)
            tasks.cancel_scope.cancel()
        proxy.delay_s = 0.0
        assert await client.publish_many([("e", n) for n in range(1000)]) == 1000
        assert await client.ping("x") == "x"


async def test_a_consumer_hears_that_its_client_is_closed(mqks_broker: Broker) -> None:
    async with SKINS["async"](mqks_broker.url) as client:
        consumer = client.consume("q", ["e"])
        await consumer.__aenter__()
    with pytest.raises(ConnectionLost):
        await consumer.receive(WAIT_S)
    with pytest.raises(ConnectionLost):
        async with client.consume("q"):
            pass


# -- other ways to connect


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_proxy(mqks_broker: Broker, authority: trustme.CA) -> Iterator[Proxy]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    with Proxy(mqks_broker.port, tls=context) as proxy:
        yield proxy


async def test_tls(connect: Any, tls_proxy: Proxy, authority: trustme.CA) -> None:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    options = Options(ssl_context=context)
    async with connect(f"mqkss://localhost:{tls_proxy.port}", options) as client:
        async with client.consume("q", ["e"], prefetch=0) as consumer:
            assert await client.publish_many([("e", "x" * 1000)] * 2_000) == 2_000
            got = await take(consumer, 2_000)
            consumer.ack(got)
        assert await ready(client, "q") == 0


async def test_an_untrusted_server_is_refused(connect: Any, tls_proxy: Proxy) -> None:
    options = Options(connect_again=False, connect_timeout_s=WAIT_S)
    with pytest.raises(ConnectionLost, match=r"(?i)certificate"):
        async with connect(f"mqkss://localhost:{tls_proxy.port}", options):
            pass


async def test_unix_socket(connect: Any, tmp_path: Path) -> None:
    with Broker(tmp_path / "a.db", unix=tmp_path / "mqks.sock"):
        async with connect(f"mqks+unix://{tmp_path}/mqks.sock") as client:
            assert await client.ping("x") == "x"


@pytest.mark.parametrize(
    ("skin", "first"), [("async", "refused"), ("async", "silent"), ("blocking", "refused")]
)
async def test_a_host_with_two_addresses(
    mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch, skin: str, first: str
) -> None:
    with socket.socket() as other, socket.socket() as occupant:
        other.bind(("127.0.0.1", 0))
        if first == "silent":  # Its only place is taken.
            other.listen(0)
            occupant.connect(other.getsockname())
        ports = other.getsockname()[1], mqks_broker.port

        def resolve(*args: Any, **options: Any) -> list[Any]:
            kind = socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, ""
            return [(*kind, ("127.0.0.1", port)) for port in ports]

        monkeypatch.setattr(socket, "getaddrinfo", resolve)
        async with SKINS[skin]("mqks://two.example", QUICK) as client:
            assert await client.ping("x") == "x"


async def test_many_tasks_get_their_own_answers(mqks_broker: Broker) -> None:
    answers: list[tuple[str, str]] = []

    async with SKINS["async"](mqks_broker.url) as client, anyio.create_task_group() as tasks:

        async def ask(task: int) -> None:
            for n in range(20):
                text = f"{task}.{n}"
                if (task + n) % 3 == 0:
                    with anyio.move_on_after(0.0001 * n):
                        await client.ping("given up")
                answers.append((text, await client.ping(text)))
                await client.publish("e", text, confirm=n % 2 == 0)

        for task in range(100):
            tasks.start_soon(ask, task)
    assert len(answers) == 2000
    assert all(asked == answer for asked, answer in answers)


async def test_the_variable_is_the_default(
    connect: Any, mqks_broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MQKS_URL", mqks_broker.url)
    async with connect() as client:
        assert await client.ping("x") == "x"


@pytest.mark.parametrize("credentials", ["token", "user:p%40ss"])
async def test_credentials_go_first(connect: Any, credentials: str) -> None:
    lines: list[bytes] = []

    def answer(line: bytes) -> bytes:
        lines.append(line)
        return b"%b ok pong" if b" ping x" in line else b"%b ok "

    with answering(answer) as peer:
        url = f"mqks://{credentials}@127.0.0.1:{peer.port}"
        async with connect(url, Options(close_timeout_s=WAIT_S)) as client:
            assert await client.ping("x") == "pong"
    told = credentials.replace(":", " ").replace("%40", "@").encode()
    assert lines[0].split(b" ", 1)[1] == b"auth --confirm " + told + b"\n"


async def test_refused_credentials(connect: Any) -> None:
    with answering(lambda line: b"%b error 65f0c0de65f0c0de65f0c0de") as peer:
        with pytest.raises(AuthenticationFailed) as failure:
            async with connect(f"mqks://secret@127.0.0.1:{peer.port}"):
                pass
        assert failure.value.error_id == "65f0c0de65f0c0de65f0c0de"
        assert "secret" not in str(failure.value)
        assert peer.accepted == 1


async def test_a_peer_that_speaks_something_else(connect: Any) -> None:
    with (
        answering(lambda line: b"HTTP/1.1 400 Bad Request\r\n\r") as peer,
        pytest.raises(ProtocolViolation),
    ):
        async with connect(peer.url):
            pass


async def test_what_a_service_hears_while_it_is_up(connect: Any) -> None:
    with answering(lambda line: b"%b ok" if b" ping hello" in line else b"?") as peer:
        async with connect(peer.url) as client:
            with pytest.raises(ProtocolViolation):
                await client.ping("x")
            with pytest.raises(ProtocolViolation):
                await client.publish("e", json.dumps("x"), confirm=True)


async def test_batches_go_out_while_later_ones_are_still_to_come(connect: Any, client: Any) -> None:
    arrived = threading.Semaphore(0)

    def batches() -> Iterator[list[tuple[str, str]]]:
        for number in range(3):
            yield [("e", f"{number}a"), ("e", f"{number}b")]
            assert arrived.acquire(timeout=WAIT_S)

    async def later() -> AsyncIterator[list[tuple[str, str]]]:
        given = batches()
        while batch := await to_thread.run_sync(next, given, None):
            yield batch

    async def publish(client: Any) -> None:
        given = later() if connect is SKINS["async"] else batches()
        assert await client.publish_batches(given, id_prefix="p") == 6

    async with (
        client.consume("q", ["e"], auto_ack=True) as consumer,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(publish, client)
        for number in range(3):
            got = [(message.id, message.text) for message in await take(consumer, 2)]
            assert got == [
                (f"p-{2 * number + 1}", f"{number}a"),
                (f"p-{2 * number + 2}", f"{number}b"),
            ]
            arrived.release()


async def test_any_action_that_is_answered_with_one_line(client: Any) -> None:
    assert await client.request("ping", "two  words ") == "two  words "
    assert await client.request("subscribe", "--confirm", "q", "e") == ""
    assert await client.publish("e", "x", confirm=True)
    assert await ready(client, "q") == 1
    with pytest.raises(RequestFailed):
        await client.request("dance", "--confirm")
    for words in (["ping", "a\tb"], ["pi ng"], ["ping", "a\nb"]):
        with pytest.raises(InvalidRequest):
            await client.request(*words)


async def test_batches_end_when_nothing_comes(client: Any) -> None:
    async with client.consume("q", ["e"], auto_ack=True) as consumer:
        await client.publish("e", "x", confirm=True)
        [message] = await anext(consumer.batches(None, WAIT_S))
        assert message.text == "x"
        with pytest.raises(TimeoutError):
            await anext(consumer.batches(None, 0.05))


async def test_a_first_connection_that_fails_may_be_the_last(connect: Any, refusing: str) -> None:
    options = Options(connect_again=False, connect_timeout_s=10 * WAIT_S)
    with anyio.fail_after(WAIT_S), pytest.raises(ConnectionLost):
        async with connect(refusing, options):
            pass


# ------------------------------------------------------------------------------- several servers


@pytest.fixture
def refusing() -> Iterator[str]:
    """The URL of a port on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"mqks://127.0.0.1:{held.getsockname()[1]}"


@pytest.mark.parametrize("is_first", [True, False])
async def test_of_several_servers_the_one_that_accepts_is_used(
    connect: Any, mqks_broker: Broker, refusing: str, is_first: bool
) -> None:
    urls = [mqks_broker.url, refusing] if is_first else [refusing, mqks_broker.url]
    for several in (urls, ",".join(urls)):
        async with (
            connect(several) as client,
            client.consume("q", ["e"], auto_ack=True) as consumer,
        ):
            assert client.server == mqks_broker.url.removeprefix("mqks://")
            await client.publish("e", "x", confirm=True)
            assert (await consumer.receive(WAIT_S)).text == "x"


@pytest.mark.slow
async def test_a_silent_server_does_not_keep_a_client_from_the_next_one(
    connect: Any, mqks_broker: Broker
) -> None:
    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    options = Options(connect_timeout_s=4.0)  # Less than keep_alive_s.
    with Peer(listen) as silent:
        async with connect([silent.url, mqks_broker.url], options) as client:
            await client.publish("e", "x", confirm=True)
        assert silent.accepted == 1
        with Wire(f"{silent.url},{mqks_broker.url}", options) as wire:
            assert wire.ask(b"ping x") == b"x"
        assert silent.accepted == 2


async def test_the_error_names_all_servers(connect: Any, refusing: str) -> None:
    other = refusing.replace("127.0.0.1", "localhost")
    with pytest.raises(ConnectionLost) as failure:
        async with connect([refusing, other], Options(connect_again=False)):
            pass
    for url in (refusing, other):
        assert f"{url.removeprefix('mqks://')}: " in str(failure.value)


async def test_a_client_goes_over_to_the_next_server(
    connect: Any, mqks_broker: Broker, tmp_path: Path
) -> None:
    with Broker(tmp_path / "other.db") as other, Proxy(mqks_broker.port) as first:
        async with (
            connect(other.url) as witness,
            connect([first.url, other.url], QUICK) as client,
            client.consume("q", ["e"], auto_ack=True) as consumer,
        ):
            await client.publish("e", "one", confirm=True)
            assert (await consumer.receive(WAIT_S)).text == "one"
            first.cut()
            while await witness.evaluate("len(state.queues)") == "0":
                await anyio.sleep(0.01)
            await client.publish("e", "two", confirm=True)
            assert (await consumer.receive(WAIT_S)).text == "two"


async def test_stats(client: Any) -> None:
    for queue in "a", "b":
        await client.subscribe(queue, ["e"])
    await client.publish("e", "x", confirm=True)
    assert (await client.stats())["queues"] == 2
    assert [row["name"] for row in await client.stats("queues", "--after=a")] == ["b"]
    assert (await client.stats("queue", "a"))["ready"] == 1
    with pytest.raises(RequestFailed, match="there is no queue 'c'"):
        await client.stats("queue", "c")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ConfirmTimeout", "ReplyTimeout"),
        ("Failed", "Refused"),
        ("Letter", "DeadLetter"),
        ("Peeked", "PeekedMessage"),
        ("Update", "QueueUpdate"),
        ("connect_blocking", "blocking.connect"),
    ],
)
def test_an_old_name_means_the_same(old: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"mqks.{old} is now mqks.{new}"):
        assert getattr(mqks, old) is attrgetter(new)(mqks)


async def test_old_keywords_mean_the_same(client: Any) -> None:
    def warned(old: str, new: str) -> Any:
        return pytest.warns(DeprecationWarning, match=f"^{old} is now {new}$")

    with warned("dead_letters", "dead_letter_queue") as found:
        await client.set_queue("q", dead_letters="dead")
    if isinstance(client, mqks.AsyncClient):
        assert found[0].filename == __file__
    with warned("add_mask", "masks"):
        await client.subscribe("q", add_mask=["m.*"])
    for words in ({"add": ["a"]}, {"events": ["b"], "add": ["c"]}):
        with warned("add", "events"):
            async with client.consume("q", **words):
                pass
    with warned("add", "events"):
        async with client.consume("q", ["d"], add=["f"]):
            pass
    told = await client.stats("queue", "q")
    assert told["events"] == ["a", "b", "c", "d", "f"]
    assert told["masks"] == ["m.*"]
    assert told["policy"]["dead_letters"]["value"] == "dead"

    await client.publish("a", "x", confirm=True)
    async with client.consume("q", meta=True) as consumer:
        (await consumer.receive(timeout_s=WAIT_S)).reject(dead=True)
    async with client.consume("dead", meta=True) as consumer:
        message = await consumer.receive(timeout_s=WAIT_S)
        (peeked,) = await client.peek("dead")
        for letter in (message, peeked):
            with warned("letter", "dead_letter"):
                assert letter.letter == letter.dead_letter
            assert letter.dead_letter.queue == "q"


def test_old_keywords_of_a_service() -> None:
    app = mqks.App()
    old: Any = app.consumer
    with pytest.warns(DeprecationWarning, match="is now") as found:
        old("q", ["a"], add=["b"], add_mask=["m.*"])(print)
    assert [str(each.message) for each in found] == ["add is now events", "add_mask is now masks"]
    bound = app._services[0].consuming
    assert (bound["events"], bound["masks"]) == (("a", "b"), ("m.*",))


async def test_schedules(client: Any) -> None:
    await client.subscribe("q", ["beat"])
    await client.schedule("b", None, "beat", "a\tb", every_s=3600, meta={"k": "v"}, priority=3)
    cron, words = "0 3 * * mon", {"missed": "one", "jitter_s": 1.5, "pause": True}
    await client.schedule("a", cron, "beat", {"n": 1}, tz="Europe/Berlin", to="q", **words)
    paused, every = await client.schedules()
    assert (paused["name"], paused["cron"], paused["tz"]) == ("a", cron, "Europe/Berlin")
    assert (paused["missed"], paused["jitter_s"], paused["next_us"]) == ("one", 1.5, None)
    assert paused["publish"] == '--to=q beat {"n":1}'
    assert (every["every_s"], every["cron"], every["paused"]) == (3600.0, None, False)

    await client.run_schedule("b")
    async with client.consume("q", meta=True) as consumer:
        message = await consumer.receive(WAIT_S)
    assert (message.text, message.meta, message.priority) == ("a\tb", {"k": "v"}, 3)
    assert message.id.startswith("b:")

    await client.resume_schedule("a")
    await client.pause_schedule("b")
    assert [row["paused"] for row in await client.schedules()] == [False, True]
    for name in ("a", "a"):
        await client.unschedule(name)
    assert [row["name"] for row in await client.schedules()] == ["b"]
    for change in (client.pause_schedule, client.resume_schedule, client.run_schedule):
        with pytest.raises(RequestFailed, match="there is no schedule 'a'"):
            await change("a")


async def test_a_schedule_that_makes_no_sense(client: Any) -> None:
    wrong: list[tuple[tuple[str, str | None], dict[str, Any]]] = [
        (("s", None), {}),
        (("s", "* * * * *"), {"every_s": 5}),
        (("s", None), {"every_s": -1}),
        (("s", None), {"every_s": 5, "missed": "all"}),
        (("s", "* * * * * publish evil x"), {}),
        (("publish", "* * * * *"), {}),
        (("s", "--every=5"), {}),
        (("s t", "* * * * *"), {}),
        (("s", "* * * * *"), {"ttl_s": -1}),
    ]
    for (name, cron), options in wrong:
        with pytest.raises(InvalidRequest):
            await client.schedule(name, cron, "e", "x", **options)
    for cron, tz in (("61 * * * *", "UTC"), ("* * * * *", "Europe/Nowhere")):
        with pytest.raises(RequestFailed, match="is not a"):
            await client.schedule("s", cron, "e", "x", tz=tz)
    with pytest.raises(TypeError, match="at"):
        await client.schedule("s", "* * * * *", "e", "x", at=5)
    assert await client.schedules() == []
