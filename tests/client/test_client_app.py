"""Services: concurrency, failures, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio import from_thread, to_thread

from mqks import (
    App,
    AsyncClient,
    CallFailed,
    ConnectionLost,
    InvalidRequest,
    Message,
    Options,
    PublishFailed,
    QueueMissing,
    RequestFailed,
    blocking,
    connect,
)
from mqks.client.app import Work
from mqks.testing import Broker
from tests.client.waiting import serving, until
from tests.kit.server_process import ServerProcess
from tests.kit.waiting import WAIT_S

pytestmark = pytest.mark.anyio
WAITS = "len(state.queues['q'])"


@pytest.fixture
async def client(mqks_broker: Broker) -> AsyncIterator[AsyncClient]:
    """Where the queue q is bound to e."""
    async with connect(mqks_broker.url) as client:
        await client.subscribe("q", ["e"])
        yield client


async def served(app: App, stop: anyio.Event) -> None:
    with anyio.fail_after(WAIT_S):
        await app.serve(stop)


@pytest.mark.slow
async def test_stopping_finishes_what_is_in_hand(client: AsyncClient, mqks_broker: Broker) -> None:
    app, started, finish = App(mqks_broker.url), anyio.Event(), anyio.Event()
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

    await client.publish_many(("e", n) for n in range(10))
    async with serving(app) as stop:
        await started.wait()
        stop.set()
        for _ in range(10):
            await anyio.sleep(0)
        assert done == []
        finish.set()
    assert most == 3
    assert sorted(done) == [0, 1, 2]
    assert await client.evaluate(WAITS) == "7"


async def failures(app: App, client: AsyncClient, count: int) -> None:
    """Let the service fail at the message of q so often, without the pauses between."""
    before = await dead(client)
    async with serving(app):
        for _ in range(count - 1):
            await until(lambda: client.promote("q", None))
        await until(lambda: dead(client), before + 1)


async def dead(client: AsyncClient) -> int:
    return sum(json.loads(await client.request("stats", "--confirm"))["dead"].values())


def failing_app(url: str, **limits: Any) -> tuple[App, list[int]]:
    app, tries = App(url), list[int]()

    @app.consumer("q", **limits)
    async def work(message: Message) -> None:
        tries.append(message.retry)
        raise ValueError("never")

    return app, tries


@pytest.mark.parametrize(
    ("limits", "count", "letters", "told"),
    [
        ({}, 20, None, "the last one: it was dropped, because the queue has no dead-letter queue"),
        (
            *({"retries": 3, "backoff": 60}, 3, "q.dead"),
            "the last one: it went to the dead-letter queue q.dead",
        ),
    ],
)
async def test_it_gives_up_what_always_fails(
    client: AsyncClient,
    mqks_broker: Broker,
    caplog: pytest.LogCaptureFixture,
    limits: Any,
    count: int,
    letters: str | None,
    told: str,
) -> None:
    app, tries = failing_app(mqks_broker.url, **limits)
    await client.set_queue("q", dead_letter_queue=letters)
    await client.publish("e", "x", confirm=True)
    with caplog.at_level(logging.INFO):
        await failures(app, client, count)
    assert tries == [*range(count)]
    logged = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(logged) == caplog.text.count("Traceback") == count
    *others, last = [record.getMessage() for record in logged]
    assert last.endswith(f"failed, try {count}, {told}")
    assert not [text for text in others if "last" in text]


async def test_failures_go_back_while_the_disk_is_full(tmp_path: Path) -> None:
    flags = ("--db-bytes-max", "16MiB", "--ballast-bytes", "0")
    with ServerProcess(tmp_path / "mqks.db", *flags) as server:
        url = "mqks://{}:{}".format(*server.address)
        app, stop, tries = App(url), anyio.Event(), list[int]()

        @app.consumer("q", backoff=None)
        async def work(message: Message) -> None:
            tries.append(message.retry)
            if message.retry:
                stop.set()
            raise ValueError

        async with connect(url) as client:
            await client.subscribe("q", ["e"])
            await client.subscribe("other", ["f"])
            await client.publish("e", "x", confirm=True)
            with pytest.raises(PublishFailed):
                await client.publish_many(("f", "x" * 10_000) for _ in range(5000))
            await served(app, stop)
        assert tries == [0, 1]


async def test_it_backs_off_longer_each_time(client: AsyncClient, mqks_broker: Broker) -> None:
    app, _ = failing_app(mqks_broker.url)
    waits = []
    await client.publish("e", "x", confirm=True)
    async with serving(app):
        for _ in range(12):
            [scheduled] = await until(lambda: client.peek("q", scheduled=True))
            waits.append(scheduled.due - time.time())
            await client.promote("q", None)
    # Each is looked at some time after it began.
    for wait_s, whole_s in zip(waits, [*(2**n for n in range(10)), 600, 600], strict=True):
        assert 0.85 * whole_s - WAIT_S < wait_s < 1.15 * whole_s


async def test_the_policy_of_the_queue_goes_first(client: AsyncClient, mqks_broker: Broker) -> None:
    app, tries = failing_app(mqks_broker.url, retries=1, backoff=3600)
    await client.set_queue("q", retries=3, backoff=0.001, dead_letter_queue="q.dead")
    await client.publish("e", "x", confirm=True)
    await failures(app, client, 1)
    [dead] = await client.peek("q.dead")
    assert (dead.text, dead.dead_letter and dead.dead_letter.why) == ("x", "ValueError: never")
    assert tries == [0, 1, 2]


def test_limits_that_make_no_sense() -> None:
    for limits in ({"retries": -1}, {"backoff": (2, 1)}):
        with pytest.raises(InvalidRequest):
            failing_app("", **limits)


DEADLY = """
import os, sys, mqks

