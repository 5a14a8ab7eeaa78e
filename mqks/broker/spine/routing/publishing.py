"""Publishes the messages of a chunk to the queues.

The one rule: each queue gets the messages of a connection in their order, and of those published
with `--once` only the first with an id.
"""

from collections import deque
from functools import lru_cache
from typing import Any, Final, NamedTuple, Protocol

from mqks.broker.spine.base.turns import WAITS, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.new_messages import NewMessages, PublishTerms
from mqks.broker.spine.queue.queue import Queue
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.gathering import NO_GROUP, Gathering, Group, is_nowhere
from mqks.broker.spine.routing.masks import Queues
from mqks.broker.spine.routing.once import KnownIds, Once
from mqks.errors import BadRequest, Unwritable
from mqks.limits import (
    COPIES_MAX,
    ESCAPED_STEP_BYTES,
    GROUPS_QUEUES,
    ROUTE_QUEUES,
    STEP_COPIES,
)
from mqks.protocol import replies
from mqks.protocol.escapes import is_escaped
from mqks.protocol.requests import ACTIONS, Publish, shown
from mqks.settings import Settings
from mqks.users import Permissions

_GATHERED: Final = b"--ttl=", b"--delay=", b"--at=", b"--mandatory "
"""Flags that many messages have with the same value, so that they share their terms."""
_TRAITS: Final = b"--escaped", b"--priority=", b"--key=", b"--meta="
"""Flags of single messages, which gather with those of their event that have none."""
_TRAITED: Final = PublishTerms()


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


Now = tuple[int, int]
"""The wall clock and the monotonic clock, in microseconds."""


class Watchers(Protocol):
    """Who is shown what is published."""

    of_events: tuple[Any, ...]
    """Those of all events."""

    def show(self, tails: tuple[Any, ...], lines: list[bytes]) -> None: ...


