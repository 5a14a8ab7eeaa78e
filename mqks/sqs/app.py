"""The actions of SQS.

The one rule: an action is one entry of a table, for both protocols.
"""

import base64
import binascii
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from socket import socket
from time import monotonic, time, time_ns
from typing import Any, Final, Protocol
from uuid import uuid4

import anyio
from anyio.abc import TaskStatus
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from mqks.api.bodies import Bodies
from mqks.api.clients import TIMEOUT_S, Clients, Credentials
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError, InvalidRequest, RequestFailed
from mqks.client.messages import PeekedMessage
from mqks.limits import (
    SQS_CONNECTIONS_MAX,
    SQS_LINE_BYTES_MAX,
    SQS_QUEUES_MAX,
    SQS_RECENT_MAX,
    SQS_REQUEST_BYTES_MAX,
)
from mqks.sqs import messages, queues, wire
from mqks.sqs.errors import SqsError, invalid, missing, no_queue, refused
from mqks.sqs.queues import OWN, Queue
from mqks.sqs.signatures import verified
from mqks.sqs.tasks import MoveTasks
from mqks.users import Known, Users

BATCH_MAX: Final = 10
BATCH_BYTES_MAX: Final = 1024 * 1024
DEDUPLICATION_S: Final = 300.0
KNOWN_S: Final = 1.0
"""How long the attributes of a queue are not asked for again."""
LARGE_BYTES: Final = 64 * 1024
"""A longer body is parsed in a thread."""
PAGE_ROWS: Final = 1000
REGION: Final = "us-east-1"
_BATCH_ID: Final = r"[A-Za-z0-9_-]{1,80}"

Failed = Callable[[Request, Exception], Awaitable[Response]]
Told = dict[str, Any]


class OpenInside(Protocol):
    """Connects to the broker; a `trusted` connection may do everything, or what `user` may."""

    async def __call__(
        self, name: str, trusted: bool, user: Known | None = None, line_bytes_max: int = 0
    ) -> socket: ...


@dataclass(slots=True)
class Ask:
    """A request: who sent it, where, and what it has."""

    credentials: Credentials
    base: str
    """The begin of URLs of queues."""
    region: str
    given: Told
    is_gone: Callable[[], Awaitable[bool]]

    def number(self, name: str, low: int, high: int) -> int | None:
        return number(self.given, name, low, high)


