"""The settings of one queue.

The one rule: a policy is plain data. A field that is not set has its default and is not stored, so
a new field needs no migration.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from mqks.errors import BadRequest
from mqks.protocol.requests import POLICY_FIELDS, Backoff, DeleteRule, policy_value

SEEN: Final = {"is_sparse": bool, "has_priorities": bool, "has_unique": bool, "made_by": str}
"""Fields that say what the queue has seen, and their types."""


class UnknownField(ValueError):
    """A field that this version does not support."""


@dataclass(frozen=True, slots=True)
class Policy:
    delete_when_unused: DeleteRule | None = None
    """When the queue is deleted after it has lost its consumers; None: never."""
    retries: int | None = None
    """A message rejected this often is dead."""
    losses: int | None = None
    """A message whose consumer was lost this often while holding it is dead."""
    deliveries: int | None = None
    """A message delivered this often is dead when the last delivery ends without an ack."""
    backoff: Backoff | None = None
    """How long a message that was rejected, or lost again, waits before it is delivered again."""
    dead_letters: bytes | None = None
    """The queue that dead messages move to; None: they are dropped."""
    ttl_s: float | None = None
    """A message that has waited this long is dead."""
    messages_max: int | None = None
    bytes_max: int | None = None
    """Limits of ready and scheduled messages together."""
    overflow: str | None = None
    """`reject` or `drop`: what happens above these limits."""
    single_consumer: bool | None = None
    """Whether only one consumer gets messages: the first attached."""
    ack_timeout_s: float | None = None
    """A delivery that is not acked within this time returns to the queue."""
    ordered: str | None = None
    """`key`: messages of one key are delivered in order, to one consumer at a time."""
    fair: str | None = None
    """`key`: keys take turns."""
    paused: bool | None = None
    """Whether nothing is delivered."""
    publishes_paused: bool | str | None = None
    """Whether publishes are refused; `wait`: they wait."""
    paused_until_s: float | None = None
    """When both end, in seconds since 1970."""
    concurrency: int | None = None
    """So many messages are unacked or leased at the most."""
    rate: str | None = None
    """The most deliveries in a time, as `100/s`, and with a burst, as `100/s,20`."""
    concurrency_per_key: int | None = None
    rate_per_key: str | None = None
    """Both limits, for the messages of each key."""
    limit: str | None = None
    """The name of a limit that queues have in common, and its values, as
    `api,concurrency=5,rate=100/s,20`."""
    breaker: str | None = None
    """After how many rejects in a row one message is delivered in so many seconds, as `5,30`."""
    readers: bytes | None = None
    """Names with commas: the queue is trimmed only up to where the slowest of these is."""
    labels: bytes | None = None
    """Percent-encoded pairs, without a meaning to the broker."""

    @property
    def pause(self) -> str | None:
        """What is paused: `all`, `deliveries` or `publishes`; where publishes are not refused,
        `publishes wait` or `all, publishes wait`; None: nothing."""
        if self.paused and self.publishes_paused:
            return "all, publishes wait" if self.publishes_paused == "wait" else "all"
        if self.publishes_paused:
            return "publishes wait" if self.publishes_paused == "wait" else "publishes"
        return "deliveries" if self.paused else None

    @property
    def count_returns(self) -> bool:
        """Whether what becomes of a message that is returned depends on its counts."""
        limits = self.retries, self.losses, self.deliveries
        others = self.backoff, self.dead_letters, self.ordered
        return any(rule is not None for rule in (*limits, *others))

    @property
    def size_bytes(self) -> int:
        """Memory of what may be long."""
        return len(self.labels or b"")

    is_sparse: bool = False
    """Some of its messages were scheduled, expired or moved out of order: their numbers may be
    missing. Only the queue sets it, and it is never reset."""

    has_priorities: bool = False
    """Some of its messages had a priority. Only the queue sets it, and it is never reset."""

    made_by: str = ""
    """The name of the user who made the queue; empty: it was made without one. It is never
    reset."""
    has_unique: bool = False
    """Some of its messages were unique. Only the queue sets it, and resets it when a start finds
    none of them."""

    def encode(self) -> str:
        """A JSON object with the fields that are set."""
        fields = self.fields()
        if self.delete_when_unused is not None:
            fields["delete_when_unused"] = {"delay_s": self.delete_when_unused.delay_s}
        fields |= {name: value for name in SEEN if (value := getattr(self, name))}
        return json.dumps(fields)

    @classmethod
    def decode(cls, text: str) -> Self:
        """Decode the text of `encode`. Raises UnknownField for a field of a newer version,
        ValueError for anything else."""
        try:
            fields = json.loads(text)
            rule = fields.pop("delete_when_unused", None)
            seen = {name: fields.pop(name, kind()) for name, kind in SEEN.items()}
            if unknown := fields.keys() - FLAGS:
                raise UnknownField(", ".join(sorted(unknown)))
            if not all(isinstance(value, SEEN[name]) for name, value in seen.items()):
                raise ValueError(f"not a policy: {seen}")
            return cls(
                delete_when_unused=None if rule is None else DeleteRule(**rule),
                **seen,
                **{name: policy_value(FLAGS[name], value) for name, value in fields.items()},
            )
        except (AttributeError, TypeError, BadRequest) as error:
            raise ValueError(f"not a policy: {error}") from error

    def fields(self) -> dict[str, Any]:
        """The fields that set_queue has set, as JSON values."""
        return {name: self.told(name) for name in FLAGS if getattr(self, name) is not None}

    def told(self, name: str) -> Any:
        """A field as a JSON value."""
        value = getattr(self, name)
        if isinstance(value, Backoff):
            return [seconds for seconds in value if seconds is not None]
        return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else value

    def changed(self, changes: Mapping[str, Any], *, reset: bool) -> "Policy":
        """A policy with these changes; None clears a field, `reset` clears the others."""
        return replace(self, **{**(dict.fromkeys(FLAGS) if reset else {}), **changes})

    def over(self, defaults: "Policy") -> "Policy":
        """These fields, and for the others those of `defaults`."""
        if self is DEFAULT or defaults is DEFAULT:  # Many queues share them.
            return defaults if self is DEFAULT else self
        missing = {name: getattr(defaults, name) for name in FLAGS if getattr(self, name) is None}
        # Of queues that have nothing but a maker there are many, too.
        return defaults if len(missing) == len(FLAGS) else replace(self, **missing)


FLAGS = {field: flag for flag, field in POLICY_FIELDS.items()}
"""The fields that set_queue and settings may set, and their flags."""
DEFAULT = Policy()
