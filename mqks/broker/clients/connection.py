"""One connection as the broker sees it: the source of its lines, and the outbox for its replies.

The one rule: nothing here sends. The server takes the outbox once a turn, as one joined write.
"""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from mqks.broker.base.resting import Resting
from mqks.broker.base.turns import Work
from mqks.broker.evaluate.expression import Allowance
from mqks.broker.queue.reads import Read
from mqks.broker.shared import Shared
from mqks.limits import ONCE_ID_BYTES_MAX, STRANGER_LINE_BYTES_MAX
from mqks.protocol.lines import LineSplitter
from mqks.users import STRANGER, Permissions

if TYPE_CHECKING:
    from mqks.broker.clients.consumer import Consumer
    from mqks.broker.clients.tails import Tail
    from mqks.broker.log.pending import ErrorRecord


class Slow:
    """Why a connection's consumers get nothing."""

    OUTBOX: Final = 1
    """More was written to its outbox in this turn than the high-water mark."""
    PEER: Final = 2
    """The client reads its replies too slowly."""
    END: Final = 4
    """It has disconnected, or the server stops."""


class Connection(Resting):
    """State of one connection. While it rests, its consumers get nothing and its reads wait;
    `on_go_on` is called when it no longer rests."""

    __slots__ = (
        "address",
        "auth_failures",
        "awaits_login",
        "chunks",
        "closed",
        "consumers",
        "eval_steps",
        "expelled",
        "first_error",
        "handled",
        "id",
        "last_error_us",
        "lines",
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
        "tails",
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
        """Steps that expressions of the current chunk may still take."""
        self.unconfirmed = 0
        """Confirms that wait for a commit."""
        self.consumers: dict[bytes, Consumer] = {}
        self.tails: dict[bytes, Tail] = {}
        self.reads: deque[Read] = deque()
        """Its read requests, in order."""
        self.name: str | None = None
        """The name that the client has set, with surrogate escapes."""
        self.user: str | None = None
        self.permissions: Permissions | None = STRANGER if stranger else None
        """None: it may do everything."""
        self.works: deque[Work[None]] = deque()
        """Unfinished work of its lines: the next lines wait for it."""
        self.lines: list[bytes] = []
        """Those of the current chunk, of which `handled` are done. A line with a tab has a space
        before it."""
        self.handled = 0
        self.chunks: list[bytes] = []
        """What has come in since, not split yet: after a login a line may be longer."""
        self.awaits_login = False
        """Its lines wait for the result of `auth`."""
        self.overrun = False
        """Its turn is over: its lines wait for its next turn."""
        self.expelled = False
        """It must be closed; the error reply is written."""
        self.first_error: ErrorRecord | None = None
        """The first error of a burst, which has its cause: the burst may evict it from the last
        errors that the server keeps."""
        self.last_error_us = 0
        self.auth_failures = self.stranger_errors = self.stranger_lines = 0

    def _stop(self) -> None:
        """Nothing to do: its consumers rest when it is their turn."""

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
    def waits(self) -> bool:
        """Whether its lines wait, or are no longer needed."""
        return self.overrun or self.awaits_login or self.expelled

    def once_id(self, message_id: bytes) -> bytes:
        """The stored form of an id published with `--once`. Users have separate ids, so that nobody
        can use up another user's. Long ids are stored as a hash: there may be a million."""
        once_id = message_id if self.user is None else self.user.encode() + b" " + message_id
        if len(once_id) > ONCE_ID_BYTES_MAX:
            return blake2b(once_id, digest_size=32).hexdigest().encode()
        return once_id
