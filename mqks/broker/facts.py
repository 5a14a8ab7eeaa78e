"""What the broker is told of the journal under it.

The one rule: looking costs no reading of the disk.
"""

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

    def journal(self) -> dict[str, Any]:
        """What `stats journal` answers."""
        return {}
