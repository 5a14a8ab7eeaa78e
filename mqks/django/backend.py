"""The backend of Django Tasks: enqueues are confirmed publishes, results are rows.

The one rule: the message has the whole task, so it runs even if its row does not exist yet.
"""

import json
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from django.apps import apps
from django.conf import settings
from django.core import checks
from django.utils.module_loading import import_string

from mqks.client import blocking
from mqks.client.blocking import BlockingClient
from mqks.client.errors import InvalidRequest, RequestFailed
from mqks.client.requests import PolicyKeywords, Unique, flags, set_queue
from mqks.client.urls import parse
from mqks.django.seam import (
    BaseTaskBackend,
    Task,
    TaskError,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    normalize_json,
    task_enqueued,
)
from mqks.errors import MqksError

if TYPE_CHECKING:
    from mqks.django.models import TaskRow

DEFAULTS: dict[str, Any] = {
    "url": None,
    "prefix": "tasks.",
    "outbox": False,
    "retries": 1,
    "backoff": (1.0, 600.0),
    "losses": 3,
    "dead_letters": None,
    "queues": {},
    "results_expire_s": 7 * 86400.0,
}
"""`OPTIONS` of the backend. `retries` and `losses` are numbers of failures and of lost workers."""
VALUE_BYTES_MAX = 16 * 1024 * 1024
"""Of arguments and of a result, as JSON: what is too large for a database looks as if it were away.
"""
OF_QUEUES = {"retries", "backoff", "losses", "dead_letters"}
"""What each of `queues` may have of its own."""


class MqksBackend(BaseTaskBackend):
    supports_defer = True
    supports_async_task = True
    supports_get_result = True
    supports_priority = True

    def __init__(self, alias: str, params: dict[str, Any]) -> None:
        super().__init__(alias, params)
        self.settings = DEFAULTS | self.options

    @property
    def client(self) -> BlockingClient:
        """The one of this process for its URL, connected at its first call."""
        return self._broker[0]

    @property
    def _broker(self) -> tuple[BlockingClient, set[str]]:
        url = self.settings["url"]
        if str(url) not in brokers:
            brokers.setdefault(str(url), (blocking.connect(url), set()))
        return brokers[str(url)]

    def queue(self, queue_name: str) -> str:
        """The broker's queue for this queue of Django."""
        return f"{self.settings['prefix']}{queue_name}"

    def limits(self, queue_name: str) -> dict[str, Any]:
        """The settings of this queue of Django."""
        found: dict[str, Any] = self.settings | self.settings["queues"].get(queue_name, {})
        return found | {"dead_letters": found["dead_letters"] or self.queue("dead")}

    def enqueue(self, task: Task, args: Any, kwargs: Any) -> TaskResult:
        from mqks.django.models import TaskRow

        self.validate_task(task)
        now = datetime.now(UTC if settings.USE_TZ else None)
        row = TaskRow(
            id=uuid4().hex,
            task_path=task.module_path,
            backend=self.alias,
            queue_name=task.queue_name,
            priority=task.priority,
            run_after=task.run_after,
            arguments=as_json([args, kwargs]),
            enqueued_at=now,
            relay_at=now if self.settings["outbox"] else None,
        )
        row.unique = unique_of(task, *row.arguments)
        result = _result(row, task)
        row.save(force_insert=True)
        if row.relay_at is None:
            try:
                earlier = self.publish(row)
            except BaseException:
                row.delete()  # If the broker has it all the same, a worker makes the row anew.
                raise
            if earlier:
                row.delete()
                row.id = earlier  # Its row may be of a transaction that has not ended.
                return _result(TaskRow.objects.filter(id=earlier).first() or row, task)
        task_enqueued.send(type(self), task_result=result)
        return result

    def publish(self, row: "TaskRow") -> str:
        """Returns when the broker has stored it; a second time, it has no effect. Returns the id of
        the task that waits with its key, if the broker has not stored it, else "". Raises
        RequestFailed, InvalidRequest for what cannot be sent, ConnectionLost and ReplyTimeout."""
        queue = self.queue(row.queue_name)
        terms: dict[str, Any] = {}
        if row.run_after is not None:
            terms["at"] = row.run_after.timestamp()
        task = {
            "task_path": row.task_path,
            "priority": row.priority,
            "arguments": row.arguments,
            "enqueued_at": row.enqueued_at.isoformat(),
            "run_after": row.run_after and row.run_after.isoformat(),
        }
        if row.unique is not None:
            terms["unique"] = Unique(*row.unique)
        terms |= {"confirm": True, "once": True, "mandatory": True, "priority": row.priority}
        client, bound = self._broker
        if not (is_bound := queue in bound):
            client.subscribe(queue, [queue])
            bound.add(queue)
        try:
            published = client.publish(queue, task, id=row.id, **terms)
        except RequestFailed:
            bound.discard(queue)
            if not is_bound:
                raise
            return self.publish(row)  # Its queue may have been deleted.
        return storable(published.duplicate_of or "")

    def get_result(self, result_id: str) -> TaskResult:
        from mqks.django.models import TaskRow

        try:
            row = TaskRow.objects.get(id=result_id)
            if row.duplicate_of:
                row = TaskRow.objects.filter(id=row.duplicate_of).first() or row
            return result_of(row)
        except TaskRow.DoesNotExist:
            raise TaskResultDoesNotExist(result_id) from None

    def check(self, **kwargs: Any) -> Iterable[checks.CheckMessage]:
        yield from super().check(**kwargs)
        where = f"TASKS[{self.alias!r}]['OPTIONS']"
        if not apps.is_installed("mqks.django"):
            yield checks.Error("'mqks.django' is not in INSTALLED_APPS.", id="mqks.E001")
        for unknown in sorted(set(self.options) - set(DEFAULTS)):
            hint = f"There are {', '.join(DEFAULTS)}."
            yield checks.Error(f"{where} has an unknown {unknown!r}.", hint=hint, id="mqks.E002")
        try:
            parse(self.settings["url"])
        except (MqksError, TypeError, ValueError) as error:
            yield checks.Error(f"{where}: {error}", id="mqks.E003")
        for queue_name in sorted({*self.queues, *self.settings["queues"]}):
            at = f"{where}, queue {queue_name!r}"
            for unknown in sorted(set(self.settings["queues"].get(queue_name, ())) - OF_QUEUES):
                hint = f"There are {', '.join(sorted(OF_QUEUES))}."
                yield checks.Error(f"{at} has an unknown {unknown!r}.", hint=hint, id="mqks.E002")
            limits = self.limits(queue_name)
            policy = {"dead_letter_queue": limits["dead_letters"], "backoff": limits["backoff"]}
            try:
                set_queue(self.queue(queue_name), cast(PolicyKeywords, policy))
            except (MqksError, TypeError, ValueError) as error:
                yield checks.Error(f"{at}: {error}", id="mqks.E003")
            for key in ("retries", "losses"):
                if not isinstance(limits[key], int) or limits[key] < 1:
                    yield checks.Error(f"{at}: {key!r} must be at least 1.", id="mqks.E004")
        expire_s = self.settings["results_expire_s"]
        if not isinstance(expire_s, int | float) or not 0 < expire_s < math.inf:
            text = f"{where}['results_expire_s'] must be a number of seconds."
            yield checks.Error(text, id="mqks.E005")


