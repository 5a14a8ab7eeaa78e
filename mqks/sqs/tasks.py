"""Message move tasks: dead letters go back, or to another queue, while nobody waits for it.

The one rule: a task only asks the broker to redrive, some messages at a time. A restart ends it;
what it has not moved stays where it is. The last task of a queue is in a label, so that it is told.
"""

import base64
import json
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import time
from typing import Any, Final
from uuid import uuid4

import anyio
from anyio.abc import TaskGroup

from mqks.client.errors import ClientError
from mqks.limits import SQS_TASKS_MAX
from mqks.sqs.errors import SqsError, wrong

_STEP: Final = 1000
_TO_MOVE: Final = "ApproximateNumberOfMessagesToMove"
_MOVED: Final = "ApproximateNumberOfMessagesMoved"
Task = dict[str, Any]
"""As it is listed."""


class MoveTasks:
    """The tasks of all queues that are remembered, the newest first."""

    def __init__(self) -> None:
        self._tasks: deque[Task] = deque(maxlen=SQS_TASKS_MAX)
        self.group: TaskGroup | None = None

    async def start(
        self,
        task: Task,
        redrive: Callable[[int], Awaitable[int]],
        note: Callable[[Task], Awaitable[None]],
    ) -> str:
        """Return its handle. `redrive` moves so many messages at most, and tells how many; `note`
        keeps what is told. Raises SqsError, ClientError."""
        arn = task["SourceArn"]
        running = [each for each in self._tasks if "TaskHandle" in each]
        if any(each["SourceArn"] == arn for each in running) or len(running) == SQS_TASKS_MAX:
            reason = "Only one active task is allowed for a source queue arn at a given time."
            raise wrong(f"There is already a task running. {reason}")
        told = json.dumps({"taskId": str(uuid4()), "sourceArn": arn})
        task |= {"Status": "RUNNING", "StartedTimestamp": round(time() * 1000), _MOVED: 0}
        task["TaskHandle"] = handle = base64.b64encode(told.encode()).decode()
        self._tasks.appendleft(task)
        try:
            await note(task)
        except BaseException:
            self._tasks.remove(task)
            raise
        assert self.group is not None
        self.group.start_soon(self._move, task, redrive, note)
        return handle

    async def _move(
        self,
        task: Task,
        redrive: Callable[[int], Awaitable[int]],
        note: Callable[[Task], Awaitable[None]],
    ) -> None:
        rate, count = task.get("MaxNumberOfMessagesPerSecond"), 1
        left = task[_TO_MOVE]  # Letters that come back meanwhile are left.
        try:
            while count and left and task["Status"] == "RUNNING":
                count = await redrive(min(rate or _STEP, left))
                task[_MOVED] += count
                left -= count
                await anyio.sleep(1 if rate and count else 0)
            task["Status"] = "COMPLETED" if task["Status"] == "RUNNING" else "CANCELLED"
        except Exception as failure:  # Told to whoever asks.
            error = SqsError.of(failure)
            is_gone = error.code == "QueueDoesNotExist"
            reason = error.query_code if is_gone else error.message
            task |= {"Status": "FAILED", "FailureReason": reason}
        finally:
            del task["TaskHandle"]
        with suppress(SqsError, ClientError):  # Its queue may be gone.
            await note(task)

    def of(self, arn: str, most: int, noted: str) -> list[Task]:
        """`noted` is the last one that was."""
        found = [each for each in self._tasks if each["SourceArn"] == arn]
        with suppress(ValueError, LookupError, TypeError):  # A label of others is any text.
            started_ms = (task := json.loads(noted))["StartedTimestamp"]
            if all(each["StartedTimestamp"] != started_ms for each in found):
                if task.pop("TaskHandle", None):
                    task |= {"Status": "FAILED", "FailureReason": "The server was started again."}
                found.append(task)
        return found[:most]

    def cancel(self, handle: object) -> dict[str, Any]:
        """Raises SqsError."""
        task = next((each for each in self._tasks if each.get("TaskHandle") == handle), None)
        if task is None:
            source_of(handle)
            raise SqsError("ResourceNotFoundException", "Task does not exist.", 404)
        task["Status"] = "CANCELLING"
        return {_MOVED: task[_MOVED]}


def source_of(handle: object) -> str:
    """The ARN of the queue of a task. Raises SqsError."""
    try:
        return str(json.loads(base64.b64decode(str(handle), validate=True))["sourceArn"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise wrong("Value for parameter TaskHandle is invalid.") from None