app = mqks.App(sys.argv[1])

@app.consumer("q", backoff=600)
async def work(message: mqks.Message) -> None:
    if message.text == "deadly":
        os.abort()

app.run()
"""


async def test_what_kills_its_worker_leaves_the_third_one_alone(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    command = [sys.executable, "-c", DEADLY, mqks_broker.url]
    workers = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(3)]
    try:
        await until(lambda: client.evaluate("len(state.consumers_by_queues['q'])"), "3")
        await client.publish("e", "deadly", confirm=True)
        paused = await until(lambda: client.peek("q", scheduled=True))
        await client.publish_many(("e", n) for n in range(10))
        await until(lambda: client.peek("q"), [])
        assert [(message.text, message.retry) for message in paused] == [("deadly", 2)]
        assert sorted(worker.poll() is None for worker in workers) == [False, False, True]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


async def test_a_function_that_does_not_end_is_cancelled(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app, stop = App(mqks_broker.url, stop_timeout_s=0.05), anyio.Event()

    @app.consumer("q", events=["e"])
    async def work(message: Message) -> None:
        stop.set()
        await anyio.sleep_forever()

    await client.set_queue("q", retries=1, losses=1)
    await client.publish("e", "x", confirm=True)
    await served(app, stop)
    assert await client.evaluate(WAITS) == "1", "it did not count as a failure"


async def a_cancelled_future(message: Message) -> None:
    future = asyncio.get_running_loop().create_future()
    future.cancel("given up")
    await future


async def one_of_several(message: Message) -> None:
    waiting = asyncio.create_task(anyio.sleep_forever())
    asyncio.get_running_loop().call_soon(waiting.cancel, "given up")
    await asyncio.gather(waiting, anyio.sleep(0))


async def in_groups(message: Message) -> None:
    async with asyncio.TaskGroup() as tasks, anyio.create_task_group():
        tasks.create_task(anyio.sleep_forever())
        await a_cancelled_future(message)


async def its_own_task(message: Message) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel("given up")
    await anyio.sleep_forever()


def in_a_thread(message: Message) -> None:
    asyncio.run(a_cancelled_future(message))


@pytest.mark.parametrize("atomic", [False, True])
@pytest.mark.parametrize(
    "function", [a_cancelled_future, one_of_several, in_groups, its_own_task, in_a_thread]
)
async def test_a_cancellation_from_within_is_a_failure_of_the_message(
    client: AsyncClient,
    mqks_broker: Broker,
    caplog: pytest.LogCaptureFixture,
    function: Any,
    atomic: bool,
) -> None:
    app, told = App(mqks_broker.url), list[str]()

    @app.on_error
    async def tell(error: Exception, message: Message) -> None:
        told.append(f"{message.text} {error!r}")

    app.consumer("q", retries=2, backoff=None, atomic=atomic)(function)
    await client.set_queue("q", dead_letter_queue="dead")
    await client.publish("e", "first", confirm=True)
    async with serving(app):
        await until(lambda: waiting(client, "dead"), 1)
        await client.publish("e", "second", confirm=True)
        await until(lambda: waiting(client, "dead"), 2)
    whys = [letter.dead_letter and letter.dead_letter.why for letter in await client.peek("dead")]
    assert whys == ["CancelledError: given up"] * 2
    error = "CancelledError('given up')"
    assert told == [f"first {error}"] * 2 + [f"second {error}"] * 2
    assert caplog.text.count(" failed, try ") == 4


async def waiting(client: AsyncClient, queue: str) -> int:
    return len(await client.peek(queue))


async def test_a_cancellation_around_a_function_is_a_failure_as_well(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app = App(mqks_broker.url)

    @app.middleware
    async def around(message: Message, work: Work) -> object:
        if message.text == "around":
            await a_cancelled_future(message)
        with anyio.move_on_after(0 if message.text == "in time" else WAIT_S):
            return await work(message)
        return "too late"

    @app.on_error
    async def tell(error: Exception, message: Message) -> None:
        await a_cancelled_future(message)

    @app.consumer("q")
    async def work(message: Message) -> str:
        await anyio.sleep(0)
        if message.text == "bad":
            raise ValueError("no")
        return message.text

    async with serving(app):
        with pytest.raises(CallFailed, match="CancelledError: given up"):
            await client.call("e", "around")
        with pytest.raises(CallFailed, match="ValueError: no"):
            await client.call("e", "bad")
        assert (await client.call("e", "in time")).text == "too late"
        assert (await client.call("e", "good")).text == "good"


async def by_a_scope(app: App, started: anyio.Event) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(app.serve, anyio.Event())
        await started.wait()
        tasks.cancel_scope.cancel()


async def by_its_task(app: App, started: anyio.Event) -> None:
    task = asyncio.create_task(app.serve(anyio.Event()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_the_end_of_the_loop(app: App, started: anyio.Event) -> None:
    _task = asyncio.create_task(app.serve(anyio.Event()))  # noqa: RUF006
    await started.wait()


@pytest.mark.parametrize("cancel", [by_a_scope, by_its_task, by_the_end_of_the_loop])
async def test_the_cancellation_of_a_service_is_no_failure(
    client: AsyncClient, mqks_broker: Broker, cancel: Any
) -> None:
    app, started, count = App(mqks_broker.url), anyio.Event(), 0
    failures = list[Exception]()

    @app.on_error
    async def tell(error: Exception, message: Message) -> None:
        failures.append(error)

    @app.consumer("q", concurrency=30)
    async def work(message: Message) -> None:
        nonlocal count
        count += 1
        if count == 30:
            started.set()
        await anyio.sleep_forever()

    await client.publish_many([("e", "x")] * 30)
    await to_thread.run_sync(asyncio.run, cancel(app, started))
    await until(lambda: client.evaluate(WAITS), "30")
    assert failures == []


async def test_functions_without_async_run_in_threads(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app, stop, together = App(mqks_broker.url), anyio.Event(), threading.Barrier(3, timeout=WAIT_S)
    at_once, most, done = 0, 0, list[int]()
    lock = threading.Lock()

    @app.consumer("q", concurrency=3)
    def work(message: Message) -> None:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        together.wait()
        with lock:
            at_once -= 1
            done.append(message.json())
            if len(done) == 12:
                from_thread.run_sync(stop.set)

    await client.publish_many(("e", n) for n in range(12))
    await served(app, stop)
    assert await client.evaluate(WAITS) == "0"
    assert (most, sorted(done)) == (3, [*range(12)])


async def test_a_function_in_a_thread_may_settle_and_fail(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app, stop, came = App(mqks_broker.url), anyio.Event(), list[tuple[str, int]]()

    @app.consumer("q", backoff=None)
    def work(message: Message) -> None:
        came.append((message.text, message.retry))
        message.touch()
        if message.retry:
            message.ack()
        elif message.text == "rejected":
            message.reject()
        elif message.text == "raised":
            raise ValueError
        if len(came) == 6:
            from_thread.run_sync(stop.set)

    for text in ("rejected", "raised", "plain", "last"):
        await client.publish("e", text, confirm=True)
    await served(app, stop)
    assert await client.evaluate(WAITS) == "0"
    assert sorted(came) == [
        *(("last", 0), ("plain", 0), ("raised", 0), ("raised", 1), ("rejected", 0)),
        ("rejected", 1),
    ]


async def test_a_thread_that_does_not_end_is_left(client: AsyncClient, mqks_broker: Broker) -> None:
    app, stop = App(mqks_broker.url, stop_timeout_s=0.05), anyio.Event()
    go_on, settled = threading.Event(), threading.Event()

    @app.consumer("q")
    def work(message: Message) -> None:
        from_thread.run_sync(stop.set)
        go_on.wait(WAIT_S)
        message.ack()
        settled.set()

    await client.publish("e", "x", confirm=True)
    await served(app, stop)
    go_on.set()
    assert await to_thread.run_sync(settled.wait, WAIT_S)
    assert await client.evaluate(WAITS) == "1"


class Callables:
    def plain(self, message: Message) -> str:
        return f"plain {message.text}"

    async def async_method(self, message: Message) -> str:
        return f"async {message.text}"

    async def __call__(self, message: Message, more: str = "") -> str:
        return f"called {message.text}{more}"

    def generator(self, message: Message) -> Iterator[None]:
        yield

    async def async_generator(self, message: Message) -> AsyncIterator[None]:
        yield


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (Callables().plain, "plain x"),
        (Callables().async_method, "async x"),
        (Callables(), "called x"),
        (partial(Callables(), more="!"), "called x!"),
        (partial(partial(Callables().plain)), "plain x"),
        (lambda message: Callables().async_method(message), "async x"),
        (lambda message: message.text, "x"),
    ],
)
async def test_all_that_can_handle_a_message_does(
    client: AsyncClient, mqks_broker: Broker, function: Any, answer: str
) -> None:
    app = App(mqks_broker.url)
    app.consumer("q", ["e"])(function)
    async with serving(app):
        assert (await client.call("e", "x", timeout_s=WAIT_S)).text == answer


def two(message: Message, other: str) -> None: ...


@pytest.mark.parametrize(
    "function",
    [
        *(Callables, Callables.plain, Callables().generator, Callables().async_generator),
        *(two, partial(two), partial(Callables().generator), lambda: None, None, "work"),
        partial(Callables),
    ],
)
def test_what_cannot_handle_a_message_is_refused(function: Any) -> None:
    with pytest.raises(TypeError, match=r"service|message"):
        App().consumer("q")(function)


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
    with pytest.raises(RuntimeError, match="is not running"):
        _ = App().client


def test_services_with_wrong_arguments_are_refused_when_they_are_made() -> None:
    app = App()
    wrong: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ("q", {"events": "order.new"}, InvalidRequest, "a list of names is needed, not a sin"),
        ("q", {"events": [5]}, TypeError, "must be text, not 5"),
        ("q", {"concurrency": "2"}, TypeError, "concurrency must be a whole number, not '2'"),
        ("q", {"concurrency": 0}, InvalidRequest, "concurrency: 0 is not a number from 1 to"),
        (print, {}, TypeError, "must be text, not <built-in function print>"),
    ]
    for queue, options, kind, told in wrong:
        with pytest.raises(kind, match=re.escape(told)):
            app.consumer(queue, **options)


async def test_hooks_are_called_around_the_work(
    client: AsyncClient, mqks_broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    app, told = App(mqks_broker.url), list[str]()

    @app.on_startup
    async def start() -> None:
        await app.client.ping("x")
        told.append("start")

    @app.on_shutdown
    async def end() -> None:
        await app.client.ping("x")
        told.append("end")

    @app.on_shutdown
    async def end_first() -> None:
        told.append("end first")

    @app.middleware
    async def outer(message: Message, work: Work) -> object:
        told.append("outer")
        return await work(message)

    @app.middleware
    async def inner(message: Message, work: Work) -> object:
        told.append("inner")
        try:
            return f"<{await work(message)}>"
        finally:
            told.append("inner ends")

    @app.on_error
    async def fail(error: Exception, message: Message) -> None:
        told.append(f"{error!r} {message.text}")
        raise KeyError("in on_error")

    @app.on_error
    async def fail_again(error: Exception, message: Message) -> None:
        told.append("again")

    @app.consumer("q", ["e"], retries=1)
    async def work(message: Message) -> str:
        if message.text == "bad":
            raise ValueError("no")
        return message.text

    await client.set_queue("q", dead_letter_queue="dead")
    async with serving(app):
        assert (await client.call("e", "good")).text == "<good>"
        with pytest.raises(CallFailed, match="ValueError: no"):
            await client.call("e", "bad")
        await client.publish("e", "bad", confirm=True)
        await until(lambda: client.peek("dead"))
    tried = ["outer", "inner", "inner ends"]
    failed = [*tried, "ValueError('no') bad", "again"]
    assert told == ["start", *tried, *failed, *failed, "end first", "end"]
    assert caplog.text.count("a function of on_error failed") == 2
    with pytest.raises(TypeError, match="async"):
        app.on_error(lambda error, message: None)  # type: ignore[type-var]


async def test_a_service_that_cannot_start_takes_no_message(
    client: AsyncClient, mqks_broker: Broker
) -> None:
    app = App(mqks_broker.url)

    @app.on_startup
    async def start() -> None:
        raise OSError("no database")

    @app.consumer("other", ["e"])
    async def work(message: Message) -> None: ...

    with pytest.raises(OSError, match="no database"):
        await app.serve(anyio.Event())
    with pytest.raises(QueueMissing):
        await client.check_queue("other")


def test_failures_are_logged_with_time_and_level(mqks_broker: Broker) -> None:
    program = """
import mqks
app = mqks.App()
@app.consumer("q", events=["e"])
async def work(message):
    try:
        raise ValueError("no such customer")
    finally:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
app.run()
"""
    with blocking.connect(mqks_broker.url) as client:
        client.subscribe("q", ["e"])
        client.publish("e", "x", confirm=True)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"MQKS_URL": mqks_broker.url},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert done.returncode == 0
    first, *_ = done.stderr.splitlines()
    when = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9:]{8},[0-9]{3}"
    assert re.fullmatch(when + " ERROR mqks.app: message .* failed, try 1", first)
