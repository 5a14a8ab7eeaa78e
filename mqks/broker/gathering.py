"""Messages of a chunk, gathered until they are published in one go.

The one rule: what goes to one queue keeps its order. Events that lead to the same queues share a
group, those that have no queue in common have groups of their own; an event that is neither ends
what was gathered before it.
"""

from collections.abc import Callable
from typing import Final

from mqks.broker.bindings import NOWHERE, Bindings
from mqks.broker.queue import Queue
from mqks.limits import COPIES_MAX, GROUPS_COPIES_MAX, GROUPS_QUEUES

Group = tuple[bytes, bytes, list[bytes], list[bytes]]
"""An event, what stands between id and data, ids and bodies."""
NOTHING: Final = b"\n"
"""A name that no line can hold."""
NO_GROUP: Final[Group] = NOTHING, b"", [], []


class Gathering:
    """`publish` takes groups when they end."""

    __slots__ = ("_bindings", "_by_queue", "_groups", "_publish", "groups", "width")

    def __init__(
        self, bindings: Bindings, publish: Callable[[bytes, list[bytes], list[bytes]], None]
    ) -> None:
        self._bindings = bindings
        self._publish = publish
        self._groups: list[Group] = []
        self.groups: dict[bytes, Group] = {}
        """By event: where its messages are to be gathered now."""
        self._by_queue: dict[Queue, Group] = {}
        self.width = 1
        """How many queues the groups lead to, and one."""

    def open(self, event: bytes) -> Group:
        """A group for an event that has none."""
        routes = self._bindings.routes
        queues = routes.get(event, NOWHERE)
        group = next(filter(None, map(self._by_queue.get, queues)), None)
        if group is None or routes[group[0]] != queues:
            if group is not None or (self._groups and self.width + len(queues) > GROUPS_QUEUES):
                self.flush()
            group = event, b" event=%b " % event, [], []
            self._groups.append(group)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, group))
        # Of the group that another event has opened, the lists alone.
        group = self.groups[event] = event, b" event=%b " % event, group[2], group[3]
        return group

    @property
    def copies_max(self) -> int:
        """How many messages times queues may gather."""
        return GROUPS_COPIES_MAX if self.width <= GROUPS_QUEUES else COPIES_MAX

    def flush(self) -> None:
        """Publish what has been gathered."""
        for event, _, ids, bodies in self._groups:
            if ids:
                self._publish(event, ids, bodies)
        self._groups.clear()
        self.groups.clear()
        self._by_queue.clear()
        self.width = 1