brokers: dict[str, tuple[BlockingClient, set[str]]] = {}
"""By URL, the client of this process and the queues that it has created: Django makes a backend
for each thread. A client that is not connected yet may be made twice: one is kept."""


def as_json(value: Any) -> Any:
    """A value in JSON's types. Raises TypeError and ValueError for what JSON does not have, and
    for what is too large."""
    value = normalize_json(value)
    if (size := len(json.dumps(value, allow_nan=False))) > VALUE_BYTES_MAX:
        raise ValueError(f"{size} bytes of JSON are more than {VALUE_BYTES_MAX}")
    return value


def storable(text: str) -> str:
    """Without what databases do not have in texts."""
    return text.encode(errors="backslashreplace").decode().replace("\0", "\\x00")


def checked(key: str | Unique) -> Unique:
    """Raises TypeError, InvalidRequest."""
    if not isinstance(key, str | Unique):
        raise TypeError(f"a key is text or mqks.Unique, not {type(key).__name__}")
    unique = key if isinstance(key, Unique) else Unique(key)
    if unique.on != "drop":
        raise InvalidRequest("unique: a task whose place another one has would never end")
    flags("publish", {"unique": unique})
    return unique


def unique_of(task: Task, args: list[Any], kwargs: dict[str, Any]) -> Unique | None:
    """As `limits` says. Raises TypeError, InvalidRequest, and what its function raises."""
    given = vars(task.func).get("unique")
    if given is True:
        told = json.dumps([task.module_path, args, kwargs], sort_keys=True)
        given = f"{task.func.__name__[:64]} {sha256(told.encode()).hexdigest()[:32]}"
    elif callable(given):
        given = given(*args, **kwargs)
    return None if given is None else checked(given)


def result_of(row: "TaskRow") -> TaskResult:
    """Raises ImportError if its task is gone."""
    task = import_string(row.task_path)
    if not isinstance(task, Task):
        raise ImportError(f"{row.task_path} is no task")
    run_after = row.run_after
    task = task.using(priority=row.priority, queue_name=row.queue_name, run_after=run_after)
    return _result(row, task.using(backend=row.backend))


def _result(row: "TaskRow", task: Task) -> TaskResult:
    args, kwargs = row.arguments
    result = TaskResult(
        task=task,
        id=row.id,
        status=TaskResultStatus[row.status],
        enqueued_at=row.enqueued_at,
        started_at=row.started_at,
        last_attempted_at=row.last_attempted_at,
        finished_at=row.finished_at,
        args=args,
        kwargs=kwargs,
        backend=row.backend,
        errors=[TaskError(exception_class_path=path, traceback=text) for path, text in row.errors],
        worker_ids=row.worker_ids,
    )
    object.__setattr__(result, "_return_value", row.return_value)
    return result
