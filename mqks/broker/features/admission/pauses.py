"""A queue is paused: nothing is delivered, or publishes are refused or wait, or both, until it is
resumed or for a time.

The one rule: a pause is three fields of the policy, so it is as durable as that. What moves without
a publish (dead letters, `move`, what is due) joins a paused queue, as it joins a full one.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

from mqks.broker.features.admission.capacity import Capacity
from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.queue.seams import HeldBack, Throttle, Update
from mqks.broker.spine.queue.shared import Place
from mqks.errors import PublishesWait, QueuePaused
from mqks.limits import STEP_NAMES
from mqks.protocol.requests import Pausing


class PausableCapacity(Capacity):
    """The limits of a queue, and whether its publishes are paused; it ends pauses in time."""

    __slots__ = ("_alarm", "_is_paused", "_queue", "_until_s", "_waiting", "waits")

    def __init__(self, queue: Place, default_max: int) -> None:
        self._queue = queue
        self._alarm: Alarm | None = None
        self._until_s: float | None = None
        self._waiting: dict[Any, Callable[[], None]] = {}
        """Connections whose publishes wait, and what goes on with each."""
        super().__init__(queue, default_max)

    def apply(self, rules: Policy) -> None:
        self._is_paused = bool(rules.publishes_paused)
        self.waits = rules.publishes_paused == "wait"
        if self._waiting and not self.waits:
            self._queue.shared.turns.later(_go_on([*self._waiting.values()]))
            self._waiting.clear()
        if rules.paused_until_s != self._until_s:
            self._until_s = rules.paused_until_s
            self._set_alarm()
        super().apply(rules)

    def _set_alarm(self) -> None:
        """A pause lasts as long as it was to last when it began, or when the server has started,
        even if the wall clock is set meanwhile."""
        schedule = self._queue.shared.schedule
        if self._alarm is None:
            ring = partial(resume, self._queue)
            self._alarm = Alarm(schedule, ring, dated=False, what="the end of a pause")
        left_us = round((self._until_s or 0) * 1e6) - schedule.wall_us()
        self._alarm.set(None if self._until_s is None else schedule.clock_us() + left_us)

    def has_room(self, count: int) -> bool:
        return not self._is_paused and super().has_room(count)

    def check(self, size: int, where: str) -> None:
        if self._is_paused:
            reason = f"publishes are paused {where}"
            raise PublishesWait(reason, self._waiting) if self.waits else QueuePaused(reason)
        super().check(size, where)

    def update(self) -> Update:
        told = super().update()
        self.is_tight = self.is_tight or self._is_paused
        return told


def _go_on(waiting: Sequence[Callable[[], None]]) -> Work[None]:
    for some in slices(waiting, STEP_NAMES):
        for go_on in some:
            go_on()
        yield GOES_ON


class Paused(Throttle):
    """The throttle of a queue whose deliveries are paused. Its end is that of the pause."""

    __slots__ = ("_queue",)

    def __init__(self, queue: Place) -> None:
        self._queue = queue

    @classmethod
    def by_rules(cls, queue: Place, old: Throttle | None) -> Self | None:
        return cls(queue) if queue.rules.paused else None

    def room(self) -> int:
        return 0

    @property
    def holds(self) -> HeldBack | None:
        until_s = self._queue.rules.paused_until_s
        return HeldBack("pause", None if until_s is None else round(until_s * 1e6))


def pause(queue: Place, wanted: Pausing) -> bool:
    """In place of an earlier pause. Return whether that changed anything."""
    until_s = (queue.shared.schedule.wall_us() + wanted.for_us) / 1e6 if wanted.for_us else None
    publishes = wanted.publishes or not wanted.deliveries or None
    return _set(queue, not wanted.publishes or None, publishes, until_s)


def resume(queue: Place) -> bool:
    """End any pause, also one by the defaults of the settings. Return whether that changed
    anything."""
    before = queue.policy
    _set(queue, None, None, None)
    if queue.rules.pause:
        _set(queue, False, False, None)
    return queue.policy != before


def _set(
    queue: Place, paused: bool | None, publishes_paused: bool | str | None, until_s: float | None
) -> bool:
    changes = {"paused": paused, "publishes_paused": publishes_paused, "paused_until_s": until_s}
    policy = queue.policy.changed(changes, reset=False)
    if policy == queue.policy:
        return False
    queue.shared.owner.set_policy(queue, policy)
    return True
