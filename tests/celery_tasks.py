"""The tasks of the workers that tests start: `celery -A tests.celery_tasks worker`."""

import os
import time
from typing import Any

from celery import Celery

app: Any = Celery("tasks", broker=os.environ["BROKER"], backend=os.environ.get("RESULTS", "rpc://"))
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_hijack_root_logger=False,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    task_soft_time_limit=60,
)


@app.task  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    return a + b


@app.task  # type: ignore[untyped-decorator]
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task  # type: ignore[untyped-decorator]
def note(path: str, what: str) -> None:
    """Its effect is a line of a file."""
    with open(path, "a") as file:
        file.write(f"{what}\n")


@app.task  # type: ignore[untyped-decorator]
def sleep(seconds: float, path: str) -> None:
    note(path, "begun")
    time.sleep(seconds)
    note(path, "done")
