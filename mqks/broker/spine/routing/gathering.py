"""Gathers messages of a chunk until they are published in one step.

The one rule: messages for one queue keep their order. Events with the same queues share a group,
events without a common queue have separate groups; any other event ends the gathering. So does a
publish with other flags.
"""

from collections.abc import Callable, Collection
from typing import Final

from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.routing.masks import Queues
from mqks.limits import COPIES_MAX, GROUPS_COPIES_MAX, GROUPS_QUEUES
from mqks.protocol.requests import Publish

Group = tuple[bytes | None, bytes, list[bytes], list[bytes]]
"""An event, the bytes between id and data, ids and bodies."""
Gathered = tuple[Queues, list[bytes], list[bytes], Publish | None]
"""The queues, the ids and bodies of all events that go there, and the flags of these messages."""
NO_GROUP: Final[Group] = None, b"", [], []


class Gathering:
    """`publish` takes groups when they end."""

    __slots__ = ("_by_queue", "_groups", "_publish", "groups", "has_traits", "nowhere", "width")

    def __init__(
        self, publish: Callable[[Queues, list[bytes], list[bytes], Publish | None], None]
    ) -> None:
        self._publish = publish
        self._groups: list[Gathered] = []
        self.groups: dict[bytes, Group] = {}
        """Current groups by event, preceded by the flags of the publish, if any."""
        self.nowhere: set[bytes] = set()
        """Keys of groups whose messages no queue gets."""
        self._by_queue: dict[Queue, Gathered] = {}
        self.width = 1
        """One plus the number of queues of the groups."""
        self.has_traits = False
        """Whether some of the messages have traits."""

    def open(
        self, event: bytes, queues: Queues, key: bytes = b"", wanted: Publish | None = None
    ) -> Group:
        """Open a group for an event with these queues. `key`: the event preceded by its flags, of
        which `wanted` are the values."""
        found = next(filter(None, map(self._by_queue.get, queues)), None)
        if found is None or found[0] != queues or wanted is not found[3]:
            if found is not None or (self._groups and self.width + len(queues) > GROUPS_QUEUES):
                self.flush()
            found = queues, [], [], wanted
            self._groups.append(found)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, found))
        key = key or event
        if is_nowhere(queues):
            self.nowhere.add(key)
        group = self.groups[key] = key, b" event=%b " % event, found[1], found[2]
        return group

    def leads_to(self, queues: Collection[object]) -> bool:
        """Whether anything is gathered for one of these queues."""
        return bool(queues) and not self._by_queue.keys().isdisjoint(queues)

    @property
    def copies_max(self) -> int:
        """Maximum of gathered messages times queues."""
        return GROUPS_COPIES_MAX if self.width <= GROUPS_QUEUES else COPIES_MAX

    def flush(self) -> None:
        """Publish the gathered messages."""
        for queues, ids, bodies, wanted in self._groups:
            if ids:
                self._publish(queues, ids, bodies, wanted)
        self._groups.clear()
        self.groups.clear()
        self.nowhere.clear()
        self._by_queue.clear()
        self.width, self.has_traits = 1, False


def is_nowhere(queues: Queues) -> bool:
    """Whether no queue that exists is among these of an event."""
    return all(queue.deleted for queue in queues)
