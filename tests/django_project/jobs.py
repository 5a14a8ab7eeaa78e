"""What the tests let the worker do."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mqks import Unique
from mqks.django import limits
from mqks.django.seam import task_finished, task_started
from tests.kit.task_notes import write as note

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


def _signalled(signal: Any, task_result: Any, **_: Any) -> None:
    if task_result.task.func.__name__ == "waits" and "TEST_SIGNALS" in os.environ:
        kind = "started" if signal is task_started else "finished"
        note(os.environ["TEST_SIGNALS"], f"{kind} {task_result.status}")


task_started.connect(_signalled)
task_finished.connect(_signalled)


@task
def write(path: str, text: str) -> str:
    note(path, text)
    return text


@task
@limits(unique=True)
def write_once(path: str, text: str) -> str:
    note(path, text)
    return text


@task(queue_name="own")
@limits(unique=lambda user, force=False: None if force else Unique(f"user-{user}", until="acked"))
def of_user(user: int, force: bool = False) -> int:
    return user


@task
@limits(unique=lambda user: Unique("x", on="replace"))
def replaces(user: int) -> None:
    pass


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


class Mute(Exception):
    """Its text raises."""

    def __str__(self) -> str:
        raise ValueError("no text")

    def __bool__(self) -> bool:
        raise ValueError("neither")

    __repr__ = __str__


class Hostile(Exception):
    """Every look at it raises."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(name)


class Odd(Exception):
    __module__ = "a\0\ud800"


def _raise(error: BaseException) -> None:
    raise error


def _cyclic() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


ODD: dict[str, Callable[[], object]] = {
    "nan": lambda: float("nan"),
    "cyclic": _cyclic,
    "large": lambda: "x" * 20_000_000,
    "NUL": lambda: "a\0b",
    "surrogate": lambda: {"x": ["\ud800"]},
    "error with NUL": lambda: _raise(ValueError("a\0b")),
    "error with surrogate": lambda: _raise(ValueError("a\ud800b")),
    "error that is not Latin": lambda: _raise(ValueError("\u2192")),
    "error of 100 MB": lambda: _raise(ValueError("x" * 100_000_000)),
    "error that raises": lambda: _raise(Mute()),
    "error that raises at any look": lambda: _raise(Hostile()),
    "error of an odd class": lambda: _raise(Odd()),
    "exit": lambda: _raise(SystemExit()),
}


@task
@limits(retries=2, backoff=0.1)
def odd(path: str, kind: str) -> object:
    note(path, kind)
    return ODD[kind]()
