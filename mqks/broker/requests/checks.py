"""What several actions check before they change anything."""

from typing import TypeVar

from mqks.broker.broker import Broker
from mqks.broker.spine.base.turns import Work
from mqks.broker.spine.clients.connection import Connection
from mqks.broker.spine.queue.queue import Queue
from mqks.errors import BadRequest, ReadOnly, Unwritable
from mqks.protocol.requests import Request, shown

T = TypeVar("T")
Doing = Work[int | bytes | None] | None
"""Work for later turns, or None; a number or text that it returns is put into the confirm."""


NOTHING = b"none"
"""Told by what has changed nothing, where a number would not say enough."""


class Effect(int):
    """What a request has changed, for the audit: so many messages or bindings, or something else;
    negative if nothing. Its confirm does not tell it."""

    __slots__ = ()

    @classmethod
    def of(cls, count: int, *others: bool) -> "Effect":
        return cls(count if count or any(others) else -1)


Effects = Work[Effect]


def name_of(connection: Connection) -> str:
    """Who has done something, as others are told."""
    return connection.address if connection.user is None else f"user {connection.user}"


def check_writable(broker: Broker, request: Request) -> None:
    if request.confirm and broker.unwritable:
        raise Unwritable(f"{broker.unwritable}: the new place of the message would not be durable")


def check_durable(broker: Broker, is_durable: bool) -> None:
    if broker.unwritable and not is_durable:
        raise Unwritable(f"{broker.unwritable}: the place of a message is not durable")


def dropped(broker: Broker, name: bytes, work: Work[T], *, confirm: bool) -> Work[T]:
    """Do what drops messages of this queue. With `confirm` it raises as `ack`."""
    queue = broker.queues.get(name)
    is_durable = True
    if queue is not None:
        # They may have come here from another place that the journal still has.
        is_new = queue.lane.next_seq > queue.lane.taken_end
        may_have_moved = is_new and (queue.lane.moved or broker.pending.in_one_piece)
        is_durable = not (may_have_moved or queue.lane.members)
    told = yield from work
    if confirm:
        check_durable(broker, is_durable)
    return told


def check_not_read_only(broker: Broker) -> None:
    if broker.shared.read_only:
        raise ReadOnly


def existing(broker: Broker, action: str, name: bytes) -> Queue:
    queue = broker.queues.get(name)
    if queue is None:
        raise BadRequest(f"{action}: there is no queue {shown(name)}")
    return queue


def check_epoch(broker: Broker, action: str, queue: Queue, epoch: bytes | None) -> None:
    if epoch is not None and epoch != broker.shared.facts.epoch_of(queue.id).encode():
        raise BadRequest(f"{action}: the queue was created again: its epoch is not {shown(epoch)}")
