"""A queue that is paused: it takes messages, and delivers none.

The one rule: the order that it had hears of everything meanwhile, so it goes on as if there had
been no pause.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue.order import Fifo, Order, Ring, Share
from mqks.broker.spine.queue.shared import Place
from mqks.broker.spine.queue.taker import Taker


class Paused(Order):
    __slots__ = ("_turns", "order")

    passes_new: ClassVar[bool] = False

    def __init__(self, queue: Place, order: Order) -> None:
        super().__init__(queue.lane)
        self._turns = queue.shared.turns
        self.order = order

    def next(self, ring: Ring) -> Iterable[Share] | None:
        return None

    def wants(self) -> Sequence[int] | None:
        return None

    def replace(self, old: Order) -> Iterator[object]:
        return iter(())

    def become(self, order: Order) -> None:
        """Messages will have another order when the pause ends."""
        old, self.order = self.order, order
        if order is not old:
            order.follow(old, self._turns)

    def ended(self) -> Order:
        """The pause is over: the order that messages have now. This one forgets it."""
        order, self.order = self.order, Fifo(self._lane)
        return order

    def delete(self) -> Iterator[object]:
        return self.order.delete()

    # -- what the order hears

    def joined(self, first: int, lines: Sequence[bytes]) -> None:
        self.order.joined(first, lines)

    def returned(self, number: int, line: bytes) -> None:
        self.order.returned(number, line)

    def left(self, numbers: Sequence[int]) -> None:
        self.order.left(numbers)

    def put_off(self, number: int) -> None:
        self.order.put_off(number)

    def consumer_ready(self, taker: Taker) -> None:
        self.order.consumer_ready(taker)

    def consumer_gone(self, taker: Taker) -> None:
        self.order.consumer_gone(taker)

    def started(self) -> None:
        self.order.started()

    def came(self, runs: list[Run]) -> Work[None] | None:
        return self.order.came(runs)

    # -- what it is asked

    def lowest(self, most: int) -> list[int] | None:
        return self.order.lowest(most)

    @property
    def page_first(self) -> int | None:
        return self.order.page_first

    def from_last(self) -> Iterator[Sequence[int]] | None:
        return self.order.from_last()
