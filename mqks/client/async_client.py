"""The async client, on anyio. `blocking.py` is the same client for threads, generated from here.

The code must also work on threads if `async` and `await` are removed. The differences are in
`async_connection.py` and `blocking_connection.py`; what waits for nothing is in `common.py`.
`python -m tools.unasync` generates the blocking client.

The one rule: a session is used only while its lock is held. Tasks of one event loop need no lock.
"""

import json
import math
import secrets
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Literal, Self, Unpack

from mqks.client import async_connection, requests, urls
from mqks.client.async_connection import Connections, OneTimeEvent, SessionConnection
from mqks.client.common import Client, ClientConsumer, Messages, Tail
from mqks.client.errors import (
    ClientError,
    ConnectionLost,
    InvalidRequest,
    NoResult,
    PublishFailed,
    QueueMissing,
    ReplyTimeout,
    RequestFailed,
    Stopped,
)
from mqks.client.keywords import check, checking, strict
from mqks.client.messages import JobState, Message, PeekedMessage
from mqks.client.options import Options, named
from mqks.client.session import Asked, Call, ReplySession, Session, SessionState
from mqks.client.steps import Step
from mqks.protocol.requests import ALL

TURN_MESSAGES = 256
"""After this number of messages without a wait, the connection's `turn` is called."""
NAMES_COMPARED_MAX = 10_000
"""Queues among which the nearest name is looked for."""
KEEP_RESULT_S = 3600.0
JOB_WAIT_S = 20.0
"""How long one request waits for the end of a job."""
REASON_S = 2.0
"""How long a refused call waits for the reason."""