class Publishing:
    __slots__ = (
        *("_bindings", "_settings", "_shared", "_tails"),
        *("gathering", "lines", "once", "works"),
    )

    def __init__(
        self,
        settings: Settings,
        shared: Shared,
        bindings: Bindings,
        tails: Watchers,
        known: KnownIds,
    ) -> None:
        self._settings = settings
        self._shared = shared
        self._bindings = bindings
        self._tails = tails
        self.once = Once(known, shared.pending)
        self.gathering = Gathering(self._publish_gathered)
        self.works: deque[Work[None]] = deque()
        """The works of the connection of the current chunk."""
        self.lines = 0
        """Lines of the current chunk: the maximum number of messages that can gather."""

    def group(self, permissions: Permissions | None, event: bytes) -> Group:
        """Open a group for an event without one; none if each message must be checked singly."""
        queues = self._gathers(permissions, event)
        return NO_GROUP if queues is None else self.gathering.open(event, queues)

    def flagged_group(
        self, permissions: Permissions | None, flag: bytes, rest: bytes
    ) -> tuple[Group, bytes]:
        """The group of a message with a flag; and the message's data."""
        if flag.startswith(_TRAITS) and (found := _traited(flag, rest)) is not None:
            event, data = found
            group = self.gathering.groups.get(event) or self.group(permissions, event)
            self.gathering.has_traits = True
            return group, data
        event, _, data = rest.partition(b" ")
        key = flag + b" " + event
        return self.gathering.groups.get(key) or self._flagged(permissions, key, event), data

    def _flagged(self, permissions: Permissions | None, key: bytes, event: bytes) -> Group:
        queues = self._gathers(permissions, event) if key.startswith(_GATHERED) else None
        if queues is None:
            return NO_GROUP
        try:
            wanted: Publish = ACTIONS[b"publish"].parse(key, 0)
        except BadRequest:
            return NO_GROUP
        if wanted.mandatory and is_nowhere(queues):
            return NO_GROUP
        return self.gathering.open(event, queues, key, wanted)

    def _gathers(self, permissions: Permissions | None, event: bytes) -> Queues | None:
        """The queues of an event; None if each of its messages must be checked singly."""
        shared = self._shared
        if (
            not 0 < len(event) <= self._settings.name_bytes_max
            or event[:2] == b"--"
            or shared.pending.unwritable
            or not (permissions is None or permissions.may_publish(event))
        ):
            return None
        queues = self._bindings.route(event)
        tight = self._tight(queues) if queues else None
        if tight and not all(queue.capacity.has_room(self.lines) for queue in tight):
            return None
        return queues

    def _tight(self, queues: Queues) -> set[Queue]:
        """Those of these queues that a chunk may fill."""
        tight = self._shared.capacities.tight
        return queues.keys() & tight.keys() if tight else set()

    def _publish_gathered(
        self, queues: Queues, ids: list[bytes], bodies: list[bytes], wanted: Publish | None
    ) -> None:
        terms = _TRAITED if self.gathering.has_traits else None
        if wanted is not None:
            terms, attributes = self._terms(wanted)
            if attributes:
                bodies = [body + attributes for body in bodies]
        self.put(queues, NewMessages(ids, bodies, terms), self.works)

    def put(self, queues: Queues, new: NewMessages, works: deque[Work[None]] | None = None) -> None:
        """Give all these messages to each queue: at once, or, if there are `works` of the
        connection, or very many queues, in a work after those. Without `works` always at once."""
        self._note(queues, new)
        if works is not None and (works or len(queues) >= GROUPS_QUEUES):
            works.append(self._route(queues, new))
            return
        for queue in queues:
            queue.put(new)

    def put_in_turns(self, queues: Queues, new: NewMessages) -> Work[None]:
        """Give all these messages to each queue. The first `ROUTE_QUEUES` have them at once."""
        self._note(queues, new)
        yield from self._route(queues, new)

    def _note(self, queues: Queues, new: NewMessages) -> None:
        """Count what is published, and show it to those who watch."""
        counters, count = self._shared.counters, len(new.ids)
        counters.published += count
        if not queues:
            counters.unroutable += count
        counters.queued += count * len(queues)
        if tails := self._tails.of_events:
            self._tails.show(tails, new.bodies)

    def _route(self, queues: Queues, new: NewMessages) -> Work[None]:
        """In queues that may become full the messages have their places from now on."""
        tight = self._tight(queues)
        size = sum(map(len, new.bodies)) if tight else 0
        for queue in tight:
            queue.capacity.reserve(len(new.ids), size)
        return self._route_in_turns(list(queues), tight, new, size)

    def _route_in_turns(
        self, queues: list[Queue], tight: set[Queue], new: NewMessages, size: int
    ) -> Work[None]:
        records_max = self._settings.batch_records_max + COPIES_MAX
        for some in slices(queues, max(1, min(ROUTE_QUEUES, STEP_COPIES // len(new.ids)))):
            for queue in some:
                if queue in tight:
                    queue.capacity.reserve(-len(new.ids), -size)
                queue.put(new)
                if queue.capacity.nearly_full:
                    # Consumers may have taken all: it is not full any more.
                    queue.deliver()
            yield self._shared.pending.records > records_max

    def now(self) -> Now:
        return self._shared.schedule.wall_us(), self._shared.schedule.clock_us()

    def single(self, message_id: bytes, wanted: Publish, now: Now | None = None) -> Single:
        """The message in its stored form, with its terms, which begin `now`."""
        event, data, once_s, *_ = wanted
        terms, attributes = self._terms(wanted, now)
        body = replies.body(message_id, event, data) + attributes
        return Single(message_id, event, body, terms, once_s)

    def _terms(self, wanted: Publish, now: Now | None = None) -> tuple[PublishTerms | None, bytes]:
        """The terms of a message, and the bytes after its text."""
        traits = wanted.traits
        meta, letter = wanted.meta, wanted.letter
        if not (wanted.delay_us or wanted.at_us or wanted.ttl_us or meta or traits or letter):
            return None, b""
        now_us, clock_us = now or self.now()
        due_us = now_us + wanted.delay_us if wanted.delay_us else wanted.at_us
        if due_us <= now_us:
            due_us = 0
        published = b"%d" % now_us if due_us else b""
        if letter:
            meta, published = self._shared.features.restored_letter(meta, letter)
        expires_us = (due_us or now_us) + wanted.ttl_us if wanted.ttl_us else 0
        due_clock_us = clock_us + wanted.delay_us if wanted.delay_us else 0
        terms = PublishTerms(due_us, wanted.at_us > 0, expires_us, due_clock_us)
        return terms, replies.Parts(b"", meta, published, traits).joined()

    def publish(self, connection: Connection, message: Single, queues: Queues) -> None:
        new = self._take(connection, message, queues)
        if new is not None:
            self.once.gather(new)
            self.put(queues, message.new, self.works)

    def publish_to(self, connection: Connection, message: Single, queues: Queues) -> None:
        """Publish in any turn, at once for each of a few queues: nothing is left to the end of a
        chunk, which may be another connection's."""
        new = self._take(connection, message, queues)
        if new is not None:
            self.put(queues, message.new)
            self.once.write(new)

    def find(self, message: Single) -> Work[Queues]:
        """The queues of a message, when routing takes long, or after unfinished `--once` works."""
        while True:
            queues = yield from self._bindings.find(message.event)
            if not (message.once_s and self.once.unfinished):
                return queues
            yield WAITS

    def publish_later(self, connection: Connection, message: Single, queues: Queues) -> Work[None]:
        """Like `publish`, in turns."""
        new = self._take(connection, message, queues)
        if new is not None:
            self.once.hold(new)
            yield from self.put_in_turns(queues, message.new)
            self.once.release(new)

    def is_new(self, connection: Connection, message_id: bytes, key: bytes) -> bool:
        """Take an id that may be published once, for the group with this key, unless no queue gets
        the message; return whether it was not known."""
        if key in self.gathering.nowhere:
            return not self.once.knows(connection, message_id)
        new = self.once.take(connection, message_id)
        if new is not None:
            self.once.gather(new)
        return new is not None

    def _take(self, connection: Connection, message: Single, queues: Queues) -> list[bytes] | None:
        """What is to be written of the id of a message, if anything; None if it is known, and the
        message dropped. The id of a message that no queue gets may come again."""
        if not message.once_s:
            return []
        if is_nowhere(queues):
            return None if self.once.knows(connection, message.id) else []
        return self.once.take(connection, message.id, message.once_s)

    def check(
        self, message: Single, queues: Queues, *, mandatory: bool, is_known: bool = False
    ) -> None:
        """Raise if a message must not be published to these queues now; a known id is published
        to none."""
        unwritable = self._shared.pending.unwritable
        if unwritable:
            raise Unwritable(f"{unwritable}: publishes are refused until the journal is writable")
        if is_known:
            return
        # Whoever publishes learns the reason, but not whose queue it is.
        where = f"in a queue bound to {shown(message.event)}"
        for queue in self._tight(queues):
            queue.capacity.check(len(message.body), where)
        if mandatory and is_nowhere(queues):
            raise BadRequest(f"publish: no queue is bound to {shown(message.event)}")

    def reserve(self, queues: Queues, size: int, count: int = 1) -> None:
        """Count a message of this size as on its way to those of these queues that it may fill; a
        `count` of -1 undoes it."""
        for queue in self._tight(queues):
            queue.capacity.reserve(count, count * size)


def _traited(flag: bytes, rest: bytes) -> tuple[bytes, bytes] | None:
    """The event of a publish with no other flags than these, and its data followed by attributes
    and traits; None if it must be parsed singly."""
    event, _, data = rest.partition(b" ")
    for _ in _TRAITS[1:]:
        if not event.startswith(_TRAITS):
            break
        flag = b"%b %b" % (flag, event)
        event, _, data = data.partition(b" ")
    try:
        attributes = _attributes(flag)
    except BadRequest:
        return None
    if replies.ESCAPED in attributes and (len(data) > ESCAPED_STEP_BYTES or not is_escaped(data)):
        return None
    return event, data + attributes


@lru_cache(maxsize=1024)
def _attributes(flags: bytes) -> bytes:
    """What these flags add to a message, see `replies.Parts`. Raises BadRequest."""
    found: dict[str, Any] = {}
    for flag in flags.split(b" "):
        ACTIONS[b"publish"].take(flag, found)
    wanted = Publish(b"", b"", **found)
    return replies.Parts(b"", wanted.meta, b"", wanted.traits).joined()
