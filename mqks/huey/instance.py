"""A Huey whose tasks are acked when they have run.

The one rule: what huey asks for every second is not asked of the server.
"""

from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import Any

from huey import Huey, signals
from huey.api import PeriodicTask, Task

from mqks.client.errors import ClientError, InvalidRequest
from mqks.client.messages import Message
from mqks.huey.storage import HueyStorage, TaskData

BACKOFF_S = (1, 60)
"""Before a task is tried again of which something could not be stored: first and most."""


class MqksHuey(Huey):
    """Takes the arguments of Huey and of `HueyStorage`. Raises what `mqks.connect` raises for a
    wrong `url`."""

    storage: Any

    def __init__(self, name: str = "huey", **arguments: Any) -> None:
        arguments.setdefault("storage_class", HueyStorage)
        super().__init__(name, **arguments)
        self.signal(signals.SIGNAL_INTERRUPTED)(self._give_back)
        self.on_shutdown("mqks")(self._leave)

    def get_storage(self, **arguments: Any) -> Any:
        return super().get_storage(utc=self.utc, **arguments)

    def serialize_task(self, task: Task) -> TaskData:
        data = TaskData(super().serialize_task(task))
        data.id, data.is_tick = task.id, getattr(task, "is_tick", False)
        data.priority, data.eta = task.priority, task.eta
        return data

    def dequeue(self) -> Task | None:
        """The next task. One that cannot be read is dead, for the reason that is raised."""
        try:
            return super().dequeue()
        except Exception as error:
            self._settle(partial(Message.reject, dead=True, reason=error))
            raise

    def execute(self, task: Task, timestamp: datetime | None = None) -> Any:
        """Run a task. It is acked then, also if it failed, and not if the worker was killed. What
        is raised is not of the task: if something of it could not be read or stored, such as its
        retry, it runs again later."""
        try:
            value = super().execute(task, timestamp)
        except ClientError as error:
            if isinstance(error, InvalidRequest):  # So it would be each time.
                self._settle(Message.ack)
            else:
                self._settle(partial(Message.reject, backoff=BACKOFF_S, reason=error))
            raise
        except Exception:
            self._settle(Message.ack)
            raise
        self._settle(Message.ack)
        return value

    def read_schedule(self, timestamp: datetime | None = None) -> list[Task]:
        """Tasks that are due at a time; none without one: the server moves them to the queue."""
        return [] if timestamp is None else super().read_schedule(timestamp)

    def read_periodic(self, timestamp: datetime | None) -> list[PeriodicTask]:
        """Each has an id of its minute, so that the server drops those of other consumers."""
        timestamp = timestamp or self._get_timestamp()
        found: list[PeriodicTask] = super().read_periodic(timestamp)
        for task in found:
            task.id = f"{type(task).__module__}.{task.name}@{timestamp:%Y-%m-%dT%H:%M}"
            task.is_tick = True
        return found

    def _settle(self, how: Callable[[Message], None]) -> None:
        if isinstance(self.storage, HueyStorage):
            self.storage.settle(how)

    def _give_back(self, signal: str, task: Task) -> None:
        self._settle(Message.release)

    def _leave(self) -> None:
        if isinstance(self.storage, HueyStorage):
            self.storage.leave()
