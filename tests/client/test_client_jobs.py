"""Jobs: results, progress and cancels. Transactions: steps that are done as one, or not at all."""

import threading

import anyio
import pytest

from mqks import (
    App,
    AsyncClient,
    InvalidRequest,
    JobState,
    Message,
    NoResult,
    ReplyTimeout,
    RequestFailed,
    blocking,
    connect,
)
from mqks.testing import Broker
from tests.client.test_client_app import client
from tests.client.waiting import serving

__all__ = ["client"]
pytestmark = pytest.mark.anyio


async def test_a_service_gives_results(client: AsyncClient, mqks_broker: Broker) -> None:
    app = App(mqks_broker.url)
    await client.subscribe("atomic", ["f"])

    @app.consumer("q")
    async def work(message: Message) -> object:
        return {"twice": 2 * message.json()}

    @app.consumer("atomic", atomic=True)
    async def step(message: Message) -> str:
        message.publish("e", 5, id="next", keep_result_s=60.0)
        return message.text

    async with serving(app):
        job = await client.submit("e", 3, id="j1")
        assert (job.id, await job.result(20)) == ("j1", {"twice": 6})
        assert await job.state() == JobState("done", "q", data=b'{"twice":6}')
        first = await client.submit("f", "a\nb", keep_result_s=60.0)
        assert await first.result() == "a\nb"
        assert await client.job("next").result() == {"twice": 10}
        assert await job.cancel() == "none"


async def test_a_result_that_cannot_be_kept_is_no_failure(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app, results = App(mqks_broker.url), {b"1": "x" * 70_000, b"2": {1, 2}}

    @app.consumer("q")
    async def work(message: Message) -> object:
        return results[message.data]

    async with serving(app):
        for data in results:
            assert await (await client.submit("e", data)).result(20) is None


async def test_a_cancel_ends_an_async_function(client: AsyncClient, mqks_broker: Broker) -> None:
    app, ends = App(mqks_broker.url), list[str]()

    @app.consumer("q", cancellable=True, prefetch=2)
    async def work(message: Message) -> None:
        message.progress(40, "half  way")
        try:
            await anyio.sleep_forever()
        finally:
            ends.append(message.id)

    async with serving(app):
        job = await client.submit("e", id="j1")
        waiting = await client.submit("e", id="j2")
        while await job.progress() is None:
            await anyio.sleep(0.01)
        assert await job.state() == JobState("running", "q", 40, "half way")
        with pytest.raises(ReplyTimeout, match="j1"):
            await job.result(0.01)
        assert await waiting.cancel() == "told"
        assert await job.cancel("too late") == "told"
        with pytest.raises(NoResult, match="j1 is cancelled: too late") as failed:
            await job.result()
        assert (failed.value.state, failed.value.reason) == ("cancelled", "too late")
        with pytest.raises(NoResult, match="j2 is cancelled"):
            await waiting.result()
    assert ends[:1] == ["j1"]


async def test_a_function_in_a_thread_sees_a_cancel(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app, began = App(mqks_broker.url), threading.Semaphore(0)

    @app.consumer("q", cancellable=True)
    def work(message: Message) -> str | None:
        began.release()
        while not message.cancelled:
            threading.Event().wait(0.01)
        return message.cancel_reason if message.data == b"finish" else None

    async with serving(app):
        for data, ends in ((b"finish", "done"), (b"leave", "cancelled")):
            job = await client.submit("e", data)
            await anyio.to_thread.run_sync(began.acquire)
            assert await job.cancel("now") == "told"
            assert (await job.state(20)).state == ends


async def test_a_caller_is_told_of_a_cancel(client: AsyncClient, mqks_broker: Broker) -> None:
    app = App(mqks_broker.url)

    @app.consumer("q", cancellable=True)
    async def work(message: Message) -> None:
        await client.cancel_job("q", message.id)
        await anyio.sleep_forever()

    async with serving(app):
        with pytest.raises(Exception, match="Cancelled"):
            await client.call("e", "x", 20)


def test_the_blocking_client(mqks_broker: Broker) -> None:
    with blocking.connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
        job = client.submit("e", {"n": 1}, keep_result_s=60)
        assert job.state() == JobState("waiting", "q")
        other = client.submit("e", id="other")
        assert other.cancel("why not") == "cancelled"
        with client.consume("q", cancellable=True, meta=True) as consumer:
            message = consumer.receive(20)
            assert (message.wants_result, message.cancel_reason) == (True, None)
            message.progress(7)
            while job.progress() != 7:
                pass
            assert client.cancel_job("q", job.id, reason="late") == "told"
            while not message.cancelled:
                pass
            assert message.cancel_reason == "late"
            message.ack(result=[1, "é"])
            assert job.result(20) == [1, "é"]
        with pytest.raises(NoResult, match="why not"):
            other.result()
        with pytest.raises(NoResult, match="not known"):
            client.job("unknown").result()


async def test_what_is_wrong_is_told(client: AsyncClient) -> None:
    with pytest.raises(RequestFailed, match="one queue"):
        await client.submit("nowhere")
    for wrong in (-1.0, 0.0, 1e10):
        with pytest.raises(InvalidRequest):
            await client.submit("e", keep_result_s=wrong)
    with pytest.raises(InvalidRequest):
        await client.job("a b").state()
    async with client.consume("q") as consumer:
        await client.submit("e")
        message = await consumer.receive(20)
        for percent, text in ((101, ""), (-1, ""), (1, "x" * 201)):
            with pytest.raises(InvalidRequest):
                message.progress(percent, text)
        with pytest.raises(InvalidRequest, match="JSON"):
            message.ack(result=object())
        message.ack()
    async with client.consume("q", auto_ack=True) as consumer:
        await client.publish("e", "x")
        with pytest.raises(InvalidRequest, match="auto_ack"):
            (await consumer.receive(20)).progress(1)
    with pytest.raises(InvalidRequest):
        await client.cancel_job("q", "")


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


def test_steps_of_the_blocking_client(mqks_broker: Broker) -> None:
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


async def test_steps_of_a_service(mqks_broker: Broker) -> None:
    app, tries = App(mqks_broker.url), list[int]()

    @app.consumer("in", ["new"], atomic=True, backoff=0.001)
    async def double(message: Message) -> str:
        message.publish("done", str(2 * int(message.data)))
        tries.append(message.retry)
        if not message.retry:
            raise ValueError
        return "done"

    async with connect(mqks_broker.url) as client, client.consume("out", ["done"]) as consumer:
        async with serving(app):
            await client.subscribe("in", ["new"])
            await client.publish("new", "21", confirm=True)
            message = await consumer.receive(20)
            assert message.data == b"42"
            message.ack()
        assert tries == [0, 1]
        assert (await client.stats("queue", "out"))["ready"] == 0
        assert (await client.stats("queue", "in"))["ready"] == 0
