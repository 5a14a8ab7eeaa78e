"""The order of a queue where a message has the place of one that it has replaced: the others by
their numbers, and it when that place comes.

The one rule: a place is a number of the queue that no message has any more. Places are not written:
after a start each message is at its number. A queue has this order while such a message is ready.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from typing import ClassVar, Final

from mqks.broker.spine.base.ranges import among
from mqks.broker.spine.queue.order import Fifo, Ring, Share, room_of
from mqks.broker.spine.queue.shared import Place
from mqks.limits import DELIVERY_BYTES, STEP_MESSAGES

PLACED_MAX: Final = 10_000
"""So many may have another place than their number; more have their numbers."""
STALE_PLACES: Final = 64
"""So many more than twice as many may be in the list, before those that have left go."""


class Placed(Fifo):
    __slots__ = ("_order", "_places", "_queue")

    watches: ClassVar[bool] = True

    def __init__(self, queue: Place) -> None:
        super().__init__(queue.lane)
        self._queue = queue
        self._places: dict[int, int] = {}
        """Number → place."""
        self._order: list[tuple[int, int]] = []
        """Place and number, the last place first as negative numbers."""

    def place_of(self, number: int) -> int:
        return self._places.get(number, number)

    def put(self, number: int, place: int) -> None:
        if len(self._places) < PLACED_MAX:
            self._places[number] = place
            insort(self._order, (-place, -number))
        if len(self._order) > 2 * len(self._places) + STALE_PLACES:
            self._order = sorted((-place, -number) for number, place in self._places.items())

    def left(self, numbers: Sequence[int]) -> None:
        for number in among(numbers, self._places):
            self._places.pop(number, None)
        self._leave_if_empty()

    def _leave_if_empty(self) -> None:
        if not self._places and self._queue.order is self:
            self._queue.set_order(Fifo(self._lane))

    def _next(self) -> tuple[int, int] | None:
        """Place and number of the first one that is still ready."""
        while self._order:
            place, number = -self._order[-1][0], -self._order[-1][1]
            if self._places.get(number) == place and number in self._lane.blocks:
                return place, number
            self._order.pop()
            self._places.pop(number, None)
        return None

    def next(self, ring: Ring, most: int) -> Iterable[Share] | None:
        lane, first = self._lane, self._next()
        if first is None:
            self._leave_if_empty()
            return super().next(ring, most)
        most = min(most, room_of(ring), STEP_MESSAGES)
        if not most:
            return ()
        place, number = first
        before = lane.blocks.after(0, place, most)
        numbers, lines, _ = lane.pick(before or [number], DELIVERY_BYTES)
        if numbers and not before:  # If it returns, it has its number.
            del self._places[number]
            self._leave_if_empty()
        return ((numbers, lines, None),) if numbers else None

    def wants(self) -> Sequence[int] | None:
        blocks, first = self._lane.blocks, self._next()
        if first is None or (blocks.first or 0) < first[0] or blocks.get(first[1]) is not None:
            return super().wants()
        return [first[1]]


def place_of(queue: Place, number: int) -> int:
    """Where in the order of its queue a ready message is."""
    return queue.order.place_of(number) if isinstance(queue.order, Placed) else number


def put_in_place(queue: Place, number: int, place: int) -> None:
    """A message that joins now gets this place, where messages are delivered by their numbers."""
    if type(queue.order) is Fifo:
        queue.set_order(Placed(queue))
    if isinstance(queue.order, Placed):
        queue.order.put(number, place)
