"""Services: concurrency, failures, and the end."""

from __future__ import annotations

import logging

import anyio
import pytest

from mqks import App, ConnectionLost, Message, Options, RequestFailed, connect
from mqks.testing import Broker
from tests.waiting import WAIT_S

pytestmark = pytest.mark.anyio


async def test_stopping_finishes_what_is_in_hand(mqks_broker: Broker) -> None:
    app, started, finish, stop = App(mqks_broker.url), anyio.Event(), anyio.Event(), anyio.Event()
    at_once, done, most = 0, [], 0

    @app.consumer("q", events=["e"], concurrency=3)
    async def work(message: Message) -> None:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        if at_once == 3:
            started.set()
        await finish.wait()
        at_once -= 1
        done.append(message.json())

    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["e"])
        await client.publish_many(("e", n) for n in range(10))
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(app.serve, stop)
                await started.wait()
                stop.set()
                for _ in range(10):
                    await anyio.sleep(0)
                assert done == []
                finish.set()
        assert most == 3
        assert sorted(done) == [0, 1, 2]
        assert await client.evaluate("len(state.queues['q'])") == "7"


async def test_a_failure_puts_the_message_back(
    mqks_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    app, stop, retries = App(mqks_broker.url), anyio.Event(), []

    @app.consumer("q", events=["e"])
    async def work(message: Message) -> None:
        retries.append(message.retry)
        if message.retry < 2:
            raise ValueError("not yet")
        stop.set()

    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["e"])
        await client.publish("e", "x", confirm=True)
        with anyio.fail_after(WAIT_S), caplog.at_level(logging.ERROR):
            await app.serve(stop)
        assert await client.evaluate("len(state.queues['q'])") == "0"
    assert retries == [0, 1, 2]
    assert caplog.text.count("ValueError: not yet") == 2


async def test_a_function_that_does_not_end_is_cancelled(mqks_broker: Broker) -> None:
    app, stop = App(mqks_broker.url, stop_timeout_s=0.05), anyio.Event()

    @app.consumer("q", events=["e"])
    async def work(message: Message) -> None:
        stop.set()
        await anyio.sleep_forever()

    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["e"])
        await client.publish("e", "x", confirm=True)
        with anyio.fail_after(WAIT_S):
            await app.serve(stop)
        assert await client.evaluate("len(state.queues['q'])") == "1"


def test_run_tells_what_went_wrong(mqks_broker: Broker) -> None:
    app = App(mqks_broker.url, Options(line_bytes_max=10 * 1024 * 1024))

    @app.consumer("q" * (2 * 1024 * 1024))
    async def work(message: Message) -> None: ...

    with pytest.raises(RequestFailed):
        app.run()


def test_run_without_a_server() -> None:
    with pytest.raises(ConnectionLost):
        App("mqks://127.0.0.1:1", Options(connect_timeout_s=0.05)).run()


def test_no_client_outside_of_serving() -> None:
    with pytest.raises(RuntimeError, match="does not run"):
        _ = App().client
