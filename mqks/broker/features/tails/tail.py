"""One `tail`: who watches, and which messages."""

from collections.abc import Iterable, Sequence
from typing import Final

from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.clients.outbox import Outbox
from mqks.limits import STEP_MESSAGES
from mqks.protocol.masks import name_masks
from mqks.users import Permissions

COMPARED: Final = 64
"""An event that is compared with a mask counts for so many messages."""
EVENTS_KEPT: Final = 4096
"""Of so many events a tail knows whether it shows them."""


class MessageTail:
    """`queue`: its messages alone; None for all that are published."""

    __slots__ = ("connection", "dropped", "ended", "events", "id", "known", "masks", "queue")

    def __init__(
        self,
        tail_id: bytes,
        connection: Outbox,
        queue: bytes | None,
        events: Iterable[bytes],
        masks: Iterable[bytes],
    ) -> None:
        self.id = tail_id
        self.connection = connection
        self.queue = queue
        self.events = frozenset(events)
        self.masks = {mask: name_masks([mask]) for mask in masks}
        self.known: dict[bytes, bool] = {}
        self.dropped = 0
        """Messages that were not shown and that it has not been told of."""
        self.ended = False

    def is_allowed(self, permissions: Permissions) -> bool:
        """Whether a user may see what it shows: as if a queue was read, or bound like this."""
        if self.queue is not None:
            return permissions.may_read(self.queue)
        return (
            permissions.consumes
            and all(map(permissions.may_bind, self.events))
            and all(map(permissions.may_bind_mask, self.masks))
        )

    def choose(self, lines: Sequence[bytes]) -> Work[Sequence[bytes]]:
        """Those of the messages that it shows."""
        if not (self.events or self.masks):
            return lines
        found, weight, known = [], 0, self.known
        for line in lines:
            event = line.split(b" ", 2)[1].removeprefix(b"event=")
            is_shown = known.get(event)
            if is_shown is None:
                is_shown = event in self.events
                for matches in () if is_shown else self.masks.values():
                    weight += COMPARED
                    if weight >= STEP_MESSAGES:
                        weight = 0
                        yield GOES_ON
                    if matches(event):
                        is_shown = True
                        break
                if len(known) >= EVENTS_KEPT:
                    known.clear()
                known[event] = is_shown
            if is_shown:
                found.append(line)
        return found
