"""The tasks of the workers that tests start: `dramatiq tests.kit.dramatiq_tasks`."""

import os

import dramatiq

from mqks.dramatiq import MqksBroker
from tests.kit import task_notes

broker = MqksBroker(os.environ["MQKS_URL"])
dramatiq.set_broker(broker)


@dramatiq.actor(max_retries=3, min_backoff=1, max_backoff=10)
def note(path: str, what: str) -> None:
    task_notes.note(path, what)


@dramatiq.actor
def hold(path: str, gate: str) -> None:
    task_notes.hold(path, gate)
