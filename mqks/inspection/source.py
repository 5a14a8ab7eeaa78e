"""The source of inspected data: the server that uses a database, or the file if there is none.

Both return the same rows, with the names of `stats`; values that a source does not know are None.
"""

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Protocol, Self

from mqks.client import requests
from mqks.client.messages import attributes, key_of, original
from mqks.inspection.text import time_text
from mqks.protocol.meta import cause, split_letter
from mqks.protocol.replies import read_traits

Row = dict[str, Any]
Note = Callable[[str], object]
"""Called with notes about the rows for the user."""


class Wanted(NamedTuple):
    """Which messages of a queue."""

    after: int = 0
    limit: int | None = None
    """At most this number, the first ones."""
    scheduled: bool | None = None
    """Only scheduled ones, only others, or both."""
    selection: Mapping[str, Any] = MappingProxyType({})
    """Those that a `Selection` of the client selects."""


EVERY: Final = Wanted()


class Source(Protocol):
    """A context. Names are text with surrogate escapes. Raises InspectionFailed for a queue that
    does not exist."""

    def totals(self) -> Row: ...
    def queues(self) -> Iterator[Row]: ...
    def queue(self, name: str) -> Row: ...
    def bindings(self, event: str | None) -> Iterator[Row]: ...
    def consumers(self) -> Iterator[Row]: ...
    def connections(self) -> Iterator[Row]: ...
    def unacked(self, queue: str | None) -> Iterator[Row]: ...
    def schedules(self) -> Iterator[Row]: ...
    def journal(self) -> Row: ...
    def messages(self, queue: str, wanted: Wanted = EVERY) -> Iterator[Row]:
        """Rows of `message_row`, read on demand."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


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
    **_: object,
) -> Row:
    """Of the fields of a message as it is stored, or told by `peek`. The row has the original
    data. Values that the source does not know are None, and so are missing times. `letter` says why
    a dead message died; `meta` has its own attributes."""
    own, letter = letter_of(meta)
    told = read_traits(traits)
    return {
        "seq": seq,
        "time": time_text(time_us),
        "id": requests.decoded(id),
        "event": requests.decoded(event),
        "data": original(traits, data),
        "retry": retry,
        "doubtful": doubtful,
        "meta": own,
        "due": time_text(due_us) if due_us else None,
        "expires": time_text(expires_us) if expires_us else None,
        "rejects": rejects,
        "losses": losses,
        "letter": letter,
        "escaped": told.escaped,
        "priority": told.priority,
        "key": key_of(traits),
    }


def letter_of(meta: bytes) -> tuple[str, Row | None]:
    """The attributes that a message was published with, and those that the broker has added if it
    is a dead letter."""
    text, letter = split_letter(meta)[0].decode("ascii", "backslashreplace"), attributes(meta)[1]
    if letter is None:
        return text, None
    times = {key: time_text(round(getattr(letter, key) * 1e6)) for key in ("published", "died")}
    return text, letter._asdict() | times


def group_of(letter: Row) -> tuple[str, str, str]:
    """What dead letters with the same cause have in common: the queue, the reason, and what the
    consumer said, see `cause`."""
    why = requests.decoded(cause(requests.encoded(letter["why"] or "")))
    return letter["queue"], letter["reason"], why


def error_row(row: Row) -> Row:
    """An error record of a file or a server, with its time as text."""
    told = {
        name: requests.decoded(value) if isinstance(value, bytes) else value
        for name, value in row.items()
    }
    del told["time_us"]
    return {"id": row["id"], "time": time_text(row["time_us"])} | told
