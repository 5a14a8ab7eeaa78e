"""The application of the workers that tests start: `python -m tests.kit.faststream_tasks`."""

import asyncio
import os
from pathlib import Path

from faststream import FastStream

from mqks.faststream import MqksBroker

broker = MqksBroker(graceful_timeout=60)
app = FastStream(broker)


@broker.subscriber("note", max_workers=10, backoff=0.01)
def note(path: str, what: str) -> None:
    """Its effect is a line of a file. One in a hundred fails first."""
    if what.endswith("99") and not (failed := Path(f"{path}.{what}")).exists():
        failed.touch()
        raise RuntimeError("at first")
    with open(path, "a") as file:
        file.write(f"{what}\n")


@broker.subscriber("hold", prefetch=5)
async def hold(path: str, gate: str) -> None:
    """Until there is a file."""
    with open(path, "a") as file:
        file.write("begun\n")
    while not Path(gate).exists():
        await asyncio.sleep(0.01)
    with open(path, "a") as file:
        file.write("done\n")


@broker.subscriber("die", policy={"losses": 3, "dead_letter_queue": "dead"})
async def die() -> None:
    os._exit(1)


if __name__ == "__main__":
    app.after_startup(lambda: print("listening", flush=True))
    asyncio.run(app.run())
