"""Long work, done in turns.

The one rule: a step takes a millisecond or two, whatever clients have sent, and leaves a consistent
state. The time is checked between two steps: when the turn is over, other work is done before the
next step.
"""

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any, Final, Protocol, TypeVar

from mqks.limits import STEP_BODIES, STEP_NAMES

T = TypeVar("T")
S = TypeVar("S", int, bytes, tuple[int, bytes], tuple[int, bytes, int])

Work = Generator[bool, None, T]
"""Work in steps. Each step yields whether it must wait for other work: then it is useless to
continue at once."""

WAITS: Final = True
GOES_ON: Final = False


class Interrupted(Protocol):
    """Something that the end of the turn has interrupted."""

    def go_on(self) -> None:
        """Continue for at least one step, however short the turn."""


class Turns:
    """`clock` must advance within a turn of the event loop; the clock of some loops does not."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.chunk_s = inf
        """Approximate duration of a turn, set by the server."""
        self.end_s = inf
        """The end of the turn."""
        self.due: dict[Interrupted, None] = {}
        """Deliveries that continue in the next turn, before the works."""
        self._works: deque[Work[None]] = deque()

    def __len__(self) -> int:
        """Number of unfinished works."""
        return len(self._works)

    def begin(self) -> None:
        self.end_s = self.clock() + self.chunk_s

    @property
    def over(self) -> bool:
        return self.clock() > self.end_s

    def run(self, work: Work[None]) -> bool:
        """Continue a work for at least one step; return whether it is done."""
        for waits in work:  # noqa: SIM110 - a generator less for each commit
            if waits or self.over:
                return False
        return True

    def add(self, work: Work[None]) -> None:
        """Start a work that nobody waits for now, and continue it in later turns."""
        if not self.run(work):
            self._works.append(work)

    def later(self, work: Work[None]) -> None:
        """Start a work in a later turn: such a work may add the next one."""
        self._works.append(work)

    def go_on(self) -> bool:
        """Continue what is due, then the works, round robin; return whether all that is left
        waits for something, for example the journal."""
        due = self.due
        while due:
            first = next(iter(due))
            del due[first]
            first.go_on()
            if self.over:
                break
        # Also when the turn is over: deliveries alone may use up every turn.
        for _ in range(len(self._works)):
            work = self._works.popleft()
            if not self.run(work):
                self._works.append(work)
            if self.over:
                return False
        return not due


def finish(work: Work[T]) -> T:
    """Do all of a work now, where nobody else waits."""
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
    """All items, sorted, in steps."""
    # Sorted at once, a million would hold the event loop for a second: so runs are sorted, and
    # merged, which can be broken off.
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
    """Take out and yield all items: freeing a million at once would take long."""
    pop = items.popitem if isinstance(items, dict) else items.pop
    while items:
        yield pop()


def free(things: Iterator[object]) -> Work[None]:
    """Consume an iterator of things to be freed, one per step."""
    while sum(1 for _ in islice(things, STEP_BODIES)):
        yield GOES_ON
