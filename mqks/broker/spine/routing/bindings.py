"""The bindings of queues.

A name is bound to events and to masks. Wherever both occur together, in the journal too, a mask is
`MASK + mask`.

The one rule: a binding belongs to a queue's name and may exist before the queue; `routes` have only
queues that exist.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Final

from mqks.broker.spine.base.places import Places, one_at_a_time
from mqks.broker.spine.base.turns import GOES_ON, Work, ordered, slices
from mqks.broker.spine.log.metadata import MetadataBudget, binding_bytes, mask_bytes
from mqks.broker.spine.log.pending import Pending
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.routing.routes import Routes
from mqks.errors import LimitExceeded
from mqks.limits import STEP_BOUND_MASKS, STEP_NAMES
from mqks.protocol.masks import MASK, EventMasks, check_bound
from mqks.protocol.requests import Rebind

NOTHING: Final[dict[bytes, None]] = {}
Table = dict[bytes, dict[bytes, None]]


class Bindings:
    """`queues` are the existing queues by name; `pending` gets the changes for the journal."""

    def __init__(
        self,
        events_max: int,
        metadata: MetadataBudget,
        queues: Mapping[bytes, Queue],
        pending: Pending,
    ) -> None:
        self.events_max = events_max
        self.metadata = metadata
        self.queues = queues
        self._pending = pending
        self._leaving: dict[bytes, list[Queue]] = {}
        """Deleted queues that are still in routes, which are removed in turns: events unbound
        before that must be unbound from these queues, also if the name has another one by then."""
        self.by_name: Table = {}
        self.masks_by_name: Table = {}
        """Masks with the prefix `MASK`, separate from the events, so that the cost of removing one
        does not depend on the others."""
        self.routes = Routes()
        self.busy: dict[bytes, Places] = {}
        """Names whose bindings are being changed in turns: one request after the other, in their
        order of arrival."""

    def events(self, name: bytes) -> Work[tuple[list[bytes], list[bytes]]]:
        """The events and the masks that this name is bound to, each sorted."""
        events = yield from ordered(self.by_name.get(name, ()))
        masks: list[bytes] = []
        for some in slices((yield from ordered(self.masks_by_name.get(name, ()))), STEP_NAMES):
            masks += [mask[1:] for mask in some]
            yield GOES_ON
        return events, masks

    def rebind(self, request: Rebind) -> Work[int]:
        """Replace, then remove, then remove by mask, then add. Return how many bindings changed.
        Raises LimitExceeded before anything is changed."""
        return one_at_a_time(self.busy, request.queue, self._rebind(request))

    def _rebind(self, request: Rebind) -> Work[int]:
        for mask in request.add_masks:
            check_bound(mask)
            yield GOES_ON
        name, replace = request.queue, request.replace
        bound, masked = self.bound(name)
        matched = yield from _matched(request.remove_masks, bound if replace is None else replace)
        new, gone = yield from _difference(
            bound, replace, chain(request.remove, matched), request.add
        )
        new_masks, gone_masks = yield from _difference(
            masked,
            None if replace is None else (),
            (MASK + mask for mask in request.remove_masks),
            (MASK + mask for mask in request.add_masks),
        )
        changed = sum(map(len, (new, gone, new_masks, gone_masks)))
        if not changed:
            return 0
        count = len(bound) + len(new) - len(gone)
        count += len(masked) + len(new_masks) - len(gone_masks)
        yield from self._check_new(name, new, new_masks, count)
        size = yield from _bytes_of(new, new_masks)
        gone_size = yield from _bytes_of(gone, gone_masks)
        if new or new_masks:
            self.metadata.check_room(len(name) + size)
        # Nothing can fail any more.
        self.metadata.bytes += size
        with self._named(name):
            _put(self.by_name, name, new, gone)
            _put(self.masks_by_name, name, new_masks, gone_masks)
        yield GOES_ON
        self.metadata.bytes -= gone_size
        # Add before removing: a queue whose bindings are replaced misses no message.
        yield from self._settle(name, new_masks)
        yield from self._settle(name, [*new, *gone])
        yield from self._settle(name, gone_masks)
        return changed

    def bound(self, name: bytes) -> tuple[dict[bytes, None], dict[bytes, None]]:
        """The events and the masks that this name is bound to."""
        return self.by_name.get(name, NOTHING), self.masks_by_name.get(name, NOTHING)

    def count(self, name: bytes) -> int:
        return sum(map(len, self.bound(name)))

    @contextmanager
    def _named(self, name: bytes) -> Iterator[None]:
        """Count the memory of a name while it has bindings."""
        before = any(self.bound(name))
        yield
        self.metadata.bytes += (any(self.bound(name)) - before) * len(name)

    def restore(self, name: bytes, events: list[bytes]) -> None:
        """Add bindings from the journal, before their queue exists."""
        masks = [event for event in events if event[:1] == MASK]
        if masks:
            events = [event for event in events if event[:1] != MASK]
        with self._named(name):
            _put(self.by_name, name, events, ())
            _put(self.masks_by_name, name, masks, ())
        self.metadata.bytes += sum(map(binding_bytes, events)) + sum(map(mask_bytes, masks))

    def _settle(self, name: bytes, events: list[bytes]) -> Work[None]:
        """Update routes and journal for these events, or these masks."""
        # Looked up anew in each step: between two of them the queue may be deleted, or made.
        table, route, step = self._kind(events)
        for some in slices(events, step):
            yield from self.routes.settled()
            bound, queue = table.get(name, NOTHING), self.queues.get(name)
            changes = self._pending.entry.bindings
            for event in some:
                changes[name, event] = is_bound = event in bound
                if queue is not None:
                    route(event, queue, is_bound)
            yield GOES_ON
            for queue in [*self._leaving.get(name, ())]:
                yield from self.routes.settled()
                for event in some:
                    if event not in bound:
                        route(event, queue, False)
                yield GOES_ON

    def _kind(self, events: list[bytes]) -> tuple[Table, Callable[[bytes, Queue, bool], None], int]:
        """The table of these events or masks, the function that routes them, and for how many of
        them before the time is looked at."""
        if events and events[0][:1] == MASK:
            return self.masks_by_name, self.routes.set_mask, STEP_BOUND_MASKS
        return self.by_name, self.routes.set, STEP_NAMES

    def _check_new(
        self, name: bytes, new: list[bytes], new_masks: list[bytes], count: int
    ) -> Work[None]:
        """Raise if a name must not be bound to these, or to so many."""
        if count > self.events_max:
            reason = f"the limit of {self.events_max} bindings is reached (bindings_per_queue_max)"
            raise LimitExceeded("bindings_per_queue_max", reason)
        if (new or new_masks) and name not in self.queues and not any(self.bound(name)):
            self.metadata.check_names("queue", [name])
        for some in slices(new, STEP_NAMES):
            self.metadata.check_names("event", some)
            yield GOES_ON
        for some in slices(new_masks, STEP_NAMES):
            self.metadata.check_names("mask", (mask[1:] for mask in some))
            yield GOES_ON

    def queue_made(self, queue: Queue) -> Work[None]:
        """Route the existing bindings of its name to it."""
        for events in map(list, self.bound(queue.name)):
            table, route, step = self._kind(events)
            for some in slices(events, step):
                yield from self.routes.settled()
                bound = table.get(queue.name, NOTHING)
                for event in some:
                    if event in bound and not queue.deleted:
                        route(event, queue, True)
                yield GOES_ON

    def renamed(self, old: bytes, new: bytes, changes: dict[tuple[bytes, bytes], bool]) -> None:
        """What was bound to the name `old` is bound to `new`, which has no bindings: these are the
        `changes` for the journal. Routes have the queue itself, and stay."""
        for table in (self.by_name, self.masks_by_name):
            if bound := table.pop(old, None):
                table[new] = bound
        self.metadata.bytes += any(self.bound(new)) * (len(new) - len(old))
        self._pending.entry.bindings.update(changes)

    def remove_all(self, name: bytes, queue: Queue | None) -> Work[bool]:
        """Remove all bindings of a name; `queue` had this name, and is deleted. Return whether
        there were any."""
        if queue is not None:
            self._leaving.setdefault(name, []).append(queue)
        return one_at_a_time(self.busy, name, self._remove_all(name, queue))

    def _remove_all(self, name: bytes, queue: Queue | None) -> Work[bool]:
        events, masks = map(list, self.bound(name))
        with self._named(name):
            self.by_name.pop(name, None)
            self.masks_by_name.pop(name, None)
        # Which takes the queue, one of those that leave, out of their routes.
        yield from self._settle(name, events)
        yield from self._settle(name, masks)
        if queue is not None:
            self._leaving[name].remove(queue)
            if not self._leaving[name]:
                del self._leaving[name]
        size = yield from _bytes_of(events, masks)
        self.metadata.bytes -= size
        return bool(events or masks)


def _difference(
    bound: dict[bytes, None],
    replace: Iterable[bytes] | None,
    remove: Iterable[bytes],
    add: Iterable[bytes],
) -> Work[tuple[list[bytes], list[bytes]]]:
    """Events to bind and to unbind, after replacing, removing and adding. Without `replace` the
    cost does not depend on unchanged bindings."""
    added = yield from _unique(add)
    if replace is None:
        removed = yield from _unique(remove)
        gone = [event for event in removed if event in bound and event not in added]
        yield GOES_ON
        return [event for event in added if event not in bound], gone
    events = yield from _unique(replace)
    for event in remove:
        events.pop(event, None)
    events |= added
    yield GOES_ON
    new = [event for event in events if event not in bound]
    yield GOES_ON
    return new, [event for event in bound if event not in events]


def _unique(events: Iterable[bytes]) -> Work[dict[bytes, None]]:
    unique: dict[bytes, None] = {}
    left = iter(events)
    while some := dict.fromkeys(islice(left, STEP_NAMES)):
        unique |= some
        yield GOES_ON
    return unique


def _bytes_of(events: list[bytes], masks: list[bytes]) -> Work[int]:
    """Memory of these bindings."""
    size = 0
    for some in slices(events, STEP_NAMES):
        size += sum(map(binding_bytes, some))
        yield GOES_ON
    for some in slices(masks, STEP_BOUND_MASKS):
        size += sum(map(mask_bytes, some))
        yield GOES_ON
    return size


def _put(table: Table, name: bytes, new: Iterable[bytes], gone: Iterable[bytes]) -> None:
    bound = table.setdefault(name, {})
    bound.update(dict.fromkeys(new))
    for event in gone:
        del bound[event]
    if not bound:
        del table[name]


def _matched(masks: Iterable[bytes], bound: Iterable[bytes]) -> Work[list[bytes]]:
    """The events that one of the masks matches."""
    if not masks:
        return []
    tries, matched, weight = EventMasks(masks).tries, [], 0
    for event in list(bound):
        for matches in tries(event):
            weight += 1 + len(event) // 256
            if weight > STEP_NAMES:
                weight = 0
                yield GOES_ON
            if matches:
                matched.append(event)
                break
    return matched
