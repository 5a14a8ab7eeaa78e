"""The tasks of the consumers that tests start: `huey_consumer tests.kit.huey_tasks.huey`.

With GREENLETS in the environment, gevent has changed the standard library first.
"""

import os

if os.environ.get("GREENLETS"):
    from gevent import monkey  # type: ignore[import-untyped]

    monkey.patch_all()

from typing import Any

from huey import signals

from mqks.huey import MqksHuey
from tests.kit import task_notes

huey: Any = MqksHuey("shop", policy={"losses": 4, "dead_letter_queue": "dead"})


@huey.task(retries=3, retry_delay=0.01)
def note(path: str, what: str) -> None:
    task_notes.note(path, what)


@huey.task()
def hold(path: str, gate: str) -> str:
    task_notes.hold(path, gate)
    return "held"


@huey.task()
def die() -> None:
    os._exit(1)


@huey.signal(signals.SIGNAL_ERROR)
def told(signal: str, task: object, error: Exception) -> None:
    print(signal, error, flush=True)
