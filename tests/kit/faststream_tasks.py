"""The application of the workers that tests start: `python -m tests.kit.faststream_tasks`."""

import asyncio
import os
from pathlib import Path

from faststream import FastStream

from mqks.faststream import MqksBroker
from tests.kit import task_notes

broker = MqksBroker(graceful_timeout=60)
app = FastStream(broker)


@broker.subscriber("note", max_workers=10, backoff=0.01)
def note(path: str, what: str) -> None:
    task_notes.note(path, what)


@broker.subscriber("hold", prefetch=5)
async def hold(path: str, gate: str) -> None:
    """Until there is a file."""
    task_notes.write(path, "begun")
    while not Path(gate).exists():
        await asyncio.sleep(0.01)
    task_notes.write(path, "done")


@broker.subscriber("die", policy={"losses": 4, "dead_letter_queue": "dead"})
async def die() -> None:
    os._exit(1)


if __name__ == "__main__":
    app.after_startup(lambda: print("listening", flush=True))
    asyncio.run(app.run())
