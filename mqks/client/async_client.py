"""The async client, on anyio: one connection for requests, and one of its own per consumer.

Three tasks serve a connection: one reads, one writes what has gathered since its last write, one
looks at the time. No message has a task, a timer or a queue hop of its own.

The one rule: whatever is waited for shows in the session, and `_changed` tells when to look again.
"""

import random
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from types import TracebackType
from typing import Generic, Self, TypeVar, Unpack

import anyio
from anyio.abc import ByteStream, TaskGroup
from anyio.lowlevel import checkpoint

from mqks.client import requests, urls
from mqks.client.errors import ConnectionLost, ProtocolViolation
from mqks.client.messages import Message, Update
from mqks.client.options import Options
from mqks.client.session import Call, ConsumerSession, Session, State

CHUNK_BYTES = 256 * 1024
YIELD_MESSAGES = 256
"""After so many messages without a wait, the other tasks have a turn."""

_BROKEN = (OSError, anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream)

S = TypeVar("S", bound=Session)


class _Connection(Generic[S]):
    """A session's connection, made again whenever it is lost."""

    def __init__(self, address: urls.Address, options: Options, session: S) -> None:
        self.session = session
        self._address = address
        self._options = options
        self._output = anyio.Event()
        self._changed = anyio.Event()
        self._scope = anyio.CancelScope()
        session.on_output = lambda: self._output.set()

    async def until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._changed.wait()

    def notify(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()

    async def start(self, tasks: TaskGroup, is_up: Callable[[], bool]) -> None:
        """Start it and wait until it is up. Raises what ends the session, and ConnectionLost."""
        session, limit_s = self.session, self._options.connect_timeout_s
        tasks.start_soon(self._run)
        with anyio.move_on_after(limit_s):
            await self.until(lambda: is_up() or session.failure is not None)
        if session.failure is not None:
            raise session.failure
        if not is_up():
            raise ConnectionLost(f"{self._address}: not within {limit_s:g} s: {session.reason}")

    def close(self, reason: str) -> None:
        self.session.fail(ConnectionLost(reason))
        self.notify()
        self._scope.cancel()

    async def _run(self) -> None:
        session = self.session
        try:
            with self._scope:
                while session.failure is None:
                    delay_s = session.lost(await self._live())
                    self.notify()
                    await anyio.sleep(delay_s)
        finally:  # Whoever waits for a consumer of a closed client hears of it.
            self.close("the client is closed")

    async def _live(self) -> str:
        """Connect and stay so; give the reason of the end."""
        try:
            with anyio.fail_after(self._options.connect_timeout_s):
                stream = await _open(self._address, self._options)
        except _BROKEN as error:
            return _told(error)
        ends: list[str] = []

        async def serve(work: Callable[[ByteStream], Awaitable[str]]) -> None:
            try:
                ends.append(await work(stream))
            except _BROKEN as error:
                ends.append(_told(error))
            except ProtocolViolation as error:
                self.session.fail(error)
                ends.append(str(error))
            tasks.cancel_scope.cancel()

        async with stream:
            self.session.connected(time.monotonic())
            async with anyio.create_task_group() as tasks:
                for work in (self._read, self._write, self._watch):
                    tasks.start_soon(serve, work)
        return ends[0]

    async def _read(self, stream: ByteStream) -> str:
        session = self.session
        while session.failure is None:
            data = await stream.receive(CHUNK_BYTES)
            session.receive(data, time.monotonic())
            self.notify()
            await self.until(lambda: not session.is_full)
        return "closed"

    async def _write(self, stream: ByteStream) -> str:
        session = self.session
        while session.failure is None:
            if data := session.take():
                self.notify()  # There is room again.
                await stream.send(data)
            else:
                self._output = anyio.Event()
                await self._output.wait()
        return "closed"

    async def _watch(self, stream: ByteStream) -> str:
        session = self.session
        while session.tick(time.monotonic()):
            await anyio.sleep(max(session.deadline_s - time.monotonic(), 0.001))
        return f"no answer to a ping for {self._options.keep_alive_s} seconds"


async def _open(address: urls.Address, options: Options) -> ByteStream:
    if address.path:
        return await anyio.connect_unix(address.path)
    if not address.tls:
        return await anyio.connect_tcp(address.host, address.port)
    return await anyio.connect_tcp(
        address.host,
        address.port,
        ssl_context=options.ssl_context,
        tls=True,
        tls_hostname=address.host,
        tls_standard_compatible=False,
    )


def _told(error: BaseException) -> str:
    if isinstance(error, anyio.EndOfStream):
        return "the server closed the connection"
    return str(error.__cause__ or error) or type(error).__name__


class AsyncClient:
    """A connected client; made by `connect`.

    Every call may raise ConnectionLost (the client is closed), ConfirmTimeout after `timeout_s`
    seconds (by default those of the options), RequestFailed with the server's error id, and
    InvalidRequest before anything is sent. While the connection is away, calls wait.
    """

    def __init__(self, url: str | None, options: Options) -> None:
        self._address = urls.parse(url)
        self._options = options

    async def __aenter__(self) -> Self:
        self._session = Session(
            self._options,
            self._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
        )
        self._connection = _Connection(self._address, self._options, self._session)
        self._room_turn = anyio.Lock()
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        try:
            session = self._session
            await self._connection.start(self._tasks, lambda: session.state is State.UP)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        is_sent = False
        if kind is None or self._session.state is State.UP:
            with anyio.move_on_after(self._options.close_timeout_s, shield=True):
                is_sent = await self._send_rest()
        await self._end()
        if kind is None and not is_sent:
            raise ConnectionLost("the client was closed before all it published was sent")

    async def _send_rest(self) -> bool:
        """Wait until the server has read all that was published without a confirm."""
        session, answered = self._session, anyio.Event()
        if session.failure is None and not (session.is_idle and session.state is not State.UP):
            session.request(b"ping closing", Call(answered.set))
            await answered.wait()
        return True

    async def _end(self) -> None:
        # Not the task group but the caller tells of errors: a group would wrap them.
        self._connection.close("the client is closed")
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)

    async def _room(self) -> None:
        session = self._session
        if not session.has_room:
            async with self._room_turn:
                await self._connection.until(lambda: session.has_room)

    def _limit(self, timeout_s: float | None) -> anyio.CancelScope:
        return anyio.move_on_after(self._options.timeout_s if timeout_s is None else timeout_s)

    async def _ask(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        answered = anyio.Event()
        call = Call(answered.set)
        with self._limit(timeout_s):
            await self._room()
            request_id = send(call)
            try:
                await answered.wait()
            finally:
                self._session.abandon(call, request_id)
        return call.result()

    async def _request(self, body: bytes, timeout_s: float | None) -> bytes:
        return await self._ask(lambda call: self._session.request(body, call), timeout_s)

    async def publish(
        self,
        event: str,
        data: requests.Data,
        *,
        confirm: bool = False,
        id: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> str:
        """Publish one message and give its id.

        With `confirm`, wait until the server has it on disk; sent again after a reconnect, it may
        arrive twice. Without, it is sent with the next write, and lost if the connection is. With
        `once`, the server drops it if it has seen the `id` already; with `mandatory`, it refuses
        it if no queue is bound to the event, which without `confirm` is only logged.
        """
        session = self._session
        if confirm:
            ids = [b""]

            def send(call: Call) -> bytes:
                ids[0] = session.publish(event, data, id, call, once, mandatory)
                return ids[0]

            await self._ask(send, timeout_s)
            return requests.decoded(ids[0])
        if not session.has_room:
            with self._limit(timeout_s) as limit:
                await self._room()
            if limit.cancelled_caught:
                Call().result()
        return requests.decoded(session.publish(event, data, id, None, once, mandatory))

    async def publish_many(
        self,
        messages: Iterable[tuple[str, requests.Data]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """Publish events with their data, all confirmed; give how many.

        With an `id_prefix`, the ids are `PREFIX-1`, `PREFIX-2` …; with `once`, the server drops
        those whose ids it has seen already; with `mandatory`, it refuses those that no queue is
        bound to. Raises PublishFailed, which names those that were refused. Raises InvalidRequest
        at the first that cannot be sent, when those before it may have been.
        """

        async def batches() -> AsyncIterator[Iterable[tuple[str, requests.Data]]]:
            yield messages

        return await self.publish_batches(
            batches(),
            id_prefix=id_prefix,
            once=once,
            mandatory=mandatory,
            timeout_s=timeout_s,
        )

    async def publish_batches(
        self,
        batches: AsyncIterable[Iterable[tuple[str, requests.Data]]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
    ) -> int:
        """As `publish_many`, for messages of which some come now and some later: each batch is
        sent at once, while later ones are still to come.

        `timeout_s` counts from when a batch came. After a batch that was refused no more are taken.
        """
        session, answered = self._session, anyio.Event()
        prefix = None if id_prefix is None else requests.name(id_prefix)
        call, deadline_s = Call(answered.set), self._limit(timeout_s).deadline
        try:
            async for messages in batches:
                deadline_s = self._limit(timeout_s).deadline
                with anyio.CancelScope(deadline=deadline_s) as limit:
                    for bodies in requests.bodies(messages, once, mandatory):
                        await self._room()
                        session.publish_many(bodies, call, prefix)
                if limit.cancelled_caught:
                    call.result()
                if call.failed:
                    break
            with anyio.CancelScope(deadline=deadline_s):
                call.settle()
                await answered.wait()
        finally:
            if call.remaining:
                session.abandon(call)
        return call.confirmed()

    def consume(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        add: Iterable[str] = (),
        manual_ack: bool = False,
        delete_when_unused: float | bool = False,
    ) -> "AsyncConsumer":
        """A consumer for `async with`, on a connection of its own.

        `events` replace what the queue is bound to, `add` is added. `delete_when_unused` is the
        seconds after which the queue goes without consumers; True: at once.
        """
        arguments = requests.consume(queue, events, add, manual_ack, delete_when_unused)
        return AsyncConsumer(self, queue, arguments)

    async def subscribe(
        self, queue: str, events: Iterable[str], *, timeout_s: float | None = None
    ) -> None:
        """Make the queue if it is missing, and bind it to these events alone."""
        await self._request(requests.subscribe(queue, events), timeout_s)

    async def rebind(
        self, queue: str, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the queue is bound to, in this order: `replace` its events, `remove` some,
        `remove_mask` those that masks match, `add` some."""
        await self._request(requests.rebind(queue, changes), timeout_s)

    async def delete_queue(
        self,
        queue: str,
        *,
        when_unused: float | bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Delete the queue with all it holds; or let that happen when it has no consumer."""
        await self._request(requests.delete_queue(queue, when_unused), timeout_s)

    async def purge(self, queue: str, *, timeout_s: float | None = None) -> int:
        """Drop all messages that wait in the queue; give how many."""
        return requests.number_told(await self._request(requests.purge(queue), timeout_s))

    async def trim(
        self, queue: str, seq: int, *, epoch: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Drop the messages with numbers below `seq` that wait in the queue; give how many. With
        an `epoch`, only if it is still the queue's."""
        body = requests.trim(queue, seq, epoch)
        return requests.number_told(await self._request(body, timeout_s))

    async def reason(self, error_id: str, *, timeout_s: float | None = None) -> str | None:
        """Why the server refused a request, as the `error_id` of RequestFailed names it; None when
        it does not know any more, or the request was another user's."""
        body = requests.reason(error_id)
        return requests.reason_told(await self._request(body, timeout_s))

    async def ping(self, data: str = "", *, timeout_s: float | None = None) -> str:
        """Give the data back from the server."""
        answer = await self._request(b"ping " + requests.payload(data), timeout_s)
        return requests.decoded(answer)

    async def evaluate(self, expression: str, *, timeout_s: float | None = None) -> str:
        """What an expression over the broker's `state` gives: a string as it is, else JSON."""
        answer = await self._request(b"_eval " + requests.payload(expression), timeout_s)
        return requests.decoded(answer)

    async def request(self, action: str, *arguments: str, timeout_s: float | None = None) -> str:
        """Ask for any action, with its arguments and flags as they stand on the wire; give the
        answer, without `{request_id} ok`.

        It must be answered with one line: pass `--confirm` to an action that has no answer, and
        not to one that has. What arguments mean is not looked at, and they are sent again after a
        reconnect.
        """
        return requests.decoded(await self._request(requests.request(action, arguments), timeout_s))


class AsyncConsumer:
    """A consumer for `async with`, then `async for message in consumer`; made by `consume`.

    Several tasks may iterate at once; each message goes to one. The iteration ends after `stop`.
    It raises ConnectionLost when the consumer is closed, and RequestFailed when the server refuses
    to let it start again.
    """

    def __init__(self, client: AsyncClient, queue: str, arguments: bytes) -> None:
        self.queue = queue
        self.on_update: Callable[[Update], object] | None = None
        """Called from the iteration when the queue's subscriptions or delete rule change."""
        self._client = client
        self._arguments = arguments
        self._is_stopping = False
        self._handed = 0

    async def __aenter__(self) -> Self:
        client = self._client
        if client._session.failure is not None:
            raise client._session.failure.with_traceback(None)
        self._session = session = ConsumerSession(
            client._options,
            client._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
            arguments=self._arguments,
        )
        self._connection = _Connection(client._address, client._options, session)
        try:
            await self._connection.start(client._tasks, lambda: session.is_consuming)
        except BaseException:
            self._connection.close("the consumer did not start")
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with anyio.move_on_after(self._client._options.close_timeout_s, shield=True):
            left = anyio.Event()
            self._session.leave(Call(left.set))
            self._connection.notify()  # Reading may have been held back.
            await left.wait()
        self._connection.close("the consumer is closed")

    def stop(self) -> None:
        """End the iteration; messages not yet handed out go back, if acks are manual."""
        self._is_stopping = True
        self._connection.notify()

    async def _fill(self) -> None:
        """Wait for messages. Raises StopAsyncIteration after `stop`."""
        session = self._session
        if session.ready:
            await checkpoint()
        while True:
            while session.updates:
                update = session.updates.popleft()
                if self.on_update is not None:
                    self.on_update(update)
            if self._is_stopping:
                raise StopAsyncIteration
            if session.ready:
                return
            if session.failure is not None:
                raise session.failure.with_traceback(None)
            self._connection.notify()  # Reading may go on.
            await self._connection.until(
                lambda: bool(
                    session.ready or session.updates or session.failure or self._is_stopping
                )
            )

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        session = self._session
        self._handed += 1
        if (
            not session.ready
            or session.updates
            or self._is_stopping
            or self._handed % YIELD_MESSAGES == 0
        ):
            await self._fill()
        return session.ready.popleft()

    async def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError; and ConnectionLost after `stop`."""
        with anyio.fail_after(timeout_s):
            try:
                return await self.__anext__()
            except StopAsyncIteration:
                raise ConnectionLost("the consumer was stopped") from None

    async def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[list[Message]]:
        """All messages that wait, at least one and at most `count_max`, again and again.

        Raises TimeoutError when none has come for `timeout_s`."""
        session = self._session
        while True:
            try:
                with anyio.fail_after(timeout_s):
                    await self._fill()
            except StopAsyncIteration:
                return
            yield session.take_ready(count_max)

    def ack(self, messages: Iterable[Message]) -> None:
        """Ack many messages at once."""
        self._session.ack_all(messages)

    async def rebind(
        self, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the consumer's queue is bound to, as `AsyncClient.rebind`."""
        await self._client.rebind(self.queue, timeout_s=timeout_s, **changes)


def connect(url: str | None = None, options: Options | None = None) -> AsyncClient:
    """A client for `async with`, which waits until it is connected.

    Without a url MQKS_URL counts, and without that mqks://127.0.0.1:25000. Raises
    ConfigurationError; entering raises ConnectionLost after `connect_timeout_s`, and
    AuthenticationFailed.
    """
    return AsyncClient(url, options or Options())
