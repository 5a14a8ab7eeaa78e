"""Jobs: results, progress and cancels, by both clients and by services."""

import threading
from collections.abc import AsyncIterator

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
from tests.client.test_client_app import serving

pytestmark = pytest.mark.anyio


@pytest.fixture
async def client(mqks_broker: Broker) -> AsyncIterator[AsyncClient]:
    """Where the queue q is bound to e."""
    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["e"])
        yield client


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
