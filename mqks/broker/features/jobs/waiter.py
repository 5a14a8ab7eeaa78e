"""A request `result` that waits for the end of a message.

The one rule: it leaves with its connection, is counted with the waiting receives, and tells a
client that does not read nothing before it reads again.
"""

from typing import Protocol

from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.order import Rest, Taker
from mqks.protocol import replies


class Waited(Protocol):
    """The `Results` that it waits for."""

    def told(self, message_id: bytes) -> bytes: ...
    def is_ending(self, message_id: bytes) -> bool: ...
    def leave(self, waiter: "ResultWaiter") -> None: ...


class ResultWaiter(Taker):
    __slots__ = ("_results", "connection", "message_id", "timer")

    def __init__(
        self, request_id: bytes, connection: Connection, message_id: bytes, results: Waited
    ) -> None:
        super().__init__(request_id, manual_ack=False)
        self.connection, self.message_id = connection, message_id
        self.timer: int | None = None
        """The entry in the schedule that ends its wait."""
        self._results = results
        connection.receivers[self] = None
        connection.flow.receivers += 1

    def _stop(self) -> None:
        """It waits for its connection."""

    def _go_on(self) -> None:
        self.tell()

    def tell(self) -> None:
        connection = self.connection
        if connection.rests and not connection.closed:
            self.rest(Rest.SLOW)
            return
        self._results.leave(self)
        if connection.receivers.pop(self, self) is None:
            connection.flow.receivers -= 1
            if not connection.closed:
                connection.write(replies.ok(self.id, self._results.told(self.message_id)))

    def waited(self) -> None:
        """Its time is over, or its client sends no more. An end that is not durable yet is told
        soon."""
        self.timer = None
        self.leave()

    def leave(self) -> None:
        if self.connection.closed or not self._results.is_ending(self.message_id):
            self.tell()
