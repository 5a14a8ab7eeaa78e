"""Which throttle a queue has, by its rules. The spine knows this file as `Features.throttle`.

The one rule: a part that still suits stays, with what it knows.
"""

from collections.abc import Sequence
from itertools import chain

from mqks.broker.features.admission.pauses import Paused
from mqks.broker.features.throttle.breaker import Breaker
from mqks.broker.features.throttle.common import CommonThrottle
from mqks.broker.features.throttle.concurrency import Concurrency
from mqks.broker.features.throttle.rate import Paced
from mqks.broker.spine.queue.order import UNLIMITED
from mqks.broker.spine.queue.seams import HeldBack, Throttle, Tracer
from mqks.broker.spine.queue.shared import Place

PARTS = Paused, Breaker, Concurrency, Paced, CommonThrottle
"""The last one is asked only where no other holds back: who asks it waits in a line."""


class Throttles(Throttle):
    """Several for one queue: the lowest counts."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Throttle]) -> None:
        self.parts = parts

    def room(self) -> int:
        room = UNLIMITED
        for part in self.parts:
            if not (room := min(room, part.room())):
                break
        return room

    def delivered(self, count: int) -> None:
        for part in self.parts:
            part.delivered(count)

    def freed(self) -> None:
        for part in self.parts:
            part.freed()

    def ended(self) -> None:
        for part in self.parts:
            part.ended()

    @property
    def holds(self) -> HeldBack | None:
        return next(filter(None, (part.holds for part in self.parts)), None)

    @property
    def tracers(self) -> tuple[Tracer, ...]:
        return tuple(chain.from_iterable(part.tracers for part in self.parts))


def by_rules(queue: Place, old: Throttle | None) -> Throttle | None:
    """The rules of a queue have changed."""
    known = old.parts if isinstance(old, Throttles) else [old]
    kept = {type(part): part for part in known}
    made = (kind.by_rules(queue, kept.get(kind)) for kind in PARTS)
    parts = [part for part in made if part is not None]
    return Throttles(parts) if len(parts) > 1 else parts[0] if parts else None
