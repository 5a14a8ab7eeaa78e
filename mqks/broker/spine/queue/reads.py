"""Requests to read a queue from the journal, without consuming.

The one rule: a read settles and delivers nothing, and shows only durable messages: a number that a
client has seen never belongs to another message.
"""

from typing import NamedTuple

from mqks.broker.spine.queue.selection import Chosen


class Read(NamedTuple):
    """A request for the messages of a queue with numbers from `first` up to `end`.

    `form` is the form of the reply: `peek` lines; `scheduled` lines of scheduled messages; `read`
    columns, with attributes if `has_meta`; `range` only the first and last number, with `at_us` the
    first message that arrived then or later. If something is `chosen`, only that is in the reply.
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
