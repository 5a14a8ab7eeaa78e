"""Services: functions that handle the messages of queues until SIGTERM.

The one rule: a message is acked when its function returns, and rejected when it raises. A request
is acked when its reply is published, a result or an error. A reject has the pause and the retry
limit to use if the policy of the queue does not set them.
"""

import asyncio
import inspect
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
from anyio import from_thread, to_thread

from mqks.client import requests
from mqks.client.async_client import AsyncClient, AsyncConsumer, connect
from mqks.client.async_connection import OneTimeEvent
from mqks.client.errors import ClientError, InvalidRequest, RequestFailed
from mqks.client.keywords import strict
from mqks.client.messages import Message, Settle, settled
from mqks.client.options import Options, default_name
from mqks.client.requests import Backoff
from mqks.client.session import Call
from mqks.client.urls import Urls
from mqks.limits import COUNT_MAX

_log = logging.getLogger("mqks.app")

ERROR_CHARACTERS_MAX = 1000
"""Of the text of an error, in the reply to the caller."""

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
RETRIES = 20
BACKOFF_S = 1.0, 600.0
"""A message is dead after 20 failures, with pauses of 1, 2, 4 … 512, 600, 600 … seconds: after
almost two hours."""

Work = Callable[[Message], Awaitable[object]]
Middleware = Callable[[Message, Work], Awaitable[object]]
"""Awaits the second with the first, and returns what it returns."""
OnError = Callable[[Exception, Message], Awaitable[object]]
Hook = Callable[[], Awaitable[object]]
F = TypeVar("F", bound=Callable[[Message], object])
G = TypeVar("G", bound=Callable[..., Awaitable[object]])


@dataclass(frozen=True, slots=True)
class _Service:
    work: Work
    queue: str
    consuming: dict[str, Any]
    """The other arguments of `consume`."""
    concurrency: int
    retries: int | None
    backoff: Backoff | None
    atomic: bool
    is_async: bool
    """Its function runs in the event loop, and can be cancelled."""


