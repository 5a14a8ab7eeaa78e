"""The tasks of the workers that tests start: `taskiq worker tests.kit.taskiq_tasks:broker`."""

import os
from pathlib import Path

import anyio
from taskiq import SimpleRetryMiddleware

from mqks.taskiq import MqksBroker, MqksResultBackend, MqksScheduleSource
from tests.kit.task_notes import write

results = MqksResultBackend[object]()
broker = MqksBroker(
    prefetch=int(os.environ.get("PREFETCH", "100")),
    policy={"losses": 4, "dead_letter_queue": "dead"},
)
broker.with_result_backend(results).add_middlewares(SimpleRetryMiddleware())
source = MqksScheduleSource(broker)


@broker.task
async def add(a: int, b: int) -> int:
    return a + b


@broker.task
def note(path: str, what: str) -> None:
    write(path, what)


@broker.task
async def hold(path: str, gate: str) -> None:
    """Until there is a file."""
    write(path, "begun")
    while not Path(gate).exists():
        await anyio.sleep(0.01)
    write(path, "done")


@broker.task
async def die() -> None:
    os._exit(1)
