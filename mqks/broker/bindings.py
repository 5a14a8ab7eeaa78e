"""Which events go to which queues.

The one rule: a binding belongs to a queue's name and may be there before the queue is; `routes`
holds only queues that exist, so that a publish looks up once and checks nothing.
"""

from typing import Final

from mqks.broker.metadata import Metadata, binding_bytes
from mqks.broker.queue import Queue
from mqks.errors import LimitExceeded
from mqks.protocol.masks import mask_pattern
from mqks.protocol.requests import Rebind

NOWHERE: Final[dict[Queue, None]] = {}


class Bindings:
    """`changes` gathers what the journal must learn: queue name and event → bound or not."""

    __slots__ = ("by_name", "changes", "events_max", "metadata", "routes")

    def __init__(self, events_max: int, metadata: Metadata) -> None:
        self.events_max = events_max
        self.metadata = metadata
        self.by_name: dict[bytes, dict[bytes, None]] = {}
        self.routes: dict[bytes, dict[Queue, None]] = {}
        self.changes: dict[tuple[bytes, bytes], bool] = {}

    def events(self, name: bytes) -> list[bytes]:
        """What this name is bound to, sorted."""
        return sorted(self.by_name.get(name, ()))

    def rebind(self, request: Rebind, queue: Queue | None) -> bool:
        """Replace, then remove, then remove by mask, then add. Return whether that changed it."""
        bound = self.by_name.get(request.queue, {})
        if request.replace is not None:
            wanted = dict.fromkeys(request.replace)
        elif request.remove or request.remove_masks:
            wanted = bound.copy()
        else:
            # Adding alone costs nothing for what is bound already.
            new = [event for event in dict.fromkeys(request.add) if event not in bound]
            self._check(request.queue, new, len(bound) + len(new), queue)
            self._add(request.queue, new, queue)
            return bool(new)
        for event in request.remove:
            wanted.pop(event, None)
        for mask in request.remove_masks:
            matches = mask_pattern(mask).fullmatch
            for event in [event for event in wanted if b"." in event and matches(event)]:
                del wanted[event]
        wanted |= dict.fromkeys(request.add)
        new = [event for event in wanted if event not in bound]
        self._check(request.queue, new, len(wanted), queue)
        gone = [event for event in bound if event not in wanted]
        self._remove(request.queue, gone, queue)
        self._add(request.queue, new, queue)
        return bool(new or gone)

    def _check(self, name: bytes, new: list[bytes], count: int, queue: Queue | None) -> None:
        """Raise if a name must not be bound to these, or to so many in all."""
        if count > self.events_max:
            raise LimitExceeded(
                "bindings_per_queue_max",
                f"a queue may be bound to {self.events_max} events at most",
            )
        if not new:
            return
        if queue is None and name not in self.by_name:
            self.metadata.check_names("queue", [name])
        self.metadata.check_names("event", new)
        self.metadata.check_room(len(name) + sum(map(binding_bytes, new)))

    def _add(self, name: bytes, new: list[bytes], queue: Queue | None) -> None:
        if not new:
            return
        bound = self._bound(name)
        for event in new:
            bound[event] = None
            self.changes[name, event] = True
            if queue is not None:
                self.routes.setdefault(event, {})[queue] = None
        self.metadata.bytes += sum(map(binding_bytes, new))

    def _bound(self, name: bytes) -> dict[bytes, None]:
        """What this name is bound to, to be added to."""
        bound = self.by_name.get(name)
        if bound is None:
            bound = self.by_name[name] = {}
            self.metadata.bytes += len(name)
        return bound

    def restore(self, name: bytes, events: list[bytes]) -> None:
        """What the journal knows, before there is a queue."""
        self._bound(name).update(dict.fromkeys(events))
        self.metadata.bytes += sum(map(binding_bytes, events))

    def _remove(self, name: bytes, events: list[bytes], queue: Queue | None) -> None:
        bound = self.by_name.get(name, {})
        for event in events:
            del bound[event]
            self.changes[name, event] = False
            if queue is not None:
                self._unroute(event, queue)
        self.metadata.bytes -= sum(map(binding_bytes, events))
        if not bound and self.by_name.pop(name, None) is not None:
            self.metadata.bytes -= len(name)

    def _unroute(self, event: bytes, queue: Queue) -> None:
        queues = self.routes[event]
        del queues[queue]
        if not queues:
            del self.routes[event]

    def queue_made(self, queue: Queue) -> None:
        """What its name was bound to before now leads to it."""
        for event in self.by_name.get(queue.name, ()):
            self.routes.setdefault(event, {})[queue] = None

    def remove_all(self, name: bytes, queue: Queue | None) -> None:
        self._remove(name, list(self.by_name.get(name, ())), queue)
