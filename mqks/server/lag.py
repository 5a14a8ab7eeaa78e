"""Warnings about queues whose messages wait for a long time.

The one rule: it checks once a minute, in slices, so that it costs nothing per message, and it warns
once.
"""

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


async def warn(broker: Broker) -> None:
    warned: set[Queue] = set()
    """Queues with a warning, until they are better."""
    while limit_s := broker.settings.queue_age_warning_s:
        await anyio.sleep(min(LOOK_S, limit_s))
        queues = list(broker.queues.values())
        warned &= {*queues}
        lines = LINES_MAX
        for number, queue in enumerate(queues):
            age_s = queue.oldest_age_s or 0.0
            if age_s < limit_s / 2:
                warned.discard(queue)
            elif age_s >= limit_s and lines and queue not in warned:
                lines -= 1
                warned.add(queue)
                log.warning(
                    "queue_waits",
                    queue=log.name(queue.name),
                    age_s=age_s,
                    ready=queue.ready,
                    consumers=len(queue.consumers),
                )
            if number % SLICE_QUEUES == 0:
                await anyio.lowlevel.checkpoint()
