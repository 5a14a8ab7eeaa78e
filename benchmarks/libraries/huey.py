"""huey: with Redis, a task that a killed worker ran is lost, since nothing is acked."""

from pathlib import Path
from typing import Any

from huey import RedisHuey

from benchmarks.libraries import BIN, KIND, URL, note
from mqks.huey import MqksHuey

huey: Any = (MqksHuey if KIND == "mqks" else RedisHuey)("bench", url=URL, results=False)
WORKER = [str(BIN / "huey_consumer"), f"{__name__}.huey", "-k", "process", "-w", "2"]
noted: Any = huey.task()(note)


@huey.task()  # type: ignore[untyped-decorator]
def touch(path: str) -> None:
    Path(path).touch()


def fill(path: str, count: int) -> None:
    for number in range(count):
        noted(path, number)


def tell(path: str) -> None:
    touch(path)
