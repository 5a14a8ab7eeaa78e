"""Since when a consumer holds its messages.

The one rule: a delivery costs the same for one message as for a thousand. The numbers of a batch
increase, and mostly follow those of the batch before: its last number and its time are enough. Only
messages that are delivered again, or out of order, have a time of their own.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import filterfalse
from typing import Final

SPARE: Final = 64
"""More entries than twice the messages that were held: then those of settled messages go."""


class HeldSince:
    __slots__ = ("_again", "_ends", "_most", "_times_us", "_wall_us", "out_of_order")

    def __init__(self, wall_us: Callable[[], int]) -> None:
        self._wall_us = wall_us
        self._ends = array("q")
        """The last number of each batch, increasing."""
        self._times_us = array("q")
        self._again: dict[int, int] = {}
        """Number → time, of messages that are not in a batch after the one before."""
        self._most = SPARE
        self.out_of_order = False
        """An earlier delivery may be behind later ones in the consumer's `unacked`."""

    def __len__(self) -> int:
        return len(self._ends) + len(self._again)

    def add(self, numbers: Sequence[int], held: int) -> bool:
        """Note a delivery to a consumer that held so many messages before. Return whether there
        are so many entries that those of settled messages should go."""
        ends, again = self._ends, self._again
        if not held and ends:
            if len(ends) == 1 and not again:
                ends[0], self._times_us[0] = numbers[-1], self._wall_us()
                return False
            self.clear()
        if ends and numbers[0] <= ends[-1]:
            before = bisect_right(numbers, ends[-1])
            again.update(dict.fromkeys(numbers[:before], self._wall_us()))
            numbers = numbers[before:]
        if numbers:
            ends.append(numbers[-1])
            self._times_us.append(self._wall_us())
        size = len(ends) + len(again)
        return size > self._most and size > 2 * held + SPARE

    def clear(self) -> None:
        del self._ends[:], self._times_us[:]
        self._again.clear()
        self._most = SPARE
        self.out_of_order = False

    def keep(self, numbers: Sequence[int]) -> None:
        """Drop the entries that no message with one of these numbers needs, and not the last one:
        lower numbers were delivered before."""
        again, ends = self._again, self._ends
        once = filterfalse(again.__contains__, numbers)
        used = sorted({*map(partial(bisect_left, ends), once), len(ends) - 1})
        self._times_us = array("q", map(self._times_us.__getitem__, used))
        self._ends = array("q", map(ends.__getitem__, used))
        self._again = {number: again[number] for number in numbers if number in again}
        self._most = 2 * len(self) + SPARE

    def time_us(self, number: int) -> int:
        """When a message that is held was delivered, by the wall clock."""
        again_us = self._again.get(number)
        return self._times_us[bisect_left(self._ends, number)] if again_us is None else again_us

    def first_us(self, numbers: Iterable[int]) -> int:
        """The earliest of these times."""
        again = self._again
        if not again:
            return self.time_us(min(numbers))
        held = [*numbers]
        once = min(filterfalse(again.__contains__, held), default=None)
        times_us = [again[number] for number in held if number in again]
        return min(times_us if once is None else [*times_us, self.time_us(once)])
