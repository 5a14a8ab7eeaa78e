"""Runs tasks: takes messages, keeps their rows, and relays the outbox.

The one rule: a message is acked only after its row says how it ended.
"""

import json
import logging
import os
import socket
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import close_old_connections, transaction

from mqks.client.blocking import BlockingConsumer
from mqks.client.errors import InvalidRequest, RequestFailed
from mqks.client.messages import Message
from mqks.django.backend import MqksBackend, result_of
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
BROKEN_S = 1.0
"""The pause of a message whose row could not be read or written."""


def now() -> datetime:
    return datetime.now(UTC if settings.USE_TZ else None)


class Worker:
    """Runs tasks of one queue in `threads` threads, until `stop` is set."""

    def __init__(self, backend: MqksBackend, queue_name: str, threads: int) -> None:
        self.backend = backend
        self.queue_name = queue_name
        self.threads = threads
        self.id = f"{socket.gethostname()}:{os.getpid()}"

    def run(self, stop: threading.Event) -> None:
        queue = self.backend.queue(self.queue_name)
        if letters := self.backend.settings["dead_letters"]:
            self.backend.client.set_queue(queue, dead_letter_queue=letters)
        with self.backend.client.consume(queue, [queue], prefetch=self.threads) as consumer:
            work = [
                threading.Thread(target=self._work, args=(consumer,)) for _ in range(self.threads)
            ]
            for thread in work:
                thread.start()
            while not stop.wait(0.2) and any(thread.is_alive() for thread in work):
                pass
            consumer.stop()
            for thread in work:
                thread.join()

    def _work(self, consumer: BlockingConsumer) -> None:
        for message in consumer:
            close_old_connections()
            try:
                self._handle(message)
            except Exception:
                _log.exception("task %s could not be handled", message.id)
                message.release(delay_s=BROKEN_S)
            finally:
                close_old_connections()

    def _handle(self, message: Message) -> None:
        row = self._row(message)
        if row.finished_at is not None:  # Its ack was lost.
            message.ack()
            return
        limits = self.backend.settings
        try:
            result = result_of(row)
        except Exception as error:
            _failed(row, error, final=True)
            message.reject(dead=True, reason=error)
            return
        if row.attempts - len(row.errors) >= limits["losses"]:
            lost = RuntimeError(f"{limits['losses']} workers were lost with it")
            _failed(row, lost, final=True)
            task_finished.send(type(self.backend), task_result=result_of(row))
            message.reject(dead=True, reason=lost)
            return
        row.status, row.last_attempted_at = "RUNNING", now()
        row.started_at = row.started_at or row.last_attempted_at
        row.worker_ids = [*row.worker_ids, self.id]
        row.save()
        result = result_of(row)
        task_started.send(type(self.backend), task_result=result)
        try:
            value = _call(result)
        except BaseException as error:
            retries = getattr(result.task.func, "retries", limits["retries"])
            final = len(row.errors) + 1 >= retries
            _failed(row, error, final=final)
            if final:
                task_finished.send(type(self.backend), task_result=result_of(row))
                message.reject(dead=True, reason=error)
            else:
                first, largest = limits["backoff"]
                message.reject(delay_s=min(first * 2 ** (len(row.errors) - 1), largest))
        else:
            row.status, row.finished_at, row.return_value = "SUCCESSFUL", now(), value
            row.save()
            task_finished.send(type(self.backend), task_result=result_of(row))
            message.ack()

    def _row(self, message: Message) -> TaskRow:
        """The row of the task, also if the transaction of its enqueue has not ended."""
        told: dict[str, Any] = message.json()
        for key in ("enqueued_at", "run_after"):
            told[key] = told[key] and datetime.fromisoformat(told[key])
        told |= {"backend": self.backend.alias, "queue_name": self.queue_name}
        row: TaskRow = TaskRow.objects.get_or_create(id=message.id, defaults=told)[0]
        row.unsent = False
        return row


def _failed(row: TaskRow, error: BaseException, *, final: bool) -> None:
    kind = type(error)
    text = "".join(traceback.format_exception(error))
    row.errors = [*row.errors, [f"{kind.__module__}.{kind.__qualname__}", text]]
    row.status = "FAILED" if final else "READY"
    row.finished_at = now() if final else None
    row.save()


def _call(result: TaskResult) -> Any:
    """What the task returns, as JSON has it. Raises TypeError for what JSON does not have."""
    args = [TaskContext(task_result=result)] if result.task.takes_context else []
    return json.loads(json.dumps(result.task.call(*args, *result.args, **result.kwargs)))


def relay(backend: MqksBackend) -> int:
    """Publish what the outbox has, each once, and return the number.

    What the broker refuses is logged and stays; what cannot be sent at all has failed.
    """
    waiting = TaskRow.objects.filter(unsent=True, backend=backend.alias).order_by("enqueued_at")
    rows = list(waiting[:RELAY_ROWS])
    sent = list[str]()

    def publish(row: TaskRow) -> Exception | None:
        try:
            backend.publish(row)
        except (RequestFailed, InvalidRequest) as error:
            return error
        return None

    try:
        with ThreadPoolExecutor(RELAY_THREADS) as pool:
            for row, error in zip(rows, pool.map(publish, rows), strict=True):
                if error is None:
                    sent.append(row.id)
                    continue
                _log.error("task %s could not be published: %s", row.id, error)
                if isinstance(error, InvalidRequest):
                    row.unsent = False
                    _failed(row, error, final=True)
    finally:
        TaskRow.objects.filter(id__in=sent).update(unsent=False)
    return len(sent)


def expire(backend: MqksBackend) -> int:
    """Delete results that are older than `results_expire_s`, and return their number."""
    before = now() - timedelta(seconds=backend.settings["results_expire_s"])
    old = TaskRow.objects.filter(backend=backend.alias, finished_at__lt=before)
    with transaction.atomic():
        ids = list(old.values_list("id", flat=True)[:RELAY_ROWS])
        return int(TaskRow.objects.filter(id__in=ids).delete()[0])


def keep(stop: threading.Event) -> None:
    """Relay the outbox and expire results of all backends, until `stop` is set."""
    expires_s = 0.0
    while not stop.is_set():
        is_full, is_due = False, time.monotonic() >= expires_s
        if is_due:
            expires_s = time.monotonic() + EXPIRE_S
        for alias in task_backends:
            try:
                close_old_connections()
                backend = task_backends[alias]
                if not isinstance(backend, MqksBackend):
                    continue
                if backend.settings["outbox"]:
                    is_full |= relay(backend) == RELAY_ROWS
                if is_due and expire(backend) == RELAY_ROWS:
                    expires_s = 0.0
            except Exception:
                _log.exception("the outbox of %s could not be relayed", alias)
        if not is_full:
            stop.wait(RELAY_S)
    close_old_connections()
