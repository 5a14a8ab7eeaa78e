"""Runs tasks: takes messages, keeps their rows, and relays the outbox.

The one rule: a message is acked only after its row says how it ended.
"""

import logging
import os
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import (
    DataError,
    Error,
    IntegrityError,
    OperationalError,
    connections,
    transaction,
)
from django.db.models import Q

from mqks.client.blocking import BlockingConsumer
from mqks.client.errors import InvalidRequest, QueueMissing, RequestFailed
from mqks.client.messages import Message
from mqks.django.backend import MqksBackend, as_json, result_of, storable
from mqks.django.models import TaskRow
from mqks.django.seam import (
    TaskContext,
    TaskResult,
    task_backends,
    task_finished,
    task_started,
)

_log = logging.getLogger("mqks.django")

RELAY_ROWS = 1000
"""The most rows of the outbox that one pass publishes, and of expired results that it deletes."""
RELAY_S = 0.5
RELAY_THREADS = 32
"""The most publishes of the outbox in flight."""
EXPIRE_S = 60.0
REFUSED_S = 10.0
"""The pause of a task of the outbox that the broker has refused."""
BROKEN_S = 1.0
BROKEN_S_MAX = 30.0
"""The first and largest pause of a thread while the database is away; it doubles."""
REFUSED = DataError, IntegrityError
"""What the database says of a value; all else it says of itself."""
ERROR_CHARACTERS_MAX = 16 * 1024
"""Of the text of an error; its middle is left out."""
NO_TASK = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, *REFUSED)
"""What a message of another program may raise."""
REASON_CHARACTERS_MAX = 120
"""Of the reason of a reject, which has room for 512 bytes."""


def now() -> datetime:
    return datetime.now(UTC if settings.USE_TZ else None)


class Away(OperationalError):
    """The database could not be used when a task had ended, so how is not stored."""


def is_away(error: BaseException) -> bool:
    """Whether the database cannot be used now, rather than that it refuses a value."""
    kind = type(error)  # Not `isinstance`, which asks the error itself, too.
    return issubclass(kind, Error) and not issubclass(kind, REFUSED)


def renew() -> None:
    """Close connections of this thread to databases that have failed or are too old. With a
    CONN_MAX_AGE of 0, which is about requests, a thread keeps them."""
    for each in connections.all(initialized_only=True):
        if each.errors_occurred or each.settings_dict["CONN_MAX_AGE"]:
            each.close_if_unusable_or_obsolete()