@strict()
class App:
    """A service. A stop waits at most `stop_timeout_s` for unfinished messages. The default
    `client_name` is PROGRAM@HOST:PID.

    If the function raises, the message is redelivered later, and is dead after some failures: the
    policy of its queue (`set_queue`) has the pause, the limit and the dead-letter queue. Each
    failure is logged once, with its traceback. The reply to a request is what the function returns;
    if it raises, the caller gets the error, and the request is not redelivered.

    Functions without `async` run in threads.
    """

    def __init__(
        self,
        url: Urls | None = None,
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
        self._middleware: list[Middleware] = []
        self._on_error: list[OnError] = []
        self._on_startup: list[Hook] = []
        self._on_shutdown: list[Hook] = []
        self._client: AsyncClient | None = None
        self._scopes: dict[Message, anyio.CancelScope] = {}
        """Of async functions that can be cancelled, while they run."""

    def consumer(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        masks: Iterable[str] = (),
        replace: bool = False,
        delete_when_unused: float | bool = False,
        concurrency: int = 1,
        prefetch: int | None = None,
        retries: int | None = RETRIES,
        backoff: Backoff | None = BACKOFF_S,
        ack_timeout_s: float | None = None,
        atomic: bool = False,
        cancellable: bool = False,
    ) -> Callable[[F], F]:
        """Let a function handle the messages of a queue, at most `concurrency` at a time. One
        without `async` runs in threads, so that it may block. Raises TypeError for anything that
        cannot handle a message.

        The queue is created if it does not exist, and bound to `events` and `masks`, beside its
        other bindings; with `replace`, they replace all bindings.

        The service holds at most `prefetch` messages, by default `concurrency`; 0: as many as the
        server allows. If the policy of the queue does not set them, `retries` is the number of
        failures after which a message is dead (None: no limit), and `backoff` the pause in seconds
        before it is redelivered (or a pair: first and largest; None: no pause), also after the
        second and later processes that have died with it. `ack_timeout_s` is the ack timeout of
        this service, instead of that of the queue.

        With `atomic`, what the function publishes by `message.publish`, the reply to a request, and
        the ack are one transaction: all of it is stored, or nothing, and the message is redelivered
        if the function raises, also a request.

        With `cancellable`, `cancel_job` cancels an async function: a CancelledError is raised in
        it. One in a thread is not interrupted: it may look at `message.cancelled`, and return.
        The message is acked then. What the function returns is the result of a message that was
        published with `keep_result_s`.
        """

        # What is wrong raises now, not when it runs or at the first failure.
        requests.reject(None, False, retries, backoff)
        requests.count("concurrency", concurrency, COUNT_MAX)
        names = {"events": events, "masks": masks}
        consuming: dict[str, Any] = {  # What can be iterated only once is needed twice.
            each: name if isinstance(name, str | bytes) else tuple(name)
            for each, name in names.items()
        }
        consuming |= {"replace": replace}
        consuming |= {"prefetch": concurrency if prefetch is None else prefetch, "meta": True}
        consuming |= {"create": True, "delete_when_unused": delete_when_unused}
        consuming |= {"backoff": backoff, "ack_timeout_s": ack_timeout_s}
        consuming |= {"cancellable": cancellable}
        requests.consume(queue, **consuming)

        def register(function: F) -> F:
            work = _work_of(function, concurrency)
            how = concurrency, retries, backoff, atomic
            service = _Service(work, queue, consuming, *how, is_async=work is function)
            self._services.append(service)
            return function

        return register

    def middleware(self, function: G) -> G:
        """Call this async function around each message, with the message and what to await with it:
        what that returns or raises is the result. The first one registered is the outermost."""
        return _hook(self._middleware, function)

    def on_error(self, function: G) -> G:
        """Call this async function with the exception and the message before a failed message is
        rejected, or its caller gets the error. What it raises is logged."""
        return _hook(self._on_error, function)

    def on_startup(self, function: G) -> G:
        """Call this async function when the client is connected, before the first message. What it
        raises ends the service."""
        return _hook(self._on_startup, function)

    def on_shutdown(self, function: G) -> G:
        """Call this async function after the last message, while the client is still connected,
        also if the service fails, but not if a function of `on_startup` does. The last one
        registered is called first."""
        return _hook(self._on_shutdown, function)

    @property
    def client(self) -> AsyncClient:
        """The client of the running service, to publish from functions."""
        if self._client is None:
            raise RuntimeError(
                "the service is not running: app.client is set while app.run() or app.serve() runs"
            )
        return self._client

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; then finish the messages in progress, ack them and return.
        Log to stderr with time and level, unless the program has set up `logging`.

        Raises what `connect` raises, and RequestFailed if the server refuses a consumer.
        """
        logging.basicConfig(format=LOG_FORMAT)  # Does nothing if the program has set up logging.
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
        self._task = cast("asyncio.Task[None]", asyncio.current_task())
        async with connect(self._url, self._options, client_name=self._client_name) as self._client:
            for hook in self._on_startup:
                await hook()
            try:
                async with anyio.create_task_group() as tasks:
                    for service in self._services:
                        tasks.start_soon(self._serve, service, stop)
                    await stop.wait()
                    tasks.cancel_scope.deadline = anyio.current_time() + self._stop_timeout_s
            finally:
                with anyio.CancelScope(shield=True):
                    with anyio.move_on_after(self._stop_timeout_s):
                        for hook in reversed(self._on_shutdown):
                            await hook()

    async def _serve(self, service: _Service, stop: anyio.Event) -> None:
        async with self.client.consume(service.queue, **service.consuming) as consumer:
            _log.info("consuming from %s", service.queue)
            consumer._session.on_cancel = self._cancel
            async with anyio.create_task_group() as tasks:
                for _ in range(service.concurrency):
                    tasks.start_soon(self._work, service, consumer)
                await stop.wait()
                consumer.stop()

    async def _work(self, service: _Service, consumer: AsyncConsumer) -> None:
        async for message in consumer:
            try:
                result: object = None
                if service.atomic:
                    await self._handle_atomically(service, message)
                elif message.reply_to is None:
                    result = await self._handle(service, message)
                else:
                    await self._answer(service, message)
                if result is not None and message.wants_result:
                    await self._ack(consumer, message, result)
            except Exception as error:
                await self._tell(error, message)
                fate = await self._reject(service, consumer, message, error)
                what = message.id, service.queue, message.retry + 1, fate
                _log.exception("message %s of %s failed, try %d%s", *what)
            else:
                message.ack()  # Nothing, if that is done.

    async def _handle_atomically(self, service: _Service, message: Message) -> None:
        async with self.client.transaction() as step:
            message._step = step
            result = await self._handle(service, message)
            if message.reply_to is not None:
                event, meta = requests.reply(message.meta, None)
                step.publish(event, result, meta=meta)
            step.ack(message, result=result if message.wants_result else None)

    def _cancel(self, message: Message) -> None:
        if (scope := self._scopes.get(message)) is not None:
            scope.cancel()

    async def _handle(self, service: _Service, message: Message) -> object:
        if not (service.is_async and service.consuming["cancellable"]):
            return await self._handle_whole(service, message)
        with anyio.CancelScope() as scope:
            self._scopes[message] = scope
            if message.cancelled:  # Before its turn came.
                scope.cancel()
            try:
                return await self._handle_whole(service, message)
            finally:
                del self._scopes[message]
        what = message.id, service.queue, message.cancel_reason or "no reason given"
        _log.info("message %s of %s was cancelled: %s", *what)
        return None

    async def _handle_whole(self, service: _Service, message: Message) -> object:
        tracing = self.client._tracing
        work = service.work
        for middleware in reversed(self._middleware):
            work = partial(_around, middleware, work)
        span = nullcontext() if tracing is None else tracing.process(message, is_alone=True)
        with span, self._failing():
            return await work(message)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """A cancellation that is not that of the service is an error like any other, the
        CancelledError that is an Exception: something that was awaited had been cancelled."""
        try:
            yield
        except asyncio.CancelledError as error:
            # The end of an event loop cancels all tasks, so both are looked at: scopes and task.
            if anyio.current_effective_deadline() == -inf or self._task.cancelling():
                raise
            task = cast("asyncio.Task[Any]", asyncio.current_task())
            while task.uncancel():  # A function may cancel the task that it runs in.
                pass
            raise CancelledError(*error.args) from error

    async def _tell(self, error: Exception, message: Message) -> None:
        for hook in self._on_error:
            try:
                with self._failing():
                    await hook(error, message)
            except Exception:
                _log.exception("a function of on_error failed")

    async def _reject(
        self, service: _Service, consumer: AsyncConsumer, message: Message, error: Exception
    ) -> str:
        """Reject it, and say if that was its last try."""
        settle = message._settle
        if settle is None or settle is settled:
            return ""
        reject = partial(
            message.reject, retries=service.retries, backoff=service.backoff, reason=error
        )
        call, action = await self._settle_told(consumer, message, reject, b"--confirm --fate")
        if call.failed:  # A full disk: the place is not durable, but the message has to go on.
            settle(message, action)
        fate = requests.decoded(call.answer).split(" ")
        if fate == [""]:
            return ""
        if target := fate[2:]:
            return f", the last one: it went to the dead-letter queue {target[0]}"
        return ", the last one: it was dropped, because the queue has no dead-letter queue"

    async def _ack(self, consumer: AsyncConsumer, message: Message, result: object) -> None:
        """Ack it with a result. If that is not possible, it is acked without."""
        settle = message._settle
        if settle is None or settle is settled:
            return
        error_id = ""
        try:
            ack = partial(message.ack, result=result)
            call, _ = await self._settle_told(consumer, message, ack, b"--confirm")
            error_id = f"error {call.failed[0][1]}" if call.failed else ""
        except InvalidRequest as error:
            error_id = str(error)
        if error_id:
            message._settle = settle
            _log.warning("the result of message %s is not kept: %s", message.id, error_id)

    async def _settle_told(
        self, consumer: AsyncConsumer, message: Message, how: Callable[[], None], flags: bytes
    ) -> tuple[Call, bytes]:
        """Settle a message, and wait for what the server tells; and the action."""
        answered, actions, session = OneTimeEvent(), list[bytes](), consumer._session
        call = Call(answered.set)

        def told(message: Message, action: bytes) -> None:
            actions.append(action)
            session.settle_told(message, action, call, flags)

        message._settle = told
        how()
        try:
            await answered.wait(self.client._options.timeout_s)
        finally:
            session.abandon(call)
        return call, actions[0]

    async def _answer(self, service: _Service, message: Message) -> None:
        try:
            result = await self._handle(service, message)
            if (why := message.cancel_reason) is not None and result is None:
                await self.client.reply(message, why, error="Cancelled")
            else:
                await self.client.reply(message, result)
        except Exception as error:
            await self._tell(error, message)
            _log.exception("request %s of %s failed", message.id, service.queue)
            try:
                text = " ".join(str(error).split())[:ERROR_CHARACTERS_MAX]
                await self.client.reply(message, text, error=type(error).__name__)
            except (InvalidRequest, RequestFailed):
                _log.exception("the caller of request %s gets no reply", message.id)


def _around(middleware: Middleware, work: Work, message: Message) -> Awaitable[object]:
    return middleware(message, work)


def _hook(hooks: list[Any], function: G) -> G:
    call: object = function if inspect.isroutine(function) else type(function).__call__
    if not inspect.iscoroutinefunction(call):
        raise TypeError(f"a hook is an async function, not {function!r}")
    hooks.append(function)
    return function


def _work_of(function: Callable[[Message], object], concurrency: int) -> Work:
    """What a service awaits for each message. Raises TypeError if there is no such thing."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    if not callable(inner) or isinstance(inner, type):
        raise TypeError(f"a service needs a function, not {function!r}")
    call = inner if inspect.isroutine(inner) else inner.__call__
    if inspect.isgeneratorfunction(call) or inspect.isasyncgenfunction(call):
        raise TypeError(f"a service needs a function, and {function!r} is a generator")
    try:
        inspect.signature(function).bind(None)
    except TypeError as error:
        raise TypeError(f"{function!r} cannot be called with a message: {error}") from None
    except ValueError:  # Some functions of C have no signature.
        pass
    if inspect.iscoroutinefunction(call):
        return cast(Work, function)
    return _in_threads(function, anyio.CapacityLimiter(concurrency))


def _in_threads(function: Callable[[Message], object], limiter: anyio.CapacityLimiter) -> Work:
    def call(message: Message) -> object:
        try:
            return function(message)
        except asyncio.CancelledError as error:  # Nothing cancels a thread.
            raise CancelledError(*error.args) from error

    async def work(message: Message) -> object:
        settle = cast(Settle, message._settle)
        # A session is not for threads.
        message._settle = lambda *action: from_thread.run_sync(settle, *action)
        try:
            result = await to_thread.run_sync(
                call, message, limiter=limiter, abandon_on_cancel=True
            )
        except anyio.get_cancelled_exc_class():
            message._settle = settled  # The thread goes on, and the message returns to its queue.
            raise
        finally:
            if message._settle is not settled:
                message._settle = settle
        # A lambda or a wrapper around an async function: the rest runs here.
        return await result if inspect.isawaitable(result) else result

    return work
