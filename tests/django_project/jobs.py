"""What the tests let the worker do."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from mqks.django import limits
from mqks.django.seam import task_finished, task_started

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


def _signalled(signal: Any, task_result: Any, **_: Any) -> None:
    if task_result.task.func.__name__ == "waits" and "TEST_SIGNALS" in os.environ:
        kind = "started" if signal is task_started else "finished"
        with open(os.environ["TEST_SIGNALS"], "a") as file:
            file.write(f"{kind} {task_result.status}\n")


task_started.connect(_signalled)
task_finished.connect(_signalled)


@task
def write(path: str, text: str) -> str:
    with open(path, "a") as file:
        file.write(f"{text}\n")
    return text


@task
async def add(a: int, b: int) -> int:
    return a + b


@task(takes_context=True)
def attempt(context: Any) -> int:
    return int(context.attempt)


@task
@limits(retries=3, backoff=0.1)
def fails_twice(path: str) -> int:
    with open(path, "a") as file:
        file.write("x")
    if Path(path).stat().st_size < 3:
        raise ValueError("not yet")
    return 3


@task
def fails() -> None:
    raise ValueError("never")


@task
def kills() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@task
def returns_no_json() -> object:
    return object()


@task
def waits(path: str) -> str:
    """Until the file is gone."""
    Path(path).touch()
    while Path(path).exists():
        time.sleep(0.01)
    return "done"
