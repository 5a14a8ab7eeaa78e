"""Warnings about queues whose messages wait for a long time.

The one rule: it checks once a minute, in slices, so that it costs nothing per message, and it warns
once.
"""

from collections.abc import Iterator
from typing import Final

import anyio

from mqks import log
from mqks.broker.broker import Broker
from mqks.broker.spine.queue.queue import Queue

LOOK_S: Final = 60.0
SLICE_QUEUES: Final = 500
"""Queues checked before other tasks run: a millisecond."""
LINES_MAX: Final = 100
"""Warnings per check; the others follow at the next checks."""


class Lag:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._age_s = broker.settings.queue_age_warning_s
        self._told: set[Queue] = set()
        """Queues with a warning, until they are better."""

    async def run(self) -> None:
        while self._age_s:
            await anyio.sleep(min(LOOK_S, self._age_s))
            for _ in self._check():
                await anyio.lowlevel.checkpoint()

    def _check(self) -> Iterator[None]:
        queues = list(self._broker.queues.values())
        self._told &= {*queues}
        lines = LINES_MAX
        for number, queue in enumerate(queues):
            age_s = queue.oldest_age_s or 0.0
            if age_s < self._age_s / 2:
                self._told.discard(queue)
            elif age_s >= self._age_s and lines and queue not in self._told:
                lines -= 1
                self._told.add(queue)
                log.warning(
                    "queue_waits",
                    queue=log.name(queue.name),
                    age_s=age_s,
                    ready=queue.ready,
                    consumers=len(queue.consumers),
                )
            if number % SLICE_QUEUES == 0:
                yield
