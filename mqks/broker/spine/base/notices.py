"""What the broker reports to the server while it goes on; nothing waits for it.

The one rule: names, numbers and texts only, so that whoever reports needs to know nobody.
"""

from mqks.audit import AuditRecord, Who


class Notices:
    """Those of a broker whose reports nobody wants."""

    def queue_full(self, queue: bytes, ready: int) -> None:
        """A queue has reached its limit."""

    def queue_has_room(self, queue: bytes, ready: int) -> None:
        """A queue that was full takes messages again."""

    def queue_nearly_full(self, queue: bytes, ready: int) -> None:
        """A queue has come close to its limit."""

    def dropped(self, queue: bytes, count: int, reason: str) -> None:
        """Messages of a queue have died without a dead-letter queue."""

    def unacked_full(self, unacked_bytes: int) -> None:
        """A consumer must wait for others to ack, after a while without any."""

    def batch_expired(self, batch: bytes) -> None:
        """A batch was not done in time: what follows it is not published."""

    def tick_failed(self, schedule: bytes, reason: str) -> None:
        """The first try of a tick has failed."""

    def timer_repeats(self, timer: str) -> None:
        """A timer that fired again and again for one moment rests for a second."""

    def audited(self, record: AuditRecord) -> None:
        """Somebody has logged in, or has changed what exists."""

    def literal_mask(self, who: Who, queue: bytes, event: bytes) -> None:
        """A queue is bound to an event that reads as a mask."""

    def epoch_is_stale(self, who: Who, queue: bytes, read_up_to: int, next_seq: int) -> None:
        """A client has read more of a queue than there is: the database went back."""
