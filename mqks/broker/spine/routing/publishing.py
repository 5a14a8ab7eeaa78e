"""Publishes the messages of a chunk to the queues: gathers them, until they are published in one
step.

The one rule: each queue gets the messages of a connection in their order, and of those published
with `--once` only the first with an id.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from functools import lru_cache
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from mqks.audit import Who
from mqks.broker.spine.base.turns import WAITS, Work, slices
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.log.pending import Pending
from mqks.broker.spine.queue.queue import NewMessages, PublishTerms, Queue
from mqks.broker.spine.queue.seams import UniqueClaim
from mqks.broker.spine.queue.shared import Shared
from mqks.broker.spine.routing.bindings import Bindings
from mqks.broker.spine.routing.masks import Queues
from mqks.errors import BadRequest, ReadOnly, Unwritable
from mqks.limits import (
    COPIES_MAX,
    ESCAPED_STEP_BYTES,
    GROUPS_COPIES_MAX,
    GROUPS_QUEUES,
    ROUTE_QUEUES,
    STEP_COPIES,
)
from mqks.protocol import replies
from mqks.protocol.escapes import is_escaped
from mqks.protocol.requests import ACTIONS, Publish, shown
from mqks.settings import Settings
from mqks.users import Permissions

_GATHERED: Final = b"--ttl=", b"--delay=", b"--at=", b"--mandatory ", b"--to=", b"--batch="
"""Flags that many messages have with the same value, so that they share their terms."""
_TRAITS: Final = b"--escaped", b"--priority=", b"--key=", b"--meta="
"""Flags of single messages, which gather with those of their event that have none."""
_TRAITED: Final = PublishTerms()


Group = tuple[bytes | None, bytes, list[bytes], list[bytes]]
"""The key in `Gathering.groups`, the bytes between id and data, ids and bodies."""
Gathered = tuple[Queues, list[bytes], list[bytes], Publish | None]
"""The queues, the ids and bodies of all events that go there, and the flags of these messages."""
NO_GROUP: Final[Group] = None, b"", [], []


# Most chunks publish a few events again and again. Then a line costs one look-up of its event, and
# the queues get lists. Messages for one queue must keep their order: so events with the same queues
# share one list, and one that shares only some of them, or has other flags, ends the gathering.


class Gathering:
    """Messages of a chunk until they are published in one step. `publish` takes them then."""

    def __init__(
        self, publish: Callable[[Queues, list[bytes], list[bytes], Publish | None], None]
    ) -> None:
        self._publish = publish
        self._groups: list[Gathered] = []
        self.groups: dict[bytes, Group] = {}
        """Current groups by event, preceded by the flags of the publish, if any."""
        self.nowhere: set[bytes] = set()
        """Keys of groups whose messages no queue gets."""
        self._by_queue: dict[Queue, Gathered] = {}
        self.width = 1
        """One plus the number of queues of the groups."""
        self.has_traits = False
        """Whether some of the messages have traits."""

    def open(
        self, event: bytes, queues: Queues, key: bytes = b"", flags: Publish | None = None
    ) -> Group:
        """Open a group for an event with these queues. `key`: the event preceded by its flags, as
        they were written."""
        gathered = next(filter(None, map(self._by_queue.get, queues)), None)
        if gathered is None or gathered[0] != queues or flags != gathered[3]:
            if gathered is not None or (self._groups and self.width + len(queues) > GROUPS_QUEUES):
                self.flush()
            gathered = queues, [], [], flags
            self._groups.append(gathered)
            self.width += len(queues)
            self._by_queue.update(dict.fromkeys(queues, gathered))
        key = key or event
        if is_nowhere(queues):
            self.nowhere.add(key)
        group = self.groups[key] = key, b" event=%b " % event, gathered[1], gathered[2]
        return group

    def leads_to(self, queues: Collection[object]) -> bool:
        """Whether anything is gathered for one of these queues."""
        return bool(queues) and not self._by_queue.keys().isdisjoint(queues)

    @property
    def copies_max(self) -> int:
        """Maximum of gathered messages times queues."""
        return GROUPS_COPIES_MAX if self.width <= GROUPS_QUEUES else COPIES_MAX

    def flush(self) -> None:
        for queues, ids, bodies, flags in self._groups:
            if ids:
                self._publish(queues, ids, bodies, flags)
        self._groups.clear()
        self.groups.clear()
        self.nowhere.clear()
        self._by_queue.clear()
        self.width, self.has_traits = 1, False


def is_nowhere(queues: Queues) -> bool:
    """Whether no queue that exists is among these of an event."""
    return all(queue.deleted for queue in queues)


class KnownIds(Protocol):
    """Ids that were published with `--once`."""

    def knows(self, message_id: bytes) -> bool: ...

    def add(self, message_id: bytes, for_s: float = inf) -> bytes | None:
        """Remember an id; return what the journal has of it, or None if it was known."""


# An id is written with its message or after it, never before: an id that is durable without its
# message would block the message permanently. It is remembered at once, so that of two messages in
# one chunk only the first is published.


class Once:
    """Alone remembers ids, and alone writes them."""

    def __init__(self, known: KnownIds, pending: Pending) -> None:
        self._known = known
        self._pending = pending
        self._gathered: list[bytes] = []
        """Those of the messages that the current chunk gathers."""
        self.unfinished = 0
        """Number of works with ids that are known but not written yet: a second publish of such an
        id must not be confirmed before the first."""

    def knows(self, connection: Connection, message_id: bytes) -> bool:
        return self._known.knows(connection.once_id(message_id))

    def take(
        self, connection: Connection, message_id: bytes, for_s: float = inf
    ) -> list[bytes] | None:
        """Remember an id; return what is to be written of it, or None if it was known."""
        new = self._known.add(connection.once_id(message_id), for_s)
        return None if new is None else [new]

    def gather(self, new: list[bytes]) -> None:
        """These are of messages that the chunk gathers."""
        self._gathered += new

    def take_gathered(self) -> list[bytes]:
        """Those of the chunk, which ends, or whose messages are published."""
        gathered, self._gathered = self._gathered, []
        return gathered

    def write(self, new: list[bytes]) -> None:
        """Write these with the next commit."""
        if new:
            self._pending.entry.once += new
            self._pending.records += len(new)

    def hold(self, new: list[bytes]) -> None:
        """Messages with these ids are published in turns: the ids are written when that ends."""
        self.unfinished += bool(new)

    def release(self, held: list[bytes]) -> None:
        self.unfinished -= bool(held)
        self.write(held)


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


class Watchers(Protocol):
    """Who is shown what is published."""

    of_events: tuple[Any, ...]
    """Those of all events."""

    def show(self, tails: tuple[Any, ...], lines: list[bytes]) -> None: ...


class PublishTracer(Protocol):
    def published(self, who: Who | None, queues: Queues, new: NewMessages) -> None:
        """Somebody, or a schedule, has published messages to these queues."""


class Publishing:
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
        self.publisher: Connection | None = None
        """Whose messages follow; none's, those of schedules."""
        self.tracer: PublishTracer | None = None
        """While it is there, messages of several connections are not published together."""
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
        if flag.startswith(_TRAITS) and (traited := _traited(flag, rest)) is not None:
            event, data = traited
            group = self.gathering.groups.get(event) or self.group(permissions, event)
            self.gathering.has_traits = True
            return group, data
        event, _, data = rest.partition(b" ")
        key = flag + b" " + event
        return self.gathering.groups.get(key) or self._flagged(permissions, key, event), data

    def _flagged(self, permissions: Permissions | None, key: bytes, event: bytes) -> Group:
        if not key.startswith(_GATHERED):
            return NO_GROUP
        try:
            # Without the event: those of several events that have the same flags gather together.
            flags: Publish = ACTIONS[b"publish"].parse(key, 0)._replace(event=b"")
        except BadRequest:
            return NO_GROUP  # The line is handled singly, and gets its error.
        queues = self._gathers(permissions, event, flags.to)
        if queues is None or (flags.mandatory and is_nowhere(queues)):
            return NO_GROUP
        if flags.batch and (permissions is not None or not self._batch(flags)):
            return NO_GROUP
        return self.gathering.open(event, queues, key, flags)

    def _gathers(
        self, permissions: Permissions | None, event: bytes, to: bytes | None = None
    ) -> Queues | None:
        """The queues of an event, or that to which its messages go; None if each of them must be
        checked singly."""
        shared = self._shared
        if (
            not 0 < len(event) <= self._settings.name_bytes_max
            or event[:2] == b"--"
            or shared.pending.unwritable
            or shared.read_only
            or not (permissions is None or permissions.may_publish(event))
            or not (permissions is None or to is None or permissions.may_consume(to))
        ):
            return None
        if to is None:
            queues = self._bindings.route(event)
        else:
            queue = self._bindings.queues.get(to)
            queues = None if queue is None else {queue: None}
        tight = self._tight(queues) if queues else None
        if tight and not all(queue.capacity.has_room(self.lines) for queue in tight):
            return None
        return queues

    def _tight(self, queues: Queues) -> set[Queue]:
        """Those of these queues that a chunk may fill."""
        tight = self._shared.capacities.tight
        return queues.keys() & tight.keys() if tight else set()

    def _publish_gathered(
        self, queues: Queues, ids: list[bytes], bodies: list[bytes], flags: Publish | None
    ) -> None:
        terms = _TRAITED if self.gathering.has_traits else None
        if flags is not None:
            terms, attributes = self._terms(flags)
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
        if self.tracer is not None:
            who = None if self.publisher is None else self.publisher.who
            self.tracer.published(who, queues, new)

    def _route(self, queues: Queues, new: NewMessages) -> Work[None]:
        """In queues that may become full the messages have their places from now on: the next
        publish must not be told that there is room for it, too."""
        tight = self._tight(queues)
        size = sum(map(len, new.bodies)) if tight else 0
        for queue in tight:
            queue.capacity.reserve(len(new.ids), size)
        return self._route_in_turns(list(queues), tight, new, size)

    def _route_in_turns(
        self, queues: list[Queue], tight: set[Queue], new: NewMessages, size: int
    ) -> Work[None]:
        # The writer takes a batch between two steps, so a message for 100,000 queues waits for it:
        # otherwise all its copies would be in memory at once.
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

    def single(self, message_id: bytes, publish: Publish, now: Now | None = None) -> Single:
        """The message in its stored form, with its terms, which begin `now`. Raises BadRequest if
        its batch does not exist."""
        if publish.batch and not self._batch(publish):
            raise BadRequest(f"publish: there is no batch {shown(publish.batch)}")
        terms, attributes = self._terms(publish, now)
        body = replies.body(message_id, publish.event, publish.data) + attributes
        return Single(message_id, publish.event, body, terms, publish.once_s)

    def _batch(self, publish: Publish) -> int:
        """The number of its batch; 0: it has none, or that does not exist."""
        members = self._shared.pending.members
        return members.number(publish.batch) if members and publish.batch else 0

    def _terms(self, publish: Publish, now: Now | None = None) -> tuple[PublishTerms | None, bytes]:
        """The terms of a message, and the bytes after its text."""
        traits, meta, letter = publish.traits, publish.meta, publish.letter
        times = publish.delay_us or publish.at_us or publish.ttl_us
        if not (times or meta or traits or letter or publish.batch):
            return None, b""
        now_us, clock_us = now or self.now()
        due_us = now_us + publish.delay_us if publish.delay_us else publish.at_us
        if due_us <= now_us:
            due_us = 0
        # When it is due it gets a new number, whose time is not that of the publish.
        unique = None if letter else publish.unique
        published = b"%d" % now_us if due_us or (unique and unique.for_us) else b""
        if letter:
            meta, published = self._shared.features.restored_letter(meta, letter)
        expires_us = (due_us or now_us) + publish.ttl_us if publish.ttl_us else 0
        due_clock_us = clock_us + publish.delay_us if publish.delay_us else 0
        batch, claim = self._batch(publish), unique and UniqueClaim(unique)
        terms = PublishTerms(due_us, publish.at_us > 0, expires_us, due_clock_us, batch, claim)
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
        self.publisher = connection
        if not message.once_s:
            return []
        if next(self.takers(message, queues), None) is None:
            return None if self.once.knows(connection, message.id) else []
        return self.once.take(connection, message.id, message.once_s)

    def takers(self, message: Single, queues: Queues) -> Iterator[Queue]:
        """Those of these queues that will have the message: of a unique one not all may."""
        takes, claim = self._shared.features.unique.takes, message.claim
        for queue in queues:
            if not queue.deleted and (claim is None or takes(queue, claim)):
                yield queue

    def read_keys(self, message: Single, queues: Queues) -> Work[None]:
        """Wait until it is known whether other messages have the key of a unique one."""
        if message.claim is not None:
            yield from self._shared.features.unique.read(queues)

    def check(
        self, message: Single, queues: Queues, *, mandatory: bool, is_known: bool = False
    ) -> None:
        """Raise if a message must not be published to these queues now; a known id is published
        to none."""
        if self._shared.read_only:
            raise ReadOnly
        unwritable = self._shared.pending.unwritable
        if unwritable:
            raise Unwritable(f"{unwritable}: publishes are refused until the journal is writable")
        if is_known:
            return
        # Whoever publishes learns the reason, but not whose queue it is.
        where, size = f"in a queue bound to {shown(message.event)}", len(message.body)
        is_new, claim = self._shared.features.unique.is_new, message.claim
        # Several of them may have a limit together: each leaves so much less to the next one.
        # Nobody waits for a queue while another one refuses.
        tight = sorted(self._tight(queues), key=lambda queue: queue.capacity.waits)
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
    fields: dict[str, Any] = {}
    for flag in flags.split(b" "):
        ACTIONS[b"publish"].take(flag, fields)
    publish = Publish(b"", b"", **fields)
    return replies.Parts(b"", publish.meta, b"", publish.traits).joined()
