"""The actions of SQS.

The one rule: an action is one method of `Actions`, for both protocols: `send_message` is
`SendMessage`. It takes what the JSON protocol has, and returns the answer.
"""

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from time import time
from typing import Any, Final

import anyio

from mqks.api.clients import TIMEOUT_S
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError, RequestFailed
from mqks.client.requests import encoded
from mqks.sqs import messages, policies, queues
from mqks.sqs.errors import SqsError, invalid, missing, wrong
from mqks.sqs.known import DEDUPLICATION_S, KnownQueues
from mqks.sqs.queues import OWN, RANGES, SqsQueue
from mqks.sqs.tasks import source_of
from mqks.users import Permissions

BATCH_MAX: Final = 10
BATCH_BYTES_MAX: Final = 1024 * 1024
PAGE_ROWS: Final = 1000
MOVE_TASK: Final = f"{OWN}move-task"
_BATCH_ID: Final = re.compile("[A-Za-z0-9_-]{1,80}")
Told = dict[str, Any]


@dataclass(slots=True)
class Actions:
    """One request: what it has, and what it needs. `open_client` gives the client of its user,
    `permissions` says what that one may see."""

    action: str
    given: Told
    base: str
    """The begin of URLs of queues."""
    region: str
    known: KnownQueues
    open_client: Callable[[], AbstractAsyncContextManager[AsyncClient]]
    permissions: Permissions
    user: str
    is_gone: Callable[[], Awaitable[bool]]

    # -- queues

    async def create_queue(self) -> Told:
        given = self.given.get("Attributes", {})
        is_fifo = str(given.get("FifoQueue")).lower() == "true"
        name = queues.check_name(self.given.get("QueueName"), is_fifo=is_fifo)
        attributes = queues.check(given, is_fifo=is_fifo)
        tags = queues.check_tags(self.given.get("tags", self.given.get("Tags", {})), name, {})
        self._check_readable(name)
        async with self.known.changes:
            if await self.known.exists(name):
                present = (await self._seen(name)).attributes(self.region)
                for each, text in attributes.items():
                    if text != present.get(each, ""):
                        reason = "A queue already exists with the same name and a different value"
                        raise SqsError("QueueNameExists", f"{reason} for attribute {each}")
            else:
                await self._check_redrive(name, attributes)
                retention = RANGES["MessageRetentionPeriod"][2]
                attributes = {"MessageRetentionPeriod": str(retention), **attributes}
                await self._set(name, queues.changed(attributes, tags))
        return {"QueueUrl": queues.url(self.base, name)}

    async def delete_queue(self) -> None:
        queue = await self._queue(is_fresh=True)
        async with self.open_client() as client:
            await client.delete_queue(queue.name)
        self.known.forget(queue.name)

    async def get_queue_url(self) -> Told:
        queue = await self._seen(self._needed("QueueName"))
        return {"QueueUrl": queues.url(self.base, queue.name)}

    async def list_queues(self) -> Told:
        prefix = str(self.given.get("QueueNamePrefix", ""))
        return await self._listed("QueueUrls", prefix, lambda row: True)

    async def list_dead_letter_source_queues(self) -> Told:
        name = (await self._seen()).name
        return await self._listed("queueUrls", "", lambda row: row["dead_letters"] == name)

    async def get_queue_attributes(self) -> Told:
        wanted = self.given.get("AttributeNames", [])
        if unknown := [*filter(lambda name: name not in queues.KNOWN, wanted)]:
            raise SqsError("InvalidAttributeName", f"Unknown Attribute {unknown[0]:.100}.")
        told = (await self._seen()).attributes(self.region)
        some = {k: v for k, v in told.items() if k in wanted or "All" in wanted}
        return {"Attributes": some} if some else {}

    async def set_queue_attributes(self) -> None:
        async with self.known.changes:
            queue = await self._queue(is_fresh=True)
            attributes = queues.check(self.given.get("Attributes"), is_fifo=queue.is_fifo)
            await self._check_redrive(queue.name, attributes)
            await self._set(queue.name, queues.changed(attributes, queue.labels))

    async def tag_queue(self) -> None:
        given = self._needed("Tags")
        await self._relabel(
            lambda queue: {**queue.labels, **queues.check_tags(given, queue.name, queue.tags)}
        )

    async def untag_queue(self) -> None:
        if not (gone := self.given.get("TagKeys")):
            raise wrong("Tag keys must be between 1 and 128 characters in length.")
        await self._relabel(
            lambda queue: {
                k: v for k, v in queue.labels.items() if k not in gone or k.startswith(OWN)
            }
        )

    async def list_queue_tags(self) -> Told:
        tags = (await self._seen()).tags
        return {"Tags": tags} if tags else {}

    async def purge_queue(self) -> None:
        queue = await self._queue(is_fresh=True)
        async with self.known.purge(queue), self.open_client() as client:
            await client.purge(queue.name, scheduled=True)
            if queue.is_fifo:
                now = f"{time():.6f}"
                await self._relabel(lambda queue: {**queue.labels, queues.PURGED: now})

    async def add_permission(self) -> None:
        label, accounts = self._needed("Label"), self.given.get("AWSAccountIds", [])
        actions = self.given.get("Actions") or self.given.get("ActionNames") or []
        await self._relabel(
            lambda queue: policies.allowed(
                queue.labels, queues.arn(self.region, queue.name), label, accounts, actions
            )
        )

    async def remove_permission(self) -> None:
        label = self._needed("Label")
        await self._relabel(lambda queue: policies.without(queue.labels, label))

    # -- messages

    async def send_message(self) -> Told | None:
        return await self._one(self._send)

    async def send_message_batch(self) -> Told:
        size = sum(map(messages.size_of, self.given.get("Entries", [])))
        if size > BATCH_BYTES_MAX:
            reason = f"Batch requests cannot be longer than {BATCH_BYTES_MAX} bytes."
            raise SqsError("BatchRequestTooLong", f"{reason} You have sent {size} bytes.")
        return await self._each(self._send)

    async def receive_message(self) -> Told:
        queue = await self._queue()
        limit = number(self.given, "MaxNumberOfMessages", 1, BATCH_MAX) or 1
        lease_s = number(self.given, "VisibilityTimeout", 0, RANGES["VisibilityTimeout"][1])
        wait_s = number(self.given, "WaitTimeSeconds", 0, 20)
        if wait_s is None:
            wait_s = queue.number("ReceiveMessageWaitTimeSeconds")
        async with self.open_client() as client:
            ask = partial(client.receive, queue.name, limit=limit, lease_s=lease_s)
            found = await ask(wait_s=wait_s, timeout_s=wait_s + TIMEOUT_S)
            if wait_s and found and await self.is_gone():
                for each in found:
                    words = queue.name, each.lease or "", "--undelivered"
                    await client.request("lease", "--confirm", *words)
        wanted = self.given.get("AttributeNames", [])
        wanted = wanted + self.given.get("MessageSystemAttributeNames", [])
        told = []
        for each in found:
            await anyio.sleep(0)  # Those of other ports may have a thousand attributes.
            which = (each.lease or "").rpartition(".")[0]
            first_s = self.known.first_s(which, each.time if each.retry else time())
            handle = urlsafe_b64encode(encoded(f"{queue.name} {each.lease}")).decode()
            masks = self.given.get("MessageAttributeNames", [])
            told.append(messages.incoming(each, handle, first_s, self.region, wanted, masks))
        return {"Messages": told} if told else {}

    async def delete_message(self) -> Told | None:
        return await self._one(self._delete)

    async def delete_message_batch(self) -> Told:
        return await self._each(self._delete)

    async def change_message_visibility(self) -> Told | None:
        return await self._one(self._change)

    async def change_message_visibility_batch(self) -> Told:
        return await self._each(self._change)

    # -- dead letters

    async def start_message_move_task(self) -> Told:
        arn, to = self._needed("SourceArn"), self.given.get("DestinationArn")
        source = await self._of_arn("SourceArn", arn)
        target = (await self._of_arn("DestinationArn", to)).name if to else None
        rate = number(self.given, "MaxNumberOfMessagesPerSecond", 1, 500)
        others = replace(self, given={"QueueUrl": queues.url("", source.name), "MaxResults": 1})
        if not (await others.list_dead_letter_source_queues()):
            raise wrong("Source queue must be configured as a Dead Letter Queue.")
        told = {
            "SourceArn": arn,
            "DestinationArn": to,
            "MaxNumberOfMessagesPerSecond": rate,
            "ApproximateNumberOfMessagesToMove": source.row["ready"],
        }
        task = {name: value for name, value in told.items() if value is not None}

        async def redrive(limit: int) -> int:
            if target is not None:  # The broker would create it.
                await self.known.queue(target, is_fresh=True)
            async with self.open_client() as client:
                return await client.redrive(source.name, to=target, limit=limit)

        async def note(task: Told) -> None:
            await self._relabel(
                lambda queue: {**queue.labels, MOVE_TASK: json.dumps(task)}, source.name
            )

        return {"TaskHandle": await self.known.tasks.start(task, redrive, note)}

    async def list_message_move_tasks(self) -> Told:
        arn = self._needed("SourceArn")
        noted = (await self._of_arn("SourceArn", arn)).labels.get(MOVE_TASK, "")
        most = number(self.given, "MaxResults", 1, 10) or 1
        return {"Results": self.known.tasks.of(arn, most, noted)}

    async def cancel_message_move_task(self) -> Told:
        handle = self._needed("TaskHandle")
        queue = await self._of_arn("SourceArn", source_of(handle))
        if not self.permissions.may_consume(encoded(queue.name)):
            raise SqsError("AccessDenied", f"no permission to consume {queue.name}", 403)
        return self.known.tasks.cancel(handle)

    # -- what they have in common

    def _needed(self, name: str) -> Any:
        if not (value := self.given.get(name)):
            raise missing(name)
        return value

    async def _queue(self, *, is_fresh: bool = False) -> SqsQueue:
        """The queue of the request, by default as it was a second ago at most. Raises SqsError."""
        return await self._known(queues.of_url(self.given.get("QueueUrl")), is_fresh=is_fresh)

    async def _seen(self, name: str = "") -> SqsQueue:
        """A queue, by default that of the request, as it is, if the user may read it."""
        name = name or queues.of_url(self.given.get("QueueUrl"))
        return await self._known(name, is_fresh=True)

    async def _known(self, name: str, *, is_fresh: bool) -> SqsQueue:
        """A queue, if the user may read it: else nobody says whether it exists. Raises SqsError."""
        self._check_readable(name)
        return await self.known.queue(name, is_fresh=is_fresh)

    def _check_readable(self, name: str) -> None:
        if not self.permissions.may_read(encoded(name)):
            raise SqsError("AccessDenied", f"no permission to read {name}", 403)

    async def _of_arn(self, parameter: str, arn: object) -> SqsQueue:
        try:
            return await self._seen(queues.of_arn(arn, parameter))
        except (SqsError, ClientError) as failure:
            if SqsError.of(failure).code != "QueueDoesNotExist":
                raise
            reason = f"The resource that you specified for the {parameter} parameter doesn't exist."
            raise SqsError("ResourceNotFoundException", reason, 404) from None

    async def _set(self, name: str, policy: Any) -> None:
        async with self.open_client() as client:
            await client.set_queue(name, **policy)
        self.known.forget(name)

    async def _relabel(
        self, change: Callable[[SqsQueue], Mapping[str, str]], name: str = ""
    ) -> None:
        """Set the labels of a queue, by default that of the request."""
        async with self.known.changes:
            name = name or queues.of_url(self.given.get("QueueUrl"))
            labels = change(await self._known(name, is_fresh=True))
            await self._set(name, {"labels": queues.encoded(labels) or None})

    async def _check_redrive(self, name: str, attributes: Mapping[str, str]) -> None:
        if text := attributes.get("RedrivePolicy"):
            target = queues.redrive(text)[0]
            self._check_readable(target)
            if not await self.known.exists(target):
                raise invalid("RedrivePolicy", text, "Dead letter target does not exist.")
            queue = await self.known.queue(target, is_fresh=True)
            if queue.is_fifo != name.endswith(queues.FIFO):
                reason = "Dead-letter queue must be same type of queue as the source."
                raise invalid("RedrivePolicy", text, reason)
            if not queue.admits(name):
                raise invalid("RedrivePolicy", text, "Its RedriveAllowPolicy does not allow it.")

    async def _listed(self, key: str, prefix: str, is_wanted: Callable[[Told], bool]) -> Told:
        """URLs of queues that the user may read, by name."""
        most, token = number(self.given, "MaxResults", 1, PAGE_ROWS), self.given.get("NextToken")
        try:
            text = str(token or "")[: queues.ENCODED_MAX]
            after = urlsafe_b64decode(text).decode("utf-8", "surrogateescape")
        except ValueError:
            raise invalid("NextToken", token, "Not a token.") from None
        found = list[str]()
        async for row in self.known.rows(after, prefix):
            if is_wanted(row) and self.permissions.may_read(encoded(row["name"])):
                found.append(row["name"])
                if len(found) > (most or PAGE_ROWS):
                    break
        some = found[: most or PAGE_ROWS]
        told: Told = {key: [queues.url(self.base, name) for name in some]} if some else {}
        if most and len(found) > most:
            told["NextToken"] = urlsafe_b64encode(encoded(some[-1])).decode()
        return told

    async def _send(self, queue: SqsQueue, given: Mapping[str, Any]) -> Told:
        message = messages.outgoing(queue, given, number(given, "DelaySeconds", 0, 900))
        if not queue.is_fifo:
            if message.group and "fair" not in queue.policy:
                await self._set(queue.name, {"fair": "key"})
            await self._publish(queue.name, message)
        else:
            async with self.known.sequence(self.user, message.id) as sequence:
                message.meta[messages.SEQUENCE] = message.told["SequenceNumber"] = sequence
                await self._publish(queue.name, message, DEDUPLICATION_S)
        return message.told

    async def _publish(
        self, queue: str, message: messages.Outgoing, once_s: float | None = None
    ) -> None:
        terms: Told = {"delay_s": message.delay_s, "meta": message.meta, "key": message.group}
        terms |= {"id": message.id, "to": queue, "once_s": once_s}
        async with self.open_client() as client:
            await client.publish(queue, message.body, confirm=True, **terms)

    async def _delete(self, queue: SqsQueue, given: Mapping[str, Any]) -> None:
        lease = _lease(queue, given)
        how = ["--ack", *(["--held"] if queue.is_fifo else [])]
        async with self.open_client() as client:
            try:
                await client.request("lease", "--confirm", queue.name, lease, *how)
            except RequestFailed as failure:
                if failure.reason != "lease: it has ended":  # The broker's word for it.
                    raise
                reason = "The receipt handle has expired."
                raise invalid("ReceiptHandle", given["ReceiptHandle"], reason) from None

    async def _change(self, queue: SqsQueue, given: Mapping[str, Any]) -> None:
        for_s = number(given, "VisibilityTimeout", 0, RANGES["VisibilityTimeout"][1])
        if for_s is None:
            raise missing("VisibilityTimeout")
        lease = _lease(queue, given)
        async with self.open_client() as client:
            if not await client.extend_lease(queue.name, lease, for_s):
                reason = "Message does not exist or is not available for visibility timeout change."
                raise invalid("ReceiptHandle", given["ReceiptHandle"], reason)

    async def _one(self, do: Callable[[SqsQueue, Told], Awaitable[Told | None]]) -> Told | None:
        return await do(await self._queue(), self.given)

    async def _each(self, do: Callable[[SqsQueue, Told], Awaitable[Told | None]]) -> Told:
        """All entries of a batch at the same time; those of one message group in their order."""
        queue, told = await self._queue(), {"Successful": list[Told](), "Failed": list[Told]()}
        entries: list[Told] = self.given.get("Entries", [])
        _check_batch(self.action, [str(each.get("Id", "")) for each in entries])
        groups: dict[Any, list[Told]] = {}
        for at, entry in enumerate(entries):
            is_ordered = queue.is_fifo and do == self._send
            if is_ordered:
                try:
                    messages.check_fifo(queue, entry)
                except SqsError as failure:
                    raise _of_entry(failure) from None
            groups.setdefault(entry["MessageGroupId"] if is_ordered else at, []).append(entry)

        async def do_all(group: list[Told]) -> None:
            for entry in group:
                result = {"Id": entry["Id"]}
                try:
                    told["Successful"].append(result | (await do(queue, entry) or {}))
                except (SqsError, ClientError) as failure:
                    error = _of_entry(SqsError.of(failure))
                    result |= {"SenderFault": error.fault == "Sender", "Code": error.query_code}
                    told["Failed"].append(result | {"Message": error.message})

        async with anyio.create_task_group() as tasks:
            for group in groups.values():
                tasks.start_soon(do_all, group)
        order = [entry["Id"] for entry in entries]
        for results in told.values():
            results.sort(key=lambda each: order.index(each["Id"]))
        return {key: value for key, value in told.items() if value or key == "Successful"}


