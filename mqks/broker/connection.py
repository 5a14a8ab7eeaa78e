"""One client as the broker sees it: where its lines come from and where its replies gather.

The one rule: nothing here sends. The server takes the outbox once a turn, as one joined write.
"""

from collections import deque
from typing import TYPE_CHECKING

from mqks.broker.expression import Budget
from mqks.broker.reads import Read
from mqks.protocol.lines import LineSplitter

if TYPE_CHECKING:
    from mqks.broker.consumer import Consumer


class Connection:
    """State of one connection.

    `blocked` says that the peer takes its replies too slowly: its consumers get nothing until the
    server has got rid of what is waiting.
    """

    __slots__ = (
        "address",
        "blocked",
        "closed",
        "consumers",
        "eval_budget",
        "id",
        "local",
        "outbox",
        "outbox_bytes",
        "reads",
        "splitter",
        "touched",
        "unconfirmed",
    )

    def __init__(self, connection_id: int, address: str, local: bool, line_bytes_max: int) -> None:
        self.id = connection_id
        self.address = address
        self.local = local
        """Whether the peer is on this machine."""
        self.splitter = LineSplitter(line_bytes_max)
        self.outbox: list[bytes] = []
        self.outbox_bytes = 0
        self.touched = False
        self.blocked = False
        self.closed = False
        self.eval_budget: Budget | None = None
        """Steps that expressions of the chunk in hand may still take."""
        self.unconfirmed = 0
        """Confirms that wait for a commit."""
        self.consumers: dict[bytes, Consumer] = {}
        self.reads: deque[Read] = deque()
        """What it wants to see of the journal, in the order of its requests."""
