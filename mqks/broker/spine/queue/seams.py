"""What the spine asks of the features about time and about room, see "The seams" in
docs/architecture.md.

The one rule: it asks for a batch, and knows no feature by name. A queue has timers only while one
of its messages waits for a time, and a consumer only from its first ack timeout on.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Final, NamedTuple, Protocol

from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.message.mark import Mark
from mqks.broker.spine.message.policy import Policy
from mqks.broker.spine.message.states import Event
from mqks.protocol.requests import UniqueTerms


class Expiring(Protocol):
    """When ready messages expire. False: none can."""

    ttl_us: int | None

    def __bool__(self) -> bool: ...

    def add(self, number: int, expires_us: int, joined_us: int = 0) -> None:
        """Add a message that expires at a time of the wall clock, or too long after it joined."""

    def add_new(self, numbers: range, expires_us: int) -> None:
        """Add new messages that expire at a time of the wall clock."""

    def add_each(self, numbers: range, each_us: Sequence[int]) -> None:
        """Add new messages that expire at different times."""

    def discard(self, numbers: Iterable[int]) -> None:
        """Remove messages that are settled or have moved."""

    def own_us(self, number: int) -> int:
        """When it expires, by the wall clock; 0 if it has no time of its own."""

    def set_us(self, number: int, expires_us: int, joined_us: int) -> int:
        """By how much the wall clock was set since these times were noted."""

    def is_overdue(self, number: int, next_seq: int) -> bool:
        """Whether a message that a consumer held has expired meanwhile."""

    def set_ttl(self, ttl_us: int | None) -> bool:
        """Set the queue's TTL; return whether the caller must call `joined_at` for all messages."""

    def joined(self, first: int) -> None:
        """Messages from this number on join now."""

    def joined_at(self, first: int, wall_us: int) -> None:
        """Messages from this number on joined at a time of the wall clock."""

    def joined_us(self, number: int) -> int:
        """When it joined, by the wall clock; 0 if that is not known."""


class Contained(Sized, Protocol):
    def __contains__(self, number: int) -> bool: ...


class Delayed(Sized, Protocol):
    """Messages that are not ready before a time."""

    bytes: int

    @property
    def numbers(self) -> Contained: ...
    @property
    def placed(self) -> Contained:
        """Those of messages that will return to their old place."""


class Timers(Protocol):
    """Messages of one queue that wait for a time. They are left a second after the last one."""

    @property
    def expiry(self) -> Expiring: ...

    @property
    def delays(self) -> Delayed: ...

    def add(
        self, first: int, lines: Sequence[bytes], marks: Sequence[Mark], due_us: Sequence[int]
    ) -> None:
        """Add messages in memory that are due at these times; then the caller calls
        `set_alarms`."""

    def restore(self, number: int, mark: Mark) -> None:
        """Add a message that is on disk."""

    def restored(self, mean_bytes: float) -> None:
        """All scheduled messages are restored; `mean_bytes` is the approximate length of a line."""

    def committed(self, end: int, aside_end: int) -> Work[None]:
        """Numbers below `end` are on disk, and those of messages with a delay below `aside_end`."""

    def expires(self) -> bool:
        """Whether an expired message is still in the queue."""

    def set_alarms(self) -> None:
        """What waits, or what is ready, has changed."""

    def listed(self, after: int | None, limit: int) -> Work[list[tuple[int, int]]]:
        """Number and due time, by the wall clock, of the first messages above a number."""

    def tidy(self) -> Work[None]:
        """Forget what is left of messages that were taken out, if it is much."""

    def delete(self) -> Iterator[object]:
        """Forget all messages; yield what is to be freed."""


class AckHolder(Protocol):
    """The owner of deliveries that must be acked in time: a `Consumer`."""

    @property
    def unacked_count(self) -> int: ...
    def holds(self, message_id: bytes, number: int) -> bool: ...
    def too_late(self, late: list[tuple[bytes, int]]) -> None: ...


class AckTimers(Protocol):
    """When the deliveries of one consumer must be acked."""

    def add(self, delivered: list[tuple[bytes, int]], timeout_us: int | None) -> None:
        """Add deliveries that were just made, or touched. None: they are never due."""

    def touch_all(self, timeout_us: int) -> None:
        """Restart the timeout of all that were added."""

    def clear(self) -> None:
        """Forget them all."""


class HeldBack(NamedTuple):
    """Why ready messages are not delivered."""

    by: str
    """The limit, as `stats` names it."""
    until_us: int | None = None
    """When more may be delivered, in microseconds since 1970; None: that is not known."""


