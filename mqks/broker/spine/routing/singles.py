"""Messages that are published singly: with flags, by transactions and schedules.

The one rule: what raises has published nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple

from mqks.broker.spine.base.turns import WAITS, Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.seams import UniqueClaim
from mqks.broker.spine.queue.terms import NewMessages, PublishTerms
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.publishing import Publishing, is_nowhere
from mqks.errors import BadRequest, ReadOnly, Unwritable
from mqks.protocol import replies
from mqks.protocol.requests import Publish, shown


class Single(NamedTuple):
    """A message that is published singly."""

    id: bytes
    event: bytes
    body: bytes
    terms: PublishTerms | None
    once_s: float
    """Publish it only if its user has not published this id with `--once` before."""

    @property
    def new(self) -> NewMessages:
        return NewMessages([self.id], [self.body], self.terms)

    @property
    def claim(self) -> UniqueClaim | None:
        return None if self.terms is None else self.terms.claim


Now = tuple[int, int]
"""The wall clock and the monotonic clock, in microseconds."""


def now_of(publishing: Publishing) -> Now:
    return publishing.shared.schedule.wall_us(), publishing.shared.schedule.clock_us()


def single(
    publishing: Publishing, message_id: bytes, publish: Publish, now: Now | None = None
) -> Single:
    """The message in its stored form, with its terms, which begin `now`. Raises BadRequest if
    its batch does not exist."""
    if publish.batch and not batch_of(publishing, publish):
        raise BadRequest(f"publish: there is no batch {shown(publish.batch)}")
    terms, attributes = terms_of(publishing, publish, now)
    body = replies.body(message_id, publish.event, publish.data) + attributes
    return Single(message_id, publish.event, body, terms, publish.once_s)


def batch_of(publishing: Publishing, publish: Publish) -> int:
    """The number of its batch; 0: it has none, or that does not exist."""
    members = publishing.shared.pending.members
    return members.number(publish.batch) if members and publish.batch else 0


def terms_of(
    publishing: Publishing, publish: Publish, now: Now | None = None
) -> tuple[PublishTerms | None, bytes]:
    """The terms of a message, and the bytes after its text."""
    traits, meta, letter = publish.traits, publish.meta, publish.letter
    times = publish.delay_us or publish.at_us or publish.ttl_us
    if not (times or meta or traits or letter or publish.batch):
        return None, b""
    now_us, clock_us = now or now_of(publishing)
    due_us = now_us + publish.delay_us if publish.delay_us else publish.at_us
    if due_us <= now_us:
        due_us = 0
    # When it is due it gets a new number, whose time is not that of the publish.
    unique = None if letter else publish.unique
    published = b"%d" % now_us if due_us or (unique and unique.for_us) else b""
    if letter:
        meta, published = publishing.shared.features.restored_letter(meta, letter)
    expires_us = (due_us or now_us) + publish.ttl_us if publish.ttl_us else 0
    due_clock_us = clock_us + publish.delay_us if publish.delay_us else 0
    batch, claim = batch_of(publishing, publish), unique and UniqueClaim(unique)
    terms = PublishTerms(due_us, publish.at_us > 0, expires_us, due_clock_us, batch, claim)
    return terms, replies.Parts(b"", meta, published, traits).joined()


def check(
    publishing: Publishing,
    message: Single,
    queues: Queues,
    *,
    mandatory: bool,
    is_known: bool = False,
) -> None:
    """Raise if a message must not be published to these queues now; a known id is published
    to none."""
    if publishing.shared.read_only:
        raise ReadOnly
    unwritable = publishing.shared.pending.unwritable
    if unwritable:
        raise Unwritable(f"{unwritable}: publishes are refused until the journal is writable")
    if is_known:
        return
    # Whoever publishes learns the reason, but not whose queue it is.
    where, size = f"in a queue bound to {shown(message.event)}", len(message.body)
    is_new, claim = publishing.shared.features.unique.is_new, message.claim
    # Several of them may have a limit together: each leaves so much less to the next one.
    # Nobody waits for a queue while another one refuses.
    tight = sorted(publishing.tight(queues), key=lambda queue: queue.capacity.waits)
    checked = list[Queue]()
    try:
        for queue in tight:
            if claim is None or queue.rules.publishes_paused or is_new(queue, claim):
                queue.capacity.check(size, where)
            if len(tight) > 1:
                queue.capacity.reserve(1, size)
                checked.append(queue)
    finally:
        for queue in checked:
            queue.capacity.reserve(-1, -size)
    if mandatory and is_nowhere(queues):
        raise BadRequest(f"publish: no queue is bound to {shown(message.event)}")


def publish(
    publishing: Publishing, connection: Connection, message: Single, queues: Queues
) -> None:
    new = _take(publishing, connection, message, queues)
    if new is not None:
        publishing.once.gather(new)
        publishing.put(queues, message.new, connection.works)


def publish_to(
    publishing: Publishing, connection: Connection, message: Single, queues: Queues
) -> None:
    """Publish in any turn, at once for each of a few queues: nothing is left to the end of a
    chunk, which may be another connection's."""
    new = _take(publishing, connection, message, queues)
    if new is not None:
        publishing.put(queues, message.new)
        publishing.once.write(new)


def publish_later(
    publishing: Publishing, connection: Connection, message: Single, queues: Queues
) -> Work[None]:
    """Like `publish`, in turns."""
    new = _take(publishing, connection, message, queues)
    if new is not None:
        publishing.once.hold(new)
        yield from publishing.put_in_turns(queues, message.new)
        publishing.once.release(new)


def _take(
    publishing: Publishing, connection: Connection, message: Single, queues: Queues
) -> list[bytes] | None:
    """What is to be written of the id of a message, if anything; None if it is known, and the
    message dropped. The id of a message that no queue gets may come again."""
    publishing.publisher = connection
    if not message.once_s:
        return []
    if next(takers(publishing, message, queues), None) is None:
        return None if publishing.once.knows(connection, message.id) else []
    return publishing.once.take(connection, message.id, message.once_s)


def find(publishing: Publishing, message: Single) -> Work[Queues]:
    """The queues of a message, when routing takes long, or after unfinished `--once` works."""
    while True:
        queues = yield from publishing.bindings.routes.find(message.event)
        if not (message.once_s and publishing.once.unfinished):
            return queues
        yield WAITS


def takers(publishing: Publishing, message: Single, queues: Queues) -> Iterator[Queue]:
    """Those of these queues that will have the message: of a unique one not all may."""
    takes, claim = publishing.shared.features.unique.takes, message.claim
    for queue in queues:
        if not queue.deleted and (claim is None or takes(queue, claim)):
            yield queue


def read_keys(publishing: Publishing, message: Single, queues: Queues) -> Work[None]:
    """Wait until it is known whether other messages have the key of a unique one."""
    if message.claim is not None:
        yield from publishing.shared.features.unique.read(queues)
