"""Celery: tasks are acked late, and RabbitMQ confirms."""

import sys
from pathlib import Path
from typing import Any

from celery import Celery

from benchmarks.libraries import URL, note

app: Any = Celery("bench", broker=URL)
app.conf.update(
    task_acks_late=True, task_ignore_result=True, broker_connection_retry_on_startup=True
)
if URL.startswith("amqp"):
    app.conf.broker_transport_options = {"confirm_publish": True}
WORKER = [sys.executable, "-m", "celery", "-A", __name__, "worker", "-c", "2"]
noted: Any = app.task(name="note")(note)


@app.task(name="touch")  # type: ignore[untyped-decorator]
def touch(path: str) -> None:
    Path(path).touch()


def fill(path: str, count: int) -> None:
    for number in range(count):
        noted.delay(path, number)
    with app.producer_or_acquire() as producer:  # RabbitMQ was asked for confirms.
        assert getattr(producer.channel.connection, "confirm_publish", True)


def tell(path: str) -> None:
    touch.delay(path)