@strict("publish")
class AsyncClient(Client["AsyncConsumer", "AsyncTail", "AsyncTransaction"]):
    """A connected client. `connect` creates it.

    Every call may raise ConnectionLost (the client is closed), ReplyTimeout after `timeout_s`
    seconds (default: `timeout_s` of the options), RequestFailed with the reason from the server,
    and InvalidRequest before anything is sent. While the client reconnects, calls wait.
    """

    _skin = async_connection
    _connection: SessionConnection[Session]
    _replies: SessionConnection[ReplySession] | None

    async def __aenter__(self) -> Self:
        if self._is_open:
            return self
        connections = Connections(self)
        self._connection = self._new_connection(Session)
        self._session = self._connection.session
        self._connections = connections  # Last: what failed before is not open.
        await self._connections.open()
        try:
            await self._start(self._connection)
        except BaseException:
            await self._connections.close()
            raise
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if "_connections" not in self.__dict__:
            return  # It is open in the process that this one was forked from.
        is_sent = False
        if kind is None or self._session.state is SessionState.UP:
            is_sent = await self._send_rest()
        if self._replies is not None:
            await self._leave(self._replies)
        self._connection.close("the client is closed")
        await self._connections.close()
        if kind is None and not is_sent and self._session.has_unconfirmed:
            raise ConnectionLost("the client was closed before all published messages were sent")

    async def close(self) -> None:
        """Close the client, as at the end of `async with`. Published messages are sent first.
        Raises ConnectionLost if they cannot be sent, and were not all confirmed."""
        if self._is_open:
            await self.__aexit__(None, None, None)

    async def _start(self, connection: SessionConnection[Any]) -> None:
        """Start a connection and wait until it is up. It is closed with the client."""
        session, limit_s = connection.session, self._options.connect_timeout_s
        self._connections.start(connection)
        try:
            with connection.lock:
                if not await connection.until(lambda: session.is_up or session.failure, limit_s):
                    why = f"not connected within {limit_s:g} s: {session.reason}"
                    raise ConnectionLost(f"{self._address}: {why}")
                session.raise_if_closed()
        except BaseException as error:
            connection.close("it did not start")
            if isinstance(error, RequestFailed) and connection is not self._connection:
                await self._explain(error)
            raise

    async def _send_rest(self) -> bool:
        """Wait until the server has read all messages published without a confirm."""
        answered = OneTimeEvent()
        with self._connection.lock:
            self._session.send_rest(Call(answered.set))
        return await answered.wait(self._options.close_timeout_s, shield=True)

    async def _leave(self, connection: SessionConnection[Any]) -> None:
        """Delete the consumer of a connection, and close the connection."""
        left = OneTimeEvent()
        with connection.lock:
            connection.session.leave(Call(left.set))
            connection.notify()  # Reading may have been held back.
        await left.wait(self._options.close_timeout_s, shield=True)
        connection.close("the consumer is closed")

    async def _ask(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        try:
            return await self._answer(send, timeout_s)
        except RequestFailed as failure:
            await self._explain(failure)
            raise

    async def _explain(self, failure: RequestFailed) -> None:
        """Ask for the reason, if it is unknown. The server retains only the latest errors."""
        if failure.reason is None:
            with suppress(ClientError):
                failure.reason = await self.reason(failure.error_id, timeout_s=REASON_S)
                if failure.reason is None and isinstance(failure, PublishFailed):
                    last_id = max(failed.error_id for failed in failure.failed)
                    if reason := await self.reason(last_id, timeout_s=REASON_S):
                        failure.reason = (
                            f"the server no longer has it; the last error was: {reason}"
                        )

    async def _answer(self, send: Callable[[Call], bytes], timeout_s: float | None) -> bytes:
        answered, deadline_s = OneTimeEvent(), self._deadline(timeout_s)
        call, connection, request_id = Call(answered.set), self._connection, None
        try:
            with connection.lock:
                if not (self._session.has_room or await connection.room(deadline_s)):
                    return call.result()
                request_id = send(call)
            await answered.wait(deadline_s - time.monotonic())
        finally:
            if call.remaining:
                with connection.lock:
                    self._session.abandon(call, request_id)
        return call.result()

    async def _request(self, body: bytes, timeout_s: float | None) -> bytes:
        return await self._ask(lambda call: self._session.request(body, call), timeout_s)

    async def _counted(self, action: str, place: str, *names: str | bytes, **values: Any) -> int:
        """A number of messages. Where it is 0, perhaps since their queue does not exist, most
        actions do not say so."""
        timeout_s = values.pop("timeout_s", None)
        body = requests.confirmed(action, place, *names, **values)
        is_checked = action not in ("reject", "lease")
        try:
            count = requests.number_told(await self._request(body, timeout_s))
        except RequestFailed as failure:
            if is_checked and requests.tells_missing(failure.reason):
                await self.check_queue(place, timeout_s=timeout_s)
            raise
        if not count and is_checked:
            await self.check_queue(place, timeout_s=timeout_s)
        return count

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
    ) -> requests.PublishedId:
        """Publish one message and return its id.

        With `confirm`, wait until the server has stored the message. After a reconnect the message
        is sent again and may be stored twice. Without `confirm`, the message is sent with the next
        write, and lost if the connection breaks before.

        - `once`: the server drops the message if it already received one with this `id`.
        - `mandatory`: the server refuses the message if no queue is bound to the event. Without
          `confirm`, the error is only logged.
        - `delay_s`, `at`: deliver the message after this number of seconds, or at this time: a
          datetime with a time zone, or seconds since 1970.
        - `ttl_s`: the time to live in a queue, in seconds.
        - `meta`: attributes. Consumers get them if they ask for them.
        - `to`: put the message only into the queue of this name, whatever its bindings.
        - `keep_result_s`: the server keeps what becomes of it, until so many seconds after its end;
          see `submit`.
        - `priority`: from -128 to 127; consumers get it if they ask for `meta`. So with `key`, a
          text of at most 256 bytes, percent-encoded.
        - `batch`: the batch that it joins.
        - `unique`: a key, or a `Unique`. While a message of this key waits in a queue, the server
          drops this one, or lets it take the place of that one. With `confirm`, the returned id
          tells which: `duplicate_of`, `replaced`.
        """
        session, flags = self._session, b""
        if terms:
            check(terms, AsyncClient.publish)
            flags = requests.publish_flags(terms)
        if self._tracing is not None and not self._tracing.has_begun(terms):
            requests.name(event)  # What is wrong raises before the span.
            again = partial(self.publish, event, data, confirm=confirm, id=id, once=once)
            again = partial(again, mandatory=mandatory, timeout_s=timeout_s)
            with self._tracing.publish(event, terms) as span:
                message_id = None
                with suppress(InvalidRequest):
                    message_id = await again(**span.terms)
                if message_id is None:  # The line may be short enough without a trace.
                    message_id = await again(**span.without_trace)
                span.has_id(message_id)
                return message_id
        if confirm:
            ids = [b""]

            def send(call: Call) -> bytes:
                ids[0] = session.publish(event, data, id, call, once, mandatory, flags)
                return ids[0]

            answer = await self._ask(send, timeout_s)
            return requests.PublishedId.of(ids[0], answer)
        with self._connection.lock:
            if not session.has_room and not await self._connection.room(self._deadline(timeout_s)):
                Call().result()
            sent = session.publish(event, data, id, None, once, mandatory, flags)
            return requests.PublishedId.of(sent, b"")

    async def publish_many(
        self,
        messages: Iterable[tuple[str, requests.Data]],
        **options: Unpack[requests.Many],
    ) -> int:
        """Publish pairs of event and data with confirms, and return their number.

        With an `id_prefix`, the ids are `PREFIX-1`, `PREFIX-2`, … The other options are those of
        `publish` and apply to every message. Raises PublishFailed, which lists the refused
        messages. Raises InvalidRequest at the first message that cannot be sent; messages before
        it may have been published.
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
        """Like `publish_many`, for messages that become available over time: each batch is sent
        immediately, without waiting for later batches.

        `timeout_s` starts anew with each batch. After a refused message no more batches are read.
        """
        connection, answered = self._connection, OneTimeEvent()
        flags = requests.publish_flags(terms)
        prefix = None if id_prefix is None else requests.name(id_prefix)
        call, deadline_s = Call(answered.set), self._deadline(timeout_s)
        with nullcontext() if self._tracing is None else self._tracing.publish_many(terms) as span:
            try:
                async for messages in batches:
                    deadline_s = self._deadline(timeout_s)
                    if span is not None:
                        messages, flags = span.counted(messages), span.flags
                    args = messages, once, mandatory, flags, self._session.to_json
                    for bodies in requests.bodies(*args):
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
        self,
        event: str,
        data: requests.Data = None,
        timeout_s: float | None = None,
        *,
        meta: Mapping[str, str] | None = None,
    ) -> Message:
        """Publish a request and return the reply of the service that handled it. The request may
        have attributes (`meta`), among them a correlation-id of its own, which no other call waits
        for.

        Raises RequestFailed if no queue is bound to the event, CallFailed if the service raised an
        error, and ReplyTimeout if no reply arrived in time. A request that is still in a queue
        after the timeout is dropped.
        """
        deadline_s = self._deadline(timeout_s)
        connection = await self._reply_connection(deadline_s)
        session, answered = connection.session, OneTimeEvent()
        call = Asked(answered.set)
        with connection.lock:
            correlation_id = session.expect(call, (meta or {}).get("correlation-id"))
        told = {"reply-to": session.queue, "correlation-id": correlation_id}
        try:
            left_s = deadline_s - time.monotonic()
            await self.publish(
                event,
                data,
                confirm=True,
                mandatory=True,
                timeout_s=left_s,
                ttl_s=requests.request_ttl_s(left_s),
                meta={**(meta or {}), **told},
            )
            await answered.wait(deadline_s - time.monotonic())
        finally:
            with connection.lock:
                session.forget(correlation_id)
        return call.message()

    async def submit(
        self,
        event: str,
        data: requests.Data = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[requests.Sent],
    ) -> "AsyncJob":
        """Publish a message, wait until the server has stored it, and return it as a job, whose end
        is known until `keep_result_s` seconds after it, an hour by default. The options are those
        of `publish`. Raises RequestFailed unless exactly one queue is bound to the event."""
        options.setdefault("keep_result_s", KEEP_RESULT_S)
        id = await self.publish(event, data, confirm=True, timeout_s=timeout_s, **options)
        return self.job(id)

    def job(self, id: str) -> "AsyncJob":
        """The job of the message with this id, which was published with `keep_result_s`."""
        return AsyncJob(self, id)

    async def cancel_job(
        self, queue: str, id: str, *, reason: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Cancel a message. Returns `cancelled`: it has waited, and is removed; `told`: a consumer
        holds it, and was told; `held`: a consumer holds it that was not; or `none`: it is not
        there."""
        body = requests.confirmed("cancel_job", queue, id, reason=reason or None)
        return requests.decoded(await self._request(body, timeout_s))

    async def reply(
        self,
        message: Message,
        data: requests.Data = None,
        *,
        error: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Reply to a request that was consumed with `meta`. With `error`, the name of an error,
        the caller gets a CallFailed with the data as its text. Raises InvalidRequest if the message
        does not ask for a reply."""
        if not isinstance(message, Message):
            raise TypeError(f"reply needs the message to reply to, not {message!r}")
        event, meta = requests.reply(message.meta, error)
        with nullcontext() if self._tracing is None else self._tracing.replying(message):
            await self.publish(event, data, confirm=True, timeout_s=timeout_s, meta=meta)

    async def _reply_connection(self, deadline_s: float) -> SessionConnection[ReplySession]:
        """The connection for replies. It is created at the first call, and again if the server
        ended it."""
        with self._connection.lock:
            self._session.raise_if_closed()
            if self._replies is None or self._replies.session.failure:
                queue = f"reply.{secrets.token_hex(16)}"
                self._replies = self._new_connection(ReplySession, queue=queue)
                self._connections.start(self._replies)
            connection = self._replies
        session = connection.session
        with connection.lock:
            left_s = deadline_s - time.monotonic()
            if not await connection.until(lambda: session.is_up or session.failure, left_s):
                Call().result()
            session.raise_if_closed()
        return connection

    async def subscribe(
        self,
        queue: str,
        events: Iterable[str] = (),
        *,
        masks: Iterable[str] = (),
        replace: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Create the queue if it does not exist, and add these events and masks to its bindings.
        With `replace`, they replace its bindings."""
        await self._request(requests.subscribe(queue, events, masks, replace), timeout_s)

    async def rebind(
        self, queue: str, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change the bindings of the queue, in this order: `replace` all events, `remove` events,
        `remove_mask` bindings that match masks, `add` events, `add_mask` masks."""
        body = requests.rebind(queue, changes)
        await self.check_queue(queue, timeout_s=timeout_s)
        await self._request(body, timeout_s)

    async def set_queue(
        self,
        queue: str,
        *,
        reset: bool = False,
        timeout_s: float | None = None,
        **policy: Unpack[requests.PolicyKeywords],
    ) -> None:
        """Create the queue if it does not exist, and change its policy. None clears a field;
        `reset` clears all fields that are not given."""
        await self._request(requests.set_queue(queue, policy, reset), timeout_s)

    async def pause(
        self,
        queue: str,
        *,
        for_s: float | None = None,
        deliveries: bool = False,
        publishes: bool | Literal["wait"] = False,
        timeout_s: float | None = None,
    ) -> None:
        """Pause the deliveries of a queue, or its publishes, which are refused then, or, with
        "wait", wait; neither: both. It lasts until `resume`, or for a number of seconds, in place
        of an earlier pause. Raises RequestFailed if there is no such queue."""
        told = {"for_s": for_s, "deliveries": deliveries, "publishes": publishes}
        await self._request(requests.confirmed("pause", queue, **told), timeout_s)

    async def resume(self, queue: str, *, timeout_s: float | None = None) -> None:
        """End any pause of a queue. Raises RequestFailed if there is no such queue."""
        await self._request(requests.confirmed("resume", queue), timeout_s)

    async def rename_queue(self, queue: str, new: str, *, timeout_s: float | None = None) -> None:
        """Give a queue another name, which no queue has. Raises QueueMissing, and RequestFailed."""
        body = requests.confirmed("rename", queue, new)
        await self.check_queue(queue, timeout_s=timeout_s)
        await self._request(body, timeout_s)

    async def trace(
        self, name: str, *, for_s: float | None = None, timeout_s: float | None = None
    ) -> None:
        """Note what becomes of the messages with this id or event, those whose event it matches as
        a mask, and those in the queue of this name, for 10 minutes or `for_s` seconds.
        `stats("message", id)` tells the steps. Raises RequestFailed."""
        await self._request(requests.confirmed("trace", name, for_s=for_s), timeout_s)

    async def end_trace(self, name: str | None = None, *, timeout_s: float | None = None) -> None:
        """End a trace; None: all of them, and forget what was noted."""
        words = () if name is None else (name,)
        await self._request(requests.confirmed("trace", *words, off=True), timeout_s)

    async def check_queue(self, queue: str, *, timeout_s: float | None = None) -> None:
        """Raises QueueMissing unless the queue exists. A user who may neither consume from it nor
        inspect the server gets no error."""
        for question in requests.exists(queue):
            try:
                await self._request(question, timeout_s)
                return
            except RequestFailed as failure:
                if requests.tells_missing(failure.reason):
                    rows = list[dict[str, Any]]()
                    with suppress(RequestFailed):  # Not everybody may inspect the server.
                        rows = await self._rows("queues", "name", NAMES_COMPARED_MAX, timeout_s)
                    names = (row["name"] for row in rows)
                    raise QueueMissing(queue, names, failure.error_id) from None

    async def _rows(
        self, what: str, key: str, rows_max: float, timeout_s: float | None
    ) -> list[dict[str, Any]]:
        """The rows of a list of `stats` that is sorted by `key`, until there are so many."""
        rows, behind = list[dict[str, Any]](), None
        while True:
            page = await self.stats(*requests.page(what, behind, key), timeout_s=timeout_s)
            rows += page
            if not page or len(rows) >= rows_max:
                return rows
            behind = page[-1]

    async def delete_queue(
        self,
        queue: str,
        *,
        when_unused: float | bool = False,
        if_exists: bool = False,
        timeout_s: float | None = None,
    ) -> None:
        """Delete the queue with its messages and bindings. With `when_unused`, delete it after this
        number of seconds without a consumer; True: as soon as it has none. Raises QueueMissing,
        unless `if_exists`."""
        body = requests.delete_queue(queue, when_unused)
        if not if_exists:
            await self.check_queue(queue, timeout_s=timeout_s)
        await self._request(body, timeout_s)

    async def purge(
        self, queue: str, *, scheduled: bool = False, **choice: Unpack[requests.Choosing]
    ) -> int:
        """Drop ready messages of the queue and return their number: all, or a selection as in
        `move`. With `scheduled`, scheduled messages too."""
        return await self._counted("purge", queue, scheduled=scheduled, **choice)

    async def requeue(self, consumer: str, **selection: Unpack[requests.Selecting]) -> int:
        """Move unacked messages of a consumer to the end of its queue and return their number: all,
        or a selection as in `move`, which has no `limit` here."""
        if not selection.keys() - {"timeout_s"}:
            selection["older_s"] = 0.0
        return await self._counted("reject", consumer, ALL, **selection)

    async def cancel(self, queue: str, id: str | None, *, timeout_s: float | None = None) -> int:
        """Drop scheduled messages with this id, or all with None, and return their number."""
        which = ALL if id is None else id
        return await self._counted("cancel", queue, which, timeout_s=timeout_s)

    async def promote(self, queue: str, id: str | None, *, timeout_s: float | None = None) -> int:
        """Make scheduled messages with this id ready now, or all with None, and return their
        number."""
        which = ALL if id is None else id
        return await self._counted("promote", queue, which, timeout_s=timeout_s)

    async def move(self, source: str, to: str, **choice: Unpack[requests.Choosing]) -> int:
        """Move ready messages of a queue to the end of another one and return their number: all,
        or those selected by `event` (a mask), `id`, `older_s` (a minimum age in seconds), `where`
        (attributes) and `limit`."""
        return await self._counted("move", source, to, **choice)

    async def redrive(
        self, queue: str, *, to: str | None = None, **choice: Unpack[requests.Choosing]
    ) -> int:
        """Move dead letters back to the queues where they died, or `to` this one, and reset their
        retries. Return their number. The selection is that of `move`."""
        return await self._counted("redrive", queue, to=to, **choice)

    async def schedule(
        self,
        name: str,
        cron: str | None,
        event: str,
        data: requests.Data = None,
        *,
        timeout_s: float | None = None,
        **options: Unpack[requests.ScheduleKeywords],
    ) -> None:
        """Add a schedule, or change the one of this name: it publishes a message at each tick of
        the `cron` expression in the time zone `tz`, or, if that is None, each `every_s` seconds.
        The same schedule again changes nothing. The other options are `missed`, `jitter_s`,
        `pause`, and those of `publish` but `id`, `once` and `at`."""
        body = requests.schedule(name, cron, event, data, options)
        await self._request(body, timeout_s)

    async def pause_schedule(self, name: str, *, timeout_s: float | None = None) -> None:
        """Raises RequestFailed if there is no such schedule."""
        await self._request(requests.confirmed("schedule", name, pause=True), timeout_s)

    async def resume_schedule(self, name: str, *, timeout_s: float | None = None) -> None:
        """Ticks of the time in which it was paused are not missed. Raises RequestFailed if there is
        no such schedule."""
        await self._request(requests.confirmed("schedule", name, resume=True), timeout_s)

    async def run_schedule(self, name: str, *, timeout_s: float | None = None) -> None:
        """Publish its message now, besides the ticks; after a reconnect, perhaps twice. Raises
        RequestFailed if there is no such schedule, or the message can't be published."""
        await self._request(requests.confirmed("schedule", name, run=True), timeout_s)

    async def unschedule(self, name: str, *, timeout_s: float | None = None) -> None:
        """Remove a schedule, if there is one of this name."""
        await self._request(requests.confirmed("unschedule", name), timeout_s)

    async def schedules(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """All schedules by name, as `stats` shows them. Needs the permission to inspect the
        server."""
        return await self._rows("schedules", "name", math.inf, timeout_s)

    def batch(
        self,
        name: str | None = None,
        *,
        then: requests.Follows | None = None,
        on_dead: requests.Follows | None = None,
        for_s: float | None = None,
        timeout_s: float | None = None,
    ) -> "AsyncBatch":
        """A batch, as a context: it is opened at the beginning of the block and closed at its end,
        unless the block raises. What is published through it belongs to it. When all of that is
        acked or dead, the server publishes `then`, event and data; or `on_dead` in its place, if
        that is given and a message has died. Both may have options of `publish` as a third. After
        `for_s` seconds the batch expires. Without a `name` it has a new one."""
        if name is None:
            name = requests.decoded(self._session.new_id())
        return AsyncBatch(self, name, then, on_dead, for_s, timeout_s)

    async def open_batch(
        self,
        name: str,
        *,
        then: requests.Follows | None = None,
        on_dead: requests.Follows | None = None,
        for_s: float | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Open a batch, or set what follows one that is open already; see `batch`. Messages join it
        by `publish(…, batch=name)`. Raises RequestFailed if it is closed."""
        for body in requests.open_batch(name, then, on_dead, for_s):
            await self._request(body, timeout_s)

    async def close_batch(
        self, name: str, *, discard: bool = False, timeout_s: float | None = None
    ) -> bool:
        """Let a batch end when all of its messages are done; with `discard`, forget it, and publish
        nothing. Return whether there was one."""
        body = requests.confirmed("close_batch", name, discard=discard)
        return requests.number_told(await self._request(body, timeout_s)) > 0

    async def batch_counts(
        self, name: str, *, timeout_s: float | None = None
    ) -> dict[str, Any] | None:
        """How many messages of a batch are `waiting`, `running`, `done` and `dead`, and what else
        the server tells of it. None if there is none, as after its end."""
        try:
            return requests.stats_told(await self._request(requests.batch(name), timeout_s))  # type: ignore[no-any-return]
        except RequestFailed as failure:
            if "there is no batch" in (failure.reason or ""):
                return None
            raise

    async def batches(self, *, timeout_s: float | None = None) -> list[dict[str, Any]]:
        """All batches that have not ended by name, as `stats` shows them. Needs the permission to
        inspect the server."""
        return await self._rows("batches", "name", math.inf, timeout_s)

    async def peek(
        self,
        queue: str,
        *,
        after: int = 0,
        limit: int = 100,
        scheduled: bool = False,
        soonest: bool = False,
        timeout_s: float | None = None,
        **selection: Unpack[requests.SelectionKeywords],
    ) -> list[PeekedMessage]:
        """The first ready and unacked messages of the queue with sequence numbers above `after`;
        with `scheduled`, the scheduled ones instead; with `soonest`, which goes with `limit` alone,
        the scheduled ones that are due first, at most 1000. The selection is that of `move`.
        Nothing is consumed."""
        found: list[PeekedMessage] = []
        goes_on: int | None = after
        while goes_on is not None and len(found) < limit:
            left, lines = limit - len(found), list[bytes]()
            body = requests.peek(queue, goes_on, left, scheduled, selection, soonest=soonest)
            answer = await self._ask(partial(self._ask_lines, body, lines), timeout_s)
            page = [*map(PeekedMessage.parse, lines)]
            found += page
            seqs = [] if soonest else [each.seq for each in page]
            goes_on = requests.peek_goes_on(answer, seqs)
        if not found:
            await self.check_queue(queue, timeout_s=timeout_s)
        return found

    async def receive(
        self,
        queue: str,
        *,
        limit: int = 1,
        lease_s: float | None = None,
        wait_s: float = 0,
        timeout_s: float | None = None,
    ) -> list[PeekedMessage]:
        """Up to `limit` messages, each with a `lease` of `lease_s` seconds (by default the ack
        timeout of the queue, or 30): unless `ack_lease` comes before, it is delivered again. Nobody
        needs to stay connected meanwhile. Waits `wait_s` for the first one. Raises RequestFailed if
        there is no such queue."""
        lines = list[bytes]()
        body = requests.receive(queue, limit, lease_s, wait_s)
        await self._ask(partial(self._ask_lines, body, lines), timeout_s)
        return [*map(PeekedMessage.parse, lines)]

    async def ack_lease(self, queue: str, lease: str, *, timeout_s: float | None = None) -> bool:
        """A received message is processed; whether it was still there under this lease."""
        done = await self._counted("lease", queue, lease, ack=True, timeout_s=timeout_s)
        return done > 0

    async def extend_lease(
        self, queue: str, lease: str, for_s: float, *, timeout_s: float | None = None
    ) -> bool:
        """The lease ends so many seconds from now, earlier or later than before; whether it had not
        ended."""
        done = await self._counted("lease", queue, lease, for_s=for_s, timeout_s=timeout_s)
        return done > 0

    async def reject_lease(
        self,
        queue: str,
        lease: str,
        *,
        delay_s: float | None = None,
        dead: bool = False,
        reason: str | BaseException | None = None,
        timeout_s: float | None = None,
    ) -> bool:
        """A received message goes back, as by `reject`; whether its lease had not ended."""
        how = {"delay_s": delay_s, "dead": dead, "reason": reason, "timeout_s": timeout_s}
        return await self._counted("lease", queue, lease, reject=True, **how) > 0

    async def trim(
        self,
        queue: str,
        seq: int,
        *,
        epoch: str | None = None,
        reader: str | None = None,
        timeout_s: float | None = None,
    ) -> int:
        """Drop ready messages with sequence numbers below `seq` and return their number. With an
        `epoch`, only if the queue still has this epoch. With a `reader` of the queue, those below
        `seq` are dropped that all its readers have read."""
        told = {"epoch": epoch, "reader": reader, "timeout_s": timeout_s}
        return await self._counted("trim", queue, requests.sequence_number(seq), **told)

    async def reason(self, error_id: str, *, timeout_s: float | None = None) -> str | None:
        """The reason of an error reply; `error_id` is that of RequestFailed. None if the server no
        longer has it, or if another user made the request."""
        body = requests.reason(error_id)
        answer = await self._answer(lambda call: self._session.request(body, call), timeout_s)
        return requests.reason_told(answer)

    async def stats(self, *words: str, timeout_s: float | None = None) -> Any:
        """What `stats` with these words replies, as Python's values of its JSON: `stats()` has the
        totals of the server, `stats("queues")` a list of its first queues, `stats("queue", name)`
        one of them. Needs the permission to inspect the server."""
        return requests.stats_told(await self._request(requests.request("stats", words), timeout_s))

    async def ping(self, data: str = "", *, timeout_s: float | None = None) -> str:
        """Return the data, which the server sends back."""
        answer = await self._request(b"ping " + requests.payload(data), timeout_s)
        return requests.decoded(answer)

    async def evaluate(self, expression: str, *, timeout_s: float | None = None) -> str:
        """The value of an expression over the `state` of the broker: a string unchanged, any other
        value as JSON."""
        answer = await self._request(b"_eval " + requests.payload(expression), timeout_s)
        return requests.decoded(answer)

    async def request(self, action: str, *arguments: str, timeout_s: float | None = None) -> str:
        """Send any action with its arguments and flags as in the protocol. Return the reply without
        `{request_id} ok`.

        The action must have a reply of one line: pass `--confirm` to an action that otherwise has
        no reply, and only to such an action. Arguments are not checked. After a reconnect the
        request is sent again.
        """
        return requests.decoded(await self._request(requests.request(action, arguments), timeout_s))


@strict("receive")
class AsyncMessages(Messages):
    """A consumer or a tail, for `async with`, then `async for`.

    Several tasks may iterate at once; each message goes to one of them. The iteration ends after
    `stop`. It raises ConnectionLost if the client is closed, and RequestFailed if the server
    refuses to start it again after a reconnect.
    """

    _client: AsyncClient
    _end = StopAsyncIteration

    def __getattr__(self, name: str) -> Any:
        if name in ("_session", "_connection"):
            raise RuntimeError(
                "the consumer is not started: write `async with client.consume(…) as consumer:`"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    async def __aenter__(self) -> Self:
        self._connect()
        await self._client._start(self._connection)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        await self._client._leave(self._connection)

    async def _filled(self, timeout_s: float | None) -> None:
        """Wait for messages. Raises StopAsyncIteration after `stop`, and TimeoutError."""
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        try:
            while not self._is_filled():
                left_s = None if timeout_s is None else max(0.0, ends_s - time.monotonic())
                if not await self._connection.arrival(self._has_news, left_s):
                    raise TimeoutError(f"no message within {timeout_s} s")
        except RequestFailed as failure:
            await self._client._explain(failure)
            raise

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
                message = session.ready.popleft()
            except IndexError:  # Another thread was faster.
                continue
            if self._tracing is not None:
                self._tracing.consumed(self.queue, 1)
            return message

    async def receive(self, timeout_s: float | None = None) -> Message:
        """Return the next message. Raises TimeoutError after `timeout_s` seconds without a message,
        and Stopped after `stop`."""
        try:
            return await self._next(timeout_s)
        except StopAsyncIteration:
            raise Stopped("the consumer was stopped") from None

    async def batches(
        self, count_max: int | None = None, timeout_s: float | None = None
    ) -> AsyncIterator[list[Message]]:
        """Yield batches of all messages received so far: at least one, at most `count_max`.

        Raises TimeoutError after `timeout_s` seconds without a message."""
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
                if self._tracing is not None:
                    self._tracing.consumed(self.queue, len(batch))
                yield batch


@strict()
class AsyncJob:
    """A message whose end is known. `submit` and `job` create it."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self.id = id
        self._client = client
        self._loads: Callable[[bytes], Any] = client._options.json_loads or json.loads

    async def state(self, wait_s: float = 0, *, timeout_s: float | None = None) -> JobState:
        """What has become of it; with `wait_s`, at most 60, not before its end or this time."""
        body = b" ".join(
            [b"result", requests.name(self.id), *requests.flags("result", {"wait_s": wait_s})]
        )
        if timeout_s is None:
            timeout_s = wait_s + self._client._options.timeout_s
        return JobState.parse(await self._client._request(body, timeout_s))

    async def progress(self, *, timeout_s: float | None = None) -> int | None:
        """In percent, as its consumer has told it last; None if it has not."""
        return (await self.state(timeout_s=timeout_s)).progress

    async def result(self, timeout_s: float | None = None) -> Any:
        """Wait for its end, and return its result, read from JSON; None if it was acked without
        one. Raises NoResult if it has ended otherwise, and ReplyTimeout if it has not."""
        ends_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, ends_s - time.monotonic())
            told = await self.state(min(JOB_WAIT_S, left_s))
            if told.state == "done":
                return None if told.data is None else self._loads(told.data)
            if told.has_ended:
                raise NoResult(self.id, told.state, told.reason)
            if not left_s:
                raise ReplyTimeout(f"the job {self.id} has not ended in {timeout_s} s")

    async def cancel(self, reason: str | None = None, *, timeout_s: float | None = None) -> str:
        """Cancel it, see `cancel_job` of the client."""
        told = await self.state(timeout_s=timeout_s)
        if told.queue is None or told.has_ended:
            return "none"
        client = self._client
        return await client.cancel_job(told.queue, self.id, reason=reason, timeout_s=timeout_s)

    def __repr__(self) -> str:
        return f"<AsyncJob {self.id}>"


class AsyncTransaction(Step):
    """See `AsyncClient.transaction`."""

    _client: AsyncClient

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        client, lines = self._client, self._lines
        try:
            if kind is None and lines:
                await client._ask(
                    lambda call: client._session.transact(lines, call), self._timeout_s
                )
        except BaseException:
            self._undo()
            raise
        if kind is not None:
            self._undo()


class AsyncBatch:
    """See `AsyncClient.batch`."""

    def __init__(
        self,
        client: AsyncClient,
        name: str,
        then: requests.Follows | None,
        on_dead: requests.Follows | None,
        for_s: float | None,
        timeout_s: float | None,
    ) -> None:
        self.name = name
        self._client = client
        self._then, self._on_dead, self._for_s = then, on_dead, for_s
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        follows: dict[str, Any] = {"then": self._then, "on_dead": self._on_dead}
        client, timeout_s = self._client, self._timeout_s
        await client.open_batch(self.name, for_s=self._for_s, timeout_s=timeout_s, **follows)
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            await self._client.close_batch(self.name, timeout_s=self._timeout_s)

    async def publish(
        self, event: str, data: requests.Data, *, confirm: bool = True, **options: Any
    ) -> str:
        """Publish a message of the batch, as `AsyncClient.publish` does, by default confirmed:
        nobody would miss one that is lost."""
        options["batch"] = self.name
        return await self._client.publish(event, data, confirm=confirm, **options)

    async def publish_many(
        self, messages: Iterable[tuple[str, requests.Data]], **options: Unpack[requests.Many]
    ) -> int:
        """Publish many messages of the batch, as `AsyncClient.publish_many`."""
        options["batch"] = self.name
        return await self._client.publish_many(messages, **options)

    async def counts(self) -> dict[str, Any] | None:
        """See `AsyncClient.batch_counts`."""
        return await self._client.batch_counts(self.name, timeout_s=self._timeout_s)


@strict()
class AsyncConsumer(ClientConsumer, AsyncMessages):
    """A consumer. `consume` creates it."""

    async def rebind(
        self, *, timeout_s: float | None = None, **changes: Unpack[requests.Changes]
    ) -> None:
        """Change the bindings of the consumer's queue, as `AsyncClient.rebind` does."""
        await self._client.rebind(self.queue, timeout_s=timeout_s, **changes)

    async def _narrow(self, prefetch: int) -> None:
        """Change the prefetch; what was delivered before that, and not received, is released."""
        answered = OneTimeEvent()
        with self._connection.lock:
            self._session.set_prefetch(prefetch)
            self._session.request(b"ping -", Call(answered.set))
        await answered.wait(self._client._options.close_timeout_s, shield=True)
        with self._connection.lock:
            for message in self._session.take_ready(None):
                message.release()


class AsyncTail(Tail, AsyncMessages):
    """A tail. `tail` creates it."""


AsyncClient._kinds = AsyncConsumer, AsyncTail, AsyncTransaction


@checking
def connect(
    url: urls.Urls | None = None, options: Options | None = None, *, client_name: str | None = None
) -> AsyncClient:
    """A client for `async with`, which waits until it is connected.

    The default url is the value of MQKS_URL, or mqks://127.0.0.1:25000 if that is not set. It may
    be a list, or have commas: then it is the active one of several servers that is found. The
    server shows the `client_name` in its log and in `mqks inspect connections`; a name in the url
    takes precedence. Raises ConfigurationError. Entering the client raises AuthenticationFailed, or
    ConnectionLost after `connect_timeout_s`.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options must be mqks.Options(…), not {options!r}")
    return AsyncClient(url, named(options or Options(), client_name))
