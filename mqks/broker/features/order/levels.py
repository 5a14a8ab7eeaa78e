"""Which ready messages of a queue have which priority, where some have another than 0.

The one rule: a level has the numbers of its ready messages, and maybe those of messages that have
left in another way than by a delivery. They are skipped, and go by and by. Bodies are elsewhere.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.queue.blocks import BLOCK, Blocks
from mqks.limits import SEQ_MAX
from mqks.protocol.replies import priority_of


class Levels:
    """`ready` are the ready messages of the queue, with their bodies. Those that are there have
    priority 0."""

    __slots__ = (
        "_count",
        "_levels",
        "_memory",
        "_order",
        "_ready",
        "_swept",
        "learned",
        "unknown_end",
    )

    def __init__(self, ready: Blocks, memory: Budget) -> None:
        self._ready = ready
        self._memory = memory
        self._levels: dict[int, Blocks] = {}
        self._order: list[int] = []
        """Levels that have messages, the lowest first."""
        self._count = 0
        """How many numbers all levels have."""
        self._swept = (0, 0)
        self.learned = self.unknown_end = 0
        """From `learned` on and below `unknown_end`, messages are on disk and their priorities are
        not known yet."""
        for some in ready.parts():
            self._level(0).append_numbers(some)
        self._count = ready.count

    @property
    def is_learning(self) -> bool:
        return self.learned < self.unknown_end

    def _level(self, priority: int) -> Blocks:
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = Blocks(self._memory)
            insort(self._order, priority)
        return level

    def _forget(self, priority: int) -> None:
        del self._levels[priority]
        self._order.remove(priority)

    # -- adding

    def append(self, first: int, lines: Iterable[bytes]) -> None:
        """Add messages with consecutive numbers above all others."""
        found: dict[int, list[int]] = {}
        for number, priority in enumerate(map(priority_of, lines), first):
            found.setdefault(priority, []).append(number)
        for priority, numbers in found.items():
            self._level(priority).append_numbers(numbers)
            self._count += len(numbers)
        self._sweep()

    def add(self, number: int, line: bytes) -> None:
        """Add a message that returns."""
        level = self._level(priority_of(line))
        if number not in level:
            level.add(number, None)
            self._count += 1

    def learn(self, first: int, lines: Sequence[bytes]) -> None:
        """Add those of these messages that are ready; messages with higher numbers may be there."""
        end = first + len(lines)
        for number in self._ready.after(max(first, self.learned), end, len(lines)):
            self.add(number, lines[number - first])
        self.learned = max(self.learned, end)

    # -- looking and taking out

    @property
    def is_first_held(self) -> bool:
        """Whether the first message of the highest level is in memory."""
        while self._order:
            number = self._levels[self._order[-1]].first
            assert number is not None
            if (line := self._ready.get(number)) is not None or number in self._ready:
                return line is not None
            self._pop_first(self._order[-1], 1)
        return False

    def last(self, most: int) -> list[int]:
        """The first numbers of the lowest level, at most so many; the oldest of all while it is not
        known."""
        ready = self._ready
        while self._order and not self.is_learning:
            priority = self._order[0]
            found = self._levels[priority].after(0, SEQ_MAX, most)
            living = [number for number in found if number in ready]
            if len(living) < len(found):
                self._pop_first(priority, len(found))
                for number in living:
                    self._level(priority).add(number, None)
                self._count += len(living)
            if living:
                return living
        return ready.after(0, SEQ_MAX, most)

    def ahead(self, most: int) -> list[int]:
        """The next numbers in the order of their deliveries, at most so many."""
        each = (self._levels[priority].after(0, SEQ_MAX, most) for priority in self._order[::-1])
        return [*islice(chain.from_iterable(each), most)]

    def take(self, most: int, most_bytes: int) -> tuple[list[int], list[bytes]]:
        """Take the first ones of the highest level out, of the ready ones too: those in memory, at
        most so many, and about so many bytes. Return their numbers and bodies."""
        while self._order:
            priority = self._order[-1]
            found = self._levels[priority].after(0, SEQ_MAX, most)
            numbers, lines, looked = self._ready.pop_some(found, most_bytes)
            self._pop_first(priority, looked)
            if numbers or looked < len(found):
                return numbers, lines
        return [], []

    def _pop_first(self, priority: int, count: int) -> None:
        level = self._levels[priority]
        self._count -= count
        while count:
            count -= len(level.pop_first(SEQ_MAX, count))
        if not level.count:
            self._forget(priority)

    def from_last(self) -> Iterator[Sequence[int]]:
        """Numbers from the lowest level up, and from the last of each, some at a time."""
        for priority in [*self._order]:
            end = SEQ_MAX
            while (level := self._levels.get(priority)) and (some := level.before(end)):
                yield some
                end = some[0]

    def counts(self) -> dict[int, int]:
        """How many messages each level has, the highest first; without those not known yet."""
        return {priority: self._levels[priority].count for priority in self._order[::-1]}

    # -- those that have left

    def _sweep(self) -> None:
        """Look at some numbers, if most are of messages that have left."""
        if self._count <= 2 * self._ready.count + BLOCK:
            return
        priority, first = self._swept
        level = self._levels.get(priority)
        some = [] if level is None else level.after(first, SEQ_MAX, BLOCK)
        if len(some) == BLOCK:
            self._swept = priority, some[-1] + 1
        else:
            later = [each for each in self._order if each > priority]
            self._swept = (later or self._order)[0], 0
        for number in some:
            if level is not None and number not in self._ready:
                level.pop(number)
                self._count -= 1
        if level is not None and not level.count:
            self._forget(priority)