def number(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A number that may be missing, as JSON or text. Raises SqsError."""
    value = given.get(name)
    if value is None:
        return None
    text = str(value)
    digits = text.removeprefix("-")
    if isinstance(value, bool) or not digits.isdecimal() or len(digits) > 18:
        raise invalid(name, value, "Must be a number.")
    if not low <= int(text) <= high:
        raise invalid(name, value, f"Must be between {low} and {high}, if provided.")
    return int(text)


class Sqs:
    """`users` are those who may sign requests; `with_users` says that everybody must."""

    def __init__(
        self,
        open_inside: OpenInside,
        users: Callable[[], Users],
        *,
        with_users: bool,
        line_bytes_max: int,
    ) -> None:
        self._users = users
        self._with_users = with_users
        line_bytes_max = max(line_bytes_max, SQS_LINE_BYTES_MAX)

        async def open_as(name: str, credentials: Credentials) -> socket:
            user = users().get(credentials[0]) if credentials else None
            if credentials and user is None:
                raise ConnectionRefusedError("the user was removed")
            return await open_inside(name, True, user, line_bytes_max)

        self._clients = Clients(
            open_as, line_bytes_max, "sqs", logs_in=False, waits_max=SQS_CONNECTIONS_MAX
        )
        self._bodies = Bodies(SQS_REQUEST_BYTES_MAX, "the request is longer than 4 MiB")
        self._queues: OrderedDict[str, tuple[float, Queue]] = OrderedDict()
        """Until when an answer of the broker counts, and the answer."""
        self._first: OrderedDict[str, float] = OrderedDict()
        """When a message was received first, by its lease without its deliveries."""
        self._sent: OrderedDict[tuple[Credentials, str], tuple[float, str]] = OrderedDict()
        """Until when a message would be a duplicate, and its sequence number."""
        self._sending: dict[tuple[Credentials, str], anyio.Event] = {}
        self._last_sequence = 0
        self._changes = anyio.Lock()
        self._tasks = MoveTasks(self._clients.of)

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as tasks:
            await tasks.start(self._clients.run)
            await self._tasks.run(task_status=task_status)

    def app(self, failed: Failed) -> Starlette:
        """`failed` answers after an exception that nobody expects."""
        return Starlette(
            routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])],
            exception_handlers={ClientDisconnect: _gone, Exception: failed},
        )

    async def _answer(self, request: Request) -> Response:
        request_id, is_json = str(uuid4()), "x-amz-target" in request.headers
        try:
            with self._bodies.room(request):
                body = await self._bodies.read(request)
                read = partial(self._read, request, body)
                is_large = len(body) > LARGE_BYTES
                user, call = await anyio.to_thread.run_sync(read) if is_large else read()
                del body
                action = ACTIONS.get(call.action)
                if action is None:
                    code = "UnknownOperationException" if is_json else "InvalidAction"
                    raise SqsError(code, f"The action {call.action!s:.100} is not valid.")
                credentials = (user.name,) if user else ()
                base = f"{request.url.scheme}://{request.headers.get('host', 'localhost')}"
                ask = Ask(credentials, base, _region(request), call.given, request.is_disconnected)
                if call.action != "ReceiveMessage":
                    told = await action(self, ask)
            if call.action == "ReceiveMessage":
                told = await action(self, ask)
            content, kind = wire.answered(call, told or {}, request_id)
            status, headers = 200, {}
        except (SqsError, ClientError, HTTPException) as failure:
            error = _as_error(failure)
            content, kind = wire.failed(error, is_json, request_id)
            fault = "Sender" if error.is_senders else "Receiver"
            status, headers = error.status, {"x-amzn-query-error": f"{error.query_code};{fault}"}
        headers["x-amzn-requestid"] = request_id
        return Response(content, status, headers, kind)

    def _read(self, request: Request, body: bytes) -> tuple[Known | None, wire.Call]:
        """Who sent a request, and what it asks for. Raises SqsError."""
        query = request.scope["query_string"].decode("latin-1")
        path = request.scope["raw_path"].decode("latin-1")
        user = None
        if self._with_users:
            find, headers = self._users().by_access_key, request.headers.items()
            now = datetime.now(UTC)
            user = verified(request.method, path, query, headers, body, find, now)
        target = request.headers.get("x-amz-target", "")
        return user, wire.parse(target, query, body, path)

    # -- queues

    def _client(self, ask: Ask) -> AbstractAsyncContextManager[AsyncClient]:
        return self._clients.of(ask.credentials)

    async def _queue(self, name: str, *, is_new: bool = False) -> Queue:
        """What the broker tells about a queue, also to whoever may not ask. Raises SqsError."""
        until_s, queue = self._queues.get(name, (0.0, None))
        if queue is not None and not is_new and monotonic() < until_s:
            return queue
        async with self._clients.of(()) as client:
            try:
                queue = Queue.of(await client.stats("queue", name, "--limit=1"))
            except (InvalidRequest, RequestFailed) as failure:
                self._queues.pop(name, None)
                if isinstance(failure, RequestFailed) and "no queue" not in str(failure.reason):
                    raise
                raise no_queue() from None
        _kept(self._queues, name, (monotonic() + KNOWN_S, queue), SQS_QUEUES_MAX)
        return queue

    async def _of(self, ask: Ask, *, is_new: bool = False) -> Queue:
        """The queue of a request. Raises SqsError."""
        return await self._queue(queues.of_url(ask.given.get("QueueUrl")), is_new=is_new)

    async def _seen(self, ask: Ask, name: str = "") -> Queue:
        """The same if the user may read it."""
        queue = await (self._queue(name, is_new=True) if name else self._of(ask, is_new=True))
        async with self._client(ask) as client:
            await client.request("range", queue.name)
        return queue

    async def _set(self, ask: Ask, name: str, policy: Any) -> None:
        self._queues.pop(name, None)
        async with self._client(ask) as client:
            await client.set_queue(name, **policy)
        self._queues.pop(name, None)

    async def create_queue(self, ask: Ask) -> Told:
        given = ask.given.get("Attributes") or {}
        tags = queues.check_tags(ask.given.get("tags") or ask.given.get("Tags") or {})
        name = queues.check_name(ask.given.get("QueueName"), given)
        attributes = queues.check(given, is_fifo=name.endswith(queues.FIFO))
        async with self._changes:
            try:
                queue = await self._seen(ask, name)
            except SqsError:
                await self._check_redrive(name, attributes)
                defaults = {
                    "MessageRetentionPeriod": str(queues.RANGES["MessageRetentionPeriod"][2])
                }
                await self._set(ask, name, queues.changed(defaults | attributes, tags))
            else:
                present = queue.attributes(ask.region)
                for each, text in attributes.items():
                    if text != present.get(each, ""):
                        raise SqsError(
                            "QueueNameExists",
                            "A queue already exists with the same name and a "
                            f"different value for attribute {each}",
                        )
        return {"QueueUrl": queues.url(ask.base, name)}

    async def _check_redrive(self, name: str, attributes: Mapping[str, str]) -> None:
        if text := attributes.get("RedrivePolicy"):
            try:
                target = await self._queue(queues.redrive(text)[0], is_new=True)
            except SqsError as failure:
                if failure.code != "QueueDoesNotExist":
                    raise
                reason = "Dead letter target does not exist."
                raise invalid("RedrivePolicy", text, reason) from None
            if target.is_fifo != name.endswith(queues.FIFO):
                reason = "Dead-letter queue must be same type of queue as the source."
                raise invalid("RedrivePolicy", text, reason)
            if not queues.admits(target, name):
                reason = "The redrive allow policy of the dead-letter queue does not allow it."
                raise invalid("RedrivePolicy", text, reason)

    async def delete_queue(self, ask: Ask) -> None:
        queue = await self._of(ask, is_new=True)
        async with self._client(ask) as client:
            await client.delete_queue(queue.name)
        self._queues.pop(queue.name, None)

    async def get_queue_url(self, ask: Ask) -> Told:
        name = ask.given.get("QueueName")
        if not isinstance(name, str) or not name:
            raise missing("QueueName")
        return {"QueueUrl": queues.url(ask.base, (await self._seen(ask, name)).name)}

    async def list_queues(self, ask: Ask) -> Told:
        prefix = str(ask.given.get("QueueNamePrefix") or "")
        return await self._listed(
            ask, "QueueUrls", prefix, lambda row: row["name"].startswith(prefix)
        )

    async def list_dead_letter_source_queues(self, ask: Ask) -> Told:
        name = (await self._seen(ask)).name
        return await self._listed(ask, "queueUrls", "", lambda row: row["dead_letters"] == name)

    async def _listed(
        self, ask: Ask, key: str, prefix: str, is_wanted: Callable[[Told], bool]
    ) -> Told:
        """URLs of queues that the user may read, in order of names from this prefix on."""
        most, after = ask.number("MaxResults", 1, PAGE_ROWS), _token(ask.given.get("NextToken"))
        found: list[str] = []
        if prefix and not after:  # The last of those before it, about.
            after = prefix[:-1] + chr(max(ord(prefix[-1]) - 1, 33)) + "\x7f"
        user = self._users().get(ask.credentials[0]) if ask.credentials else None
        async with self._clients.of(()) as client:
            rows: list[Told] = [{}]
            while rows and len(found) <= (most or PAGE_ROWS):
                words = [f"--after={after}"] if after else []
                rows = await client.stats("queues", f"--limit={PAGE_ROWS}", *words)
                found += [
                    row["name"]
                    for row in rows
                    if is_wanted(row)
                    and (user is None or user.permissions.may_read(_raw(row["name"])))
                ]
                after = rows[-1]["name"] if rows else ""
                if prefix and not after[: len(prefix)] <= prefix:
                    break
        some = found[: most or PAGE_ROWS]
        told: Told = {key: [queues.url(ask.base, name) for name in some]} if some else {}
        if most and len(found) > most:
            told["NextToken"] = base64.urlsafe_b64encode(_raw(some[-1])).decode()
        return told

    async def get_queue_attributes(self, ask: Ask) -> Told:
        wanted = ask.given.get("AttributeNames") or []
        if unknown := [name for name in wanted if name not in queues.KNOWN and name != "All"]:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {unknown[0]!s:.100}.")
        told = (await self._seen(ask)).attributes(ask.region)
        if "All" not in wanted:
            told = {name: told[name] for name in wanted if name in told}
        return {"Attributes": told} if told else {}

    async def set_queue_attributes(self, ask: Ask) -> None:
        async with self._changes:
            queue = await self._of(ask, is_new=True)
            given = ask.given.get("Attributes") or {}
            attributes = queues.check(given, is_fifo=queue.is_fifo)
            await self._check_redrive(queue.name, attributes)
            await self._set(ask, queue.name, queues.changed(attributes, queue.labels))

    async def tag_queue(self, ask: Ask) -> None:
        async with self._changes:
            queue = await self._of(ask, is_new=True)
            given = ask.given.get("Tags")
            if not given:
                raise missing("Tags")
            tags = queues.check_tags(given, len(queue.tags.keys() - given))
            await self._set(ask, queue.name, {"labels": queues.encoded({**queue.labels, **tags})})

    async def untag_queue(self, ask: Ask) -> None:
        async with self._changes:
            queue = await self._of(ask, is_new=True)
            gone = ask.given.get("TagKeys")
            if not gone:
                raise missing("TagKeys")
            left = {k: v for k, v in queue.labels.items() if k not in gone or k.startswith(OWN)}
            await self._set(ask, queue.name, {"labels": queues.encoded(left) or None})

    async def list_queue_tags(self, ask: Ask) -> Told:
        tags = (await self._seen(ask)).tags
        return {"Tags": tags} if tags else {}

    async def purge_queue(self, ask: Ask) -> None:
        queue = await self._of(ask, is_new=True)
        async with self._client(ask) as client:
            await client.purge(queue.name, scheduled=True)

    async def refuse_permission(self, ask: Ask) -> None:
        raise SqsError("UnsupportedOperation", queues.NO_POLICY)

    # -- messages

    async def send_message(self, ask: Ask) -> Told:
        return await self._send(ask, await self._of(ask), ask.given)

    async def _send(self, ask: Ask, queue: Queue, given: Mapping[str, Any]) -> Told:
        delay_s = number(given, "DelaySeconds", 0, queues.RANGES["DelaySeconds"][1])
        message = messages.outgoing(queue, given, delay_s)
        async with self._client(ask) as client:
            if not message.deduplicates:
                if message.group is not None and queue.policy.get("fair") is None:
                    await self._set(ask, queue.name, {"fair": "key"})
                await self._publish(client, queue, message)
                return message.told
            key = ask.credentials, message.message_id
            while key in self._sending:
                await self._sending[key].wait()
            until_s, sequence = self._sent.get(key, (0.0, ""))
            if monotonic() >= until_s:
                self._last_sequence = max(self._last_sequence + 1, time_ns())
                sequence = f"{self._last_sequence:020}"
            message = messages.sequenced(message, sequence)
            sent = self._sending[key] = anyio.Event()
            began_s = monotonic()
            try:
                await self._publish(client, queue, message, once_s=DEDUPLICATION_S)
            finally:
                del self._sending[key]
                sent.set()
            if began_s >= until_s:
                _kept(self._sent, key, (began_s + DEDUPLICATION_S, sequence), SQS_RECENT_MAX)
            return message.told

    async def _publish(
        self,
        client: AsyncClient,
        queue: Queue,
        message: messages.Outgoing,
        once_s: float | None = None,
    ) -> None:
        await client.publish(
            queue.name,
            message.body,
            confirm=True,
            id=message.message_id,
            to=queue.name,
            delay_s=message.delay_s,
            meta=message.meta,
            key=message.group,
            once_s=once_s,
        )

    async def send_message_batch(self, ask: Ask) -> Told:
        queue = await self._of(ask)
        entries = _entries(ask)
        if sum(len(str(each.get("MessageBody"))) for each in entries) > BATCH_BYTES_MAX:
            reason = f"Batch requests cannot be longer than {BATCH_BYTES_MAX} bytes."
            raise SqsError("BatchRequestTooLong", reason)
        groups: dict[Any, list[Told]] = {}
        for at, entry in enumerate(entries):
            groups.setdefault(str(entry.get("MessageGroupId")) if queue.is_fifo else at, []).append(
                entry
            )
        return await _batch(entries, [*groups.values()], partial(self._send, ask, queue))

    async def receive_message(self, ask: Ask) -> Told:
        queue = await self._of(ask)
        limit = ask.number("MaxNumberOfMessages", 1, BATCH_MAX) or 1
        lease_s = ask.number("VisibilityTimeout", 0, queues.RANGES["VisibilityTimeout"][1])
        wait_s = ask.number("WaitTimeSeconds", 0, 20)
        if wait_s is None:
            wait_s = queue.number("ReceiveMessageWaitTimeSeconds")
        async with self._client(ask) as client:
            timeout_s = wait_s + TIMEOUT_S
            found = await client.receive(
                queue.name, limit=limit, lease_s=lease_s, wait_s=wait_s, timeout_s=timeout_s
            )
            if wait_s and found and await ask.is_gone():
                for each in found:
                    await client.extend_lease(queue.name, each.lease or "", 0)
        told = [self._incoming(ask, queue, each) for each in found]
        return {"Messages": told} if told else {}

    def _incoming(self, ask: Ask, queue: Queue, message: PeekedMessage) -> Told:
        lease = message.lease or ""
        which = lease.rpartition(".")[0]
        first_s = self._first.get(which) or (message.time if message.retry else time())
        if not message.retry:
            _kept(self._first, which, first_s, SQS_RECENT_MAX)
        names = [*(ask.given.get("AttributeNames") or ())]
        names += ask.given.get("MessageSystemAttributeNames") or ()
        handle = base64.urlsafe_b64encode(_raw(f"{queue.name} {lease}")).decode()
        letter = message.dead_letter
        return messages.incoming(
            message,
            handle,
            first_s,
            names,
            ask.given.get("MessageAttributeNames") or (),
            queues.arn(ask.region, letter.queue) if letter else None,
            queues.ACCOUNT,
        )

    async def delete_message(self, ask: Ask) -> None:
        await self._delete(ask, await self._of(ask), ask.given)

    async def delete_message_batch(self, ask: Ask) -> Told:
        queue, entries = await self._of(ask), _entries(ask)
        return await _batch(
            entries, [[each] for each in entries], partial(self._delete, ask, queue)
        )

    async def _delete(self, ask: Ask, queue: Queue, given: Mapping[str, Any]) -> None:
        lease = _lease(queue, given)
        async with self._client(ask) as client:
            await client.ack_lease(queue.name, lease)

    async def change_message_visibility(self, ask: Ask) -> None:
        await self._change(ask, await self._of(ask), ask.given)

    async def change_message_visibility_batch(self, ask: Ask) -> Told:
        queue, entries = await self._of(ask), _entries(ask)
        return await _batch(
            entries, [[each] for each in entries], partial(self._change, ask, queue)
        )

    async def _change(self, ask: Ask, queue: Queue, given: Mapping[str, Any]) -> None:
        for_s = number(given, "VisibilityTimeout", 0, queues.RANGES["VisibilityTimeout"][1])
        if for_s is None:
            raise missing("VisibilityTimeout")
        lease = _lease(queue, given)
        async with self._client(ask) as client:
            if not await client.extend_lease(queue.name, lease, for_s):
                reason = "Message does not exist or is not available for visibility timeout change."
                raise invalid("ReceiptHandle", given["ReceiptHandle"], reason)

    # -- dead letters

    async def start_message_move_task(self, ask: Ask) -> Told:
        source = await self._task_source(ask)
        rate = ask.number("MaxNumberOfMessagesPerSecond", 1, 500)
        target, told = None, ask.given.get("DestinationArn")
        if told:
            target = (await self._arn(ask, told, "DestinationArn")).name
        sources = await self.list_dead_letter_source_queues(
            Ask(ask.credentials, ask.base, ask.region, {"QueueUrl": source.name}, ask.is_gone)
        )
        if not sources:
            reason = "Source queue must be configured as a Dead Letter Queue."
            raise SqsError("InvalidParameterValue", reason)
        return self._tasks.start(
            ask.credentials, ask.given["SourceArn"], source, target, told, rate
        )

    async def list_message_move_tasks(self, ask: Ask) -> Told:
        source = await self._task_source(ask)
        return {"Results": self._tasks.listed(source.name, ask.number("MaxResults", 1, 10) or 1)}

    async def cancel_message_move_task(self, ask: Ask) -> Told:
        arn, task_id = self._tasks.of_handle(ask.given.get("TaskHandle"))
        source = await self._arn(ask, arn, "TaskHandle")
        return self._tasks.cancel(source.name, task_id)

    async def _task_source(self, ask: Ask) -> Queue:
        if not ask.given.get("SourceArn"):
            raise missing("SourceArn")
        return await self._arn(ask, ask.given["SourceArn"], "SourceArn")

    async def _arn(self, ask: Ask, arn: object, parameter: str) -> Queue:
        try:
            return await self._seen(ask, queues.of_arn(arn, parameter))
        except SqsError as failure:
            if failure.code != "QueueDoesNotExist":
                raise
            reason = "The resource that you specified for the SourceArn parameter doesn't exist."
            reason = reason.replace("SourceArn", parameter)
            raise SqsError("ResourceNotFoundException", reason, 404) from None


def _as_error(failure: Exception) -> SqsError:
    if isinstance(failure, SqsError):
        return failure
    if isinstance(failure, HTTPException):
        code = "RequestEntityTooLarge" if failure.status_code == 413 else "ServiceUnavailable"
        return SqsError(code, failure.detail, failure.status_code)
    reason = failure.reason if isinstance(failure, RequestFailed) else None
    return refused(reason or str(failure))


def _kept(known: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    known[key] = value
    known.move_to_end(key)
    if len(known) > most:
        known.popitem(last=False)


def _raw(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")


def _token(told: object) -> str:
    if not told:
        return ""
    try:
        return base64.urlsafe_b64decode(str(told)).decode("utf-8", "surrogateescape")
    except (ValueError, binascii.Error):
        raise invalid("NextToken", told, "Not a token.") from None


def _region(request: Request) -> str:
    """That of the signature, which names resources and has no other meaning."""
    parts = request.headers.get("authorization", "").split("/")
    return parts[2] if len(parts) > 3 and parts[2].replace("-", "").isalnum() else REGION


def _lease(queue: Queue, given: Mapping[str, Any]) -> str:
    handle = given.get("ReceiptHandle")
    if not isinstance(handle, str) or not handle:
        raise missing("ReceiptHandle")
    try:
        told = base64.urlsafe_b64decode(handle.encode()).decode("utf-8", "surrogateescape")
    except ValueError:
        told = ""
    name, _, lease = told.partition(" ")
    if name != queue.name or not lease or " " in lease:
        raise SqsError("ReceiptHandleIsInvalid", "The input receipt handle is invalid.", 404)
    return lease


def _entries(ask: Ask) -> list[Told]:
    """The entries of a batch. Raises SqsError."""
    entries = ask.given.get("Entries")
    if (
        not isinstance(entries, list)
        or not entries
        or not all(isinstance(e, dict) for e in entries)
    ):
        raise SqsError("EmptyBatchRequest", "There should be at least one entry in the request.")
    if len(entries) > BATCH_MAX:
        reason = (
            f"Maximum number of entries per request are {BATCH_MAX}. You have sent {len(entries)}."
        )
        raise SqsError("TooManyEntriesInBatchRequest", reason)
    ids = [str(each.get("Id", "")) for each in entries]
    for each in ids:
        if (
            not each.replace("-", "").replace("_", "").isalnum()
            or len(each) > 80
            or not each.isascii()
        ):
            raise SqsError(
                "InvalidBatchEntryId",
                "A batch entry id can only contain alphanumeric characters, "
                "hyphens and underscores. It can be at most 80 letters long.",
            )
    if repeated := next((each for at, each in enumerate(ids) if each in ids[:at]), None):
        raise SqsError("BatchEntryIdsNotDistinct", f"Id {repeated} repeated.")
    return entries


async def _batch(
    entries: list[Told], groups: list[list[Told]], do: Callable[[Told], Awaitable[Told | None]]
) -> Told:
    """Each group in its order, all at the same time."""
    done: dict[str, Told] = {}
    failures: dict[str, Told] = {}

    async def do_all(group: list[Told]) -> None:
        for entry in group:
            key = str(entry["Id"])
            try:
                done[key] = {"Id": key, **(await do(entry) or {})}
            except (SqsError, ClientError) as failure:
                error = _as_error(failure)
                told = {"Code": error.query_code, "Message": error.message}
                failures[key] = {"Id": key, "SenderFault": error.is_senders, **told}

    async with anyio.create_task_group() as tasks:
        for group in groups:
            tasks.start_soon(do_all, group)
    ids = [str(entry["Id"]) for entry in entries]
    told = {
        "Successful": [done[each] for each in ids if each in done],
        "Failed": [failures[each] for each in ids if each in failures],
    }
    return {key: value for key, value in told.items() if value or key == "Successful"}


async def _gone(request: Request, failure: Exception) -> Response:
    """Nobody reads it."""
    return Response(status_code=400)


ACTIONS: Final[dict[str, Callable[[Sqs, Ask], Awaitable[Told | None]]]] = {
    "AddPermission": Sqs.refuse_permission,
    "CancelMessageMoveTask": Sqs.cancel_message_move_task,
    "ChangeMessageVisibility": Sqs.change_message_visibility,
    "ChangeMessageVisibilityBatch": Sqs.change_message_visibility_batch,
    "CreateQueue": Sqs.create_queue,
    "DeleteMessage": Sqs.delete_message,
    "DeleteMessageBatch": Sqs.delete_message_batch,
    "DeleteQueue": Sqs.delete_queue,
    "GetQueueAttributes": Sqs.get_queue_attributes,
    "GetQueueUrl": Sqs.get_queue_url,
    "ListDeadLetterSourceQueues": Sqs.list_dead_letter_source_queues,
    "ListMessageMoveTasks": Sqs.list_message_move_tasks,
    "ListQueueTags": Sqs.list_queue_tags,
    "ListQueues": Sqs.list_queues,
    "PurgeQueue": Sqs.purge_queue,
    "ReceiveMessage": Sqs.receive_message,
    "RemovePermission": Sqs.refuse_permission,
    "SendMessage": Sqs.send_message,
    "SendMessageBatch": Sqs.send_message_batch,
    "SetQueueAttributes": Sqs.set_queue_attributes,
    "StartMessageMoveTask": Sqs.start_message_move_task,
    "TagQueue": Sqs.tag_queue,
    "UntagQueue": Sqs.untag_queue,
}
