"""The only way in which a message moves from one place to another.

The one rule: one commit settles it where it was and appends it where it goes. So it is never lost
and never there twice, whenever the process is killed.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from mqks.broker.lane import Delivery, Lane
from mqks.broker.pending import Mark
from mqks.broker.turns import GOES_ON, WAITS, Work


class Target(Protocol):
    """A queue, as far as messages enter and leave it without publisher and consumer."""

    @property
    def lane(self) -> Lane: ...

    def deliver(self) -> None: ...

    def want_page(self) -> None: ...


def move(
    source: Lane, deliveries: Iterable[Delivery], to: Lane, remark: Callable[[Mark], Mark]
) -> None:
    """Move messages that are alive in `source`, in none of its stretches any more, to the end of
    `to`, which may be the same lane. Each gets what `remark` makes of its mark."""
    for number, line in deliveries:
        to.append_marked(line, remark(source.move_out(number)))
    if source is not to:
        source.pending.moves = True


def move_waiting(source: Target, to: Target, end: int, remark: Callable[[Mark], Mark]) -> Work[int]:
    """Move the waiting messages of one queue with numbers below `end` to the end of another one,
    in their order, wherever their bodies are; return how many."""
    lane, count = source.lane, 0
    while (oldest := lane.oldest) is not None and oldest < end:
        if lane.deleted or to.lane.deleted:
            break
        if lane.is_next_in_memory:
            some = lane.pop_waiting(end)
            move(lane, some, to.lane, remark)
            count += len(some)
            to.deliver()
            yield GOES_ON
        else:
            source.want_page()
            yield WAITS
    source.deliver()
    return count
