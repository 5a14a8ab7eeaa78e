"""What the queues, consumers and connections of one broker share.

The one rule: they get this and each other, never the broker.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from mqks.broker.base.budget import Budget
from mqks.broker.base.facts import Facts
from mqks.broker.base.schedule import Schedule
from mqks.broker.base.turns import Turns
from mqks.broker.log.pending import Pending
from mqks.settings import Settings

if TYPE_CHECKING:
    from mqks.broker.clients.connection import Connection
    from mqks.broker.clients.tails import Tail
    from mqks.broker.queue.queue import Queue


REASONS: Final = ("rejects", "losses", "ttl", "overflow", "dead")
"""Why a message is dead."""


class Counters:
    """Counters since the start; `docs/protocol.md` describes them under stats."""

    __slots__ = ("consumed", "dead", "delivered", "dropped", "redelivered", "rejected")

    def __init__(self) -> None:
        self.delivered = self.redelivered = self.consumed = self.rejected = 0
        self.dead = dict.fromkeys(REASONS, 0)
        """By reason."""
        self.dropped = 0
        """Dead messages without a dead-letter queue."""


class Fetch(NamedTuple):
    """A request for living messages of a queue that are only on disk. `then` gets those that were
    found, by number; it is not called if the queue was deleted meanwhile."""

    queue: "Queue"
    numbers: list[int]
    then: Callable[[dict[int, bytes]], None]


class Shared:
    __slots__ = (
        *("counters", "due", "facts", "high_water_bytes", "memory"),
        *(
            "on_dropped",
            "on_queue_full",
            "on_queue_nearly_full",
            "outboxes",
            "page_requests",
            "pending",
            "show",
        ),
        *(
            "dead_letter_queue",
            "expelled",
            "fetches",
            "queue_messages_max",
            "schedule",
            "tight_queues",
            "touched",
            "turns",
            "unacked",
            "withholds",
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
        self.show: Callable[[tuple[Tail, ...], list[bytes]], None] = lambda tails, lines: None
        """Show messages to the tails of a queue."""
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
        """Connections with an outbox to be flushed by the server."""
        self.expelled: list[Connection] = []
        """Connections that others have expelled, which the server closes."""
        self.due: dict[Queue, None] = {}
        """Queues whose delivery was interrupted by the end of the turn."""
        self.page_requests: list[Queue] = []
        """Queues that request their next page, which the server reads."""
        self.fetches: list[Fetch] = []
        """Requests for single messages on disk, which the server reads."""
        self.dead_letter_queue: Callable[[Queue], Queue | None] = lambda queue: None
        """Returns the dead-letter queue of a queue."""
        self.withholds = False
        """Nothing is delivered that the journal holds, since another broker may deliver it."""
        self.queue_messages_max = settings.queue_messages_max
        self.tight_queues: dict[Queue, None] = {}
        """Queues that the messages of one chunk may fill, see `Capacity.is_tight`."""
        self.on_dropped: Callable[[Queue, int, str], None] = lambda *_: None
        """Called when messages of a queue die without a dead-letter queue: how many, and why."""
        self.on_queue_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue becomes full, and when it is no longer full."""
        self.on_queue_nearly_full: Callable[[Queue], None] = lambda queue: None
        """Called when a queue is nearly full."""
