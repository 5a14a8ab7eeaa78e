"""Work that may take long, done in turns.

The one rule: a step takes a millisecond or two, whatever clients have sent, and leaves nothing that
others must not see. Between two steps the time is looked at: when the turn is over, others come
before the next one.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any, Final, TypeVar

from mqks.limits import STEP_NAMES

T = TypeVar("T")
S = TypeVar("S", int, bytes, tuple[int, bytes])

Work = Generator[bool, None, T]
"""Steps. Each yields whether it has to wait for somebody else's: then it is useless to go on at
once."""

WAITS: Final = True
GOES_ON: Final = False


class Turns:
    """`clock` must go on within a turn of the event loop, which not every loop's clock does."""

    __slots__ = ("_works", "chunk_s", "clock", "end_s")

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.chunk_s = inf
        """How long a turn takes, about; the server sets it."""
        self.end_s = inf
        """When the turn is over."""
        self._works: deque[Work[None]] = deque()

    def __len__(self) -> int:
        """How many works are not done."""
        return len(self._works)

    def begin(self) -> None:
        self.end_s = self.clock() + self.chunk_s

    @property
    def over(self) -> bool:
        return self.clock() > self.end_s

    def run(self, work: Work[None]) -> bool:
        """Go on with a work, one step at least; return whether it is done."""
        return not any(waits or self.over for waits in work)

    def add(self, work: Work[None]) -> None:
        """Nobody waits for this one: begin with it now, and go on with it in later turns."""
        if not self.run(work):
            self._works.append(work)

    def later(self, work: Work[None]) -> None:
        """The same, but begin with it in a later turn: one such work may lead to the next."""
        self._works.append(work)

    def go_on(self) -> bool:
        """Give the works a turn, in turns; return whether all that are left wait."""
        for _ in range(len(self._works)):
            work = self._works.popleft()
            if not self.run(work):
                self._works.append(work)
            if self.over:
                return False
        return True


class Places:
    """For so many at once. Others wait, and get theirs in the order in which they came."""

    __slots__ = ("_line", "_places")

    def __init__(self, places: int) -> None:
        self._places = places
        self._line: deque[object] = deque()

    def __len__(self) -> int:
        """How many have a place or wait for one."""
        return len(self._line)

    def take(self) -> Work[object]:
        """Wait for a place; return what `leave` takes."""
        ticket = object()
        self._line.append(ticket)
        while ticket not in islice(self._line, self._places):
            yield WAITS
        return ticket

    def leave(self, ticket: object) -> None:
        self._line.remove(ticket)


def finish(work: Work[T]) -> T:
    """All of it, now: where nobody else needs the time."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def slices(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def ordered(items: Iterable[S]) -> Work[list[S]]:
    """All of them, sorted."""
    runs: list[list[S]] = []
    for some in slices(list(items), STEP_NAMES):
        runs.append(sorted(some))
        yield GOES_ON
    if len(runs) == 1:
        return runs[0]
    merged, result = heapq.merge(*runs), list[S]()
    while some := list(islice(merged, STEP_NAMES)):
        result += some
        yield GOES_ON
    return result


def emptied(items: deque[Any] | list[Any] | dict[Any, Any] | set[Any]) -> Iterator[Any]:
    """What is in it, each taken out: to let go of a million at once takes its time, too."""
    pop = items.popitem if isinstance(items, dict) else items.pop
    while items:
        yield pop()
