"""One client as the broker sees it: where its lines come from and where its replies gather.

The one rule: nothing here sends. The server takes the outbox once a turn, as one joined write.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from mqks.broker.evaluate.expression import Allowance
from mqks.broker.reads import Read
from mqks.broker.resting import Resting
from mqks.broker.shared import Shared
from mqks.broker.turns import Work
from mqks.limits import ONCE_ID_BYTES_MAX, STRANGER_LINE_BYTES_MAX
from mqks.protocol.lines import LineSplitter
from mqks.users import STRANGER, Permissions

if TYPE_CHECKING:
    from mqks.broker.consumer import Consumer
    from mqks.broker.pending import ErrorRecord


class Slow:
    """Why a connection's consumers get nothing."""

    OUTBOX: Final = 1
    """More has been written to it in this turn than it should have."""
    PEER: Final = 2
    """The peer takes its replies too slowly."""
    END: Final = 4
    """It has gone, or the server stops."""


class Connection(Resting):
    """State of one connection. While it rests, its consumers get nothing and its reads wait;
    `on_go_on` is called when it does no longer."""

    __slots__ = (
        "address",
        "auth_failures",
        "closed",
        "consumers",
        "eval_steps",
        "expelled",
        "first_error",
        "id",
        "kept",
        "last_error_us",
        "local",
        "name",
        "on_go_on",
        "outbox",
        "outbox_bytes",
        "overrun",
        "permissions",
        "reads",
        "shared",
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
        shared: Shared,
        on_go_on: "Callable[[Connection], None]",
        connection_id: int,
        address: str,
        local: bool,
        line_bytes_max: int,
        *,
        stranger: bool = False,
    ) -> None:
        super().__init__()
        self.shared = shared
        self.on_go_on = on_go_on
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
        self.closed = False
        self.eval_steps: Allowance | None = None
        """Steps that expressions of the chunk in hand may still take."""
        self.unconfirmed = 0
        """Confirms that wait for a commit."""
        self.consumers: dict[bytes, Consumer] = {}
        self.reads: deque[Read] = deque()
        """What it wants to see of the journal, in the order of its requests."""
        self.name: str | None = None
        """What the client calls itself, with surrogate escapes."""
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
        self.first_error: ErrorRecord | None = None
        """The first one of a burst, which names its cause: the burst itself may drive it out of the
        last errors that the server keeps."""
        self.last_error_us = 0
        self.auth_failures = self.stranger_errors = self.stranger_lines = 0

    def _stop(self) -> None:
        """Its consumers rest when it is their turn."""

    def _go_on(self) -> None:
        self.on_go_on(self)

    def write(self, data: bytes) -> None:
        """Put bytes into the outbox."""
        shared = self.shared
        if not self.touched:
            self.touched = True
            shared.touched.append(self)
        self.outbox.append(data)
        size = len(data)
        self.outbox_bytes += size
        outboxes = shared.outboxes
        outboxes.used += size
        if (
            self.outbox_bytes > shared.high_water_bytes or outboxes.used > outboxes.limit // 2
        ) and not self.rests & Slow.OUTBOX:
            self.rest(Slow.OUTBOX)

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
