"""Messages on their way from a chunk to the queues.

The one rule: each queue gets the messages of a connection in the order in which they came, and of
those published once only the first of an id.
"""

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from mqks.broker.connection import Connection
from mqks.broker.gathering import NO_GROUP, Gathering, Group
from mqks.broker.letters import Parts
from mqks.broker.masks import Queues
from mqks.broker.queue import Queue, Terms
from mqks.broker.turns import WAITS, Work, slices
from mqks.errors import BadRequest, LimitExceeded, Unwritable
from mqks.limits import COPIES_MAX, GROUPS_QUEUES, ROUTE_QUEUES, STEP_COPIES
from mqks.protocol import replies
from mqks.protocol.requests import Publish, parse_publish, shown
from mqks.users import Permissions

if TYPE_CHECKING:
    from mqks.broker.broker import Broker


_GATHERED: Final = b"--ttl=", b"--delay=", b"--at="
"""Many messages have the same, and so the same terms."""


class Single(NamedTuple):
    """A message that is published by itself."""

    id: bytes
    event: bytes
    body: bytes
    terms: Terms | None
    once: bool
    """Unless its user has published one of this id so before."""


class Publishing:
    __slots__ = ("_broker", "gathering", "lines", "once_ids", "once_unfinished", "works")

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self.gathering = Gathering(self._publish_gathered)
        self.works: deque[Work[None]] = deque()
        """Those of the connection whose chunk is in hand."""
        self.lines = 0
        """Of the chunk in hand: no more messages can gather."""
        self.once_ids: list[bytes] = []
        """Of the chunk in hand."""
        self.once_unfinished = 0
        """Works after which ids last that are known already: who publishes one of them again must
        not be confirmed before the first."""

    def group(self, permissions: Permissions | None, event: bytes) -> Group:
        """Where messages of an event gather that has no group; none if each is to be looked at."""
        queues = self._gathers(permissions, event)
        return NO_GROUP if queues is None else self.gathering.open(event, queues)

    def flagged_group(
        self, permissions: Permissions | None, flag: bytes, rest: bytes
    ) -> tuple[Group, bytes]:
        """The same of a message with a flag; return the message's data, too."""
        event, _, data = rest.partition(b" ")
        key = flag + b" " + event
        return self.gathering.groups.get(key) or self._flagged(permissions, key, event), data

    def _flagged(self, permissions: Permissions | None, key: bytes, event: bytes) -> Group:
        queues = self._gathers(permissions, event) if key.startswith(_GATHERED) else None
        if queues is None:
            return NO_GROUP
        try:
            wanted = parse_publish(key)
        except BadRequest:
            return NO_GROUP
        return self.gathering.open(event, queues, key, wanted)

    def _gathers(self, permissions: Permissions | None, event: bytes) -> Queues | None:
        """The queues of an event; None if each of its messages is to be looked at."""
        broker = self._broker
        if (
            not 0 < len(event) <= broker.metadata.name_bytes_max
            or event[:2] == b"--"
            or broker.unwritable
            or not (permissions is None or permissions.may_publish(event))
        ):
            return None
        queues = broker.bindings.route(event)
        if (
            queues is None
            or (broker.shared.near_queues and self._near(queues))
            or (broker.shared.limited_queues and self._limited(queues))
        ):
            return None
        return queues

    def _full_queue(self, queues: Queues) -> Queue | None:
        """One of them that is full, or will be with what is on its way there."""
        shared = self._broker.shared
        if full := queues.keys() & shared.full_queues.keys():
            return full.pop()
        near = queues.keys() & shared.near_queues.keys()
        return next((queue for queue in near if queue.room <= 0), None)

    def _near(self, queues: Queues) -> bool:
        """Whether one of them is full, or the messages of this chunk could be too many for it."""
        near = queues.keys() & self._broker.shared.near_queues.keys()
        return any(queue.full or queue.room < self.lines for queue in near)

    def _limited(self, queues: Queues) -> set[Queue]:
        """Those of them of which a policy says how much may wait."""
        return queues.keys() & self._broker.shared.limited_queues.keys()

    def _publish_gathered(
        self, queues: Queues, ids: list[bytes], bodies: list[bytes], wanted: Publish | None
    ) -> None:
        if wanted is None:
            self._publish(queues, ids, bodies)
            return
        terms, attributes = self._terms(wanted)
        if attributes:
            bodies = [body + attributes for body in bodies]
        self._publish(queues, ids, bodies, terms)

    def _publish(
        self, queues: Queues, ids: list[bytes], bodies: list[bytes], terms: Terms | None = None
    ) -> None:
        """Each queue gets all of these messages, in later turns when there are very many, and then
        before all that the connection publishes next. `terms` are those of all of them."""
        self._count(queues, len(ids))
        if self.works or len(queues) >= GROUPS_QUEUES:
            self.works.append(self._route(queues, ids, bodies, terms))
            return
        for queue in queues:
            _append(queue, ids, bodies, terms)

    def _count(self, queues: Queues, count: int) -> None:
        """So many messages are published."""
        broker = self._broker
        broker.published += count
        if not queues:
            broker.unroutable += count
        broker.queued += count * len(queues)

    def _route(
        self, queues: Queues, ids: list[bytes], bodies: list[bytes], terms: Terms | None
    ) -> Work[None]:
        """In queues that may become full the messages have their places from now on."""
        shared = self._broker.shared
        tight = (queues.keys() & shared.near_queues.keys()) | self._limited(queues)
        size = sum(map(len, bodies)) if tight else 0
        for queue in tight:
            queue.reserve(len(ids), size)
        return self._route_in_turns(list(queues), tight, ids, bodies, terms)

    def _route_in_turns(
        self,
        queues: list[Queue],
        tight: set[Queue],
        ids: list[bytes],
        bodies: list[bytes],
        terms: Terms | None,
    ) -> Work[None]:
        broker, size = self._broker, sum(map(len, bodies)) if tight else 0
        for some in slices(queues, max(1, min(ROUTE_QUEUES, STEP_COPIES // len(ids)))):
            for queue in some:
                if queue in tight:
                    queue.reserve(-len(ids), -size)
                _append(queue, ids, bodies, terms)
            yield broker.pending.records > broker.settings.batch_records_max + COPIES_MAX

    def single(self, message_id: bytes, wanted: Publish) -> Single:
        """The message as queues hold it, and what is said of it."""
        event, data, once, *_ = wanted
        terms, attributes = self._terms(wanted)
        body = replies.body(message_id, event, data) + attributes
        return Single(message_id, event, body, terms, once)

    def _terms(self, wanted: Publish) -> tuple[Terms | None, bytes]:
        """What is said of a message, and what is behind its text."""
        if not (wanted.delay_us or wanted.at_us or wanted.ttl_us or wanted.meta):
            return None, b""
        schedule = self._broker.schedule
        now_us = schedule.wall_us()
        due_us = now_us + wanted.delay_us if wanted.delay_us else wanted.at_us
        if due_us <= now_us:
            due_us = 0
        published = b"%d" % now_us if due_us else b""
        expires_us = (due_us or now_us) + wanted.ttl_us if wanted.ttl_us else 0
        clock_us = schedule.clock_us() + wanted.delay_us
        terms = Terms(due_us, wanted.at_us > 0, expires_us, clock_us)
        return terms, Parts(b"", wanted.meta, published).joined()

    def publish(self, connection: Connection, message: Single, queues: Queues) -> None:
        if not message.once or self.is_new(connection, message.id):
            self._publish(queues, [message.id], [message.body], message.terms)

    def find(self, message: Single) -> Work[Queues]:
        """Where a message goes, when the way there is long or others are published once."""
        while True:
            queues = yield from self._broker.bindings.find(message.event)
            if not (message.once and self.once_unfinished):
                return queues
            yield WAITS

    def publish_later(self, connection: Connection, message: Single, queues: Queues) -> Work[None]:
        """The same as `publish` in turns."""
        message_id, _, body, terms, once = message
        once_id = connection.once_id(message_id)
        if once and not self._broker.once.add(once_id):
            return
        self.once_unfinished += once
        self._count(queues, 1)
        yield from self._route(queues, [message_id], [body], terms)
        self.once_unfinished -= once
        if once:
            self.last_once([once_id])

    def last_once(self, once_ids: list[bytes]) -> None:
        """These ids are remembered after the next commit."""
        pending = self._broker.pending
        pending.entry.once += once_ids
        pending.records += len(once_ids)

    def is_known(self, connection: Connection, message_id: bytes) -> bool:
        """Whether this message would not be published once more."""
        return connection.once_id(message_id) in self._broker.once

    def is_new(self, connection: Connection, message_id: bytes) -> bool:
        """Remember an id that may be published once; return whether it was not known."""
        once_id = connection.once_id(message_id)
        if not self._broker.once.add(once_id):
            return False
        self.once_ids.append(once_id)
        return True

    def check_room(self, message: Single, queues: Queues, *, is_known: bool) -> None:
        """Raise what forbids publishing a message, which goes to these queues, now; what is known
        goes to no queue again."""
        broker = self._broker
        if broker.unwritable:
            raise Unwritable(
                f"{broker.unwritable}: publishes are refused until the journal is writable"
            )
        if is_known:
            return
        # Whoever publishes learns the reason, but not whose queue it is.
        where, size = f"in a queue bound to {shown(message.event)}", len(message.body)
        for queue in self._limited(queues):
            if reason := queue.no_room(size):
                raise LimitExceeded("messages_max", f"{reason} {where}")
        full = self._full_queue(queues)
        if full is not None:
            waiting, most = full.messages_max - full.room, full.messages_max
            reason = f"queue_messages_max is {most}, and {waiting} messages wait {where}"
            if waiting < most:
                reason += f"; it accepts messages again below {full.messages_max_again}"
            raise LimitExceeded("queue_messages_max", reason)

    def check_route(self, event: bytes, queues: Queues) -> None:
        """Raise if a message of this event, which goes to these queues, would go nowhere."""
        if all(queue.deleted for queue in queues):
            raise BadRequest(f"publish: no queue is bound to {shown(event)}")


def _append(queue: Queue, ids: list[bytes], bodies: list[bytes], terms: Terms | None) -> None:
    if terms is None:
        queue.publish(ids, bodies)
    else:
        queue.publish_on(ids, bodies, terms)