class Worker:
    """Runs tasks of one queue in `threads` threads, until `stop` is set."""

    def __init__(self, backend: MqksBackend, queue_name: str, threads: int) -> None:
        self.backend = backend
        self.queue_name = queue_name
        self.threads = threads
        self.id = f"{socket.gethostname()}:{os.getpid()}"

    def run(self, stop: threading.Event) -> None:
        queue, limits = self.backend.queue(self.queue_name), self.backend.limits(self.queue_name)
        target, client = limits["dead_letters"], self.backend.client
        mine = target == self.backend.queue("dead")
        client.set_queue(target, **{"ttl_s": limits["results_expire_s"]} if mine else {})
        client.set_queue(queue, losses=limits["losses"], dead_letter_queue=target)
        client.peek(target, limit=1)  # One that may not read them cannot tell what was lost.
        terms = {"prefetch": self.threads, "backoff": limits["backoff"]}
        with client.consume(queue, [queue], **terms) as consumer:
            work = [
                threading.Thread(target=self._work, args=(consumer, stop))
                for _ in range(self.threads)
            ]
            for thread in work:
                thread.start()
            while not stop.wait(0.2) and any(thread.is_alive() for thread in work):
                pass
            consumer.stop()
            for thread in work:
                thread.join()

    def _work(self, consumer: BlockingConsumer, stop: threading.Event) -> None:
        pause_s = BROKEN_S
        for message in consumer:
            try:
                renew()
                self._handle(message)
                pause_s = BROKEN_S
            except Exception as error:
                with suppress(Exception):  # Its own methods may raise.
                    _log.exception("task %s could not be handled", message.id)
                if is_away(error):
                    message.release(delay_s=pause_s)
                    stop.wait(pause_s)
                    pause_s = min(2 * pause_s, BROKEN_S_MAX)
                else:  # The broker counts what no row can.
                    limits = self.backend.limits(self.queue_name)
                    how = {each: limits[each] for each in ("retries", "backoff")}
                    message.reject(**how, reason=error)
        connections.close_all()

    def _handle(self, message: Message) -> None:
        try:
            row = self._row(message.id, _told(message))
        except NO_TASK as error:
            why = f"this is no task: {error!r}"[:REASON_CHARACTERS_MAX]
            _log.error("message %s: %s", message.id, why)
            message.reject(dead=True, reason=why)
            return
        if row.status == "SUCCESSFUL":  # Its ack was lost.
            message.ack()
            return
        try:
            task = result_of(row).task
        except BaseException as error:
            _failed(row, error, final=True)
            message.reject(dead=True, reason=error)
            return
        if row.status == "FAILED":  # It was redriven, and starts anew.
            row.errors, row.finished_at = [], None
        row.status, row.last_attempted_at = "RUNNING", now()
        row.started_at = row.started_at or row.last_attempted_at
        row.worker_ids = [*row.worker_ids, self.id]
        row.save()
        result = result_of(row)
        task_started.send_robust(type(self.backend), task_result=result)
        try:
            _run(row, result)
        except Away:
            raise
        except BaseException as error:
            limits = self.backend.limits(self.queue_name) | vars(task.func)
            final = len(row.errors) + 1 >= limits["retries"]
            _failed(row, error, final=final)
            how = {"dead": True, "reason": error} if final else {"backoff": limits["backoff"]}
            message.reject(**how)
        else:
            _finished(row)
            message.ack()

    def _row(self, task_id: str, told: dict[str, Any]) -> TaskRow:
        """The row of the task, also if the transaction of its enqueue has not ended."""
        told |= {"backend": self.backend.alias, "queue_name": self.queue_name}
        row: TaskRow = TaskRow.objects.get_or_create(id=task_id, defaults=told)[0]
        row.relay_at = None
        return row


def _told(message: Message) -> dict[str, Any]:
    """The fields of a row. Raises NO_TASK for what another program has published."""
    told, run_after = message.json(), None
    args, kwargs = told["arguments"]
    if told["run_after"]:
        run_after = datetime.fromisoformat(told["run_after"])
    return {
        "task_path": str(told["task_path"]),
        "priority": max(-100, min(int(told["priority"]), 100)),
        "arguments": [[*args], {**kwargs}],
        "enqueued_at": datetime.fromisoformat(told["enqueued_at"]),
        "run_after": run_after,
    }


def _failed(row: TaskRow, error: BaseException, *, final: bool) -> None:
    row.status, row.return_value = "FAILED" if final else "READY", None
    row.finished_at = now() if final else None
    earlier, told = row.errors, _told_error(error)
    row.errors = [*earlier, told]
    try:
        row.save()
    except REFUSED:  # Not every database has all characters.
        told = [each.encode("ascii", "backslashreplace").decode() for each in told]
        row.errors = [*earlier, told]
        row.save()
    if final:
        _finished(row)


def _told_error(error: BaseException) -> list[str]:
    """Its class and traceback."""
    kind = type(error)
    try:
        text = "".join(traceback.format_exception(error))
    except Exception as another:  # Of its own methods.
        text = f"{kind.__name__}, and its traceback raises {type(another).__name__}"
    if len(text) > ERROR_CHARACTERS_MAX:
        half = ERROR_CHARACTERS_MAX // 2
        text = f"{text[:half]}\n[...]\n{text[-half:]}"
    return [storable(f"{kind.__module__}.{kind.__qualname__}"), storable(text)]


def _finished(row: TaskRow) -> None:
    with suppress(Exception):  # Its task is gone.
        result = result_of(row)
        task_finished.send_robust(type(result.task.get_backend()), task_result=result)


def _run(row: TaskRow, result: TaskResult) -> None:
    """Run the task and keep its result. Raises what the task raises, what the database or JSON says
    of the result, and Away."""
    row.return_value = _call(result)
    row.status, row.finished_at = "SUCCESSFUL", now()
    try:
        row.save()
    except Error as error:
        if is_away(error):
            raise Away(str(error)) from error
        raise


