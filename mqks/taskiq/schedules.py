"""Schedules of tasks that the server keeps and runs: no scheduler of taskiq is needed.

The one rule: what the server cannot keep as it is raises before anything is sent.
"""

from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote, unquote

from taskiq import ScheduledTask, ScheduleSource, TaskiqMessage
from taskiq.exceptions import ScheduledTaskCancelledError
from taskiq.labels import prepare_label

from mqks.client.requests import encoded
from mqks.protocol.escapes import unescape
from mqks.taskiq.broker import MqksBroker, scheduled, terms_of

LISTED_MAX = 10_000
"""The most tasks with a `time` that are listed."""


class MqksScheduleSource(ScheduleSource):
    """Schedules of the tasks of a broker. It uses the connection of the broker.

    `cron` and `interval` are schedules of the server, `time` is a message with a delay. The server
    publishes them for the queue of the broker; a TaskiqScheduler that has this source sends none
    of them again."""

    def __init__(self, broker: MqksBroker) -> None:
        self.broker = broker

    async def startup(self) -> None:
        await self.broker.declare(self.broker.queue_name)

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Add it, or change the one of this id. Raises ValueError for what the server cannot keep,
        and RequestFailed."""
        broker, name = self.broker, self._name(schedule.schedule_id)
        queue, terms = broker.queue_name, terms_of(schedule.labels)
        if (schedule.labels.get("queue_name") or queue) != queue:
            raise ValueError("a schedule is for the queue of its broker: queue_name is another one")
        if [schedule.cron, schedule.interval, schedule.time].count(None) != 2:
            raise ValueError("a schedule has either cron, interval or time")
        if isinstance(schedule.cron_offset, timedelta):
            raise ValueError("cron_offset must be the name of a time zone, as in Europe/Berlin")
        data = self._message(schedule)
        client = await broker.lazy.get()
        if schedule.time is None:
            options: dict[str, Any] = {**terms, "mandatory": True, "tz": schedule.cron_offset}
            every = schedule.interval
            options["every_s"] = every.total_seconds() if isinstance(every, timedelta) else every
            await client.schedule(name, schedule.cron, scheduled(queue), data, **options)
            return
        terms["at"] = schedule.time if schedule.time.tzinfo else schedule.time.replace(tzinfo=UTC)
        terms.pop("delay_s", None)  # Of a retry, for example, whose time has it already.
        await client.cancel(queue, name)
        terms |= {"id": name, "confirm": True, "mandatory": True}
        await client.publish(scheduled(queue), data, **terms)

    async def delete_schedule(self, schedule_id: str) -> None:
        """Remove it, if there is one of this id."""
        client, name = await self.broker.lazy.get(), self._name(schedule_id)
        await client.unschedule(name)
        await client.cancel(self.broker.queue_name, name)

    async def get_schedules(self) -> list[ScheduledTask]:
        """Those of the broker's queue. Needs the permissions to inspect the server and to read the
        queue."""
        client, queue = await self.broker.lazy.get(), self.broker.queue_name
        found = []
        for row in await client.schedules():
            if row["event"] == scheduled(queue) and row["name"].startswith(f"{queue}:"):
                words = row["publish"]
                flags, _, rest = words.partition(f"{row['event']} ")
                data = encoded(rest)
                data = unescape(data) if "--escaped " in flags else data
                when = {"cron": row["cron"], "interval": row["every_s"] and int(row["every_s"])}
                zone = row["tz"] if row["cron"] else None
                found.append(self._told(row["name"], data, cron_offset=zone, **when))
        limit, event = LISTED_MAX, scheduled(queue)
        for message in await client.peek(queue, scheduled=True, limit=limit, event=event):
            if message.due is not None:
                time = datetime.fromtimestamp(message.due, UTC)
                found.append(self._told(message.id, message.data, time=time))
        return found

    def pre_send(self, task: ScheduledTask) -> None:
        """Raises ScheduledTaskCancelledError: the server sends it."""
        raise ScheduledTaskCancelledError

    def _name(self, schedule_id: str) -> str:
        return f"{self.broker.queue_name}:{quote(schedule_id)}"

    def _message(self, schedule: ScheduledTask) -> bytes:
        labels = {**schedule.labels, "schedule_id": schedule.schedule_id}
        pairs = {label: prepare_label(value) for label, value in labels.items()}
        message = TaskiqMessage(
            task_id=schedule.task_id or "",
            task_name=schedule.task_name,
            labels={label: text for label, (text, _) in pairs.items()},
            labels_types={label: kind for label, (_, kind) in pairs.items()},
            args=schedule.args,
            kwargs=schedule.kwargs,
        )
        return self.broker.formatter.dumps(message).message

    def _told(self, name: str, data: bytes, **when: Any) -> ScheduledTask:
        message = self.broker.formatter.loads(data)
        message.parse_labels()
        message.labels.pop("schedule_id", None)
        return ScheduledTask(
            task_name=message.task_name,
            labels=message.labels,
            args=message.args,
            kwargs=message.kwargs,
            task_id=message.task_id or None,
            schedule_id=unquote(name.removeprefix(f"{self.broker.queue_name}:")),
            **when,
        )
