"""Messages on their way from a chunk to the queues.

The one rule: each queue gets the messages of a connection in the order in which they came, and of
those published once only the first of an id.
"""

from collections import deque
from typing import TYPE_CHECKING

from mqks.broker.bindings import NOWHERE
from mqks.broker.connection import Connection
from mqks.broker.gathering import NO_GROUP, Gathering, Group
from mqks.broker.queue import Queue
from mqks.broker.turns import WAITS, Work, slices
from mqks.errors import BadRequest, LimitExceeded, Unwritable
from mqks.limits import COPIES_MAX, GROUPS_QUEUES, ROUTE_QUEUES, STEP_COPIES
from mqks.protocol.requests import shown
from mqks.users import Permissions

if TYPE_CHECKING:
    from mqks.broker.broker import Broker


class Publishing:
    __slots__ = ("_broker", "gathering", "once_ids", "once_unfinished", "works")

    def __init__(self, broker: "Broker") -> None:
        self._broker = broker
        self.gathering = Gathering(broker.bindings, self._publish)
        self.works: deque[Work[None]] = deque()
        """Those of the connection whose chunk is in hand."""
        self.once_ids: list[bytes] = []
        """Of the chunk in hand."""
        self.once_unfinished = 0
        """Works after which ids last that are known already: who publishes one of them again must
        not be confirmed before the first."""

    def group(self, permissions: Permissions | None, event: bytes) -> Group:
        """Where messages of an event gather that has no group; none if each is to be looked at."""
        broker = self._broker
        if (
            not 0 < len(event) <= broker.metadata.name_bytes_max
            or event[:2] == b"--"
            or broker.unwritable
            or not (permissions is None or permissions.may_publish(event))
            or (broker.shared.full_queues and self._full_queue(event))
        ):
            return NO_GROUP
        return self.gathering.open(event)

    def _full_queue(self, event: bytes) -> Queue | None:
        """A queue that is bound to it and full."""
        queues = self._broker.bindings.routes.get(event, NOWHERE)
        return next(iter(queues.keys() & self._broker.shared.full_queues.keys()), None)

    def _publish(self, event: bytes, ids: list[bytes], bodies: list[bytes]) -> None:
        """Route messages of one event; each queue bound to it gets all of them, in later turns
        when there are very many, and then before all that the connection publishes next."""
        queues = self._count(event, len(ids))
        if self.works or len(queues) >= GROUPS_QUEUES:
            self.works.append(self._route(list(queues), ids, bodies))
            return
        for queue in queues:
            queue.publish(ids, bodies)

    def _count(self, event: bytes, count: int) -> dict[Queue, None]:
        """So many messages are published; return where to."""
        broker = self._broker
        broker.published += count
        queues = broker.bindings.routes.get(event, NOWHERE)
        if not queues:
            broker.unroutable += count
        broker.queued += count * len(queues)
        return queues

    def _route(self, queues: list[Queue], ids: list[bytes], bodies: list[bytes]) -> Work[None]:
        broker = self._broker
        for some in slices(queues, max(1, min(ROUTE_QUEUES, STEP_COPIES // len(ids)))):
            for queue in some:
                queue.publish(ids, bodies)
            yield broker.pending.records > broker.settings.batch_records_max + COPIES_MAX

    def publish(
        self, connection: Connection, event: bytes, message_id: bytes, body: bytes, *, once: bool
    ) -> Work[None] | None:
        """Publish a message; `once`: unless its user has published one of this id so before."""
        if once and self.once_unfinished:
            return self._publish_later(connection, event, message_id, body)
        if not once or self.is_new(connection, message_id):
            self._publish(event, [message_id], [body])
        return None

    def _publish_later(
        self, connection: Connection, event: bytes, message_id: bytes, body: bytes
    ) -> Work[None]:
        while self.once_unfinished:
            yield WAITS
        once_id = connection.once_id(message_id)
        if self._broker.once.add(once_id):
            self.once_unfinished += 1
            yield from self._route(list(self._count(event, 1)), [message_id], [body])
            self.once_unfinished -= 1
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

    def check_room(self, event: bytes, *, is_known: bool) -> None:
        """Raise what forbids publishing to an event now; what is known goes to no queue again."""
        broker = self._broker
        if broker.unwritable:
            raise Unwritable(
                f"{broker.unwritable}: nothing can be published until that has changed"
            )
        queue = None if is_known else self._full_queue(event)
        if queue is not None:
            raise LimitExceeded(
                "queue_messages_max",
                # Whoever publishes is told the reason, but not whose queue it is.
                f"{queue.messages_max} messages wait in a queue bound to {shown(event)}",
            )

    def check_route(self, event: bytes) -> None:
        """Raise if a message of this event would go nowhere."""
        if all(queue.deleted for queue in self._broker.bindings.routes.get(event, NOWHERE)):
            raise BadRequest(f"publish: no queue is bound to {shown(event)}")
