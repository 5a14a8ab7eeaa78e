"""Messages of a chunk, gathered until they are published in one go.

The one rule: what goes to one queue keeps its order. Events that lead to the same queues share a
lane, those that have no queue in common have lanes of their own; an event that is neither ends
what was gathered before it.
"""

from collections.abc import Callable
from typing import Final

from mqks.broker.bindings import NOWHERE, Bindings
from mqks.broker.queue import Queue
from mqks.limits import COPIES_MAX, LANES_COPIES_MAX, LANES_QUEUES

Lane = tuple[bytes, bytes, list[bytes], list[bytes]]
"""An event, what stands between id and data, ids and bodies."""
NOTHING: Final = b"\n"
"""A name that no line can hold."""
NO_LANE: Final[Lane] = NOTHING, b"", [], []


class Gathering:
    """`publish` takes lanes when they end."""

    __slots__ = ("_bindings", "_by_queue", "_lanes", "_publish", "lanes", "width")

    def __init__(
        self, bindings: Bindings, publish: Callable[[bytes, list[bytes], list[bytes]], None]
    ) -> None:
        self._bindings = bindings
        self._publish = publish
        self._lanes: list[Lane] = []
        self.lanes: dict[bytes, Lane] = {}
        """By event: where its messages are to be gathered now."""
        self._by_queue: dict[Queue, Lane] = {}
        self.width = 1
        """How many queues the lanes lead to, and one."""

    def open(self, event: bytes) -> Lane:
        """A lane for an event that has none."""
        routes = self._bindings.routes
        queues = routes.get(event, NOWHERE)
        lane = next(filter(None, map(self._by_queue.get, queues)), None)
        if lane is None or routes[lane[0]] != queues:
            if lane is not None or (self._lanes and self.width + len(queues) > LANES_QUEUES):
                self.flush()
            lane = event, b" event=%b " % event, [], []
            self._lanes.append(lane)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, lane))
        # Of the lane that another event has opened, the lists alone.
        lane = self.lanes[event] = event, b" event=%b " % event, lane[2], lane[3]
        return lane

    @property
    def copies_max(self) -> int:
        """How many messages times queues may gather."""
        return LANES_COPIES_MAX if self.width <= LANES_QUEUES else COPIES_MAX

    def flush(self) -> None:
        """Publish what has been gathered."""
        for event, _, ids, bodies in self._lanes:
            if ids:
                self._publish(event, ids, bodies)
        self._lanes.clear()
        self.lanes.clear()
        self._by_queue.clear()
        self.width = 1
