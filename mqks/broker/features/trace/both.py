"""Several tracers of one queue.

The one rule: each is told the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery
from mqks.broker.spine.queue.seams import Traced, Tracer


class Tracers:
    def __init__(self, *tracers: Tracer) -> None:
        self._tracers = tracers

    def note(
        self,
        queue: Traced,
        what: str,
        deliveries: Iterable[Delivery],
        told: Mapping[str, Any] | None = None,
    ) -> None:
        some = [*deliveries]
        for tracer in self._tracers:
            tracer.note(queue, what, some, told or {})

    def left(
        self,
        queue: Traced,
        what: str,
        numbers: Sequence[int],
        told: Mapping[str, Any] | None = None,
    ) -> None:
        for tracer in self._tracers:
            tracer.left(queue, what, numbers, told or {})

    def returned(
        self, queue: Traced, event: Event, deliveries: Sequence[Delivery], why: bytes
    ) -> None:
        for tracer in self._tracers:
            tracer.returned(queue, event, deliveries, why)

    def scheduled(
        self, queue: Traced, deliveries: Iterable[Delivery], due_us: Iterable[int]
    ) -> None:
        some, each_us = [*deliveries], [*due_us]
        for tracer in self._tracers:
            tracer.scheduled(queue, some, each_us)

    def moved(self, source: Traced, to: Traced, deliveries: Sequence[Delivery], first: int) -> None:
        for tracer in self._tracers:
            tracer.moved(source, to, deliveries, first)

    def deleted(self, queue: Traced) -> None:
        for tracer in self._tracers:
            tracer.deleted(queue)


def all_of(*tracers: Tracer | None) -> Tracer | None:
    """Those that are there, as one; None if none is."""
    some = [tracer for tracer in tracers if tracer is not None]
    return Tracers(*some) if len(some) > 1 else some[0] if some else None
