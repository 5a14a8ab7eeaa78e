"""The order of a queue where some messages have another priority than 0: the highest first.

The one rule: a level has the numbers of its ready messages, and maybe those of messages that have
left in another way than by a delivery. They are skipped, and go by and by. Bodies are elsewhere.

After a start the priorities are known to the disk alone, so a queue that has ever had some reads
its messages once, page by page, and delivers nothing before it knows all. Bodies stay as long as
there is memory; later the next ones by priority are read one by one, wherever they are, and the
last ones are the first to be removed from memory.

Levels cost time at each batch, so they go when they have been of no use for a while: since all
that is ready has had priority 0, some messages have left. The next priority makes them anew from
all blocks of the queue; those that have left have paid for it. What has a priority and is with a
consumer when they go is seen when it returns, see `Queue.has_forgotten`. `Policy.has_priorities`
stays: after a start nobody knows whether a message on disk has one.
"""

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final

from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue.blocks import BLOCK, Blocks
from mqks.broker.spine.queue.order import PAGE, Fifo, Order, Ring, Share, room_of
from mqks.broker.spine.queue.shared import Place
from mqks.limits import DELIVERY_BYTES, SCARCE_BYTES, SEQ_MAX, STEP_MESSAGES
from mqks.protocol.replies import priority_of

AHEAD: Final = 64
"""So many messages that are next are looked at for those on disk."""
BACKLOG: Final = 64
"""Levels go when so many messages have left since the last priority, and one more for each so many
that are ready."""


