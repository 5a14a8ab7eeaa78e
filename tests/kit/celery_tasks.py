"""The tasks of the workers that tests start: `celery -A tests.kit.celery_tasks worker`.

None is shared: each test has the module, and its app, anew.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import SoftTimeLimitExceeded

from tests.kit import task_notes
from tests.kit.task_notes import write

app: Any = Celery("tasks", broker=os.environ["BROKER"], backend=os.environ["RESULTS"])
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    worker_send_task_events=True,
    task_send_sent_event=True,
)
if interval := os.environ.get("HEARTBEAT"):
    app.conf.broker_heartbeat = float(interval)
if authority := os.environ.get("BROKER_CA"):
    app.conf.broker_use_ssl = {"ca_certs": authority}


@app.task(shared=False)  # type: ignore[untyped-decorator]
def add(a: int, b: int) -> int:
    return a + b


@app.task(shared=False)  # type: ignore[untyped-decorator]
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task(shared=False)  # type: ignore[untyped-decorator]
def note(path: str, what: str) -> None:
    write(path, what)


@app.task(shared=False)  # type: ignore[untyped-decorator]
def sleep(seconds: float, path: str) -> None:
    write(path, "begun")
    time.sleep(seconds)
    write(path, "done")


@app.task(shared=False)  # type: ignore[untyped-decorator]
def hold(path: str, gate: str) -> None:
    task_notes.hold(path, gate)


@app.task(shared=False, soft_time_limit=1)  # type: ignore[untyped-decorator]
def softly(path: str) -> str:
    try:
        time.sleep(600)
    except SoftTimeLimitExceeded:
        write(path, "soft")
        return "in time"
    return "too late"


@app.task(shared=False, time_limit=1, acks_late=False)  # type: ignore[untyped-decorator]
def hardly() -> None:
    time.sleep(600)


@app.task(shared=False, rate_limit="3/m")  # type: ignore[untyped-decorator]
def rated(path: str) -> None:
    write(path, str(time.time()))


@app.task(shared=False)  # type: ignore[untyped-decorator]
def die_once(path: str) -> None:
    """Its process, of those of the pool."""
    first = not Path(path).exists()
    write(path, "begun")
    if first:
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, "done")
