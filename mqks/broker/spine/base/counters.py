"""Counters since the start; `docs/protocol.md` describes them under stats."""

from typing import Final

REASONS: Final = ("rejects", "losses", "deliveries", "ttl", "overflow", "dead")
"""Why a message is dead."""


class Counters:
    __slots__ = (
        *("consumed", "dead", "delivered", "dropped", "errors", "published"),
        *("queued", "redelivered", "rejected", "unroutable"),
    )

    def __init__(self) -> None:
        self.published = self.queued = self.unroutable = self.errors = 0
        self.delivered = self.redelivered = self.consumed = self.rejected = 0
        self.dead = dict.fromkeys(REASONS, 0)
        """By reason."""
        self.dropped = 0
        """Dead messages without a dead-letter queue."""
