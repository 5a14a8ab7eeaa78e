"""Django Tasks on MQKS: `"BACKEND": "mqks.django.MqksBackend"`, with `mqks.django` in
INSTALLED_APPS. `manage.py mqks_worker` runs the tasks."""

from collections.abc import Callable
from typing import TypeVar

from mqks.client import requests
from mqks.client.requests import Backoff, Unique
from mqks.django.backend import MqksBackend, checked

F = TypeVar("F", bound=Callable[..., object])


def limits(
    *,
    retries: int | None = None,
    backoff: Backoff | None = None,
    unique: bool | str | Unique | Callable[..., str | Unique | None] = False,
) -> Callable[[F], F]:
    """Below `@task`: the number of failures of this task, and its pauses in seconds, instead of
    those of `OPTIONS`. While a task with the key `unique` waits in a queue, another one is not
    enqueued; True is a key of the task and its arguments, a function makes it of the arguments, or
    None for no key. Other backends ignore it. Raises InvalidRequest."""
    requests.reject(None, False, retries, backoff)  # What is wrong raises now.
    if isinstance(unique, str | Unique):
        checked(unique)
    given = {"retries": retries, "backoff": backoff, "unique": unique or None}

    def limited(function: F) -> F:
        vars(function).update({name: value for name, value in given.items() if value is not None})
        return function

    return limited


__all__ = ["MqksBackend", "limits"]
