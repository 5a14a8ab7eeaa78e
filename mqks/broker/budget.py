"""Bytes that several share: take, give back, wake who waits, in their order.

The one rule: whoever gives back wakes those who wait. Nobody else has to remember to.
"""

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from mqks.broker.turns import GOES_ON, Work

if TYPE_CHECKING:
    from mqks.broker.turns import Turns


class Budget:
    """`limit` and `used` in bytes. `on_wait` is called when somebody begins to wait."""

    __slots__ = ("_is_waking", "_on_wait", "_turns", "_waiters", "limit", "used")

    def __init__(
        self, limit: int, turns: "Turns", on_wait: Callable[[], None] = lambda: None
    ) -> None:
        self.limit = limit
        self.used = 0
        self._turns = turns
        self._on_wait = on_wait
        self._waiters: dict[Hashable, Callable[[], None]] = {}
        self._is_waking = False

    @property
    def room(self) -> int:
        return self.limit - self.used

    @property
    def is_short(self) -> bool:
        """Whether nothing should be taken now: what is left belongs to those who wait."""
        return self.used >= self.limit or (bool(self._waiters) and not self._is_waking)

    @property
    def waiters(self) -> list[Hashable]:
        """Who waits, in the order they came."""
        return list(self._waiters)

    def take(self, size: int) -> None:
        """Take so much, also more than there is: who must not does not come here."""
        self.used += size

    def give_back(self, size: int) -> None:
        self.set(self.used - size)

    def set(self, used: int) -> None:
        """So much is used now: others have counted."""
        self.used = used
        if self._waiters and used < self.limit and not self._is_waking:
            self._turns.add(self._wake())

    def wait(self, who: Hashable, wake: Callable[[], None]) -> None:
        """Have `wake` called when there is room again; once, behind those who wait already."""
        self._waiters.setdefault(who, wake)
        self._on_wait()

    def leave(self, who: Hashable) -> None:
        """Wait no longer; also for those who don't."""
        self._waiters.pop(who, None)

    def _wake(self) -> Work[None]:
        while self._waiters and self.used < self.limit:
            wake = self._waiters.pop(next(iter(self._waiters)))
            self._is_waking = True
            try:
                wake()
            finally:
                self._is_waking = False
            yield GOES_ON
