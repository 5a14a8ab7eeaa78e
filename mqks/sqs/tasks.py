"""Message move tasks: dead letters go back, or to another queue, while nobody waits for it.

The one rule: a task only asks the broker to redrive, some messages at a time. A restart ends it;
what it has not moved stays where it is.
"""

import base64
import json
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from time import time
from typing import Any, Final
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup, TaskStatus

from mqks.api.clients import Credentials
from mqks.client.async_client import AsyncClient
from mqks.client.errors import ClientError
from mqks.limits import SQS_TASKS_MAX
from mqks.sqs.errors import SqsError, invalid
from mqks.sqs.queues import Queue

_STEP: Final = 1000
_TASKS: Final = 10
"""Of a queue."""


@dataclass(eq=False)
class _Task:
    told: dict[str, Any]
    """As it is listed."""
    source: str
    target: str | None
    rate: int | None
    """Messages in a second."""
    id: str = field(default_factory=lambda: str(uuid4()))

    @property
    def is_running(self) -> bool:
        return self.told["Status"] in ("RUNNING", "CANCELLING")


class MoveTasks:
    """`client_of` gives a client of the broker for credentials."""

    def __init__(
        self, client_of: Callable[[Credentials], AbstractAsyncContextManager[AsyncClient]]
    ) -> None:
        self._client_of = client_of
        self._of: OrderedDict[str, deque[_Task]] = OrderedDict()
        self._group: TaskGroup | None = None

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        async with anyio.create_task_group() as self._group:
            task_status.started()
            await anyio.sleep_forever()

    def start(
        self,
        credentials: Credentials,
        arn: str,
        source: Queue,
        target: str | None,
        target_arn: str | None,
        rate: int | None,
    ) -> dict[str, Any]:
        """Raises SqsError."""
        tasks = self._of.setdefault(source.name, deque(maxlen=_TASKS))
        if any(each.is_running for each in tasks):
            reason = (
                "There is already a task running. Only one active task is allowed for a source "
                "queue arn at a given time."
            )
            raise SqsError("UnsupportedOperation", reason)
        told = {
            "Status": "RUNNING",
            "SourceArn": arn,
            "StartedTimestamp": round(time() * 1000),
            "ApproximateNumberOfMessagesMoved": 0,
            "ApproximateNumberOfMessagesToMove": source.row["ready"],
        }
        told |= {"DestinationArn": target_arn} if target_arn else {}
        told |= {"MaxNumberOfMessagesPerSecond": rate} if rate else {}
        task = _Task(told, source.name, target, rate)
        handle = json.dumps({"taskId": task.id, "sourceArn": arn}).encode()
        told["TaskHandle"] = base64.b64encode(handle).decode()
        tasks.appendleft(task)
        self._of.move_to_end(source.name)
        idle = (n for n, some in self._of.items() if not any(each.is_running for each in some))
        if len(self._of) > SQS_TASKS_MAX and (oldest := next(idle, None)) is not None:
            del self._of[oldest]
        assert self._group is not None
        self._group.start_soon(self._move, credentials, task)
        return {"TaskHandle": told["TaskHandle"]}

    async def _move(self, credentials: Credentials, task: _Task) -> None:
        told, count = task.told, 1
        try:
            while count and told["Status"] == "RUNNING":
                async with self._client_of(credentials) as client:
                    most = task.rate or _STEP
                    count = await client.redrive(task.source, to=task.target, limit=most)
                told["ApproximateNumberOfMessagesMoved"] += count
                if count and task.rate:
                    await anyio.sleep(1)
            told["Status"] = "COMPLETED" if told["Status"] == "RUNNING" else "CANCELLED"
        except ClientError as failure:
            told["Status"], told["FailureReason"] = "FAILED", str(failure)

    def listed(self, source: str, most: int) -> list[dict[str, Any]]:
        """The last tasks of a queue, the newest first."""
        tasks = [*self._of.get(source, ())][:most]
        return [
            {k: v for k, v in each.told.items() if k != "TaskHandle" or each.is_running}
            for each in tasks
        ]

    @staticmethod
    def of_handle(handle: object) -> tuple[str, str]:
        """The ARN and the id of a task. Raises SqsError."""
        try:
            told = json.loads(base64.b64decode(str(handle), validate=True))
            return str(told["sourceArn"]), str(told["taskId"])
        except (ValueError, LookupError, TypeError):
            raise invalid("TaskHandle", handle, "Not the handle of a task.") from None

    def cancel(self, source: str, task_id: str) -> dict[str, Any]:
        """Raises SqsError."""
        for each in self._of.get(source, ()):
            if each.id == task_id and each.told["Status"] == "RUNNING":
                each.told["Status"] = "CANCELLING"
                moved = each.told["ApproximateNumberOfMessagesMoved"]
                return {"ApproximateNumberOfMessagesMoved": moved}
        reason = "Only active tasks can be cancelled."
        raise SqsError("ResourceNotFoundException", reason, 404)
