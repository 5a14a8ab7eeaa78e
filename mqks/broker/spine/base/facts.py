"""What the broker can ask about the journal.

The one rule: no method reads the disk.
"""

from collections.abc import Iterator
from typing import Any


class Facts:
    """Those of a broker without a journal."""

    version = ""

    @property
    def epoch(self) -> str:
        """Different for each database created."""
        return ""

    def epoch_of(self, queue_id: int) -> str:
        """The epoch of a queue, which changes when it is deleted and created again."""
        return f"{self.epoch}-{queue_id}"

    def age_s(self, queue_id: int, number: int) -> float:
        """Seconds since a message arrived, within ten; 0 if it is not durable yet."""
        return 0.0

    def arrived_us(self, queue_id: int, number: int) -> int:
        """When a message arrived, in microseconds since 1970, or up to ten seconds later; 0 if it
        is not durable yet."""
        return 0

    def arrived_by(self, queue_id: int, time_us: int, first: int, end: int) -> tuple[int, int]:
        """The next numbers from `first` on and below `end` whose messages arrived by this time: the
        first one, and where they end. There may be none before the place that is returned twice,
        since a step looks at some only."""
        return end, end

    def bytes_of(self, queue_id: int, number: int) -> int:
        """Approximate length of a durable message; 0 if it is not durable yet."""
        return 0

    def arrivals(self, queue_id: int) -> Iterator[tuple[int, int]]:
        """All living messages of a queue in stretches, by ascending numbers: the first number of
        each stretch, and the arrival of its last message. The queue may change meanwhile."""
        return iter(())

    def journal(self) -> dict[str, Any]:
        """What `stats journal` tells of the journal itself."""
        return {}
