"""Messages of a chunk, gathered until they are published in one go.

The one rule: what goes to one queue keeps its order. Events that lead to the same queues share a
group, those that have no queue in common have groups of their own; an event that is neither ends
what was gathered before it. So does one that is published with other flags.
"""

from collections.abc import Callable
from typing import Final

from mqks.broker.masks import Queues
from mqks.broker.queue import Queue
from mqks.limits import COPIES_MAX, GROUPS_COPIES_MAX, GROUPS_QUEUES
from mqks.protocol.requests import Publish

Group = tuple[bytes, bytes, list[bytes], list[bytes]]
"""An event, what stands between id and data, ids and bodies."""
Gathered = tuple[Queues, list[bytes], list[bytes], Publish | None]
"""Where to, the lists of all events that go there, and what flags say of all these messages."""
NOTHING: Final = b"\n"
"""A name that no line can hold."""
NO_GROUP: Final[Group] = NOTHING, b"", [], []


class Gathering:
    """`publish` takes groups when they end."""

    __slots__ = ("_by_queue", "_groups", "_publish", "groups", "width")

    def __init__(
        self, publish: Callable[[Queues, list[bytes], list[bytes], Publish | None], None]
    ) -> None:
        self._publish = publish
        self._groups: list[Gathered] = []
        self.groups: dict[bytes, Group] = {}
        """By event, behind its flags if it has some: where its messages are to be gathered now."""
        self._by_queue: dict[Queue, Gathered] = {}
        self.width = 1
        """How many queues the groups lead to, and one."""

    def open(
        self, event: bytes, queues: Queues, key: bytes = b"", wanted: Publish | None = None
    ) -> Group:
        """A group for an event that has none, and goes to these queues. `key`: the event behind
        the flags that say what is `wanted`."""
        found = next(filter(None, map(self._by_queue.get, queues)), None)
        if found is None or found[0] != queues or wanted is not found[3]:
            if found is not None or (self._groups and self.width + len(queues) > GROUPS_QUEUES):
                self.flush()
            found = queues, [], [], wanted
            self._groups.append(found)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, found))
        key = key or event
        group = self.groups[key] = key, b" event=%b " % event, found[1], found[2]
        return group

    @property
    def copies_max(self) -> int:
        """How many messages times queues may gather."""
        return GROUPS_COPIES_MAX if self.width <= GROUPS_QUEUES else COPIES_MAX

    def flush(self) -> None:
        """Publish what has been gathered."""
        for queues, ids, bodies, wanted in self._groups:
            if ids:
                self._publish(queues, ids, bodies, wanted)
        self._groups.clear()
        self.groups.clear()
        self._by_queue.clear()
        self.width = 1
