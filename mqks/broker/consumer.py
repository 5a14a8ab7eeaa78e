"""One consumer: what it was given and has not settled, and why it rests.

The one rule: with manual ack, every delivery is in `unacked`, and counted, until it is acked or
goes back.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final

from mqks.broker.budget import Budget
from mqks.broker.lane import Delivery
from mqks.broker.resting import Resting
from mqks.broker.turns import emptied
from mqks.protocol import replies

if TYPE_CHECKING:
    from mqks.broker.connection import Connection
    from mqks.broker.queue import Queue

UNLIMITED: Final = 1 << 62
UNACKED_OVERHEAD_BYTES: Final = 288
"""What a delivery takes beside the length of its message: four objects and an entry of a dict
(measured), and a second copy of its id. Adding up the lengths of ids would cost 3 % of an ack, and
none is longer than `name_bytes_max`."""


class Rest:
    """Why a consumer gets nothing."""

    CONFIRM: Final = 1
    """Its own consume is not confirmed yet."""
    SLOW: Final = 2
    """Its connection does not take its replies."""
    UNACKED: Final = 4
    """It holds as many messages as it may."""
    ALL_UNACKED: Final = 8
    """All consumers together hold as many bytes as they may."""
    NO_QUEUE: Final = 16
    """Its queue was deleted."""
    ENDED: Final = 32


class Consumer(Resting):
    __slots__ = (
        *("budget", "connection", "id", "manual_ack", "prefix", "queue", "repeated"),
        *("separator", "unacked", "unacked_bytes", "unacked_max", "update_due"),
    )

    def __init__(
        self,
        consumer_id: bytes,
        connection: "Connection",
        queue: "Queue",
        manual_ack: bool,
        unacked_max: int,
    ) -> None:
        super().__init__()
        self.id = consumer_id
        self.connection = connection
        self.queue = queue
        self.manual_ack = manual_ack
        self.unacked_max = unacked_max
        self.budget: Budget = queue.shared.unacked
        self.prefix = consumer_id + b" ok "
        self.separator = b"\n" + self.prefix
        self.update_due = False
        """Its queue's bindings or rule have changed, and it could not be told."""
        self.unacked: dict[bytes, Delivery] = {}
        """Message id → its oldest unsettled delivery."""
        self.repeated: dict[bytes, deque[Delivery]] = {}
        """Message id → later deliveries under the same id."""
        self.unacked_bytes = 0

    @property
    def deleted(self) -> bool:
        return bool(self.rests & Rest.ENDED)

    @property
    def unacked_count(self) -> int:
        """Deliveries that are not settled."""
        return len(self.unacked) + sum(map(len, self.repeated.values()))

    # -- whether it takes part

    def _stop(self) -> None:
        self.queue.ring.pop(self, None)

    def _go_on(self) -> None:
        queue = self.queue
        if self in queue.consumers:
            queue.ring[self] = None
            queue.deliver()

    def room(self) -> int:
        """How many more messages it can take now. One it may always hold, or those who never ack
        would starve all others."""
        if self.connection.rests:
            return 0
        if not self.manual_ack:
            return UNLIMITED
        if self.budget.is_short:
            return 0 if self.unacked else 1
        return self.unacked_max - self.unacked_count

    def rest_if_full(self) -> None:
        """It is its turn, and it may have no room."""
        if self.connection.rests:
            self.rest(Rest.SLOW)
        elif self.manual_ack and self.unacked:
            if self.unacked_count >= self.unacked_max:
                self.rest(Rest.UNACKED)
            elif self.budget.is_short:
                self.rest(Rest.ALL_UNACKED)
                self.budget.wait(self, self._has_budget)

    def _has_budget(self) -> None:
        self.resume(Rest.ALL_UNACKED)

    # -- what it holds

    def take(
        self, numbers: Sequence[int], lines: Sequence[bytes], ids: Sequence[bytes] | None
    ) -> bytes:
        """Take messages and return the joined deliveries.

        `ids` are the message ids where the caller has them at hand.
        """
        told = lines
        if self.queue.lane.marks:
            told = self._tell_marks(numbers, lines)
        if self.manual_ack:
            if ids is None:
                ids = [line[: line.index(b" ")] for line in lines]
            taken = dict(zip(ids, zip(numbers, lines, strict=True), strict=True))
            # Of two views the shorter one is walked; of a dict, all of it.
            if len(taken) == len(ids) and taken.keys().isdisjoint(self.unacked.keys()):
                self.unacked.update(taken)
            else:
                for message_id, number, line in zip(ids, numbers, lines, strict=True):
                    self._take_one(message_id, (number, line))
            size = sum(map(len, lines)) + UNACKED_OVERHEAD_BYTES * len(lines)
            self.unacked_bytes += size
            self.budget.used += size
        return self.prefix + self.separator.join(told) + b"\n"

    def _tell_marks(self, numbers: Sequence[int], lines: Sequence[bytes]) -> list[bytes]:
        """Tell the retry of those messages that have one, mark them as delivered again, and leave
        attributes out."""
        lane, told = self.queue.lane, []
        for number, line in zip(numbers, lines, strict=True):
            mark = lane.marks.get(number)
            if mark is None:
                told.append(line)
                continue
            if mark.has_attributes:
                line = replies.plain(line)
            if mark.retry:
                line = replies.with_retry(line, mark.retry)
                self.queue.shared.counters.redelivered += 1
            if self.manual_ack:
                lane.mark(number, mark._replace(redelivered=True))
            told.append(line)
        return told

    def _take_one(self, message_id: bytes, delivery: Delivery) -> None:
        if message_id in self.unacked:
            self.repeated.setdefault(message_id, deque()).append(delivery)
        else:
            self.unacked[message_id] = delivery

    def settle(self, message_ids: Iterable[bytes]) -> list[Delivery]:
        """Take the oldest delivery of each id out of the unacked; ids that are not there: none."""
        pop, repeated = self.unacked.pop, self.repeated
        deliveries = [
            delivery
            for message_id in message_ids
            if (delivery := pop(message_id, None)) is not None
            and (not repeated or self._promote(message_id))
        ]
        size = self.unacked_bytes
        if self.unacked:
            size = sum([len(line) for _, line in deliveries])
            size += UNACKED_OVERHEAD_BYTES * len(deliveries)
        self._give_back(size)
        return deliveries

    def _give_back(self, size: int) -> None:
        self.unacked_bytes -= size
        self.budget.give_back(size)
        if self.rests & Rest.UNACKED and self.unacked_count < self.unacked_max:
            self.resume(Rest.UNACKED)
        if self.rests & Rest.ALL_UNACKED and not self.unacked:
            self.budget.leave(self)
            self.resume(Rest.ALL_UNACKED)

    def _promote(self, message_id: bytes) -> bool:
        """The next delivery under a settled id becomes its oldest. Always true."""
        if later := self.repeated.get(message_id):
            self.unacked[message_id] = later.popleft()
            if not later:
                del self.repeated[message_id]
        return True

    def let_go(self) -> Iterator[Delivery]:
        """All that is unacked leaves at once, and comes out in no order, one by one: there may be
        so many that they are dealt with in turns."""
        unacked, repeated = self.unacked, self.repeated
        self.unacked, self.repeated = {}, {}
        self._give_back(self.unacked_bytes)
        return chain(
            (delivery for _, delivery in emptied(unacked)),
            (delivery for _, later in emptied(repeated) for delivery in later),
        )

    def update(self, about: bytes) -> bytes:
        """Tell what the queue is bound to now, `replies.bound`."""
        return replies.update(self.id, about, self.manual_ack)
