"""A queue, as those see it who put messages into it or take them out.

The one rule: fates, deaths, moves and times know a queue only as this.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from mqks.broker.log.pending import Mark
from mqks.broker.message.policy import Policy
from mqks.broker.queue.delays import Due
from mqks.broker.queue.lane import Lane
from mqks.broker.shared import Shared


class Place(Protocol):
    id: int
    name: bytes
    deleted: bool
    lane: Lane
    rules: Policy
    shared: Shared

    @property
    def is_ruled(self) -> bool:
        """Whether its rules depend on retries or times."""

    @property
    def dead_letters(self) -> "Place | None":
        """Its dead-letter queue, which is created if needed."""

    def arrived_us(self, number: int) -> int:
        """Arrival of a message, as exactly as the journal knows."""

    def show(self, lines: list[bytes]) -> None:
        """Show messages to its live views."""

    def take_in(self, lines: list[bytes], marks: Sequence[Mark] | None) -> None:
        """Append messages from another queue. Limits do not refuse them."""

    def put_off(self, number: int, line: bytes, mark: Mark, due_us: int) -> None:
        """Schedule a message, by the clock of its mark."""

    def join(self, due: Sequence[Due]) -> None:
        """These scheduled messages are due."""

    def fetch(self, numbers: list[int], then: Callable[[dict[int, bytes]], None]) -> None:
        """Read living messages that are only on disk."""

    def count_dead(self, count: int, reason: str, *, dropped: bool) -> None:
        """So many messages have died here."""

    def deliver(self) -> None:
        """Deliver ready messages while there are messages and consumers that can take them."""
