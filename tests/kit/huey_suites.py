"""A plugin of pytest for huey's own tests: `python -m pytest -p huey_suites FILE ...`, with its
directory in the path, in the directory of huey's sources.

Their files run unmodified. What they make without a server, a MemoryHuey, is ours on the one of
MQKS_URL; each has a name of its own there.
"""

import itertools
from typing import Any

import huey.api

from mqks.huey import MqksHuey

NUMBERS = itertools.count()


class MemoryHuey(MqksHuey):
    def __init__(self, name: str = "huey", **arguments: Any) -> None:
        super().__init__(f"{name}.{next(NUMBERS)}", **arguments)


def pytest_configure() -> None:
    modules: tuple[Any, ...] = huey, huey.api
    for module in modules:
        module.MemoryHuey = MemoryHuey
