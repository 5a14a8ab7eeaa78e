"""What is written to one connection: by its requests, its consumers and its tails.

The one rule: nothing here sends. The server takes the outbox once a turn, as one joined write.
"""

from collections.abc import Callable, Hashable
from typing import Final

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.resting import Resting
from mqks.broker.spine.base.turns import Turns
from mqks.errors import BadRequest
from mqks.limits import PIECE_BYTES_MAX
from mqks.settings import Settings


class Slow:
    """Why a connection's consumers get nothing."""

    OUTBOX: Final = 1
    """More was written to its outbox in this turn than the high-water mark."""
    PEER: Final = 2
    """The client reads its replies too slowly."""
    END: Final = 4
    """It has disconnected, or the server stops."""
    RECEIVES: Final = 8
    """Its receives have taken more than the high-water mark, and wait for the commit."""


class Flow:
    """What the connections of one broker share: how much they may be sent, and which have something
    to be sent. `outboxes` is for replies that were not taken."""

    def __init__(
        self,
        settings: Settings,
        turns: Turns,
        outboxes: Budget,
        on_unacked_wait: Callable[[], None],
    ) -> None:
        self.outboxes = outboxes
        self.unacked = Budget(settings.unacked_bytes_max, turns, on_unacked_wait)
        """For what consumers hold. Consumers wait for it."""
        self.kept_bytes = 0
        """Memory of the requests that wait for a `commit`, approximately."""
        self.unhandled_bytes = 0
        """Memory of what has come in and is not handled, as the server counts it."""
        self.piece_bytes = PIECE_BYTES_MAX
        """What is split at once, so that little is in lines that wait. The server sets it."""
        self.promised_bytes = 0
        """Of what receives have taken, which is told after the commit. It is in `outboxes`."""
        self.receivers = 0
        """Number of receives without an answer."""
        self.high_water_bytes = settings.delivery_pause_bytes
        self.touched: list[Outbox] = []
        """Those to be flushed by the server."""


class Outbox(Resting):
    """While it rests, the consumers of its connection get nothing and its reads wait."""

    __slots__ = (
        *("address", "closed", "flow", "id", "name", "outbox"),
        *("outbox_bytes", "promised_bytes", "source", "touched", "unconfirmed"),
    )

    def __init__(self, flow: Flow, connection_id: int, address: str, source: bytes) -> None:
        super().__init__()
        self.flow = flow
        self.id = connection_id
        self.address = address
        self.source = source
        """What counts as one address; empty if nothing does."""
        self.name: str | None = None
        """The name that the client has set, with surrogate escapes."""
        self.outbox: list[bytes] = []
        self.outbox_bytes = 0
        self.promised_bytes = 0
        self.touched = False
        self.closed = False
        self.unconfirmed = 0
        """Confirms that wait for a commit."""

    @property
    def party(self) -> Hashable:
        """Who takes turns with others, whatever number of connections it has."""
        return self.source

    def _stop(self) -> None:
        """Nothing to do: its consumers rest when it is their turn."""

    def write(self, data: bytes) -> None:
        """Put bytes into the outbox."""
        flow = self.flow
        if not self.touched:
            self.touched = True
            flow.touched.append(self)
        self.outbox.append(data)
        size = len(data)
        self.outbox_bytes += size
        outboxes = flow.outboxes
        outboxes.used += size
        if (
            self.outbox_bytes > flow.high_water_bytes or outboxes.used > outboxes.limit // 2
        ) and not self.rests & Slow.OUTBOX:
            self.rest(Slow.OUTBOX)

    def promise(self, size: int) -> None:
        """Replies of this size are written after the commit; less than 0: they are written now."""
        self.promised_bytes += size
        self.flow.promised_bytes += size
        outboxes = self.flow.outboxes
        outboxes.set(outboxes.used + size)
        if self.promised_bytes > self.flow.high_water_bytes:
            self.rest(Slow.RECEIVES)
        elif not self.promised_bytes:
            self.resume(Slow.RECEIVES)

    def fail(self, request_id: bytes, action: bytes, failure: BadRequest) -> None:
        """Reply to a request with an error."""
        raise NotImplementedError