def _call(result: TaskResult) -> Any:
    args = [TaskContext(task_result=result)] if result.task.takes_context else []
    return as_json(result.task.call(*args, *result.args, **result.kwargs))


def relay(backend: MqksBackend) -> int:
    """Publish what the outbox has, each once, and return the number. A unique task that was
    dropped has the result of the one that waits.

    What the broker refuses waits, with the reason in its row, and delays no other; what cannot be
    sent at all has failed.
    """
    waiting = TaskRow.objects.filter(relay_at__lte=now(), backend=backend.alias)
    rows = list(waiting.order_by("relay_at")[:RELAY_ROWS])
    sent = list[str]()

    def publish(row: TaskRow) -> Exception | str:
        try:
            return backend.publish(row)
        except (RequestFailed, InvalidRequest) as error:
            return error

    try:
        with ThreadPoolExecutor(RELAY_THREADS) as pool:
            for row, error in zip(rows, pool.map(publish, rows), strict=True):
                if isinstance(error, str):
                    if error:  # Its result is that of the task that waits.
                        TaskRow.objects.filter(id=row.id).update(duplicate_of=error)
                    sent.append(row.id)
                    continue
                if not row.refusal:
                    _log.error("task %s could not be published: %s", row.id, error)
                row.refusal, row.relay_at = str(error), now() + timedelta(seconds=REFUSED_S)
                row.save(update_fields=["refusal", "relay_at"])
                if isinstance(error, InvalidRequest):
                    row.relay_at = None
                    _failed(row, error, final=True)
    finally:
        TaskRow.objects.filter(id__in=sent).update(relay_at=None, refusal="")
    return len(sent)


def bury(backend: MqksBackend, seen: dict[str, int]) -> None:
    """Tasks that the broker has given up have failed. `seen` are the last dead letters' numbers."""
    for queue in {
        backend.limits(each)["dead_letters"] for each in ("", *backend.settings["queues"])
    }:
        key = f"{backend.alias} {queue}"
        with suppress(QueueMissing):  # No worker has run yet.
            found = backend.client.peek(queue, after=seen.get(key, 0), limit=RELAY_ROWS)
            # Another program's id may have what no id of a row has.
            dead = {each.id: each.dead_letter for each in found if each.id.isprintable()}
            for row in TaskRow.objects.filter(id__in=dead, finished_at=None):
                about = dead[row.id]
                why = about and f"{about.reason} after {about.tries} deliveries"
                if about and about.why:
                    why = f"{why}: {about.why}"
                _failed(row, RuntimeError(f"the broker has given it up: {why}"), final=True)
            if found:
                seen[key] = found[-1].seq


def expire(backend: MqksBackend) -> int:
    """Delete results that are older than `results_expire_s`, and return their number."""
    before = now() - timedelta(seconds=backend.settings["results_expire_s"])
    is_old = Q(finished_at__lt=before) | Q(duplicate_of__gt="", enqueued_at__lt=before)
    old = TaskRow.objects.filter(is_old, backend=backend.alias)
    with transaction.atomic():
        ids = list(old.values_list("id", flat=True)[:RELAY_ROWS])
        return int(TaskRow.objects.filter(id__in=ids).delete()[0])


def keep(stop: threading.Event) -> None:
    """Relay the outbox, bury dead tasks and expire results of all backends, until `stop` is set."""
    expires_s, seen = 0.0, dict[str, int]()
    while not stop.is_set():
        is_full, is_due = False, time.monotonic() >= expires_s
        if is_due:
            expires_s = time.monotonic() + EXPIRE_S
        for alias in task_backends:
            try:
                renew()
                backend = task_backends[alias]
                if not isinstance(backend, MqksBackend):
                    continue
                if backend.settings["outbox"]:
                    is_full |= relay(backend) == RELAY_ROWS
                bury(backend, seen)
                if is_due and expire(backend) == RELAY_ROWS:
                    expires_s = 0.0
            except Exception:
                _log.exception("the tasks of %s could not be kept", alias)
        if not is_full:
            stop.wait(RELAY_S)
    connections.close_all()
