"""Takes runs of acks, or of rejects, to one consumer from the lines of a chunk, and does them.

The one rule: a line that is rare or wrong is not taken, and a run is done before it.
"""

from collections.abc import Sequence
from operator import length_hint

from mqks.broker.broker import Broker
from mqks.broker.requests.returning import ack, reject_gathered
from mqks.broker.spine.clients.connection import Connection
from mqks.protocol.requests import CONFIRM
from mqks.users import STRANGER, Permissions

PLAIN = b"."
"""An argument that sorts before it may be empty, or a flag."""


class GatheredSettles:
    """It is full at the end of the lines that it gets: nothing stays gathered."""

    __slots__ = ("_broker",)

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def take(
        self,
        connection: Connection,
        lines: Sequence[bytes],
        start: int,
        end: int,
        confirms: list[bytes],
    ) -> int:
        """Do the acks, or rejects, to one consumer that these lines begin with; return the number
        of the line after them. The ids of those that are to be confirmed join `confirms`.

        An ack takes 270 ns here: `python -m benchmarks.budget`.
        """
        broker, name_bytes_max = self._broker, self._broker.metadata.name_bytes_max
        verb, consumer, settled = b"ack", None, list[bytes]()
        block = iter(lines[start:end] if end - start < len(lines) else lines)
        for line in block:
            try:
                request_id, action, argument, rest = line.split(b" ", 3)
            except ValueError:
                action = b""
            if (
                action == verb
                and argument == consumer
                and rest >= PLAIN
                and b" " not in rest
                and 0 < len(request_id) <= name_bytes_max
            ):
                settled.append(rest)
                continue
            is_own = action == b"ack" or action == b"reject"
            confirm = is_own and argument == CONFIRM
            if confirm:
                argument, _, rest = rest.partition(b" ")
            if is_own and consumer is None and self._may_take(connection, action, argument):
                verb, consumer = action, argument
            if not (
                is_own
                and action == verb
                and argument == consumer
                and rest >= PLAIN
                and b" " not in rest
                and 0 < len(request_id) <= name_bytes_max
                # The confirm of one must say whether it is durable, see `returning.ack`.
                and not (confirm and broker.pending.unwritable)
            ):
                end -= 1
                break
            settled.append(rest)
            if confirm:
                confirms.append(request_id)
        if settled and consumer is not None:
            if verb == b"ack":
                ack(broker, consumer, settled)
            elif not broker.turns.run(work := reject_gathered(broker, consumer, settled)):
                connection.works.append(work)
        return end - length_hint(block)

    def _may_take(self, connection: Connection, verb: bytes, consumer: bytes) -> bool:
        """Whether acks or rejects of this consumer are done without parsing each."""
        return (
            not connection.works
            and consumer != b""
            and consumer[:2] != b"--"
            and not (verb == b"reject" and self._broker.pending.unwritable)
            and (connection.permissions is None or self._may_ack(connection.permissions, consumer))
        )

    def _may_ack(self, permissions: Permissions, consumer_id: bytes) -> bool:
        """Whether a user may ack messages of this consumer; a missing consumer is allowed."""
        if permissions is STRANGER:
            return False
        consumer = self._broker.consumers.get(consumer_id)
        return consumer is None or permissions.may_consume(consumer.queue.name)
