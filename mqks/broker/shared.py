"""What the queues, consumers and connections of one broker share.

The one rule: they get this and each other, never the broker.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mqks.broker.budget import Budget
from mqks.broker.facts import Facts
from mqks.broker.pending import Pending
from mqks.broker.schedule import Schedule
from mqks.broker.turns import Turns
from mqks.settings import Settings

if TYPE_CHECKING:
    from mqks.broker.connection import Connection
    from mqks.broker.queue import Queue


REASONS: Final = ("rejects", "losses", "ttl", "overflow", "dead")
"""Why a message is dead."""


class Counters:
    """Since the start; `docs/protocol.md` tells them under stats."""

    __slots__ = ("consumed", "dead", "delivered", "dropped", "redelivered", "rejected")

    def __init__(self) -> None:
        self.delivered = self.redelivered = self.consumed = self.rejected = 0
        self.dead = dict.fromkeys(REASONS, 0)
        """By the reason."""
        self.dropped = 0
        """Those of them that went to no dead-letter queue."""


class Fetch(NamedTuple):
    """Living messages of a queue that are only on disk. `then` gets those that were found, by
    number; not if the queue was deleted meanwhile."""

    queue: "Queue"
    numbers: list[int]
    then: Callable[[dict[int, bytes]], None]


class Shared:
    __slots__ = (
        *("counters", "due", "facts", "full_queues", "high_water_bytes", "memory"),
        *("on_queue_full", "on_queue_nearly_full", "outboxes", "page_requests", "pending"),
        *(
            "dead_letter_queue",
            "fetches",
            "limited_queues",
            "near_queues",
            "queue_messages_max",
            "schedule",
            "touched",
            "turns",
            "unacked",
        ),
    )

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float],
        now_us: Callable[[], int],
        on_unacked_wait: Callable[[], None],
    ) -> None:
        self.turns = Turns(clock)
        self.schedule = Schedule(clock, now_us)
        self.counters = Counters()
        self.facts = Facts()
        self.pending = Pending(settings.errors_kept_max, now_us)
        self.memory = Budget(settings.memory_bytes // 2 + 1, self.turns)
        """For waiting messages: half of what they may take. The other half is left to what is on
        its way, and to the allocator."""
        self.unacked = Budget(settings.unacked_bytes_max, self.turns, on_unacked_wait)
        """For what consumers hold. Consumers wait for it."""
        self.outboxes = Budget(settings.unsent_bytes_max, self.turns)
        """For replies that were not taken, at most: the server looks now and then what was. Queues
        wait for it."""
        self.high_water_bytes = settings.delivery_pause_bytes
        self.touched: list[Connection] = []
        """Connections with something in their outbox: the server's to flush."""
        self.due: dict[Queue, None] = {}
        """Queues that could deliver, and the turn was over."""
        self.page_requests: list[Queue] = []
        """Queues that want their next page from disk: the server's to fetch."""
        self.fetches: list[Fetch] = []
        """Single messages that are wanted from disk: likewise."""
        self.dead_letter_queue: Callable[[Queue], Queue | None] = lambda queue: None
        """Where its dead messages go."""
        self.queue_messages_max = settings.queue_messages_max
        self.full_queues: dict[Queue, None] = {}
        """Queues with as many waiting messages as they may have."""
        self.near_queues: dict[Queue, None] = {}
        """Queues that what gathers at most may fill: how much gathers is checked before it does."""
        self.limited_queues: dict[Queue, None] = {}
        """Queues of which a policy says how much may wait: publishes to them are looked at one by
        one."""
        self.on_queue_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue is full, and when it is no longer."""
        self.on_queue_nearly_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue begins to come near that."""
