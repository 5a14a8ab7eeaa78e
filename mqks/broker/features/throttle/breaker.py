"""A circuit breaker: after so many rejects in a row a queue delivers one message in a time, until a
message is acked.

The one rule: it is open or closed, and does not know which message is the trial. Each ack closes
it, and while it is open each trial begins its pause anew: so nobody waits for a trial that is lost.
It goes by the monotonic clock. A start closes it.
"""

from collections.abc import Iterable, Sequence
from typing import Self

from mqks.broker.spine.base.schedule import Alarm
from mqks.broker.spine.message.states import REJECT, Event
from mqks.broker.spine.queue.order import UNLIMITED
from mqks.broker.spine.queue.seams import (
    NOT_TOLD,
    Deliveries,
    HeldBack,
    Throttle,
    Told,
    Traced,
    Tracer,
)
from mqks.broker.spine.queue.shared import Place


class Breaker(Throttle):
    """The throttle of the queue, and the tracer that learns of rejects and acks."""

    __slots__ = ("_alarm", "_most", "_pause_us", "_queue", "_rejects", "_trial_us")

    def __init__(self, queue: Place) -> None:
        self._queue = queue
        self._most = self._pause_us = self._rejects = 0
        """`_rejects` is their number since the last ack."""
        self._trial_us: int | None = None
        """When the next trial may be delivered; None: it is closed."""
        self._alarm = Alarm(queue.shared.schedule, self._go_on, dated=False, what="a breaker")

    @classmethod
    def by_rules(cls, queue: Place, old: Throttle | None) -> Self | None:
        text, part = queue.rules.breaker, old if isinstance(old, cls) else None
        if text is None:
            if part is not None:
                part._close()
            return None
        if part is None:
            part = cls(queue)
        most, pause_s = text.split(",")
        part._most, part._pause_us = int(most), round(float(pause_s) * 1e6)
        return part

    # -- as the throttle

    def room(self) -> int:
        if self._trial_us is None:
            return UNLIMITED
        if self._trial_us <= self._queue.shared.schedule.clock_us():
            return 1
        self._alarm.set(self._trial_us)
        return 0

    def delivered(self, count: int) -> None:
        if count and self._trial_us is not None:
            self._open()

    def _open(self) -> None:
        self._trial_us = self._queue.shared.schedule.clock_us() + self._pause_us

    def _close(self) -> None:
        self._rejects, self._trial_us = 0, None
        self._alarm.set(None)

    def _go_on(self) -> bool:
        self._queue.deliver()
        return True

    @property
    def holds(self) -> HeldBack | None:
        schedule = self._queue.shared.schedule
        wait_us = (self._trial_us or 0) - schedule.clock_us()
        if self._trial_us is None or wait_us <= 0:
            return None
        return HeldBack("breaker", schedule.wall_us() + wait_us)

    @property
    def tracers(self) -> tuple[Tracer, ...]:
        return (self,)

    # -- as a tracer

    def left(self, queue: Traced, what: str, numbers: Sequence[int], told: Told = NOT_TOLD) -> None:
        if what == "acked":
            self._acked()

    def _acked(self) -> None:
        if self._trial_us is not None:
            self._queue.shared.turns.due[self._queue] = None
        self._close()

    def returned(self, queue: Traced, event: Event, some: Deliveries, why: bytes) -> None:
        if event is REJECT:
            self._rejects += sum(1 for _ in some)
            if self._rejects >= self._most and self._trial_us is None:
                self._open()

    def note(self, queue: Traced, what: str, some: Deliveries, told: Told = NOT_TOLD) -> None:
        if what == "consumed":
            self._acked()

    def scheduled(self, queue: Traced, some: Deliveries, due_us: Iterable[int]) -> None:
        pass

    def moved(
        self, source: Traced, to: Traced, some: Sequence[tuple[int, bytes]], first: int
    ) -> None:
        pass

    def deleted(self, queue: Traced) -> None:
        pass
