"""The tasks of the workers that tests start: `dramatiq tests.kit.dramatiq_tasks`."""

import os
import time
from pathlib import Path

import dramatiq

from mqks.dramatiq import MqksBroker

broker = MqksBroker(os.environ["BROKER"])
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=1, max_backoff=10)
def note(path: str, what: str) -> None:
    """Its effect is a line of a file. One in a hundred fails first."""
    if what.endswith("99") and not (failed := Path(f"{path}.{what}")).exists():
        failed.touch()
        raise RuntimeError("at first")
    with open(path, "a") as file:
        file.write(f"{what}\n")


@dramatiq.actor
def hold(path: str, gate: str) -> None:
    """Until there is a file."""
    note.fn(path, "begun")
    while not Path(gate).exists():
        time.sleep(0.01)
    note.fn(path, "done")
