"""In which order the ready messages of a queue are delivered, and to whom: takers, in turns.

The one rule: `Lane.blocks` alone says what is ready, and whether its body is in memory. An order
knows numbers, and is asked and told once for a batch.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar, Final, TypeAlias

from mqks.broker.spine.base.resting import Resting
from mqks.broker.spine.base.turns import Turns, Work, free
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue.lane import Lane
from mqks.broker.spine.queue.seams import HeldBack
from mqks.limits import READ_AHEAD_BYTES, SCARCE_BYTES, SEQ_MAX, TAKERS_MAX

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
    PAUSED: Final = 128
    """Its messages were taken from it, and others are to get them."""


class Taker(Resting):
    """A consumer as its queue sees it. Not a Protocol: compiled, a base class costs less."""

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


Ring: TypeAlias = "OrderedDict[Taker, None]"
"""Consumers that can take messages, the next one first."""
Share: TypeAlias = "tuple[Sequence[int], list[bytes], Taker | None]"
"""Messages that were taken out, by increasing numbers, and who gets them; None: all in turns. A
range comes from `Lane.front`, other numbers from `Lane.pick`."""
PAGE: Final = ()
"""The next messages that are only on disk, from `page_first` on."""


def room_of(ring: Iterable[Taker]) -> int:
    """How many messages the first consumers of a ring can take together. If it is none, they
    rest."""
    takers = [*islice(ring, TAKERS_MAX)]
    room = sum([max(0, taker.room()) for taker in takers])
    if not room:
        for taker in takers:
            taker.rest_if_full()
    return room


class Order:
    """Not a Protocol: most orders need not know most of what happens."""

    __slots__ = ("_lane",)

    watches: ClassVar[bool] = True
    """It must know which messages join, return and leave."""
    passes_new: ClassVar[bool] = True
    """A new message is the next one if no other is ready."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    # -- what happens to messages and consumers

    def joined(self, first: int, lines: Sequence[bytes]) -> None:
        """Messages with consecutive numbers above all others are ready."""

    def returned(self, number: int, line: bytes) -> None:
        """A message is ready again in its old place."""

    def left(self, numbers: Sequence[int]) -> None:
        """Messages have left the queue."""

    def put_off(self, number: int) -> None:
        """A message that was delivered is scheduled, and keeps its place."""

    def consumer_ready(self, taker: Taker) -> None:
        """A consumer is in the ring again."""

    def consumer_gone(self, taker: Taker) -> None:
        """A consumer takes no more; what it holds returns."""

    def started(self) -> None:
        """It is the order of its queue from now on, or the server has started."""

    def follow(self, old: "Order", turns: Turns) -> None:
        """Be the order in place of the old one. What that knew is forgotten, in later turns."""
        if old.watches:
            turns.later(free(old.delete()))
        self.started()

    def delete(self) -> Iterator[object]:
        """Forget everything; yield it, see `turns.emptied`."""
        return iter(())

    # -- which ones are next

    def next(self, ring: Ring, most: int) -> Iterable[Share] | None:
        """Take out the next messages for these consumers, as many as one step delivers, and at most
        so many. None if nothing can be delivered until something happens."""
        raise NotImplementedError

    def lowest(self, most: int) -> list[int] | None:
        """The first ones to be dropped if there are too many; None: the oldest."""
        return None

    @property
    def holds(self) -> HeldBack | None:
        """What holds all ready messages back that it knows; None: nothing, or it has no limits."""
        return None

    # -- what is in memory

    @property
    def is_reading(self) -> bool:
        """Whether it waits for messages from disk that it has requested itself."""
        return False

    @property
    def page_first(self) -> int | None:
        """Number of the first message that is only on disk; None if there is none."""
        return self._lane.blocks.first_on_disk()

    def wants(self) -> Sequence[int] | None:
        """What to read from disk, ahead of the consumers while there is memory for it: these
        messages, or a `PAGE`."""
        raise NotImplementedError

    def came(self, runs: list[Run]) -> Work[None] | None:
        """A page has come. Nothing is read or delivered before the returned work is done."""
        memory = self._lane.memory
        # There may be many queues with slow consumers.
        self._lane.blocks.fill(runs, SCARCE_BYTES if memory.is_short else SEQ_MAX)
        return None

    def from_last(self) -> Iterator[Sequence[int]] | None:
        """Numbers of ready messages, the last ones to be delivered first, some at a time; None: by
        number."""
        return None


class Fifo(Order):
    """First in, first out: the order of the numbers, which `Lane.blocks` keeps. A message that
    returns to its old place is first."""

    __slots__ = ()

    watches: ClassVar[bool] = False

    def next(self, ring: Ring, most: int) -> Iterable[Share] | None:
        lane = self._lane
        if not lane.blocks.is_first_held:
            return None
        # Messages beyond what one consumer can take need not be taken and put back each time.
        if len(ring) == 1:
            most = min(most, room_of(ring))
            if not most:
                return ()
        first, lines = lane.front(most)
        return ((range(first, first + len(lines)), lines, None),)

    def wants(self) -> Sequence[int] | None:
        lane = self._lane
        if not lane.blocks.on_disk:
            return None
        # Short of memory, it reads only when nothing else is left to deliver.
        enough = 1 if lane.memory.is_short else READ_AHEAD_BYTES
        return PAGE if lane.blocks.memory_ahead(enough) < enough else None
