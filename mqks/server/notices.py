"""What the broker reports, in the log.

The one rule: nothing is written for a single message but the first of its queue. Of each queue
whose dead messages have no dead-letter queue there is at most one line a minute.
"""

import asyncio
import logging
from collections import Counter
from typing import Final

from mqks import log
from mqks.audit import AuditRecord, Who
from mqks.audit_log import tell
from mqks.broker.spine.base.notices import Notices
from mqks.limits import DROPPED_LINES_MAX
from mqks.server.error_log import ErrorLog

MINUTE_S: Final = 60.0
WANTED: Final = frozenset(("ttl", "overflow"))
"""Reasons for which a queue without dead letters drops messages as it was told to."""


class LoggedNotices(Notices):
    def __init__(self, errors: ErrorLog) -> None:
        self._errors = errors
        self._loop = asyncio.get_running_loop()
        self._counts: dict[bytes, Counter[str]] = {}
        """By queue and reason, since the last line about this queue, which is in this minute."""
        self._suppressed = 0
        """In queues beyond the limit."""

    def queue_full(self, queue: bytes, ready: int) -> None:
        log.warning("queue_full", queue=log.name(queue), ready=ready)

    def queue_has_room(self, queue: bytes, ready: int) -> None:
        log.event("queue_has_room", queue=log.name(queue), ready=ready)

    def queue_nearly_full(self, queue: bytes, ready: int) -> None:
        log.warning("queue_nearly_full", queue=log.name(queue), ready=ready)

    def unacked_full(self, unacked_bytes: int) -> None:
        log.warning("unacked_full", unacked_bytes=unacked_bytes)

    def tick_failed(self, schedule: bytes, reason: str) -> None:
        log.warning("tick_failed", schedule=log.name(schedule), reason=reason)

    def batch_expired(self, batch: bytes) -> None:
        if self._errors.allows():
            log.warning("batch_expired", batch=log.name(batch))

    def timer_repeats(self, timer: str) -> None:
        if self._errors.allows():
            log.error("timer_repeats", timer=timer)

    def audited(self, record: AuditRecord) -> None:
        tell(record)

    def literal_mask(self, who: Who, queue: bytes, event: bytes) -> None:
        if self._errors.allows():
            log.warning(
                "literal_mask",
                **log.who(*who),
                queue=log.name(queue),
                bound_event=log.name(event),
            )

    def epoch_is_stale(self, who: Who, queue: bytes, read_up_to: int, next_seq: int) -> None:
        if self._errors.allows():
            log.error(
                "epoch_is_stale",
                **log.who(*who),
                queue=log.name(queue),
                read_up_to=read_up_to,
                next_seq=next_seq,
                todo="stop the server and run mqks new-epoch",
            )

    def dropped(self, queue: bytes, count: int, reason: str) -> None:
        if not self._counts:
            self._loop.call_later(MINUTE_S, self._next_minute)
        if (counts := self._counts.get(queue)) is not None:
            counts[reason] += count
        elif len(self._counts) < DROPPED_LINES_MAX:
            self._tell(queue, Counter({reason: count}))
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
