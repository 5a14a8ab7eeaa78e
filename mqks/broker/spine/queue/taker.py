"""A consumer as its queue sees it: somebody who takes messages in turns."""

from collections.abc import Iterator, Sequence
from typing import Final

from mqks.broker.spine.base.resting import Resting

UNLIMITED: Final = 1 << 62


class Rest:
    """Why a consumer gets nothing."""

    CONFIRM: Final = 1
    """Its own consume is not confirmed yet."""
    SLOW: Final = 2
    """Its connection does not take its replies."""
    UNACKED: Final = 4
    """It holds as many messages as its prefetch allows."""
    ALL_UNACKED: Final = 8
    """All consumers together are at the limit of unacked bytes."""
    NO_QUEUE: Final = 16
    """Its queue was deleted."""
    ENDED: Final = 32
    """It takes no more messages."""
    STANDBY: Final = 64
    """Its queue has a single active consumer, which is another one."""


class Taker(Resting):
    """Not a Protocol: compiled, a call of a base class costs less."""

    __slots__ = ("id", "is_brief", "manual_ack")

    def __init__(self, consumer_id: bytes, manual_ack: bool, *, is_brief: bool = False) -> None:
        super().__init__()
        self.id = consumer_id
        self.manual_ack = manual_ack
        self.is_brief = is_brief
        """It takes messages of one commit only: of one key, before those of others."""

    @property
    def unacked_count(self) -> int:
        """Deliveries that are not settled."""
        raise NotImplementedError

    def room(self) -> int:
        """How many more messages it can take now."""
        raise NotImplementedError

    def rest_if_full(self) -> None:
        """Called at its turn: rest if it can take no more messages."""
        raise NotImplementedError

    def take(
        self, numbers: Sequence[int], lines: Sequence[bytes], ids: Sequence[bytes] | None
    ) -> None:
        """Deliver messages. `ids` are the message ids, if the caller has them."""
        raise NotImplementedError

    def leave(self) -> None:
        """Take no more: of a `receive`."""
        raise NotImplementedError

    def let_go(self) -> Iterator[object]:
        """Take all unacked deliveries at once, and yield them one by one in no order, so that a
        large number can be handled in turns."""
        raise NotImplementedError
