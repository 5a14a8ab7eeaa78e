"""The source of inspected data: the server that uses a database, or the file if there is none.

Both have the same methods, and return the same rows, with the names of `stats`; values that a
source does not know are None. Names are text with surrogate escapes. A queue that does not exist
raises InspectionFailed.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from mqks.client import requests
from mqks.client.messages import DeadLetter, attributes, key_of, original
from mqks.inspection.text import time_text
from mqks.protocol.meta import cause, split_dead_letter
from mqks.protocol.replies import NO_TRAITS, read_traits

Row = dict[str, Any]
Note = Callable[[str], object]
"""Called with notes about the rows for the user."""


class WantedRows(NamedTuple):
    """Which messages of a queue."""

    after: int = 0
    limit: int | None = None
    """At most this number, the first ones."""
    scheduled: bool | None = None
    """Only scheduled ones, only others, or both."""
    selection: Mapping[str, Any] = MappingProxyType({})
    """Those that a selection of the client selects, see `SelectionKeywords`."""
    soonest: bool = False
    """Scheduled ones by the time when they are due; `after` and `selection` do not count."""
    batches: bool = False
    """With the batch of each, which a database always tells."""


EVERY: Final = WantedRows()


def message_row(
    *,
    seq: int,
    time_us: int,
    id: bytes,
    event: bytes,
    data: bytes,
    retry: int,
    meta: bytes,
    due_us: int,
    traits: bytes,
    doubtful: bool = False,
    expires_us: int | None = None,
    rejects: int | None = None,
    losses: int | None = None,
    batch: bytes = b"",
    **_: object,
) -> Row:
    """Of the fields of a message as it is stored, or told by `peek`. The row has the original
    data. Values that the source does not know are None, and so are missing times. `dead_letter`
    says why a dead message died; `meta` has its own attributes."""
    own, dead_letter = _split(meta) if meta else ("", None)
    told, key = (read_traits(traits), key_of(traits)) if traits else (NO_TRAITS, None)
    return {
        "seq": seq,
        "time": time_text(time_us),
        "id": requests.decoded(id),
        "event": requests.decoded(event),
        "data": original(traits, data) if traits else data,
        "retry": retry,
        "doubtful": doubtful,
        "meta": own,
        "due": time_text(due_us) if due_us else None,
        "expires": time_text(expires_us) if expires_us else None,
        "rejects": rejects,
        "losses": losses,
        "dead_letter": dead_letter,
        "letter": dead_letter,  # Its name up to 0.2.
        "escaped": told.escaped,
        "priority": told.priority,
        "key": key,
        "unique": requests.decoded(told.unique) or None,
        "batch": requests.decoded(batch) or None,
    }


def _split(meta: bytes) -> tuple[str, Row | None]:
    """The attributes that a message was published with, and those that the broker has added if it
    is a dead letter."""
    told = attributes(meta)[1]
    text = split_dead_letter(meta)[0].decode("ascii", "backslashreplace")
    return text, told and dead_letter_row(told)


def dead_letter_row(told: DeadLetter) -> Row:
    """With its times as text."""
    times = {key: time_text(round(getattr(told, key) * 1e6)) for key in ("published", "died")}
    return told._asdict() | times


STEP = ("step", "time_us", "what", "queue", "seq")
"""What each step of a message has; there may be more."""


def told_of(step: Row) -> str:
    """What else a step tells, as `key=value`, without what is unknown."""
    some = {key: value for key, value in step.items() if key not in STEP and value is not None}
    if until_us := some.pop("until_us", None):
        some["until"] = time_text(until_us)
    return " ".join(f"{key}={value}" for key, value in some.items())


def group_of(dead_letter: Row) -> tuple[str, str, str]:
    """What dead letters with the same cause have in common: the queue, the reason, and what the
    consumer said, see `cause`."""
    why = requests.decoded(cause(requests.encoded(dead_letter["why"] or "")))
    return dead_letter["queue"], dead_letter["reason"], why


def error_row(row: Row) -> Row:
    """An error record of a file or a server, with its time as text."""
    told = {
        name: requests.decoded(value) if isinstance(value, bytes) else value
        for name, value in row.items()
    }
    return timed(told)


def timed(row: Row) -> Row:
    """With its time as text."""
    told = {name: value for name, value in row.items() if name != "time_us"}
    return {"id": row["id"], "time": time_text(row["time_us"])} | told
