"""Which messages of a queue a request is about: of an event, an id, an age, with attributes.

The one rule: a message is chosen when all that was asked for is true of it. What needs its body is
looked at in steps: to compare an event with a mask may take long.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

from mqks.broker.spine.base.turns import GOES_ON, Work
from mqks.broker.spine.queue.shared import Place
from mqks.limits import STEP_MESSAGES
from mqks.protocol.masks import name_masks
from mqks.protocol.meta import has_pairs, pairs_of
from mqks.protocol.replies import parts
from mqks.protocol.requests import Selection

COMPARED: Final = 64
"""An event that is compared with a mask counts for so many messages."""
EVENTS_KEPT: Final = 4096
"""Of so many events it is known whether the mask matches."""


class Chosen:
    """What a selection means at this moment, `now_us`."""

    __slots__ = ("_before_us", "_known", "_matches", "_prefix", "_where", "needs_bodies")

    def __init__(self, wanted: Selection, now_us: int) -> None:
        mask, message_id, older_us, where = wanted
        self._matches = None if mask is None else name_masks([mask])
        self._known: dict[bytes, bool] = {}
        self._prefix = None if message_id is None else message_id + b" "
        self._before_us = now_us - older_us if older_us else None
        self._where = None if where is None else pairs_of(where)
        self.needs_bodies = not (mask is message_id is where is None)

    def is_old(self, arrived_us: int) -> bool:
        return self._before_us is None or arrived_us <= self._before_us

    def next_old(self, queue: Place, first: int, end: int) -> tuple[int, int]:
        """The next numbers whose messages are old enough, see `Facts.arrived_by`."""
        if self._before_us is None:
            return first, end
        return queue.shared.facts.arrived_by(queue.id, self._before_us, first, end)

    def by_age(self, queue: Place, numbers: list[int]) -> list[int]:
        """Those of the numbers whose messages are old enough."""
        if self._before_us is None:
            return numbers
        return [number for number in numbers if self.is_old(queue.arrived_us(number))]

    def by_body(self, lines: Iterable[tuple[int, bytes]]) -> Work[dict[int, bytes]]:
        """Those of the numbered messages that have the event, the id and the attributes."""
        chosen: dict[int, bytes] = {}
        matches, known, prefix, weight = self._matches, self._known, self._prefix, 0
        for number, line in lines:
            weight += 1
            if prefix is not None and not line.startswith(prefix):
                continue
            if self._where is not None:
                meta = parts(line).meta
                weight += len(self._where) + len(meta) // 4
                if not has_pairs(meta, self._where):
                    continue
            if matches is not None:
                event = line.split(b" ", 2)[1].removeprefix(b"event=")
                is_matched = known.get(event)
                if is_matched is None:
                    weight += COMPARED
                    if len(known) >= EVENTS_KEPT:
                        known.clear()
                    is_matched = known[event] = matches(event)
                if not is_matched:
                    continue
            chosen[number] = line
            if weight >= STEP_MESSAGES:
                weight = 0
                yield GOES_ON
        yield GOES_ON
        return chosen


class Read(NamedTuple):
    """A request for the messages of a queue with numbers from `first` up to `end`.

    `form` is the form of the reply: `peek` lines; `scheduled` lines of scheduled messages, and
    `soonest` those that are due first, with the batch of each if `has_batches`; `read` columns,
    with attributes if `has_meta`; `range` only the first and last number, with `at_us` the first
    message that arrived then or later. If something is `chosen`, only that is in the reply.
    `confirm`: a confirm follows it.
    """

    request_id: bytes
    form: str
    queue: bytes
    queue_id: int
    confirm: bool
    first: int = 1
    end: int | None = None
    limit: int = 1
    at_us: int | None = None
    has_meta: bool = False
    has_batches: bool = False
    chosen: Chosen | None = None
