"""The async client, on anyio; `blocking.py` is the same for threads, made of this file.

Every method works with `async` and `await` and, without the two words, on threads: what differs
stands in `async_connection.py` and `blocking_connection.py`. `python -m tests.unasync` writes the
blocking client anew.

The one rule: a session is touched with its lock held, which tasks of one event loop do not need.
"""

import random
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Self, Unpack

from mqks.client import requests, urls
from mqks.client.async_connection import Connection, Connections, Event, Lock, begin
from mqks.client.errors import ClientError, ConnectionLost, PublishFailed, RequestFailed
from mqks.client.messages import Message, Peeked, Update
from mqks.client.options import Options, named
from mqks.client.session import (
    Asked,
    Call,
    ConsumerSession,
    ReplySession,
    Session,
    State,
    TailSession,
)

TURN_MESSAGES = 256
"""After so many messages without a wait, the other tasks have a turn."""
REASON_S = 2.0
"""How long a call that the server has refused waits for the reason."""


class AsyncClient:
    """A connected client; made by `connect`.

    Every call may raise ConnectionLost (the client is closed), ConfirmTimeout after `timeout_s`
    seconds (by default those of the options), RequestFailed with the server's reason, and
    InvalidRequest before anything is sent. While the connection is away, calls wait.
    """

    def __init__(self, url: str | None, options: Options) -> None:
        self._address = urls.parse(url)
        self._options = named(options, self._address.client_name)
        self._replies: Connection[ReplySession] | None = None

    def __getattr__(self, name: str) -> Any:
        if name not in ("_session", "_connection", "_connections"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        begin(self)
        return self.__dict__[name]

    async def __aenter__(self) -> Self:
        if self._is_open:
            return self
        lock = Lock()
        self._session = session = Session(
            self._options,
            self._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
        )
        self._connection = Connection(self._address, self._options, session, lock)
        self._connections = Connections()
        await self._connections.open()
        try:
            await self._start(self._connection)
        except BaseException:
            await self._connections.close()
            raise
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        is_sent = False
        if kind is None or self._session.state is State.UP:
            is_sent = await self._send_rest()
        if self._replies is not None:
            await self._leave(self._replies)
        self._connection.close("the client is closed")
        await self._connections.close()
        if kind is None and not is_sent:
            raise ConnectionLost("the client was closed before all it published was sent")

    async def close(self) -> None:
        """Leave, as at the end of `async with`: what was published is sent before. Raises
        ConnectionLost if that is not possible."""
        if self._is_open:
            await self.__aexit__(None, None, None)

    @property
    def _is_open(self) -> bool:
        return "_connections" in self.__dict__ and self._session.state is not State.CLOSED

    async def _start(self, connection: Connection[Any]) -> None:
        """Start a connection, which ends with the client, and wait until it is up."""
        session, limit_s = connection.session, self._options.connect_timeout_s
        self._connections.start(connection)
        try:
            with connection.lock:
                if not await connection.until(lambda: session.is_up or session.failure, limit_s):
                    why = f"not within {limit_s:g} s: {session.reason}"
                    raise ConnectionLost(f"{self._address}: {why}")
                session.raise_if_closed()
        except BaseException as error:
            connection.close("it did not start")
            if isinstance(error, RequestFailed) and connection is not self._connection:
                await self._explain(error)
            raise

    async def _send_rest(self) -> bool:
        """Wait until the server has read all that was published without a confirm."""
        session, answered = self._session, Event()
        with self._connection.lock:
            if session.failure or (session.is_idle and session.state is not State.UP):
                return True
            session.request(b"ping closing", Call(answered.set))
        return await answered.wait(self._options.close_timeout_s, shield=True)

    async def _leave(self, connection: Connection[Any]) -> None:
        """Delete the consumer that a connection is for, and close it."""
        left = Event()
        with connection.lock:
            connection.session.leave(Call(left.set))
            connection.notify()  # Reading may have been held back.
        await left.wait(self._options.close_timeout_s, shield=True)
        connection.close("the consumer is closed")

    def _deadline(self, timeout_s: float | None) -> float:
        if timeout_s is None:
            timeout_s = self._options.timeout_s
        elif not isinstance(timeout_s, int | float):
            raise TypeError(f"timeout_s is a number of seconds, not {timeout_s!r}")
        return time.monotonic() + timeout_s

    async def _ask(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        try:
            return await self._answer(send, timeout_s)
        except RequestFailed as failure:
            await self._explain(failure)
            raise

    async def _explain(self, failure: RequestFailed) -> None:
        """Ask why, if that is not known. Of very many errors the server may only know the last."""
        if failure.reason is None:
            with suppress(ClientError):
                failure.reason = await self._reason(failure.error_id, REASON_S)
                if failure.reason is None and isinstance(failure, PublishFailed):
                    last_id = max(failed.error_id for failed in failure.failed)
                    if reason := await self._reason(last_id, REASON_S):
                        failure.reason = f"not known any more, but of the last one it is: {reason}"

    async def _reason(self, error_id: str, timeout_s: float | None) -> str | None:
        body = requests.reason(error_id)
        answer = await self._answer(lambda call: self._session.request(body, call), timeout_s)
        return requests.reason_told(answer)

    async def _answer(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        answered, deadline_s = Event(), self._deadline(timeout_s)
        call, connection = Call(answered.set), self._connection
        with connection.lock:
            if not await connection.room(deadline_s):
                return call.result()
            request_id = send(call)
        try:
            await answered.wait(deadline_s - time.monotonic())
        finally:
            if call.remaining:
                with connection.lock:
                    self._session.abandon(call, request_id)
        return call.result()

    async def _request(self, body: bytes, timeout_s: float | None) -> bytes:
        return await self._ask(lambda call: self._session.request(body, call), timeout_s)

    async def _counted(self, body: bytes, timeout_s: float | None) -> int:
        return requests.number_told(await self._request(body, timeout_s))

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
        **terms: Unpack[requests.Terms],
    ) -> str:
        """Publish one message and give its id.

        With `confirm`, wait until the server has it on disk; sent again after a reconnect, it may
        arrive twice. Without, it is sent with the next write, and lost if the connection is. With
        `once`, the server drops it if it has seen the `id` already; with `mandatory`, it refuses
        it if no queue is bound to the event, which without `confirm` is only logged.

        It is put into its queues now, and joins them after `delay_s` seconds, or `at` a time: a
        datetime, or seconds since 1970. Where it has waited for `ttl_s` seconds it is dead. `meta`
        are attributes, told to consumers that ask for them. With `to`, only the queue of this name
        gets it, whatever it is bound to.
        """
        session = self._session
        flags = requests.publish_flags(terms) if terms else b""
        if confirm:
            ids = [b""]

            def send(call: Call) -> bytes:
                ids[0] = session.publish(event, data, id, call, once, mandatory, flags)
                return ids[0]

            await self._ask(send, timeout_s)
            return requests.decoded(ids[0])
        with self._connection.lock:
            if not session.has_room and not await self._connection.room(self._deadline(timeout_s)):
                Call().result()
            return requests.decoded(session.publish(event, data, id, None, once, mandatory, flags))

    async def publish_many(
        self,
        messages: Iterable[tuple[str, requests.Data]],
        **options: Unpack[requests.Many],
    ) -> int:
        """Publish events with their data, all confirmed; give how many.

        With an `id_prefix`, the ids are `PREFIX-1`, `PREFIX-2` …; with `once`, the server drops
        those whose ids it has seen already; with `mandatory`, it refuses those that no queue is
        bound to. `delay_s`, `at`, `ttl_s`, `meta` and `to` are those of `publish`, for all. Raises
        PublishFailed, which names those that were refused. Raises InvalidRequest at the first that
        cannot be sent, when those before it may have been.
        """

        async def batches() -> AsyncIterator[Iterable[tuple[str, requests.Data]]]:
            yield messages

        return await self.publish_batches(batches(), **options)

    async def publish_batches(
        self,
        batches: AsyncIterable[Iterable[tuple[str, requests.Data]]],
        *,
        id_prefix: str | None = None,
        once: bool = False,
        mandatory: bool = False,
        timeout_s: float | None = None,
        **terms: Unpack[requests.Terms],
    ) -> int:
        """As `publish_many`, for messages of which some come now and some later: each batch is
        sent at once, while later ones are still to come.

        `timeout_s` counts from when a batch came. After a batch that was refused no more are taken.
        """
        connection, answered, flags = self._connection, Event(), requests.publish_flags(terms)
        prefix = None if id_prefix is None else requests.name(id_prefix)
        call, deadline_s = Call(answered.set), self._deadline(timeout_s)
        try:
            async for messages in batches:
                deadline_s = self._deadline(timeout_s)
                for bodies in requests.bodies(messages, once, mandatory, flags):
                    with connection.lock:
                        if not await connection.room(deadline_s):
                            call.result()
                        self._session.publish_many(bodies, call, prefix)
                if call.failed:
                    break
            with connection.lock:
                call.settle()
            await answered.wait(deadline_s - time.monotonic())
        finally:
            with connection.lock:
                if call.remaining:
                    self._session.abandon(call)
        try:
            return call.confirmed()
        except RequestFailed as failure:
            await self._explain(failure)
            raise

    async def call(
        self, event: str, data: requests.Data = None, timeout_s: float | None = None
    ) -> Message:
        """Publish a request and give the reply of the service that has handled it.

        Raises RequestFailed when no queue is bound to the event, CallFailed when the service has
        raised an error, and ConfirmTimeout when no reply has come in time; then the request is
        dropped where it still waits.
        """
        deadline_s = self._deadline(timeout_s)
        connection = await self._reply_connection(deadline_s)
        session, answered = connection.session, Event()
        call = Asked(answered.set)
        with connection.lock:
            correlation_id = session.expect(call)
        try:
            left_s = deadline_s - time.monotonic()
            await self.publish(
                event,
                data,
                confirm=True,
                mandatory=True,
                timeout_s=left_s,
                ttl_s=requests.request_ttl_s(left_s),
                meta={"reply-to": session.queue, "correlation-id": correlation_id},
            )
            await answered.wait(deadline_s - time.monotonic())
        finally:
            with connection.lock:
                session.forget(correlation_id)
        return call.message()

    async def reply(
        self,
        message: Message,
        data: requests.Data = None,
        *,
        error: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Answer a request, which its consumer got with `meta`. With an `error`, a name, the
        caller gets a CallFailed with the data as its text. Raises InvalidRequest when the message
        asks for no reply."""
        if not isinstance(message, Message):
            raise TypeError(f"reply takes the message that asks for it, not {message!r}")
        event, meta = requests.reply(message.meta, error)
        await self.publish(event, data, confirm=True, timeout_s=timeout_s, meta=meta)

    async def _reply_connection(self, deadline_s: float) -> Connection[ReplySession]:
        """Where replies come; made at the first call, and again if the server has ended it."""
        with self._connection.lock:
            self._session.raise_if_closed()
            if self._replies is None or self._replies.session.failure:
                self._replies = self._new_reply_connection()
            connection = self._replies
        session = connection.session
        with connection.lock:
            left_s = deadline_s - time.monotonic()
            if not await connection.until(lambda: session.is_up or session.failure, left_s):
                Call().result()
            session.raise_if_closed()
        return connection

    def _new_reply_connection(self) -> Connection[ReplySession]:
        lock = Lock()
        session = ReplySession(
            self._options,
            self._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
            queue=f"reply.{secrets.token_hex(16)}",
            guard=lock.guard,
        )
        connection = Connection(self._address, self._options, session, lock)
        self._connections.start(connection)
        return connection

    def consume(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        manual_ack: bool = False,
        delete_when_unused: float | bool = False,
        prefetch: int | None = None,
        meta: bool = False,
        **bindings: Unpack[requests.Bindings],
    ) -> "AsyncConsumer":
        """A consumer for `async with`, on a connection of its own.

        The queue is bound to `events` (and `add`) and to the masks in `add_mask`, beside its other
        bindings; with `replace`, `events` replace all bindings, for every consumer of the queue. A
        queue that does not exist is created if bindings are named or with `create`; otherwise
        entering raises RequestFailed. `delete_when_unused` is the seconds after which the queue
        goes without consumers; True: at once. With `manual_ack` it holds at most `prefetch` unacked
        messages, 10 unless given, and with 0 as many as the server allows: faster, but then one
        consumer takes what others could work on. With `meta`, messages have their attributes.
        """
        arguments = requests.consume(
            queue,
            events,
            manual_ack=manual_ack,
            delete_when_unused=delete_when_unused,
            prefetch=prefetch,
            meta=meta,
            **bindings,
        )
        return AsyncConsumer(self, queue, arguments)

    def tail(self, *events: str, queue: str | None = None) -> "AsyncTail":
        """Messages as they are published, for `async with`, without consuming them: those of the
        events and masks or, with a `queue`, those that join it. What the server cannot send at once
        is dropped: `tail.dropped` counts it. A reconnect begins anew; what came meanwhile is not
        counted.
        """
        return AsyncTail(self, queue or "", requests.tail(events, queue))

    async def subscribe(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        add_mask: Iterable[str] = (),
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Create the queue if it does not exist, and bind it to these events and masks, beside its
        other bindings; with `replace`, to these alone."""
        await self._request(requests.subscribe(queue, events, add_mask, replace), timeout_s)

    async def rebind(
        self, queue: str, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the queue is bound to, in this order: `replace` its events, `remove` some,
        `remove_mask` those that masks match, `add` some, `add_mask` masks."""
        await self._request(requests.rebind(queue, changes), timeout_s)

    async def set_queue(
        self,
        queue: str,
        *,
        reset: bool = False,
        timeout_s: float | None = None,
        **policy: Unpack[requests.Policy],
    ) -> None:
        """Make the queue if it is missing, and change what it does with its messages: None clears
        a value, `reset` all that are not given."""
        await self._request(requests.set_queue(queue, policy, reset), timeout_s)

    async def delete_queue(
        self,
        queue: str,
        *,
        when_unused: float | bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Delete the queue with all it holds; or let that happen when it has no consumer."""
        await self._request(requests.delete_queue(queue, when_unused), timeout_s)

    async def purge(
        self,
        queue: str,
        *,
        scheduled: bool = False,
        timeout_s: float | None = None,
        **choice: Unpack[requests.Choice],
    ) -> int:
        """Drop the messages that wait in the queue, those of an `event` (a mask), of an `id`, or
        `older_s` seconds old or older, at most `limit`, or all; with `scheduled` also those that
        wait for their time. Return how many."""
        return await self._counted(requests.purge(queue, scheduled, choice), timeout_s)

    async def requeue(
        self,
        consumer: str,
        *,
        timeout_s: float | None = None,
        **selection: Unpack[requests.Selection],
    ) -> int:
        """Put unacked messages of a consumer back to the tail of its queue: those of an `event` (a
        mask), of an `id`, or `older_s` seconds old or older, or all. Return how many."""
        if not selection:
            selection = {"older_s": 0.0}
        return await self._counted(requests.reject_some(consumer, selection), timeout_s)

    async def cancel(self, queue: str, id: str | None, *, timeout_s: float | None = None) -> int:
        """Take the scheduled messages of this id out of the queue, None: all of them; give how
        many."""
        return await self._counted(requests.one_or_all(b"cancel", queue, id), timeout_s)

    async def promote(self, queue: str, id: str | None, *, timeout_s: float | None = None) -> int:
        """Let the scheduled messages of this id join the queue now, None: all of them; give how
        many."""
        return await self._counted(requests.one_or_all(b"promote", queue, id), timeout_s)

    async def move(
        self,
        source: str,
        to: str,
        *,
        timeout_s: float | None = None,
        **choice: Unpack[requests.Choice],
    ) -> int:
        """Move the messages that wait in a queue to another one, those of an `event` (a mask), of
        an `id`, or `older_s` seconds old or older, at most `limit`, or all; return how many."""
        return await self._counted(requests.move(source, to, choice), timeout_s)

    async def redrive(
        self,
        queue: str,
        *,
        to: str | None = None,
        timeout_s: float | None = None,
        **choice: Unpack[requests.Choice],
    ) -> int:
        """Move dead letters back to the queues where they died, or `to` this one, as if they had
        never been delivered; otherwise as `move`."""
        return await self._counted(requests.redrive(queue, to, choice), timeout_s)

    async def peek(
        self,
        queue: str,
        *,
        after: int = 0,
        limit: int = 100,
        scheduled: bool = False,
        timeout_s: float | None = None,
        **selection: Unpack[requests.Selection],
    ) -> list[Peeked]:
        """The first messages with numbers above `after` that wait in the queue or that its
        consumers hold; or, with `scheduled`, that wait for their time. Only those of an `event` (a
        mask), of an `id`, or `older_s` seconds old or older, if these are given. Nothing is
        consumed."""
        found: list[Peeked] = []
        goes_on: int | None = after
        while goes_on is not None and len(found) < limit:
            left = limit - len(found)
            body, lines = requests.peek(queue, goes_on, left, scheduled, selection), list[bytes]()
            answer = await self._ask(partial(self._ask_lines, body, lines), timeout_s)
            found += map(Peeked.parse, lines)
            goes_on = requests.peek_goes_on(answer)
        return found

    def _ask_lines(self, body: bytes, lines: list[bytes], call: Call) -> bytes:
        call.lines = lines
        return self._session.request(body, call)

    async def trim(
        self, queue: str, seq: int, *, epoch: str | None = None, timeout_s: float | None = None
    ) -> int:
        """Drop the messages with numbers below `seq` that wait in the queue; give how many. With
        an `epoch`, only if it is still the queue's."""
        return await self._counted(requests.trim(queue, seq, epoch), timeout_s)

    async def reason(self, error_id: str, *, timeout_s: float | None = None) -> str | None:
        """Why the server refused a request, as the `error_id` of RequestFailed names it; None when
        it does not know any more, or the request was another user's."""
        return await self._reason(error_id, timeout_s)

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


class AsyncMessages:
    """What messages come from: a consumer or a tail, for `async with`, then `async for`.

    Several tasks may iterate at once; each message goes to one. The iteration ends after `stop`.
    It raises ConnectionLost when the client is closed, and RequestFailed when the server refuses
    to let it start again.
    """

    _kind: type[ConsumerSession] = ConsumerSession

    def __init__(self, client: AsyncClient, queue: str, arguments: bytes) -> None:
        self.queue = queue
        self._client = client
        self._arguments = arguments
        self._is_stopping = False
        self._handed = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("_session", "_connection"):
            raise RuntimeError(
                "the consumer is not started: write `async with client.consume(…) as consumer:`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Self:
        client = self._client
        client._session.raise_if_closed()
        lock = Lock()
        self._session = session = self._new_session(lock)
        self._connection = Connection(client._address, client._options, session, lock)
        await client._start(self._connection)
        return self

    def _new_session(self, lock: Lock) -> ConsumerSession:
        return self._kind(
            self._client._options,
            self._client._address.credentials,
            prefix=secrets.token_hex(6),
            jitter=random.random,
            arguments=self._arguments,
            guard=lock.guard,
        )

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._client._leave(self._connection)

    def stop(self) -> None:
        """End the iteration; messages not yet handed out go back, if acks are manual."""
        with self._connection.lock:
            self._is_stopping = True
            self._connection.notify()

    def _tell(self, update: Update | int) -> None:
        """Something about the messages."""

    async def _filled(self, timeout_s: float | None) -> None:
        try:
            with self._connection.lock:
                await self._fill(timeout_s)
        except RequestFailed as failure:
            await self._client._explain(failure)
            raise

    async def _fill(self, timeout_s: float | None) -> None:
        """Wait for messages, with the lock held. Raises StopAsyncIteration after `stop`, and
        TimeoutError."""
        session, connection = self._session, self._connection
        while True:
            while session.updates:
                self._tell(session.updates.popleft())
            if self._is_stopping:
                raise StopAsyncIteration
            if session.ready:
                return
            session.raise_if_closed()
            connection.notify()  # Reading may go on.
            if not await connection.until(
                lambda: session.ready or session.updates or session.failure or self._is_stopping,
                timeout_s,
            ):
                raise TimeoutError("no message within the time given")

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Message:
        return await self._next(None)

    async def _next(self, timeout_s: float | None) -> Message:
        session, connection = self._session, self._connection
        self._handed += 1
        if self._handed % TURN_MESSAGES == 0:
            await connection.turn()
        while True:
            if not session.ready or session.updates or self._is_stopping:
                await self._filled(timeout_s)
            try:
                return session.ready.popleft()
            except IndexError:  # Another thread was faster.
                continue

    async def receive(self, timeout_s: float | None = None) -> Message:
        """The next message. Raises TimeoutError; and ConnectionLost after `stop`."""
        try:
            return await self._next(timeout_s)
        except StopAsyncIteration:
            raise ConnectionLost("the consumer was stopped") from None

    async def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[list[Message]]:
        """All messages that wait, at least one and at most `count_max`, again and again.

        Raises TimeoutError when none has come for `timeout_s`."""
        connection = self._connection
        while True:
            await connection.turn()
            try:
                await self._filled(timeout_s)
            except StopAsyncIteration:
                return
            with connection.lock:
                batch = self._session.take_ready(count_max)
            if batch:  # Otherwise another thread was faster.
                yield batch


class AsyncConsumer(AsyncMessages):
    """A consumer; made by `consume`."""

    on_update: Callable[[Update], object] | None = None
    """Called from the iteration when the queue's subscriptions or delete rule change."""

    def _tell(self, update: Update | int) -> None:
        if isinstance(update, Update) and self.on_update is not None:
            self.on_update(update)

    def ack(self, messages: Iterable[Message]) -> None:
        """Ack many messages at once."""
        with self._connection.lock:
            self._session.ack_all(messages)

    async def rebind(
        self, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change what the consumer's queue is bound to, as `AsyncClient.rebind`."""
        await self._client.rebind(self.queue, timeout_s=timeout_s, **changes)


class AsyncTail(AsyncMessages):
    """A tail; made by `tail`."""

    _kind = TailSession
    dropped = 0
    """Messages that were not shown, as far as the iteration has come."""
    on_dropped: Callable[[int], object] | None = None
    """Called from the iteration with the number when messages were dropped."""

    def _tell(self, update: Update | int) -> None:
        if isinstance(update, int):
            self.dropped += update
            if self.on_dropped is not None:
                self.on_dropped(update)


def connect(
    url: str | None = None, options: Options | None = None, *, client_name: str | None = None
) -> AsyncClient:
    """A client for `async with`, which waits until it is connected.

    Without a url MQKS_URL counts, and without that mqks://127.0.0.1:25000. The server shows the
    `client_name` in its log and in `mqks inspect connections`; a name in the url counts more.
    Raises ConfigurationError; entering raises ConnectionLost after `connect_timeout_s`, and
    AuthenticationFailed.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options are mqks.Options(…), not {options!r}")
    options = named(options or Options(), client_name)
    if options.tracing:
        from mqks.client.async_traced import TracedClient

        return TracedClient(url, options)
    return AsyncClient(url, options)
