"""Where what is looked into comes from: the server that has a database, or the file without one.

Both tell the same rows, as `stats` names them; what a source cannot know is None.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from mqks.client import requests
from mqks.inspection.text import time_text

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
        """seq, time, id, event, data (bytes), retry, doubtful: all there are, as they are taken."""

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
) -> Row:
    return {
        "seq": seq,
        "time": time_text(time_us),
        "id": requests.decoded(id),
        "event": requests.decoded(event),
        "data": data,
        "retry": retry,
        "doubtful": doubtful,
    }


def error_row(row: Row) -> Row:
    """Of a file or a server, as it is told."""
    told = {
        name: requests.decoded(value) if isinstance(value, bytes) else value
        for name, value in row.items()
    }
    del told["time_us"]
    return {"id": row["id"], "time": time_text(row["time_us"])} | told
