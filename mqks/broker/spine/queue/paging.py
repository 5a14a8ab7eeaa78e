"""What a queue reads from disk, a page or single messages, and what comes of it.

The one rule: a queue reads one thing at a time, and `Lane.paging` is set until it has come.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.log.pending import Run
from mqks.broker.spine.queue.shared import Place
from mqks.errors import MqksError
from mqks.protocol.replies import ATTRIBUTES
from mqks.protocol.requests import shown

# What to read, and how far ahead, is the question of its order: the next page, which is all that
# lives from a number on, or single messages. The server reads while other requests are handled, so
# messages of a page may have left meanwhile, or be in memory again: `Blocks.fill` takes what is
# still only on disk. Only if the first one is still wanted and is not there, the journal has
# lost a message, and the server must end.


def page_in(queue: Place, first: int | None, runs: list[Run]) -> None:
    """All living messages from `first` on have come, which was the `page_first` of its order
    when the read began. Raises MqksError."""
    queue.shared.turns.begin()
    lane, order = queue.lane, queue.order
    lane.paging = False
    if not lane.has_attributes:
        lane.has_attributes = any(ATTRIBUTES in line for r in runs for line in r.lines)
    if first is not None and order.page_first == first and (not runs or runs[0].first != first):
        raise MqksError(f"messages of queue {shown(queue.name)} from {first} are missing")
    if (learning := order.came(runs)) is None:
        queue.deliver()
    else:
        lane.paging = True
        queue.shared.turns.add(_learn(queue, learning))


def _learn(queue: Place, learning: Work[None]) -> Work[None]:
    yield from learning
    queue.lane.paging = False
    queue.deliver()


def bring(queue: Place, numbers: Sequence[int]) -> None:
    """Read ready messages that are only on disk, and deliver. Until then nothing else is read
    ahead."""
    queue.lane.paging = True
    queue.fetch([*numbers], partial(_brought, queue, numbers))


def _brought(queue: Place, numbers: Sequence[int], lines: dict[int, bytes]) -> None:
    queue.lane.paging = False
    bring_in(queue, numbers, lines)
    queue.deliver()


def bring_in(queue: Place, numbers: Iterable[int], lines: Mapping[int, bytes]) -> None:
    """Add the bodies of these messages, read from disk, where they are still wanted. Raises
    MqksError if one is missing."""
    blocks = queue.lane.blocks
    for number in numbers:
        if number in lines:
            blocks.put(number, lines[number])
        elif number in blocks and blocks.get(number) is None:
            raise MqksError(f"message {number} of queue {shown(queue.name)} is missing")
