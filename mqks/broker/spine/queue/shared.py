"""What the queues of one broker share, and a queue as they know each other.

The one rule: they get this and each other, never the broker. Fates, deaths, moves and times know a
queue only as a `Place`.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from mqks.broker.spine.base.budget import Budget
from mqks.broker.spine.base.facts import Facts
from mqks.broker.spine.base.notices import Notices
from mqks.broker.spine.base.schedule import Schedule
from mqks.broker.spine.base.turns import Turns, Work
from mqks.broker.spine.log.pending import Pending
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import DEFAULT, Policy
from mqks.broker.spine.message.states import Event
from mqks.broker.spine.queue.lane import Delivery, Lane
from mqks.broker.spine.queue.order import Order, Taker
from mqks.broker.spine.queue.seams import (
    AckHolder,
    AckTimers,
    Admission,
    Admissions,
    Throttle,
    Timers,
    Traced,
    Tracer,
    UniqueClaim,
)
from mqks.settings import Settings

REASONS: Final = ("rejects", "losses", "deliveries", "ttl", "overflow", "dead")
"""Why a message is dead."""


class Counters:
    """Since the start; `docs/protocol.md` describes them under stats."""

    def __init__(self) -> None:
        self.published = self.queued = self.unroutable = self.errors = 0
        self.delivered = self.redelivered = self.consumed = self.rejected = 0
        self.dead = dict.fromkeys(REASONS, 0)
        """By reason."""
        self.dropped = 0
        """Dead messages without a dead-letter queue."""
        self.duplicates = self.replaced = 0
        """By another message of their key: copies that were dropped, and messages whose place was
        taken."""


class ToldByArchive(NamedTuple):
    """What the archive of a queue has told since the start of the server."""

    seq: int
    """Everything below is archived."""
    told_s: float
    """When it told so last, by the broker's clock."""
    committed_s: float | None
    """When the number was higher than before; None if it was not yet."""


class Place(Protocol):
    """A `Queue`, as those see it who put messages into it or take them out, and the server, which
    reads its messages from disk. What it can do is told there."""

    id: int
    name: bytes
    ack_timeout_us: int | None
    capacity: Admission
    consumers: dict[Taker, None]
    dead: int
    deleted: bool
    is_dropping: bool
    is_ruled: bool
    lane: Lane
    order: Order
    policy: Policy
    returning: int
    rules: Policy
    shared: "Shared"
    show: Callable[[list[bytes]], None] | None
    throttle: Throttle | None
    times: Timers | None
    tracers: tuple[Tracer, ...]

    @property
    def ready(self) -> int: ...
    @property
    def unacked(self) -> int: ...
    @property
    def leased(self) -> int: ...
    @property
    def contents(self) -> tuple[int, int]: ...
    def set_order(self, order: Order) -> None: ...
    def update_capacity(self) -> None: ...
    def update_throttle(self) -> None: ...
    def keep(self, policy: Policy) -> None: ...
    def arrived_us(self, number: int) -> int: ...
    def timed(self) -> Timers: ...
    def untimed(self) -> None: ...
    def is_put_off(self, number: int) -> bool: ...
    def put_off(self, number: int, line: bytes, mark: Mark, due_us: int) -> None: ...
    def publish(self, ids: Sequence[bytes] | None, lines: list[bytes]) -> None: ...
    def fetch(self, numbers: list[int], then: Callable[[dict[int, bytes]], None]) -> None: ...
    def go_on(self) -> None: ...
    def deliver(self) -> None: ...


class Fetch(NamedTuple):
    """A request for living messages of a queue that are only on disk. `then` gets those that were
    found, by number; it is not called if the queue was deleted meanwhile."""

    queue: Place
    numbers: list[int]
    then: Callable[[dict[int, bytes]], None]


class Wanted:
    """What the server is to read from the journal for queues."""

    def __init__(self) -> None:
        self.pages: list[Place] = []
        """Queues that want their next page."""
        self.fetches: list[Fetch] = []


class Orders(Protocol):
    """Choose the order of a queue: another one than the `old` one, if that does not suit."""

    def by_rules(self, queue: Place, old: Order) -> Order:
        """Its rules have changed."""

    def by_messages(self, queue: Place, old: Order, lines: Iterable[bytes]) -> Order:
        """Messages with attributes will be ready."""

    def restored(self, queue: Place, old: Order) -> Order:
        """Its messages were restored, and are on disk."""


