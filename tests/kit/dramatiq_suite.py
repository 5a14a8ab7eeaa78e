"""What dramatiq's own tests import and its sources lack: their `conftest.py` and their `common.py`,
both from this file. The brokers of all fixtures are ours, on the server at BROKER.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
import pika
import pytest
from dramatiq.rate_limits.backends import StubBackend as Limits
from dramatiq.results.backends import StubBackend as Results

from mqks.dramatiq import MqksBroker

RABBITMQ_USERNAME = RABBITMQ_PASSWORD = "guest"
RABBITMQ_CREDENTIALS = pika.PlainCredentials(RABBITMQ_USERNAME, RABBITMQ_PASSWORD)
skip_unless_rabbit_mq = pytest.mark.skip("it makes a broker of RabbitMQ")
skip_in_ci = skip_on_pypy = skip_on_windows = pytest.mark.filterwarnings("default")


class DeadLetters(dramatiq.Middleware):
    def __init__(self) -> None:
        self.all = list[tuple[dramatiq.MessageProxy, BaseException | None]]()

    def before_nack(self, broker: dramatiq.Broker, message: dramatiq.MessageProxy) -> None:
        self.all.append((message, message._exception))


class TestedBroker(MqksBroker):
    """Tests pass what the `join` of other brokers takes, and ask as if it were the stub broker."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dead = DeadLetters()

    def join(
        self,
        queue_name: str,
        min_successes: int = 1,
        *,
        timeout: float | None = None,
        fail_fast: bool | None = None,
    ) -> None:
        super().join(queue_name, timeout=timeout)
        if fail_fast is False:
            self.dead.all.clear()
        if self.dead.all:
            raise self.dead.all[0][1] or Exception("without a reason")

    @property
    def dead_letters(self) -> list[dramatiq.MessageProxy]:
        return [message for message, _ in self.dead.all]


@contextmanager
def worker(*args: Any, **kwargs: Any) -> Iterator[dramatiq.Worker]:
    running = dramatiq.Worker(*args, **kwargs)
    running.start()
    try:
        yield running
    finally:
        running.stop()


@pytest.fixture
def broker() -> Iterator[MqksBroker]:
    made = TestedBroker(os.environ["BROKER"], prefix=f"{random.randrange(1 << 40)}.")
    made.emit_after("process_boot")
    dramatiq.set_broker(made)
    yield made
    made.flush_all()
    made.close()


@pytest.fixture
def stub_broker(broker: TestedBroker) -> TestedBroker:
    broker.add_middleware(broker.dead)
    return broker


@pytest.fixture
def ran_by(broker: MqksBroker) -> Iterator[dramatiq.Worker]:
    with worker(broker, worker_timeout=100, worker_threads=32) as running:
        yield running


for name in ("rabbitmq_broker", "redis_broker"):
    globals()[name] = pytest.fixture(name=name)(lambda broker: broker)
for name in ("stub_worker", "rabbitmq_worker", "redis_worker"):
    globals()[name] = pytest.fixture(name=name)(lambda ran_by: ran_by)


@pytest.fixture
def result_backend() -> Results:
    return Results()


@pytest.fixture
def redis_result_backend(result_backend: Results) -> Results:
    return result_backend


@pytest.fixture
def rate_limiter_backend() -> Limits:
    return Limits()
