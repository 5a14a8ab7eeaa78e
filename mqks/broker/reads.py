"""What a client wants to see of a queue as the journal holds it.

The one rule: looking settles nothing and delivers nothing, and shows only what is durable: a
number that a client has seen is never another message's.
"""

from typing import NamedTuple

from mqks.broker.selection import Chosen


class Read(NamedTuple):
    """A request for the messages of a queue with numbers from `first` up to `end`.

    `form` is how they are told: `peek` as lines, `scheduled` as well, those that are, `read` in
    columns, with their attributes if `has_meta`, `range` not at all, just where they begin and end;
    `at_us` asks for the first message that came then or later. If something is `chosen`, only that
    is told.
    """

    request_id: bytes
    form: str
    queue: bytes
    queue_id: int
    first: int = 1
    end: int | None = None
    limit: int = 1
    at_us: int | None = None
    has_meta: bool = False
    chosen: Chosen | None = None
