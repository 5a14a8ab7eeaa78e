"""The one door of what is published: from lines, transactions and schedules.

The one rule: each queue gets the messages of a connection in their order.
"""

from collections import deque
from typing import Any, Protocol

from mqks.audit import Who
from mqks.broker.spine.base.turns import Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.queue.terms import NewMessages, put
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.once import KnownIds, Once
from mqks.limits import COPIES_MAX, GROUPS_QUEUES, ROUTE_QUEUES, STEP_COPIES
from mqks.settings import Settings


def is_nowhere(queues: Queues) -> bool:
    """Whether no queue that exists is among these of an event."""
    return all(queue.deleted for queue in queues)


class Watchers(Protocol):
    """Who is shown what is published."""

    of_events: tuple[Any, ...]
    """Those of all events."""

    def show(self, tails: tuple[Any, ...], lines: list[bytes]) -> None: ...


class PublishTracer(Protocol):
    def published(self, who: Who | None, queues: Queues, new: NewMessages) -> None:
        """Somebody, or a schedule, has published messages to these queues."""


class Publishing:
    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        bindings: Bindings,
        tails: Watchers,
        known: KnownIds,
    ) -> None:
        self._settings = settings
        self.shared = shared
        self.bindings = bindings
        self._tails = tails
        self.once = Once(known, shared.pending)
        self.publisher: Connection | None = None
        """Whose messages follow; none's, those of schedules."""
        self.tracer: PublishTracer | None = None
        """While it is there, messages of several connections are not published together."""

    def tight(self, queues: Queues) -> set[Queue]:
        """Those of these queues that a chunk may fill."""
        tight = self.shared.capacities.tight
        return queues.keys() & tight.keys() if tight else set()

    def put(self, queues: Queues, new: NewMessages, works: deque[Work[None]] | None = None) -> None:
        """Give all these messages to each queue: at once, or, if there are `works` of the
        connection, or very many queues, in a work after those. Without `works` always at once."""
        self._note(queues, new)
        if works is not None and (works or len(queues) >= GROUPS_QUEUES):
            works.append(self._route(queues, new))
            return
        if new.terms is None:
            for queue in queues:
                queue.publish(new.ids, new.bodies)
        else:
            for queue in queues:
                put(queue, new)

    def put_in_turns(self, queues: Queues, new: NewMessages) -> Work[None]:
        """Give all these messages to each queue. The first `ROUTE_QUEUES` have them at once."""
        self._note(queues, new)
        yield from self._route(queues, new)

    def _note(self, queues: Queues, new: NewMessages) -> None:
        """Count what is published, and show it to those who watch."""
        counters, count = self.shared.counters, len(new.ids)
        counters.published += count
        if not queues:
            counters.unroutable += count
        counters.queued += count * len(queues)
        if tails := self._tails.of_events:
            self._tails.show(tails, new.bodies)
        if self.tracer is not None:
            who = None if self.publisher is None else self.publisher.who
            self.tracer.published(who, queues, new)

    def _route(self, queues: Queues, new: NewMessages) -> Work[None]:
        """In queues that may become full the messages have their places from now on: the next
        publish must not be told that there is room for it, too."""
        tight = self.tight(queues)
        size = sum(map(len, new.bodies)) if tight else 0
        for queue in tight:
            queue.capacity.reserve(len(new.ids), size)
        return self._route_in_turns(list(queues), tight, new, size)

    def _route_in_turns(
        self, queues: list[Queue], tight: set[Queue], new: NewMessages, size: int
    ) -> Work[None]:
        # The writer takes a batch between two steps, so a message for 100,000 queues waits for it:
        # otherwise all its copies would be in memory at once.
        records_max = self._settings.batch_records_max + COPIES_MAX
        for some in slices(queues, max(1, min(ROUTE_QUEUES, STEP_COPIES // len(new.ids)))):
            for queue in some:
                if queue in tight:
                    queue.capacity.reserve(-len(new.ids), -size)
                put(queue, new)
                if queue.capacity.nearly_full:
                    # Consumers may have taken all: it is not full any more.
                    queue.deliver()
            yield self.shared.pending.records > records_max

    def reserve(self, queues: Queues, size: int, count: int = 1) -> None:
        """Count a message of this size as on its way to those of these queues that it may fill; a
        `count` of -1 undoes it."""
        for queue in self.tight(queues):
            queue.capacity.reserve(count, count * size)