class Returns(Protocol):
    """What becomes of messages that come back."""

    def give_back(
        self,
        queue: Place,
        deliveries: Sequence[Delivery],
        event: Event,
        delay_us: int = 0,
        defaults: Policy = DEFAULT,
        why: bytes = b"",
    ) -> Event | None:
        """A consumer returns these. `defaults` apply where the queue has no rule; `why` is kept
        with those that die. Return the reason if any of them died."""

    def join(self, queue: Place, due: Sequence[Delivery], since_us: Sequence[int] = ()) -> None:
        """These scheduled messages are due, since these times of the monotonic clock; 0 is now."""

    def started(self, queue: Place) -> None:
        """The server has started: some may have been delivered too often."""


class Deaths(Protocol):
    """The end of messages that nobody acks."""

    def drop_surplus(self, queue: Place) -> Work[None]:
        """Kill messages above the limits."""


class UniqueRules(Protocol):
    """What becomes of a message whose key another one may hold."""

    def restored(self, queue: Place) -> None:
        """Its messages were restored, and are on disk."""

    def admit(self, queue: Place, claim: UniqueClaim, its_id: bytes, number: int) -> bool:
        """Whether a message gets this number, and its key; one whose place it takes is settled.
        Then the caller calls `placed`."""

    def placed(self, queue: Place, number: int) -> None:
        """It is in the queue, or was delivered without being stored."""

    def read(self, queues: Iterable[Place]) -> Work[None]:
        """Wait until it is known which keys the messages of these queues hold."""

    def takes(self, queue: Place, claim: UniqueClaim) -> bool:
        """Whether a message with this claim would be in the queue."""

    def is_new(self, queue: Place, claim: UniqueClaim) -> bool:
        """Whether there would be a message more in the queue."""


class Features(NamedTuple):
    """What hangs on the spine, which knows none of it by name. A new feature has a row in one of
    these, or one more of them."""

    orders: Orders
    returns: Returns
    deaths: Deaths
    restored_letter: Callable[[bytes, bytes], tuple[bytes, bytes]]
    """Attributes, and time of the first publishing, of what is published as a dead letter: its own
    attributes are the first argument."""
    capacity: Callable[[Place, int], Admission]
    throttle: Callable[[Place, Throttle | None], Throttle | None]
    """By the rules of a queue, in place of the old one."""
    timers: Callable[[Place], Timers]
    ack_timers: Callable[[Schedule, Turns, AckHolder], AckTimers]
    unique: UniqueRules


class Owner(Protocol):
    """The broker, as its queues see it."""

    notices: Notices
    withholds: bool
    """Nothing is delivered that the journal holds, since another broker may deliver it."""

    def dead_letter_queue(self, queue: Place, reason: str) -> Place | None:
        """Where messages of this queue go that die for this reason; it is created if needed."""

    def set_policy(self, queue: Place, policy: Policy) -> None: ...


class Shared:
    def __init__(
        self,
        settings: Settings,
        owner: Owner,
        features: Features,
        facts: Facts,
        *,
        clock: Callable[[], float],
        now_us: Callable[[], int],
    ) -> None:
        self.turns = Turns(clock)
        self.schedule = Schedule(clock, now_us, owner.notices)
        self.counters = Counters()
        self.facts = facts
        self.pending = Pending(settings.errors_kept_max, settings.audit_kept_max, now_us)
        self.memory = Budget(settings.memory_bytes // 2 + 1, self.turns)
        """For waiting messages: half of what they may take. The other half is left to what is on
        its way, and to the allocator."""
        self.outboxes = Budget(settings.unsent_bytes_max, self.turns)
        """For replies that were not taken, at most: the server looks now and then what was. Queues
        wait for it."""
        self.wanted = Wanted()
        self.capacities = Admissions(settings.queue_messages_max)
        self.limits: dict[str, Any] = {}
        """Limits that several queues have in common, by their names; the features make them."""
        self.tracers: list[Callable[[Traced], Tracer | None]] = []
        """Each gives the tracer that a queue has now, if any; the features add to them."""
        self.draining = False
        """Nothing is delivered, until the server stops or the drain ends."""
        self.read_only = settings.read_only
        """No message is added by a request."""
        self.owner = owner
        self.features = features
