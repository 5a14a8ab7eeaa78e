"""What one group commit must make durable, as plain data from the broker to the journal.

The one rule: applying a batch twice, or the batches of a journal in any order, gives the same
state. Acks are sets, next sequences, cursors and marks only grow.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from mqks.broker.connection import Connection
from mqks.broker.consumer import Consumer
from mqks.broker.ranges import Range
from mqks.protocol.requests import DeleteRule

if TYPE_CHECKING:
    from mqks.broker.queue import Queue


class Run(NamedTuple):
    """Messages with consecutive sequence numbers from `first` on."""

    first: int
    lines: list[bytes]


class QueueChange(NamedTuple):
    """What happened to one queue's messages.

    `next_seq`: the number the next message will get. `cursor`: everything below it has been
    delivered once. `acks`: ranges of settled numbers. `requeued`: settled, too, as their messages
    stand among `runs` again, under new numbers: only together are both true. `marks`: number →
    2 x retry for a message that waits in its queue, one more when it has been delivered again.
    """

    queue_id: int
    next_seq: int
    cursor: int
    runs: list[Run]
    acks: list[Range]
    requeued: list[Range]
    marks: dict[int, int]


class QueueState(NamedTuple):
    """A queue that was made or whose delete rule changed."""

    name: bytes
    rule: DeleteRule | None


class ErrorRecord(NamedTuple):
    """Details of one error reply, as log and database keep them; never a payload.

    The user is known to the running server only.
    """

    id: str
    time_us: int
    connection: str
    request_id: bytes
    action: bytes
    reason: str
    user: str | None = None


@dataclass(slots=True)
class Batch:
    """Everything pending when the journal's writer came by."""

    changes: list[QueueChange] = field(default_factory=list)
    queues: dict[int, QueueState | None] = field(default_factory=dict)
    """Queue id → its state now, None when it was deleted."""
    bindings: dict[tuple[bytes, bytes], bool] = field(default_factory=dict)
    """Queue name and event → whether bound now."""
    errors: list[ErrorRecord] = field(default_factory=list)
    once: list[bytes] = field(default_factory=list)
    """Message ids that may not be published again, oldest first."""
    confirms: list[tuple[Connection, list[bytes]]] = field(default_factory=list)
    confirmed: int = 0
    """How many of the confirms are those of messages."""
    counts: list[tuple[Connection, bytes, int]] = field(default_factory=list)
    """Confirms that tell how many: apart, so that all the others are joined in one go."""
    held: list[Consumer] = field(default_factory=list)
    """Consumers that get nothing before their confirm."""
    is_rest: bool = False
    """Pieces of it have been written before."""
    records: int = 0
    """Messages, acks and marks in it, about."""
    taken: list[tuple["Queue", int]] = field(default_factory=list)
    """For each change its queue, and below which number that was durable before."""

    @property
    def has_metadata(self) -> bool:
        return bool(self.queues or self.bindings or self.errors or self.once)

    @property
    def must_last(self) -> bool:
        """Whether there is more to write than the details of errors, which no confirm tells of."""
        return bool(self.is_rest or self.changes or self.queues or self.bindings or self.once)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for it."""
        return bool(self.confirms or self.counts or self.held)

    @property
    def writes(self) -> bool:
        """Whether there is anything to write; confirms alone need no commit."""
        return bool(self.changes) or self.has_metadata
