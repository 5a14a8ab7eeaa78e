"""Decorator style for services: functions that handle the messages of queues until SIGTERM.

The one rule: a message is acked when its function has returned, and rejected when it has raised;
one that asks for a reply is acked when that is published, be it an answer or an error. A reject
says when the message comes back, and how often it may fail, where its queue has no such policy.
"""

import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import anyio

from mqks.client import requests
from mqks.client.async_client import AsyncClient, AsyncConsumer, connect
from mqks.client.errors import ClientError, InvalidRequest, RequestFailed
from mqks.client.messages import Message
from mqks.client.options import Options, default_name
from mqks.client.requests import Backoff, Data

_log = logging.getLogger("mqks.app")

ERROR_CHARACTERS_MAX = 1000
"""Of the text of an error, told to the caller."""

RETRIES = 20
BACKOFF_S = 1.0, 600.0
"""A message is dead after so many failures, with pauses of 1, 2, 4 … 512, 600, 600 … seconds:
after nearly two hours."""

Work = Callable[[Message], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class _Service:
    work: Work
    queue: str
    events: tuple[str, ...]
    add: tuple[str, ...]
    add_mask: tuple[str, ...]
    delete_when_unused: float | bool
    concurrency: int
    prefetch: int
    retries: int | None
    backoff: Backoff | None


class App:
    """A service; `stop_timeout_s` is how long stopping waits for messages in hand. Without a
    `client_name` the server shows the name of the program, of the host and the process id.

    A message whose function raises comes back later, and is dead after a number of tries: the
    policy of its queue (`set_queue`) says when, how often, and where it goes then. Each failure is
    logged once, with its traceback. One that asks for a reply gets what its function returns; when
    that raises, its caller is told and the message does not come back.
    """

    def __init__(
        self,
        url: str | None = None,
        options: Options | None = None,
        *,
        stop_timeout_s: float = 30.0,
        client_name: str | None = None,
    ) -> None:
        self._url = url
        if client_name is None and not (options and options.client_name):
            client_name = default_name(Path(sys.argv[0]).stem)
        self._client_name = client_name
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
        add_mask: Iterable[str] = (),
        delete_when_unused: float | bool = False,
        concurrency: int = 1,
        prefetch: int | None = None,
        retries: int | None = RETRIES,
        backoff: Backoff | None = BACKOFF_S,
    ) -> Callable[[Work], Work]:
        """Let an async function handle the queue's messages, at most `concurrency` at a time.

        It holds no more than `prefetch` messages, by default those that it works on; 0: as many as
        the server allows. Where the queue has no such policy, a message is dead after `retries`
        failures, and comes back after a `backoff` in seconds (the first, or a pair: first and
        most); None: never, and at once.
        """

        requests.reject(None, False, retries, backoff)  # Raises now, not at the first failure.

        def register(work: Work) -> Work:
            service = _Service(
                *(work, queue, tuple(events), tuple(add), tuple(add_mask)),
                *(delete_when_unused, concurrency, concurrency if prefetch is None else prefetch),
                *(retries, backoff),
            )
            self._services.append(service)
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
            connect(self._url, self._options, client_name=self._client_name) as self._client,
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
            add_mask=service.add_mask,
            manual_ack=True,
            delete_when_unused=service.delete_when_unused,
            prefetch=service.prefetch,
            meta=True,
        ) as consumer:
            _log.info("consuming from %s", service.queue)
            async with anyio.create_task_group() as tasks:
                for _ in range(service.concurrency):
                    tasks.start_soon(self._work, service, consumer)
                await stop.wait()
                consumer.stop()

    async def _work(self, service: _Service, consumer: AsyncConsumer) -> None:
        async for message in consumer:
            try:
                if message.reply_to is None:
                    await service.work(message)
                else:
                    await self._answer(service, message)
            except Exception:
                where = message.id, service.queue
                _log.exception("message %s of %s has failed, try %d", *where, message.retry + 1)
                message.reject(retries=service.retries, backoff=service.backoff)
            else:
                message.ack()

    async def _answer(self, service: _Service, message: Message) -> None:
        try:
            await self.client.reply(message, cast(Data, await service.work(message)))
        except Exception as error:
            _log.exception("request %s of %s has failed", message.id, service.queue)
            try:
                text = " ".join(str(error).split())[:ERROR_CHARACTERS_MAX]
                await self.client.reply(message, text, error=type(error).__name__)
            except (InvalidRequest, RequestFailed):
                _log.exception("the caller of request %s cannot be told", message.id)
