"""The progress of messages that consumers hold, as they tell it.

The one rule: it is in memory only, and counts while the consumer holds the message: what is told of
an earlier delivery is not shown.
"""

from collections import OrderedDict
from typing import NamedTuple

from mqks.broker.spine.clients.consumer import Consumer
from mqks.limits import PROGRESS_MAX


class ToldProgress(NamedTuple):
    delivered_us: int
    """The delivery that it is of."""
    percent: int
    text: bytes

    @property
    def told(self) -> bytes:
        return b"%d %b" % (self.percent, self.text) if self.text else b"%d" % self.percent


class AllProgress:
    def __init__(self) -> None:
        self._known: OrderedDict[tuple[bytes, int, int], ToldProgress] = OrderedDict()
        """By consumer id, queue id and number."""

    def tell(self, consumer: Consumer, message_id: bytes, percent: int, text: bytes) -> None:
        """The oldest delivery of this message to the consumer is so far, if there is one."""
        held = consumer.unacked.get(message_id)
        if held is None:
            return
        key = consumer.id, consumer.queue.id, held[0]
        self._known.pop(key, None)
        self._known[key] = ToldProgress(held[2], percent, text)
        if len(self._known) > PROGRESS_MAX:
            self._known.popitem(last=False)

    def of(self, consumer: Consumer | None, message_id: bytes, number: int) -> ToldProgress | None:
        if consumer is None:
            return None
        found = self._known.get((consumer.id, consumer.queue.id, number))
        since_us = found and consumer.held_since_us(message_id, number)
        return found if found and found.delivered_us == since_us else None

    def __len__(self) -> int:
        return len(self._known)
