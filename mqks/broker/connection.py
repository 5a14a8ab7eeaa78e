"""One client as the broker sees it: where its lines come from and where its replies gather.

The one rule: nothing here sends. The server takes the outbox once a turn, as one joined write.
"""

from collections import deque
from hashlib import blake2b
from typing import TYPE_CHECKING

from mqks.broker.evaluate.expression import Budget
from mqks.broker.reads import Read
from mqks.broker.turns import Work
from mqks.limits import ONCE_ID_BYTES_MAX, STRANGER_LINE_BYTES_MAX
from mqks.protocol.lines import LineSplitter
from mqks.users import STRANGER, Permissions

if TYPE_CHECKING:
    from mqks.broker.consumer import Consumer


class Connection:
    """State of one connection.

    `blocked` says that the peer takes its replies too slowly: its consumers get nothing until the
    server has got rid of what is waiting.
    """

    __slots__ = (
        "address",
        "auth_failures",
        "blocked",
        "closed",
        "consumers",
        "eval_budget",
        "expelled",
        "id",
        "kept",
        "local",
        "outbox",
        "outbox_bytes",
        "overrun",
        "permissions",
        "reads",
        "splitter",
        "stranger_errors",
        "stranger_lines",
        "touched",
        "unconfirmed",
        "user",
        "works",
    )

    def __init__(
        self,
        connection_id: int,
        address: str,
        local: bool,
        line_bytes_max: int,
        *,
        stranger: bool = False,
    ) -> None:
        self.id = connection_id
        self.address = address
        self.local = local
        """Whether the peer is on this machine."""
        self.splitter = LineSplitter(
            min(line_bytes_max, STRANGER_LINE_BYTES_MAX) if stranger else line_bytes_max
        )
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
        self.user: str | None = None
        self.permissions: Permissions | None = STRANGER if stranger else None
        """None: it may do everything."""
        self.works: deque[Work[None]] = deque()
        """What its lines have begun and the turn did not finish: the next lines wait for it."""
        self.kept: list[bytes] | None = None
        """While there is a list, lines are not handled but kept in it: they wait for the outcome
        of `auth`, for the next turn, or nobody needs them any more."""
        self.overrun = False
        """Its lines took their time: those that are kept are due in its next turn."""
        self.expelled = False
        """It must be closed, and has been told why."""
        self.auth_failures = self.stranger_errors = self.stranger_lines = 0

    @property
    def awaits_login(self) -> bool:
        return self.kept is not None and not self.overrun

    def once_id(self, message_id: bytes) -> bytes:
        """What is remembered of a message published once. Each user has ids of its own: nobody can
        use up another's. A long one is remembered by its hash: a million may be kept."""
        once_id = message_id if self.user is None else self.user.encode() + b" " + message_id
        if len(once_id) > ONCE_ID_BYTES_MAX:
            return blake2b(once_id, digest_size=32).hexdigest().encode()
        return once_id
