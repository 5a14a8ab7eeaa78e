"""A number of bytes shared by several users, who take, give back, and wait in order.

The one rule: giving back wakes those who wait; no caller has to do so.
"""

from collections.abc import Callable, Hashable

from mqks.broker.spine.base.turns import GOES_ON, Turns, Work


class Budget:
    """`limit` and `used` in bytes. `on_wait` is called when somebody begins to wait."""

    __slots__ = ("_is_waking", "_on_wait", "_turns", "_waiters", "limit", "used")

    def __init__(
        self, limit: int, turns: Turns, on_wait: Callable[[], None] = lambda: None
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
        """Whether nothing should be taken now: free bytes go to those who wait already."""
        return self.used >= self.limit or (bool(self._waiters) and not self._is_waking)

    @property
    def waiters(self) -> list[Hashable]:
        """Who waits, in the order they came."""
        return list(self._waiters)

    def take(self, size: int) -> None:
        """Take this much, even beyond the limit: callers that must not exceed it check first."""
        self.used += size

    def give_back(self, size: int) -> None:
        self.set(self.used - size)

    def set(self, used: int) -> None:
        """Set the used bytes, as counted elsewhere."""
        self.used = used
        if self._waiters and used < self.limit and not self._is_waking:
            self._turns.add(self._wake())

    def wait(self, who: Hashable, wake: Callable[[], None]) -> None:
        """Call `wake` once when bytes are free again, after those who wait already."""
        self._waiters.setdefault(who, wake)
        self._on_wait()

    def leave(self, who: Hashable) -> None:
        """Stop waiting; no error if it does not wait."""
        self._waiters.pop(who, None)

    def _wake(self) -> Work[None]:
        # One after the other: the first may take all that is free. And in steps: there may be
        # 100,000 of them.
        while self._waiters and self.used < self.limit:
            wake = self._waiters.pop(next(iter(self._waiters)))
            self._is_waking = True
            try:
                wake()
            finally:
                self._is_waking = False
            yield GOES_ON
