"""What waits for a time, as the spine sees it: of a queue its messages, of a consumer its acks.

The one rule: a queue has timers only while one of its messages waits for a time, and a consumer
only from its first ack timeout on. Nobody else asks what time it is.
"""

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Protocol

from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.log.pending import Mark


class Expiring(Protocol):
    """When ready messages expire. False: none can."""

    ttl_us: int | None

    def __bool__(self) -> bool: ...

    def add(self, number: int, expires_us: int, joined_us: int = 0) -> None:
        """Add a message that expires at a time of the wall clock, or too long after it joined."""

    def add_new(self, numbers: range, expires_us: int) -> None:
        """Add new messages that expire at a time of the wall clock."""

    def add_each(self, numbers: range, each_us: Sequence[int]) -> None:
        """Add new messages that expire at different times."""

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove messages that are settled or have moved."""

    def own_us(self, number: int) -> int:
        """When it expires, by the wall clock; 0 if it has no time of its own."""

    def set_us(self, number: int, expires_us: int, joined_us: int) -> int:
        """By how much the wall clock was set since these times were noted."""

    def is_overdue(self, number: int, next_seq: int) -> bool:
        """Whether a message that a consumer held has expired meanwhile."""

    def set_ttl(self, ttl_us: int | None) -> bool:
        """Set the queue's TTL; return whether the caller must call `joined_at` for all messages."""

    def joined(self, first: int) -> None:
        """Messages from this number on join now."""

    def joined_at(self, first: int, wall_us: int) -> None:
        """Messages from this number on joined at a time of the wall clock."""

    def joined_us(self, number: int) -> int:
        """When it joined, by the wall clock; 0 if that is not known."""


class Delayed(Sized, Protocol):
    """Messages that are not ready before a time."""

    bytes: int

    @property
    def numbers(self) -> "Contained":
        """Theirs."""

    @property
    def placed(self) -> "Contained":
        """Those of messages that will return to their old place."""


class Contained(Sized, Protocol):
    def __contains__(self, number: int) -> bool: ...


class Timers(Protocol):
    """Messages of one queue that wait for a time. They are left a second after the last one."""

    @property
    def expiry(self) -> Expiring: ...

    @property
    def delays(self) -> Delayed: ...

    def add(
        self, first: int, lines: Sequence[bytes], marks: Sequence[Mark], due_us: Sequence[int]
    ) -> None:
        """Add messages in memory that are due at these times; then the caller calls
        `set_alarms`."""

    def restore(self, number: int, mark: Mark) -> None:
        """Add a message that is on disk."""

    def restored(self, mean_bytes: float) -> None:
        """All scheduled messages are restored; `mean_bytes` is the approximate length of a line."""

    def committed(self, end: int) -> Work[None]:
        """Numbers below `end` are on disk."""

    def expires(self) -> bool:
        """Whether an expired message is still in the queue."""

    def set_alarms(self) -> None:
        """What waits, or what is ready, has changed."""

    def listed(self, after: int, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, by the wall clock, of the first messages above a number."""

    def tidy(self) -> Work[None]:
        """Forget what is left of messages that were taken out, if it is much."""

    def delete(self) -> Iterator[object]:
        """Forget all messages; yield what is to be freed."""


class AckHolder(Protocol):
    """The owner of deliveries that must be acked in time: a consumer."""

    @property
    def unacked_count(self) -> int: ...

    def holds(self, message_id: bytes, number: int) -> bool: ...

    def too_late(self, late: list[tuple[bytes, int]]) -> None:
        """These were not acked in time."""


class AckTimers(Protocol):
    """When the deliveries of one consumer must be acked."""

    def add(self, delivered: list[tuple[bytes, int]], timeout_us: int | None) -> None:
        """Add deliveries that were just made. None: they are never due."""

    def touch(self, held: list[tuple[bytes, int]], timeout_us: int) -> None:
        """Restart the timeout of unacked deliveries."""

    def touch_all(self, timeout_us: int) -> None:
        """Restart the timeout of all that were added."""

    def clear(self) -> None:
        """Forget them all."""
