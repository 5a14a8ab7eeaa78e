"""In which order the ready messages of a queue are delivered, and to whom.

The one rule: `Lane.blocks` alone says what is ready, and whether its body is in memory. An order
knows numbers, and is asked and told once for a batch.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import ClassVar, Final, TypeAlias

from mqks.broker.spine.base.turns import Turns, Work
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue.lane import Lane, free
from mqks.broker.spine.queue.taker import Taker
from mqks.limits import READ_AHEAD_BYTES, SCARCE_BYTES, SEQ_MAX, TAKERS_MAX

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
    """It must know which messages join, return and leave, see `lane.LaneWatcher`."""
    passes_new: ClassVar[bool] = True
    """A new message is the next one if no other is ready."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    # -- what happens to messages and consumers

    def joined(self, first: int, lines: Sequence[bytes]) -> None:
        """See `lane.LaneWatcher`."""

    def returned(self, number: int, line: bytes) -> None:
        """See `lane.LaneWatcher`."""

    def left(self, numbers: Sequence[int]) -> None:
        """See `lane.LaneWatcher`."""

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
            turns.later(free(self.replace(old)))
        self.started()

    def replace(self, old: "Order") -> Iterator[object]:
        """What the old one forgets, see `turns.emptied`."""
        return old.delete()

    def delete(self) -> Iterator[object]:
        """Forget everything; yield it, see `turns.emptied`."""
        return iter(())

    # -- which ones are next

    def next(self, ring: Ring) -> Iterable[Share] | None:
        """Take out the next messages for these consumers, as many as one step delivers. None if
        nothing can be delivered until something happens."""
        raise NotImplementedError

    def lowest(self, most: int) -> list[int] | None:
        """The first ones to be dropped if there are too many; None: the oldest."""
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
        """See `lane.LaneWatcher`."""
        return None


class Fifo(Order):
    """First in, first out: the order of the numbers, which `Lane.blocks` keeps. A message that
    returns to its old place is first."""

    __slots__ = ()

    watches: ClassVar[bool] = False

    def next(self, ring: Ring) -> Iterable[Share] | None:
        lane = self._lane
        if not lane.blocks.is_first_held:
            return None
        # Messages beyond what one consumer can take need not be taken and put back each time.
        most = room_of(ring) if len(ring) == 1 else SEQ_MAX
        if not most:
            return ()
        first, lines = lane.front(most)
        return ((range(first, first + len(lines)), lines, None),)

    def wants(self) -> Sequence[int] | None:
        lane = self._lane
        if not lane.blocks.on_disk:
            return None
        enough = 1 if lane.memory.is_short else READ_AHEAD_BYTES
        return PAGE if lane.blocks.memory_ahead(enough) < enough else None
