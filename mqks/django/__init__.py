"""Django Tasks on MQKS: `"BACKEND": "mqks.django.MqksBackend"`, with `mqks.django` in
INSTALLED_APPS. `manage.py mqks_worker` runs the tasks."""

from collections.abc import Callable
from typing import TypeVar

from mqks.client import requests
from mqks.client.requests import Backoff
from mqks.django.backend import MqksBackend

F = TypeVar("F", bound=Callable[..., object])


def limits(*, retries: int | None = None, backoff: Backoff | None = None) -> Callable[[F], F]:
    """Below `@task`: the number of failures of this task, and its pauses in seconds, instead of
    those of `OPTIONS`. Other backends ignore it. Raises InvalidRequest."""
    requests.reject(None, False, retries, backoff)  # What is wrong raises now.
    given = {"retries": retries, "backoff": backoff}

    def limited(function: F) -> F:
        vars(function).update({name: value for name, value in given.items() if value is not None})
        return function

    return limited


__all__ = ["MqksBackend", "limits"]
