"""Dead messages without a dead-letter queue in the log: of each queue at most once a minute.

The one rule: nothing is written for a single message but the first of its queue.
"""

import asyncio
import logging
from collections import Counter
from typing import Final

from mqks.broker.queue.shared import Place
from mqks.limits import DROPPED_LINES_MAX
from mqks.server import log

MINUTE_S: Final = 60.0
WANTED: Final = frozenset(("ttl", "overflow"))
"""Reasons for which a queue without dead letters drops messages as it was told to."""


class DroppedLog:
    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._counts: dict[bytes, Counter[str]] = {}
        """By queue and reason, since the last line about this queue, which is in this minute."""
        self._suppressed = 0
        """In queues beyond the limit."""

    def __call__(self, queue: Place, count: int, reason: str) -> None:
        if not self._counts:
            self._loop.call_later(MINUTE_S, self._next_minute)
        if (counts := self._counts.get(queue.name)) is not None:
            counts[reason] += count
        elif len(self._counts) < DROPPED_LINES_MAX:
            self._tell(queue.name, Counter({reason: count}))
        else:
            self._suppressed += count

    def _tell(self, queue: bytes, counts: Counter[str]) -> None:
        self._counts[queue] = Counter()
        log.event(
            "messages_dropped",
            logging.INFO if counts.keys() <= WANTED else logging.WARNING,
            queue=log.name(queue),
            count=counts.total(),
            reason=",".join(sorted(counts)),
        )

    def _next_minute(self) -> None:
        counts, self._counts = self._counts, {}
        suppressed, self._suppressed = self._suppressed, 0
        for queue, some in counts.items():
            if some:
                self._tell(queue, some)
        if suppressed:
            log.warning("drops_suppressed", count=suppressed)
        if self._counts:
            self._loop.call_later(MINUTE_S, self._next_minute)