class Throttle:
    """How many messages may be delivered, whoever takes them. A queue has one only while its rules
    limit that, and asks once for a batch. Not a Protocol: few need to know all that happens."""

    __slots__ = ()

    def room(self) -> int:
        """So many may be delivered now. After 0 the queue delivers again when there may be more."""
        raise NotImplementedError

    def delivered(self, count: int) -> None:
        """So many were delivered."""

    def freed(self) -> None:
        """Consumers hold fewer messages."""

    def ended(self) -> None:
        """A delivery has ended: also after each change of what is leased."""

    @property
    def holds(self) -> HeldBack | None:
        """What holds messages back now."""
        raise NotImplementedError

    @property
    def tracers(self) -> "tuple[Tracer, ...]":
        """What of it learns what becomes of messages."""
        return ()


class Held(Protocol):
    """Whoever has limits: a queue."""

    @property
    def contents(self) -> tuple[int, int]:
        """Number and length of ready and scheduled messages."""


class Update(NamedTuple):
    warns: bool
    """It has become nearly full."""
    has_turned: bool
    """`Admission.refuses_all` has changed."""
    room: int
    """So many more messages may join before the next update."""


class Admission(Protocol):
    drops: bool
    """The oldest make room for those that are too many."""
    is_tight: bool
    """The messages of one chunk may be too many: each is checked before it gathers."""
    is_watched: bool
    """To `update` after each change, not only at a number of messages."""
    nearly_full: bool
    refuses_all: bool
    waits: bool
    """`check` raises PublishesWait instead of another error."""

    def apply(self, rules: Policy) -> None:
        """Apply the limits of these rules; then call `update`."""

    def reserve(self, count: int, size: int) -> None:
        """Count messages on their way here, of `size` bytes together; negative when they arrive."""

    def has_room(self, count: int) -> bool:
        """Whether so many messages of any length may join."""

    def check(self, size: int, where: str) -> None:
        """Raise LimitExceeded or QueuePaused if a message of this size may not join; `where` ends
        the reason."""

    def surplus(self, ready: int, ready_bytes: int) -> int:
        """Approximate number of ready messages to be dropped."""

    def update(self) -> Update:
        """What waits has changed."""

    @property
    def fullness(self) -> float | None:
        """Used part of its limits, from 0 to 1; None if it refuses nothing."""


class Admissions:
    """What those of all queues share. `default_max` is the number of messages that settings allow
    in each, 0 for any."""

    def __init__(self, default_max: int) -> None:
        self.default_max = default_max
        self.tight: dict[Held, None] = {}
        """Queues that the messages of one chunk may fill, see `Admission.is_tight`."""


class UniqueClaim:
    """The key that a publish wants in its queues, and what came of that."""

    __slots__ = ("duplicate", "is_placed", "replaced", "wanted")

    def __init__(self, wanted: UniqueTerms) -> None:
        self.wanted = wanted
        self.is_placed = False
        """A queue has got it."""
        self.duplicate = self.replaced = b""
        """The id of the first message that has kept it out of a queue, or whose place it has."""

    @property
    def told(self) -> bytes | None:
        """What its confirm tells."""
        if self.is_placed:
            return b"replaced " + self.replaced if self.replaced else None
        return b"duplicate " + self.duplicate if self.duplicate else None


class Keys(Protocol):
    """Which of its messages hold a key. A lane has them only while one may."""

    @property
    def is_known(self) -> bool:
        """False: those of a start are not read yet."""

    def joined(self, first: int, lines: Sequence[bytes]) -> None:
        """Messages have new numbers, from another queue or another place."""

    def returned(self, number: int, line: bytes) -> None:
        """A message is ready again in its old place."""

    def left(self, numbers: Sequence[int]) -> None:
        """Messages have left, or have new numbers next."""

    def __len__(self) -> int: ...

    def delete(self) -> Iterator[object]:
        """Forget all keys; yield them, see `turns.emptied`."""


Deliveries = Iterable[tuple[int, bytes]]
"""Numbers and messages."""
Told = Mapping[str, Any]
NOT_TOLD: Final[Told] = {}


class Traced(Protocol):
    """A queue, as its tracer sees it."""

    id: int
    name: bytes


class Tracer(Protocol):
    """Learns what becomes of messages. A queue has one only while something is traced, somebody
    waits for the end of one of its messages, or its throttle asks for that."""

    def note(self, queue: Traced, what: str, some: Deliveries, told: Told = NOT_TOLD) -> None:
        """This has happened to messages; a text may be empty if the queue does not need it."""

    def left(self, queue: Traced, what: str, numbers: Sequence[int], told: Told = NOT_TOLD) -> None:
        """It has happened to messages of which nobody has the text."""

    def returned(self, queue: Traced, event: Event, some: Deliveries, why: bytes) -> None:
        """A consumer has given back messages; `why` as in `Returns.give_back`."""

    def scheduled(self, queue: Traced, some: Deliveries, due_us: Iterable[int]) -> None:
        """Messages wait until these times of the wall clock."""

    def moved(
        self, source: Traced, to: Traced, some: Sequence[tuple[int, bytes]], first: int
    ) -> None:
        """Messages have left their places for the end of `to`, which may be the same queue: they
        will have numbers from `first` on."""

    def deleted(self, queue: Traced) -> None:
        """So are all its messages."""
