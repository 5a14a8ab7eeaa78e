"""Messages that are published together: what comes in, however it comes in.

The one rule: all of them go to the same queues, on terms of one kind.
"""

from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

from mqks.broker.spine.log.pending import Mark


class PublishTerms(NamedTuple):
    """The flags of a publish; times in microseconds since 1970, 0 for none."""

    due_us: int = 0
    is_dated: bool = False
    """Due by the wall clock, even when the clock is set; otherwise after a delay."""
    expires_us: int = 0
    clock_us: int = 0
    """When it is due after a delay, by the monotonic clock."""

    def mark(self, message_id: bytes) -> Mark:
        return Mark(
            is_dated=self.is_dated,
            due_us=self.due_us,
            expires_us=self.expires_us,
            id_crc=crc32(message_id),
        )


class NewMessages(NamedTuple):
    ids: list[bytes]
    bodies: list[bytes]
    """In their stored form."""
    terms: PublishTerms | None = None
    """Those of all; with none they have no attributes either."""
    each: Sequence[PublishTerms] = ()
    """The terms of each, if they differ: all are scheduled, all have a TTL, or none."""