ACTIONS: Final[dict[str, Callable[[Actions], Awaitable[Told | None]]]] = {
    name.title().replace("_", ""): method
    for name, method in vars(Actions).items()
    if callable(method) and not name.startswith("_")
}


def number(given: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    """A number that may be missing, as JSON or text. Raises SqsError."""
    value = given.get(name)
    if value is None:
        return None
    text = str(value)
    is_number = text.removeprefix("-").isdecimal() and len(text) < 10
    if not is_number or not low <= int(text) <= high:
        reason = f"Must be between {low} and {high}, if provided."
        if name == "DelaySeconds":
            reason = f"DelaySeconds must be >= {low} and <= {high}."
        raise invalid(name, value, reason)
    return int(text)


def _check_batch(action: str, ids: list[str]) -> None:
    """Raises SqsError."""
    if not ids:
        reason = f"There should be at least one {action}RequestEntry in the request."
        raise SqsError("EmptyBatchRequest", reason)
    if len(ids) > BATCH_MAX:
        reason = f"Maximum number of entries per request are {BATCH_MAX}."
        raise SqsError("TooManyEntriesInBatchRequest", f"{reason} You have sent {len(ids)}.")
    for at, each in enumerate(ids):
        if not _BATCH_ID.fullmatch(each):
            reason = "alphanumeric characters, hyphens and underscores."
            reason = f"A batch entry id can only contain {reason}"
            length = "It can be at most 80 letters long."
            raise SqsError("InvalidBatchEntryId", f"{reason} {length}")
        if each in ids[:at]:
            raise SqsError("BatchEntryIdsNotDistinct", f"Id {each} repeated.")


def _of_entry(error: SqsError) -> SqsError:
    """The error of a request as that of an entry of a batch."""
    return wrong(error.message) if error.code == "MissingParameter" else error


def _lease(queue: SqsQueue, given: Mapping[str, Any]) -> str:
    handle = str(given.get("ReceiptHandle") or "")
    if not handle:
        raise missing("ReceiptHandle")
    try:
        told = urlsafe_b64decode(handle.encode()).decode("utf-8", "surrogateescape")
    except ValueError:
        told = ""
    name, _, lease = told.partition(" ")
    if name != queue.name or not lease or " " in lease:
        reason = f'The input receipt handle "{handle:.1000}" is not a valid receipt handle.'
        raise SqsError("ReceiptHandleIsInvalid", reason, 404)
    return lease if queue.is_fifo else f"{lease.rpartition('.')[0]}.0"  # Of whoever has it now.
