"""Where what is looked into comes from: the server that has a database, or the file without one.

Both tell the same rows, as `stats` names them; what a source cannot know is None.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol, Self
from urllib.parse import unquote

from mqks.client import requests
from mqks.inspection.text import time_text

LETTER: Final = ["reason", "queue", "tries", "published", "died"]
"""The attributes of a dead message that it was not published with, the last ones."""
Row = dict[str, Any]
Note = Callable[[str], object]
"""Is told what a reader of the rows should know beside them."""


class Source(Protocol):
    """A context. Names are text with surrogate escapes; raises InspectionFailed for a queue that is
    not there."""

    def totals(self) -> Row: ...
    def queues(self) -> Iterator[Row]: ...
    def queue(self, name: str) -> Row: ...
    def bindings(self, event: str | None) -> Iterator[Row]: ...
    def consumers(self) -> Iterator[Row]: ...
    def connections(self) -> Iterator[Row]: ...
    def unacked(self, queue: str | None) -> Iterator[Row]: ...
    def journal(self) -> Row: ...
    def messages(self, queue: str, after: int) -> Iterator[Row]:
        """Rows of `message_row`: all there are, as they are taken, the scheduled ones, too."""

    def scheduled(self, queue: str, after: int) -> Iterator[Row]:
        """The scheduled ones alone."""

    def __enter__(self) -> Self: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...


def message_row(
    seq: int,
    time_us: int,
    id: bytes,
    event: bytes,
    data: bytes,
    retry: int,
    doubtful: bool = False,
    *,
    meta: bytes = b"",
    due_us: int = 0,
    expires_us: int | None = None,
    rejects: int | None = None,
    losses: int | None = None,
) -> Row:
    """`data` are bytes. None is what the source does not know; times are None where there is
    none. `letter` tells of a dead message why it died, and `meta` its own attributes."""
    own, letter = letter_of(meta)
    return {
        "seq": seq,
        "time": time_text(time_us),
        "id": requests.decoded(id),
        "event": requests.decoded(event),
        "data": data,
        "retry": retry,
        "doubtful": doubtful,
        "meta": own,
        "due": time_text(due_us) if due_us else None,
        "expires": time_text(expires_us) if expires_us else None,
        "rejects": rejects,
        "losses": losses,
        "letter": letter,
    }


def letter_of(meta: bytes) -> tuple[str, Row | None]:
    """The attributes that a message was published with, and what the broker has added to those of
    a dead one."""
    pairs = meta.decode("ascii", "backslashreplace").split("&")
    added = [pair.partition("=") for pair in pairs[-len(LETTER) :]]
    if [name for name, _, _ in added] != LETTER:
        return "&".join(pairs), None
    letter: Row = {name: unquote(value, errors="surrogateescape") for name, _, value in added}
    letter["tries"] = int(letter["tries"])
    for name in ("published", "died"):
        letter[name] = time_text(round(float(letter[name]) * 1e6))
    return "&".join(pairs[: -len(LETTER)]), letter


def error_row(row: Row) -> Row:
    """Of a file or a server, as it is told."""
    told = {
        name: requests.decoded(value) if isinstance(value, bytes) else value
        for name, value in row.items()
    }
    del told["time_us"]
    return {"id": row["id"], "time": time_text(row["time_us"])} | told
