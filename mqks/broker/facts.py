"""What the broker is told of the journal under it.

The one rule: looking costs no reading of the disk.
"""

from collections.abc import Iterator
from typing import Any


class Facts:
    """A broker without a journal; the server puts its own in the place."""

    version = ""
    epoch = ""
    """Another one for each database made."""

    def epoch_of(self, queue_id: int) -> str:
        """A queue that is deleted and made again begins anew, as a database does."""
        return f"{self.epoch}-{queue_id}"

    def age_s(self, queue_id: int, number: int) -> float:
        """Seconds since a message came, within ten; 0 for one that is not durable yet."""
        return 0.0

    def arrived_us(self, queue_id: int, number: int) -> int:
        """When a message came, in microseconds since 1970, or up to ten seconds later; 0 for one
        that is not durable yet."""
        return 0

    def bytes_of(self, queue_id: int, number: int) -> int:
        """Length of a message that is durable, about; 0 for one that is not."""
        return 0

    def arrivals(self, queue_id: int) -> Iterator[tuple[int, int]]:
        """All living messages of a queue, in stretches, by ascending numbers: from which number on,
        and when the last of that stretch came. The queue may change meanwhile."""
        return iter(())

    def journal(self) -> dict[str, Any]:
        """What `stats journal` answers."""
        return {}
