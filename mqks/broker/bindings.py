"""Which events go to which queues.

The one rule: a binding belongs to a queue's name and may be there before the queue is; `routes`
holds only queues that exist, so that a publish looks up once and checks nothing.
"""

from collections.abc import Iterable, Mapping
from typing import Final

from mqks.broker.metadata import Metadata, binding_bytes
from mqks.broker.pending import Pending
from mqks.broker.queue import Queue
from mqks.broker.turns import GOES_ON, Places, Work, slices
from mqks.errors import LimitExceeded
from mqks.limits import STEP_NAMES
from mqks.protocol.masks import EventMasks
from mqks.protocol.requests import Rebind

NOWHERE: Final[dict[Queue, None]] = {}
NOTHING: Final[dict[bytes, None]] = {}


class Bindings:
    """`queues` are those that exist, by name; `pending` takes what the journal must learn."""

    __slots__ = ("_busy", "_pending", "_queues", "by_name", "events_max", "metadata", "routes")

    def __init__(
        self,
        events_max: int,
        metadata: Metadata,
        queues: Mapping[bytes, Queue],
        pending: Pending,
    ) -> None:
        self.events_max = events_max
        self.metadata = metadata
        self._queues = queues
        self._pending = pending
        self.by_name: dict[bytes, dict[bytes, None]] = {}
        self.routes: dict[bytes, dict[Queue, None]] = {}
        self._busy: dict[bytes, Places] = {}
        """Names whose bindings are being changed, in turns: one request after the other, in the
        order in which they came."""

    def events(self, name: bytes) -> list[bytes]:
        """What this name is bound to, sorted."""
        return sorted(self.by_name.get(name, ()))

    def rebind(self, request: Rebind) -> Work[bool]:
        """Replace, then remove, then remove by mask, then add. Return whether that changed it.
        Raises LimitExceeded before anything is changed."""
        name = request.queue
        place = yield from self._wait(name)
        try:
            return (yield from self._rebind(request))
        finally:
            self._done(name, place)

    def _wait(self, name: bytes) -> Work[object]:
        """Until those are done that came before and change what this name is bound to."""
        return (yield from self._busy.setdefault(name, Places(1)).take())

    def _done(self, name: bytes, place: object) -> None:
        places = self._busy[name]
        places.leave(place)
        if not places:
            del self._busy[name]

    def _rebind(self, request: Rebind) -> Work[bool]:
        name = request.queue
        bound = self.by_name.get(name, NOTHING)
        if request.replace is None and not (request.remove or request.remove_masks):
            # Adding alone costs nothing for what is bound already.
            new = [event for event in dict.fromkeys(request.add) if event not in bound]
            self._take_room(name, new, len(bound) + len(new))
            if new:
                self._bound(name).update(dict.fromkeys(new))
                yield from self._settle(name, new)
            return bool(new)
        wanted = bound.copy() if request.replace is None else dict.fromkeys(request.replace)
        yield GOES_ON
        for event in request.remove:
            wanted.pop(event, None)
        for event in (yield from _matched(request.remove_masks, list(wanted))):
            wanted.pop(event, None)
        yield GOES_ON
        wanted |= dict.fromkeys(request.add)
        new = [event for event in wanted if event not in bound]
        yield GOES_ON
        gone = [event for event in bound if event not in wanted]
        yield GOES_ON
        if not (new or gone):
            return False
        self._take_room(name, new, len(wanted))
        if wanted:
            self._bound(name)
            self.by_name[name] = wanted
        else:
            self._unbind(name)
        yield GOES_ON
        self.metadata.bytes -= sum(map(binding_bytes, gone))
        yield from self._settle(name, [*new, *gone])
        return True

    def _bound(self, name: bytes) -> dict[bytes, None]:
        """What this name is bound to, to be added to."""
        bound = self.by_name.get(name)
        if bound is None:
            bound = self.by_name[name] = {}
            self.metadata.bytes += len(name)
        return bound

    def _unbind(self, name: bytes) -> list[bytes]:
        """Return what it was bound to."""
        bound = self.by_name.pop(name, None)
        if bound is None:
            return []
        self.metadata.bytes -= len(name)
        return list(bound)

    def restore(self, name: bytes, events: list[bytes]) -> None:
        """What the journal knows, before there is a queue."""
        self._bound(name).update(dict.fromkeys(events))
        self.metadata.bytes += sum(map(binding_bytes, events))

    def _settle(self, name: bytes, events: list[bytes]) -> Work[None]:
        """Routes and journal learn what `by_name` says of these events."""
        for some in slices(events, STEP_NAMES):
            bound, queue = self.by_name.get(name, NOTHING), self._queues.get(name)
            changes = self._pending.entry.bindings
            for event in some:
                changes[name, event] = is_bound = event in bound
                if queue is not None:
                    self._route(event, queue, is_bound)
            yield GOES_ON

    def _route(self, event: bytes, queue: Queue, is_bound: bool) -> None:
        if is_bound:
            self.routes.setdefault(event, {})[queue] = None
        elif (queues := self.routes.get(event)) is not None:
            queues.pop(queue, None)
            if not queues:
                del self.routes[event]

    def _take_room(self, name: bytes, new: list[bytes], count: int) -> None:
        """For bindings that are about to be made. Raise if a name must not be bound to these, or to
        so many in all."""
        if count > self.events_max:
            raise LimitExceeded(
                "bindings_per_queue_max",
                f"a queue may be bound to {self.events_max} events at most",
            )
        if not new:
            return
        if name not in self._queues and name not in self.by_name:
            self.metadata.check_names("queue", [name])
        self.metadata.check_names("event", new)
        size = sum(map(binding_bytes, new))
        self.metadata.check_room(len(name) + size)
        self.metadata.bytes += size

    def queue_made(self, queue: Queue) -> Work[None]:
        """What its name was bound to before now leads to it."""
        for some in slices(list(self.by_name.get(queue.name, NOTHING)), STEP_NAMES):
            bound = self.by_name.get(queue.name, NOTHING)
            for event in some:
                if event in bound and not queue.deleted:
                    self._route(event, queue, True)
            yield GOES_ON

    def remove_all(self, name: bytes, queue: Queue | None) -> Work[None]:
        """The name is bound to nothing; `queue` had it, and is deleted."""
        place = yield from self._wait(name)
        events = self._unbind(name)
        self.metadata.bytes -= sum(map(binding_bytes, events))
        try:
            if queue is not None:
                for some in slices(events, STEP_NAMES):
                    for event in some:
                        self._route(event, queue, False)
                    yield GOES_ON
            yield from self._settle(name, events)
        finally:
            self._done(name, place)


def _matched(masks: Iterable[bytes], events: list[bytes]) -> Work[list[bytes]]:
    """Those that a mask matches."""
    if not masks:
        return []
    tries, matched, weight = EventMasks(masks).tries, [], 0
    for event in events:
        for matches in tries(event):
            weight += 1 + len(event) // 256
            if weight > STEP_NAMES:
                weight = 0
                yield GOES_ON
            if matches:
                matched.append(event)
                break
    return matched
