"""How much may wait in a queue: the limits of its policy, or of the settings where it has none.

The one rule: whether there is room is decided here. What waits is the same for every limit: ready
and scheduled messages, and those that are on their way to the queue.
"""

from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.queue.order import UNLIMITED
from mqks.broker.spine.queue.seams import Held, Update
from mqks.errors import Limit, LimitExceeded
from mqks.limits import GATHERED_MAX


class Capacity:
    waits = False
    __slots__ = (
        *("_default_max", "_holder", "_is_own", "bytes_max", "coming", "coming_bytes", "drops"),
        *("is_tight", "is_watched", "messages_max", "nearly_full", "refuses_all"),
    )

    def __init__(self, holder: Held, default_max: int) -> None:
        """`default_max` as in `Admissions`."""
        self._holder = holder
        self._default_max = default_max
        self.coming = self.coming_bytes = 0
        """Number and length of messages on their way to the queue."""
        self.refuses_all = False
        """It has reached the limit of the settings; it refuses until an eighth is free."""
        self.nearly_full = False
        """The warning before that was reported."""
        self.is_tight = False
        """The messages of one chunk may be too many: each is checked before it gathers."""
        self.is_watched = False
        """To `update` after each change, not only at a number of messages."""
        self.apply(DEFAULT)

    def apply(self, rules: Policy) -> None:
        own_max = rules.messages_max
        self._is_own = own_max is not None
        self.messages_max = (self._default_max if own_max is None else own_max) or UNLIMITED
        self.bytes_max = rules.bytes_max or UNLIMITED
        self.drops = rules.overflow == "drop"

    @property
    def backlog(self) -> tuple[int, int]:
        messages, size = self._holder.contents
        return messages + self.coming, size + self.coming_bytes

    @property
    def fullness(self) -> float | None:
        """Used part of the limits of its policy, from 0 to 1; None if it refuses nothing."""
        if self.drops or not (self._is_own or self.bytes_max < UNLIMITED):
            return None
        messages, size = self._holder.contents
        return max(messages / self.messages_max, size / self.bytes_max)

    def reserve(self, count: int, size: int) -> None:
        self.coming += count
        self.coming_bytes += size

    def has_room(self, count: int) -> bool:
        if self.drops:
            return True
        if self.refuses_all or self.bytes_max < UNLIMITED:  # With bytes, each length counts.
            return False
        return self.backlog[0] + count <= self.messages_max

    def check(self, size: int, where: str) -> None:
        """Raise LimitExceeded if a message of this size may not join; `where` ends the reason."""
        if self.drops:
            return
        messages, backlog_bytes = self.backlog
        if self.refuses_all or messages >= self.messages_max:
            name: Limit = "messages_max" if self._is_own else "queue_messages_max"
            reason = f"{name} is {self.messages_max}, and {messages} messages wait {where}"
            if messages < self.messages_max:
                reason += f"; it accepts messages again below {self._again}"
            raise LimitExceeded(name, reason)
        if backlog_bytes + size > self.bytes_max:
            reason = f"bytes_max is {self.bytes_max}, the message has {size}, "
            reason += f"and {backlog_bytes} bytes wait {where}"
            raise LimitExceeded("messages_max", reason)

    @property
    def _again(self) -> int:
        """After it was full, it accepts messages again below this number."""
        return max(1, self.messages_max * 7 // 8)

    def surplus(self, ready: int, ready_bytes: int) -> int:
        if not (self.drops and ready):
            return 0
        messages, size = self._holder.contents
        bytes_over = -(-max(0, size - self.bytes_max) // (ready_bytes // ready + 1))
        return min(ready, max(messages - self.messages_max, bytes_over))

    def update(self) -> Update:
        """What waits has changed.

        It is nearly full at four fifths of the limit of the settings, and again only after it fell
        below two thirds. It is no longer full when an eighth is free, not for each message. A
        policy refuses each message above its limit, and nothing is reported."""
        messages, limit, refused_all = self.backlog[0], self.messages_max, self.refuses_all
        warns, next_at = False, limit
        if self._is_own or self.drops:
            self.refuses_all = self.nearly_full = False
        else:
            self.refuses_all = messages >= (self._again if refused_all else limit)
            if not (self.nearly_full or refused_all or self.refuses_all):
                warns = messages >= max(1, limit * 4 // 5)
            is_low = not self.refuses_all and messages < limit * 2 // 3
            self.nearly_full = not is_low and (self.nearly_full or warns or self.refuses_all)
            next_at = limit if self.nearly_full else limit * 4 // 5
        has_bytes_max = self.bytes_max < UNLIMITED
        if self.drops:
            self.is_tight, next_at = False, limit + 1
        else:
            # What gathers is not checked singly: there must be room for all of a chunk.
            self.is_tight = self.refuses_all or has_bytes_max or limit - messages < GATHERED_MAX
            next_at = min(next_at, limit - GATHERED_MAX + 1)
        self.is_watched = self.is_tight or self.nearly_full or has_bytes_max
        return Update(warns, self.refuses_all != refused_all, next_at - messages)
