"""One connection as the broker sees it: what it has sent, who is served there, and what it may do.

The one rule: while its lines wait, for a login or for the next turn, they stay in order.
"""

from collections import deque
from collections.abc import Callable, Hashable
from hashlib import blake2b
from typing import Any, Protocol

from mqks.audit import Who
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.consumer import Consumer
from mqks.broker.spine.clients.outbox import Flow, Outbox, Slow
from mqks.broker.spine.clients.transaction import Transaction
from mqks.broker.spine.log.pending import ErrorRecord
from mqks.broker.spine.queue.order import Taker
from mqks.broker.spine.queue.selection import Read
from mqks.errors import BadRequest
from mqks.limits import ONCE_ID_BYTES_MAX, STRANGER_LINE_BYTES_MAX
from mqks.protocol.lines import PIECE_OVERHEAD_BYTES, LineSplitter
from mqks.rates import UserRate
from mqks.users import STRANGER, GuestPermissions, Permissions


class Steps(Protocol):
    """What expressions may still take."""

    def spend(self, steps: int) -> None:
        """Raises BadRequest if that is more than there is left."""


class Connection(Outbox):
    """State of one connection. `on_go_on` is called when it no longer rests, `on_failure` to reply
    to a request with an error."""

    __slots__ = (
        *("auth_failures", "awaits_login", "awaits_resume", "can_wait", "chunks", "consumers"),
        *("eval_steps", "expelled"),
        *("first_error", "handled", "is_guest", "last_error_us", "lines", "local", "on_failure"),
        *(
            "on_go_on",
            "overrun",
            "permissions",
            "rate",
            "reads",
            "receivers",
            "split_bytes",
            "splitter",
        ),
        *("stranger_errors", "stranger_lines", "transaction", "user"),
        *("waiting_bytes", "works"),
    )

    def __init__(
        self,
        flow: Flow,
        on_go_on: "Callable[[Connection], None]",
        on_failure: "Callable[[Connection, bytes, bytes, BadRequest], None]",
        connection_id: int,
        address: str,
        local: bool,
        line_bytes_max: int,
        *,
        source: bytes = b"",
        stranger: bool = False,
        guest: bool = False,
    ) -> None:
        super().__init__(flow, connection_id, address, source)
        self.on_go_on = on_go_on
        self.on_failure = on_failure
        self.local = local
        """Whether the peer is on this machine."""
        self.splitter = LineSplitter(
            min(line_bytes_max, STRANGER_LINE_BYTES_MAX) if stranger else line_bytes_max
        )
        self.eval_steps: Steps | None = None
        """Steps that expressions of the current chunk may still take."""
        self.consumers: dict[bytes, Consumer] = {}
        self.reads: deque[Read] = deque()
        """Its read requests, in order."""
        self.receivers: dict[Taker, None] = {}
        """Its receives without an answer."""
        self.user: str | None = None
        self.is_guest = guest
        """It was let in while the server drains, to operate it."""
        may_all = GuestPermissions(None) if guest else None
        self.permissions: Permissions | None = STRANGER if stranger else may_all
        """None: it may do everything."""
        self.rate: UserRate | None = None
        """How much its user may send."""
        self.works: deque[Work[None]] = deque()
        """Unfinished work of its lines: the next lines wait for it."""
        self.lines: list[bytes] = []
        """Those of the current chunk, of which `handled` are done. A line with a tab has a space
        before it."""
        self.handled = 0
        self.split_bytes = 0
        """Their size."""
        self.transaction: Transaction | None = None
        """Between `begin` and `commit` or `rollback`."""
        self.chunks: list[bytes] = []
        """What has come in since, not split yet: after a login a line may be longer."""
        self.awaits_login = False
        """Its lines wait for the result of `auth`."""
        self.can_wait = True
        """Its publishes may wait for the end of a pause: it is not shared, and has not ended."""
        self.awaits_resume: dict[Any, Callable[[], None]] | None = None
        """With whom its first work waits for that, see `PublishesWait`."""
        self.waiting_bytes = 0
        """Memory of that work."""
        self.overrun = False
        """Its turn is over: its lines wait for its next turn."""
        self.expelled = False
        """It must be closed; the error reply is written."""
        self.first_error: ErrorRecord | None = None
        """The first error of a burst, which has its cause: the burst may evict it from the last
        errors that the server keeps."""
        self.last_error_us = 0
        self.auth_failures = self.stranger_errors = self.stranger_lines = 0

    def _go_on(self) -> None:
        self.on_go_on(self)

    def rest(self, why: int) -> None:
        super().rest(why)
        if why & Slow.END:
            self.look_again()

    def look_again(self) -> None:
        """Whether it may wait for the end of a pause has changed."""
        if self.awaits_resume and (go_on := self.awaits_resume.pop(self, None)):
            go_on()

    def fail(self, request_id: bytes, action: bytes, failure: BadRequest) -> None:
        self.on_failure(self, request_id, action, failure)

    @property
    def who(self) -> Who:
        return Who(self.address, self.user, self.name)

    @property
    def party(self) -> Hashable:
        """Its user; without one, its address."""
        return self.user or self.source

    @property
    def waits(self) -> bool:
        """Whether its lines wait, or are no longer needed."""
        return self.overrun or self.awaits_login or self.expelled

    @property
    def left_bytes(self) -> int:
        """Memory of what has come in and is not handled."""
        size = self.waiting_bytes + self.splitter.tail_memory + sum(map(len, self.chunks))
        if self.lines:
            size += self.split_bytes + PIECE_OVERHEAD_BYTES * len(self.lines)
        return size

    def once_id(self, message_id: bytes) -> bytes:
        """The stored form of an id published with `--once`. Users have separate ids, so that nobody
        can use up another user's. Long ids are stored as a hash: there may be a million."""
        once_id = message_id if self.user is None else self.user.encode() + b" " + message_id
        if len(once_id) > ONCE_ID_BYTES_MAX:
            return blake2b(once_id, digest_size=32).hexdigest().encode()
        return once_id
