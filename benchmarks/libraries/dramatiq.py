"""dramatiq: RabbitMQ confirms."""

from pathlib import Path
from typing import Any

import dramatiq

from benchmarks.libraries import BIN, KIND, URL, note

broker: dramatiq.Broker
match KIND:
    case "mqks":
        from mqks.dramatiq import MqksBroker

        broker = MqksBroker(URL)
    case "redis":
        from dramatiq.brokers.redis import RedisBroker

        broker = RedisBroker(url=URL)
    case _:
        from dramatiq.brokers.rabbitmq import RabbitmqBroker

        broker = RabbitmqBroker(url=URL, confirm_delivery=True)
dramatiq.set_broker(broker)
WORKER = [str(BIN / "dramatiq"), __name__, "--processes", "2", "--threads", "1"]
noted: Any = dramatiq.actor(note)


@dramatiq.actor
def touch(path: str) -> None:
    Path(path).touch()


def fill(path: str, count: int) -> None:
    for number in range(count):
        noted.send(path, number)


def tell(path: str) -> None:
    touch.send(path)
