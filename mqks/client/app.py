"""Decorator style for services: functions that handle the messages of queues until SIGTERM.

The one rule: a message is acked when its function has returned, and rejected when it has raised.
"""

import logging
import signal
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import anyio

from mqks.client.async_client import AsyncClient, AsyncConsumer, connect
from mqks.client.errors import ClientError
from mqks.client.messages import Message
from mqks.client.options import Options

_log = logging.getLogger("mqks.app")

Work = Callable[[Message], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Service:
    work: Work
    queue: str
    events: tuple[str, ...]
    add: tuple[str, ...]
    delete_when_unused: float | bool
    concurrency: int


class App:
    """A service; `stop_timeout_s` is how long stopping waits for messages in hand.

    A message whose function raises is logged and goes back to the tail of its queue: look at
    `message.retry` to give up on it.
    """

    def __init__(
        self,
        url: str | None = None,
        options: Options | None = None,
        *,
        stop_timeout_s: float = 30.0,
    ) -> None:
        self._url = url
        self._options = options
        self._stop_timeout_s = stop_timeout_s
        self._services: list[_Service] = []
        self._client: AsyncClient | None = None

    def consumer(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        add: Iterable[str] = (),
        delete_when_unused: float | bool = False,
        concurrency: int = 1,
    ) -> Callable[[Work], Work]:
        """Let an async function handle the queue's messages, at most `concurrency` at a time."""

        def register(work: Work) -> Work:
            self._services.append(
                _Service(work, queue, tuple(events), tuple(add), delete_when_unused, concurrency)
            )
            return work

        return register

    @property
    def client(self) -> AsyncClient:
        """The client while the service runs, to publish from the functions."""
        if self._client is None:
            raise RuntimeError("the service does not run")
        return self._client

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish what is in hand, ack and leave.

        Raises what `connect` raises, and RequestFailed when the server refuses a consumer.
        """
        failure: BaseException | None = None
        try:
            anyio.run(self._run)
        except* ClientError as failures:
            failure = failures
            while isinstance(failure, BaseExceptionGroup):
                failure = failure.exceptions[0]
        # Raised in the block above it would come out as a group on Python before 3.11.4.
        if failure is not None:
            raise failure

    async def _run(self) -> None:
        stop = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._stop_on_signal, stop)
            await self.serve(stop)
            tasks.cancel_scope.cancel()

    @staticmethod
    async def _stop_on_signal(stop: anyio.Event) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            async for _ in signals:
                stop.set()

    async def serve(self, stop: anyio.Event) -> None:
        """Serve until `stop` is set; for programs with an event loop of their own."""
        async with (
            connect(self._url, self._options) as self._client,
            anyio.create_task_group() as tasks,
        ):
            for service in self._services:
                tasks.start_soon(self._serve, service, stop)
            await stop.wait()
            tasks.cancel_scope.deadline = anyio.current_time() + self._stop_timeout_s

    async def _serve(self, service: _Service, stop: anyio.Event) -> None:
        async with self.client.consume(
            service.queue,
            service.events,
            add=service.add,
            manual_ack=True,
            delete_when_unused=service.delete_when_unused,
        ) as consumer:
            _log.info("consuming from %s", service.queue)
            async with anyio.create_task_group() as tasks:
                for _ in range(service.concurrency):
                    tasks.start_soon(self._work, service, consumer)
                await stop.wait()
                consumer.stop()

    @staticmethod
    async def _work(service: _Service, consumer: AsyncConsumer) -> None:
        async for message in consumer:
            try:
                async with message.process():
                    await service.work(message)
            except Exception:
                _log.exception("message %s of %s is rejected", message.id, service.queue)
