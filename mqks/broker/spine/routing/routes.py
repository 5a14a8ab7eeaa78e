"""Where events lead.

The one rule: only to queues that exist, so that a publish looks up once and checks nothing.
"""

from typing import Final

from mqks.broker.spine.base.places import Places
from mqks.broker.spine.base.turns import GOES_ON, Work, slices
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.routing.masks import Masks, Queues
from mqks.limits import ROUTES_BYTES_MAX, STEP_NAMES

NOWHERE: Final[Queues] = {}
ROUTE_BYTES: Final = 200
COPY_BYTES: Final = 64
"""Memory of a cached route besides its event, and of each of its queues."""


class Routes:
    # A publish comes past here, so what it needs is one look-up: in `bound`, or, while there are
    # masks, in `_known`. What is not there is walked, as far as one step goes; a walk that takes
    # longer is a work, and what the event leads to must not change before it has ended.

    def __init__(self) -> None:
        self.bound: dict[bytes, Queues] = {}
        """Of bound events, without masks. A publish uses `route`."""
        self.masks = Masks()
        self._known: dict[bytes, Queues] = {}
        """Routes of events while there are masks; a change of masks clears them."""
        self._known_bytes = 0
        """Memory added since they were cleared."""
        self._walks = Places(1)
        """For a walk that takes more than a step: bindings do not change meanwhile, so that a queue
        whose bindings are replaced misses no message."""

    def route(self, event: bytes) -> Queues | None:
        """The queues that get this event; None: call `find`."""
        if not self.masks.count:
            return self.bound.get(event, NOWHERE)
        known = self._known.get(event)
        if known is not None:
            return known
        try:
            next(self._find(event))
        except StopIteration as end:
            queues: Queues = end.value
            return queues
        return None

    def find(self, event: bytes) -> Work[Queues]:
        """The queues of an event, in steps. Until the caller's next step they are also in the
        cache."""
        queues = self.route(event)
        if queues is None:
            place = yield from self._walks.take()
            try:
                queues = yield from self._find(event)
            finally:
                self._walks.leave(place)
        return queues

    def _find(self, event: bytes) -> Work[Queues]:
        matched = yield from self.masks.walk(event)
        if plain := self.bound.get(event):
            matched.append(plain)
        queues, size = NOWHERE, ROUTE_BYTES + len(event)
        if len(matched) == 1:
            [queues] = matched  # The object itself, not a copy: its changes do no harm.
        elif matched:
            queues = {}
            weight = 0
            for bound in matched:
                weight += 1 + len(bound)
                for some in slices(list(bound), STEP_NAMES) if len(bound) > STEP_NAMES else [bound]:
                    queues.update(dict.fromkeys(some))
                    if weight > STEP_NAMES:
                        weight = 0
                        yield GOES_ON
            size += COPY_BYTES * len(queues)
        # A client that invents events fills the cache: all of it goes, which costs the others one
        # walk each, and needs no order of use.
        if self._known_bytes + size > ROUTES_BYTES_MAX:
            self._forget()
        self._known[event] = queues
        self._known_bytes += size
        return queues

    def _forget(self) -> None:
        self._known.clear()
        self._known_bytes = 0

    def settled(self) -> Work[None]:
        """Wait until no walk is running."""
        if self._walks:
            self._walks.leave((yield from self._walks.take()))

    def set(self, event: bytes, queue: Queue, is_bound: bool) -> None:
        if self._known:
            self._known.pop(event, None)
        if is_bound:
            self.bound.setdefault(event, {})[queue] = None
        elif (queues := self.bound.get(event)) is not None:
            queues.pop(queue, None)
            if not queues:
                del self.bound[event]

    def set_mask(self, mask: bytes, queue: Queue, is_bound: bool) -> None:
        (self.masks.bind if is_bound else self.masks.unbind)(mask[1:], queue)
        self._forget()
