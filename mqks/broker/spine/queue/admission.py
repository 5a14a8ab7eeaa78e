"""What may join a queue, as the spine sees it.

The one rule: the spine asks for a batch, and knows no limit by name.
"""

from typing import NamedTuple, Protocol

from mqks.broker.spine.message.policy import Policy


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

    def apply(self, rules: Policy) -> None:
        """Apply the limits of these rules; then call `update`."""

    def reserve(self, count: int, size: int) -> None:
        """Count messages on their way here, of `size` bytes together; negative when they arrive."""

    def has_room(self, count: int) -> bool:
        """Whether so many messages of any length may join."""

    def check(self, size: int, where: str) -> None:
        """Raise LimitExceeded if a message of this size may not join; `where` ends the reason."""

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

    __slots__ = "default_max", "tight"

    def __init__(self, default_max: int) -> None:
        self.default_max = default_max
        self.tight: dict[Held, None] = {}
        """Queues that the messages of one chunk may fill, see `Admission.is_tight`."""
