"""Transactions of the clients, and of services."""

import anyio
import pytest

from mqks import blocking
from mqks.client.app import App
from mqks.client.async_client import connect
from mqks.client.errors import InvalidRequest, RequestFailed
from mqks.client.messages import Message
from mqks.testing import Broker

pytestmark = pytest.mark.anyio


async def test_all_or_nothing(mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        await client.subscribe("out", ["done"])
        await client.subscribe("in", ["new"])
        await client.publish("new", "1", confirm=True)
        async with client.consume("in") as consumer:
            message = await anext(aiter(consumer))

            with pytest.raises(TypeError, match="did you mean mandatory"):
                client.transaction().publish("e", "1", mandatry=True)  # type: ignore[call-arg]

            async def fail(event: str, failure: type[Exception] | None) -> None:
                async with client.transaction() as step:
                    step.publish("done", "1")
                    step.ack(message)
                    step.publish(event, "1", mandatory=True)
                    if failure:
                        raise failure

            with pytest.raises(ZeroDivisionError):
                await fail("done", ZeroDivisionError)
            with pytest.raises(RequestFailed, match="no queue is bound"):
                await fail("nowhere", None)
            assert (await client.stats("queue", "out"))["ready"] == 0
            async with client.transaction() as step:
                step.publish("done", "1", meta={"a": "b"}, id="x")
                step.publish("done", "2")
                step.ack(message)
            with pytest.raises(InvalidRequest):
                step.ack(message)
            assert (await client.stats("queue", "out"))["ready"] == 2
        assert (await client.stats("queue", "in"))["ready"] == 0


def test_blocking(mqks_broker: Broker) -> None:
    with blocking.connect(mqks_broker.url) as client:
        client.subscribe("out", ["done"])
        with client.transaction() as step:
            step.publish("done", "1")
            assert client.stats("queue", "out")["ready"] == 0
        assert client.stats("queue", "out")["ready"] == 1
        client.publish_many([("done", n) for n in range(4)])
        with client.transaction() as step:
            step.move("out", "more", limit=2)
            step.redrive("out", to="more")
            step.trim("out", 10**9)
        assert client.stats("queue", "out")["ready"] == 0
        assert client.stats("queue", "more")["ready"] == 2


async def test_a_batch(mqks_broker: Broker) -> None:
    async with connect(mqks_broker.url) as client:
        await client.subscribe("rows", ["row"])
        await client.subscribe("out", ["done", "failed"])

        async def fail() -> None:
            async with client.transaction() as step:
                step.open_batch("b", then=("done", "1"))
                step.publish("nowhere", "1", batch="b", mandatory=True)

        with pytest.raises(RequestFailed, match="no queue is bound"):
            await fail()
        assert await client.batch_counts("b") is None
        async with client.transaction() as step:
            step.open_batch("b", then=("done", "1"), on_dead=("failed", "1"), for_s=60)
            step.publish("row", "1", batch="b")
            step.close_batch("b")
        counts = await client.batch_counts("b")
        assert counts is not None
        assert (counts["total"], counts["closed"], counts["on_dead"]) == (1, True, "failed")
        async with client.transaction() as step:
            step.close_batch("b", discard=True)
        assert await client.batches() == []


async def test_service(mqks_broker: Broker) -> None:
    app, stop, tries = App(mqks_broker.url), anyio.Event(), list[int]()

    @app.consumer("in", ["new"], atomic=True, backoff=0.001)
    async def double(message: Message) -> str:
        message.publish("done", str(2 * int(message.data)))
        tries.append(message.retry)
        if not message.retry:
            raise ValueError
        return "done"

    async with connect(mqks_broker.url) as client, client.consume("out", ["done"]) as consumer:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.serve, stop)
            await client.subscribe("in", ["new"])
            await client.publish("new", "21", confirm=True)
            with anyio.fail_after(20):
                message = await anext(aiter(consumer))
            assert message.data == b"42"
            message.ack()
            stop.set()
        assert tries == [0, 1]
        assert (await client.stats("queue", "out"))["ready"] == 0
        assert (await client.stats("queue", "in"))["ready"] == 0
