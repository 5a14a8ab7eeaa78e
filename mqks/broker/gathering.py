"""Messages of a chunk, gathered until they are published in one go.

The one rule: what goes to one queue keeps its order. Events that lead to the same queues share a
lane, those that have no queue in common have lanes of their own; an event that is neither ends
what was gathered before it.
"""

from collections.abc import Callable

from mqks.broker.bindings import NOWHERE, Bindings
from mqks.broker.queue import Queue
from mqks.limits import LANES_QUEUES

Lane = tuple[bytes, list[bytes], list[bytes]]
"""An event, ids and bodies."""


class Gathering:
    """`publish` takes lanes when they end."""

    __slots__ = ("_bindings", "_by_event", "_by_queue", "_lanes", "_publish", "width")

    def __init__(
        self, bindings: Bindings, publish: Callable[[bytes, list[bytes], list[bytes]], None]
    ) -> None:
        self._bindings = bindings
        self._publish = publish
        self._lanes: list[Lane] = []
        self._by_event: dict[bytes, Lane] = {}
        self._by_queue: dict[Queue, Lane] = {}
        self.width = 1
        """How many queues the lanes lead to, and one."""

    def lane(self, event: bytes) -> Lane:
        """Where messages of this event are to be gathered now."""
        return self._by_event.get(event) or self._open(event)

    def _open(self, event: bytes) -> Lane:
        routes = self._bindings.routes
        queues = routes.get(event, NOWHERE)
        lane = next(filter(None, map(self._by_queue.get, queues)), None)
        if lane is None or routes[lane[0]] != queues:
            if lane is not None or (self._lanes and self.width + len(queues) > LANES_QUEUES):
                self.flush()
            lane = event, [], []
            self._lanes.append(lane)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, lane))
        self._by_event[event] = lane
        return lane

    def flush(self) -> None:
        """Publish what has been gathered."""
        for event, ids, bodies in self._lanes:
            if ids:
                self._publish(event, ids, bodies)
        self._lanes.clear()
        self._by_event.clear()
        self._by_queue.clear()
        self.width = 1
