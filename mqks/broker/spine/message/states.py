"""The states of a message, and what leads from one to the other.

The one rule: what `AFTER` does not have does not happen. `queue.fates` holds returned and due
messages to it; for others the code is written so. The picture in docs/architecture.md is made of
it, by `python -m tools.states`.
"""

from enum import StrEnum
from typing import Final


class State(StrEnum):
    NONE = "[*]"
    """It does not exist, or no more."""
    READY = "ready"
    SCHEDULED = "scheduled"
    UNACKED = "unacked"
    DEAD = "dead"


class Event(StrEnum):
    """The values are the words of the protocol."""

    PUBLISH = "publish"
    PUBLISH_LATER = "publish --delay, --at"
    DUE = "due, promote"
    DELIVERY = "delivery"
    DELIVERY_ACKED = "delivery without manual ack"
    RECEIVE = "receive"
    ACK = "ack"
    REJECT = "reject"
    RELEASE = "release"
    LOSS = "loss"
    """Its consumer was lost, or did not ack it in time."""
    UNDELIVERED = "lease --undelivered"
    """Nobody has got the reply."""
    END = "end of the consumer, touch --for=0"
    DELAY = "reject --delay, release --delay"
    BACKOFF = "backoff"
    REJECTS = "rejects"
    LOSSES = "losses"
    DELIVERIES = "deliveries"
    TTL = "ttl"
    OVERFLOW = "overflow"
    KILL = "dead"
    """The consumer said so."""
    MOVE = "move, redrive"
    BURIAL = "to the dead-letter queue"
    """It is an ordinary message there: it may be delivered, and may die."""
    DROP = "dropped"
    PURGE = "purge, trim"
    CANCEL = "cancel, cancel_job"
    DELETION = "delete_queue"


REJECT: Final = Event.REJECT
KILL: Final = Event.KILL
"""Looking up a member takes long in Python 3.11."""

AFTER: Final = {
    (State.NONE, Event.PUBLISH): State.READY,
    (State.NONE, Event.PUBLISH_LATER): State.SCHEDULED,
    (State.SCHEDULED, Event.DUE): State.READY,
    (State.SCHEDULED, Event.DELIVERIES): State.DEAD,
    (State.SCHEDULED, Event.TTL): State.DEAD,
    (State.SCHEDULED, Event.ACK): State.NONE,
    (State.SCHEDULED, Event.CANCEL): State.NONE,
    (State.SCHEDULED, Event.DELETION): State.NONE,
    (State.READY, Event.DELIVERY): State.UNACKED,
    (State.READY, Event.DELIVERY_ACKED): State.NONE,
    (State.READY, Event.RECEIVE): State.SCHEDULED,
    (State.READY, Event.ACK): State.NONE,
    (State.READY, Event.MOVE): State.READY,
    (State.READY, Event.DELIVERIES): State.DEAD,
    (State.READY, Event.TTL): State.DEAD,
    (State.READY, Event.OVERFLOW): State.DEAD,
    (State.READY, Event.PURGE): State.NONE,
    (State.READY, Event.CANCEL): State.NONE,
    (State.READY, Event.DELETION): State.NONE,
    (State.UNACKED, Event.REJECT): State.READY,
    (State.UNACKED, Event.RELEASE): State.READY,
    (State.UNACKED, Event.UNDELIVERED): State.READY,
    (State.UNACKED, Event.LOSS): State.READY,
    (State.UNACKED, Event.END): State.READY,
    (State.UNACKED, Event.DELAY): State.SCHEDULED,
    (State.UNACKED, Event.BACKOFF): State.SCHEDULED,
    (State.UNACKED, Event.REJECTS): State.DEAD,
    (State.UNACKED, Event.LOSSES): State.DEAD,
    (State.UNACKED, Event.DELIVERIES): State.DEAD,
    (State.UNACKED, Event.KILL): State.DEAD,
    (State.UNACKED, Event.TTL): State.DEAD,
    (State.UNACKED, Event.ACK): State.NONE,
    (State.UNACKED, Event.DELETION): State.NONE,
    (State.DEAD, Event.BURIAL): State.READY,
    (State.DEAD, Event.DROP): State.NONE,
    (State.DEAD, Event.DELETION): State.NONE,
}
DEATHS: Final = frozenset(event for (_, event), state in AFTER.items() if state is State.DEAD)
"""The reasons of death."""
APPENDS: Final = frozenset(
    {Event.PUBLISH, Event.PUBLISH_LATER, Event.REJECT, Event.MOVE, Event.BURIAL}
)
"""After these it has a new number, at the tail."""
