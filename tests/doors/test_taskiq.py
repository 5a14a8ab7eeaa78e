"""taskiq on a real server: what of it the server keeps."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

import mqks
from mqks.testing import Broker
from tests.client.waiting import until
from tests.kit.waiting import WAIT_S

pytest.importorskip("taskiq", reason="the extra taskiq is not installed")
from taskiq import (
    Context,
    ScheduledTask,
    SendTaskError,
    TaskiqDepends,
    TaskiqResult,
    TaskiqScheduler,
)
from taskiq.acks import AcknowledgeType
from taskiq.depends.progress_tracker import TaskProgress
from taskiq.receiver import Receiver
from taskiq.scheduler.scheduled_task import CronSpec
from taskiq.serializers import PickleSerializer

from mqks.taskiq import MqksBroker, MqksResultBackend, MqksScheduleSource
from mqks.taskiq.results import ResultMissing

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
CONTEXT: Any = TaskiqDepends()


@asynccontextmanager
async def made(url: str, **options: Any) -> AsyncIterator[MqksBroker]:
    broker = MqksBroker(url, **options).with_result_backend(MqksResultBackend(url))
    await broker.startup()
    try:
        yield broker
    finally:
        await broker.shutdown()


@asynccontextmanager
async def working(broker: MqksBroker, **options: Any) -> AsyncIterator[None]:
    """A worker in this process."""
    finish = asyncio.Event()
    options = {"run_startup": False, "max_async_tasks": 10} | options
    work = asyncio.create_task(Receiver(broker, **options).listen(finish))
    try:
        yield
    finally:
        finish.set()
        await work


def adding(broker: MqksBroker) -> Any:
    @broker.task("add")
    async def add(a: int, b: int) -> int:
        return a + b

    return add


async def stats(broker: MqksBroker) -> Any:
    client = await broker.lazy.get()
    return await client.stats("queue", broker.queue_name)


async def counts(broker: MqksBroker) -> tuple[int, int, int]:
    """Of its tasks that are ready, unacked and scheduled."""
    told = await stats(broker)
    return told["ready"], told["unacked"], told["scheduled"]


async def test_tasks_and_results(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker, working(broker):
        add = adding(broker)
        tasks = await asyncio.gather(*(add.kiq(number, 1) for number in range(50)))
        results = await asyncio.gather(*(task.wait_result(timeout=WAIT_S) for task in tasks))
        assert [result.return_value for result in results] == [*range(1, 51)]
        failed = await (await add.kiq("a", 1)).wait_result(timeout=WAIT_S)
        with pytest.raises(TypeError):
            failed.raise_for_error()
        await until(lambda: counts(broker), (0, 0, 0))


async def test_priorities_and_delays(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker:
        ran = []

        @broker.task
        async def run(name: str) -> None:
            ran.append(name)

        await run.kicker().with_labels(delay=3600).kiq("late")
        for priority in (-1, 5, 0):
            await run.kicker().with_labels(priority=priority).kiq(f"{priority}")
        client = await broker.lazy.get()
        (late,) = await client.peek("taskiq", scheduled=True)
        assert late.due is not None
        assert late.due - late.time == pytest.approx(3600, abs=1)
        async with working(broker, max_async_tasks=1):
            await until(lambda: len(ran) == 3)
        assert ran == ["5", "0", "-1"]
        for wrong in ({"delay": "soon"}, {"priority": 1000}, {"queue_name": "a b"}):
            with pytest.raises(SendTaskError):
                await run.kicker().with_labels(**wrong).kiq("never")
        assert len(ran) == 3


async def test_a_unique_task(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker:

        @broker.task
        async def run(name: str) -> None: ...

        for name, label in (("a", "k"), ("b", "k"), ("c", "k,on=replace"), ("d", "other")):
            await run.kicker().with_labels(unique=label, delay=60).kiq(name)
        client = await broker.lazy.get()
        found = await client.peek("taskiq", scheduled=True)
        assert [json.loads(each.data)["args"] for each in found] == [["c"], ["d"]]
        for wrong in ("k,for=ever", "k,never", "k,until=acked"):
            with pytest.raises(SendTaskError):
                await run.kicker().with_labels(unique=wrong).kiq("never")


async def test_another_queue(mqks_broker: Broker) -> None:
    """The label chooses it, and it is created by the first task."""
    async with made(mqks_broker.url) as web, made(mqks_broker.url, queue_name="slow") as slow:
        task = await adding(web).kicker().with_labels(queue_name="slow").kiq(1, 2)
        adding(slow)
        async with working(slow):
            assert (await task.wait_result(timeout=WAIT_S)).return_value == 3


@pytest.mark.parametrize("when", AcknowledgeType)
async def test_acks(mqks_broker: Broker, when: AcknowledgeType) -> None:
    begun, goes_on, saves, is_saved = (asyncio.Event() for _ in range(4))

    class Slow(MqksResultBackend[None]):
        async def set_result(self, task_id: str, result: TaskiqResult[None]) -> None:
            saves.set()
            await is_saved.wait()

    async with made(mqks_broker.url) as broker:
        broker.with_result_backend(Slow(mqks_broker.url))

        @broker.task(ack_type=when.value)
        async def wait(context: Context = CONTEXT) -> None:
            begun.set()
            await goes_on.wait()
            if when is AcknowledgeType.MANUAL:
                await context.ack()

        async def unacked() -> int:
            return (await counts(broker))[1]

        async with working(broker):
            await wait.kiq()
            await begun.wait()
            await until(unacked, when is not AcknowledgeType.WHEN_RECEIVED)
            goes_on.set()
            await saves.wait()
            await until(unacked, when is AcknowledgeType.WHEN_SAVED)
            is_saved.set()
            await until(unacked, 0)


async def test_any_bytes(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker:
        broker.with_serializer(PickleSerializer())
        backend = MqksResultBackend[Any](mqks_broker.url, serializer=PickleSerializer())
        broker.with_result_backend(backend)

        @broker.task
        async def echo(text: str) -> str:
            return text

        async with working(broker):
            for text in ("\n\t\\ \r", "é\0", "x" * (MIB // 2)):
                result = await (await echo.kiq(text)).wait_result(timeout=WAIT_S)
                assert result.return_value == text
            with pytest.raises(SendTaskError):
                await echo.kiq("x" * MIB)
            result = TaskiqResult(is_err=False, return_value="x" * MIB, execution_time=0)
            with pytest.raises(mqks.InvalidRequest):
                await backend.set_result("large", result)
        assert await counts(broker) == (0, 0, 0)
        await backend.shutdown()


async def test_a_worker_that_stops_keeps_what_it_runs_alone(mqks_broker: Broker) -> None:
    begun, goes_on, ran = asyncio.Event(), asyncio.Event(), []
    async with made(mqks_broker.url) as first, made(mqks_broker.url) as second:
        for broker in (first, second):

            @broker.task("wait")
            async def wait(name: str, broker: MqksBroker = broker) -> None:
                ran.append((broker is first, name))
                if name == "0":
                    begun.set()
                    await goes_on.wait()

        finish = asyncio.Event()
        receiver = Receiver(first, run_startup=False, max_async_tasks=1)
        work = asyncio.create_task(receiver.listen(finish))
        for number in range(10):
            await wait.kiq(f"{number}")
        await begun.wait()
        await until(lambda: counts(first), (0, 10, 0))
        finish.set()
        async with working(second, max_async_tasks=1):
            await until(lambda: len(ran) == 10)
            assert not work.done()
            goes_on.set()
            await work
            await until(lambda: counts(first), (0, 0, 0))
        assert sorted(ran) == [*((False, f"{each}") for each in range(1, 10)), (True, "0")]


async def test_a_lost_connection_loses_and_repeats_no_task(mqks_broker: Broker) -> None:
    """The server closes all connections again and again, between publishes and their confirms."""
    async with made(mqks_broker.url, queue_name="often") as broker:
        add = adding(broker)
        kicks = [asyncio.create_task(add.kiq(number, 0)) for number in range(400)]
        async with mqks.connect(mqks_broker.url, client_name="closing") as client:
            while not all(kick.done() for kick in kicks):
                for row in await client.stats("connections"):
                    if row["name"] != "closing":
                        await client.request("close_connection", "--confirm", str(row["id"]))
            await asyncio.gather(*kicks)
            assert (await client.stats("queue", "often"))["ready"] == 400


@pytest.mark.slow
async def test_results_are_read_by_others(mqks_broker: Broker) -> None:
    writer = MqksResultBackend[int](mqks_broker.url)
    reader = MqksResultBackend[int](mqks_broker.url)
    assert not await reader.is_result_ready("a b")
    with pytest.raises(ResultMissing, match="no result of the task a b"):
        await reader.get_result("a b")
    for number in (1, 2):
        await writer.set_result("a b", result_of(number))
        assert (await reader.get_result("a b")).return_value == number
    assert await reader.get_progress("a b") is None
    await writer.set_progress("a b", TaskProgress(state="half", meta={"done": 5}))
    assert await reader.get_progress("a b") == TaskProgress(state="half", meta={"done": 5})
    await asyncio.gather(*(writer.set_result(f"{each}", result_of(each)) for each in range(20_000)))
    found = await asyncio.gather(*(reader.get_result(f"{each}") for each in range(0, 20_000, 50)))
    assert [result.return_value for result in found] == [*range(0, 20_000, 50)]
    await writer.shutdown()
    await reader.shutdown()


def result_of(number: int) -> TaskiqResult[int]:
    return TaskiqResult(is_err=False, return_value=number, execution_time=0)


async def test_results_have_limits(mqks_broker: Broker) -> None:
    backend = MqksResultBackend[int](mqks_broker.url, results_max=16, queue_prefix="few")
    for number in range(100):
        await backend.set_result(f"{number}", result_of(number))

    async def ready() -> list[int]:
        return [each for each in range(100) if await backend.is_result_ready(f"{each}")]

    async def count() -> int:
        return len(await ready())

    await until(
        count, 16
    )  # The server drops the oldest of a queue after it has confirmed the last.
    for each in await ready():
        assert (await backend.get_result(f"{each}")).return_value == each
    logs = backend._logs.values()
    assert [len(log._seqs) for log in logs] == [1] * 16
    short = MqksResultBackend[int](mqks_broker.url, expire_s=0.05, queue_prefix="short")
    await short.set_result("a", result_of(1))
    await until(lambda: short.is_result_ready("a"), False)
    with pytest.raises(ResultMissing):
        await short.get_result("a")
    await backend.shutdown()
    await short.shutdown()


async def test_a_queue_of_results_that_somebody_deletes(mqks_broker: Broker) -> None:
    backend = MqksResultBackend[int](mqks_broker.url)
    other = MqksResultBackend[int](mqks_broker.url)
    async with mqks.connect(mqks_broker.url) as client:
        for number in range(3):
            for each in (backend, other):
                await each.set_result("a", result_of(number))
                assert (await backend.get_result("a")).return_value == number
            for row in await client.stats("queues"):
                await client.delete_queue(row["name"])
            assert not await backend.is_result_ready("a")
    await backend.shutdown()
    await other.shutdown()


async def test_schedules(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker:
        source, ran = MqksScheduleSource(broker), []
        await source.startup()

        @broker.task(priority=3)
        async def tick(name: str, context: Context = CONTEXT) -> None:
            ran.append((name, context.message.task_id, context.message.labels))

        hour = timedelta(hours=1)
        later = datetime.now(UTC).replace(microsecond=0) + hour
        each = tick.kicker().with_schedule_id("each second")
        await each.schedule_by_interval(source, hour, "wrong")
        await each.schedule_by_interval(source, timedelta(seconds=1), "\n")
        cron = CronSpec(minutes=0, hours=3, offset="Europe/Berlin")
        await tick.kicker().with_schedule_id("cron").schedule_by_cron(source, cron, "night")
        late = await tick.schedule_by_time(source, later, "late")
        await (
            tick.kicker()
            .with_schedule_id("now")
            .schedule_by_time(source, datetime.now(UTC).replace(tzinfo=None), "now")
        )
        found = {schedule.schedule_id: schedule for schedule in await source.get_schedules()}
        assert set(found) == {"each second", "cron", late.schedule_id}
        assert found["cron"].cron == "0 3 * * *"
        assert found["cron"].cron_offset == "Europe/Berlin"
        assert found["each second"].interval == 1
        assert found["each second"].args == ["\n"]
        assert found["each second"].labels == {"priority": "3"}
        assert found[late.schedule_id].time == later
        async with working(broker):
            await until(lambda: len(ran) >= 3)
        names, ids, labels = zip(*ran, strict=True)
        assert {*names} == {"now", "\n"}
        assert len({*ids}) == len(ids)
        assert "taskiq:now" in ids
        assert labels[0]["priority"] == "3"
        scheduler = TaskiqScheduler(broker, [source])
        before = (await stats(broker))["ready"]
        for schedule in found.values():  # The server sends it, and nobody else.
            await scheduler.on_ready(source, schedule)
            await source.delete_schedule(schedule.schedule_id)
        assert (await stats(broker))["ready"] in (before, before + 1)
        assert await source.get_schedules() == []


async def test_what_a_schedule_cannot_be(mqks_broker: Broker) -> None:
    async with made(mqks_broker.url) as broker:
        source = MqksScheduleSource(broker)
        await source.startup()
        task: dict[str, Any] = {"task_name": "a", "labels": {}, "args": [], "kwargs": {}}
        wrongs: list[tuple[dict[str, Any], str]] = [
            ({"cron": "* * * * *", "interval": 1}, "either cron, interval or time"),
            ({"cron": "* * * * *", "cron_offset": timedelta(hours=1)}, "name of a time zone"),
            ({"interval": 1, "labels": {"queue_name": "other"}}, "the queue of its broker"),
            ({"interval": 1, "labels": {"priority": "high"}}, "label priority is wrong"),
            ({"cron": "99 * * * *"}, "99"),
            ({"interval": 1, "args": ["x" * 70_000]}, "65536"),
        ]
        for wrong, why in wrongs:
            with pytest.raises((ValueError, mqks.RequestFailed), match=why):
                await source.add_schedule(ScheduledTask(**(task | wrong)))
        assert await source.get_schedules() == []


async def test_a_server_that_comes_later(mqks_broker: Broker) -> None:
    options = mqks.Options(connect_timeout_s=0.01)
    broker = MqksBroker("mqks://127.0.0.1:1", options=options)
    for _ in range(2):
        with pytest.raises(mqks.ConnectionLost):
            await broker.startup()
    await broker.shutdown()
    with pytest.raises(mqks.ConfigurationError):
        MqksBroker("http://a")


def test_each_event_loop_has_a_client_of_its_own(mqks_broker: Broker) -> None:
    """Also where the one before has ended without `shutdown`."""
    broker = MqksBroker(mqks_broker.url).with_result_backend(MqksResultBackend(mqks_broker.url))
    add = adding(broker)

    async def once() -> int:
        async with working(broker):
            result = await (await add.kiq(1, 2)).wait_result(timeout=WAIT_S)
            return int(result.return_value)

    for _ in range(3):
        assert asyncio.run(once()) == 3