class Ranked(Order):
    """`unknown_end`: the priorities of ready messages below it are to be learned; without it they
    are 0."""

    __slots__ = (
        *("_count", "_levels", "_memory", "_order", "_plain", "_queue", "_ready", "_swept"),
        *("learned", "unknown_end"),
    )

    def __init__(self, queue: Place, unknown_end: int = 0) -> None:
        super().__init__(queue.lane)
        self._queue = queue
        self._ready = queue.lane.blocks
        self._memory = queue.lane.memory
        self._levels: dict[int, Blocks] = {}
        self._order: list[int] = []
        """Levels that have messages, the lowest first."""
        self._count = 0
        """How many numbers all levels have."""
        self._plain = 0
        """How many messages have left since another priority than 0 joined, or was ready."""
        self._swept = (0, 0)
        self.learned, self.unknown_end = 0, unknown_end
        """From `learned` on and below `unknown_end`, messages are on disk and their priorities are
        not known yet."""
        if not unknown_end:
            for some in self._ready.parts():
                self._level(0).append_numbers(some)
            self._count = self._ready.count

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

    def joined(self, first: int, lines: Iterable[bytes]) -> None:
        by_priority: dict[int, list[int]] = {}
        for number, priority in enumerate(map(priority_of, lines), first):
            by_priority.setdefault(priority, []).append(number)
        for priority, numbers in by_priority.items():
            self._level(priority).append_numbers(numbers)
            self._count += len(numbers)
        self._sweep()

    def returned(self, number: int, line: bytes) -> None:
        level = self._level(priority_of(line))
        if number not in level:
            level.add(number, None)
            self._count += 1

    # -- learning

    @property
    def page_first(self) -> int | None:
        unknown = self._ready.after(self.learned, self.unknown_end, 1)
        return unknown[0] if unknown else None

    def came(self, runs: list[Run]) -> Work[None] | None:
        return self._learn(runs) if self.is_learning else None

    def _learn(self, runs: list[Run]) -> Work[None]:
        """Learn the priorities of a page. Its bodies stay while there is memory."""
        for first, lines in runs:
            for start in range(0, len(lines), STEP_MESSAGES):
                if self._queue.order is not self:
                    return
                some = Run(first + start, lines[start : start + STEP_MESSAGES])
                self._learn_some(*some)
                if not self._memory.is_short:
                    self._ready.fill([some], SEQ_MAX)
                yield GOES_ON
        if self.page_first is None:
            self.learned = self.unknown_end

    def _learn_some(self, first: int, lines: Sequence[bytes]) -> None:
        """Add those of these messages that are ready; messages with higher numbers may be there."""
        end = first + len(lines)
        for number in self._ready.after(max(first, self.learned), end, len(lines)):
            self.returned(number, lines[number - first])
        self.learned = max(self.learned, end)

    # -- looking and taking out

    def wants(self) -> Sequence[int] | None:
        if self.is_learning:
            return PAGE  # Also if all that was unknown has left meanwhile.
        ready = self._ready
        if not ready.on_disk or not self._on_disk(AHEAD):
            return None
        size = SCARCE_BYTES if self._memory.is_short else DELIVERY_BYTES * 4
        most = size * ready.on_disk // (ready.disk_bytes + 1)
        return sorted(self._on_disk(max(1, min(most, STEP_MESSAGES)))) or None

    def _on_disk(self, most: int) -> list[int]:
        """Those of the next numbers, at most so many, whose messages are only on disk."""
        ready = self._ready
        return [n for n in self._ahead(most) if n in ready and ready.get(n) is None]

    def lowest(self, most: int) -> list[int]:
        """The oldest of all while the lowest level is not known."""
        ready = self._ready
        while self._order and not self.is_learning:
            priority = self._order[0]
            ahead = self._levels[priority].after(0, SEQ_MAX, most)
            # Those that have left otherwise are noticed here; what lives stays where it is.
            living = [number for number in ahead if number in ready]
            if len(living) < len(ahead):
                self._pop_first(priority, len(ahead))
                for number in living:
                    self._level(priority).add(number, None)
                self._count += len(living)
            if living:
                return living
        return ready.after(0, SEQ_MAX, most)

    def _ahead(self, most: int) -> list[int]:
        """The next numbers in the order of their deliveries, at most so many."""
        each = (self._levels[priority].after(0, SEQ_MAX, most) for priority in self._order[::-1])
        return [*islice(chain.from_iterable(each), most)]

    def next(self, ring: Ring, most: int) -> Iterable[Share] | None:
        """The first ones of the highest level, to all in turns."""
        if self.is_learning:
            return None
        most = min(most, room_of(ring), STEP_MESSAGES)
        while self._order and most:
            priority = self._order[-1]
            ahead = self._levels[priority].after(0, SEQ_MAX, most)
            numbers, lines, looked = self._lane.pick(ahead, DELIVERY_BYTES)
            self._pop_first(priority, looked)
            if numbers:
                return ((numbers, lines, None),)
            if looked < len(ahead):  # The next one is only on disk, and none may pass it.
                return None
        return None if most else ()

    def seen(self) -> None:
        """A message with a priority joins, or is delivered at once."""
        self._plain = 0

    def left(self, numbers: Sequence[int]) -> None:
        count = self._ready.count
        # While there are other priorities, levels are of use.
        if count and (self.is_learning or self._order != [0]):
            self._plain = 0
            return
        self._plain += len(numbers)
        if self._plain >= BACKLOG + count // BACKLOG and self._queue.order is self:
            self._queue.set_order(Fifo(self._lane))

    def _pop_first(self, priority: int, count: int) -> None:
        level = self._levels[priority]
        self._count -= count
        while count:
            count -= len(level.pop_first(SEQ_MAX, count))
        if not level.count:
            self._forget(priority)

    def from_last(self) -> Iterator[Sequence[int]]:
        """From the lowest level up, and from the last of each."""
        for priority in [*self._order]:
            end = SEQ_MAX
            while (level := self._levels.get(priority)) and (some := level.before(end)):
                yield some
                end = some[0]

    def counts(self) -> dict[int, int]:
        """How many messages each level has, the highest first; without those not known yet."""
        return {priority: self._levels[priority].count for priority in self._order[::-1]}

    def delete(self) -> Iterator[object]:
        return chain.from_iterable(level.emptied() for level in self._levels.values())

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
