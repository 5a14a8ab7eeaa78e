"""taskiq: in streams of Redis, and in durable queues of RabbitMQ, which confirms."""

import asyncio
from pathlib import Path
from typing import Any

from benchmarks.libraries import BIN, KIND, URL, note

broker: Any
match KIND:
    case "mqks":
        from mqks.taskiq import MqksBroker

        broker = MqksBroker(URL)
    case "redis":
        from taskiq_redis import RedisStreamBroker

        broker = RedisStreamBroker(URL)
    case _:
        from taskiq_aio_pika import AioPikaBroker

        broker = AioPikaBroker(URL)
WORKER = [str(BIN / "taskiq"), "worker", f"{__name__}:broker", "--workers", "2"]
runner = asyncio.Runner()


@broker.task  # type: ignore[untyped-decorator]
async def noted(path: str, number: int) -> None:
    note(path, number)


@broker.task  # type: ignore[untyped-decorator]
async def touch(path: str) -> None:
    Path(path).touch()


async def _fill(path: str, count: int) -> None:
    for number in range(count):
        await noted.kiq(path, number)


def fill(path: str, count: int) -> None:
    runner.run(_fill(path, count))


def tell(path: str) -> None:
    if not broker.is_worker_process and not hasattr(tell, "is_started"):
        runner.run(broker.startup())
        vars(tell)["is_started"] = True
    runner.run(touch.kiq(path))
